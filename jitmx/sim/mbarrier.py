"""Memory barriers (`mbarrier`): phases, arrivals and bytes of copies under way.

In shared memory an mbarrier takes eight bytes, whose content is the simulator's own; a kernel that overwrites them is
stopped at the next use.

What an arriving thread did before, and what a copy wrote, happened before whatever follows a wait that succeeds, as far
as the arrival's scope reaches; a relaxed arrival tells no more than its thread has fenced. The scope of a wait is not
looked at: one of the block sees what arrivals from the cluster tell of shared memory, and machine code differs only in
what becomes of the L1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.clusters import RANK
from jitmx.sim.knowledge import Said, merge
from jitmx.sim.memory import SHARED_WINDOW
from jitmx.sim.order import CLUSTER, CTA, parse, spelled
from jitmx.sim.phase import LIMIT, Mbarrier
from jitmx.sim.ptx import Instruction, Operand
from jitmx.sim.warps import alike, chosen

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

_ARRIVAL = "release.cta"  # where an arrival names no order


@dataclass
class _Entry:
    barrier: Mbarrier
    number: int  # in the order of their inits
    made: tuple[int, int, int]  # lane, time and line of its init
    # What those that arrived in the current phase know, by the block that their scope ends at, or None; and the same of
    # completed phases.
    arrived: dict[int | None, Said] = field(default_factory=dict)
    released: dict[int | None, Said] = field(default_factory=dict)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)  # times, by block and column, of what was copied
    known: Array = field(kw_only=True)  # lanes that are known to come after its init
    waiter: tuple[int, int] | None = None  # lane and line of who has waited last
    copied: tuple[int, int, int] = (0, 0, 0)  # phases with the last one whose bytes a copy brought; its lane and line
    seen: int = 0  # phases that a wait has found completed


class Mbarriers:
    """The mbarriers of every block of a machine, by block position and shared address."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.entries: dict[tuple[int, int], _Entry] = {}
        self.phases = np.zeros(0, np.int64)  # of each mbarrier by its number
        self.made = 0
        self.words = m.shared.rows(8, 1).reshape(-1)  # shared memory in words of eight bytes
        # What each lane that polls waits for: the number of an mbarrier and the phase that must pass.
        self.awaited = np.zeros(m.lanes, np.int64)
        self.awaited_phase = np.zeros(m.lanes, np.int64)
        m.polling.progress = self.progress
        self.touched: list[tuple[int, int, int]] = []  # where words have changed, by which lane, at which line

    @classmethod
    def of(cls, m: Machine) -> Mbarriers:
        """Those of a machine."""
        if "mbarriers" not in m.units:
            m.units["mbarriers"] = cls(m)
        found: Mbarriers = m.units["mbarriers"]
        return found

    def init(self, lanes: Array, addresses: Array, counts: Array, line: int) -> None:
        """mbarrier.init by some lanes, each of one."""
        made, words = [], []
        for lane, address, count in zip(lanes.tolist(), addresses.tolist(), counts.tolist(), strict=True):
            key = lane // self.m.width, address
            if key in self.entries:
                self.m.fault(line, lane, f"mbarrier.init at {address:#x}, which already holds an mbarrier")
            try:
                barrier = Mbarrier(count)
            except SimulationError as error:
                self.m.fault(line, lane, str(error))
            self.entries[key] = _Entry(barrier, self.made, (lane, 0, line), known=np.zeros(self.m.lanes, bool))
            made.append(self.entries[key])
            words.append(barrier.word)
            self.made += 1
        self.phases = np.concatenate([self.phases, np.zeros(len(made), np.int64)])
        values = np.array(words, np.uint64)[:, None]
        self.m.shared.store(self.m, addresses.astype(np.uint64), 0, lanes, values, line)
        for entry in made:
            entry.made = (entry.made[0], self.m.races.time, line)

    def inval(self, lane: int, address: int, line: int) -> None:
        """mbarrier.inval by one lane."""
        self.get(np.array([lane]), address, line)
        del self.entries[lane // self.m.width, address]
        where, value = np.array([address], "u8"), np.zeros((1, 1), "u8")
        self.m.shared.store(self.m, where, 0, np.array([lane]), value, line)

    def resolve(self, lane: int, address: int, line: int) -> tuple[int, int]:
        """Position of the block whose shared memory an address lies in, and the address there."""
        if address < 1 << RANK:
            return lane // self.m.width, address
        return self.m.cluster.position(lane, address, line), address & (1 << RANK) - 1

    def get(self, lanes: Array, address: int, line: int) -> _Entry:
        """The mbarrier at a shared address, for lanes of one block."""
        m, lane = self.m, int(lanes[0])
        if address < 1 << RANK:
            position = lane // m.width
        else:
            position, address = self.resolve(lane, address, line)
        entry = self.entries.get((position, address))
        if entry is None:
            there = m.shared_name(position, lane)
            m.fault(line, lane, f"there is no mbarrier at {address:#x} of {there}; it needs mbarrier.init")
        if self.words.item((position * m.shared.extent + address) >> 3) != entry.barrier.word:
            there = m.shared_name(position, lane)
            m.fault(line, lane, f"the mbarrier at {address:#x} of {there} was overwritten")
        maker, time, made = entry.made
        if entry.known[lane] if len(lanes) == 1 else np.count_nonzero(entry.known.take(lanes)) == len(lanes):
            return entry
        known = m.races.knows(lanes, maker, time)
        entry.known[lanes] = known
        if np.count_nonzero(known) != len(lanes):
            lane = int(lanes[known.argmin()])
            m.fault(
                line,
                lane,
                f"uses the mbarrier at {address:#x} of {m.shared_name(position, lane)}, which thread "
                f"{m.thread_name(maker % m.width)} initialised at PTX line {made} with nothing between them that "
                "orders the two",
            )
        return entry

    def met(self, lanes: Array, fenced: Array) -> None:
        """Lanes have met their cluster, in which each has fenced its inits up to a time."""
        cluster = lanes[0] // self.m.cluster.lanes
        for entry in self.entries.values():
            maker, made, _ = entry.made
            if maker // self.m.cluster.lanes == cluster and fenced[maker] > made:
                entry.known[lanes] = True

    def arrive(
        self,
        lanes: Array,
        address: int,
        count: int,
        expect: int,
        line: int,
        *,
        drop: bool = False,
        more: int = 0,
        brought: Array | None = None,
        how: str = _ARRIVAL,
    ) -> Array:
        """`count` arrivals of each of some lanes of a block, which first make `more` pending; the states before.

        Args:
            brought: clocks of what arrives besides the threads themselves.
            how: the order of the arrival.
        """
        races, entry = self.m.races, self.get(lanes, address, line)
        if len(lanes) > 1 and (expect or drop or more or count * len(lanes) > entry.barrier.pending):
            each = [
                self.arrive(
                    lanes[i : i + 1], address, count, expect, line, drop=drop, more=more, brought=brought, how=how
                )
                for i in range(len(lanes))
            ]
            return np.concatenate(each)
        entry.barrier.pending += more
        self._visit(lanes, address, line)
        order, block = parse(how), int(races.block[lanes[0]])
        told = {} if order.release else races.releases.fenced(lanes, order.scope)
        self._tell(entry, order.scope, block, races.told(lanes) if order.release else told)
        if brought is not None:
            self._tell(entry, CLUSTER, block, {block: brought})
        try:
            token, completed = entry.barrier.arrive(count * len(lanes), expect=expect, drop=drop)
        except SimulationError as error:
            self.m.fault(line, int(lanes[0]), f"{error} (at {address:#x})")
        self._after(entry, completed)
        self._put(int(lanes[-1]), address, entry.barrier.word, line)
        return token - count * np.arange(len(lanes))

    def expect(
        self, lane: int, address: int, count: int, line: int, column: int | None = None, time: int = 0,
        *, proxy: bool = False,
    ) -> None:  # fmt: skip
        """As Mbarrier.expect; bytes that a copy brought, maybe by the other proxy, carry its column and time."""
        lanes = np.array([lane])
        entry = self.get(lanes, address, line)
        maker, made, where = entry.made
        fenced = self.m.races.initialised
        if proxy and max(fenced[maker], fenced[lane]) < made:
            self.m.fault(
                line,
                lane,
                f"an asynchronous copy uses the mbarrier at {address:#x}, initialised at PTX line {where} without "
                "fence.mbarrier_init or fence.proxy.async after it",
            )
        if column is not None:
            entry.copies[int(self.m.races.block[lane]), column] = time
            entry.copied = entry.barrier.phase + 1, lane, line
        else:
            self._visit(lanes, address, line)
        try:
            completed = entry.barrier.expect(count)
        except SimulationError as error:
            self.m.fault(line, lane, f"{error} (at {address:#x})")
        self._after(entry, completed)
        self._put(lane, address, entry.barrier.word, line)

    def wait(self, lanes: Array, addresses: Array, states: Array, parity: bool, how: str, line: int) -> Array:
        """Whether the phase that each lane waits for has completed; those that have to wait let others run."""
        order = parse(how)
        passed = np.zeros(len(lanes), bool)
        for which in alike(lanes // self.m.width, addresses, states):
            some, address, state = lanes[which], int(addresses[which[0]]), int(states[which[0]])
            entry = self.get(some, address, line)
            entry.waiter = int(some[0]), line
            if parity and state > 1:
                self.m.fault(
                    line, int(some[0]), f"waits for parity {state} of the mbarrier at {address:#x}: it is 0 or 1"
                )
            try:
                done = entry.barrier.passed_parity(state) if parity else entry.barrier.passed(state)
            except SimulationError as error:
                self.m.fault(line, int(some[0]), f"{error} (at {address:#x})")
            if done:
                passed[which], entry.seen = True, entry.barrier.phase
                for block, said in entry.released.items():
                    if block is None or block == self.m.races.block[some[0]]:
                        self.m.races.releases.waited(some, said, order, line)
            else:
                self.awaited[some], self.awaited_phase[some] = entry.number, entry.barrier.phase
        if not passed.all():
            self.m.polling.add(lanes[~passed], known=True)
        return passed

    def progress(self, lanes: Array) -> Array:
        """Which of lanes that wait for an mbarrier would find their phase completed."""
        done: Array = self.phases.take(self.awaited.take(lanes)) != self.awaited_phase.take(lanes)
        return done

    def end(self) -> None:
        """Every lane is done: an mbarrier that someone has waited for has no phase begun.

        Who arrives more often than is awaited completes phases ahead of others, and what he adds up shows only rounds
        later. Nor has a copy brought bytes for which nobody has waited: its block may end before it writes.
        """
        for (_, address), entry in self.entries.items():
            barrier, (phases, lane, line) = entry.barrier, entry.copied
            if phases > entry.seen:
                self.m.fault(
                    line,
                    lane,
                    f"nobody waits for what this copies, whose bytes the mbarrier at {address:#x} counts: the block "
                    "may end before they are written",
                )
            if entry.waiter and (barrier.pending != barrier.expected or barrier.transactions):
                lane, line = entry.waiter
                self.m.fault(
                    line,
                    lane,
                    f"the mbarrier at {address:#x} that this waits for ends within a phase, which lacks "
                    f"{barrier.pending} of {barrier.expected} arrivals and {barrier.transactions} bytes",
                )

    def _after(self, entry: _Entry, completed: bool) -> None:
        self.m.events += 1
        if completed:
            self.phases[entry.number] += 1
            copied: Said = {}
            for (block, column), time in entry.copies.items():
                copied.setdefault(block, self.m.races.knowledge.blank())[column] = time
            if copied:
                merge(entry.arrived.setdefault(None, {}), copied)
            for reach, said in entry.arrived.items():
                merge(entry.released.setdefault(reach, {}), said)
            entry.arrived, entry.copies = {}, {}

    def _tell(self, entry: _Entry, scope: int, block: int, said: Said) -> None:
        """What arrives at an mbarrier from a block: to whoever waits there, or to its own block only."""
        if said:
            merge(entry.arrived.setdefault(block if scope == CTA else None, {}), said)

    def _put(self, lane: int, address: int, word: int, line: int) -> None:
        """Write the eight bytes as an atomic write, to any block, which `settle` notes."""
        position, address = self.resolve(lane, address, line)
        where = position * self.m.shared.extent + address
        self.touched.append((where, lane, line))
        self.words[where >> 3] = word

    def settle(self) -> None:
        """Note the atomic writes of one instruction for the race check."""
        if self.touched:
            where, lanes, lines = zip(*self.touched, strict=True)
            self.m.races.note(self.m.shared, np.array(where), np.array(lanes), 8, lines[-1])
            self.touched.clear()

    def _visit(self, lanes: Array, address: int, line: int) -> None:
        if address < 1 << RANK:
            return  # the block's own
        position, address = self.resolve(int(lanes[0]), address, line)
        where = np.full(len(lanes), position * self.m.shared.extent + address)
        self.m.cluster.visit(where, lanes, self.m.races.tick(line))


def _lanes(m: Machine, mask: Array | None, *values: Array) -> tuple[Array, ...]:
    lanes = m.active(mask)
    return lanes, *(chosen(value, lanes) for value in values)


def _init(m: Machine, mask: Array | None, address: Array, count: Array, line: int) -> None:
    lanes, addresses, counts = _lanes(m, mask, address, count)
    Mbarriers.of(m).init(lanes, addresses, counts, line)


def _inval(m: Machine, mask: Array | None, address: Array, line: int) -> None:
    for lane, at in zip(*_lanes(m, mask, address), strict=True):
        Mbarriers.of(m).inval(int(lane), int(at), line)


def _arrive(
    m: Machine, mask: Array | None, address: Array, count: Array, expect: Array, drop: bool, how: str, line: int
) -> Array:
    tokens = np.zeros(m.lanes, np.uint64)
    lanes, at, numbers, sizes = _lanes(m, mask, address, count, expect)
    barriers = Mbarriers.of(m)
    for which in alike(lanes // m.width, at, numbers, sizes):
        first, some = which[0], lanes[which]
        number, size = int(numbers[first]), int(sizes[first])
        tokens[some] = barriers.arrive(some, int(at[first]), number, size, line, drop=drop, how=how)
    barriers.settle()
    return tokens


def _transact(m: Machine, mask: Array | None, address: Array, count: Array, sign: int, line: int) -> None:
    for lane, at, number in zip(*_lanes(m, mask, address, count), strict=True):
        Mbarriers.of(m).expect(int(lane), int(at), sign * int(number), line)
    Mbarriers.of(m).settle()


def _wait(m: Machine, mask: Array | None, address: Array, state: Array, parity: bool, how: str, line: int) -> Array:
    lanes, at, states = _lanes(m, mask, address, state)
    result = np.zeros(m.lanes, bool)
    result[lanes] = Mbarriers.of(m).wait(lanes, at, states, parity, how, line)
    return result


def shared_address(t: Translator, operand: Operand, *, generic: bool) -> str:
    """Expression of the shared address, offset included, that an operand names."""
    address, offset = t.address(operand)
    offset -= SHARED_WINDOW if generic else 0
    return f"({address} + {t.scalar(offset % (1 << 64), 'u8')})" if offset else address


_MODIFIERS = {
    "mbarrier", "b64", "shared", "shared::cta", "shared::cluster", "init", "inval", "arrive", "arrive_drop",
    "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count", "parity", "release", "acquire", "relaxed",
    "cta", "cluster",
}  # fmt: skip


def _mbarrier(t: Translator, ins: Instruction) -> None:
    verb, parts, given = ins.opcode[1], set(ins.opcode), ins.operands
    if parts - _MODIFIERS:
        raise t.error(f".{sorted(parts - _MODIFIERS)[0]} is not known")
    generic = not any(part.startswith("shared") for part in parts)
    where = f"m, {t.mask}"
    if "shared::cluster" in parts and verb not in ("arrive", "arrive_drop", "expect_tx", "complete_tx"):
        raise t.error("it works on the block's own mbarriers only")
    if verb == "pending_count":
        t.write(given[0], f"({t.read(given[1], 'u8')} & {t.scalar(LIMIT, 'u8')}).astype('u4')", "u4")
        return
    at = 1 if verb in ("arrive", "arrive_drop", "test_wait", "try_wait") else 0
    address = shared_address(t, given[at], generic=generic)
    if verb == "init":
        t.emit(f"{t.const(_init)}({where}, {address}, {t.read(given[1], 'u4')}, {t.line})")
    elif verb == "inval":
        t.emit(f"{t.const(_inval)}({where}, {address}, {t.line})")
    elif verb in ("arrive", "arrive_drop"):
        extra = t.read(given[2], "u4") if len(given) > 2 else t.scalar(1, "u4")
        how = spelled(ins.opcode[2:], *_ARRIVAL.split("."))
        one, none = t.scalar(1, "u4"), t.scalar(0, "u4")
        count, expect = (one, extra) if "expect_tx" in parts else (extra, none)
        call = f"{t.const(_arrive)}({where}, {address}, {count}, {expect}, {verb == 'arrive_drop'}, {how!r}, {t.line})"
        t.write(given[0], call, "u8")
    elif verb in ("expect_tx", "complete_tx"):
        sign = 1 if verb == "expect_tx" else -1
        t.emit(f"{t.const(_transact)}({where}, {address}, {t.read(given[1], 'u4')}, {sign}, {t.line})")
    elif verb in ("test_wait", "try_wait"):
        parity, how = "parity" in parts, spelled(ins.opcode[2:], "acquire", "cta")
        state = t.read(given[2], "u4" if parity else "u8")
        t.write(given[0], f"{t.const(_wait)}({where}, {address}, {state}, {parity}, {how!r}, {t.line})", "b1")
    else:
        raise t.error("it is not known")


HANDLERS: dict[str, Handler] = {"mbarrier": _mbarrier}
