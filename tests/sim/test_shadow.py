"""Lines that are split as accesses need it remember the same as a word for each byte would."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx.sim.shadow import LINE, WHO, Shadow, halves
from strategies import examples

BYTES, WARPS = 64, 2

_sizes, _places = st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, BYTES - 1)
_lanes = st.lists(st.tuples(st.integers(0, 3), _places, st.integers(0, WARPS - 1)), min_size=1, max_size=4)
_access = st.tuples(_sizes, _lanes, st.booleans(), st.booleans())


def _expected(history: list[int], settled: int) -> tuple[int, int]:
    """The last reader, and the last that was another; 0 where settled."""
    others = [word for word in history if word & WHO != history[-1] & WHO]
    return (history or [0])[-1], others[-1] if others and others[-1] > settled else 0


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(_access, max_size=20), st.sampled_from([1, 2, 4]))
def test_each_byte_has_its_last_writer_and_in_each_slot_its_last_two_readers(
    accesses: list[tuple[int, list[tuple[int, int, int]], bool, bool]], granule: int
) -> None:
    shadow = Shadow(BYTES, granule, WARPS)
    writer, settled = np.zeros(BYTES, np.int64), 0
    history: list[list[list[int]]] = [[[] for _ in range(BYTES)] for _ in range(WARPS)]
    for time, (size, lanes, writing, settling) in enumerate(accesses, 1):
        size = max(size, granule)
        who, at, warps = np.array(lanes).T
        at, words = at // size * size, time << 32 | who
        cells = shadow.find(at, size)
        readers = [table.reshape(len(at), WARPS, -1) for table in cells.readers(settled)]
        readers += [np.zeros_like(readers[0])] * (2 - len(readers))
        for i, place in enumerate(at.tolist()):
            times = LINE // granule
            assert times % cells.writers.shape[1] == 0
            here = slice(place, place + size, granule)
            spread = np.repeat(cells.writers[i], max(size // granule, 1) // cells.writers.shape[1])
            np.testing.assert_array_equal(spread, writer[here])
            for warp in range(WARPS):
                wanted = [_expected(told, settled) for told in history[warp][here]]
                found = np.array([table[i, warp] for table in readers])
                found = found.repeat((size // granule) // found.shape[1], 1)
                found[1, found[1] <= settled] = 0
                assert list(zip(*found.tolist(), strict=True)) == wanted
        if writing:
            cells.write(words)
        else:
            cells.read(warps, words, settled)
        for word, warp, place in zip(words.tolist(), warps.tolist(), at.tolist(), strict=True):
            if writing:
                writer[place : place + size] = word
            else:
                for told in history[warp][place : place + size]:
                    told.append(word)
        if writing:
            assert cells.left().tolist() == writer[at].tolist()
        if settling:
            settled = (time + 1 << 32) - 1


def test_lanes_of_one_access_on_one_line_are_told_apart() -> None:
    shadow = Shadow(BYTES, 4, WARPS)
    where = np.arange(0, 32, 4)
    shadow.find(where, 4).write(np.arange(1, 9))
    assert shadow.find(np.array([0, 16]), 16).writers.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_an_access_of_two_lines_is_two() -> None:
    where, lanes, size = halves(np.array([32, 0]), np.array([3, 7]), 32)
    assert (where.tolist(), lanes.tolist(), size) == ([32, 48, 0, 16], [3, 3, 7, 7], LINE)
