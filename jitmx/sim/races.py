"""Races: who touched a word last, and what orders that before the access at hand.

Each granule of a space remembers its last writer and some readers, as words
`async << 62 | time << 32 | strong << 30 | block << 11 | column`. Time counts accesses. A column is a thread of the
block, or one of the copy engine's queues, whose words are the async ones. What each thread has synchronised with is a
matrix of times: `seen[lane, column]` says up to when accesses by that column of the lane's own block happened before.
A barrier of the whole block raises `floor` instead. What other blocks published through atomics, mbarriers and cluster
barriers is in `cross`, for the lanes that have such.
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
ASYNCHRONOUS = 1 << 62
_TIME = (1 << 30) - 1
_COLUMN = (1 << COLUMNS) - 1
WHO = (1 << 30) - 1
Said = dict[int, Array]  # by grid index of a block: up to when each of its columns is known


def merge(into: Said, said: Said) -> None:
    """Add what `said` tells. Arrays are never written to, so that both may share them."""
    for block, clocks in said.items():
        have = into.get(block)
        into[block] = clocks if have is None else have if have is clocks else np.maximum(have, clocks)


class Shadow:
    """Last writer of each granule of a space, and its last reader in each warp of a block, or in every `warps`-th.

    Shared memory of a cluster has `others` more: the last reader of each other block.
    """

    def __init__(self, size: int, granule: int, warps: int, others: int = 0) -> None:
        self.warps, self.slots = warps, warps + others
        self.shift = granule.bit_length() - 1
        cells = -(-size // 32) * 32 >> self.shift
        self.writer = np.zeros(cells, np.int64)
        self.readers = np.zeros((cells, self.slots), np.int64)
        self.published: dict[int, Said] = {}  # by strong writes after a fence


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
        self.foreigners = False  # whether other blocks reach into shared memory: barriers alone do not order those
        self.cross: dict[int, Said] = {}  # of the few lanes that know of other blocks; lanes may share one
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
        slot = lanes // 32 % shadow.warps if space.cluster is None else space.cluster.slots(where, lanes)
        if cells <= 1:
            last = shadow.writer.take(index)[:, None]
            shadow.readers[index, slot] = now | self.ids[lanes]
        else:
            row = index >> cells.bit_length() - 1
            last = shadow.writer.reshape(-1, cells).take(row, 0)
            shadow.readers.reshape(-1, cells, shadow.slots)[row, :, slot] = (now | self.ids[lanes])[:, None]
        self.check(m, space, last, lanes, where, line, strong, "reads", "written")
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
        index, cells = where >> shadow.shift, max(size >> shadow.shift, 1)
        row = index >> cells.bit_length() - 1
        writers = shadow.writer.reshape(-1, cells)
        self.check(m, space, writers.take(row, 0), lanes, where, line, strong, "writes", "written")
        readers = shadow.readers.reshape(-1, cells * shadow.slots).take(row, 0)
        self.check(m, space, readers, lanes, where, line, strong, "writes", "read")
        mine = now | self.ids[lanes]
        writers[row] = mine[:, None]
        if space.cluster is not None:
            space.cluster.visit(where, lanes, self.time)
        if not strong:
            left = writers[row, 0]
            if not np.array_equal(left, mine):
                at = int(np.flatnonzero(left != mine)[0])
                self.report(m, space, int(left[at]), int(lanes[at]), int(where[at]), line, "writes", "written")
            self.wrote[lanes] = self.time
        elif how != "atomic":
            self.publish(shadow, where, lanes, how)

    def note(self, space: Space, where: int, lane: int, size: int, line: int) -> None:
        """Remember a strong write that needs no check."""
        shadow = self.shadows[space.name]
        first = where >> shadow.shift
        last = where + size - 1 >> shadow.shift
        shadow.writer[first : last + 1] = self.tick(line) << 32 | STRONG | int(self.ids[lane])

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
        barriers = space.spread is not None and not self.foreigners
        if int(last.max()) <= ((self.lowest + 1 << 32) - 1 if barriers else 0):
            return
        if last.shape[1] > 1 and (last[:, 1:] == last[:, :1]).all():
            last = last[:, :1]
        # Shared memory is of one block, so that its barriers settle most entries of threads; elsewhere all count.
        settled = (self.floor[lanes][:, None] + 1 << 32) - 1 if barriers else 0
        if barriers and last.shape[1] == 1:
            flat = last[:, 0]
            known = self.seen[lanes, flat & _COLUMN] >= (flat >> 32 & _TIME)
            if (known | (last <= settled)[:, 0]).all():
                return
        i, j = np.nonzero(last > settled)
        lane, entry = lanes[i], last[i, j]
        who = entry & WHO
        other = who != self.ids[lane]
        if strong:
            other &= entry & STRONG == 0
        if not other.all():
            i, lane, entry, who = i[other], lane[other], entry[other], who[other]
        same = who >> COLUMNS == self.block[lane]
        column = who & _COLUMN
        alone = same.all()
        known = self.seen[lane, column if alone else np.where(same, column, 0)]
        if not barriers:
            known = np.maximum(known, np.where(column < self.width, self.floor[lane], 0))
        if not alone:
            known = np.where(same, known, 0)
        when = entry >> 32 & _TIME
        late = np.flatnonzero(when > known)
        while late.size:
            # Those that know the same of the same block, together.
            first = late[0]
            said = self.cross.get(int(lane[first]), _NOTHING)
            alike = who[late] >> COLUMNS == who[first] >> COLUMNS
            alike &= np.array([self.cross.get(x, _NOTHING) is said for x in lane[late].tolist()])
            group = late[alike]
            clocks = None if same[first] else said.get(int(who[first]) >> COLUMNS)
            bad = group if clocks is None else group[clocks[column[group]] < when[group]]
            if bad.size:
                k = bad[0]
                self.report(m, space, int(entry[k]), int(lane[k]), int(where[i[k]]), line, what, past)
            late = late[~alike]

    def report(
        self, m: Machine, space: Space, entry: int, lane: int, where: int, line: int, what: str, past: str
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
                self._share(np.arange(first, first + self.width))
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
                self._share(np.arange(int(warp) * 32, int(warp) * 32 + 32))
        columns = (warps % a_block)[:, None] * 32 + np.arange(32)
        square[warps[:, None, None], np.arange(32)[None, :, None], columns[:, None, :]] = now

    def meet(self, lanes: Array) -> None:
        """These lanes of one block have met."""
        self.learn(lanes, self.told(lanes))

    def told(self, lanes: Array) -> Said:
        """What happened before these lanes of one block, themselves included."""
        return {**self.foreign(lanes), int(self.block[lanes[0]]): self.snapshot(lanes)}

    def learn(self, lanes: Array, said: Said) -> None:
        """What `said` tells happened before these lanes of one block from here on."""
        own = int(self.block[lanes[0]])
        if own in said:
            self.acquire(lanes, said[own])
        foreign = {block: clocks for block, clocks in said.items() if block != own}
        made: dict[int, Said] = {}
        for lane in lanes.tolist() if foreign else ():
            known = self.cross.get(lane, _NOTHING)
            if id(known) not in made:
                made[id(known)] = _together(known, foreign)
            self.cross[lane] = made[id(known)]

    def known_by(self, lanes: Array, other: int, time: int) -> Array:
        """Which lanes of a block know what another lane of it did at a time."""
        known: Array = (lanes == other) | (self.floor[lanes] >= time) | (self.seen[lanes, other % self.width] >= time)
        return known

    def knows(self, lane: int, other: int, time: int) -> bool:
        """Whether what another lane of the machine did at a time happened before this one."""
        column = other % self.width
        if self.block[other] == self.block[lane]:
            return bool(max(self.floor[lane], self.seen[lane, column]) >= time)
        clocks = self.cross.get(lane, _NOTHING).get(int(self.block[other]))
        return clocks is not None and bool(clocks[column] >= time)

    def foreign(self, lanes: Array) -> Said:
        """What these lanes know of other blocks, together."""
        out: Said = {}
        if self.cross:
            for known in {id(known): known for known in map(self.cross.get, lanes.tolist()) if known}.values():
                merge(out, known)
        return out

    def snapshot(self, lanes: Array) -> Array:
        """As `told`, of the lanes' own block: a time for each column."""
        now = self.tick(0)
        clocks = self.seen[lanes].max(0)
        np.maximum(clocks[: self.width], self.floor[lanes[0]], out=clocks[: self.width], casting="unsafe")
        clocks[lanes % self.width] = now
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
        merge(shadow.published.setdefault(key, {}), self.told(np.array([lane])))

    def _observe(self, shadow: Shadow, key: int, lane: int) -> None:
        """What strong writes have published at a word happened before this lane from here on."""
        said = shadow.published.get(key)
        if said:
            self.learn(np.array([lane]), said)

    def _share(self, lanes: Array) -> None:
        """These lanes tell each other what they know of other blocks."""
        known = [self.cross.get(lane) for lane in lanes.tolist()]
        if all(item is known[0] for item in known):
            return
        merged = self.foreign(lanes)
        self.cross.update(dict.fromkeys(lanes.tolist(), merged))


_NOTHING: Said = {}


def _together(known: Said, foreign: Said) -> Said:
    """Both; `known` itself where the other adds nothing, so that lanes go on sharing it."""
    if all(block in known and (known[block] >= clocks).all() for block, clocks in foreign.items()):
        return known
    out = dict(known)
    merge(out, foreign)
    return out
