"""Memory barriers (`mbarrier`): phases, arrivals and bytes of copies under way.

A phase completes when no arrival is pending and the transaction count is zero; the next one then starts with the
expected count. Bytes may be reported before they are expected, within a phase. In shared memory an mbarrier takes eight
bytes, whose content is the simulator's own; a kernel that overwrites them is stopped at the next use.

What an arriving thread did before, and what a copy wrote, happened before whatever follows a wait that succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.clusters import RANK
from jitmx.sim.memory import SHARED_WINDOW
from jitmx.sim.ptx import Instruction, Operand
from jitmx.sim.races import ASYNC, Said, merge

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]
LIMIT = (1 << 20) - 1


@dataclass
class Mbarrier:
    """One barrier.

    Attributes:
        expected: arrivals of the next phase.
        pending: arrivals that the current phase lacks.
        transactions: bytes that the current phase expects and has not seen; negative where they came first.
        phase: how many phases have completed.
    """

    expected: int
    pending: int = field(init=False)
    transactions: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= LIMIT:
            raise SimulationError(f"an mbarrier for {self.expected} arrivals; it must be 1 to {LIMIT}")
        self.pending = self.expected

    def expect(self, count: int) -> bool:
        """`count` more bytes are to come (expect_tx) or, negative, came (complete_tx); whether the phase completed."""
        self.transactions += count
        if abs(self.transactions) > LIMIT:
            raise SimulationError(f"the mbarrier's transaction count becomes {self.transactions}; its limit is {LIMIT}")
        return self._settle()

    def arrive(self, count: int = 1, *, expect: int = 0, drop: bool = False) -> tuple[int, bool]:
        """`count` arrivals after `expect` more bytes: the state before, and whether the phase completed.

        Args:
            drop: the next phases expect `count` arrivals less.
        """
        if not 1 <= count <= self.pending:
            raise SimulationError(
                f"{count} arrivals at an mbarrier whose phase lacks {self.pending} of {self.expected}"
            )
        token = self.token
        self.expect(expect)  # which completes nothing, with this arrival pending
        if drop:
            self.expected -= count
        self.pending -= count
        return token, self._settle()

    @property
    def token(self) -> int:
        """The state that arrive gives out: phase and pending count."""
        return self.phase << 20 | self.pending

    def passed(self, token: int) -> bool:
        """Whether the phase of `token` has completed.

        Raises:
            SimulationError: a state of two or more phases ago, of which nothing is known.
        """
        behind = self.phase - (token >> 20)
        if behind not in (0, 1):
            raise SimulationError(f"a wait for the state of phase {token >> 20} at an mbarrier in phase {self.phase}")
        return behind == 1

    def passed_parity(self, parity: int) -> bool:
        """Whether the phase of this parity, either the current one or the one before, has completed."""
        return self.phase & 1 != parity & 1

    def _settle(self) -> bool:
        if self.pending or self.transactions:
            return False
        self.phase += 1
        self.pending = self.expected
        return True

    @property
    def word(self) -> int:
        """The eight bytes in shared memory."""
        return (self.transactions & 0x1FFFFF) << 41 | (self.pending & LIMIT) << 21 | (self.phase & LIMIT) << 1 | 1


@dataclass
class _Entry:
    barrier: Mbarrier
    made: tuple[int, int, int]  # lane, time and line of its init
    arrived: Said = field(default_factory=dict)  # what those that arrived in the current phase know
    released: Said = field(default_factory=dict)  # the same of completed phases
    foreign: Said | None = None  # what the last of them knew of other blocks


class Mbarriers:
    """The mbarriers of every block of a machine, by block position and shared address."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.entries: dict[tuple[int, int], _Entry] = {}

    @classmethod
    def of(cls, m: Machine) -> Mbarriers:
        """Those of a machine."""
        if "mbarriers" not in m.units:
            m.units["mbarriers"] = cls(m)
        found: Mbarriers = m.units["mbarriers"]
        return found

    def init(self, lane: int, address: int, count: int, line: int) -> None:
        """mbarrier.init by one lane."""
        key = lane // self.m.width, address
        if key in self.entries:
            self.m.fault(line, lane, f"mbarrier.init at {address:#x}, which already holds an mbarrier")
        try:
            barrier = Mbarrier(count)
        except SimulationError as error:
            self.m.fault(line, lane, str(error))
        self._store(lane, address, barrier.word, line)
        self.entries[key] = _Entry(barrier, (lane, self.m.races.time, line))

    def inval(self, lane: int, address: int, line: int) -> None:
        """mbarrier.inval by one lane."""
        self.get(lane, address, line)
        del self.entries[lane // self.m.width, address]
        self._store(lane, address, 0, line)

    def resolve(self, lane: int, address: int, line: int) -> tuple[int, int]:
        """Position of the block whose shared memory an address lies in, and the address there."""
        if address < 1 << RANK:
            return lane // self.m.width, address
        return self.m.cluster.position(lane, address, line), address & (1 << RANK) - 1

    def get(self, lane: int, address: int, line: int) -> _Entry:
        """The mbarrier at a shared address, for a lane."""
        m = self.m
        position, address = self.resolve(lane, address, line)
        there = m.shared_name(position, lane)
        entry = self.entries.get((position, address))
        if entry is None:
            m.fault(line, lane, f"there is no mbarrier at {address:#x} of {there}; it needs mbarrier.init")
        start = position * m.shared.extent + address
        if int(m.shared.data[start : start + 8].view(np.uint64)[0]) != entry.barrier.word:
            m.fault(line, lane, f"the mbarrier at {address:#x} of {there} was overwritten")
        self._ordered(entry, lane, address, there, line)
        return entry

    def check_known(self, lane: int, address: int, line: int) -> None:
        """As `get`, for one more lane of a block."""
        position, inner = self.resolve(lane, address, line)
        self._ordered(self.entries[position, inner], lane, inner, self.m.shared_name(position, lane), line)

    def _ordered(self, entry: _Entry, lane: int, address: int, there: str, line: int) -> None:
        m, races = self.m, self.m.races
        maker, time, made = entry.made
        if lane != maker and not races.knows(lane, maker, time):
            m.fault(
                line,
                lane,
                f"uses the mbarrier at {address:#x} of {there}, which thread {m.thread_name(maker % m.width)} "
                f"initialised at PTX line {made} with nothing between them that orders the two",
            )

    def arrive(
        self,
        lane: int,
        address: int,
        count: int,
        expect: int,
        line: int,
        *,
        drop: bool = False,
        more: int = 0,
        brought: Array | None = None,
    ) -> int:
        """Arrivals of one lane, which first makes `more` arrivals pending; the state before.

        Args:
            brought: clocks of what arrives besides the thread itself.
        """
        races = self.m.races
        entry = self.get(lane, address, line)
        entry.barrier.pending += more
        self._visit(lane, address, line)
        merge(entry.arrived, {int(races.block[lane]): races.snapshot(np.array([lane]))})
        if brought is not None:
            merge(entry.arrived, {int(races.block[lane]): brought})
        foreign = races.cross.get(lane)
        if foreign is not None and foreign is not entry.foreign:
            merge(entry.arrived, foreign)
            entry.foreign = foreign
        try:
            token, completed = entry.barrier.arrive(count, expect=expect, drop=drop)
        except SimulationError as error:
            self.m.fault(line, lane, f"{error} (at {address:#x})")
        self._after(entry, completed)
        self._put(lane, address, entry.barrier.word, line)
        return token

    def expect(
        self, lane: int, address: int, count: int, line: int, column: int | None = None, time: int = 0,
        *, proxy: bool = False,
    ) -> None:  # fmt: skip
        """As Mbarrier.expect; bytes that a copy brought, maybe by the other proxy, carry its column and time."""
        entry = self.get(lane, address, line)
        maker, made, where = entry.made
        if proxy and max(self.m.races.fenced[maker], self.m.races.fenced[lane]) < made:
            self.m.fault(
                line,
                lane,
                f"an asynchronous copy uses the mbarrier at {address:#x}, initialised at PTX line {where} without "
                "fence.mbarrier_init or fence.proxy.async after it",
            )
        if column is not None:
            clocks = np.zeros(self.m.width + ASYNC, self.m.races.seen.dtype)
            clocks[column] = time
            merge(entry.arrived, {int(self.m.races.block[lane]): clocks})
        else:
            self._visit(lane, address, line)
        try:
            completed = entry.barrier.expect(count)
        except SimulationError as error:
            self.m.fault(line, lane, f"{error} (at {address:#x})")
        self._after(entry, completed)
        self._put(lane, address, entry.barrier.word, line)

    def wait(self, lanes: Array, addresses: Array, states: Array, parity: bool, line: int) -> Array:
        """Whether the phase that each lane waits for has completed; those that have to wait let others run."""
        passed = np.zeros(len(lanes), bool)
        for address, state in {(int(a), int(s)) for a, s in zip(addresses, states, strict=True)}:
            same = (addresses == address) & (states == state)
            for block in np.unique(lanes[same] // self.m.width):
                which = np.flatnonzero(same & (lanes // self.m.width == block))
                entry = self.get(int(lanes[which[0]]), address, line)
                maker, time, _ = entry.made
                late = lanes[which][~self.m.races.known_by(lanes[which], maker, time)]
                if len(late):
                    self.get(int(late[0]), address, line)
                try:
                    done = entry.barrier.passed_parity(state) if parity else entry.barrier.passed(state)
                except SimulationError as error:
                    self.m.fault(line, int(lanes[which[0]]), f"{error} (at {address:#x})")
                if done:
                    passed[which] = True
                    self.m.races.learn(lanes[which], entry.released)
        if not passed.all():
            self.m.poll(lanes[~passed])
        return passed

    def _after(self, entry: _Entry, completed: bool) -> None:
        self.m.events += 1
        if completed:
            merge(entry.released, entry.arrived)
            entry.arrived, entry.foreign = {}, None

    def _store(self, lane: int, address: int, word: int, line: int) -> None:
        """Write the eight bytes as a plain store of the lane to its own block."""
        where, value = np.array([address], "u8"), np.array([[word]], "u8")
        self.m.shared.store(self.m, where, 0, np.array([lane]), value, line)

    def _put(self, lane: int, address: int, word: int, line: int) -> None:
        """The same as an atomic write, to any block."""
        m = self.m
        position, address = self.resolve(lane, address, line)
        where = position * m.shared.extent + address
        m.races.note(m.shared, where, lane, 8, line)
        m.shared.rows(8, 1)[where // 8] = word

    def _visit(self, lane: int, address: int, line: int) -> None:
        position, address = self.resolve(lane, address, line)
        where = np.array([position * self.m.shared.extent + address])
        self.m.cluster.visit(where, np.array([lane]), self.m.races.tick(line))


def _lanes(m: Machine, mask: Array | None, *values: Array) -> tuple[Array, ...]:
    lanes = m.active(mask)
    return lanes, *(np.broadcast_to(value, m.lanes)[lanes] for value in values)


def _init(m: Machine, mask: Array | None, address: Array, count: Array, line: int) -> None:
    for lane, at, number in zip(*_lanes(m, mask, address, count), strict=True):
        Mbarriers.of(m).init(int(lane), int(at), int(number), line)


def _inval(m: Machine, mask: Array | None, address: Array, line: int) -> None:
    for lane, at in zip(*_lanes(m, mask, address), strict=True):
        Mbarriers.of(m).inval(int(lane), int(at), line)


def _arrive(
    m: Machine, mask: Array | None, address: Array, count: Array, expect: Array, drop: bool, line: int
) -> Array:
    tokens = np.zeros(m.lanes, np.uint64)
    for lane, at, number, size in zip(*_lanes(m, mask, address, count, expect), strict=True):
        tokens[lane] = Mbarriers.of(m).arrive(int(lane), int(at), int(number), int(size), line, drop=drop)
    return tokens


def _transact(m: Machine, mask: Array | None, address: Array, count: Array, sign: int, line: int) -> None:
    for lane, at, number in zip(*_lanes(m, mask, address, count), strict=True):
        Mbarriers.of(m).expect(int(lane), int(at), sign * int(number), line)


def _wait(m: Machine, mask: Array | None, address: Array, state: Array, parity: bool, line: int) -> Array:
    lanes, at, states = _lanes(m, mask, address, state)
    result = np.zeros(m.lanes, bool)
    result[lanes] = Mbarriers.of(m).wait(lanes, at, states, parity, line)
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
        one, none = t.scalar(1, "u4"), t.scalar(0, "u4")
        count, expect = (one, extra) if "expect_tx" in parts else (extra, none)
        call = f"{t.const(_arrive)}({where}, {address}, {count}, {expect}, {verb == 'arrive_drop'}, {t.line})"
        t.write(given[0], call, "u8")
    elif verb in ("expect_tx", "complete_tx"):
        sign = 1 if verb == "expect_tx" else -1
        t.emit(f"{t.const(_transact)}({where}, {address}, {t.read(given[1], 'u4')}, {sign}, {t.line})")
    elif verb in ("test_wait", "try_wait"):
        parity = "parity" in parts
        state = t.read(given[2], "u4" if parity else "u8")
        t.write(given[0], f"{t.const(_wait)}({where}, {address}, {state}, {parity}, {t.line})", "b1")
    else:
        raise t.error("it is not known")


HANDLERS: dict[str, Handler] = {"mbarrier": _mbarrier}
