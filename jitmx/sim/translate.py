"""PTX instructions to Python source: one function for each basic block, in two forms.

The *full* form runs when every lane of the machine is at the block and works on whole register arrays; the *masked*
form takes the mask `M` of active lanes and leaves the others as they are.

A form is made when it first runs. A semantic module exports `HANDLERS`, a dict from the first part or two of an opcode
to `handler(t, ins)`, which is called at translation time and emits Python with

    t.emit(line)                     one line of Python
    t.read(operand, dtype)           expression of an array over all lanes ("u1 u2 u4 u8 i1 … i8 f2 f4 f8 b1")
    t.write(operand, expression, dtype)   assigns to a register where the instruction is active
    t.scatter(operand, expression, dtype)  the same from an array that holds the active lanes only
    t.ufunc(operand, dtype, "add", *arguments)   the same for a NumPy function that takes `out`
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
from jitmx.sim.flight import Watch, emit_check, watches
from jitmx.sim.flow import Access, doubtful, fillers, temporaries
from jitmx.sim.program import EXIT, Block, Program
from jitmx.sim.ptx import Function, Instruction, Module, Operand, Register, Symbol, is_barrier

Handler = Callable[["Translator", Instruction], None]

_ENDS = ("bra", "ret", "exit", "trap")


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
        self._temporaries: dict[int, set[str]] = {}

    # Blocks
    def translate(self) -> Program:
        """Analyse the kernel; the program asks for the forms of its blocks when they first run."""
        self._split()
        blocks = self.program.blocks
        self.full = False
        for block in blocks:
            self._block(block)
        successors = self._successors()
        self.program.fillers = fillers(self.accesses)
        self.program.tracked = doubtful(self.accesses, blocks, successors)
        self.watches = watches(self.entry.body, blocks, self.accesses, successors)
        self._temporaries = temporaries(self.accesses, blocks, successors, self.program.tracked)
        for index in self._temporaries:
            blocks[index].written = {name for access in self.accesses[index] for name in access.writes}
        self.program.views.clear()
        self.program.registers.clear()
        self._names.clear()
        self._view_of.clear()
        for block in blocks:
            self._members(block)
        self.program.emit = self._emit
        return self.program

    def _emit(self, index: int, full: bool) -> str:
        """One form of a block."""
        block, self.full = self.program.blocks[index], full
        self._local = self._temporaries[index]
        self._written = block.written - self._local
        return self._block(block)

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
            if ins.opcode[0] in _ENDS or is_barrier(ins):
                leaders.add(i + 1)
            if self.members(ins) is not None:
                leaders.add(i)
        position = {}
        for index, (first, last) in enumerate(itertools.pairwise(sorted(leaders))):
            position[first] = index
            lines = tuple(ins.line for ins in body[first:last])
            self.program.blocks.append(Block(index, first, last, lines, head=body[first].name))
        self._labels = {label: position.get(at, EXIT) for label, at in self.entry.labels.items()}

    def _block(self, block: Block) -> str:
        self._lines, ended = [], False
        self._types.clear()
        self.next = block.index + 1 if block.last < len(self.entry.body) else EXIT
        self.accesses[block.index] = []
        for i in range(block.first, block.last):
            ins = self.ins = self.entry.body[i]
            self._access = Access(set(), set(), ins.predicate is not None)
            if i == block.first and not self.program.emit:
                self._members(block)
            self._access.picks = ins.opcode[0] == "prmt"
            source = ins.operands[1] if ins.opcode[0] == "mov" else None
            if isinstance(source, Register) and source.name in self.entry.registers:
                self._access.copy = source.name
            self._quiet = self._access.copy is not None or ins.opcode[0] == "wgmma"
            ended = self._instruction(ins, self.watches.get(i))
            self.accesses[block.index].append(self._access)
        if not ended:
            self.emit(f"return {self.next}")
        form = "full" if self.full else "masked"
        return f"def {form}(m, M, n):\n" + "\n".join(self._lines) + "\n"

    def _instruction(self, ins: Instruction, watch: Watch | None) -> bool:
        """Emit one instruction; True where it ends its block."""
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
        before = len(self._lines)
        if watch is not None:
            emit_check(self, watch)
        handler(self, ins)
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
