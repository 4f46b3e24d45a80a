"""Asynchronous work: what `cp.async`, bulk copies, bulk tensor copies and `wgmma` do to memory.

A copy moves its bytes when it is issued; what is asynchronous is who may look at them. Bytes of a `cp.async` cannot be
read until the thread has waited for them, and count as its own writes from then on. Bulk copies belong to columns of
their own in the race check (one to an mbarrier, two to the bulk groups of a thread, one to the products of a
warpgroup), and a wait that succeeds orders their accesses before what follows. So a read that does not wait, or a
buffer that is overwritten before the copy that reads it is done, is a race whatever the copy's timing.

Copies from shared memory and `wgmma` read through the asynchronous proxy: what threads stored there reaches them only
past a `fence.proxy.async`, by the thread that stored or, later, by the warps that issue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.clusters import RANK
from jitmx.sim.mbarrier import Mbarriers
from jitmx.sim.memory import ALLOCATED, DIRTY, INIT, PENDING, WRITABLE, Space
from jitmx.sim.order import CLUSTER, WEAK
from jitmx.sim.proxy import Proxy
from jitmx.sim.races import ASYNC, ASYNCHRONOUS, SCOPE
from jitmx.sim.shadow import COLUMNS
from jitmx.sim.tensormap import TensorMap
from jitmx.sim.warps import alike

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]
_WRITTEN = INIT | WRITABLE | ALLOCATED | DIRTY
CHUNK = 16


@dataclass
class _Batch:
    """The copies of one `cp.async` instruction that are under way: lane, group of the lane, byte in shared memory."""

    lanes: Array
    groups: Array
    where: Array
    size: int
    line: int


@dataclass
class Groups:
    """Groups of one thread or warpgroup: the time of the last copy of each committed group, and of the open one."""

    committed: list[int]
    last: int = 0


class Copies:
    """Copies under way of all blocks of a machine."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.open = np.zeros(m.lanes, np.int64)  # number of each lane's open cp.async group
        self.batches: list[_Batch] = []
        self.bulk: dict[int, Groups] = {}
        self.columns: dict[tuple[int, str, int], int] = {}
        self.proxy = Proxy(m)

    @classmethod
    def of(cls, m: Machine) -> Copies:
        """Those of a machine."""
        if "copies" not in m.units:
            m.units["copies"] = cls(m)
        found: Copies = m.units["copies"]
        return found

    # cp.async
    def start(self, lanes: Array, target: Array, source: Array, size: int, wanted: Array, line: int) -> None:
        """Copy `size` bytes for each lane, of which the first `wanted` come from global memory; the rest are zeros."""
        m = self.m
        content = np.zeros((len(lanes), size), np.uint8)
        alone = not np.count_nonzero(wanted != wanted[0])
        for count in wanted[:1] if alone else np.unique(wanted):
            which = np.arange(len(wanted)) if alone else np.flatnonzero(wanted == count)
            if count > size:
                m.fault(line, int(lanes[which[0]]), f"cp.async of {count} source bytes into {size}")
            if count == size:
                word = min(size, 8)
                got = m.memory.load(m, source[which], 0, lanes[which], word, size // word, line)
                content[which] = got.view(np.uint8).reshape(-1, size)
            elif count:
                for byte in range(int(count)):
                    got = m.memory.load(m, source[which], byte, lanes[which], 1, 1, line)
                    content[which, byte] = got[:, 0]
        space = m.shared
        where = space.locate(m, target, 0, lanes, size, line, "copies to")
        space.check_writable(m, where, lanes, size, line)
        m.races.write(m, space, where, lanes, size, line, "")
        space.data.reshape(-1, size)[where // size] = content
        space.state.reshape(-1, size)[where // size] = WRITABLE | ALLOCATED | PENDING
        self.batches.append(_Batch(lanes, self.open[lanes], where, size, line))

    def commit(self, lanes: Array) -> None:
        """cp.async.commit_group."""
        self.open[lanes] += 1

    def wait(self, lanes: Array, groups: int | None) -> None:
        """Complete all but the last `groups` committed groups of these lanes; None: everything, committed or not."""
        m = self.m
        m.events += 1
        waiting = np.zeros(m.lanes, bool)
        waiting[lanes] = True
        left = []
        for batch in self.batches:
            done = waiting[batch.lanes]
            if groups is not None:
                done = done & (batch.groups < self.open[batch.lanes] - groups)
            if done.all():
                m.shared.state.reshape(-1, batch.size)[batch.where // batch.size] = _WRITTEN
                m.races.write(m, m.shared, batch.where, batch.lanes, batch.size, batch.line, "")
                continue
            if done.any():
                where, size = batch.where[done], batch.size
                m.shared.state.reshape(-1, size)[where // size] = _WRITTEN
                m.races.write(m, m.shared, where, batch.lanes[done], size, batch.line, "")
                batch.lanes, batch.groups, batch.where = (x[~done] for x in (batch.lanes, batch.groups, batch.where))
            if len(batch.lanes):
                left.append(batch)
        self.batches = left

    def arrive(self, lanes: Array, addresses: Array, increments: bool, line: int) -> None:
        """cp.async.mbarrier.arrive: an arrival of each lane once its copies are done.

        They count as writes of a column of the mbarrier, so that their own thread must wait there as well.
        """
        m, races = self.m, self.m.races
        together = alike(lanes // m.width, addresses)
        columns = np.zeros(m.lanes, np.int64)
        for which in together:
            columns[lanes[which]] = self.column(int(lanes[which[0]]), "mbarrier", int(addresses[which[0]]))
        time, shadow = races.tick(line), races.shadows["shared"]
        for batch in self.batches:
            done = columns[batch.lanes] > 0
            if not np.count_nonzero(done):
                continue
            where, owners, size = batch.where[done], batch.lanes[done], batch.size
            m.shared.state.reshape(-1, size)[where // size] = _WRITTEN
            words = ASYNCHRONOUS | time << 32 | races.block[owners] << COLUMNS | columns[owners]
            shadow.find(where, size).write(words)
            batch.lanes, batch.groups, batch.where = (x[~done] for x in (batch.lanes, batch.groups, batch.where))
        self.batches = [batch for batch in self.batches if len(batch.lanes)]
        for which in together:
            some, clocks = lanes[which], races.knowledge.blank()
            clocks[columns[some[0]]] = time
            Mbarriers.of(m).arrive(some, int(addresses[which[0]]), 1, 0, line, more=int(increments), brought=clocks)
        Mbarriers.of(m).settle()

    # Bulk copies
    def column(self, lane: int, what: str, number: int) -> int:
        """The column of a queue of copies in the race check of a lane's block."""
        block = lane // self.m.width
        key = block, what, number
        if key not in self.columns:
            self.columns[key] = sum(1 for other in self.columns if other[0] == block) % (ASYNC - 1)
        return self.m.width + self.columns[key]

    def load(
        self, lanes: Array, targets: Array, sources: Array, sizes: Array, barriers: Array, ranks: Array, line: int
    ) -> None:
        """Bulk copies of lanes from global to shared memory, which report to mbarriers; `ranks` as for `_deliver`."""
        for lane, size in zip(lanes.tolist(), sizes.tolist(), strict=True):
            self._size(lane, size, line)
        counts = sizes // CHUNK
        owner = np.repeat(np.arange(len(lanes)), counts)
        offsets = CHUNK * (np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts))
        each = lanes[owner]
        content = self._read(each, sources[owner] + offsets, CHUNK, line)
        self._deliver(each, targets[owner] + offsets, content, barriers[owner], line, ranks[owner])

    def ask(self, lane: int, source: int, size: int, line: int) -> None:
        """Bulk prefetch: of global memory that there is, and that a copy could take."""
        self._size(lane, size, line)
        starts = (source + np.arange(size // CHUNK) * CHUNK).astype(np.uint64)
        memory, lanes = self.m.memory, np.full(len(starts), lane)
        where = memory.locate(self.m, starts, 0, lanes, CHUNK, line, "prefetches")
        memory.check_initialised(self.m, where, lanes, CHUNK, line)

    def pass_on(self, lane: int, target: int, source: int, size: int, barrier: int, line: int) -> None:
        """Bulk copy from the block's own shared memory to that of a block of its cluster."""
        self._size(lane, size, line)
        starts = np.arange(size // CHUNK) * CHUNK
        content = self._fetch(self.m.shared, np.full(len(starts), lane), source + starts, CHUNK, line)
        self._hold(lane, source + starts, CHUNK, self.column(lane, "mbarrier", barrier), line)
        self._deliver(np.full(len(starts), lane), target + starts, content, np.full(len(starts), barrier), line)

    def store(self, lane: int, target: int, source: int, size: int, line: int) -> None:
        """Bulk copy from shared to global memory, in the lane's open bulk group."""
        self._size(lane, size, line)
        starts = np.arange(size // CHUNK) * CHUNK
        self._send(lane, target + starts, source + starts, CHUNK, line)

    def load_box(
        self, lane: int, target: int, box: TensorMap, at: tuple[int, ...], barrier: int, ranks: int, line: int
    ) -> None:
        """Tensor copy from global to shared memory; what lies outside the tensor arrives as zeros."""
        self._aligned(lane, target, line)
        addresses, inside = box.elements(at)
        # What fills a chunk and starts on one in global memory is read whole, the rest element by element.
        items = CHUNK // box.item
        runs, within = addresses.reshape(-1, items), inside.reshape(-1, items)
        whole = within.all(axis=1) & (runs[:, 0] % CHUNK == 0)
        content = np.zeros((len(runs), items, box.item), np.uint8)
        if whole.any():
            found = runs[whole, 0]
            content[whole] = self._read(np.full(len(found), lane), found, CHUNK, line).reshape(-1, items, box.item)
        apart = within & ~whole[:, None]
        if apart.any():
            found = runs[apart]
            content[apart] = self._read(np.full(len(found), lane), found, box.item, line)
        chunks = box.chunks(target)
        lanes, told, goals = (np.full(len(chunks), value) for value in (lane, barrier, ranks))
        self._deliver(lanes, chunks, content.reshape(-1, CHUNK), told, line, goals)

    def store_box(self, lane: int, source: int, box: TensorMap, at: tuple[int, ...], line: int) -> None:
        """Tensor copy from shared to global memory, in the lane's open bulk group."""
        self._aligned(lane, source, line)
        addresses, inside = box.elements(at, written=True)
        held = (box.chunks(source)[:, None] + np.arange(0, CHUNK, box.item)).reshape(-1)
        if inside.any():
            self._send(lane, addresses[inside], held[inside], box.item, line)

    def commit_bulk(self, lanes: Array) -> None:
        """cp.async.bulk.commit_group."""
        for lane in lanes:
            groups = self.bulk.setdefault(int(lane), Groups([]))
            groups.committed.append(groups.last)

    def wait_bulk(self, lanes: Array, count: int, reading: bool) -> None:
        """cp.async.bulk.wait_group: all but the last `count` groups are done, or have read their sources."""
        m = self.m
        m.events += 1
        for lane in lanes:
            groups = self.bulk.get(int(lane))
            done = groups.committed[: len(groups.committed) - count] if groups else []
            if done:
                clocks = m.races.knowledge.blank()
                clocks[self.column(int(lane), "reads", int(lane))] = max(done)
                if not reading:
                    clocks[self.column(int(lane), "writes", int(lane))] = max(done)
                m.races.acquire(np.array([lane]), clocks)

    def ended(self, mask: Array | None) -> None:
        """Error where lanes have ended whose bulk copies may still read shared memory."""
        for lane, groups in self.bulk.items():
            done = self.m.races.knowledge.times(np.array([lane]), self.column(lane, "reads", lane))[0]
            if (mask is None or mask[lane]) and done < groups.last:
                line = self.m.races.lines[groups.last]
                self.m.fault(line, lane, "ends without cp.async.bulk.wait_group after a copy from shared memory")

    def _size(self, lane: int, size: int, line: int) -> None:
        if size % CHUNK or not size:
            self.m.fault(line, lane, f"a bulk copy of {size} bytes; it must be a multiple of 16")

    def _aligned(self, lane: int, address: int, line: int) -> None:
        if address % 128:
            self.m.fault(line, lane, f"a tensor copy at {address:#x} of shared memory, which must be 128-byte aligned")

    def _read(self, lanes: Array, addresses: Array, size: int, line: int) -> Array:
        """Bytes [n, size] of global memory, read through the other proxy."""
        m = self.m
        where = m.memory.locate(m, addresses.astype(np.uint64), 0, lanes, size, line, "reads")
        self.proxy.check(lanes // 32 * 32, 32, m.memory, where, size, line)
        word = min(size, 8)
        got = m.memory.load_at(m, where, lanes, word, size // word, line)
        return np.ascontiguousarray(got).view(np.uint8).reshape(-1, size)

    def _fetch(self, space: Space, lanes: Array, addresses: Array, size: int, line: int) -> Array:
        """Bytes [n, size] at addresses."""
        word = min(size, 8)
        got = space.load(self.m, addresses.astype(np.uint64), 0, lanes, word, size // word, line)
        return np.ascontiguousarray(got).view(np.uint8).reshape(-1, size)

    def _deliver(
        self, lanes: Array, addresses: Array, content: Array, barriers: Array, line: int, ranks: Array | None = None
    ) -> None:
        """As `complete`, to every block of the cluster whose bit `ranks` has; -1: where the addresses say."""
        cluster, told = self.m.cluster, barriers
        if ranks is not None and (ranks >= 0).any():
            parts = []
            for which in alike(lanes, ranks):
                lane, goals = int(lanes[which[0]]), int(ranks[which[0]])
                if goals == 0 or goals >= 1 << cluster.size:
                    self.m.fault(line, lane, f"a copy to the blocks {goals:#x} of a cluster of {cluster.size}")
                for rank in [rank for rank in range(cluster.size) if goals < 0 or goals >> rank & 1]:
                    to, at = addresses[which], told[which]
                    parts.append((which, *((cluster.mapped(x, rank) if goals > 0 else x) for x in (to, at))))
                    if goals < 0:
                        break
            which, addresses, told = (np.concatenate(column) for column in zip(*parts, strict=True))
            lanes, content, barriers = lanes[which], content[which], barriers[which]
        self.complete(lanes, addresses, content, barriers, told, line, proxy=True)

    def complete(
        self, lanes: Array, addresses: Array, content: Array, names: Array, told: Array, line: int, *,
        proxy: bool = False,
    ) -> None:  # fmt: skip
        """Write what lanes send to the blocks of mbarriers, and report it there.

        Args:
            content: bytes [n, size] for n addresses.
            names, told: of each, the mbarrier as its lane names it, and where it is.
            proxy: whether it is the other proxy that writes.
        """
        m, barriers = self.m, Mbarriers.of(self.m)
        together = alike(lanes if proxy else lanes // m.width, addresses >> RANK, told)
        columns = np.zeros(len(lanes), np.int64)
        for which in together:
            lane, first = int(lanes[which[0]]), which[0]
            columns[which] = self.column(lane, "mbarrier", int(names[first]))
            barrier = int(told[first])
            if barriers.resolve(lane, int(addresses[first]), line)[0] != barriers.resolve(lane, barrier, line)[0]:
                m.fault(line, lane, "writes shared memory of a block other than that of the mbarrier")
            barriers.get(lanes[which[:1] if proxy else which], barrier, line)
        where = m.reach.locate(m, addresses.astype(np.uint64), 0, lanes, content.shape[1], line, "copies to")
        twice = m.reach.twice(where)
        if twice is not None and proxy and len(together) > 1:
            for some in together:
                self.complete(lanes[some], addresses[some], content[some], names[some], told[some], line, proxy=True)
            return
        if twice is not None and not proxy:
            m.fault(line, int(lanes[twice]), f"writes {int(addresses[twice]):#x}, as another thread does with it")
        time = self._write(m.reach, lanes, where, content, columns, line)
        for which in together:
            lane, barrier, column = int(lanes[which[0]]), int(told[which[0]]), int(columns[which[0]])
            barriers.expect(lane, barrier, -content[which].size, line, column, time, proxy=proxy)
        barriers.settle()

    def reduce(self, lane: int, address: int, new: Array, apply: Any, barrier: int, column: int, line: int) -> None:
        """Combine one word with what arrives at an mbarrier of the same block, and report it there."""
        m, barriers, size = self.m, Mbarriers.of(self.m), new.dtype.itemsize
        if barriers.resolve(lane, address, line)[0] != barriers.resolve(lane, barrier, line)[0]:
            m.fault(line, lane, "writes shared memory of a block other than that of the mbarrier")
        lanes = np.array([lane])
        where = m.reach.locate(m, np.array([address], "u8"), 0, lanes, size, line, "updates")
        m.reach.check_writable(m, where, lanes, size, line)
        m.reach.check_initialised(m, where, lanes, size, line)
        time = self.remember(m.reach, lane, where, size, column, line, writing=True, scope=CLUSTER)
        words = m.reach.rows(size, 1)
        words[where // size, 0] = apply(words[where // size, 0], new)
        barriers.expect(lane, barrier, -size, line, column, time)
        barriers.settle()

    def _hold(self, lane: int, sources: Array, size: int, column: int, line: int) -> None:
        """Note that a copy reads shared memory of the lane's block."""
        m = self.m
        where = m.shared.locate(m, sources.astype(np.uint64), 0, np.full(len(sources), lane), size, line, "reads")
        self.proxy.check(np.full(len(where), lane // 32 * 32), 32, m.shared, where, size, line)
        self.remember(m.shared, lane, where, size, column, line, writing=False)

    def _send(self, lane: int, targets: Array, sources: Array, size: int, line: int) -> None:
        m = self.m
        content = self._fetch(m.shared, np.full(len(sources), lane), sources, size, line)
        self._hold(lane, sources, size, self.column(lane, "reads", lane), line)
        lanes = np.full(len(targets), lane)
        where = m.memory.locate(m, targets.astype(np.uint64), 0, lanes, size, line, "copies to")
        time = self._write(m.memory, lanes, where, content, self.column(lane, "writes", lane), line)
        self.bulk.setdefault(lane, Groups([])).last = time

    def _write(self, space: Space, lanes: Array, where: Array, content: Array, column: int | Array, line: int) -> int:
        m, size = self.m, content.shape[1]
        m.events += 1
        space.check_writable(m, where, lanes, size, line)
        time = self.remember(space, lanes, where, size, column, line, writing=True)
        space.data.reshape(-1, size)[where // size] = content
        space.state.reshape(-1, size)[where // size] = _WRITTEN
        return time

    def remember(
        self, space: Space, lane: int | Array, where: Array, size: int, column: int | Array, line: int, *,
        writing: bool, scope: int = WEAK,
    ) -> int:  # fmt: skip
        """Check accesses of copies that lanes issue, and note them as those of columns; their time."""
        m, races = self.m, self.m.races
        shadow = races.shadows[space.name]
        time = races.tick(line)
        lanes = np.broadcast_to(lane, len(where))
        if space.cluster is not None:
            space.cluster.visit(where, lanes, time, column)
        cells = shadow.find(where, size)
        word = races.block.take(lanes) << COLUMNS | ASYNCHRONOUS | time << 32 | scope << SCOPE | column
        if writing:
            races.check(m, space, cells.writers, lanes, where, line, scope, "copies to", "written")
            for last in cells.readers(races.settled(space)):
                races.check(m, space, last, lanes, where, line, scope, "copies to", "read")
            cells.write(word)
        else:
            cells.read(column % shadow.slots, word, races.settled(space))
        return time
