"""The cost of a product with a packed weight: bytes once, tiles by whoever decodes them, an exchange of sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.costs.work import Cost, Probe, Work
from jitmx.kernels.linear import fp8_arguments, tile, tile_cost
from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.layout import CODE_BYTES, SCALE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.spec import Variant

_COLUMNS = 8  # rows of X of the narrowest product
_SLICED = ("stream", "slice")  # of which a cluster's blocks have each a part of k


def weight_bytes(problem: LinearProblem) -> int:
    """Bytes of the packed weight."""
    rows, tiles = packed_tiles(problem.n, problem.k)
    return rows * tiles * (CODE_BYTES * (2 if problem.weight == "mxfp8" else 1) + SCALE_BYTES)


def rows_together(knobs: Any) -> int:
    """Rows of W that a block takes at a time."""
    groups = getattr(knobs, "groups", 0)
    return int(getattr(knobs, "tile_n", 64 * groups) or TILE_ROWS * getattr(knobs, "tile_rows", 1))


def passes(knobs: Any, m: int) -> int:
    """How often each tile of W is decoded: once for every tile of rows of X."""
    return -(-m // getattr(knobs, "tile_m", m))


def tile_us(knobs: Any, problem: LinearProblem, arch: Arch, multiprocessors: int) -> float:
    """What the model that chooses tiles gives a launch of `linear.tile`, us."""
    warps = knobs.warps_n * knobs.warps_m
    shape = tile_cost.Shape(
        knobs.tile_n // TILE_ROWS // knobs.warps_n, knobs.tile_m // _COLUMNS // knobs.warps_m, warps, knobs.tile_n,
        knobs.tile_m, knobs.tile_k, knobs.stages, knobs.split_k, tile.stage_bytes(knobs), knobs.blocks_per_sm,
        knobs.exchange == "cluster",
    )  # fmt: skip
    return tile_cost.microseconds(shape, problem.m, problem.n, problem.k, arch, multiprocessors)


def _exchanged(variant: Variant, m: int, cluster: int) -> float:
    """Bytes of sums that a block of a cluster sends to the others for a tile of Y."""
    knobs = variant.knobs
    if cluster == 1 or variant.spec.name in _SLICED:  # whose rows of sums leave one by one, beside products
        return 0.0
    size = 3 if variant.spec.name == "splitk" and knobs.residual != "pair" else 4
    return float(size * rows_together(knobs) * min(m, knobs.tile_m) * (1 - 1 / cluster))


def work(variant: Variant, problem: LinearProblem, _rows: int, multiprocessors: int) -> Work:
    """Of one launch."""
    knobs, name, m = variant.knobs, variant.spec.name, problem.m
    launch = kernels.family("linear").launch(variant, problem, multiprocessors)
    rows, tiles = packed_tiles(problem.n, problem.k)
    split = getattr(knobs, "split_k", 1) if name in ("splitk", "tile", "wgmma", "scaled") else 1
    shared = launch.cluster if name in _SLICED else max(split, 1)  # blocks that have a part of k each
    places = max(1, min(launch.blocks, multiprocessors) // shared)  # where whole rows of tiles are made
    items = -(-problem.n // rows_together(knobs)) * passes(knobs, m)
    sums = (4 if problem.residual == "pair" else 2) * (2 if problem.residual else 1)
    features = 0 if problem.argmax else problem.n // (2 if problem.swiglu else 1)
    width = getattr(knobs, "tile_m", -(-m // _COLUMNS) * _COLUMNS)
    in_e4m3 = name == "wgmma_fp8"  # whose operations take half of the time
    by_groups = name in ("splitk", "wgmma", "wgmma_fp8")
    return Work(
        bytes=weight_bytes(problem)
        + (1 if in_e4m3 else 2) * m * problem.k
        + sums * m * features
        + 2 * problem.bias * problem.n,
        flops=(1.0 if in_e4m3 else 2.0) * rows * TILE_ROWS * tiles * TILE_K * passes(knobs, m) * width,
        needed=(1.0 if in_e4m3 else 2.0) * m * problem.n * problem.k,
        tensor="wgmma" if by_groups else "mma",
        exposed=2.0 * min(m, getattr(knobs, "tile_m", m)) * problem.k / shared if name in _SLICED else 0.0,
        units=float(rows * tiles * passes(knobs, m)),
        blocks=launch.blocks,
        busy=min(launch.blocks, multiprocessors),
        spread=math.ceil(items / places) * places / items if getattr(knobs, "schedule", "tiles") == "tiles" else 1.0,
        fills=int(by_groups),
        exchanged=_exchanged(variant, m, launch.cluster),
        clusters=int(launch.cluster > 1),
        merges=int(launch.cluster == 1 and split > 1),
        own_us=tile_us(knobs, problem, variant.arch, multiprocessors) if name == "tile" else None,
    )


def probes(variant: Variant, problem: LinearProblem) -> Iterator[Probe]:
    """The same k with few rows of W, and with twice as many, by the rows of X that are decoded for together."""
    knobs, tiles = variant.knobs, packed_tiles(1, problem.k)[1]
    if variant.spec.name == "wgmma" and knobs.schedule == "hybrid":
        return
    m = min(problem.m, getattr(knobs, "tile_m", problem.m))
    together = max(rows_together(knobs), TILE_ROWS * getattr(knobs, "warps", 1) // max(getattr(knobs, "split_k", 1), 1))
    rounds = 1.0 if getattr(knobs, "resident", True) else 0.25  # a warp that streams a slice of its own takes no other
    for times in (2, 4):
        n = max(1, int(times * rounds * -(-together // TILE_ROWS))) * TILE_ROWS
        part = dataclasses.replace(problem, m=m, n=n)
        make = fp8_arguments.make_case if variant.spec.name == "wgmma_fp8" else make_case
        case = make(variant, kernels.family("linear").launch(variant, part, 2), m, n, problem.k, times)
        yield Probe(case, n // TILE_ROWS * tiles)


COST = Cost(work, probes, lambda variant, problem: (problem.m, problem.k))
