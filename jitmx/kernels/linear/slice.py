"""`linear.slice`: at most 32 rows of X, in registers of warps that have a slice of k of all rows of their block.

For weights of few rows of tiles, all of which a block has on their way to shared memory before the previous kernel has
ended. X goes straight to the registers of the one warp of a block that needs it, and is read once a block; in exchange
all warps of a block, and the blocks of a cluster, have sums of the same rows to bring together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import far
from jitmx.kernels.linear.arguments import ARGUMENTS, make_case
from jitmx.kernels.linear.knobs import BIAS, DTYPE, ENCODING, RESIDUAL, SCALE_RANGE
from jitmx.kernels.linear.layout import CODE_BYTES, SCALE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import has_clusters, require_plain, require_registers, row_count
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.stream_knobs import (
    MAX_ROWS,
    ROWS,
    SPARE_CLUSTERS,
    SUBNORMAL_BF16,
    check_decoding,
    checker,
    contract,
    slot_bytes,
)
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import COPY, PDL, KernelSpec, Knobs, Variant, knob


@dataclass(frozen=True)
class SliceKnobs(Knobs):
    """Compile-time choices of `linear.slice`."""

    m: int = knob(1, choices=ROWS, doc="rows of X, at most")
    dtype: str = DTYPE
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    scaling: str = knob("halves", choices=("halves", "post", "bare"), doc="as in linear.stream")
    warps: int = knob(8, choices=(2, 4, 8, 12, 16), doc="warps a block")
    tiles: int = knob(2, low=1, high=4, doc="tiles of k that a warp has at most, whose X it keeps in registers")
    cluster: int = knob(1, choices=(1, 2), doc="blocks that share rows of tiles, each with a slice of k")
    copy: str = COPY
    window: int = knob(
        0, low=0, high=3,
        doc="copies that a block has on their way at once before the wait for X, so that no queue of weights delays "
        "the X of the launch before; 0: all",
    )  # fmt: skip
    predecode: int = knob(0, low=0, high=6, doc="tiles of a warp's first two rows that it decodes before the wait")
    chains: int = knob(1, choices=(1, 2), doc="sums that a warp's tiles of a row take in turn")
    pieces: int = knob(1, choices=(1, 2), doc="copies that a block's tiles of a row come in, each those of some warps")
    blocks_per_sm: int = knob(2, low=1, high=4, doc="blocks that must fit a multiprocessor: caps registers")
    pdl: bool = PDL


def _clusters(knobs: SliceKnobs, n: int, multiprocessors: int) -> int:
    """Clusters of a launch: as many as there are places for, but no more than rows of tiles."""
    places = multiprocessors // knobs.cluster - SPARE_CLUSTERS[knobs.cluster]
    return max(1, min(packed_tiles(n, TILE_K)[0], places))


def shared_bytes(knobs: SliceKnobs, n: int, k: int, clusters: int) -> int:
    """Dynamic shared memory of a launch of so many clusters, bytes."""
    rows, tiles = packed_tiles(n, k)
    most, longest = -(-rows // clusters), -(-tiles // knobs.cluster)
    codes = -(-longest // knobs.tiles) * knobs.tiles * CODE_BYTES
    sums = -(-most // knobs.cluster) * (knobs.cluster - 1) * slot_bytes(knobs)
    if slot_bytes(knobs) > knobs.tiles * CODE_BYTES:  # sums do not fit where codes were
        sums += most * -(-longest // knobs.tiles) * slot_bytes(knobs)
    barriers = (most * knobs.pieces + 3) // 2 * 16
    return most * (codes + longest * SCALE_BYTES + knobs.bias * TILE_ROWS * 4) + barriers + sums


def _check(knobs: SliceKnobs, arch: Arch) -> None:
    if knobs.predecode > 2 * knobs.tiles:
        raise KnobError(
            f"predecode={knobs.predecode} is over the tiles={knobs.tiles} of a warp in two rows",
            f"the nearest legal value is {2 * knobs.tiles}",
        )
    check_decoding(knobs, arch)
    for beside, idle in (("copy='async'", knobs.copy == "async"), ("pdl=0", not knobs.pdl)):
        if idle and knobs.window:
            raise KnobError(f"window={knobs.window} selects nothing with {beside}", "leave it at 0")
    if knobs.chains > knobs.tiles:
        raise KnobError(f"chains={knobs.chains} is over the tiles={knobs.tiles} of a warp", "use chains=1")
    if knobs.pieces > 1 and not knobs.window:
        raise KnobError(f"pieces={knobs.pieces} makes a window finer, and there is none with window=0", "use pieces=1")
    if knobs.cluster > 1 and not has_clusters(arch):
        raise KnobError(f"cluster={knobs.cluster} needs sm_90 or sm_100", f"on {arch} use cluster=1")
    require_registers(knobs.warps, knobs.blocks_per_sm, _least_registers(knobs))


def _least_registers(knobs: SliceKnobs) -> int:
    """Registers that a thread takes at least: X with its sums, tiles decoded early but for one, and the rest."""
    x = _x_registers(knobs.scaling, knobs.m, knobs.tiles)
    return 14 + 3 * x // 2 + 9 * max(0, knobs.predecode - 1) + 12 * (knobs.scaling != "halves")


SPEC = KernelSpec(
    family="linear",
    name="slice",
    knobs=SliceKnobs,
    contract=contract,
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, 1, TILE_K * knobs.cluster, 1),
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: SliceKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """One block a multiprocessor, in clusters."""
    clusters = _clusters(knobs, problem.n, multiprocessors)
    return Launch(clusters * knobs.cluster, shared_bytes(knobs, problem.n, problem.k, clusters), knobs.cluster)


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """The smallest row count that holds m, and what weight and tensors bring with them."""
    require_plain("slice", problem, "residual")
    return {"m": row_count(problem, ROWS), **problem.pick("dtype", "bias", "residual", "encoding", "scale_range")}


def _misfit(problem: LinearProblem, knobs: SliceKnobs, arch: Arch, multiprocessors: int) -> tuple[str, str] | None:
    """Why knobs that are legal on the target cannot serve the problem, and the remedy; or None."""
    tiles = packed_tiles(problem.n, problem.k)[1]
    if knobs.cluster > tiles:
        return f"cluster={knobs.cluster} is over the {tiles} tiles of k={problem.k}", "lower it"
    room = knobs.cluster * knobs.warps * knobs.tiles
    if tiles > room:
        return (
            f"cluster={knobs.cluster}, warps={knobs.warps} and tiles={knobs.tiles} have room for {room} tiles of k; "
            f"k={problem.k} has {tiles}",
            "raise one of them, or use another kernel",
        )
    need = launch(knobs, problem, multiprocessors).shared_bytes
    if need > arch.shared_bytes:
        return (
            f"with n={problem.n} and k={problem.k} it needs {need} B of shared memory; a block on {arch} has at most "
            f"{arch.shared_bytes} B",
            "raise cluster, or use another kernel",
        )
    return None


def _scalings(problem: LinearProblem, arch: Arch) -> list[str]:
    """Legal choices of `scaling` that win for so many rows, the best first."""
    bare = ["bare"] if problem.dtype == "fp16" or arch.name in SUBNORMAL_BF16 else []
    halves = ["halves"] if problem.dtype == "bf16" and problem.scale_range == "normal" else []
    found = [*bare, *halves] if problem.m <= 4 else [*halves, *bare]
    return found[: 2 if 4 < problem.m <= 8 else 1] or ["post"]


# A thread's registers beside sums, X and a row's codes: what decoding was seen to take.
_WORKING = 38


def _ways(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Tuned knobs that are legal and serve the problem, best guesses first."""
    fixed = _fixed(problem)
    cluster = 2 if has_clusters(arch) and packed_tiles(problem.n, problem.k)[1] > 1 and multiprocessors >= 8 else 1
    longest = -(-packed_tiles(problem.n, problem.k)[1] // cluster)
    # A warp's share of k, such that the last warp has one at all, on all schedulers alike.
    shares: dict[int, int] = {}
    for warps in (4, 8, 12, 16):
        most = -(-longest // warps)
        if most <= 4 and most not in shares.values():
            shares[warps] = most
    counts = sorted(shares)
    modern = "tma" in arch.features and "pdl" in arch.features
    for scaling, warps in itertools.product(_scalings(problem, arch), counts):
        most = shares[warps]
        blocks = 2 if 65536 // (64 * warps) >= _x_registers(scaling, fixed["m"], most) + 5 * most + _WORKING else 1
        tuned = {
            "scaling": scaling, "warps": warps, "tiles": most, "cluster": cluster, "blocks_per_sm": blocks,
            "copy": "bulk" if "tma" in arch.features else "async", "pdl": "pdl" in arch.features,
            "window": 2 if modern else 0,
        }  # fmt: skip
        variant = SPEC.legal(arch, **fixed, **tuned)
        places = multiprocessors, arch.multiprocessors
        if variant and not any(_misfit(problem, variant.knobs, arch, count) for count in places):
            yield tuned


def _x_registers(scaling: str, m: int, tiles: int) -> int:
    """A lane's registers that hold X."""
    return tiles * (4 if scaling in ("bare", "post") and m <= 4 else 8 * -(-m // 8))


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Knobs from the shape; KnobError where a block cannot hold its weights whatever they are."""
    found = next(_ways(problem, arch, multiprocessors), None)
    if found is None:
        raise KnobError(
            "linear.slice keeps a block's weights in shared memory and X in registers; "
            f"n={problem.n}, k={problem.k} with m={_fixed(problem)['m']} fit neither on {arch}",
            "use linear.stream",
        )
    return found


def _cases(variant: Variant) -> Iterator[Case]:
    """A lone feature and row of X; ragged tiles, several rows of them; sums that go round all threads; all of k."""
    knobs = variant.knobs
    room = knobs.cluster * knobs.warps * knobs.tiles
    around = knobs.cluster * (-(-knobs.warps * 512 // slot_bytes(knobs)) + 1)  # rows of tiles
    shapes = (
        (1, 1, knobs.cluster * TILE_K - 32, 1),
        (max(1, knobs.m - 1), (4 * knobs.cluster + 1) * TILE_ROWS - 7, max(knobs.cluster, room - 1) * TILE_K - 32, 2),
        (knobs.m, around * TILE_ROWS, knobs.cluster * TILE_K, 1),
        (knobs.m, TILE_ROWS * knobs.cluster, room * TILE_K, 1),
    )
    for seed, (rows, n, k, clusters) in enumerate(shapes):
        geometry = launch(knobs, LinearProblem(rows, n, k), knobs.cluster * (clusters + SPARE_CLUSTERS[knobs.cluster]))
        if geometry.shared_bytes <= variant.arch.shared_bytes:
            yield make_case(variant, geometry, rows, n, k, seed)
    yield from _far_cases(variant)


def _far_cases(variant: Variant) -> Iterator[Case]:
    """The last cluster's row of tiles where features are many: Y, W, scales and bias are far. X has few rows."""
    knobs = variant.knobs
    k = max(2, knobs.cluster) * TILE_K - 32
    features = far.far_features(packed_tiles(1, k)[1])
    geometry = launch(knobs, LinearProblem(knobs.m, features + 9, k), 1 << 30)
    last = range(geometry.blocks - knobs.cluster, geometry.blocks)
    yield far.far_case(variant, geometry, (0, knobs.m), (features, 9), k, last)


def _changes(problem: LinearProblem, way: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What tuning varies of a way, the most promising first."""
    yield {}
    rows = _fixed(problem)["m"]
    left = 65536 // (32 * way["warps"] * way["blocks_per_sm"]) - 16 - _x_registers(way["scaling"], rows, way["tiles"])
    most = min(5, left // 16, 2 * way["tiles"])
    best = 4.6 if rows <= 4 else 4.4 if rows == 8 else 2.4  # between the two that win most
    earlies = [{"predecode": early} for early in sorted(range(most + 1), key=lambda count: abs(count - best))]
    yield from earlies[:2]
    if way["window"]:
        # X of over 16 rows leaves no registers for blocks of the next launch, whose weights could be in the way.
        windows = (1, 3) if rows <= 16 else (1, 0)
        if 8 < rows <= 16:
            splits: tuple[dict[str, Any], ...] = ({"pieces": 2, "chains": 2}, {"pieces": 2}, {"chains": 2})
            yield from ({**early, **split} for early in earlies[:2] for split in splits)
        yield from ({**early, "window": window} for window in windows for early in earlies[:2])
    yield from earlies[2:]


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing, the heuristic's first."""
    fixed = _fixed(problem)
    ways = enumerate(_ways(problem, arch, multiprocessors))
    near = [(2 * i + j, i, {**way, **change}) for i, way in ways for j, change in enumerate(_changes(problem, way))]
    found: dict[str, dict[str, Any]] = {}
    for _, _, tuned in sorted(near, key=lambda item: item[:2]):
        if variant := SPEC.legal(arch, **fixed, **tuned):
            found.setdefault(variant.identity, tuned)
    return list(found.values())


_RARER: tuple[dict[str, Any], ...] = (
    {"dtype": "fp16", "scale_range": "full", "scaling": "post", "copy": "async", "pdl": False, "warps": 2},
    {"m": 8, "bias": True, "residual": True, "warps": 2, "window": 1, "encoding": "nibble"},
    {"m": 4, "residual": "pair", "chains": 2, "warps": 2, "predecode": 3, "tiles": 2},
    {"m": 8, "bias": True, "residual": True, "cluster": 2, "warps": 2, "window": 1},
    {"m": 4, "scaling": "bare", "residual": "pair", "cluster": 2, "chains": 2, "predecode": 2, "warps": 2},
    {"m": 16, "cluster": 2, "pieces": 2, "warps": 2, "window": 1},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=checker(_misfit),
    candidates=_candidates,
    runs_on=lambda arch: arch.shared_bytes >= 128 * 1024,  # two blocks' weights; in less, few would fit
    rarer=_RARER,
)
