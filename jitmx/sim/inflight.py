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

from jitmx.errors import SimulationError
from jitmx.sim.access import space_of
from jitmx.sim.mbarrier import Mbarriers
from jitmx.sim.memory import ALLOCATED, DIRTY, INIT, PENDING, WRITABLE, Space
from jitmx.sim.races import ASYNC, COLUMNS
from jitmx.sim.tensormap import BYTES, TensorMap

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]
_WRITTEN = INIT | WRITABLE | ALLOCATED | DIRTY
CHUNK = 16
WARPGROUP = 128


@dataclass
class _Batch:
    """The copies of one `cp.async` instruction that are under way: lane, group of the lane, byte in shared memory."""

    lanes: Array
    groups: Array
    where: Array
    size: int
    line: int


@dataclass
class _Groups:
    """Groups of one thread or warpgroup: the time of the last copy of each committed group, and of the open one."""

    committed: list[int]
    last: int = 0


class Copies:
    """Copies under way of all blocks of a machine."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.open = np.zeros(m.lanes, np.int64)  # number of each lane's open cp.async group
        self.batches: list[_Batch] = []
        self.bulk: dict[int, _Groups] = {}
        self.products: dict[int, _Groups] = {}
        self.columns: dict[tuple[int, str, int], int] = {}
        self.fenced = np.zeros(m.lanes, np.int64)  # time of each lane's last proxy fence

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
        for count in np.unique(wanted):
            which = np.flatnonzero(wanted == count)
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
        m.races.write(m, space, where, lanes, size, line, False)
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
            if done.any():
                where, size = batch.where[done], batch.size
                m.shared.state.reshape(-1, size)[where // size] = _WRITTEN
                m.races.write(m, m.shared, where, batch.lanes[done], size, batch.line, False)
                batch.lanes, batch.groups, batch.where = (x[~done] for x in (batch.lanes, batch.groups, batch.where))
            if len(batch.lanes):
                left.append(batch)
        self.batches = left

    def arrive(self, lanes: Array, addresses: Array, increments: bool, line: int) -> None:
        """cp.async.mbarrier.arrive: an arrival of each lane once its copies are done."""
        self.wait(lanes, None)
        for lane, address in zip(lanes, addresses, strict=True):
            Mbarriers.of(self.m).arrive(int(lane), int(address), 1, 0, line, more=int(increments))

    # Bulk copies
    def column(self, lane: int, what: str, number: int) -> int:
        """The column of a queue of copies in the race check of a lane's block."""
        block = lane // self.m.width
        key = block, what, number
        if key not in self.columns:
            self.columns[key] = sum(1 for other in self.columns if other[0] == block) % ASYNC
        return self.m.width + self.columns[key]

    def load(self, lane: int, target: int, source: int, size: int, barrier: int, line: int) -> None:
        """Bulk copy from global to shared memory, which reports to an mbarrier."""
        self._size(lane, size, line)
        starts = np.arange(size // CHUNK) * CHUNK
        content = self._fetch(self.m.memory, lane, source + starts, CHUNK, line)
        self._deliver(lane, target + starts, content, size, barrier, line)

    def store(self, lane: int, target: int, source: int, size: int, line: int) -> None:
        """Bulk copy from shared to global memory, in the lane's open bulk group."""
        self._size(lane, size, line)
        starts = np.arange(size // CHUNK) * CHUNK
        self._send(lane, target + starts, source + starts, CHUNK, line)

    def load_box(self, lane: int, target: int, box: TensorMap, at: tuple[int, ...], barrier: int, line: int) -> None:
        """Tensor copy from global to shared memory; what lies outside the tensor arrives as zeros."""
        self._aligned(lane, target, line)
        addresses, inside = box.elements(at)
        content = np.zeros((len(addresses), box.item), np.uint8)
        if inside.any():
            content[inside] = self._fetch(self.m.memory, lane, addresses[inside], box.item, line)
        self._deliver(lane, box.chunks(target), content.reshape(-1, CHUNK), box.box_bytes, barrier, line)

    def store_box(self, lane: int, source: int, box: TensorMap, at: tuple[int, ...], line: int) -> None:
        """Tensor copy from shared to global memory, in the lane's open bulk group."""
        self._aligned(lane, source, line)
        addresses, inside = box.elements(at)
        held = (box.chunks(source)[:, None] + np.arange(0, CHUNK, box.item)).reshape(-1)
        if inside.any():
            self._send(lane, addresses[inside], held[inside], box.item, line)

    def commit_bulk(self, lanes: Array) -> None:
        """cp.async.bulk.commit_group."""
        for lane in lanes:
            groups = self.bulk.setdefault(int(lane), _Groups([]))
            groups.committed.append(groups.last)

    def wait_bulk(self, lanes: Array, count: int, reading: bool) -> None:
        """cp.async.bulk.wait_group: all but the last `count` groups are done, or have read their sources."""
        m = self.m
        m.events += 1
        for lane in lanes:
            groups = self.bulk.get(int(lane))
            done = groups.committed[: len(groups.committed) - count] if groups else []
            if done:
                clocks = np.zeros(m.width + ASYNC, m.races.seen.dtype)
                clocks[self.column(int(lane), "reads", int(lane))] = max(done)
                if not reading:
                    clocks[self.column(int(lane), "writes", int(lane))] = max(done)
                m.races.acquire(np.array([lane]), clocks)

    def fence(self, lanes: Array) -> None:
        """fence.proxy.async by these lanes."""
        self.fenced[lanes] = self.m.races.tick(0)

    def _proxied(self, lane: int, lanes: int, where: Array, line: int) -> None:
        """Check that stores to shared memory are fenced for a reader, whose warps start at `lane`."""
        m, shadow = self.m, self.m.races.shadows["shared"]
        last = np.unique(shadow.writer[where >> shadow.shift])
        column = last & (1 << COLUMNS) - 1
        last, column = last[column < m.width], column[column < m.width]
        own = lane // m.width * m.width
        late = (last >> 32 > self.fenced[own + column]) & (last >> 32 > self.fenced[lane : lane + lanes].max())
        if late.any():
            at = int(np.flatnonzero(late)[0])
            writer, written = m.thread_name(int(column[at])), m.races.lines[int(last[at]) >> 32]
            m.fault(
                line,
                lane,
                f"reads shared memory through the asynchronous proxy, which thread {writer} has written at PTX line "
                f"{written} without fence.proxy.async after it",
            )

    # Products of warpgroups, which read shared memory until they are waited for
    def read_for_product(self, lane: int, chunks: Array, line: int) -> None:
        """Note the 16-byte chunks that a wgmma of the warpgroup from `lane` on reads."""
        where = self.m.shared.locate(self.m, chunks, 0, np.full(len(chunks), lane), CHUNK, line, "reads")
        self._proxied(lane, WARPGROUP, where, line)
        column = self.column(lane, "wgmma", lane)
        time = self._remember(self.m.shared, lane, where, CHUNK, column, line, writing=False)
        self.products.setdefault(lane, _Groups([])).last = time

    def commit_products(self, lanes: Array) -> None:
        """wgmma.commit_group by whole warpgroups."""
        for lane in lanes[lanes % self.m.width % WARPGROUP == 0].tolist():
            groups = self.products.setdefault(lane, _Groups([]))
            groups.committed.append(groups.last)

    def wait_products(self, lanes: Array, count: int) -> None:
        """wgmma.wait_group: all but the last `count` groups are done."""
        for lane in lanes[lanes % self.m.width % WARPGROUP == 0].tolist():
            groups = self.products.get(lane)
            done = groups.committed[: len(groups.committed) - count] if groups else []
            if done:
                clocks = np.zeros(self.m.width + ASYNC, self.m.races.seen.dtype)
                clocks[self.column(lane, "wgmma", lane)] = max(done)
                self.m.races.acquire(np.arange(lane, lane + WARPGROUP), clocks)

    def tensor_map(self, lane: int, address: int, line: int) -> TensorMap:
        """The tensor map at a generic address."""
        space, inner = space_of(self.m, "generic", np.uint64(address) + np.arange(0, BYTES, CHUNK, dtype=np.uint64))
        raw = space.load(self.m, inner, 0, np.full(len(inner), lane), 8, 2, line)
        try:
            return TensorMap.decode(raw.tobytes())
        except SimulationError as error:
            self.m.fault(line, lane, str(error))

    def _size(self, lane: int, size: int, line: int) -> None:
        if size % CHUNK or not size:
            self.m.fault(line, lane, f"a bulk copy of {size} bytes; it must be a multiple of 16")

    def _aligned(self, lane: int, address: int, line: int) -> None:
        if address % 128:
            self.m.fault(line, lane, f"a tensor copy at {address:#x} of shared memory, which must be 128-byte aligned")

    def _fetch(self, space: Space, lane: int, addresses: Array, size: int, line: int) -> Array:
        """Bytes [n, size] at addresses."""
        word = min(size, 8)
        lanes = np.full(len(addresses), lane)
        got = space.load(self.m, addresses.astype(np.uint64), 0, lanes, word, size // word, line)
        return np.ascontiguousarray(got).view(np.uint8).reshape(-1, size)

    def _deliver(self, lane: int, addresses: Array, content: Array, size: int, barrier: int, line: int) -> None:
        column = self.column(lane, "mbarrier", barrier)
        time = self._write(self.m.shared, lane, addresses, content, column, line)
        Mbarriers.of(self.m).expect(lane, barrier, -size, line, column, time)

    def _send(self, lane: int, targets: Array, sources: Array, size: int, line: int) -> None:
        m = self.m
        content = self._fetch(m.shared, lane, sources, size, line)
        where = m.shared.locate(m, sources.astype(np.uint64), 0, np.full(len(sources), lane), size, line, "reads")
        self._proxied(lane // 32 * 32, 32, where, line)
        self._remember(m.shared, lane, where, size, self.column(lane, "reads", lane), line, writing=False)
        time = self._write(m.memory, lane, targets, content, self.column(lane, "writes", lane), line)
        self.bulk.setdefault(lane, _Groups([])).last = time

    def _write(self, space: Space, lane: int, addresses: Array, content: Array, column: int, line: int) -> int:
        m, size = self.m, content.shape[1]
        m.events += 1
        lanes = np.full(len(addresses), lane)
        where = space.locate(m, addresses.astype(np.uint64), 0, lanes, size, line, "copies to")
        space.check_writable(m, where, lanes, size, line)
        time = self._remember(space, lane, where, size, column, line, writing=True)
        space.data.reshape(-1, size)[where // size] = content
        space.state.reshape(-1, size)[where // size] = _WRITTEN
        return time

    def _remember(
        self, space: Space, lane: int, where: Array, size: int, column: int, line: int, *, writing: bool
    ) -> int:
        """Check accesses of a copy that `lane` issues, and note them as those of its column; their time."""
        m, races = self.m, self.m.races
        races.copying = True
        shadow = races.shadows[space.name]
        time = races.tick(line)
        cells = max(size >> shadow.shift, 1)
        row = (where >> shadow.shift) >> cells.bit_length() - 1
        lanes = np.full(len(where), lane)
        writers = shadow.writer.reshape(-1, cells)
        readers = shadow.readers.reshape(-1, cells, shadow.readers.shape[1])
        word = time << 32 | int(races.block[lane]) << COLUMNS | column
        if writing:
            races.check(m, space, writers.take(row, 0), lanes, where, line, False, "copies to", "written")
            past = readers.take(row, 0).reshape(len(row), -1)
            races.check(m, space, past, lanes, where, line, False, "copies to", "read")
            writers[row] = word
        else:
            readers[row, :, column % readers.shape[2]] = word
        return time
