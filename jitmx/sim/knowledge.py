"""What lanes know of each other: clocks, kept once for all lanes that know the same.

A row of clocks says up to when accesses by each column of a lane's own block happened before; what is known of other
blocks hangs on the same row. Lanes that know the same share a row, so that what a barrier teaches hundreds of them is
one operation on one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Said = dict[int, Array]  # by grid index of a block: up to when each of its columns is known

NOTHING: Said = {}


def merge(into: Said, said: Said) -> None:
    """Add what `said` tells. Arrays are never written to, so that both may share them."""
    for block, clocks in said.items():
        have = into.get(block)
        into[block] = clocks if have is None else _later(have, clocks)


def common(one: Said, other: Said) -> Said:
    """What both tell."""
    return {block: np.minimum(clocks, other[block]) for block, clocks in one.items() if block in other}


def _later(have: Array, clocks: Array) -> Array:
    """The later of both, which is one of them where it can be: arrays that are the same need not be compared."""
    if have is clocks:
        return have
    ahead = np.count_nonzero(have >= clocks)
    if ahead == len(have):
        return have
    if ahead == 0:
        return clocks
    later = np.maximum(have, clocks)
    return clocks if np.count_nonzero(later == clocks) == len(clocks) else later


class Knowledge:
    """Rows of clocks of the lanes of a machine, which know nothing at first."""

    def __init__(self, lanes: int, columns: int) -> None:
        self.columns = columns
        self.row = np.zeros(lanes, np.int64)  # of each lane
        self.foreign: dict[int, Said] = {}  # of rows that know of other blocks
        self._rows = np.zeros((lanes + 2, columns), np.int32)
        self._flat = self._rows.reshape(-1)
        self._users = np.zeros(lanes + 2, np.int64)
        self._users[0] = lanes
        self._used = 1  # rows taken at least once
        self._free: list[int] = []  # and given back

    def blank(self) -> Array:
        """Clocks that tell nothing."""
        return np.zeros(self.columns, np.int32)

    def times(self, lanes: Array, columns: Array | int) -> Array:
        """Up to when each lane knows a column."""
        return self._flat.take(self.row.take(lanes) * self.columns + columns)

    def groups(self, lanes: Array) -> list[tuple[int, Array]]:
        """Lanes by the row that they share."""
        if len(lanes) == 1:
            return [(self.row.item(lanes[0]), lanes)]
        rows = self.row.take(lanes)
        first = int(rows[0])
        if np.count_nonzero(rows == first) == len(rows):
            return [(first, lanes)]
        order = rows.argsort(kind="stable")
        rows, lanes = rows[order], lanes[order]
        starts = [0, *((rows[1:] != rows[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        return [(int(rows[a]), lanes[a:b]) for a, b in itertools.pairwise(starts)]

    def clocks(self, lanes: Array) -> Array:
        """What lanes know of their block together; a copy."""
        rows = self.row.take(lanes)
        first = rows[0]
        if len(lanes) == 1 or np.count_nonzero(rows == first) == len(rows):
            return np.asarray(self._rows[first].copy())
        return np.asarray(np.maximum.reduce(self._rows[np.unique(rows)]))

    def said(self, lanes: Array) -> Said:
        """What lanes know of other blocks together."""
        return self._said(set(self.row.take(lanes).tolist())) if self.foreign else {}

    def _said(self, rows: Iterable[int]) -> Said:
        out: Said = {}
        for row in rows if self.foreign else ():
            merge(out, self.foreign.get(row, NOTHING))
        return out

    def learn(self, lanes: Array, clocks: Array | None, foreign: Said) -> None:
        """Lanes know from here on what `clocks` tells of their block and `foreign` of others."""
        joint, last = -1, NOTHING
        for row, group in self.groups(lanes):
            have = self._rows[row]
            grown = have if clocks is None else np.maximum(have, clocks)
            known = self.foreign.get(row, NOTHING)
            more = _together(known, foreign) if foreign else known
            if joint >= 0 and _same(last, more) and not np.count_nonzero(self._rows[joint] != grown):
                self._move(group, row, joint)
                continue
            if more is not known or (clocks is not None and np.count_nonzero(grown != have)):
                row = self._alone(row, group)
                self._rows[row] = grown
                if more:
                    self.foreign[row] = more
            joint, last = row, more

    def unite(self, lanes: Array) -> None:
        """All of these lanes of one block know what any of them does."""
        held = self.row.take(lanes).tolist()
        rows = list(set(held))
        if len(rows) == 1:
            return
        clocks, said = np.maximum.reduce(self._rows[rows]), self._said(rows)
        joint = self._fresh()
        self._rows[joint] = clocks
        if said:
            self.foreign[joint] = said
        self.row[lanes] = joint
        self._users[joint] = len(lanes)
        for row in rows:
            self._leave(row, held.count(row))

    def _alone(self, row: int, lanes: Array) -> int:
        """A row that only these lanes of `row` have, and that holds the same."""
        if self._users[row] == len(lanes):
            return row
        fresh = self._fresh()
        self._rows[fresh] = self._rows[row]
        if row in self.foreign:
            self.foreign[fresh] = self.foreign[row]
        self._move(lanes, row, fresh)
        return fresh

    def _fresh(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _move(self, lanes: Array, row: int, to: int) -> None:
        if row == to:
            return
        self.row[lanes] = to
        self._users[to] += len(lanes)
        self._leave(row, len(lanes))

    def _leave(self, row: int, count: int) -> None:
        self._users[row] -= count
        if not self._users[row]:
            self._free.append(row)
            self.foreign.pop(row, None)


def _together(known: Said, foreign: Said) -> Said:
    """Both; `known` itself where the other adds nothing, so that rows go on sharing it."""
    out = None
    for block, clocks in foreign.items():
        have = known.get(block)
        later = clocks if have is None else _later(have, clocks)
        if later is not have:
            out = out or dict(known)
            out[block] = later
    return known if out is None else out


def _same(one: Said, other: Said) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(
        clocks is other[block] or not np.count_nonzero(clocks != other[block]) for block, clocks in one.items()
    )
