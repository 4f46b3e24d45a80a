"""Far cases of `moe`: a small layer as the last rows, pairs, experts or features of one whose tensors are of many GB.

Offsets in activations, lists, parts and experts' weights then pass 2^31 and 2^32 bytes, and 2^31 elements, though a few
tiles are all that is simulated.

Long rows have no case, as work grows with k. Within a tile, moe.grouped finds rows of h and of packed tiles by products
of 32 bits (grouped.cu.j2), which 128 rows of h pass from 1.1 * 2^24 features on: such tiles are refused
(`require_reach`). Biases of moe.decode, moe.stream and moe.token are far only beside weights of 64 GiB and more, which
are too many tiles for a case of each variant; a test of moe.stream has such a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.grouped_arguments import product_case
from jitmx.kernels.moe.hidden import BLOCKS, CHUNK, chunk_bytes
from jitmx.kernels.moe.problem import UNGATED, MoeProblem
from jitmx.kernels.moe.wgmma_arguments import COUNTERS, LINE_BYTES
from jitmx.kernels.moe.wgmma_arguments import product_case as lines_case
from jitmx.kernels.routing.knobs import MAX_TOKENS
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Array, Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

EXPERTS = 1 << 15  # the most that a layer may have
# Whole tiles of W, of which experts together have 2^32 vectors of 32 columns, 2^32 bytes of scales and 2^31 biases.
FEATURES = 66048
ROWS = 1 << 26  # of x that take 2^32 bytes of 32 columns, the most that moe.grouped and moe.scaled take
ONE_EXPERT = (1 << 24) + 256  # rows of two pairs each of one expert, a step of which is just over 2^32 bytes
# Features of one expert, whole tiles of W, whose packed weights are 2^32 vectors.
LONG, LONG_K = (1 << 29) + 1024, 256
_LISTED = np.array([[1, 0, 1, 1, 0, 1, 0, 1], [1, 0, -1, -1, -1, -1, -1, -1]], np.int32)
_FEW = np.array([[1, 0], [0, 1], [1, -1]], np.int32)


@dataclass(frozen=True)
class Before:
    """What a larger layer has before the small one: rows of x, each with all its pairs, experts, rows of W."""

    rows: int = 0
    experts: int = 0
    features: int = 0


def experts_at(item: Buffer, before: Before, features: int) -> Buffer:
    """Packed words or scales [experts, tile rows, …] as the last rows of the last experts."""
    row, rows = item.data[0, 0].nbytes, -(-features // TILE_ROWS)
    each = before.experts + np.arange(len(item.data))
    at = (each * rows + before.features // TILE_ROWS) * row
    return item.spread(at, (before.experts + len(item.data)) * rows * row)


def matrix_at(item: Buffer, rows: int, column: int, columns: int, whole: int = 0) -> Buffer:
    """Rows of 16-bit values behind so many others of a wider matrix, of `whole` rows if given."""
    at = ((rows + np.arange(len(item.data))) * columns + column) * 2
    return item.spread(at, (whole or rows + len(item.data)) * columns * 2)


def codes_at(item: Buffer, some: int, pairs: int, column: int, columns: int, x_format: str) -> Buffer:
    """h in codes (`hidden.py`), of the last `some` of so many pairs, from a feature on: byte by byte."""
    size, chunks, first = chunk_bytes(x_format), -(-columns // CHUNK), column // CHUNK
    row = (pairs - some + np.arange(some))[:, None, None] * chunks + first + np.arange(chunks - first)[:, None]
    codes, scales = row * size + np.arange(size), pairs * chunks * size + row * BLOCKS + np.arange(BLOCKS)
    return item.spread(np.concatenate([codes.ravel(), scales.ravel()]), pairs * chunks * (size + BLOCKS))


def far_products(variant: Variant, launch: Any) -> Iterator[Case]:
    """The last pairs of a product where pairs are many, and the last experts and features where those are, together
    and of one expert.

    Args:
        launch: geometry of a launch by knobs, problem and multiprocessors.
    """
    up, gated = variant.knobs.product == "up", variant.knobs.activation not in UNGATED
    # Scales of h in codes pass 2^32 bytes where a row has three chunks, and sums of 2^26 rows 2^32 values.
    coded = getattr(variant.knobs, "x_format", "bf16") != "bf16"
    added = not up and variant.knobs.reduction == "atomic"
    rows = Before(rows=ROWS - 2, features=2 * CHUNK * (1 + gated) * (coded and up) + 2 * CHUNK * added)
    for before, ids, k in (
        (rows, _LISTED, 32 + 2 * CHUNK * (coded and not up)),
        (Before(0, EXPERTS - 2, FEATURES), _FEW, 32),
        (Before(0, 0, LONG), np.zeros((1, 1), np.int32), LONG_K),
    ):
        small = (k, 32) if up else (32, k)
        inner = before.features // (1 + gated)
        large = (k, 32 + inner) if up else (32 + before.features, k)
        some = 1 + int(ids.max())
        few, whole = (
            MoeProblem(rows, count, ids.shape[1], *sizes, variant.knobs.activation, product=variant.knobs.product)
            for rows, count, sizes in ((len(ids), some, small), (before.rows + len(ids), before.experts + some, large))
        )
        yield _product(variant, few, whole, launch(variant.knobs, whole, 1), Routing(ids), before)


def _product(
    variant: Variant, few: MoeProblem, whole: MoeProblem, launch: Launch, routing: Routing, before: Before
) -> Case:  # fmt: skip
    knobs, up = variant.knobs, variant.knobs.product == "up"
    small = product_case(variant, launch, few, routing, 9)
    values: dict[str, Any] = dict(small.values)
    pairs, all_pairs = before.rows * few.top, whole.m * few.top
    n, k = whole.sizes(knobs.product)
    x_format = getattr(knobs, "x_format", "bf16")

    listed = values["pairs"].data
    listed = listed[listed >= 0] + pairs
    values["pairs"] = _with(values["pairs"], listed.astype(np.int32)).spread(pairs * 4, all_pairs * 4)
    entries = _entries(values["schedule"].data, pairs, before.experts)
    tiles = capacity(whole.m, whole.top, whole.experts, knobs.tile_m)
    values["schedule"] = _with(values["schedule"], entries).spread((tiles - len(entries)) * 16, tiles * 16, fill=255)
    values["weights"] = values["weights"].spread(pairs * 4, all_pairs * 4)
    values["weight"] = experts_at(values["weight"], before, n)
    values["scales"] = experts_at(values["scales"], before, n)
    if "bias" in values:
        values["bias"] = matrix_at(values["bias"], before.experts, before.features, n)
    if up:
        values["x"] = matrix_at(values["x"], before.rows, 0, k)
    elif x_format == "bf16":
        values["x"] = matrix_at(values["x"], pairs, 0, k)
    else:
        values["x"] = codes_at(values["x"], all_pairs - pairs, all_pairs, 0, k, x_format)
    if up and x_format != "bf16":
        column = before.features // (1 + few.gated)
        values["y"] = codes_at(values["y"], all_pairs - pairs, all_pairs, column, whole.intermediate, x_format)
    elif up:
        values["y"] = matrix_at(values["y"], pairs, before.features // (1 + few.gated), whole.intermediate, all_pairs)
    elif knobs.reduction == "atomic":
        values["y"] = matrix_at(values["y"], before.rows, before.features, n)
    else:
        values["y"] = matrix_at(values["y"], pairs, before.features, n, all_pairs)
    values |= {"rows": whole.m, "experts": whole.experts, "n": n, "k": k, "tiles": tiles}
    return dataclasses.replace(
        small,
        name=f"far: rows={whole.m} top={whole.top} experts={whole.experts} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values=values,
        blocks=_blocks(variant, tiles, len(entries), before.features, n),
    )


def _entries(schedule: npt.NDArray[np.int32], pairs: int, experts: int) -> npt.NDArray[np.int32]:
    """Tiles of the schedule that have an expert, behind so many pairs and experts."""
    moved = schedule[schedule[:, 0] >= 0].copy()
    moved[:, 0] += experts
    moved[:, 1] += pairs
    return moved


def _blocks(variant: Variant, tiles: int, some: int, first: int, n: int) -> list[int]:
    """Blocks of the last tiles of the schedule and of the rows of W from `first` on (moe/grouped_tile.cuh)."""
    group, tile_n = variant.knobs.group, variant.knobs.tile_n
    wide, found = -(-n // tile_n), []
    for tile in range(tiles - some, tiles):
        which = tile // group
        size = min(group, tiles - which * group)
        found += [which * group * wide + row * size + tile % group for row in range(first // tile_n, wide)]
    return sorted(found)


def far_sums(case: Case, rows: int, columns: int) -> Case:
    """Sums of the last rows of very many (`combine_case`)."""
    values: dict[str, Any] = dict(case.values)
    some, top = values["ids"].data.shape
    values["ids"] = values["ids"].spread(rows * top * 4, (rows + some) * top * 4)
    values["x"] = values["x"].spread(rows * top * columns * 2, (rows + some) * top * columns * 2)
    for name in ("bias", "y"):
        if name in values:
            values[name] = pair_at(values[name], rows, columns)
    values["rows"] = rows + some
    return dataclasses.replace(
        case,
        name=f"far: rows={rows + some} top={top} hidden={columns}",
        launch=Launch(rows + some),
        values=values,
        blocks=range(rows, rows + some),
    )


def pair_at(item: Buffer, rows: int, columns: int) -> Buffer:
    """Rows [rows, columns], or a pair [2, rows, columns], behind so many others."""
    size = (rows + item.data.shape[-2]) * columns * 2
    if item.data.ndim == 2:
        return item.spread(rows * columns * 2, size)
    return item.spread(np.array([0, size]) + rows * columns * 2, 2 * size)


def far_experts(case: Case) -> Case:
    """A layer of few rows whose experts are the last of so many that their scales pass 2^31 bytes, or of the most."""
    values: dict[str, Any] = dict(case.values)
    experts = min(EXPERTS, (1 << 31) // values["w2_scales"].data[0].nbytes + 64)
    first = experts - values["experts"]
    for name in ("w13", "w13_scales", "w2", "w2_scales", "b13", "b2"):
        if name in values:
            values[name] = _last(values[name], first)
    name = "map" if "map" in values else "ids"
    ids: Array = values[name].data
    moved = np.where((ids >= 0) & (ids < values["experts"]), ids + first, -1).astype(np.int32)
    values |= {name: dataclasses.replace(values[name], data=moved), "experts": experts}
    return dataclasses.replace(case, name=f"far: {case.name}, the last of {experts}", values=values)


def _last(item: Buffer, first: int) -> Buffer:
    """Tensors of experts behind those of so many others."""
    size = item.data[0].nbytes
    return item.spread(first * size, (first + len(item.data)) * size)


def far_gather(variant: Variant, case: Case, few: MoeProblem, launch: Any, line: int = TILE_K) -> Case:
    """The last rows of very many, with the last pairs; block 0, which clears the counters, finds no expert.

    Args:
        line: values of k in a line of activations.
    """
    values: dict[str, Any] = dict(case.values)
    rows, top, k = MAX_TOKENS - few.m, few.top, few.hidden
    pairs, whole = rows * top, dataclasses.replace(few, m=rows + few.m, experts=few.experts + 1)
    tiles = capacity(whole.m, top, whole.experts, variant.knobs.tile_m)
    geometry = launch(variant.knobs, whole, 1)
    entries = _entries(values["schedule"].data, pairs, 1)
    spans = geometry.blocks // tiles
    values["x"] = matrix_at(values["x"], rows, 0, k)
    values |= _lists(values, pairs, whole.m * top, 1)
    nobody = np.array([[-1, 0, 0, 0]], np.int32)
    at = np.append(0, tiles - len(entries) + np.arange(len(entries))) * 16
    values["schedule"] = _with(values["schedule"], np.concatenate([nobody, entries])).spread(at, tiles * 16, fill=255)
    values["y"] = _lines_at(values["y"], pairs * -(-k // line))
    if "x_scales" in values:
        values["x_scales"] = values["x_scales"].spread(pairs * 4, whole.m * top * 4)
    if getattr(variant.knobs, "tile_counters", False):  # of blocks that run
        at_tiles = np.concatenate([np.arange(COUNTERS + 1), COUNTERS + tiles - len(entries) + np.arange(len(entries))])
        cleared = _with(values["counters"], np.empty(len(at_tiles), np.uint32))
        values["counters"] = cleared.spread(at_tiles * 4, (COUNTERS + tiles) * 4)
    return dataclasses.replace(
        case,
        name=f"far: rows={whole.m} top={top} experts={whole.experts} k={k} grid={geometry.blocks}",
        launch=geometry,
        values=values | {"tiles": tiles},
        blocks=[0, *range(geometry.blocks - len(entries) * spans, geometry.blocks)],
    )


def _with(item: Buffer, data: npt.NDArray[Any]) -> Buffer:
    """The same buffer with other data."""
    return dataclasses.replace(item, data=data)


def _lists(values: dict[str, Any], pairs: int, all_pairs: int, experts: int) -> dict[str, Any]:
    """Pairs and offsets of experts behind so many pairs of so many others."""
    listed = values["pairs"].data
    listed = listed[listed >= 0] + pairs
    offsets = (values["offsets"].data + pairs).astype(np.int32)
    return {
        "pairs": _with(values["pairs"], listed.astype(np.int32)).spread(pairs * 4, all_pairs * 4),
        "offsets": _with(values["offsets"], offsets).spread(experts * 4, experts * 4 + offsets.nbytes),
    }


def _lines_at(item: Buffer, before: int) -> Buffer:
    """Lines of activations [lines, 64] behind so many others."""
    return item.spread(before * LINE_BYTES, before * LINE_BYTES + item.data.nbytes)


def far_rows(
    variant: Variant, launch: Any, case: Any = lines_case, line: int = TILE_K, h_line: int | None = None
) -> Iterator[Case]:
    """The last items of `moe.wgmma`: of many pairs, of many experts and features, and of an expert of many rows.

    Blocks take items by a counter, which is not 0 here but the number of the first item at hand. They go on until there
    is none.

    Args:
        case: makes a small one of variant, launch, problem, routing and seed.
        line: values of k in a line of activations.
        h_line: features in a line of h, if they are others.
    """
    knobs = variant.knobs
    up = knobs.product == "up"
    listed, few = np.array([[1, 0, 1, 1, 1]], np.int32), np.ones((1, 2), np.int32)
    features = -(-FEATURES // knobs.tile_n) * knobs.tile_n
    shapes: tuple[tuple[Before, npt.NDArray[np.int32], int], ...] = (
        (Before(rows=2 * ROWS - 2, experts=1), listed, 64),
        (Before(0, EXPERTS - 2, features), few, 32),
        (Before(rows=ONE_EXPERT), few - 1, 160),
    )
    for before, ids, k in shapes:
        lone = not before.experts
        some_features = 160 if lone else 32
        small = (k, some_features) if up else (32, k)
        inner, wide = before.features // 2 * up, before.features * (not up)
        sizes = (k, some_features + inner) if up else (32 + wide, k)
        some, whole = (
            MoeProblem(rows, experts, ids.shape[1], shape[0], shape[1], product=knobs.product)
            for rows, experts, shape in ((1, 2 - lone, small), (before.rows + 1, before.experts + 2 - lone, sizes))
        )
        small_case = case(variant, launch(knobs, whole, 2), some, Routing(ids), 9)
        yield _items(variant, small_case, some, whole, before, line, h_line or line)


def _items(
    variant: Variant, small: Case, few: MoeProblem, whole: MoeProblem, before: Before, line: int, h_line: int
) -> Case:
    knobs, up = variant.knobs, variant.knobs.product == "up"
    values: dict[str, Any] = dict(small.values)
    n, k = (2 * whole.intermediate, whole.hidden) if up else (whole.hidden, whole.intermediate)
    pairs, all_pairs = before.rows * few.top, whole.m * few.top
    tile_m, steps = knobs.tile_m, -(-k // line)
    lone = not before.experts  # one expert has all pairs, the last of which are a tile of their own
    if lone:
        pairs = pairs // tile_m * tile_m
        all_pairs = pairs + few.top
    entries = _entries(values["schedule"].data, pairs, before.experts)
    tiles = capacity(whole.m, whole.top, whole.experts, tile_m)
    values["schedule"] = _with(values["schedule"], entries).spread((tiles - len(entries)) * 16, tiles * 16, fill=255)
    values["weights"] = values["weights"].spread(pairs * 4, all_pairs * 4)
    values |= _lists(values, pairs, all_pairs, before.experts)
    values["weight"] = experts_at(values["weight"], before, n)
    values["scales"] = experts_at(values["scales"], before, n)
    if "bias" in values:
        values["bias"] = matrix_at(values["bias"], before.experts, before.features, n)
    if "bases" in values:
        values["bases"] = matrix_at(values["bases"], before.experts, before.features, n)
    if "x_scales" in values:
        values["x_scales"] = values["x_scales"].spread(pairs * 4, all_pairs * 4)
    half, first = whole.intermediate, before.features // 2 // h_line  # of the first product: features of h, and step
    if lone:
        offsets = np.array([0, all_pairs], np.int32)
        values["offsets"] = _with(values["offsets"], offsets)
        entries[:, 1], entries[:, 3] = pairs, pairs // tile_m
        values["schedule"] = _with(values["schedule"], entries).spread((tiles - 1) * 16, tiles * 16, fill=255)
        values["x"] = _steps_at(values["x"], pairs, all_pairs, steps)
        if up:
            values["y"] = _steps_at(values["y"], pairs, all_pairs, -(-half // h_line))
    else:
        values["x"] = _lines_at(values["x"], pairs * steps)
        if up:
            values["y"] = _lines_at(values["y"], pairs * -(-half // h_line) + first * (few.m * few.top))
    if not up:
        values["y"] = matrix_at(values["y"], pairs, before.features, n, all_pairs)
    wide = -(-n // knobs.tile_n)
    counters = values["counters"].data.copy()
    counters[0 if up else 1] = (tiles - len(entries)) * wide + before.features // knobs.tile_n
    values["counters"] = _with(values["counters"], counters)
    return dataclasses.replace(
        small,
        name=f"far: pairs={all_pairs} experts={whole.experts} n={n} k={k}" + " of one expert" * lone,
        values=values | {"n": n, "k": k, "tiles": tiles},
    )


def far_both(variant: Variant, launch: Any, case: Any, line: int) -> Iterator[Case]:
    """Both products in one launch, of the last of many pairs, of many experts, and of an expert of many rows.

    The schedule has the last tiles alone: of a launch they are few.

    Args:
        line: values of k in a line of activations.
    """
    knobs = variant.knobs
    listed, few = np.array([[1, 0, 1, 1, 1]], np.int32), np.ones((1, 2), np.int32)
    for before, ids in (
        (Before(rows=2 * ROWS - 2, experts=1), listed),
        (Before(0, EXPERTS - 2), few),
        (Before(rows=ONE_EXPERT), few - 1),
    ):
        lone = not before.experts
        some, whole = (
            MoeProblem(rows, experts, ids.shape[1], 96, 64, knobs.activation, product="both")
            for rows, experts in ((1, 2 - lone), (before.rows + 1, before.experts + 2 - lone))
        )
        geometry = dataclasses.replace(launch(knobs, some, 2), maps=launch(knobs, whole, 2).maps)
        small = case(variant, geometry, some, Routing(ids), 9)
        values: dict[str, Any] = dict(small.values)
        pairs, all_pairs = before.rows * some.top, whole.m * some.top
        if lone:  # one expert has all pairs, the last of which are a tile of their own
            pairs = pairs // knobs.tile_m * knobs.tile_m
            all_pairs = pairs + some.top
        schedule = values["schedule"].data.copy()
        there = schedule[:, 0] >= 0
        schedule[there, 0] += before.experts
        schedule[there, 1] += pairs
        if lone:
            schedule[there, 3] = pairs // knobs.tile_m
        values["schedule"] = _with(values["schedule"], schedule)
        values |= _lists(values, pairs, all_pairs, before.experts)
        for field in ("weights", "x_scales"):
            if field in values:
                values[field] = values[field].spread(pairs * 4, all_pairs * 4)
        if lone:
            values["offsets"] = _with(values["offsets"], np.array([0, all_pairs], np.int32))
        for name, k in (("x", some.hidden), ("h", some.intermediate)):
            item, steps = values[name], -(-k // line)
            values[name] = _steps_at(item, pairs, all_pairs, steps) if lone else _lines_at(item, pairs * steps)
        for name, product in (("13", "up"), ("2", "down")):
            n, _ = some.sizes(product)
            for field in (f"w{name}", f"w{name}_scales"):
                values[field] = experts_at(values[field], before, n)
            for field in (f"b{name}", f"w{name}_bases"):
                if field in values:
                    values[field] = matrix_at(values[field], before.experts, 0, n)
        values["y"] = matrix_at(values["y"], pairs, 0, some.hidden, all_pairs)
        name = f"far: pairs={all_pairs} experts={whole.experts} hidden={some.hidden}" + " of one expert" * lone
        yield dataclasses.replace(small, name=name, values=values)


def _steps_at(item: Buffer, rows: int, all_rows: int, steps: int) -> Buffer:
    """Lines [steps, some rows] of an expert as its last rows."""
    some = len(item.data) // steps
    at = (np.arange(steps)[:, None] * all_rows + rows + np.arange(some)).reshape(-1) * LINE_BYTES
    return item.spread(at, steps * all_rows * LINE_BYTES)
