"""Far cases of `linear`: a small product as the last rows and features of one whose tensors are of many GB.

Offsets in X, Y, the weight, its scales and the bias then pass 2^31 and 2^32 bytes, and 2^31 elements, though a few
tiles are all that is simulated.

Long rows have no case, as work grows with k. Within a tile, linear.tile finds rows of X and of packed tiles by products
of 32 bits (pipeline/stage_copy.cuh), which 64 rows of X, or 256 of W, pass from k = 1.1 * 2^25 on: such tiles are
refused (`limits.require_reach`), and its heuristic takes narrower ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

# Y has over 2^32 values of so many rows by 128 features, and X over 2^32 bytes.
FAR_ROWS, FAR_COLUMNS = 1 << 25, 128
LONG = TILE_K * TILE_K  # columns of a long row: with a tile's width off by one there were a tile fewer or more
_ROOM = 1 << 38  # bytes of a workspace, of which device addresses have room for a few


def far_features(tiles: int) -> int:
    """Features past which a weight with so many tiles of k has over 2^36 bytes, and 2^32 of scales.

    A bias has 2^31 bytes there if tiles are two, and so has a row of Y.
    """
    return ((1 << 31) // max(2, tiles) // 4096 + 1) * 4096


def far_rows(columns: int, parts: int, unit: int) -> int:
    """Rows, a multiple of `unit`, past which Y and X are far; fewer where parts of so many columns take too much."""
    most = FAR_ROWS if parts < 2 else min(FAR_ROWS, _ROOM // (columns * parts * 4))
    return most // unit * unit


def far_tiles(
    variant: Variant, launch: Callable[[Any, Any, int], Launch], k: int, parts: int, counters: Callable[[int], int]
) -> Iterator[Case]:
    """The last tile of Y where rows are many, and where features are: X, Y, W, scales, bias and parts are far.

    Args:
        launch: geometry by knobs, problem and multiprocessors, tile after tile.
        parts: blocks that leave parts of a tile in the workspace.
        counters: bytes there before the parts of so many tiles.
    """
    knobs = variant.knobs
    columns = -(-FAR_COLUMNS // knobs.tile_n) * knobs.tile_n
    rows = far_rows(columns + knobs.tile_n, parts, knobs.tile_m)
    features = far_features(packed_tiles(1, k)[1]) // knobs.tile_n * knobs.tile_n
    for first_row, first, some in ((rows, columns, 9), (0, features, min(24, knobs.tile_n))):
        geometry = launch(knobs, LinearProblem(first_row + 3, first + some, k), 1)
        tiles, size = geometry.blocks // knobs.split_k, knobs.split_k * knobs.tile_n * knobs.tile_m * 4
        places = (((tiles - 1) * 4 // 16 * 16, 16), (counters(tiles) + (tiles - 1) * size, size))
        blocks = range(geometry.blocks - knobs.split_k, geometry.blocks)
        yield far_case(variant, geometry, (first_row, 3), (first, some), k, blocks, places if parts > 1 else ())


def far_case(
    variant: Variant, launch: Launch, rows: tuple[int, int], n: tuple[int, int], k: int, blocks: Sequence[int],
    workspace: Sequence[tuple[int, int]] = (), seed: int = 9,
) -> Case:  # fmt: skip
    """A product of the last rows and features of a larger one.

    Args:
        launch: of the larger product.
        rows, n: how many there are before those at hand, and of them; of features, whole tiles before.
        blocks: those that make them.
        workspace: first byte and size of each part of the workspace that they use, on 16 bytes.
    """
    (first_row, some_rows), (first, some) = rows, n
    all_rows, features = first_row + some_rows, first + some
    small = make_case(variant, dataclasses.replace(launch, workspace=0), some_rows, some, k, seed)
    values = dict(small.values)
    places = first_row + np.arange(some_rows)
    matrix = (places * features + first) * 2  # of Y and the residual
    halves = 2 if getattr(variant.knobs, "swiglu", False) else 1  # rows of W for a value of Y

    def put(name: str, at: object, size: int) -> None:
        item = values.get(name)
        if isinstance(item, Buffer):
            values[name] = item.spread(np.asarray(at), size)

    put("x", places * k * 2, all_rows * k * 2)
    for name in ("weight", "scales"):
        item = values[name]
        assert isinstance(item, Buffer)
        row = item.data[0].nbytes
        put(name, first // TILE_ROWS * row, (first // TILE_ROWS + len(item.data)) * row)
    put("bias", first * 2, features * 2)
    for name in ("residual", "residual_lo"):
        put(name, matrix, all_rows * features * 2)
    y = values["y"]
    assert isinstance(y, Buffer)
    if y.data.dtype == np.int64:
        put("y", places * 8, all_rows * 8)
    elif y.data.ndim == 3:
        put("y", np.stack([matrix, matrix + all_rows * features * 2]), 2 * all_rows * features * 2)
    else:
        put("y", matrix // halves, all_rows * features * 2 // halves)
    if workspace:
        at = np.concatenate([np.arange(begin, begin + size, 16) for begin, size in workspace])
        held = Buffer(np.zeros((len(at), 16), np.uint8), scratch=True)
        values["workspace"] = held.spread(at, launch.workspace)
    return dataclasses.replace(
        small,
        name=f"far: rows={all_rows} n={features} k={k} grid={launch.blocks}, of which the last",
        launch=launch,
        values={**values, "rows": all_rows, "n": features},
        blocks=blocks,
    )
