"""PTX instructions to Python source: one function for each basic block, in three forms.

A block starts at each label and behind each branch or barrier, and at each warp-wide instruction, where lanes may
have to wait for others of their warp. The *masked* form takes the mask `M` of active lanes and leaves the others as
they are. Where all lanes of each warp come together, nobody waits: the *whole* form, which takes a mask as well, runs
the blocks up to the next label, branch or barrier. So does the *full* form, which runs when every lane of the machine
is at the block and works on whole register arrays. Instructions are emitted in the order of jitmx.sim.schedule.

A form is made when it first runs. A semantic module exports `HANDLERS`, a dict from the first part or two of an opcode
to `handler(t, ins)`, which is called at translation time and emits Python with

    t.emit(line)                     one line of Python
    t.read(operand, dtype)           expression of an array over all lanes ("u1 u2 u4 u8 i1 … i8 f2 f4 f8 b1")
    t.write(operand, expression, dtype)   assigns to a register where the instruction is active
    t.scatter(operand, expression, dtype)  the same from an array that holds the active lanes only
    t.ufunc(operand, dtype, "add", *arguments)   the same for a NumPy function that takes `out`
    t.together(emit, *operands)      have `emit` do it, maybe for several instructions at once
    t.const(object)                  a name for any Python object (function, table) in the generated code
    t.mask                           expression of the active lanes, or "None" where all are
    t.address(operand)               (expression of the uint64 addresses of all lanes, or of one for all; byte offset)
    t.line, t.full, t.error(text)    the PTX line; which form; a SimulationError that names the instruction

`m` in generated code is the Machine. Lanes that are not active hold garbage. Arrays that `t.read` names are registers,
so a handler must not write into them. `array.reshape(-1, 32)` has lane l of warp w at [w, l].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from jitmx.sim.emitter import Emitter
from jitmx.sim.flight import Watch, emit_check, emit_checks, watches
from jitmx.sim.flow import Access, doubtful, fillers, temporaries
from jitmx.sim.hints import check_policy
from jitmx.sim.order import counts, looks, signals
from jitmx.sim.program import EXIT, Block, Program
from jitmx.sim.ptx import SIZES, Function, Immediate, Instruction, Module, Operand, Register, Symbol, is_barrier
from jitmx.sim.schedule import batches

Handler = Callable[["Translator", Instruction], None]

_ENDS = ("bra", "ret", "exit", "trap")
_SHORT = 6  # blocks of a loop that polls, at most


def _repeats(block: int, successors: list[set[int]]) -> bool:
    """Whether a block may follow itself after few others."""
    seen = successors[block]
    for _ in range(_SHORT):
        seen = seen.union(*(successors[other] for other in seen))
    return block in seen


class Translator(Emitter):
    """Emits the Python of one program. `handlers` and `collectives` come from jitmx.sim.instructions."""

    def __init__(
        self,
        module: Module,
        entry: Function,
        handlers: dict[str, Handler],
        members: Callable[[Instruction], tuple[Operand, int] | None],
    ) -> None:
        super().__init__(module, entry)
        self.handlers, self.members = handlers, members
        self._labels: dict[str, int] = {}
        self.accesses: dict[int, list[Access]] = {}  # of each block, one for each instruction
        self.watches: dict[int, Watch] = {}
        # Registers local to each block and, by its first block, to each run.
        self._of_blocks: dict[int, set[str]] = {}
        self._of_runs: dict[int, set[str]] = {}

    # Blocks
    def translate(self) -> Program:
        """Analyse the kernel; the program asks for the forms of its blocks when they first run."""
        self._split()
        blocks = self.program.blocks
        self.full = False
        for block in blocks:
            self._analyse(block)
        successors = self._successors()
        self.program.fillers = fillers(self.accesses)
        self.program.tracked = doubtful(self.accesses, blocks, successors)
        self.watches = watches(self.entry.body, blocks, self.accesses, successors)
        self._of_blocks = temporaries(self.accesses, successors, self.program.tracked)
        heads = [block for block in blocks if block.until]
        number = {block.index: i for i, block in enumerate(heads)}
        joined = {i: self._accesses(block.index, block.until) for i, block in enumerate(heads)}
        following = [{number[follower] for follower in successors[block.until - 1]} for block in heads]
        found = temporaries(joined, following, self.program.tracked)
        self._of_runs = {block.index: found[i] for i, block in enumerate(heads)}
        self._constants_of = self._settled()
        self.program.views.clear()
        self.program.registers.clear()
        self._names.clear()
        self._view_of.clear()
        for block in blocks:
            self._members(block)
        self.program.polled = frozenset(
            ins.line
            for block in blocks
            if _repeats(block.index, successors)
            for ins in self.entry.body[block.first : block.last]
            if looks(ins.opcode)
        )
        for block in blocks:
            block.signals = any(signals(ins.opcode) for ins in self.entry.body[block.first : block.last])
        for block in heads:
            block.breadth = max(b.width for b in blocks[block.index : block.until])
            block.signals = any(b.signals for b in blocks[block.index : block.until])
        self.program.emit = self._emit
        return self.program

    def _accesses(self, first: int, until: int) -> list[Access]:
        return [access for index in range(first, until) for access in self.accesses[index]]

    def _settled(self) -> dict[str, Immediate]:
        """Registers that hold one number wherever they are read: set in one place, by a move of it."""
        movers: dict[str, list[Instruction]] = {}
        for block in self.program.blocks:
            body = self.entry.body[block.first : block.last]
            for ins, access in zip(body, self.accesses[block.index], strict=True):
                for name in access.writes - self.program.tracked:
                    movers.setdefault(name, []).append(ins)
        out = {}
        for name, (ins, *more) in movers.items():
            if more or ins.opcode[0] != "mov" or ins.predicate is not None or len(ins.opcode) != 2:
                continue
            source, kind = ins.operands[1], ins.opcode[1]
            if isinstance(source, Immediate) and kind != "pred" and source.kind == (kind if kind[0] == "f" else "int"):
                out[name] = Immediate(source.value % (1 << 8 * SIZES[kind]))
        return out

    def _emit(self, index: int, form: str) -> str:
        """One form of a block."""
        first, self.full = self.program.blocks[index], form == "full"
        until = index + 1 if form == "masked" else first.until or index + 1
        last, accesses = self.program.blocks[until - 1], self._accesses(index, until)
        self._local = self._of_blocks[index] if until == index + 1 else self._of_runs[index]
        self._written = {name for access in accesses for name in access.writes} - self._local
        self._begin(last)
        body = self.entry.body[first.first : last.last]
        watched = {
            i: "load" if watch.simple else "all"
            for i in range(len(body))
            if (watch := self.watches.get(first.first + i)) is not None
        }
        ended = False
        for chosen in batches(body, accesses, watched):
            self._batching = len(chosen) > 1
            watches = [self.watches.get(first.first + i) for i in chosen]
            if self._batching and any(watches):
                lines = [body[i].line for i in chosen]
                emit_checks(self, [(watch, line) for watch, line in zip(watches, lines, strict=True) if watch])
                watches = [None] * len(chosen)
            for i, watch in zip(chosen, watches, strict=True):
                ended = self._instruction(body[i], watch) or ended
            self._flush()
        self._batching = False
        if not ended:
            self.emit(f"return {self.next}")
        return f"def {form}(m, M, n):\n" + "\n".join(self._lines) + "\n"

    def _members(self, block: Block) -> None:
        """What lanes a warp-wide instruction at the head of a block waits for."""
        found = self.members(self.entry.body[block.first])
        if found is not None:
            self._quiet = True
            block.members, block.width = self.read(found[0], "u4"), found[1]
            self._quiet = False

    def _successors(self) -> list[set[int]]:
        """Blocks that may follow each block."""
        out = []
        for block in self.program.blocks:
            last = self.entry.body[block.last - 1]
            follow = set()
            if last.opcode[0] == "bra":
                follow.add(self._target_of(last))
            if last.opcode[0] not in _ENDS or last.predicate is not None:
                follow.add(block.index + 1 if block.last < len(self.entry.body) else EXIT)
            out.append(follow - {EXIT})
        return out

    def _target_of(self, ins: Instruction) -> int:
        label = ins.operands[0] if ins.operands else None
        if not isinstance(label, Symbol) or label.name not in self._labels:
            raise self.error(f"label {label} is not known")
        return self._labels[label.name]

    def _split(self) -> None:
        body = self.entry.body
        leaders = {0, len(body), *self.entry.labels.values()}
        for i, ins in enumerate(body):
            if ins.opcode[0] in _ENDS or is_barrier(ins) or counts(ins.opcode):
                leaders.add(i + 1)
            if counts(ins.opcode):
                leaders.add(i)
        starts = sorted(leaders | {i for i, ins in enumerate(body) if self.members(ins) is not None})
        position = {}
        blocks = self.program.blocks
        for index, (first, last) in enumerate(itertools.pairwise(starts)):
            position[first] = index
            lines = tuple(ins.line for ins in body[first:last])
            blocks.append(Block(index, first, last, lines, head=body[first].name, counts=counts(body[last - 1].opcode)))
        position[len(body)] = len(blocks)
        for first, last in itertools.pairwise(sorted(leaders)):
            blocks[position[first]].until = position[last]
        del position[len(body)]
        self._labels = {label: position.get(at, EXIT) for label, at in self.entry.labels.items()}

    def _begin(self, last: Block) -> None:
        """What follows is emitted for a function whose last block is `last`."""
        self._lines = []
        self._types.clear()
        self.next = last.index + 1 if last.last < len(self.entry.body) else EXIT

    def _analyse(self, block: Block) -> None:
        """Find what the instructions of a block do with registers."""
        self._begin(block)
        listed = self.accesses[block.index] = []
        for i in range(block.first, block.last):
            self._instruction(self.entry.body[i], None, block if i == block.first else None)
            listed.append(self._access)

    def _instruction(self, ins: Instruction, watch: Watch | None, block: Block | None = None) -> bool:
        """Emit one instruction; True where it ends its block. `block`: that of which it is the head, when analysed."""
        self.ins = ins
        self._access = Access(set(), set(), ins.predicate is not None)
        if block is not None:
            self._members(block)
        self._access.picks = ins.opcode[0] == "prmt"
        plain = ins.opcode[0] == "mov" and isinstance(ins.operands[0], Register)  # one that unpacks a register is not
        source = ins.operands[1] if plain else None
        if isinstance(source, Register) and source.name in self.entry.registers:
            self._access.copy = source.name
        self._quiet = self._access.copy is not None or ins.opcode[0] == "wgmma"
        self.emit(f"# {ins.line}: {ins.name}")
        self._predicated = False
        if ins.predicate is not None:
            own = self.read(ins.predicate, "b1")
            self.emit(f"P = {own}" if self.full else f"P = M & {own}")
        if ins.opcode[0] in _ENDS:
            return self._control(ins)
        handler = self.handlers.get(".".join(ins.opcode[:2])) or self.handlers.get(ins.opcode[0])
        if handler is None:
            raise self.error("the simulator does not know this instruction")
        if ins.predicate is not None:
            self._predicated = True
            self.emit("if P.any():")
            self._indent += 1
        before, waiting = len(self._lines), len(self._batch)
        if watch is not None:
            emit_check(self, watch)
        if "L2::cache_hint" in ins.opcode:
            check_policy(self, ins)
        handler(self, ins)
        if len(self._batch) == waiting:
            self._note_writes()
        if ins.predicate is not None:
            if len(self._lines) == before:
                self.emit("pass")
            self._indent -= 1
            self._predicated = False
        return is_barrier(ins)

    def _control(self, ins: Instruction) -> bool:
        name = ins.opcode[0]
        if name == "bra":
            target = self._target_of(ins)
        elif name in ("ret", "exit"):
            target = EXIT
        else:
            if ins.predicate is not None:
                self.emit(f"if P.any(): m.trap(P, {ins.line})")
                self.emit(f"return {self.next}")
            else:
                self.emit(f"m.trap({self.mask}, {ins.line})")
            return True
        if ins.predicate is None:
            self.emit(f"return {target}")
            return True
        self.emit("k = count(P)")
        self.emit(f"if k == n: return {target}")
        self.emit(f"if k == 0: return {self.next}")
        self.emit(f"return P, k, {target}, {self.next}")
        return True
