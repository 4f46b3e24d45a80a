"""Registers of `wgmma` while it is under way: who touches them too early, and what a fence has missed.

Accumulators of a product may not be read or written, and registers that hold its A not be written, until
`wgmma.wait_group` says that it is done; only further products may use the same accumulators. What other instructions
wrote to accumulators must lie before a `wgmma.fence`, and what they wrote to A since the last commit needs one since
then: compilers move what makes A past a fence, which is no more than a marker to them. The first product of a warpgroup
needs a fence whatever was written. A plain move between registers
carries these states along, because compilers copy accumulators and the assembler undoes that; constants count as
fenced, as they may be put anywhere.

Data flow over the basic blocks finds the instructions that may be at fault, and only those check when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.flow import Access
from jitmx.sim.program import Block
from jitmx.sim.ptx import Immediate, Instruction, Register, Vector

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Translator

Array = npt.NDArray[Any]
WARPGROUP = 128


@dataclass
class Watch:
    """What one instruction checks or notes: names of registers."""

    reads: set[str] = field(default_factory=set)  # which may be under way
    writes: set[str] = field(default_factory=set)
    alias: tuple[str, str] | None = None  # destination and source of a move
    fenced: set[str] = field(default_factory=set)  # accumulators that must have been fenced
    begun: set[str] = field(default_factory=set)  # registers of A, the same
    written: set[str] = field(default_factory=set)  # which are not fenced from here on

    @property
    def simple(self) -> bool:
        """Whether it neither carries states along nor asks for fences, so that several can be looked at as one."""
        return not (self.alias or self.fenced or self.begun)


@dataclass(frozen=True)
class _Several:
    """Simple watches, with the PTX line of each, as one: all that they read and write, and what lines are to blame."""

    reads: frozenset[str]
    writes: frozenset[str]
    written: dict[str, int]
    each: list[tuple[Watch, int]]


@dataclass
class _State:
    """Registers that may be accumulators or A of a product under way, written since the last fence, or bare.

    Bare is what was written with no fence since the last commit; `open` is whether there may be none. One state goes
    through a block and is changed by its instructions, which touch few registers of thousands.
    """

    writing: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    open: bool = True

    @property
    def _sets(self) -> tuple[set[str], ...]:
        return self.writing, self.reading, self.loose, self.bare

    def copy(self) -> _State:
        return _State({*self.writing}, {*self.reading}, {*self.loose}, {*self.bare}, self.open)

    def join(self, other: _State) -> bool:
        """Take in what `other` may be; whether this was more."""
        grown = other.open > self.open
        self.open |= other.open
        for own, others in zip(self._sets, other._sets, strict=True):
            if not others <= own:
                own |= others
                grown = True
        return grown


def operands_of(ins: Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Registers of D and of A of a wgmma.mma_async."""
    vectors = [operand.items if isinstance(operand, Vector) else () for operand in ins.operands[:2]]
    accumulators, left = (frozenset(x.name for x in items if isinstance(x, Register)) for items in vectors)
    return accumulators, left


def watches(
    body: list[Instruction], blocks: list[Block], accesses: dict[int, list[Access]], successors: list[set[int]]
) -> dict[int, Watch]:
    """What instructions of a kernel must check, by their index; empty where it has no wgmma."""
    if not any(ins.opcode[:2] == ("wgmma", "mma_async") for ins in body):
        return {}
    entering = [_State() for _ in blocks]
    pending, seen = {0}, set()
    while pending:
        index = min(pending)
        pending.discard(index)
        seen.add(index)
        state = entering[index].copy()
        for at, access in zip(range(blocks[index].first, blocks[index].last), accesses[index], strict=True):
            _step(body[at], access, state)
        for follower in successors[index]:
            if entering[follower].join(state) or follower not in seen:
                pending.add(follower)
    out: dict[int, Watch] = {}
    for index in seen:
        state = entering[index]
        for at, access in zip(range(blocks[index].first, blocks[index].last), accesses[index], strict=True):
            found = _check(body[at], access, state)
            carries = found.alias is not None and found.alias[1] in state.writing
            if found.reads or found.writes or found.fenced or found.begun or carries:
                out[at] = found
            _step(body[at], access, state)
    doubtful = {name for watch in out.values() for name in watch.fenced | watch.begun}
    if doubtful:
        _follow(body, blocks, accesses, doubtful, out)
    return out


