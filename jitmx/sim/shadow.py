"""Who touched each word of a space last: the memory of the race check.

Lines of 16 bytes have one word for their last writer and one for each reader slot, as long as accesses take whole
lines. Where smaller accesses touch a line, it is split to granules of their size, each with words of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LINE = 16
_LINE_SHIFT = 4


class Cells:
    """Where the words of one access lie: those of its writers and readers, a row for each lane."""

    __slots__ = ("_base", "_readers", "_row", "_slots", "_step", "_writers")

    def __init__(self, writers: Array, row: Array, readers: Array, base: Array, step: int, slots: int) -> None:
        self._writers, self._row = writers, row
        self._readers, self._base, self._step, self._slots = readers, base, step, slots

    @property
    def writers(self) -> Array:
        """Words of the last writers [lanes, granules]."""
        return self._writers.take(self._row, 0)

    @property
    def readers(self) -> Array:
        """Words of the readers [lanes, slots · granules]."""
        if self._step == 1:
            return self._readers.reshape(-1, self._slots * self._readers.shape[1]).take(self._base // self._slots, 0)
        rows = self._base[:, None] + np.arange(0, self._slots * self._step, self._step)
        return self._readers.take(rows.reshape(-1), 0).reshape(len(rows), -1)

    def write(self, words: Array) -> None:
        """Note lanes, or one word for all, as the last writers."""
        _put(self._writers, self._row, words)

    def read(self, slot: Array | int, words: Array) -> None:
        """Note lanes, or one word for all, as the last readers in a slot."""
        _put(self._readers, self._base + (slot if self._step == 1 else slot * self._step), words)

    def left(self) -> Array:
        """The word of the last writer of each lane's first granule."""
        return self._writers[:, 0].take(self._row)


def _put(table: Array, row: Array, words: Array) -> None:
    # One index into one dimension is many times as fast as two.
    if table.shape[1] == 1:
        table.reshape(-1)[row] = words
    else:
        table[row] = words[:, None] if words.ndim else words


class Shadow:
    """Last writer of each granule of a space, and its last reader in each warp of a block, or in every `warps`-th.

    Shared memory of a cluster has `others` more: the last reader of each other block.
    """

    def __init__(self, size: int, granule: int, warps: int, others: int = 0) -> None:
        self.warps, self.slots = warps, warps + others
        self._finest = (LINE // granule).bit_length() - 1
        lines = -(-size // LINE)
        # A line of level n has 2**n granules. Each level is a table of the lines that have come to it; in the first
        # lie all, in order.
        self._level = np.zeros(lines, np.int8)
        self._place = np.arange(lines)
        self._mark = np.zeros(lines, np.int64)
        self._tables = [(np.zeros((lines, 1), np.int64), np.zeros((lines, self.slots, 1), np.int64))]
        self._tables += [self._table(1 << level, 1) for level in range(1, self._finest + 1)]
        self._rows = [lines] + [0] * self._finest  # of each table, those in use
        self.published: dict[int, Any] = {}  # by strong writes after a fence

    def _table(self, granules: int, rows: int) -> tuple[Array, Array]:
        return np.zeros((rows, granules), np.int64), np.zeros((rows, self.slots, granules), np.int64)

    def find(self, where: Array, size: int) -> Cells:
        """The words of accesses of `size` bytes, 16 at most."""
        line, own = where >> _LINE_SHIFT, min(_LEVELS[size], self._finest)
        level = own
        if any(self._rows[1:]) or own:
            levels = self._level.take(line)
            level = max(own, int(np.maximum.reduce(levels)))
            late = levels < level
            if np.count_nonzero(late):
                self._split(line[late], level)
        writers, readers = self._tables[level]
        place = self._place.take(line) if level else line
        granules, parts = 1 << level - own, 1 << own
        row, base = place, place * (self.slots * parts)
        if own:
            part = where >> _LINE_SHIFT - own & parts - 1
            row, base = place * parts + part, base + part
        return Cells(writers.reshape(-1, granules), row, readers.reshape(-1, granules), base, parts, self.slots)

    def _split(self, line: Array, level: int) -> None:
        """Bring lines to a level that is above theirs."""
        # Each line once: that which is written last stays.
        numbers = np.arange(len(line))
        self._mark[line] = numbers
        line = line[self._mark.take(line) == numbers]
        levels, (writers, readers) = self._level.take(line), self._tables[level]
        for old in set(levels.tolist()):
            fresh = line[levels == old]
            first = self._rows[level]
            last = self._rows[level] = first + len(fresh)
            if last > len(writers):
                table = self._table(1 << level, max(2 * last, 256))
                table[0][: len(writers)], table[1][: len(writers)] = writers, readers
                self._tables[level] = writers, readers = table
            before, times = self._place[fresh], 1 << level - old
            writers[first:last] = self._tables[old][0][before].repeat(times, 1)
            readers[first:last] = self._tables[old][1][before].repeat(times, 2)
            self._level[fresh], self._place[fresh] = level, np.arange(first, last)


_LEVELS = {16: 0, 8: 1, 4: 2, 2: 3, 1: 4}


def halves(where: Array, lanes: Array, size: int) -> tuple[Array, Array, int]:
    """Accesses of more than a line as two of a line each."""
    if size <= LINE:
        return where, lanes, size
    return (where[:, None] + np.arange(0, size, LINE)).reshape(-1), np.repeat(lanes, size // LINE), LINE
