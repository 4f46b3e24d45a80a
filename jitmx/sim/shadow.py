"""Who touched each word of a space last: the memory of the race check.

Lines of 16 bytes have one word for their last writer and one for each reader slot, as long as accesses take whole
lines. A line that a smaller access touches is split: from then on each of its granules has words of its own.
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
        self._shift = granule.bit_length() - 1
        self._granules = LINE >> self._shift  # of a line
        self._lines = -(-size // LINE)
        self._writers = np.zeros((self._lines, 1), np.int64)
        self._readers = np.zeros((self._lines * self.slots, 1), np.int64)
        # Of split lines the same, in the order in which they were split; 0 stands for lines that are whole.
        self._place = np.zeros(self._lines, np.int64)
        self._divided = 0
        self._fine = (np.zeros((1, self._granules), np.int64), np.zeros((1, self.slots, self._granules), np.int64))
        self.published: dict[int, Any] = {}  # by strong writes after a fence

    def find(self, where: Array, size: int) -> Cells:
        """The words of accesses of `size` bytes, 16 at most."""
        line = where >> _LINE_SHIFT
        place = self._place.take(line) if self._divided or size != LINE else None
        if size == LINE and (place is None or not np.count_nonzero(place)):
            return Cells(self._writers, line, self._readers, line * self.slots, 1, self.slots)
        if place is None or np.count_nonzero(place) != len(place):
            place = self._divide(line)
        granules = max(size >> self._shift, 1)
        parts = self._granules // granules
        row, base = place, place * (self.slots * parts)
        if parts > 1:
            part = where >> self._shift + granules.bit_length() - 1 & parts - 1
            row, base = place * parts + part, base + part
        writers, readers = self._fine
        return Cells(writers.reshape(-1, granules), row, readers.reshape(-1, granules), base, parts, self.slots)

    def _divide(self, line: Array) -> Array:
        """Split the lines that are whole; the places of all."""
        fresh = np.unique(line[self._place.take(line) == 0])
        first = self._divided + 1
        self._divided += len(fresh)
        if self._divided >= len(self._fine[0]):
            self._fine = _grown(self._fine[0], 2 * self._divided), _grown(self._fine[1], 2 * self._divided)
        self._place[fresh] = np.arange(first, self._divided + 1)
        self._fine[0][first : self._divided + 1] = self._writers[fresh]
        self._fine[1][first : self._divided + 1] = self._readers.reshape(-1, self.slots, 1)[fresh]
        return self._place.take(line)


def _grown(table: Array, rows: int) -> Array:
    out = np.zeros((max(rows, 1024), *table.shape[1:]), table.dtype)
    out[: len(table)] = table
    return out


def halves(where: Array, lanes: Array, size: int) -> tuple[Array, Array, int]:
    """Accesses of more than a line as two of a line each."""
    if size <= LINE:
        return where, lanes, size
    return (where[:, None] + np.arange(0, size, LINE)).reshape(-1), np.repeat(lanes, size // LINE), LINE