def _step(ins: Instruction, access: Access, state: _State) -> None:
    """Make the state that after an instruction."""
    verb = ins.opcode[1] if ins.opcode[0] == "wgmma" else ""
    if verb == "mma_async":
        accumulators, left = operands_of(ins)
        state.writing |= accumulators
        state.reading |= left
        state.loose -= accumulators
        state.bare -= accumulators
    elif verb == "fence":
        state.loose.clear()
        state.bare.clear()
        state.open = False
    elif verb == "commit_group":
        state.open = True
    elif verb == "wait_group" and isinstance(ins.operands[0], Immediate) and ins.operands[0].value == 0:
        state.writing.clear()
        state.reading.clear()
    elif access.writes:
        copied, constant = access.copy, _constant(ins)
        loose = not constant and (copied is None or copied in state.loose)
        bare = not constant and (state.open if copied is None else copied in state.bare)
        for names, added in (
            (state.writing, copied in state.writing), (state.reading, False), (state.loose, loose), (state.bare, bare),
        ):  # fmt: skip
            if added:
                names |= access.writes
            elif not access.predicated:  # what a predicate may leave as it was
                names -= access.writes


def _check(ins: Instruction, access: Access, state: _State) -> Watch:
    if ins.opcode[0] == "wgmma":
        if ins.opcode[1] != "mma_async":
            return Watch()
        accumulators, left = operands_of(ins)
        return Watch(set(left & state.writing), fenced=set(accumulators & state.loose), begun=set(left & state.bare))
    if access.copy is not None:
        (target,) = access.writes or {""}
        busy = {target} & (state.writing | state.reading) if access.copy not in state.writing else set()
        return Watch(writes=set(busy), alias=(target, access.copy))
    return Watch(access.reads & state.writing, access.writes & (state.writing | state.reading))


def _constant(ins: Instruction) -> bool:
    return ins.opcode[0] == "mov" and isinstance(ins.operands[1], Immediate)


def _follow(
    body: list[Instruction],
    blocks: list[Block],
    accesses: dict[int, list[Access]],
    doubtful: set[str],
    out: dict[int, Watch],
) -> None:
    """Have every instruction that writes a doubtful register, or one that it is copied from, note it."""
    listed = [
        (at, access)
        for block in blocks
        for at, access in zip(range(block.first, block.last), accesses[block.index], strict=True)
    ]
    grown = True
    while grown:
        sources = {access.copy for _, access in listed if access.copy is not None and access.writes & doubtful}
        grown = not sources <= doubtful
        doubtful |= sources
    for at, access in listed:
        if body[at].opcode[0] == "wgmma":
            if body[at].opcode[1] in ("fence", "mma_async"):
                out.setdefault(at, Watch())
        elif access.writes & doubtful:
            watch = out.setdefault(at, Watch())
            if access.copy is not None:
                watch.alias = next(iter(access.writes)), access.copy
            elif not _constant(body[at]):
                watch.written = access.writes & doubtful
            else:
                watch.alias = next(iter(access.writes)), ""


@dataclass
class _Product:
    """One under way: its group, the registers that it writes and those of its A, its PTX line."""

    group: int
    writing: frozenset[str]
    reading: frozenset[str]
    line: int


