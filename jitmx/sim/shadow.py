"""Who touched each word of a space last: the memory of the race check.

Lines of 16 bytes have one word for their last writer and two for each reader slot, as long as accesses take whole
lines. Where smaller accesses touch a line, it is split to granules of their size, each with words of its own.

The two of a reader slot are its last reader, and the last one before or beside that which was another: whoever writes
next, a reader that is not the writer is remembered if there was one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLUMNS = 11  # bits of a word that say which column of its block
WHO = (1 << 30) - 1  # and that say whose it is
LINE = 16
_LINE_SHIFT = 4


class Cells:
    """Where the words of one access lie: those of its writers and readers, a row for each lane."""

    __slots__ = ("_base", "_crowded", "_level", "_others", "_readers", "_row", "_slots", "_step", "_writers")

    def __init__(self, shadow: Shadow, level: int, granules: int, row: Array, base: Array, step: int) -> None:
        self._writers, self._readers, self._others = (t.reshape(-1, granules) for t in shadow.tables[level])
        self._slots, self._crowded, self._level = shadow.slots, shadow.crowded, level
        self._row, self._base, self._step = row, base, step

    @property
    def writers(self) -> Array:
        """Words of the last writers [lanes, granules]."""
        return self._writers.take(self._row, 0)

    def readers(self, settled: int) -> Iterator[Array]:
        """Words of the last readers [lanes, slots · granules]; then, if any is above `settled`, of the others."""
        yield self._all(self._readers)
        if self._crowded[self._level] > settled:
            yield self._all(self._others)

    def _all(self, table: Array) -> Array:
        """What a table has for all slots."""
        if self._step == 1:
            return table.reshape(-1, self._slots * table.shape[1]).take(self._base // self._slots, 0)
        rows = self._base[:, None] + np.arange(0, self._slots * self._step, self._step)
        return table.take(rows.reshape(-1), 0).reshape(len(rows), -1)

    def write(self, words: Array) -> None:
        """Note lanes as the last writers."""
        _put(self._writers, self._row, words)

    def read(self, slot: Array | int, words: Array, settled: int) -> None:
        """Note lanes as the last readers in a slot. Readers up to `settled` need not be remembered beside them.

        `words` are in the order of time.
        """
        row: Array = self._base + (slot if self._step == 1 else slot * self._step)
        each = self._readers.shape[1]
        if each > 1:
            row, words = (row[:, None] * each + np.arange(each)).reshape(-1), words.repeat(each)
        table = self._readers.reshape(-1)
        before = table.take(row)
        table[row] = words
        last = table.take(row)
        latest = int(np.maximum.reduce(before))
        if latest > settled:
            self._crowd(row, before, last, latest)
        self._crowd(row, words, last, words.item(-1) | WHO)

    def _crowd(self, row: Array, words: Array, last: Array, latest: int) -> None:
        """Remember words, none above `latest`, beside the last readers where they are of others."""
        differ = (words ^ last) & WHO
        if np.count_nonzero(differ):
            at = differ.nonzero()[0]
            self._others.reshape(-1)[row.take(at)] = words.take(at)
            self._crowded[self._level] = max(self._crowded[self._level], latest)

    def left(self) -> Array:
        """The word of the last writer of each lane's first granule."""
        return self._writers[:, 0].take(self._row)


def _put(table: Array, row: Array, words: Array) -> None:
    # One index into one dimension is many times as fast as two.
    if table.shape[1] == 1:
        table.reshape(-1)[row] = words
    else:
        table[row] = words[:, None]


class Shadow:
    """Last writer of each granule of a space, and its last readers in each warp of a block, or in every `warps`-th.

    Shared memory of a cluster has `others` more, the last readers of each other block, and global memory those of every
    `others`-th block.
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
        self.tables = [self._table(1 << level, 1 if level else lines) for level in range(self._finest + 1)]
        self._rows = [lines] + [0] * self._finest  # of each table, those in use
        self.crowded = [0] * (self._finest + 1)  # of each table, the largest word of a reader beside the last
        self.published: dict[int, Any] = {}  # by strong writes, by place (jitmx.sim.releases)
        # Words of all whose atomics have changed a place since something else was written there, by thread.
        self.changed: dict[int, dict[int, int]] = {}

    def _table(self, granules: int, rows: int) -> tuple[Array, Array, Array]:
        """Words of the last writers, the last readers, and the others."""
        slots = rows, self.slots, granules
        return np.zeros((rows, granules), np.int64), np.zeros(slots, np.int64), np.zeros(slots, np.int64)

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
        place = self._place.take(line) if level else line
        granules, parts = 1 << level - own, 1 << own
        row, base = place, place * (self.slots * parts)
        if own:
            part = where >> _LINE_SHIFT - own & parts - 1
            row, base = place * parts + part, base + part
        return Cells(self, level, granules, row, base, parts)

    def _split(self, line: Array, level: int) -> None:
        """Bring lines to a level that is above theirs."""
        # Each line once: that which is written last stays.
        numbers = np.arange(len(line))
        self._mark[line] = numbers
        line = line[self._mark.take(line) == numbers]
        levels = self._level.take(line)
        for old in set(levels.tolist()):
            fresh = line[levels == old]
            first = self._rows[level]
            last = self._rows[level] = first + len(fresh)
            if last > len(self.tables[level][0]):
                tables = self._table(1 << level, max(2 * last, 256))
                for table, full in self._used(tables, level):
                    table[:first] = full[:first]
                self.tables[level] = tables
            before, times = self._place[fresh], 1 << level - old
            for table, coarse in self._used(self.tables[level], old):
                words = coarse[before]
                if words.any():  # what comes new to a table is zeros
                    finer = table[first:last]
                    finer.reshape(*words.shape, times)[...] = words[..., None]
            self.crowded[level] = max(self.crowded[level], self.crowded[old])
            self._level[fresh], self._place[fresh] = level, np.arange(first, last)

    def _used(self, tables: tuple[Array, Array, Array], level: int) -> list[tuple[Array, Array]]:
        """Each of `tables` with that of a level, without those of other readers where these are all zeros."""
        return list(zip(tables, self.tables[level], strict=True))[: 3 if self.crowded[level] else 2]


_LEVELS = {16: 0, 8: 1, 4: 2, 2: 3, 1: 4}


def halves(where: Array, lanes: Array, size: int) -> tuple[Array, Array, int]:
    """Accesses of more than a line as two of a line each."""
    if size <= LINE:
        return where, lanes, size
    return (where[:, None] + np.arange(0, size, LINE)).reshape(-1), np.repeat(lanes, size // LINE), LINE
