"""Thread-block clusters: shared memory of other blocks, and the barrier of a cluster.

An address that `mapa` makes holds the rank of its block plus one above its lower 24 bits. An address without a rank is
of the block's own shared memory, wherever it is used.

Blocks of a cluster must not end while others may still use their shared memory: each access from another block is
noted, and must have happened before something that the block itself waited for. So a kernel that lacks the last barrier
of its cluster is caught whatever the order in which blocks run.

Threads that have ended count as arrived at the barrier, as on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.knowledge import Said, merge
from jitmx.sim.memory import Line, Space
from jitmx.sim.order import CLUSTER
from jitmx.sim.program import BLOCKED
from jitmx.sim.ptx import Instruction, operands
from jitmx.sim.races import ASYNC

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

RANK = 24  # bits below the rank of a mapped address
_INSIDE = (1 << RANK) - 1


class ClusterShared(Space):
    """Shared memory of all blocks of a cluster, over the bytes of `own`, which is each block's own."""

    def __init__(self, own: Space, cluster: Cluster) -> None:
        self.name, self.base, self.first, self._before = own.name, own.base, own.first, None
        self.races, self.spread, self.extent = own.races, own.spread, own.extent
        self.data, self.state = own.data, own.state
        self.cluster = cluster
        self.view()

    def locate(self, m: Machine, address: Array, offset: int, lanes: Array, size: int, line: Line, what: str) -> Array:
        address = np.broadcast_to(address + np.uint64(offset % (1 << 64)), lanes.shape)
        assert self.cluster is not None
        position = self.cluster.positions(address, lanes, line)
        inside = address & np.uint64(_INSIDE)
        if int(inside.max()) + size > self.extent or int(np.bitwise_or.reduce(inside)) & size - 1:
            return self.beyond(m, inside, lanes, size, line, what)
        return np.asarray(inside.view("i8") + position * self.extent)

    def place(self, where: int) -> str:
        assert self.cluster is not None
        m = self.cluster.m
        return f"{super().place(where)} of block {m.block_name(int(m.blocks[where // self.extent]))}"


