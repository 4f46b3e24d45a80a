"""`jitmx/moe/work_split.cuh` assigns every tile once, evenly, and says which rows two blocks share."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc
from strategies import examples

THREADS = 128
# Spans of every block, whole rows and cut; of every warp in the cut span of each block; and what is said of every row.
KERNEL = """
#include "jitmx/moe/work_split.cuh"
using namespace jitmx;
extern "C" __global__ void split(Span* whole, Span* cut, Span* warps, u32* shared, int items, int rows, int tiles,
                                 int blocks, int parts) {
  const ProductSplit<false> first(items, rows, tiles, blocks);
  const ProductSplit<true> second(items, rows, tiles, blocks);
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    whole[b] = first.block(b);
    const Span mine = cut[b] = second.block(b);
    const EvenSplit within(mine.end - mine.begin, parts);
    for (int w = 0; w < parts; ++w) warps[b * parts + w] = within.span(w, mine.begin);
  }
  for (int r = threadIdx.x; r < items * rows; r += blockDim.x)
    shared[r] = u32(first.shared(u32(r) * u32(tiles))) << 1 | u32(second.shared(u32(r) * u32(tiles)));
}
"""


@dataclass(frozen=True)
class Work:
    """Items of so many rows of tiles, for blocks of so many warps."""

    items: int
    rows: int
    tiles: int
    blocks: int
    warps: int


@dataclass(frozen=True)
class Split:
    """Spans [blocks, 2], [blocks, 2] and [blocks, warps, 2], and rows [items * rows] that two blocks share."""

    whole: npt.NDArray[Any]
    cut: npt.NDArray[Any]
    warps: npt.NDArray[Any]
    whole_shared: npt.NDArray[Any]
    cut_shared: npt.NDArray[Any]


@functools.cache
def compiled() -> str:
    return nvrtc.compile_ptx(KERNEL, nvrtc.options(arch.parse("sm_90")))


def split(work: Work) -> Split:
    memory, rows = Memory(), work.items * work.rows
    sizes = (work.blocks * 8, work.blocks * 8, work.blocks * work.warps * 8, rows * 4)
    whole, cut, warps, shared = (memory.allocate(max(size, 4)) for size in sizes)
    arguments = struct.pack(
        "4Q5i", whole, cut, warps, shared, work.items, work.rows, work.tiles, work.blocks, work.warps
    )
    simulate(compiled(), (1, 1, 1), (THREADS, 1, 1), arguments, memory)
    said = memory.download(shared, "u4", (rows,))
    return Split(
        memory.download(whole, "u4", (work.blocks, 2)), memory.download(cut, "u4", (work.blocks, 2)),
        memory.download(warps, "u4", (work.blocks, work.warps, 2)), said >> 1, said & 1,
    )  # fmt: skip


def partitions(spans: npt.NDArray[Any], begin: int, end: int, grain: int = 1) -> bool:
    """Whether spans follow one another from `begin` to `end` and differ by one grain at most, the longer ones first."""
    lengths = spans[:, 1].astype(np.int64) - spans[:, 0]
    return bool(
        spans[0, 0] == begin and spans[-1, 1] == end and (spans[1:, 0] == spans[:-1, 1]).all()
        and lengths.min() >= lengths.max() - grain and (np.diff(lengths) <= 0).all() and not (lengths % grain).any()
    )  # fmt: skip


WORK = st.builds(
    Work,
    items=st.integers(0, 24),
    rows=st.integers(1, 20),
    tiles=st.integers(1, 50),
    blocks=st.integers(1, 150),
    warps=st.integers(1, 16),
)


@settings(max_examples=examples(60))
@given(work=WORK)
@example(work=Work(4, 360, 45, 132, 12))  # one row of gpt-oss
@example(work=Work(4, 180, 45, 132, 12))
@example(work=Work(0, 3, 5, 7, 4))  # no item
@example(work=Work(1, 6, 1, 7, 16))  # fewer rows than blocks, which are not cut then
@example(work=Work(1, 7, 1, 7, 16))
@example(work=Work(3, 5, 4, 7, 2))
def test_every_tile_is_assigned_once_and_shares_differ_by_one_at_most(work: Work) -> None:
    found = split(work)
    rows, size = work.items * work.rows, work.rows * work.tiles
    cut = rows >= work.blocks
    assert partitions(found.whole, 0, rows * work.tiles, work.tiles)
    assert partitions(found.cut, 0, rows * work.tiles, 1 if cut else work.tiles)
    for block, warps in zip(found.cut, found.warps, strict=True):
        assert partitions(warps, *block)
    # Shared memory is sized for this many items of a block, and sums of y for two blocks of a row.
    held = -(-work.items // work.blocks) + 1
    for spans in (found.whole, found.cut):
        some = spans[spans[:, 0] < spans[:, 1]].astype(np.int64)
        assert ((some[:, 1] - 1) // size - some[:, 0] // size + 1 <= held).all()


@settings(max_examples=examples(60))
@given(work=WORK)
@example(work=Work(4, 180, 45, 132, 12))
@example(work=Work(2, 9, 50, 18, 4))
@example(work=Work(2, 9, 50, 17, 4))
def test_a_row_is_said_to_be_shared_where_two_blocks_have_tiles_of_it(work: Work) -> None:
    found = split(work)
    first = np.arange(work.items * work.rows)[:, None] * work.tiles
    parts = ((found.cut[:, 0] < first + work.tiles) & (found.cut[:, 1] > first)).astype(int)
    parts[:, found.cut[:, 0] == found.cut[:, 1]] = 0
    assert (parts.sum(1) == 1 + found.cut_shared).all()
    assert not found.whole_shared.any()
