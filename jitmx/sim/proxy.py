"""Fences between what threads store and what reads it through the asynchronous proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.memory import Space
from jitmx.sim.shadow import COLUMNS, WHO
from jitmx.sim.warps import alike

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]


class Proxy:
    """The proxy fences of the lanes of a machine."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        # Time of each lane's last fence, by the space that it is for.
        self.fenced = {space: np.zeros(m.lanes, np.int64) for space in ("shared", "global")}

    def fence(self, lanes: Array, spaces: tuple[str, ...]) -> None:
        """fence.proxy.async by these lanes."""
        now = self.m.races.tick(0)
        for space in spaces:
            self.fenced[space][lanes] = now

    def check(self, firsts: Array, lanes: int, space: Space, where: Array, size: int, line: int) -> None:
        """Check that what threads stored is fenced for its reader: `lanes` of them, from the first of each place on."""
        words = self.m.races.shadows[space.name].find(where, size).writers
        stored = (words != 0) & (words & (1 << COLUMNS) - 1 < self.m.width)
        if np.count_nonzero(stored):
            for which in alike(firsts):
                self._check(int(firsts[which[0]]), lanes, space, words[which][stored[which]], line)

    def _check(self, lane: int, lanes: int, space: Space, last: Array, line: int) -> None:
        m, fenced = self.m, self.fenced[space.name]
        if not len(last):
            return
        column = last & (1 << COLUMNS) - 1
        block = ((last & WHO) >> COLUMNS) - m.blocks[0]
        # Blocks of an earlier wave have ended, and what they fenced is not known.
        own = np.where(block >= 0, fenced[np.maximum(block, 0) * m.width + column], 0)
        late = last >> 32 > np.maximum(own, fenced[lane : lane + lanes].max())
        if late.any():
            at = int(np.flatnonzero(late)[0])
            writer, written = m.thread_name(int(column[at])), m.races.lines[int(last[at]) >> 32]
            text = f"which thread {writer} has written at PTX line {written} without fence.proxy.async after it"
            m.fault(line, lane, f"reads {space.name} memory through the asynchronous proxy, {text}")
