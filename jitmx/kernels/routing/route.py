"""`routing.route`: logits of hidden states and router weights, the choice of the largest, and lists if asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.routing import form, lists
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing.arguments import ARGUMENTS
from jitmx.kernels.routing.problem import DTYPES, FEW_TOKENS, MAPPED, TILE, RoutingProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob


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


def _per_warp(experts: int) -> int:
    """Experts that one warp multiplies with: 16 are the M side of an MMA."""
    return 32 if experts > 256 else 16


def _groups(experts: int) -> int:
    """Warps that it takes to multiply with all experts."""
    return -(-experts // _per_warp(experts))


def _check(knobs: RouteKnobs, arch: Arch) -> None:
    shared.check_k(knobs)
    lists.check_mapped(knobs)
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


def _pitch(knobs: RouteKnobs) -> int:
    return _groups(knobs.experts) * _per_warp(knobs.experts) + 4


def shared_bytes(knobs: RouteKnobs, m: int, local: int) -> int:
    """Dynamic shared memory of a launch for m tokens, bytes, as the template lays it out."""
    blocks = knobs.splits if knobs.cluster else 0
    words = (knobs.parts + blocks) * min(m, knobs.tokens) * _pitch(knobs)
    if knobs.tile:
        if m * knobs.k > 32 or m > knobs.tokens:
            words = max(words, lists.words(_groups(knobs.experts) * knobs.parts, local))
        words = (
            lists.round_up(words, 4)
            + lists.round_up(knobs.tokens * knobs.k, 8)
            + (knobs.experts if knobs.mapped else 0)
        )
    return 16 + 4 * words


def launch(knobs: RouteKnobs, m: int, local: int) -> Launch:
    """Blocks for each tile of tokens; a workspace for the partial logits where these are no cluster."""
    tiles = -(-m // knobs.tokens)
    workspace = 4 * lists.round_up(tiles + 1, 4) if knobs.tile and tiles > 1 else 0  # counters
    if knobs.splits > 1 and not knobs.cluster:
        workspace = 4 * (lists.round_up(tiles + 1, 4) + tiles * knobs.splits * min(m, knobs.tokens) * _pitch(knobs))
    return Launch(tiles * knobs.splits, shared_bytes(knobs, m, local), knobs.splits if knobs.cluster else 1, workspace)


SPEC = KernelSpec(
    family="routing",
    name="route",
    knobs=RouteKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (_groups(knobs.experts) * knobs.parts * 32)),
        # Addresses and biases, stored before the product's loop and read behind it.
        max_spill_bytes=20 if knobs.experts >= 256 or (knobs.norm and knobs.tokens == 64) else 0,
        require=(r"HMMA\.16816\.F32\.BF16", r"\bLDG\.E\..*128"),
    ),
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, 1, 1),
    threads=lambda knobs: _groups(knobs.experts) * knobs.parts * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def _fixed(problem: RoutingProblem) -> dict[str, Any]:
    form.require_source("route", problem, "hidden")
    if problem.dtype not in DTYPES:
        raise KnobError(f"routing.route takes hidden states in {' or '.join(DTYPES)}, not {problem.dtype}")
    return lists.fixed(problem) | problem.pick("dtype", "scoring", "bias", "norm", "normalized")


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
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
            form.check_shared_bytes(problem, SPEC.variant(arch, **knobs, **_fixed(problem)), launch)
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


_RARER: tuple[dict[str, Any], ...] = (
    {"experts": 32, "bias": "bias_fp32", "norm": True, "normalized": True, "dtype": "fp16",
     "scoring": "softmax_all", "cluster": False, "splits": 2, "parts": 1, "depth": 2},
    {"experts": 32, "mapped": True, "tile": 64, "cluster": False, "splits": 1, "parts": 2, "depth": 2,
     "norm": True},
    {"experts": 32, "bias": "bias_fp16", "mapped": True, "tile": 16, "splits": 4, "parts": 1, "norm": True,
     "normalized": True},
    {"experts": 40, "tile": 64, "splits": 2, "scoring": "softmax_all"},
    {"experts": 40, "k": 8, "tile": 64, "splits": 2},
    {"experts": 40, "k": 2, "tile": 64, "splits": 2},
)  # fmt: skip

KERNEL = form.kernel(SPEC, launch, _fixed, _heuristic, _RARER)