class Cluster:
    """The clusters of a machine: `size` blocks each, side by side."""

    def __init__(self, m: Machine, size: int) -> None:
        self.m, self.size = m, size
        self.lanes = size * m.width  # of a cluster
        blocks, columns = len(m.blocks), m.width + ASYNC
        self.gone = np.zeros(blocks, bool)
        # Of each block: when each column of each block of its cluster last used its shared memory, and what the
        # block has waited for without being told what happened before.
        self.visits = np.zeros((blocks, size, columns), np.int64)
        self.met = np.zeros((blocks, size, columns), np.int64)
        self.arrivals = np.zeros(m.lanes, np.int64)
        self.times = np.zeros(m.lanes, np.int64)  # of each lane's last arrival
        self.initialised = np.zeros(m.lanes, np.int64)  # of its last fence for mbarriers before that
        self.waited = np.ones(m.lanes, bool)
        self.phases = np.zeros(blocks // size, np.int64)  # completed
        self.saying: list[Said] = [{} for _ in self.phases]
        self.said: list[Said] = [{} for _ in self.phases]
        self.blocked: list[tuple[Array, int, int]] = []  # lanes, where they go on, line
        self.window = ClusterShared(m.shared, self)

    # Shared memory of other blocks
    def positions(self, address: Array, lanes: Array, line: Line) -> Array:
        """Position in the machine of the block that each address lies in, which must be there."""
        m = self.m
        own = lanes // m.width
        rank = (address >> np.uint64(RANK)).astype(np.int64)
        if (rank > self.size).any():
            at = int(np.flatnonzero(rank > self.size)[0])
            m.fault(line, lanes[at], f"shared address {int(address[at]):#x} lies in no block of the cluster")
        out: Array = np.where(rank == 0, own, own // self.size * self.size + rank - 1)
        if self.gone[out].any():
            at = int(np.flatnonzero(self.gone[out])[0])
            name = m.block_name(int(m.blocks[out[at]]))
            m.fault(line, lanes[at], f"uses shared memory of block {name}, which has ended")
        return out

    def position(self, lane: int, address: int, line: int) -> int:
        """The same for one address."""
        rank, own = address >> RANK, lane // self.m.width
        out = own if rank == 0 else own // self.size * self.size + rank - 1
        if rank > self.size or self.gone[out]:
            self.positions(np.array([address], "u8"), np.array([lane]), line)
        return out

    def mapped(self, address: Any, rank: int) -> Any:
        """Addresses as the block of a rank has them, whatever block they are of."""
        return address & _INSIDE | (rank + 1 << RANK if self.size > 1 else 0)

    def visit(self, where: Array, lanes: Array, time: int, column: int | Array | None = None) -> None:
        """Lanes, or a column of their block, use shared memory at a time."""
        m = self.m
        target, own = where // self.window.extent, lanes // m.width
        far = target != own
        if np.count_nonzero(far):
            used = lanes[far] % m.width if column is None else np.broadcast_to(column, lanes.shape)[far]
            self.visits[target[far], own[far] % self.size, used] = time

    def slots(self, where: Array, lanes: Array) -> Array:
        """Which of the shadow's readers each lane is: a warp of the block itself, or another block."""
        m = self.m
        own, warps = lanes // m.width, m.width // 32
        return np.where(where // self.window.extent == own, lanes // 32 % warps, warps + own % self.size)

    # Blocks that end
    def ended(self) -> None:
        """Some lanes have ended."""
        if self.size == 1 and not self.arrivals.any():
            return
        alive = self.m.alive.reshape(-1, self.m.width).any(1)
        for position in np.flatnonzero(~alive & ~self.gone).tolist():
            self.gone[position] = True
            if self.visits[position].any():
                self._leave(position)
        for number in range(len(self.phases)):
            self._settle(number)

    def _leave(self, position: int) -> None:
        m, first = self.m, position // self.size * self.size
        known = self.met[position]
        foreign = m.races.knowledge.said(np.arange(position * m.width, (position + 1) * m.width))
        for rank in range(self.size):
            clocks = foreign.get(int(m.blocks[first + rank]))
            if clocks is not None:
                known[rank] = np.maximum(known[rank], clocks)
        late = np.argwhere(self.visits[position] > known)
        if len(late):
            rank, column = late[0].tolist()
            line = m.races.lines[self.visits[position, rank, column]]
            name = m.block_name(int(m.blocks[position]))
            what = "uses" if column < m.width else "an asynchronous operation uses"
            lane = (first + rank) * m.width + (column if column < m.width else 0)
            m.fault(line, lane, f"{what} shared memory of block {name}, which ends without waiting for it")

    # The barrier
    def waiting(self) -> bool:
        """Whether any lane waits."""
        return bool(self.blocked)

    def waits(self) -> list[str]:
        """Who waits, for messages."""
        m, out = self.m, []
        for lanes, _, line in self.blocked:
            mask = np.zeros(m.lanes, bool)
            mask[lanes] = True
            number = int(lanes[0]) // self.lanes
            late = m.alive & (m.lane_ids // self.lanes == number) & (self.arrivals <= self.phases[number])
            who = f" for {m.describe(late)}" if late.any() else ""
            out.append(f"{m.describe(mask)} wait at PTX line {line} at the barrier of their cluster{who}")
        return out[:8]

    def arrive(self, mask: Array | None, relaxed: bool, line: int) -> None:
        """barrier.cluster.arrive: a relaxed one tells what its thread has fenced, and of mbarriers made ready."""
        m = self.m
        m.events += 1
        lanes = m.active(mask)
        early = lanes[~self.waited[lanes]]
        if len(early):
            m.fault(line, early[0], "arrives at the barrier of its cluster again without barrier.cluster.wait")
        self.waited[lanes] = False
        self.arrivals[lanes] += 1
        for position in np.unique(lanes // m.width).tolist():
            group = lanes[lanes // m.width == position]
            saying = self.saying[position // self.size]
            merge(saying, m.races.releases.fenced(group, CLUSTER) if relaxed else m.races.told(group))
        self.initialised[lanes] = m.races.initialised[lanes]
        self.times[lanes] = m.races.tick(line)
        for number in np.unique(lanes // self.lanes).tolist():
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Complete the phase of a cluster's barrier if all of its threads are there."""
        m = self.m
        here = slice(number * self.lanes, (number + 1) * self.lanes)
        alive = m.alive[here]
        if not alive.any() or (self.arrivals[here][alive] <= self.phases[number]).any():
            return
        m.events += 1
        self.phases[number] += 1
        self.said[number], self.saying[number] = self.saying[number], {}
        blocked, self.blocked = self.blocked, []
        for lanes, resume, line in blocked:
            if lanes[0] // self.lanes == number:
                self._pass(lanes)
                mask = np.zeros(m.lanes, bool)
                mask[lanes] = True
                m.join(resume, None if len(lanes) == m.lanes else mask, len(lanes))
            else:
                self.blocked.append((lanes, resume, line))

    def wait(self, mask: Array | None, resume: int, line: int) -> int:
        """barrier.cluster.wait: where all go on, or that they wait."""
        m = self.m
        lanes = m.active(mask)
        early = lanes[self.waited[lanes]]
        if len(early):
            m.fault(line, early[0], "waits at the barrier of its cluster without barrier.cluster.arrive before")
        numbers = lanes // self.lanes
        there = self.arrivals[lanes] <= self.phases[numbers]
        for number in np.unique(numbers[~there]).tolist():
            self.blocked.append((lanes[numbers == number], resume, line))
        for number in np.unique(numbers[there]).tolist():
            self._pass(lanes[numbers == number])
        if there.all():
            return resume
        if there.any():
            ahead = np.zeros(m.lanes, bool)
            ahead[lanes[there]] = True
            m.join(resume, ahead, int(np.count_nonzero(there)))
        return BLOCKED

    def _pass(self, lanes: Array) -> None:
        """Lanes of one cluster have seen its phase complete."""
        m = self.m
        self.waited[lanes] = True
        number = int(lanes[0]) // self.lanes
        times = self.times[number * self.lanes : (number + 1) * self.lanes].reshape(self.size, m.width)
        for position in np.unique(lanes // m.width).tolist():
            met = self.met[position, :, : m.width]
            np.maximum(met, times, out=met)
            m.races.learn(lanes[lanes // m.width == position], self.said[number])
        if "mbarriers" in m.units:
            m.units["mbarriers"].met(lanes, self.initialised)


def _barrier(t: Translator, ins: Instruction) -> None:
    verb, rest = ins.opcode[2], set(ins.opcode[3:])
    orders = {"arrive": {"release", "relaxed"}, "wait": {"acquire"}}
    if verb not in orders or rest - orders[verb] - {"aligned"}:
        raise t.error("this form is not known")
    if t.mask == "P":
        raise t.error("a predicate on a barrier is not known")
    if verb == "arrive":
        t.emit(f"m.cluster.arrive({t.mask}, {'relaxed' in rest}, {t.line})")
    else:
        t.emit(f"return m.cluster.wait({t.mask}, {t.next}, {t.line})")


def _map(m: Machine, mask: Array | None, address: Array, rank: Array, line: int) -> Array:
    bad = np.broadcast_to(rank, m.lanes) >= m.cluster_size
    if mask is not None:
        bad = bad & mask
    if bad.any():
        lane = int(bad.nonzero()[0][0])
        found = int(np.broadcast_to(rank, m.lanes)[lane])
        m.fault(line, lane, f"rank {found} in a cluster of {m.cluster_size} blocks")
    if m.cluster_size == 1:
        return address.copy()
    kind = address.dtype.type
    high = address & kind(((1 << 64) - (1 << 32)) % (1 << 8 * address.dtype.itemsize))
    return np.asarray(high | address & kind(_INSIDE) | (rank.astype(address.dtype) + kind(1)) << kind(RANK))


def _mapa(t: Translator, ins: Instruction) -> None:
    d, a, rank = operands(ins, 3)
    if ins.opcode[1:-1] not in ((), ("shared::cluster",)) or ins.opcode[-1] not in ("u32", "u64"):
        raise t.error("this form is not known")
    width = "u" + str(int(ins.opcode[-1][1:]) // 8)
    t.write(d, f"{t.const(_map)}(m, {t.mask}, {t.read(a, width)}, {t.read(rank, 'u4')}, {t.line})", width)


def _rank(m: Machine, address: Array) -> Array:
    high = (address >> address.dtype.type(RANK)).astype(np.uint32) & np.uint32(0xFF)
    own = (m.lane_ids // m.width % m.cluster_size).astype(np.uint32)
    return np.where(high == 0, own, high - np.uint32(1))


def _getctarank(t: Translator, ins: Instruction) -> None:
    d, a = operands(ins, 2)
    width = "u" + str(int(ins.opcode[-1][1:]) // 8)
    t.write(d, f"{t.const(_rank)}(m, {t.read(a, width)})", "u4")


HANDLERS: dict[str, Handler] = {"barrier.cluster": _barrier, "mapa": _mapa, "getctarank": _getctarank}
