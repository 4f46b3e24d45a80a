"""The cost of a layer of experts: the bytes of those that are hit, tiles decoded once for each item of rows, and two
hand-overs, of h and of the sums of y."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.costs.work import Cost, Probe, Work
from jitmx.kernels.linear import tile_cost
from jitmx.kernels.linear.layout import RESIDUALS, TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.moe import grouped
from jitmx.kernels.moe.arguments import Routing, make_case
from jitmx.kernels.moe.fp8_arguments import product_case as fp8_case
from jitmx.kernels.moe.fused import case as fused_case
from jitmx.kernels.moe.fused_fp8 import case as fused_fp8_case
from jitmx.kernels.moe.grouped_arguments import product_case as scaled_case
from jitmx.kernels.moe.hidden import hidden_bytes
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import product_case
from jitmx.registry.spec import Variant

WHOLE = ("token", "stream", "decode")  # which make a layer in one launch
_COLUMNS = 8
_CASES = {"wgmma": product_case, "wgmma_fp8": fp8_case, "scaled": scaled_case}  # of kernels whose products are counted
_BOTH = {"fused": fused_case, "fused_fp8": fused_fp8_case}  # likewise, of both products
# Time of a product by the atom of `moe.scaled`, as a share of bf16's: of a twin's, which multiplies in bf16, all of it.
_RATES = {"twin": 1.0, "e4m3": 0.5, "mxf8f6f4": 0.5, "mxf4": 0.25}


def hit(problem: MoeProblem) -> float:
    """Experts that have rows, where all are as likely and a row's differ."""
    return problem.experts * -math.expm1(problem.m * math.log1p(-min(problem.top / problem.experts, 1 - 1e-12)))


