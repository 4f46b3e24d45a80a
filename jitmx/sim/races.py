"""Races: who touched a word last, and what orders that before the access at hand.

Each granule of a space remembers its last writer and some readers (jitmx.sim.shadow), as words
`async << 62 | time << 32 | strong << 30 | block << 11 | column`. Time counts accesses. A column is a thread of the
block, or one of the copy engine's queues, whose words are the async ones. Up to when accesses by each column happened
before those of a lane is its knowledge (jitmx.sim.knowledge), of its own block and, through atomics, mbarriers and
cluster barriers, of others. Besides, `floor` says up to when a lane knows its whole block, and `warp_floor` its warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.knowledge import Knowledge, Said, merge
from jitmx.sim.shadow import LINE, WHO, Shadow, halves

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.memory import Space

Array = npt.NDArray[Any]

COLUMNS = 11
ASYNC = 65  # columns of copies under way, and the last one for the previous kernel
STRONG = 1 << 30
ASYNCHRONOUS = 1 << 62
_TIME = (1 << 30) - 1
_COLUMN = (1 << COLUMNS) - 1


class Races:
    """Clocks of the lanes of a machine, and the check of an access against a shadow."""

    def __init__(self, blocks: Array, threads: int, width: int) -> None:
        """`blocks`: grid index of each block at hand; `width`: lanes that each takes, `threads` of them alive."""
        self.width = width
        lanes = len(blocks) * width
        ids = np.arange(lanes)
        self.knowledge = Knowledge(lanes, width + ASYNC)
        self.floor = np.zeros(lanes, np.int64)
        self.warp_floor = np.zeros(lanes, np.int64)
        self.warp = ids % width // 32  # of its block
        self.block = np.repeat(blocks, width).astype(np.int64)
        self.ids = self.block << COLUMNS | ids % width
        self.shadows: dict[str, Shadow] = {}
        self.foreigners = False  # whether other blocks reach into shared memory: barriers alone do not order those
        self.fenced = np.zeros(lanes, np.int64)  # time of each lane's last fence
        self.wrote = np.zeros(lanes, np.int64)  # time of its last weak write
        self.lowest = 0  # the time up to which every lane knows its whole block
        self.time = 0
        self.lines = [0]

    def tick(self, line: int) -> int:
        """The time of an access at `line`."""
        self.time += 1
        self.lines.append(line)
        return self.time

    # Accesses
    def read(
        self, m: Machine, space: Space, where: Array, lanes: Array, size: int, line: int | tuple[int, ...], strong: bool
    ) -> None:
        """Check reads and remember them; several lines are those of as many instructions one after the other."""
        shadow = self.shadows[space.name]
        now: Any
        if isinstance(line, tuple):
            now = np.repeat(np.array([self.tick(one) for one in line]) << 32, len(where) // len(line))
        else:
            now = self.tick(line) << 32 | (STRONG if strong else 0)
        at, each, size = halves(where, lanes, size)
        cells = shadow.find(at, size)
        if space.cluster is None:
            slot = self.warp.take(each)
            slot = slot % shadow.warps if shadow.warps * 32 < self.width else slot
        else:
            slot = space.cluster.slots(at, each)
        last = cells.writers
        cells.read(slot, self.ids.take(each) | now, self.settled(space))
        self.check(m, space, last, each, at, line, strong, "reads", "written")
        if space.cluster is not None:
            space.cluster.visit(where, lanes, self.time)
        if strong:
            self.observe(shadow, where, lanes)

    def write(
        self, m: Machine, space: Space, where: Array, lanes: Array, size: int, line: int, how: str | bool
    ) -> None:
        """Check writes and remember them; two lanes that write one granule in one instruction race.

        `how`: "" weak, "strong", "release" where the write is a release, or "atomic" where `exchange` follows.
        """
        strong = bool(how)
        shadow = self.shadows[space.name]
        now = self.tick(line) << 32 | (STRONG if strong else 0)
        at, each, size = halves(where, lanes, size)
        cells = shadow.find(at, size)
        self.check(m, space, cells.writers, each, at, line, strong, "writes", "written")
        for last in cells.readers(self.settled(space)):
            self.check(m, space, last, each, at, line, strong, "writes", "read")
        mine = self.ids.take(each) | now
        cells.write(mine)
        if space.cluster is not None:
            space.cluster.visit(where, lanes, self.time)
        if not strong:
            left = cells.left()
            if np.count_nonzero(left != mine):
                i = int(np.flatnonzero(left != mine)[0])
                self.report(m, space, int(left[i]), int(each[i]), int(at[i]), line, "writes", "written")
            self.wrote[lanes] = self.time
        elif how != "atomic":
            self.publish(shadow, where, lanes, how)

    def note(self, space: Space, where: Array, lanes: Array, size: int, line: int) -> None:
        """Remember strong writes that need no check."""
        self.shadows[space.name].find(where, size).write(self.ids[lanes] | self.tick(line) << 32 | STRONG)

    def settled(self, space: Space) -> int:
        """The largest word of which every access is sure to have happened before what comes now."""
        # Shared memory is of one block, so that its barriers settle most entries of threads; elsewhere all count.
        barriers = space.spread is not None and not self.foreigners
        return (self.lowest + 1 << 32) - 1 if barriers else 0

    def check(
        self,
        m: Machine,
        space: Space,
        last: Array,
        lanes: Array,
        where: Array,
        line: int | tuple[int, ...],
        strong: bool,
        what: str,
        past: str,
    ) -> None:
        """Error unless each of `last` [lanes, n] happened before the access of its lane."""
        settled = self.settled(space)
        if int(np.maximum.reduce(last, None)) <= settled:
            return
        if 1 < last.shape[1] <= LINE and not np.count_nonzero(last[:, 1:] != last[:, :1]):
            last = last[:, :1]
        entry, lane, i = last.reshape(-1), lanes, None
        due = entry > settled
        if last.shape[1] > 1 or np.count_nonzero(due) != len(due):
            i = due.nonzero()[0]
            entry = entry.take(i)
            if last.shape[1] > 1:
                i //= last.shape[1]
            lane = lanes.take(i)
        who = entry & WHO
        column = who & _COLUMN
        when = entry >> 32 & _TIME
        same = who >> COLUMNS == self.block.take(lane)
        known = self.knowledge.times(lane, column) >= when
        if np.count_nonzero(known) != len(known):
            known |= (column >> 5 == self.warp.take(lane)) & (self.warp_floor.take(lane) >= when)
            known |= (column < self.width) & (self.floor.take(lane) >= when)
        known &= same
        if np.count_nonzero(known) == len(known):
            return
        known |= who == self.ids.take(lane)
        if strong:
            known |= entry & STRONG != 0
        if np.count_nonzero(known) == len(known):
            return
        late = (~known).nonzero()[0]
        bad = self._unknown(lane[late], who[late], when[late])
        if bad is not None:
            at = int(late[bad])
            first = at if i is None else int(i[at])
            self.report(m, space, int(entry[at]), int(lane[at]), int(where[first]), line, what, past)

    def _unknown(self, lanes: Array, who: Array, when: Array) -> int | None:
        """The first of some accesses, most of other blocks, that did not happen before those of `lanes`."""
        rows, blocks = self.knowledge.row.take(lanes), who >> COLUMNS
        keys = rows << 32 | blocks
        bad = blocks == self.block.take(lanes)
        for key in np.unique(keys[~bad]).tolist():
            clocks = self.knowledge.foreign.get(key >> 32, {}).get(key & (1 << 32) - 1)
            group = (keys == key).nonzero()[0]
            if clocks is None:
                bad[group[0]] = True
            else:
                bad[group] |= clocks.take(who[group] & _COLUMN) < when[group]
        return int(bad.argmax()) if bad.any() else None

    def report(
        self,
        m: Machine,
        space: Space,
        entry: int,
        lane: int,
        where: int,
        line: int | tuple[int, ...],
        what: str,
        past: str,
    ) -> None:
        """The error of a race."""
        who = entry & WHO
        column = who & _COLUMN
        other = f"thread {m.thread_name(column)}" if column < self.width else "an asynchronous operation"
        block = "" if who >> COLUMNS == self.block[lane] else f" of block {m.block_name(who >> COLUMNS)}"
        m.fault(
            line,
            lane,
            f"{what} {space.place(where)}, which {other}{block} has {past} at "
            f"PTX line {self.lines[entry >> 32 & _TIME]} with nothing between them that orders the two",
        )

    # Synchronisation
    def block_barrier(self, blocks: Array) -> None:
        """All threads of the blocks at these positions have met."""
        now = self.tick(0)
        if self.knowledge.row.any():
            for block in blocks.tolist():
                self.knowledge.unite(np.arange(block * self.width, (block + 1) * self.width))
        self.floor.reshape(-1, self.width)[blocks] = now
        self.lowest = int(self.floor.min())

    def warp_barrier(self, warps: Array) -> None:
        """All lanes of these warps have met."""
        now = self.tick(0)
        rows = self.knowledge.row.reshape(-1, 32)[warps]
        apart = (rows != rows[:, :1]).any(1)
        if apart.any():
            for warp in warps[apart].tolist():
                self.knowledge.unite(np.arange(warp * 32, warp * 32 + 32))
        self.warp_floor.reshape(-1, 32)[warps] = now

    def meet(self, lanes: Array) -> None:
        """These lanes of one block have met."""
        self.learn(lanes, self.told(lanes))

    def told(self, lanes: Array) -> Said:
        """What happened before these lanes of one block, themselves included."""
        return {**self.knowledge.said(lanes), int(self.block[lanes[0]]): self.snapshot(lanes)}

    def learn(self, lanes: Array, said: Said) -> None:
        """What `said` tells happened before these lanes of one block from here on."""
        own = int(self.block[lanes[0]])
        foreign = {block: clocks for block, clocks in said.items() if block != own}
        self.knowledge.learn(lanes, said.get(own), foreign)

    def known_by(self, lanes: Array, other: int, time: int) -> Array:
        """Which lanes of a block know what another lane of it did at a time."""
        column = other % self.width
        known: Array = self.knowledge.times(lanes, column) >= time
        if np.count_nonzero(known) != len(known):
            known |= (lanes == other) | (self.floor.take(lanes) >= time)
            known |= (self.warp.take(lanes) == column // 32) & (self.warp_floor.take(lanes) >= time)
        return known

    def knows(self, lanes: Array, other: int, time: int) -> Array:
        """Which lanes of any one block know what another lane of the machine did at a time."""
        if self.block[other] == self.block[lanes[0]]:
            return self.known_by(lanes, other, time)
        known = np.zeros(len(lanes), bool)
        for row, group in self.knowledge.groups(lanes):
            clocks = self.knowledge.foreign.get(row, {}).get(int(self.block[other]))
            if clocks is not None and clocks[other % self.width] >= time:
                known |= lanes == group if len(group) == len(lanes) else np.isin(lanes, group)
        return known

    def snapshot(self, lanes: Array) -> Array:
        """As `told`, of the lanes' own block: a time for each column."""
        now = self.tick(0)
        clocks = self.knowledge.clocks(lanes)
        threads = clocks[: self.width]
        np.maximum(threads, self.floor[lanes[0]], out=threads, casting="unsafe")
        warps = self.warp.take(lanes)
        first = int(warps[0])
        if len(lanes) == 1:
            own = threads[32 * first : 32 * first + 32]
            np.maximum(own, self.warp_floor[lanes[0]], out=own, casting="unsafe")
        elif np.count_nonzero(warps == first) == len(warps):
            own = threads[32 * first : 32 * first + 32]
            np.maximum(own, self.warp_floor.take(lanes).max(), out=own, casting="unsafe")
        else:
            times = np.zeros(self.width // 32, clocks.dtype)
            np.maximum.at(times, warps, self.warp_floor.take(lanes).astype(clocks.dtype))
            np.maximum(threads.reshape(-1, 32), times[:, None], out=threads.reshape(-1, 32))
        clocks[lanes % self.width] = now
        return clocks

    def acquire(self, lanes: Array, clocks: Array) -> None:
        """What `clocks` of the same block tells happened before these lanes from here on."""
        self.knowledge.learn(lanes, clocks, {})

    def wait_previous(self, lanes: Array) -> None:
        """griddepcontrol.wait: what the previous kernel did happened before these lanes from here on."""
        clocks = self.knowledge.blank()
        clocks[-1] = 1
        self.acquire(lanes, clocks)

    def after_previous(self, lanes: Array) -> Array:
        """Which lanes have waited for the previous kernel, or learnt from a thread that has."""
        known: Array = self.knowledge.times(lanes, self.knowledge.columns - 1) > 0
        for at in (~known).nonzero()[0].tolist():
            said = self.knowledge.said(lanes[at : at + 1])
            known[at] = any(clocks[-1] > 0 for clocks in said.values())
        return known

    def fence(self, lanes: Array) -> None:
        """These lanes run a fence: what they know may travel with their next strong write."""
        self.fenced[lanes] = self.tick(0)

    def exchange(self, shadow: Shadow, where: Array, lanes: Array, how: str | bool) -> None:
        """Atomics of lanes, in their order: each learns what was published at its word, and may publish itself.

        Who has fenced since its last weak write, or releases, publishes all that it knows.
        """
        ready = self.fenced[lanes] > self.wrote[lanes] if how != "release" else np.ones(len(lanes), bool)
        if shadow.published or ready.any():
            for lane, key, speaks in zip(lanes.tolist(), where.tolist(), ready.tolist(), strict=True):
                self._observe(shadow, key, lane)
                if speaks:
                    self._publish(shadow, key, lane)

    def publish(self, shadow: Shadow, where: Array, lanes: Array, how: str | bool) -> None:
        """The same for strong stores, which learn nothing."""
        ready = self.fenced[lanes] > self.wrote[lanes] if how != "release" else np.ones(len(lanes), bool)
        for at in np.flatnonzero(ready):
            self._publish(shadow, int(where[at]), int(lanes[at]))

    def observe(self, shadow: Shadow, where: Array, lanes: Array) -> None:
        """The same for strong loads, which publish nothing."""
        if shadow.published:
            for lane, key in zip(lanes.tolist(), where.tolist(), strict=True):
                self._observe(shadow, key, lane)

    def _publish(self, shadow: Shadow, key: int, lane: int) -> None:
        merge(shadow.published.setdefault(key, {}), self.told(np.array([lane])))

    def _observe(self, shadow: Shadow, key: int, lane: int) -> None:
        """What strong writes have published at a word happened before this lane from here on."""
        said = shadow.published.get(key)
        if said:
            self.learn(np.array([lane]), said)
