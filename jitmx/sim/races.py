"""Races: who touched a word last, and what orders that before the access at hand.

Each granule of a space remembers its last writer and some readers (jitmx.sim.shadow), as words
`async << 62 | time << 32 | scope << 30 | block << 11 | column`. Time counts accesses. The scope is that of a strong
access, 0 of a weak one: two strong accesses whose scopes include each other do not race. A column is a thread of the
block, or one of the copy engine's queues, whose words are the async ones. Up to when accesses by each column happened
before those of a lane is its knowledge (jitmx.sim.knowledge), of its own block and, through strong accesses
(jitmx.sim.releases), mbarriers and cluster barriers, of others. Besides, `floor` says up to when a lane knows its whole
block, and `warp_floor` its warp.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.knowledge import Knowledge, Said, common
from jitmx.sim.order import CLUSTER, CTA, GPU, Order, parse
from jitmx.sim.releases import Releases
from jitmx.sim.shadow import COLUMNS, LINE, WHO, Cells, Shadow, halves

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.memory import Space

Array = npt.NDArray[Any]

ASYNC = 65  # columns of copies under way, and the last one for the previous kernel
SCOPE = 30  # bits below the scope of a strong access
ASYNCHRONOUS = 1 << 62
_TIME = (1 << 30) - 1
_COLUMN = (1 << COLUMNS) - 1


class Races:
    """Clocks of the lanes of a machine, and the check of an access against a shadow."""

    def __init__(self, blocks: Array, threads: int, width: int, cluster: int = 1) -> None:
        """`blocks`: grid index of each block at hand; `width`: lanes that each takes, `threads` of them alive."""
        self.width, self.cluster = width, cluster
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
        self.initialised = np.zeros(lanes, np.int64)  # time of each lane's last fence that is for mbarriers
        self.looked: set[tuple[int, int, int]] = set()  # warps that have found something old, by place and its time
        self.sequential = np.zeros(lanes, bool)  # who has run a fence.sc, and reads nothing that is old
        self.prompt = np.zeros(lanes, bool)  # who reads nothing that is old but in loops that poll
        self.spoke = np.zeros(lanes, np.int64)  # time of its last strong write, for messages
        self.releases = Releases(self)
        self.waited = np.zeros(lanes, bool)  # which are known to come after the previous kernel
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
        self, m: Machine, space: Space, where: Array, lanes: Array, size: int, line: int | tuple[int, ...], how: str,
        count: int = 1,
    ) -> Array | None:  # fmt: skip
        """Check reads and remember them; several lines are those of as many instructions one after the other.

        Args:
            count: elements of an access, each of which is read by itself.

        Returns:
            Which parts [lanes, n] are to be read as they were before the last write, or None.
        """
        shadow, order = self.shadows[space.name], parse(how)
        now: Any
        if isinstance(line, tuple):
            now = np.repeat(np.array([self.tick(one) for one in line]) << 32, len(where) // len(line))
        else:
            now = self.tick(line) << 32 | order.scope << SCOPE
        item = size // count
        at, each, size = halves(where, lanes, size)
        cells = shadow.find(at, size)
        if space.cluster is None:
            slot = self.warp.take(each)
            slot = slot % shadow.warps if shadow.warps * 32 < self.width else slot
        else:
            slot = space.cluster.slots(at, each)
        last = cells.writers
        words = self.ids.take(each) | now
        stale = None
        if order.scope and space.spread is None:
            prompt = self.sequential if line in m.program.polled else self.sequential | self.prompt
            stale = self._stale(shadow, cells, last, at, each, words, size // item, prompt)
        cells.read(slot, words, self.settled(space))
        if space.spread is None:
            # Blocks share the slots of their warps, where the writer's own would hide those of others.
            cells.read(shadow.warps + self.block.take(each) % (shadow.slots - shadow.warps), words, 0)
        self.check(m, space, last, each, at, line, order.scope, "reads", "written")
        if shadow.changed:
            self._check_changed(m, space, shadow, where, lanes, line, order.scope, "reads")
        if space.cluster is not None:
            space.cluster.visit(where, lanes, self.time)
        if order.scope:
            assert isinstance(line, int)
            word = last[:: len(last) // len(where), 0]
            if stale is None:
                self.releases.load(shadow, where, lanes, order, word, line)
                return None
            stale = stale.reshape(len(where), -1)
            fresh = (~stale[:, 0]).nonzero()[0]
            self.releases.load(shadow, where[fresh], lanes[fresh], order, word[fresh], line)
        return stale

    def _stale(
        self, shadow: Shadow, cells: Cells, last: Array, where: Array, lanes: Array, words: Array, count: int,
        prompt: Array,
    ) -> Array | None:  # fmt: skip
        """Which parts of strong reads may find what was there before the launch, and are to.

        These are what other threads have written with no order to the read, and the reader has not looked at since: so
        whoever polls finds what is there at the second look. A part is an element of the `count` that are read, or less
        where less was written. Of several parts every second look finds one old, the others about half of them.
        """
        written = last >> 32
        late = (last >> SCOPE & 3 > 0) & ((last ^ words[:, None]) & WHO != 0) & ~prompt[lanes][:, None]
        if not np.count_nonzero(late):
            return None
        for read in cells.readers(0):
            # Nor has a read since then that is known to it, the reader's own above all.
            slots = read.reshape(len(last), -1, last.shape[1])
            at, slot, granule = (slots >> 32 > np.where(late, written, ASYNCHRONOUS)[:, None]).nonzero()
            known = self._ordered(slots[at, slot, granule], lanes[at])
            late[at[known], granule[known]] = False
        if count > last.shape[1]:
            late, last, written = (x.repeat(count // x.shape[1], 1) for x in (late, last, written))
        if last.shape[1] > 1:
            # Which ones is as good as chance, and the same in each run.
            parts = np.arange(last.shape[1])
            mixed = (where[:, None] + parts) * 0x9E37 + written * 0x85EB + lanes[:, None] * 0xC2B3 >> 7
            late &= np.where(mixed[:, :1] & 2, mixed[:, :1] >> 2 & len(parts) - 1 == parts, mixed & 1 > 0)
        seen: set[tuple[int, int, int]] = set()
        at, granule = late.nonzero()
        late[at, granule] = ~self._ordered(last[at, granule], lanes[at])
        # Of a warp the first look alone, however many others have looked since.
        for i in late.any(1).nonzero()[0].tolist():
            look = int(lanes[i]) // 32, int(where[i]), int(written[i].max())
            late[i] &= look not in self.looked
            seen.add(look)
        self.looked |= seen
        for i in late[:, 0].nonzero()[0].tolist() if shadow.changed else ():
            others = np.array([*shadow.changed.get(int(where[i]), {}).values()], np.int64)
            late[i] &= not self._ordered(others, np.full(len(others), lanes[i])).any()
        return late if np.count_nonzero(late) else None

    def _ordered(self, entry: Array, lanes: Array) -> Array:
        """Which accesses, by their words, are the lanes' own or happened before what they do now."""
        if not len(entry):
            return np.zeros(0, bool)
        who, when = entry & WHO, entry >> 32 & _TIME
        known = self._same_block(who, when, lanes) | (who == self.ids.take(lanes))
        return np.asarray(known | ~self._unknown(lanes, who, when))

    def write(
        self, m: Machine, space: Space, where: Array, lanes: Array, size: int, line: int, how: str, *,
        atomic: str = "", replaces: bool = False, count: int = 1,
    ) -> None:  # fmt: skip
        """Check writes and remember them; two lanes that write one granule in one instruction race.

        Args:
            how: its order (jitmx.sim.order).
            count: elements of an access, each of which is written by itself.
            atomic: "atom" or "red" where it reads as well, in one with the write.
            replaces: whether an atomic is an exchange, by which what was there is lost, as by a store.
        """
        shadow, order = self.shadows[space.name], parse(how)
        replaces = order.scope > 0 and (replaces or not atomic)
        now = self.tick(line) << 32 | order.scope << SCOPE
        time = self.time  # what is released below moves the clock on
        item = size // count
        at, each, size = halves(where, lanes, size)
        if order.scope and count > 1:
            shadow.find(at, item)  # so that others may see some of the elements
        cells = shadow.find(at, size)
        before = cells.writers
        self.check(m, space, before, each, at, line, order.scope, "writes", "written")
        mine = self.ids.take(each) | now
        seen = np.zeros(len(each), np.int64)  # when each lane has last read what it replaces
        for last in cells.readers(self.settled(space)):
            self.check(m, space, last, each, at, line, order.scope, "writes", "read")
            if replaces:
                own = ((last ^ mine[:, None]) & WHO == 0) & (last >> SCOPE & 3 > 0)
                np.maximum(seen, np.where(own, last >> 32, 0).max(1), out=seen)
        # Atomics have checks of their own for what several lanes of an instruction do.
        if atomic:
            word = before[:: len(before) // len(where), 0]
            self.releases.exchange(shadow, where, lanes, order, word, line, hears=atomic == "atom")
        if replaces:
            # Two strong writes do not race; but of what neither knows nor has read the other, no one knows the outcome.
            unread = np.where(before >> 32 > seen[:, None], before, 0)
            self.check(m, space, unread, each, at, line, 0, "replaces", "written")
        if shadow.changed and (replaces or not atomic):
            what = "replaces" if replaces else "writes"
            for i in self._check_changed(m, space, shadow, where, lanes, line, 0, what, seen).tolist():
                shadow.changed.pop(int(where[i]), None)
        if atomic:
            self._change(m, space, shadow, where, lanes, line, order.scope, mine)
        cells.write(mine)
        if space.cluster is not None:
            space.cluster.visit(where, lanes, time)
        if not order.scope:
            left = cells.left()
            if np.count_nonzero(left != mine):
                i = int(np.flatnonzero(left != mine)[0])
                self.report(m, space, int(left[i]), int(each[i]), int(at[i]), line, "writes", "written")
            return
        self.spoke[lanes] = time
        if not atomic:
            self.releases.store(shadow, where, lanes, order, before[:: len(before) // len(where), 0], line)

    def _check_changed(
        self, m: Machine, space: Space, shadow: Shadow, where: Array, lanes: Array, line: int | tuple[int, ...],
        scope: int, what: str, seen: Array | None = None,
    ) -> Array:  # fmt: skip
        """Check accesses against all atomics at their places, of which the shadow has the last; which have any.

        Args:
            seen: up to when each lane has read its place.
        """
        hit = np.isin(where, np.fromiter(shadow.changed, np.int64)).nonzero()[0]
        for i in hit.tolist():
            words = np.array([[*shadow.changed[int(where[i])].values()]])
            if seen is not None:
                words[words >> 32 <= seen[i]] = 0
            self.check(m, space, words, lanes[i : i + 1], where[i : i + 1], line, scope, what, "written")
        return hit

    def _change(
        self, m: Machine, space: Space, shadow: Shadow, where: Array, lanes: Array, line: int, scope: int, mine: Array
    ) -> None:
        """Remember atomics beside those of others at their places, and check that scopes include each other."""
        near = space.spread is not None and space.cluster is None
        for i, (key, word) in enumerate(zip(where.tolist(), mine.tolist(), strict=True)):
            found = shadow.changed.setdefault(key, {})
            if not near and any(other >> SCOPE & 3 < GPU or scope < GPU for other in found.values()):
                words = np.array([[*found.values()]])
                self.check(m, space, words, lanes[i : i + 1], where[i : i + 1], line, scope, "writes", "written")
            found[word & WHO] = word

    def note(self, space: Space, where: Array, lanes: Array, size: int, line: int) -> None:
        """Remember strong writes that need no check."""
        self.tick(line)
        self.shadows[space.name].find(where, size).write(self.word(lanes, CLUSTER))

    def word(self, lanes: Array, scope: int) -> Array:
        """The words of strong accesses that lanes make now."""
        return np.asarray(self.ids.take(lanes) | self.time << 32 | scope << SCOPE)

    def within(self, scope: Any, who: Any, block: Any) -> Any:
        """Whether scopes of threads in blocks include others, given as the shadow has them; elementwise."""
        other = (who & WHO) >> COLUMNS
        near = (scope == CLUSTER) & (other // self.cluster == block // self.cluster)
        return (scope == GPU) | near | ((scope == CTA) & (other == block))

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
        scope: int,
        what: str,
        past: str,
    ) -> None:
        """Error unless each of `last` [lanes, n] happened before the access of its lane, or both are strong enough."""
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
        when = entry >> 32 & _TIME
        known = self._same_block(who, when, lane)
        if np.count_nonzero(known) == len(known):
            return
        known |= who == self.ids.take(lane)
        if scope:
            known |= self.within(np.minimum(entry >> SCOPE & 3, scope), who, self.block.take(lane))
        if np.count_nonzero(known) == len(known):
            return
        late = (~known).nonzero()[0]
        bad = self._unknown(lane[late], who[late], when[late])
        if np.count_nonzero(bad):
            at = int(late[bad.argmax()])
            first = at if i is None else int(i[at])
            self.report(m, space, int(entry[at]), int(lane[at]), int(where[first]), line, what, past)

    def _same_block(self, who: Array, when: Array, lanes: Array) -> Array:
        """Which accesses were by the lanes' own blocks, and are known to them."""
        column = who & _COLUMN
        known: Array = self.knowledge.times(lanes, column) >= when
        if np.count_nonzero(known) != len(known):
            known |= (column >> 5 == self.warp.take(lanes)) & (self.warp_floor.take(lanes) >= when)
            known |= (column < self.width) & (self.floor.take(lanes) >= when)
        known &= who >> COLUMNS == self.block.take(lanes)
        return known

    def _unknown(self, lanes: Array, who: Array, when: Array) -> Array:
        """Which accesses, most of them of other blocks, did not happen before those of `lanes`."""
        rows, blocks = self.knowledge.row.take(lanes), who >> COLUMNS
        keys = rows << 32 | blocks
        bad = blocks == self.block.take(lanes)
        for key in np.unique(keys[~bad]).tolist():
            clocks = self.knowledge.foreign.get(key >> 32, {}).get(key & (1 << 32) - 1)
            group = (keys == key).nonzero()[0]
            if clocks is None:
                bad[group] = True
            else:
                bad[group] |= clocks.take(who[group] & _COLUMN) < when[group]
        return np.asarray(bad)

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
        who, time = entry & WHO, entry >> 32 & _TIME
        column, block = who & _COLUMN, who >> COLUMNS
        mine = int(self.block[lane])
        other = f"thread {m.thread_name(column)}" if column < self.width else "an asynchronous operation"
        place = "" if block == mine else f" of block {m.block_name(block)}"
        scopes = entry >> SCOPE & 3
        m.fault(
            line,
            lane,
            f"{what} {space.place(where)}, which {other}{place} has {past} at "
            f"PTX line {self.lines[time]} with nothing between them that orders the two"
            + (self.releases.why(mine, block, column, time) or self._untold(block, time, mine, scopes)),
        )

    def _untold(self, block: int, time: int, mine: int, scope: int) -> str:
        """What is missing where no release tells of an access, as far as it can be said."""
        if scope and block != mine and not self.within(scope, block << COLUMNS, mine):
            return ": it is strong, but its scope does not include this block"
        spoke = self.spoke[self.block == block]
        last = int(spoke.max()) if len(spoke) else 0
        if block == mine or last <= time:
            return ""
        return f": the strong write at PTX line {self.lines[last]} does not release, and follows no fence"

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
        self.waited[lanes] = True

    def after_previous(self, lanes: Array) -> Array:
        """Which lanes have waited for the previous kernel, or learnt from a thread that has."""
        known: Array = self.waited.take(lanes)
        if np.count_nonzero(known) == len(known):
            return known
        known |= self.knowledge.times(lanes, self.knowledge.columns - 1) > 0
        for at in (~known).nonzero()[0].tolist():
            said = self.knowledge.said(lanes[at : at + 1])
            known[at] = any(clocks[-1] > 0 for clocks in said.values())
        self.waited[lanes[known]] = True
        return known

    def shared_by(self, lanes: Array) -> Said:
        """What happened before each of these lanes of one block, as `told`, which says it of any of them."""
        own = int(self.block[lanes[0]])
        if len(lanes) == 1:
            return self.told(lanes)
        parts = self.knowledge.groups(lanes)
        clocks = np.minimum.reduce([self.knowledge.clocks(group[:1]) for _, group in parts])
        threads = clocks[: self.width]
        np.maximum(threads, int(self.floor[lanes].min()), out=threads, casting="unsafe")
        warps = self.warp.take(lanes)
        if np.count_nonzero(warps == warps[0]) == len(warps):
            first = 32 * int(warps[0])
            np.maximum(
                threads[first : first + 32], int(self.warp_floor[lanes].min()), out=threads[first : first + 32],
                casting="unsafe",
            )  # fmt: skip
        said = functools.reduce(common, [self.knowledge.said(group[:1]) for _, group in parts])
        return {**said, own: clocks}

    def fence(self, lanes: Array, order: Order, line: int) -> None:
        """These lanes run a fence of memory."""
        self.tick(line)
        self.sequential[lanes] |= order.sequential
        self.releases.fence(lanes, order, line)

    def fence_mbarriers(self, lanes: Array) -> None:
        """These lanes make the mbarriers that they have initialised known to others and to the other proxy."""
        self.initialised[lanes] = self.tick(0)
