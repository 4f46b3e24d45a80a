"""What lanes know of each other: clocks, kept once for all lanes that know the same.

A row of clocks says up to when accesses by each column of a lane's own block happened before; what is known of other
blocks hangs on the same row. Lanes that know the same share a row, so that what a barrier teaches hundreds of them is
one operation on one row.
"""

from __future__ import annotations

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
        into[block] = clocks if have is None else have if have is clocks else np.maximum(have, clocks)


class Knowledge:
    """Rows of clocks of the lanes of a machine, which know nothing at first."""

    def __init__(self, lanes: int, columns: int) -> None:
        self.columns = columns
        self.row = np.zeros(lanes, np.int64)  # of each lane
        self.foreign: dict[int, Said] = {}  # of rows that know of other blocks
        self._rows = np.zeros((lanes + 1, columns), np.int32)
        self._flat = self._rows.reshape(-1)
        self._users = np.zeros(lanes + 1, np.int64)
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
        rows = self.row.take(lanes)
        if (rows == rows[0]).all():
            return [(int(rows[0]), lanes)]
        order = rows.argsort(kind="stable")
        rows, lanes = rows[order], lanes[order]
        starts = np.flatnonzero(rows[1:] != rows[:-1]) + 1
        return [(int(self.row[group[0]]), group) for group in np.split(lanes, starts)]

    def clocks(self, lanes: Array) -> Array:
        """What lanes know of their block together; a copy."""
        rows = self.row.take(lanes)
        if (rows == rows[0]).all():
            return self._rows[rows[0]].copy()
        return np.asarray(self._rows[np.unique(rows)].max(0))

    def said(self, lanes: Array) -> Said:
        """What lanes know of other blocks together."""
        out: Said = {}
        if self.foreign:
            for row in np.unique(self.row.take(lanes)).tolist():
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
            if joint >= 0 and _same(last, more) and (self._rows[joint] == grown).all():
                self._move(group, row, joint)
                continue
            if more is not known or (clocks is not None and (grown != have).any()):
                row = self._alone(row, group)
                self._rows[row] = grown
                if more:
                    self.foreign[row] = more
            joint, last = row, more

    def unite(self, lanes: Array) -> None:
        """All of these lanes of one block know what any of them does."""
        groups = self.groups(lanes)
        if len(groups) == 1:
            return
        clocks, said = self.clocks(lanes), self.said(lanes)
        joint = self._alone(*groups[0])
        self._rows[joint] = clocks
        if said:
            self.foreign[joint] = said
        for row, group in groups[1:]:
            self._move(group, row, joint)

    def _alone(self, row: int, lanes: Array) -> int:
        """A row that only these lanes of `row` have, and that holds the same."""
        if self._users[row] == len(lanes):
            return row
        if self._free:
            fresh = self._free.pop()
        else:
            fresh, self._used = self._used, self._used + 1
        self._rows[fresh] = self._rows[row]
        if row in self.foreign:
            self.foreign[fresh] = self.foreign[row]
        self._move(lanes, row, fresh)
        return fresh

    def _move(self, lanes: Array, row: int, to: int) -> None:
        if row == to:
            return
        self.row[lanes] = to
        self._users[to] += len(lanes)
        self._users[row] -= len(lanes)
        if not self._users[row]:
            self._free.append(row)
            self.foreign.pop(row, None)


def _together(known: Said, foreign: Said) -> Said:
    """Both; `known` itself where the other adds nothing, so that rows go on sharing it."""
    if all(block in known and (known[block] >= clocks).all() for block, clocks in foreign.items()):
        return known
    out = dict(known)
    merge(out, foreign)
    return out


def _same(one: Said, other: Said) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(
        clocks is other[block] or (clocks == other[block]).all() for block, clocks in one.items()
    )