class Flight:
    """Products under way of each warpgroup of a machine, by its first lane."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        warps = np.arange(0, m.lanes, 32)
        self._last: tuple[Array | None, list[int]] = None, []
        self._heads = warps - warps % m.width % WARPGROUP  # of each warp, the first lane of its warpgroup
        self._every = sorted(set(self._heads.tolist()))
        self.busy: dict[int, list[_Product]] = {}
        self.loose: dict[int, dict[str, int]] = {}  # register: PTX line that wrote it since the last fence
        self.bare: dict[int, dict[str, int]] = {}  # the same with no fence since the last commit
        self.fences: set[int] = set()  # warpgroups with a fence since their last commit
        self.fenced: set[int] = set()  # those with one at all
        self.groups: dict[int, int] = {}  # committed

    @classmethod
    def of(cls, m: Machine) -> Flight:
        """Those of a machine."""
        if "flight" not in m.units:
            m.units["flight"] = cls(m)
        found: Flight = m.units["flight"]
        return found

    def warpgroups(self, mask: Array | None) -> list[int]:
        """First lanes of the warpgroups with active lanes."""
        if mask is None:
            return self._every
        if mask is not self._last[0]:
            found = sorted(set(self._heads[mask.reshape(-1, 32).any(1)].tolist()))
            if not self.m.masks.known(mask):  # one that may change
                return found
            self._last = mask, found
        return self._last[1]

    def start(self, mask: Array | None, accumulators: frozenset[str], left: frozenset[str], line: int) -> None:
        """A product begins."""
        for first in self.warpgroups(mask):
            if first not in self.fenced:
                self.m.fault(line, first, "the first wgmma of its warpgroup, without wgmma.fence before it")
            product = _Product(self.groups.get(first, 0), accumulators, left, line)
            self.busy.setdefault(first, []).append(product)
            for state in (self.loose.get(first, {}), self.bare.get(first, {})):
                for name in accumulators & state.keys():
                    del state[name]

    def commit(self, mask: Array | None) -> None:
        """wgmma.commit_group."""
        for first in self.warpgroups(mask):
            self.groups[first] = self.groups.get(first, 0) + 1
            self.fences.discard(first)

    def wait(self, mask: Array | None, count: int) -> None:
        """wgmma.wait_group: all but the last `count` groups are done."""
        for first in self.warpgroups(mask):
            done = self.groups.get(first, 0) - count
            self.busy[first] = [product for product in self.busy.get(first, ()) if product.group >= done]

    def fence(self, mask: Array | None) -> None:
        """wgmma.fence."""
        for first in self.warpgroups(mask):
            self.loose.pop(first, None)
            self.bare.pop(first, None)
            self.fences.add(first)
            self.fenced.add(first)

    def check(self, mask: Array | None, watch: Watch, line: int) -> None:
        """Error where an instruction that is about to run is too early; else note what it does."""
        for first in self.warpgroups(mask):
            loose, bare = self.loose.setdefault(first, {}), self.bare.setdefault(first, {})
            for product in self.busy.get(first, ()):
                if found := watch.reads & product.writing:
                    self._fault(mask, first, line, f"reads register {min(found)}", "writes", product)
                if found := watch.writes & product.writing:
                    self._fault(mask, first, line, f"overwrites register {min(found)}", "writes", product)
                if found := watch.writes & product.reading:
                    self._fault(mask, first, line, f"overwrites register {min(found)}", "reads", product)
                if watch.alias is not None:
                    target, source = watch.alias
                    carried = {target} if source in product.writing else set()
                    if carried or target in product.writing:
                        product.writing = product.writing - {target} | carried
            for names, held in ((watch.fenced, loose), (watch.begun, bare)):
                for name in sorted(names & held.keys()):
                    since = f"which PTX line {held[name]} has written, without wgmma.fence between"
                    self.m.fault(line, first, f"wgmma of register {name}, {since}")
            self._note(first, dict.fromkeys(watch.written, line))
            if watch.alias is not None:
                _copy(loose, *watch.alias)
                _copy(bare, *watch.alias)

    def check_all(self, mask: Array | None, several: _Several) -> None:
        """The same for several."""
        for first in self.warpgroups(mask):
            for product in self.busy.get(first, ()):
                touched = several.reads | several.writes
                if not (touched.isdisjoint(product.writing) and several.writes.isdisjoint(product.reading)):
                    for watch, line in several.each:
                        self.check(mask, watch, line)
            self._note(first, several.written)

    def _note(self, first: int, written: dict[str, int]) -> None:
        self.loose.setdefault(first, {}).update(written)
        if first not in self.fences:
            self.bare.setdefault(first, {}).update(written)

    def _fault(self, mask: Array | None, first: int, line: int, what: str, how: str, product: _Product) -> None:
        lanes = self.m.active(mask)
        lane = int(lanes[(lanes >= first) & (lanes < first + WARPGROUP)][0])
        text = f"{what}, which the wgmma at PTX line {product.line} still {how}; it needs wgmma.wait_group before"
        self.m.fault(line, lane, text)


def _copy(state: dict[str, Any], target: str, source: str) -> None:
    if source in state:
        state[target] = state[source]
    else:
        state.pop(target, None)


def _now(call: str) -> Callable[..., None]:
    def run(m: Machine, mask: Array | None, *arguments: Any) -> None:
        getattr(Flight.of(m), call)(mask, *arguments)

    return run


START, COMMIT, WAIT, FENCE, CHECK, CHECK_ALL = (
    _now(call) for call in ("start", "commit", "wait", "fence", "check", "check_all")
)


def emit_check(t: Translator, watch: Watch) -> None:
    """What an instruction that may be at fault does before it runs."""
    if watch.simple:
        emit_checks(t, [(watch, t.line)])
    else:
        t.emit(f"{t.const(CHECK)}(m, {t.mask}, {t.const(watch)}, {t.line})")


def emit_checks(t: Translator, each: list[tuple[Watch, int]]) -> None:
    """What simple watches at PTX lines check and note before their instructions run."""
    reads = frozenset[str]().union(*(watch.reads for watch, _ in each))
    writes = frozenset[str]().union(*(watch.writes for watch, _ in each))
    several = _Several(reads, writes, {name: line for watch, line in each for name in watch.written}, each)
    if reads or writes or several.written:
        t.emit(f"{t.const(CHECK_ALL)}(m, {t.mask}, {t.const(several)})")
