"""Shared memory that products of warpgroups (`wgmma`) read until they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.inflight import CHUNK, Copies, Groups
from jitmx.sim.warps import alike

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]
WARPGROUP = 128


class Products:
    """Products under way of all warpgroups of a machine, by their first lanes."""

    def __init__(self, m: Machine) -> None:
        self.m, self.copies = m, Copies.of(m)
        self.groups: dict[int, Groups] = {}

    @classmethod
    def of(cls, m: Machine) -> Products:
        """Those of a machine."""
        if "products" not in m.units:
            m.units["products"] = cls(m)
        found: Products = m.units["products"]
        return found

    def read(self, firsts: Array, lanes: Array, chunks: Array, line: int) -> None:
        """Note the 16-byte chunks that a wgmma of warpgroups reads; `lanes`: of each chunk, the first of its group."""
        where = self.m.shared.locate(self.m, chunks, 0, lanes, CHUNK, line, "reads")
        columns = np.zeros(len(lanes), np.int64)
        self.copies.proxy.check(lanes, WARPGROUP, self.m.shared, where, CHUNK, line)
        for lane, which in zip(firsts.tolist(), alike(lanes), strict=True):
            columns[which] = self.copies.column(lane, "wgmma", lane)
        time = self.copies.remember(self.m.shared, lanes, where, CHUNK, columns, line, writing=False)
        for lane in firsts.tolist():
            self.groups.setdefault(lane, Groups([])).last = time

    def commit(self, lanes: Array) -> None:
        """wgmma.commit_group by whole warpgroups."""
        for lane in lanes[lanes % self.m.width % WARPGROUP == 0].tolist():
            groups = self.groups.setdefault(lane, Groups([]))
            groups.committed.append(groups.last)

    def wait(self, lanes: Array, count: int) -> None:
        """wgmma.wait_group: all but the last `count` groups are done."""
        for lane in lanes[lanes % self.m.width % WARPGROUP == 0].tolist():
            groups = self.groups.get(lane)
            done = groups.committed[: len(groups.committed) - count] if groups else []
            if done:
                clocks = self.m.races.knowledge.blank()
                clocks[self.copies.column(lane, "wgmma", lane)] = max(done)
                self.m.races.acquire(np.arange(lane, lane + WARPGROUP), clocks)