def items(problem: MoeProblem, columns: int) -> float:
    """Times that a tile of an expert's weight is decoded in all, over the tiles of one: once for each so many rows."""
    m, share = problem.m, min(problem.top / problem.experts, 1.0)
    if m * share > 64:  # no expert is without rows
        return problem.experts * (m * share / columns + 0.5)
    logs = [math.lgamma(m + 1) - math.lgamma(j + 1) - math.lgamma(m - j + 1) for j in range(m + 1)]
    some = (
        math.exp(log + j * math.log(share) + (m - j) * math.log1p(-share)) * -(-j // columns) if share < 1 else 0.0
        for j, log in enumerate(logs)
    )
    return problem.experts * (math.fsum(some) if share < 1 else -(-m // columns))


def tiles_of(problem: MoeProblem, product: str) -> int:
    """Packed tiles of one expert's weight."""
    rows, tiles = packed_tiles(*problem.sizes(product))
    return rows * tiles


def grouped_us(knobs: Any, problem: MoeProblem, arch: Arch, multiprocessors: int) -> float:
    """What the model that chooses tiles gives a launch of `moe.grouped`, us: products of rows filled up to tiles."""
    warps, (n, k) = knobs.warps_n * knobs.warps_m, problem.sizes(knobs.product)
    shape = tile_cost.Shape(
        knobs.tile_n // TILE_ROWS // knobs.warps_n, knobs.tile_m // _COLUMNS // knobs.warps_m, warps, knobs.tile_n,
        knobs.tile_m, TILE_K, knobs.stages, 1, grouped.stage_bytes(knobs), 2 if warps == 4 else 1,
    )  # fmt: skip
    rows = math.ceil(items(problem, knobs.tile_m)) * knobs.tile_m
    weights = hit(problem) * tiles_of(problem, knobs.product) * TILE_BYTES / arch.memory_gbps / 1e3
    return max(tile_cost.microseconds(shape, rows, n, k, arch, multiprocessors), weights)


def work(variant: Variant, problem: MoeProblem, _rows: int, multiprocessors: int) -> Work | None:
    """Of one launch."""
    name, knobs, m = variant.spec.name, variant.knobs, problem.m
    pairs, hidden, inner = m * problem.top, problem.hidden, problem.intermediate
    busy = multiprocessors
    if name in WHOLE:
        columns = getattr(knobs, "columns", 1)
        tiles = tiles_of(problem, "up") + tiles_of(problem, "down")
        repeated = items(problem, columns)
        biases = 2 * problem.bias * (problem.sizes("up")[0] + hidden)
        return Work(
            bytes=hit(problem) * (tiles * TILE_BYTES + biases)
            + (2 + 2 * (1 + bool(problem.residual))) * 2 * m * hidden,
            flops=2.0 * repeated * tiles * TILE_ROWS * TILE_K * _COLUMNS,
            needed=2.0 * pairs * tiles * TILE_ROWS * TILE_K,
            units=repeated * tiles,
            blocks=multiprocessors,
            busy=busy,
            grids=2,
        )
    if name in ("gather", "gather_fp8", "combine"):
        tensors = 2 * RESIDUALS.index(problem.residual) or 1  # of m rows: x, or the residual and y
        return Work(bytes=0.0, cached=2.0 * hidden * (tensors * m + pairs), busy=busy)
    if name == "scaled":
        return _scaled(knobs, problem, multiprocessors)
    if name in _BOTH:
        return _fused(knobs, problem, multiprocessors, in_e4m3=name == "fused_fp8")
    if name not in ("grouped", "wgmma", "wgmma_fp8"):
        return None
    by_groups, in_e4m3 = name != "grouped", name == "wgmma_fp8"
    product = knobs.product
    n, k = problem.sizes(product)
    rows = min(m, pairs) if product == "up" and name == "grouped" else pairs
    out = pairs * (inner if product == "up" else hidden)
    tile = knobs.tile_m if name == "grouped" else knobs.grain  # widths that rows are filled up to
    filled = items(problem, tile) * tile
    decoded = items(problem, knobs.tile_m)
    own = grouped_us(knobs, problem, variant.arch, multiprocessors) if name == "grouped" else None
    return Work(
        bytes=hit(problem) * tiles_of(problem, product) * TILE_BYTES + (1.0 if in_e4m3 else 2.0) * rows * k + 2.0 * out,
        flops=(1.0 if in_e4m3 else 2.0) * filled * n * k,  # of E4M3 twice as many take as long
        needed=(1.0 if in_e4m3 else 2.0) * pairs * n * k,
        tensor="wgmma" if by_groups else "mma",
        units=decoded * tiles_of(problem, product),
        blocks=busy,
        busy=busy,
        # A block has one item after another, each with its start and its end.
        rounds=max(1.0, decoded * -(-n // knobs.tile_n) / busy) if by_groups else 1.0,
        fills=int(by_groups),
        warps=knobs.tile_n / 16 if by_groups else 0.0,
        own_us=own,
    )


def _fused(knobs: Any, problem: MoeProblem, multiprocessors: int, in_e4m3: bool) -> Work:
    """Of a launch of both products: items of them, one after another. Of E4M3 twice as many operations take as long."""
    value = 1.0 if in_e4m3 else 2.0  # bytes of x and h, and operations
    pairs, sizes = problem.m * problem.top, [problem.sizes(product) for product in ("up", "down")]
    tiles = tiles_of(problem, "up") + tiles_of(problem, "down")
    filled, decoded = items(problem, knobs.grain) * knobs.grain, items(problem, knobs.tile_m)
    across = sum(-(-n // knobs.tile_n) for n, _ in sizes)
    weights = sum(n * k for n, k in sizes)
    return Work(
        bytes=hit(problem) * tiles * TILE_BYTES
        + pairs * (value * (problem.hidden + 2 * problem.intermediate) + 2.0 * problem.hidden),
        flops=value * filled * weights,
        needed=value * pairs * weights,
        tensor="wgmma",
        units=decoded * tiles,
        blocks=multiprocessors,
        busy=multiprocessors,
        rounds=max(1.0, decoded * across / multiprocessors),
        fills=1,
        warps=knobs.tile_n / 16,
    )


def _scaled(knobs: Any, problem: MoeProblem, multiprocessors: int) -> Work:
    """Of a launch of `moe.scaled`: every block of rows of W reads all rows of x or h of its tile."""
    up, (n, k) = knobs.product == "up", problem.sizes(knobs.product)
    pairs, tiles = problem.m * problem.top, tiles_of(problem, knobs.product)
    decoded = items(problem, knobs.tile_m)
    h = hidden_bytes(problem)
    row = 2.0 * k if up else h / pairs  # bytes, as it is read
    wide = -(-n // knobs.tile_n)
    blocks = decoded * wide
    busy = max(1, min(multiprocessors, math.ceil(blocks)))
    places = busy * knobs.blocks_per_sm
    read = decoded * (tiles * TILE_BYTES + wide * min(knobs.tile_m, pairs / decoded) * row)
    of_bf16 = 2.0 * _RATES[knobs.atom]
    return Work(
        bytes=hit(problem) * tiles * TILE_BYTES
        + (2.0 * min(problem.m, pairs) * k if up else h)
        + (h if up else 2.0 * (problem.m if knobs.reduction == "atomic" else pairs) * n),
        flops=of_bf16 * decoded * knobs.tile_m * n * k,
        needed=of_bf16 * pairs * n * k,
        each=read / busy,
        units=decoded * tiles,
        blocks=math.ceil(blocks),
        busy=busy,
        spread=math.ceil(blocks / busy) * busy / blocks,
        rounds=max(1.0, blocks / places),
        fills=1,
    )


def probes(variant: Variant, problem: MoeProblem) -> Iterator[Probe]:
    """A small layer by two blocks and one of twice its tiles, whose item has as many rows as there may be; of one
    product, an expert's rows."""
    name, knobs = variant.spec.name, variant.knobs
    if name in _CASES:
        yield from _product_probes(variant, problem)
    if name in _BOTH:
        ids = np.zeros((_rows_of(variant, problem), 1), np.int32)
        for times in (1, 2):
            small = dataclasses.replace(
                problem, m=len(ids), experts=1, top=1, hidden=times * 736, intermediate=1440, product="both"
            )
            launch = kernels.family("moe").launch(variant, small, 1)
            counted = _BOTH[name](variant, launch, small, Routing(ids), times)
            yield Probe(counted, tiles_of(small, "up") + tiles_of(small, "down"))
    if name not in ("stream", "decode"):
        return
    for seed, inner in enumerate((576, 1152)):
        ids = np.zeros((knobs.columns, 1), np.int32)
        small = dataclasses.replace(problem, m=len(ids), experts=1, top=1, hidden=768, intermediate=inner)
        launch = kernels.family("moe").launch(variant, small, 2)
        case = dataclasses.replace(make_case(variant, launch, small, Routing(ids), seed), resident=launch.blocks)
        yield Probe(case, tiles_of(small, "up") + tiles_of(small, "down"))


def _rows_of(variant: Variant, problem: MoeProblem) -> int:
    """Rows of an expert that has some, on average, of one tile."""
    knobs: Any = variant.knobs
    return max(1, min(round(problem.m * problem.top / hit(problem)), int(knobs.tile_m)))


def _product_probes(variant: Variant, problem: MoeProblem) -> Iterator[Probe]:
    knobs = variant.knobs
    rows, k = _rows_of(variant, problem), problem.sizes(knobs.product)[1]
    for times in (1, 2):
        n = times * knobs.tile_n
        sizes = (k, n // (1 + problem.gated)) if knobs.product == "up" else (n, k)
        ids = np.zeros((rows, 1), np.int32)
        small = dataclasses.replace(
            problem, m=rows, experts=1, top=1, hidden=sizes[0], intermediate=sizes[1], product=knobs.product
        )
        launch = kernels.family("moe").launch(variant, small, 1)
        case = _CASES[variant.spec.name]
        yield Probe(case(variant, launch, small, Routing(ids), times), tiles_of(small, knobs.product))


def _counted(variant: Variant, problem: MoeProblem) -> tuple[int, ...]:
    """Of one product rows an expert and columns; of whole layers nothing: tiles are alike."""
    if variant.spec.name in _BOTH:
        return (_rows_of(variant, problem),)
    if variant.spec.name not in _CASES:
        return ()
    return _rows_of(variant, problem), problem.sizes(variant.knobs.product)[1]


COST = Cost(work, probes, _counted)
