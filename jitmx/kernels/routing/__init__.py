"""`routing`: the k experts of each token, their weights, and lists of tokens by expert for grouped products.

Kernels:
    route   logits from hidden states and router weights (RMSNorm and bias on the way), choice, and lists if asked for
    many    the same for many tokens in bf16, without norm and lists
    topk    choice from logits that are given, and lists if asked for
    sort    lists from ids that are given

Shapes: x [m, h], W [experts, h], logits [m, experts], ids and weights [m, k]. Equal logits go by ids; a NaN is chosen
only where numbers run out, and counts as -inf in the softmax. With E the number of local experts the lists are
    pairs     [m * k]        token * k + slot, by local expert, in the order of the tokens; -1 past the last
    offsets   [E + 1]        where each expert's pairs start
    schedule  [capacity, 4]  tiles of at most `tile` rows: local expert, first row, rows, number within the expert; an
                             expert of -1 past the last
    tiles     [1]            how many tiles there are

Sums are in fp32. x in fp16 is taken as the sum of two bf16 numbers, which is exact. With the norm, x * norm is rounded
to bf16 once (in fp16: to two such numbers, 16 bits), and the product is scaled by rsqrt(mean(x^2) + epsilon).
`normalized`, where it is asked for, is x * rsqrt(mean(x^2) + epsilon) * norm, rounded once.

Floor of `route` for few tokens: bytes of W over the bandwidth, and the dependent trips of x and of the partial logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.routing import cases, many
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing.arguments import ARGUMENTS
from jitmx.kernels.routing.problem import DTYPES, FEW_TOKENS, LOGIT_DTYPES, MAPPED, TILE, TILES, RoutingProblem
from jitmx.models import NAMED
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob


@dataclass(frozen=True)
class RouteKnobs(Knobs):
    """Compile-time choices of `routing.route`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    dtype: str = knob("bf16", choices=DTYPES, doc="type of x and of the norm's weight")
    bias: str = shared.BIAS
    norm: bool = knob(False, doc="RMSNorm of x")
    normalized: bool = knob(False, doc="x behind that RMSNorm is written as well")
    scoring: str = shared.SCORING
    mapped: bool = MAPPED
    tile: int = TILE
    tokens: int = knob(8, choices=(8, 16, 32, 64), doc="tokens that blocks work on together")
    splits: int = knob(8, choices=(1, 2, 4, 8, 16, 32), doc="blocks that share these tokens, each with a slice of h")
    cluster: bool = knob(True, doc="partial logits meet in shared memory of a cluster, not in the workspace")
    parts: int = knob(4, choices=(1, 2, 4, 8, 16, 32), doc="warps of a block that share 16 experts, each with a slice")
    depth: int = knob(3, low=1, high=12, doc="chunks of 32 k a warp whose weights are under way at once")
    pdl: bool = PDL


@dataclass(frozen=True)
class TopkKnobs(Knobs):
    """Compile-time choices of `routing.topk`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    dtype: str = knob("bf16", choices=LOGIT_DTYPES, doc="type of the logits")
    scoring: str = shared.SCORING
    mapped: bool = MAPPED
    tile: int = TILE
    warps: int = knob(8, choices=(1, 4, 8, 16, 32), doc="warps a block")
    pdl: bool = PDL


@dataclass(frozen=True)
class SortKnobs(Knobs):
    """Compile-time choices of `routing.sort`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    mapped: bool = MAPPED
    tile: int = knob(64, choices=TILES[1:], doc="rows of a tile of the schedule, at most")
    warps: int = knob(16, choices=(1, 4, 8, 16, 32), doc="warps a block")
    cluster: int = knob(1, choices=(1, 2, 4, 8), doc="blocks; more than one are a cluster")
    pdl: bool = PDL


def _check(knobs: Any, arch: Arch) -> None:
    shared.check_k(type(knobs).__name__, knobs)


