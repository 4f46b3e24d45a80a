"""Races: who touched a word last, and what orders that before the access at hand.

Each granule of a space remembers its last writer and some readers, as words
`time << 32 | strong << 30 | block << 11 | column`. Time counts accesses. A column is a thread of the block, or one of
the copy engine's queues. What each thread has synchronised with is a matrix of times: `seen[lane, column]` says up to
when accesses by that column of the lane's own block happened before. A barrier of the whole block raises `floor`
instead. What other blocks published through atomics is in `cross`, for the few lanes that have such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.memory import Space

Array = npt.NDArray[Any]

COLUMNS = 11
ASYNC = 64  # columns of copies under way
STRONG = 1 << 30
_WHO = (1 << 30) - 1


class Shadow:
    """Last writer of each granule of a space, and its last reader in each warp of a block, or in every `slots`-th."""

    def __init__(self, size: int, granule: int, slots: int) -> None:
        self.slots = slots
        self.shift = granule.bit_length() - 1
        cells = -(-size // 32) * 32 >> self.shift
        self.writer = np.zeros(cells, np.int64)
        self.readers = np.zeros((cells, slots), np.int64)
        self.published: dict[int, dict[int, Array]] = {}  # by strong writes after a fence: clocks by block


class Races:
    """Clocks of the lanes of a machine, and the check of an access against a shadow."""

    def __init__(self, blocks: Array, threads: int, width: int) -> None:
        """`blocks`: grid index of each block at hand; `width`: lanes that each takes, `threads` of them alive."""
        self.width = width
        lanes = len(blocks) * width
        self.seen = np.zeros((lanes, width + ASYNC), np.int32)
        self.floor = np.zeros(lanes, np.int64)
        self.block = np.repeat(blocks, width).astype(np.int64)
        self.ids = self.block << COLUMNS | np.arange(lanes) % width
        self.plain = True  # `seen` holds nothing but what syncs of whole warps wrote
        self.copying = False  # whether columns of copies are in use: barriers alone do not order those
        self.shadows: dict[str, Shadow] = {}
        self.cross: dict[int, dict[int, Array]] = {}
        self.fenced = np.zeros(lanes, np.int64)  # time of each lane's last fence
        self.wrote = np.zeros(lanes, np.int64)  # time of its last weak write
        self.time = 0
        self.lines = [0]

    def tick(self, line: int) -> int:
        """The time of an access at `line`."""
        self.time += 1
        self.lines.append(line)
        return self.time

    # Accesses
    def read(self, m: Machine, space: Space, where: Array, lanes: Array, size: int, line: int, strong: bool) -> None:
        """Check reads and remember them."""
        shadow = self.shadows[space.name]
        now = self.tick(line) << 32 | (STRONG if strong else 0)
        index, cells = where >> shadow.shift, size >> shadow.shift
        slot = (lanes // 32) % shadow.slots
        if cells <= 1:
            last = shadow.writer.take(index)[:, None]
            shadow.readers[index, slot] = now | self.ids[lanes]
        else:
            row = index >> cells.bit_length() - 1
            last = shadow.writer.reshape(-1, cells).take(row, 0)
            shadow.readers.reshape(-1, cells, shadow.slots)[row, :, slot] = (now | self.ids[lanes])[:, None]
        self.check(m, space, last, lanes, where, line, strong, "reads", "written")
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
        index, cells = where >> shadow.shift, max(size >> shadow.shift, 1)
        row = index >> cells.bit_length() - 1
        writers = shadow.writer.reshape(-1, cells)
        self.check(m, space, writers.take(row, 0), lanes, where, line, strong, "writes", "written")
        readers = shadow.readers.reshape(-1, cells * shadow.slots).take(row, 0)
        self.check(m, space, readers, lanes, where, line, strong, "writes", "read")
        mine = now | self.ids[lanes]
        writers[row] = mine[:, None]
        if not strong:
            left = writers[row, 0]
            if not np.array_equal(left, mine):
                at = int(np.flatnonzero(left != mine)[0])
                self.report(m, space, int(left[at]), int(lanes[at]), int(where[at]), line, "writes", "written")
            self.wrote[lanes] = self.time
        elif how != "atomic":
            self.publish(shadow, where, lanes, how)

    def check(
        self,
        m: Machine,
        space: Space,
        last: Array,
        lanes: Array,
        where: Array,
        line: int,
        strong: bool,
        what: str,
        past: str,
    ) -> None:
        """Error unless each of `last` [lanes, n] happened before the access of its lane."""
        barriers = space.spread is not None and not self.copying
        if int(last.max()) <= ((self.lowest + 1 << 32) - 1 if barriers else 0):
            return
        # Shared memory is of one block, so that its barriers settle most entries; elsewhere every entry counts.
        settled = (self.floor[lanes][:, None] + 1 << 32) - 1 if barriers else 0
        i, j = np.nonzero(last > settled)
        lane, entry = lanes[i], last[i, j]
        who = entry & _WHO
        other = who != self.ids[lane]
        if strong:
            other &= entry & STRONG == 0
        if not other.all():
            i, lane, entry, who = i[other], lane[other], entry[other], who[other]
        same = who >> COLUMNS == self.block[lane]
        column = who & (1 << COLUMNS) - 1
        thread = column < self.width
        known = self.seen[lane, column if same.all() else np.where(same, column, 0)]
        known = np.where(same, np.maximum(known, np.where(thread, self.floor[lane], 0)), 0)
        for k in np.flatnonzero(entry >> 32 > known):
            clocks = None if same[k] else self.cross.get(int(lane[k]), {}).get(int(who[k]) >> COLUMNS)
            if clocks is None or clocks[column[k]] < entry[k] >> 32:
                self.report(m, space, int(entry[k]), int(lane[k]), int(where[i[k]]), line, what, past)

    def report(
        self, m: Machine, space: Space, entry: int, lane: int, where: int, line: int, what: str, past: str
    ) -> None:
        """The error of a race."""
        who = entry & _WHO
        column = who & (1 << COLUMNS) - 1
        other = f"thread {m.thread_name(column)}" if column < self.width else "an asynchronous operation"
        block = "" if who >> COLUMNS == self.block[lane] else f" of block {m.block_name(who >> COLUMNS)}"
        m.fault(
            line,
            lane,
            f"{what} {space.name} memory at {space.address_of(where):#x}, which {other}{block} has {past} at "
            f"PTX line {self.lines[entry >> 32]} with nothing between them that orders the two",
        )

    # Synchronisation
    @property
    def lowest(self) -> int:
        """The time up to which every lane knows its whole block."""
        return self._lowest

    _lowest = 0

    def block_barrier(self, blocks: Array) -> None:
        """All threads of the blocks at these positions have met."""
        now = self.tick(0)
        if self.cross:
            for block in blocks:
                first = int(block) * self.width
                self._merge_cross(np.arange(first, first + self.width))
        self.floor.reshape(-1, self.width)[blocks] = now
        if self.copying:
            copies = self.seen.reshape(-1, self.width, self.width + ASYNC)[..., self.width :]
            copies[blocks] = copies[blocks].max(1, keepdims=True)
        self._lowest = int(self.floor.min())

    def warp_barrier(self, warps: Array) -> None:
        """All lanes of these warps have met."""
        now = self.tick(0)
        a_block = self.width // 32
        square = self.seen.reshape(-1, 32, self.width + ASYNC)
        if not self.plain:
            square[warps] = square[warps].max(1, keepdims=True)
        if self.cross:
            for warp in warps:
                self._merge_cross(np.arange(int(warp) * 32, int(warp) * 32 + 32))
        columns = (warps % a_block)[:, None] * 32 + np.arange(32)
        square[warps[:, None, None], np.arange(32)[None, :, None], columns[:, None, :]] = now

    def meet(self, lanes: Array) -> None:
        """These lanes of one block have met."""
        self.acquire(lanes, self.snapshot(lanes))

    def snapshot(self, lanes: Array) -> Array:
        """What happened before these lanes of one block, themselves included: a time for each column."""
        now = self.tick(0)
        clocks = self.seen[lanes].max(0)
        np.maximum(clocks[: self.width], self.floor[lanes[0]], out=clocks[: self.width], casting="unsafe")
        clocks[lanes % self.width] = now
        if self.cross:
            self._merge_cross(lanes)
        return np.asarray(clocks)

    def acquire(self, lanes: Array, clocks: Array) -> None:
        """What `clocks` of the same block tells happened before these lanes from here on."""
        self.plain = False
        self.seen[lanes] = np.maximum(self.seen[lanes], clocks)

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
        said = shadow.published.setdefault(key, {})
        everything = {**self.cross.get(lane, {}), int(self.block[lane]): self.snapshot(np.array([lane]))}
        for block, clocks in everything.items():
            said[block] = np.maximum(said[block], clocks) if block in said else clocks

    def _observe(self, shadow: Shadow, key: int, lane: int) -> None:
        """What strong writes have published at a word happened before this lane from here on."""
        said = shadow.published.get(key)
        if not said:
            return
        known = dict(self.cross.get(lane, {}))
        for block, clocks in said.items():
            if block == self.block[lane]:
                self.acquire(np.array([lane]), clocks)
            else:
                known[block] = np.maximum(known[block], clocks) if block in known else clocks
        if known:
            self.cross[lane] = known

    def _merge_cross(self, lanes: Array) -> None:
        merged: dict[int, Array] = {}
        for lane in lanes:
            for origin, times in self.cross.get(int(lane), {}).items():
                merged[origin] = np.maximum(merged[origin], times) if origin in merged else times
        if merged:
            for lane in lanes:
                self.cross[int(lane)] = merged
