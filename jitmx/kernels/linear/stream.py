"""`linear.stream`: at most 32 rows of X on m16n8k16 tensor cores; one fat block a multiprocessor streams its weights.

Two ways to share the work. With `share`, for weights with few rows of tiles: warps split k among them, and so do the
blocks of a cluster, whose sums meet through distributed shared memory. What a block multiplies by is on its way to
shared memory, all of it, before the previous kernel has ended; of weights that fit but once (`resident=0`) each warp
streams its slice through a ring. Without `share`, for many rows: a warp takes whole rows of tiles and streams them
through a ring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel, spread
from jitmx.kernels.linear import far
from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.gated import whole_rows
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import has_clusters, require_plain, row_count
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.stream_knobs import (
    MAX_ROWS,
    ROWS,
    SPARE_CLUSTERS,
    SPEC,
    SPLITS,
    SUBNORMAL_BF16,
    WARPS,
    checker,
    launch,
    least_tiles,
    misfit,
    shared_bytes,
    slot_bytes,
)
from jitmx.registry.case import Case
from jitmx.registry.spec import Variant

__all__ = ["KERNEL", "MAX_ROWS", "ROWS", "SPEC", "launch", "shared_bytes"]


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """The smallest row count that holds m, and what weight and tensors bring with them."""
    require_plain("stream", problem, "residual", "norm", "argmax", "swiglu")
    given = problem.pick("dtype", "bias", "residual", "norm", "argmax", "swiglu", "encoding", "scale_range")
    return {"m": row_count(problem, ROWS), **given}


def _scalings(problem: LinearProblem, arch: Arch) -> list[str]:
    """Legal choices of `scaling`, the best first."""
    bare = ["bare"] if problem.dtype == "fp16" or arch.name in SUBNORMAL_BF16 else []
    fold = ["fold"] if problem.dtype == "bf16" and problem.scale_range == "normal" else []
    if fold and problem.m > 8:
        return [*fold, *bare, "post"]
    return [*bare, *fold, "post"]


def _shared(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Ways for warps to share rows of tiles, best guesses first: every row of a block has warps of its own."""
    rows, tiles = packed_tiles(problem.n, problem.k)
    clusters = [1]
    if has_clusters(arch) and multiprocessors >= 2 and tiles >= 2:
        # Two blocks balance better; one has no sums to send. Few rows of X have few sums.
        uneven = -(-rows // multiprocessors) * multiprocessors / rows
        clusters = [2, 1] if problem.m <= 2 or uneven > 1.3 else [1, 2]
        # Four hold so little of X each that two launches of many rows fit a multiprocessor.
        clusters += [4] if problem.m > 8 and multiprocessors >= 8 and tiles >= 4 else []
    few = problem.m <= 2
    plain = not (problem.norm or problem.argmax or problem.residual)
    # Two blocks of 24 warps leave 40 registers, which is enough for one row of X and no more than a bias.
    limit = 16 if not few else 24 if problem.m == 1 and plain else 20
    for cluster in clusters:
        most = -(-rows // max(1, multiprocessors // cluster - SPARE_CLUSTERS[cluster]))
        splits = [split for split in ((8, 6, 4, 2, 1) if problem.m == 1 else (4, 3, 2, 1)) if most * split in WARPS]
        # Beyond the limit a block has the multiprocessor to itself: for tuning to try.
        for split in sorted(splits, key=lambda split: most * split > limit):
            warps = most * split
            if warps <= max(20, limit):
                yield {
                    "cluster": cluster,
                    "warps": warps,
                    "split_k": split,
                    "unroll": 1 if few else 2,
                    "predecode": 1 if problem.m == 1 else 0,
                    "blocks_per_sm": 2 if problem.m <= 8 and warps <= limit else 1,
                    "late": "pdl" in arch.features and cluster > 1 and problem.m > 2,
                }


# Tiles a copy and copies in flight, the best guess first: of slices of at most so many tiles, and of whole rows.
_SLICE_RINGS = ((8, ((2, 4),)), (16, ((3, 2), (3, 4))), (math.inf, ((4, 2), (3, 2))))
_ROW_RINGS = ((3, 4), (4, 3), (5, 2), (2, 6))
_MOST_STAGES = 8


def _sliced(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Ways for warps to share rows of tiles in pairs of blocks and stream their slices, where not all fits at once."""
    rows, tiles = packed_tiles(problem.n, problem.k)
    if problem.m > _FEW_ROWS or not has_clusters(arch) or multiprocessors < 2 or tiles < 2:
        return
    most = -(-rows // (multiprocessors // 2))
    splits = [split for split in SPLITS if most * split in WARPS]
    # Twelve warps keep up with memory; two blocks of more than 16 have few registers.
    for split in sorted(splits, key=lambda split: (most * split > 16, most * split < 12, abs(most * split - 12))):
        length = -(-tiles // (2 * split))
        for chunk, stages in next(rings for most_tiles, rings in _SLICE_RINGS if length <= most_tiles):
            yield {
                "cluster": 2,
                "warps": most * split,
                "split_k": split,
                "resident": False,
                "chunk": chunk,
                "stages": stages,
                "unroll": 1,
                "predecode": 1 if problem.m == 1 else 0,
                "blocks_per_sm": 2 if most * split <= 16 else 1,
            }


def _streamed(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Rings of whole rows that hold less and less; of a last product of few rows of X, small ones first that give a
    warp one row: where launches follow that begin early, larger copies by fewer warps are quicker."""
    rows, tiles = packed_tiles(problem.n, problem.k)
    each = -(-rows // multiprocessors)
    warps = next((count for count in WARPS if 8 <= count <= 20 and count >= each), None)
    if problem.argmax and problem.m <= 4 and has_clusters(arch) and warps:
        for chunk, stages in sorted(_ROW_RINGS, key=lambda ring: tiles % ring[0] > 0):
            yield {"share": False, "warps": warps, "chunk": chunk, "stages": stages, "unroll": chunk}
    for warps, chunk in itertools.product((12, 8, 4, 2, 1), (9, 5, 3, 1)):
        yield {
            "share": False,
            "warps": warps,
            "chunk": chunk,
            "unroll": min(3, chunk) if problem.m <= 16 else 1,
        }


def _alone(problem: LinearProblem, arch: Arch, multiprocessors: int, tuned: dict[str, Any]) -> dict[str, Any]:
    """The same; a ring of whole rows with stages enough that two blocks do not fit a multiprocessor.

    Blocks of a launch that begins early are placed as those before them end: where two fit they meet, and leave other
    multiprocessors without.
    """
    if tuned.get("share", True) or "stages" not in tuned:
        return tuned
    for stages in range(tuned["stages"], _MOST_STAGES + 1):
        variant = SPEC.legal(arch, **_fixed(problem), **{**tuned, "stages": stages})
        if variant and 2 * launch(variant.knobs, problem, multiprocessors).shared_bytes > arch.shared_bytes:
            return {**tuned, "stages": stages}
    return tuned


def _fits_beside_itself(problem: LinearProblem, arch: Arch, multiprocessors: int, ways: list[dict[str, Any]]) -> bool:
    """Whether two launches of the first of the ways fit a multiprocessor: the next one's weights come early then."""
    variant = SPEC.legal(arch, **_fixed(problem), **ways[0]) if ways else None
    return variant is not None and 2 * launch(variant.knobs, problem, multiprocessors).shared_bytes <= arch.shared_bytes


def _in_whole_rows(problem: LinearProblem, tuned: dict[str, Any]) -> dict[str, Any]:
    """The same where warps share rows; else with `whole` wherever rows of tiles are a multiple of the chunk."""
    if tuned.get("share", True):
        return tuned
    return {**tuned, "whole": packed_tiles(problem.n, problem.k)[1] % tuned["chunk"] == 0}


def _ways(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Tuned knobs that are legal and serve the problem, best guesses first."""
    fixed = _fixed(problem)
    has_pdl, has_bulk = "pdl" in arch.features, "tma" in arch.features
    shared, sliced = list(_shared(problem, arch, multiprocessors)), list(_sliced(problem, arch, multiprocessors))
    streamed = list(_streamed(problem, arch, multiprocessors))
    many = packed_tiles(problem.n, problem.k)[0] >= 12 * multiprocessors
    if _fits_beside_itself(problem, arch, multiprocessors, shared):
        shared += sliced
    else:
        shared = [*sliced, *shared]
    for scaling, way in itertools.product(
        _scalings(problem, arch), [*streamed, *shared] if many else [*shared, *streamed]
    ):
        tuned = _in_whole_rows(
            problem, {"scaling": scaling, "copy": "bulk" if has_bulk else "async", "pdl": has_pdl, **way}
        )
        tuned = _alone(problem, arch, multiprocessors, tuned)
        variant = SPEC.legal(arch, **fixed, **tuned)
        places = multiprocessors, arch.multiprocessors
        if variant and not any(misfit(problem, variant.knobs, arch, count) for count in places):
            yield tuned


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Knobs from the shape; KnobError where X does not fit shared memory whatever they are."""
    found = next(_ways(problem, arch, multiprocessors), None)
    if found is None:
        alone = [name for name in ("norm", "argmax") if getattr(problem, name)]  # what other kernels have not
        remedy = f"leave {' and '.join(alone)} to unfused steps" if alone else "use linear.gemv or linear.tile"
        raise KnobError(
            f"linear.stream keeps X in shared memory, and m={_fixed(problem)['m']} rows of "
            f"k={problem.k} do not fit the {arch.shared_bytes} B of a block on {arch}",
            remedy,
        )
    return found


def _cases(variant: Variant) -> Iterator[Case]:
    """A lone feature; ragged last tiles; more rows of tiles than there are warps or threads for; long rows of X.

    Two clusters share them, and slices of k are empty, single tiles and long enough to go round every loop.
    """
    knobs = variant.knobs
    # Vectors of X for every thread to take a whole batch, and some to begin another.
    long = -(-knobs.warps * 32 * (2 if knobs.m <= 2 else 4) // (8 * knobs.m)) + 1
    lone = 7 if knobs.norm else 1  # X is rounded as it is normed: a lone sum that is near zero would be far off
    if knobs.share:
        sets, slices = knobs.warps // knobs.split_k, knobs.cluster * knobs.split_k
        least = least_tiles(knobs)
        # A set has several groups, or one at most; a slice ends in a loop's middle, or goes round a ring.
        groups = 2 * sets + (1 if knobs.resident else -1)
        run = knobs.unroll + 1 + knobs.predecode if knobs.resident else knobs.stages * knobs.chunk + 2
        many = 2 * knobs.cluster * (knobs.warps * 512 // slot_bytes(knobs) + 1)
        shapes = [
            (1, lone, least * TILE_K - 32),
            (
                max(1, knobs.m - 1),
                groups * knobs.tile_rows * TILE_ROWS - 7,
                max(least, slices * run) * TILE_K + 32,
            ),
            (knobs.m, 2 * knobs.tile_rows * TILE_ROWS, max(least, long * knobs.cluster) * TILE_K),
            (
                knobs.m,
                (many if knobs.resident else min(many, groups * knobs.tile_rows)) * TILE_ROWS,
                least * TILE_K,
            ),
        ]
    else:
        unit = knobs.chunk if knobs.whole else 1  # tiles of k that a row is a multiple of
        shapes = [
            (1, lone, unit * TILE_K - 32),
            (max(1, knobs.m - 1), 2 * TILE_ROWS, (2 * unit if knobs.whole else knobs.chunk + 1) * TILE_K - 32),
            (
                knobs.m,
                (4 * knobs.warps * knobs.tile_rows + 1) * TILE_ROWS - 7,
                -(-max(long, knobs.chunk + 2) // unit) * unit * TILE_K,
            ),
        ]
    if knobs.share and knobs.resident and not knobs.ahead:  # more groups than lanes of the warp that asks for them
        shapes.append((1, 68 * knobs.cluster * knobs.tile_rows * TILE_ROWS, least_tiles(knobs) * TILE_K - 32))
    if knobs.ahead:  # threads that have nothing of X to bring ask for weights all the same
        shapes.append((1, 80 * knobs.tile_rows * TILE_ROWS, least_tiles(knobs) * TILE_K - 32))
    if knobs.norm:
        pieces = 21 if knobs.share or not knobs.whole else -(-21 // knobs.chunk) * knobs.chunk
        shapes.append((knobs.m, TILE_ROWS + 1, pieces * knobs.cluster * TILE_K))  # sums of squares of many pieces
    spare = knobs.cluster * (2 + SPARE_CLUSTERS[knobs.cluster])
    for seed, (rows, n, k) in enumerate(shapes):
        n = whole_rows(knobs, n)
        geometry = launch(knobs, LinearProblem(rows, n, k), spare)
        if geometry.shared_bytes <= variant.arch.shared_bytes:
            yield make_case(variant, geometry, rows, n, k, seed)
    unit = knobs.chunk if knobs.whole and not knobs.share else 1
    n, k = whole_rows(knobs, lone), -(-far.LONG // (unit * TILE_K)) * unit * TILE_K
    geometry = launch(knobs, LinearProblem(1, n, k), spare)
    if geometry.shared_bytes <= variant.arch.shared_bytes:  # a long row
        yield make_case(variant, geometry, 1, n, k, len(shapes) + 1)
    few, k = 2 * TILE_ROWS + 1, max(least_tiles(knobs), knobs.chunk if knobs.whole else 1) * TILE_K
    sets = knobs.warps if knobs.resident else knobs.warps // knobs.split_k
    wide = 4 * sets * knobs.tile_rows * TILE_ROWS - 7  # every warp of four blocks has some, and the last the largest
    for special, n, blocks in (("nan", few, 2), ("below", few, 2), ("rising", wide, 4)) if knobs.argmax else ():
        rows = min(knobs.m, blocks // 2)
        geometry = launch(knobs, LinearProblem(rows, n, k), knobs.cluster * (blocks + SPARE_CLUSTERS[knobs.cluster]))
        if geometry.shared_bytes <= variant.arch.shared_bytes:
            yield make_case(variant, geometry, rows, n, k, len(shapes), special)
    if not knobs.argmax:  # whose blocks all wait for one another, and which writes no Y
        yield from _far_cases(variant)


def _far_cases(variant: Variant) -> Iterator[Case]:
    """The last cluster's rows of tiles where features are many: Y, W, scales and bias are far. X has few rows."""
    knobs = variant.knobs
    k = max(least_tiles(knobs), knobs.chunk if knobs.whole else 2) * TILE_K - 32 * (not knobs.whole)
    mine = knobs.tile_rows * TILE_ROWS
    features = far.far_features(packed_tiles(1, k)[1]) // mine * mine
    some = whole_rows(knobs, mine - 7)
    geometry = launch(knobs, LinearProblem(knobs.m, features + some, k), 1 << 30)
    if geometry.shared_bytes <= variant.arch.shared_bytes:
        last = range(geometry.blocks - knobs.cluster, geometry.blocks)
        yield far.far_case(variant, geometry, (0, knobs.m), (features, some), k, last)


# Tiles a copy, copies in flight.
_SLICED = ((4, 2), (3, 4), (2, 4), (6, 2), (3, 3), (9, 2))
_RINGS = ((5, 3), (9, 2), (15, 2), (4, 4))


def _changes(problem: LinearProblem, way: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What tuning varies of a way, the most promising first."""
    folded: list[dict[str, Any]] = [{"scaling": "halves"}] if way["scaling"] == "fold" else []
    yield {}
    if not way.get("share", True):
        # Two rows of tiles read X once: for several columns of MMA that is most of what shared memory yields.
        for warps, chunk in ((way["warps"], 5), (16, 3), (20, 3), (way["warps"], 3)) if problem.m > 4 else ():
            for scaling in (*folded, {}, *({"scaling": "bare"} for _ in folded)):
                yield {"tile_rows": 2, "warps": warps, "chunk": chunk, "unroll": chunk, **scaling}
        if problem.m > 16:  # X leaves room for little else
            yield from ({"tile_rows": 2, "chunk": 1, "stages": 3, **scaling} for scaling in (*folded, {}))
        yield from folded
        yield from ({"chunk": chunk, "stages": stages} for chunk, stages in _RINGS)
        return
    if not way.get("resident", True):
        yield from ({"chunk": chunk, "stages": stages} for chunk, stages in _SLICED)
        yield from ({"unroll": unroll, "predecode": early} for unroll in (1, 2) for early in (0, 1, 2))
        return
    if way["cluster"] > 1 and way["split_k"] > 1 and problem.m > 2:
        yield from ({**scaling, "sums": "block"} for scaling in (*folded, {}))
        for ahead in (0, 2) if way["pdl"] else ():
            yield {**(folded or [{}])[0], "sums": "block", "late": False, "ahead": ahead}
    if way["pdl"]:
        yield {"late": not way["late"]}
        if problem.m > 2 and way["copy"] == "bulk":
            yield {"late": False, "ahead": 2}
    yield from folded
    # In 40 registers a warp that decodes nothing early, or more than a tile at once, spills.
    tight = way["warps"] * way["blocks_per_sm"] == 48
    for unroll, early in [(1, 1)] if tight else itertools.product((1, 2, 3), (0, 1, 2)):
        yield {"unroll": unroll, "predecode": early}


# What won for one row of X on sm_90a, and what is tried beside it for up to 8 rows.
_WON: dict[str, Any] = {
    "cluster": 2, "warps": 20, "split_k": 4, "sums": "warp", "predecode": 1, "unroll": 1, "late": False, "ahead": 0,
}  # fmt: skip
_BESIDE: dict[str, tuple[Any, ...]] = {
    "warps": (20, 12, 16, 24), "sums": ("warp", "block"), "predecode": (1, 0), "unroll": (1, 2), "late": (False, True),
    "ahead": (0, 2), "cluster": (2, 4, 1),
}  # fmt: skip
_FEW_ROWS = 8
_MOST = 80


def _beside(problem: LinearProblem, arch: Arch, multiprocessors: int) -> Iterator[dict[str, Any]]:
    """Ways of few rows of X in clusters, by the number of knobs in which they differ from what the heuristic picks.

    Or from what won on sm_90a, if those are fewer. All of X has to reach every block once the launch before has ended:
    the more blocks share k, the less of it each has to wait for.
    """
    usual = {**{name: getattr(SPEC.knobs(), name) for name in _WON}, **_heuristic(problem, arch, multiprocessors)}
    if not has_clusters(arch) or not usual.get("share", True):
        return
    rest = {name: usual[name] for name in ("scaling", "copy", "pdl")}
    combined = [dict(zip(_BESIDE, values, strict=True)) for values in itertools.product(*_BESIDE.values())]
    ways = [{**_WON, **values} for values in combined]

    def distance(way: dict[str, Any]) -> int:
        return min(sum(int(way[name] != near[name]) for name in way) for near in (usual, _WON))

    for way in sorted(ways, key=distance):
        # More rows of X or tiles at once take registers that two blocks of many warps have not.
        lean = problem.m <= 2 and way["unroll"] == 1 and (way["warps"] <= 20 or way["predecode"] > 0)
        yield {**rest, **way, "blocks_per_sm": 2 if lean or way["warps"] <= 16 else 1}


def _near(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Neighbours of what the heuristic would pick from, most of those of its first choices."""
    ways = enumerate(itertools.islice(_ways(problem, arch, multiprocessors), 12))
    near = [
        (i + j, i, _in_whole_rows(problem, {**way, **change}))
        for i, way in ways
        for j, change in enumerate(_changes(problem, way))
    ]
    return [tuned for _, _, tuned in sorted(near, key=lambda item: item[:2])]


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing, the heuristic's first."""
    fixed = _fixed(problem)
    near = _near(problem, arch, multiprocessors)
    if near and problem.m <= _FEW_ROWS:
        near = [near[0], *spread(list(_beside(problem, arch, multiprocessors)), near[1:])]
    found: dict[str, dict[str, Any]] = {}
    for tuned in near:
        variant = SPEC.legal(arch, **fixed, **tuned)
        if variant and misfit(problem, variant.knobs, arch, multiprocessors) is None:
            found.setdefault(variant.identity, tuned)
    return list(found.values())[:_MOST]


_RARER: tuple[dict[str, Any], ...] = (
    {"m": 4, "bias": True, "residual": True, "scaling": "halves", "warps": 4, "split_k": 2, "unroll": 1},
    {"m": 2, "bias": True, "norm": True, "residual": "pair", "dtype": "fp16", "scale_range": "full",
     "scaling": "post", "warps": 4, "split_k": 2, "predecode": 1, "ahead": 0},
    {"m": 8, "bias": True, "argmax": True, "norm": True, "residual": True, "encoding": "nibble", "warps": 4,
     "split_k": 2, "ahead": 2},
    {"m": 16, "bias": True, "scaling": "halves", "share": False, "whole": True, "warps": 2, "chunk": 2, "tile_rows": 2},
    {"m": 2, "residual": True, "argmax": True, "dtype": "fp16", "scaling": "bare", "share": False, "warps": 4,
     "chunk": 3, "tile_rows": 2},
    {"m": 2, "residual": "pair", "norm": True, "scaling": "post", "share": False, "whole": True, "warps": 2,
     "chunk": 2, "copy": "async", "pdl": False},
    {"m": 2, "bias": True, "warps": 4, "split_k": 2, "copy": "async", "predecode": 1, "pdl": False},
    {"m": 2, "bias": True, "norm": True, "residual": True, "scaling": "bare", "warps": 4, "split_k": 2, "cluster": 2,
     "unroll": 1, "predecode": 1},
    {"m": 4, "residual": "pair", "scaling": "halves", "warps": 4, "split_k": 2, "cluster": 4, "sums": "block",
     "unroll": 1, "late": True},
    {"m": 2, "dtype": "fp16", "bias": True, "argmax": True, "scaling": "bare", "warps": 4, "split_k": 2,
     "cluster": 2, "sums": "block", "ahead": 2},
    {"m": 2, "residual": True, "norm": True, "scaling": "bare", "warps": 4, "split_k": 2, "cluster": 2,
     "resident": False, "chunk": 2, "predecode": 1, "late": True},
    {"m": 4, "bias": True, "argmax": True, "scaling": "post", "warps": 4, "split_k": 2, "resident": False, "chunk": 2,
     "stages": 3, "tile_rows": 2, "copy": "async"},
    {"swiglu": True, "norm": True, "scaling": "post", "share": False, "whole": True, "warps": 2, "chunk": 2},
    {"m": 4, "swiglu": True, "scaling": "post", "share": False, "warps": 2, "chunk": 3, "tile_rows": 2},
    {"m": 16, "swiglu": True, "dtype": "fp16", "scaling": "post", "warps": 4, "split_k": 2},
    {"m": 2, "swiglu": True, "norm": True, "scaling": "bare", "warps": 4, "split_k": 2, "cluster": 2, "unroll": 1,
     "predecode": 1},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=checker(misfit),
    candidates=_candidates,
    rarer=_RARER,
)