def _check_choice(knobs: RouteKnobs | TopkKnobs, arch: Arch) -> None:
    _check(knobs, arch)
    if knobs.mapped and not knobs.tile:
        raise KnobError("mapped=True is for the lists, and tile=0 makes none", "use mapped=False or tile=64")


def _per_warp(experts: int) -> int:
    """Experts that one warp multiplies with: 16 are the M side of an MMA."""
    return 32 if experts > 256 else 16


def _groups(experts: int) -> int:
    """Warps that it takes to multiply with all experts."""
    return -(-experts // _per_warp(experts))


def _check_route(knobs: RouteKnobs, arch: Arch) -> None:
    _check_choice(knobs, arch)
    if knobs.normalized and not knobs.norm:
        raise KnobError("normalized=True is what RMSNorm makes of x, and norm=False has none", "use norm=True with it")
    warps = _groups(knobs.experts) * knobs.parts
    if warps > 32:
        most = max(p for p in (1, 2, 4, 8, 16, 32) if _groups(knobs.experts) * p <= 32)
        said = f"parts={knobs.parts} with experts={knobs.experts} is a block of {warps} warps, over 32"
        raise KnobError(said, f"the nearest legal value is {most}")
    if knobs.cluster:
        if knobs.splits == 1:
            raise KnobError("splits=1 is no cluster", "use cluster=False with it, or splits=2")
        shared.check_cluster(knobs.splits, "cluster=False", arch)
        if knobs.splits > 16:
            raise KnobError(
                f"splits={knobs.splits} is over the 16 blocks of a cluster", "the nearest legal value is 16"
            )
        if knobs.splits * knobs.tokens * _pitch(knobs) * 4 >= 1 << 20:
            said = f"splits={knobs.splits} of tokens={knobs.tokens} by {knobs.experts} experts are over the 1 MB"
            raise KnobError(f"{said} that an mbarrier counts", f"use tokens={knobs.tokens // 2} or cluster=False")
    a_chunk, other = _registers(knobs, knobs.tokens)
    room = min(255, 65536 // (warps * 32)) - other
    if knobs.depth * a_chunk > room:
        said = f"depth={knobs.depth} holds {knobs.depth * a_chunk} registers a thread, and a block of {warps} warps"
        remedy = f"the nearest legal value is {room // a_chunk}" if room >= a_chunk else "lower parts or tokens"
        raise KnobError(f"{said} has {max(room, 0)} left for that", remedy)


def _registers(asked: RouteKnobs | RoutingProblem, tokens: int) -> tuple[int, int]:
    """Registers a thread that a chunk under way takes, and that all else does, counted generously."""
    each, terms = _per_warp(asked.experts), 2 if asked.dtype == "fp16" else 1
    return 4 + 4 * asked.norm + each // 2, 20 + 8 * terms + asked.experts // 32 + tokens * each // 32


def _check_sort(knobs: SortKnobs, arch: Arch) -> None:
    _check(knobs, arch)
    shared.check_cluster(knobs.cluster, "cluster=1", arch)


def _pitch(knobs: RouteKnobs) -> int:
    return _groups(knobs.experts) * _per_warp(knobs.experts) + 4


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _list_words(warps: int, local: int) -> int:
    """Words that list_many of routing/expert_lists.cuh needs."""
    return (_up(warps, 4) + 4) * local + 2


def route_shared_bytes(knobs: RouteKnobs, m: int, local: int) -> int:
    """Dynamic shared memory of a launch of `routing.route` for m tokens, bytes, as the template lays it out."""
    blocks = knobs.splits if knobs.cluster else 0
    words = (knobs.parts + blocks) * min(m, knobs.tokens) * _pitch(knobs)
    if knobs.tile:
        if m * knobs.k > 32 or m > knobs.tokens:
            words = max(words, _list_words(_groups(knobs.experts) * knobs.parts, local))
        words = _up(words, 4) + _up(knobs.tokens * knobs.k, 8) + (knobs.experts if knobs.mapped else 0)
    return 16 + 4 * words


def launch(variant: Variant, m: int, local: int, multiprocessors: int) -> Launch:
    """Geometry of a launch of `variant` for m tokens and so many local experts."""
    return _geometry(variant.spec, variant.knobs, m, local)


def _geometry(spec: KernelSpec, knobs: Any, m: int, local: int) -> Launch:
    if spec is ROUTE:
        tiles = -(-m // knobs.tokens)
        workspace = 4 * _up(tiles + 1, 4) if knobs.tile and tiles > 1 else 0  # counters
        if knobs.splits > 1 and not knobs.cluster:
            workspace = 4 * (_up(tiles + 1, 4) + tiles * knobs.splits * min(m, knobs.tokens) * _pitch(knobs))
        shared = route_shared_bytes(knobs, m, local)
        return Launch(tiles * knobs.splits, shared, knobs.splits if knobs.cluster else 1, workspace)
    if spec is MANY:
        return many.launch(knobs, m)
    if spec is TOPK:
        if not knobs.tile:
            return Launch(-(-m // knobs.warps), 0)
        return Launch(1, 4 * (_up(m * knobs.k, 8) + (m * knobs.k > 32) * _list_words(knobs.warps, local)))
    return Launch(knobs.cluster, 4 * _list_words(knobs.warps, local), knobs.cluster)


ROUTE = KernelSpec(
    family="routing",
    name="route",
    knobs=RouteKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (_groups(knobs.experts) * knobs.parts * 32)),
        # Addresses and biases, stored before the product's loop and read behind it.
        max_spill_bytes=20 if knobs.experts >= 256 or (knobs.norm and knobs.tokens == 64) else 0,
        require=(r"HMMA\.16816\.F32\.BF16", r"\bLDG\.E\..*128"),
    ),
    check=_check_route,
    shared_bytes=lambda knobs: route_shared_bytes(knobs, 1, 1),
    threads=lambda knobs: _groups(knobs.experts) * knobs.parts * 32,
    arguments=lambda knobs: ARGUMENTS,
)

MANY = many.SPEC

TOPK = KernelSpec(
    family="routing",
    name="topk",
    knobs=TopkKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (knobs.warps * 32)), require=(r"\bREDUX\b|\bCREDUX\b",)
    ),
    check=_check_choice,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)

SORT = KernelSpec(
    family="routing",
    name="sort",
    knobs=SortKnobs,
    contract=lambda knobs, arch: Contract(max_registers=64, require=(r"\bMATCH\.ANY\b",)),
    check=_check_sort,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def _require_source(kernel: str, problem: RoutingProblem, source: str) -> None:
    if problem.source != source:
        other = {"hidden": "route", "logits": "topk", "ids": "sort"}[problem.source]
        raise KnobError(f"routing.{kernel} does not take {problem.source}", f"use routing.{other}")


def _fixed_many(problem: RoutingProblem) -> dict[str, Any]:
    _require_source("many", problem, "hidden")
    for name, plain in (("dtype", "bf16"), ("norm", False), ("normalized", False), ("tile", 0)):
        if getattr(problem, name) != plain:
            raise KnobError(f"routing.many takes no {name}={getattr(problem, name)}", "use routing.route")
    return problem.pick("experts", "k", "bias", "scoring")


def _fixed_sort(problem: RoutingProblem) -> dict[str, Any]:
    _require_source("sort", problem, "ids")
    return _lists(problem)


def _fixed_topk(problem: RoutingProblem) -> dict[str, Any]:
    _require_source("topk", problem, "logits")
    return _lists(problem) | problem.pick("dtype", "scoring")


def _fixed_route(problem: RoutingProblem) -> dict[str, Any]:
    _require_source("route", problem, "hidden")
    if problem.dtype not in DTYPES:
        raise KnobError(f"routing.route takes hidden states in {' or '.join(DTYPES)}, not {problem.dtype}")
    return _lists(problem) | problem.pick("dtype", "scoring", "bias", "norm", "normalized")


def _lists(problem: RoutingProblem) -> dict[str, Any]:
    return problem.pick("experts", "k", "tile") | {"mapped": problem.mapped and problem.tile > 0}


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    """Tiles in shared memory once there are enough tokens for most of the chip."""
    names = FAMILY.serving(problem, arch)
    enough = 4 * FEW_TOKENS if shared.takes_clusters(arch) else 32 * multiprocessors
    if "many" in names and problem.m > enough:
        knobs = many.tuned(problem.experts, problem.m, problem.h, arch, multiprocessors)
        if knobs is not None:
            return "many", knobs
    return names[0], FAMILY.tuned(problem, arch, multiprocessors, names[0])


def _tuned_many(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    knobs = many.tuned(problem.experts, problem.m, problem.h, arch, multiprocessors)
    if knobs is None:
        raise KnobError(f"no tile of {problem.experts} experts fits {arch} in routing.many", "use routing.route")
    return knobs


def _tuned_topk(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"pdl": "pdl" in arch.features, "warps": 8 if problem.m <= 8 or not problem.tile else 32}


def _tuned_sort(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    wide = shared.takes_clusters(arch) and problem.m * problem.k > 4 * FEW_TOKENS
    return {"pdl": "pdl" in arch.features, "warps": 16, "cluster": 8 if wide else 1}


def _tuned_route(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Few tokens: as many blocks a token as a cluster has, so that W comes in at once. Many: tiles that reuse W."""
    clusters = shared.takes_clusters(arch)
    few = problem.m <= 4 * FEW_TOKENS
    # Clusters of 16 are not for every chip, and only one fits a group of multiprocessors.
    wide = problem.m <= 2 or (problem.experts > 128 and problem.m <= 8)
    large = not clusters or (wide and arch.major == 9 and multiprocessors >= 128)
    first = ((8, 16 if large else 8), (8, 8), (8, 4)) if few else ((64, 2), (32, 2), (16, 2))
    knobs: dict[str, Any] = {}
    for tokens, splits in (*first, (8, 2), (8, 1)):  # until shared memory holds them
        shared_out = _shared_out(problem, 32 if few and wide else 16, tokens, splits)
        knobs = {"pdl": "pdl" in arch.features} | shared_out | {"cluster": clusters and splits > 1}
        try:
            _check_problem(problem, ROUTE.variant(arch, **knobs, **_fixed_route(problem)))
        except KnobError:
            continue
        break
    return knobs


def _shared_out(problem: RoutingProblem, most: int, tokens: int, splits: int) -> dict[str, Any]:
    """Warps of a block, at most so many where one is not enough, and chunks under way."""
    warps, chunks = _groups(problem.experts), -(-problem.h // 32)
    a_chunk, other = _registers(problem, tokens)

    def room(parts: int) -> int:
        return int(min(255, 65536 // (warps * parts * 32)) - other) // a_chunk

    def depth(parts: int) -> int:
        return max(1, min(room(parts), -(-chunks // (splits * parts)), 6 if tokens < 32 else 1))

    legal = [p for p in (1, 2, 4, 8, 16, 32) if p == 1 or (warps * p <= most and splits * p <= chunks and room(p) > 0)]
    # Few trips to memory first, then many warps.
    parts = min(legal, key=lambda p: (-(-chunks // (splits * p * depth(p))), -p)) if problem.norm else max(legal)
    return {"tokens": tokens, "splits": splits, "parts": parts, "depth": depth(parts)}


def _check_problem(problem: RoutingProblem, variant: Variant) -> None:
    need = launch(variant, problem.m, problem.experts, variant.arch.multiprocessors).shared_bytes
    if need > variant.arch.shared_bytes:
        raise KnobError(
            f"{variant.name} with m={problem.m} needs {need} B of shared memory; a block on "
            f"{variant.arch} has at most {variant.arch.shared_bytes} B",
            "use fewer tokens, parts or warps, or sort in a launch of its own",
        )


def _typical(arch: Arch) -> tuple[RoutingProblem, ...]:
    """gpt-oss-120b and 20b: one launch for few tokens, choice and lists apart for many."""
    found = []
    for model in NAMED.values():
        routed = partial(RoutingProblem, experts=model.experts, k=model.top, h=model.hidden)
        for tile in (0, 64):
            found.append(routed(1, bias="bias_bf16", tile=tile))
        for m in (2 * FEW_TOKENS, 8192):
            found.append(routed(m, bias="bias_bf16"))
        found.append(routed(1, source="logits", tile=64))
        found.append(routed(8192, source="ids", tile=64))
    return tuple(found)


_RARER: dict[str, tuple[dict[str, Any], ...]] = {
    "route": (
        {"experts": 32, "bias": "bias_fp32", "norm": True, "normalized": True, "dtype": "fp16",
         "scoring": "softmax_all", "cluster": False, "splits": 2, "parts": 1, "depth": 2},
        {"experts": 32, "mapped": True, "tile": 64, "cluster": False, "splits": 1, "parts": 2, "depth": 2,
         "norm": True},
        {"experts": 32, "bias": "bias_fp16", "mapped": True, "tile": 16, "splits": 4, "parts": 1, "norm": True,
         "normalized": True},
        {"experts": 40, "tile": 64, "splits": 2, "scoring": "softmax_all"},
    ),
    "many": (
        {"experts": 32, "scoring": "softmax_all", "tokens": 64, "warps_t": 2, "warps_e": 2, "bias": "bias_fp16"},
        {"experts": 32, "bias": "bias_fp32", "tokens": 64, "warps_t": 2, "warps_e": 2, "splits": 2, "pdl": False},
        {"experts": 32, "tokens": 64, "warps_t": 2, "warps_e": 1, "splits": 4},
    ),
    "topk": (
        {"experts": 60, "dtype": "fp32", "scoring": "softmax_all", "warps": 4},
        {"experts": 60, "k": 2, "dtype": "fp16", "mapped": True, "tile": 8, "warps": 4},
    ),
    "sort": (
        {"experts": 100, "k": 2, "mapped": True, "tile": 8, "pdl": False},
        {"experts": 100, "k": 2, "cluster": 8},
    ),
}  # fmt: skip


def _kernel(
    spec: KernelSpec,
    fixed: Callable[[RoutingProblem], dict[str, Any]],
    heuristic: Callable[[RoutingProblem, Arch, int], dict[str, Any]],
) -> Kernel:
    return Kernel(
        spec,
        lambda variant: cases.cases(variant, launch),
        fixed=fixed,
        # Where all experts are local.
        launch=lambda knobs, problem, multiprocessors: _geometry(spec, knobs, problem.m, problem.experts),
        heuristic=heuristic,
        check=_check_problem,
        rarer=_RARER[spec.name],
    )


FAMILY = Family(
    name="routing",
    summary="experts of each token, their weights, and lists by expert",
    kernels=(
        _kernel(ROUTE, _fixed_route, _tuned_route),
        _kernel(MANY, _fixed_many, _tuned_many),
        _kernel(TOPK, _fixed_topk, _tuned_topk),
        _kernel(SORT, _fixed_sort, _tuned_sort),
    ),
    problem=RoutingProblem,
    typical=_typical,
    heuristic=_heuristic,
    axes=("m",),
    benchmark=Benchmark(
        "jitmx.bench.routing",
        "router product, top-k and softmax in CUDA graphs of dependent calls, without and with RMSNorm whose rows are "
        "written as well: over routers that rotate past the L2, over as many as the model has, and with no launch "
        "started before the last one ended; ids are checked against torch.topk and weights against float64, and the "
        "floor has no launch in it",
        fields=("m",),
        peers=("torch",),
    ),
)
