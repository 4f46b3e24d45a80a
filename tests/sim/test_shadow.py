"""Lines that are split as accesses need it remember the same as a word for each byte would."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx.sim.shadow import LINE, Shadow, halves

BYTES, WARPS = 64, 2

_sizes, _places = st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, BYTES - 1)
_access = st.tuples(_sizes, _places, st.integers(0, WARPS - 1), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(_access, max_size=20), st.sampled_from([1, 2, 4]))
def test_each_byte_has_its_last_writer_and_readers(
    accesses: list[tuple[int, int, int, bool]], granule: int
) -> None:
    shadow = Shadow(BYTES, granule, WARPS)
    writer, readers = np.zeros(BYTES, np.int64), np.zeros((WARPS, BYTES), np.int64)
    for word, (size, at, warp, writing) in enumerate(accesses, 1):
        size = max(size, granule)
        at = at // size * size
        cells = shadow.find(np.array([at]), size)
        here = slice(at, at + size, granule)
        times = LINE // granule
        assert times % cells.writers.shape[1] == 0
        spread = np.repeat(cells.writers[0], max(size // granule, 1) // cells.writers.shape[1])
        np.testing.assert_array_equal(spread, writer[here])
        found = cells.readers.reshape(WARPS, -1)
        np.testing.assert_array_equal(found.repeat((size // granule) // found.shape[1], 1), readers[:, here])
        if writing:
            cells.write(np.array([word]))
            writer[at : at + size] = word
            assert cells.left().tolist() == [word]
        else:
            cells.read(np.array([warp]), np.array([word]))
            readers[warp, at : at + size] = word


def test_lanes_of_one_access_on_one_line_are_told_apart() -> None:
    shadow = Shadow(BYTES, 4, WARPS)
    where = np.arange(0, 32, 4)
    shadow.find(where, 4).write(np.arange(1, 9))
    assert shadow.find(np.array([0, 16]), 16).writers.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_an_access_of_two_lines_is_two() -> None:
    where, lanes, size = halves(np.array([32, 0]), np.array([3, 7]), 32)
    assert (where.tolist(), lanes.tolist(), size) == ([32, 48, 0, 16], [3, 3, 7, 7], LINE)
