"""PTX instructions to Python source: one function for each basic block, in two forms.

The *full* form runs when every lane of the machine is at the block and works on whole register arrays; the *masked*
form takes the mask `M` of active lanes and leaves the others as they are.

A semantic module exports `HANDLERS`, a dict from the first part or two of an opcode to `handler(t, ins)`, called at
translation time and emits Python with

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
from typing import Any

import numpy as np

from jitmx.errors import SimulationError
from jitmx.sim.flight import Watch, emit_check, watches
from jitmx.sim.flow import Access, doubtful
from jitmx.sim.program import EXIT, SET, Block, Program
from jitmx.sim.ptx import (
    SIZES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Sink,
    Symbol,
    is_barrier,
)
from jitmx.sim.specials import FLAGS, WIDE

Handler = Callable[["Translator", Instruction], None]

# How registers of a PTX type are stored.
_STORAGE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}
_ENDS = ("bra", "ret", "exit", "trap")


class Translator:
    """Emits the Python of one program. `handlers` and `collectives` come from jitmx.sim.instructions."""

    def __init__(
        self,
        module: Module,
        entry: Function,
        handlers: dict[str, Handler],
        members: Callable[[Instruction], tuple[Operand, int] | None],
    ) -> None:
        self.entry = self.function = entry
        self.handlers, self.members = handlers, members
        self.program = Program(module, entry, [])
        self.full = True
        self.ins = Instruction(("",), (), None, 0)
        self._lines: list[str] = []
        self._indent = 1
        self._names: dict[str, str] = {}
        self._constants: dict[Any, str] = {}
        self._predicated = False
        self._labels: dict[str, int] = {}
        self.accesses: dict[int, list[Access]] = {}  # of each block, one for each instruction
        self._access = Access(set(), set(), False)
        self.watches: dict[int, Watch] = {}
        self._quiet = False  # whether reads need no check that the register was set
        self.next = 0

    # What handlers use
    @property
    def line(self) -> int:
        """The PTX line of the instruction."""
        return self.ins.line

    @property
    def mask(self) -> str:
        """The active lanes, or "None" where all are."""
        return "P" if self._predicated else "None" if self.full else "M"

    def emit(self, line: str) -> None:
        """Add a line of Python."""
        self._lines.append("    " * self._indent + line)

    def error(self, text: str) -> SimulationError:
        """An error that names kernel, line and instruction."""
        return SimulationError(f"{self.entry.name}, PTX line {self.line}: {self.ins.name}: {text}")

    def const(self, value: object, hint: str = "k") -> str:
        """A name for `value` in the generated code."""
        key = ("object", id(value))
        if key not in self._constants:
            name = f"{hint}{len(self.program.objects)}"
            self._constants[key] = name
            self.program.objects[name] = value
        return self._constants[key]

    def scalar(self, value: int | float, dtype: str) -> str:
        """A name for a number, as an array of no dimensions."""
        key = (dtype, value, np.signbit(value))
        if key not in self._constants:
            array = np.array(value).astype(dtype) if dtype[0] == "f" else _integer(int(value), dtype)
            self._constants[key] = self.const(array, "c")
        return self._constants[key]

    def bits(self, value: int, dtype: str) -> str:
        """A name for the number of `dtype` with these bits."""
        if dtype == "b1":
            return self.scalar(int(bool(value)), "b1")
        if dtype[0] == "f":
            array = np.array(value % (1 << 8 * int(dtype[1])), f"u{dtype[1]}").view(dtype)
            key = ("bits", dtype, value)
            if key not in self._constants:
                self._constants[key] = self.const(array, "c")
            return self._constants[key]
        return self.scalar(value, dtype)

    def read(self, operand: Operand, dtype: str) -> str:
        """Expression of `operand` as an array of `dtype` over all lanes, or of no dimensions where all agree."""
        if isinstance(operand, Immediate):
            if operand.kind == "int" and dtype[0] == "f":
                return self.scalar(float(operand.value), dtype) if dtype != "f2" else self.bits(operand.value, dtype)
            value = operand.value
            if operand.kind == "f64" and dtype == "f4":
                value = int(np.array(value, "u8").view("f8").astype("f4").view("u4"))
            return self.bits(value, dtype)
        if isinstance(operand, Symbol):
            return f"m.symbol({operand.name!r}, {operand.offset}, {dtype!r})"
        if isinstance(operand, Register):
            expression = self._register(operand.name, dtype)
            return f"~{expression}" if operand.negated else expression
        raise self.error(f"{operand} cannot be read")

    def write(self, operand: Operand, expression: str, dtype: str) -> None:
        """Assign `expression`, an array of `dtype`, to a register where the instruction is active."""
        if isinstance(operand, Sink):
            self.emit(expression)
            return
        target = self.target(operand, dtype)
        if self.mask == "None":
            self.emit(f"copyto({target}, {expression}, 'unsafe')")
        else:
            self.emit(f"copyto({target}, {expression}, 'unsafe', {self.mask})")

    def ufunc(self, operand: Operand, dtype: str, function: str, *arguments: str) -> None:
        """Assign `function(*arguments)`, where `function` is a NumPy function whose result has `dtype`."""
        listed = ", ".join(arguments)
        if self.mask == "None" and isinstance(operand, Register) and self._same_width(operand.name, dtype):
            self.emit(f"{function}({listed}, out={self.target(operand, dtype)})")
        else:
            self.write(operand, f"{function}({listed})", dtype)

    def scatter(self, operand: Operand, expression: str, dtype: str) -> None:
        """Assign values of the active lanes only, in order, to a register."""
        if not isinstance(operand, Sink):
            target = self.target(operand, dtype)
            if self.mask == "None":
                self.emit(f"copyto({target}, {expression}, 'unsafe')")
            else:
                self.emit(f"{target}[{self.mask}] = {expression}")

    def address(self, operand: Operand) -> tuple[str, int]:
        """Expression of the uint64 address before its offset, and the offset."""
        if not isinstance(operand, Address):
            raise self.error(f"{operand} is no address")
        base = operand.base
        if isinstance(base, Register):
            wide = self.width(base.name) == 8
            return self.read(base, "u8") if wide else f"{self.read(base, 'u4')}.astype('u8')", operand.offset
        if isinstance(base, Immediate):
            return self.scalar(base.value, "u8"), operand.offset
        return f"m.symbol({base.name!r}, {base.offset}, 'u8')", operand.offset

    def width(self, name: str) -> int:
        """Bytes of a register."""
        if name.startswith("%") and name not in self.entry.registers:
            return 8 if name in WIDE else 4
        return SIZES[self.entry.registers[name]]

    # Registers
    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{len(self._names)}"
        return self._names[name]

    def _same_width(self, name: str, dtype: str) -> bool:
        kind = self.entry.registers.get(name, "")
        return (kind == "pred") == (dtype == "b1") and self.width(name) == int(dtype[1])

    def _register(self, name: str, dtype: str) -> str:
        kind, key = self.entry.registers.get(name), name
        if kind is None:
            if not name.startswith("%"):
                raise self.error(f"register {name} is not declared")
            self.program.specials.add(name)
            stored = "b1" if name in FLAGS else "u8" if name in WIDE else "u4"
        else:
            stored = "b1" if kind == "pred" else _STORAGE[SIZES[kind]]
        self.program.registers[key] = stored
        if kind is not None and not self._quiet:
            self._access.reads.add(name)
        if name in self.program.tracked and not self._quiet:
            self.emit(f"m.need({self._flags(name)}, {self.mask}, {self.line}, {name!r})")
        if stored == "b1" or dtype == "b1":
            if stored != dtype:
                raise self.error(f"register {name} of type .{kind} cannot be used as {dtype}")
            return self._view(key, "b1")
        have, want = int(stored[1]), int(dtype[1])
        if have < want:
            raise self.error(f"register {name} of type .{kind} is narrower than {8 * want} bits")
        if have > want:
            narrow = f"{self._view(key, stored)}.astype('u{want}')"
            return narrow if dtype[0] == "u" else f"{narrow}.view('{dtype}')"
        return self._view(key, dtype)

    def _view(self, key: str, dtype: str) -> str:
        name = self._name(key) + "_" + dtype
        self.program.views[name] = key, dtype
        return name

    def _flags(self, name: str) -> str:
        """The flags that tell which lanes have set a register."""
        self.program.registers[name + SET] = "b1"
        return self._view(name + SET, "b1")

    def _note_writes(self) -> None:
        """Mark registers as set, where it matters."""
        source = self._access.copy
        for name in sorted(self._access.writes & self.program.tracked):
            if source is not None and source in self.program.tracked:
                where = "True" if self.mask == "None" else self.mask
                self.emit(f"copyto({self._flags(name)}, {self._flags(source)}, 'unsafe', {where})")
            elif self.mask == "None":
                self.emit(f"{self._flags(name)}.fill(True)")
            else:
                self.emit(f"bitwise_or({self._flags(name)}, {self.mask}, {self._flags(name)})")

    def target(self, operand: Operand, dtype: str) -> str:
        """The array of a register that the generated code itself will write, in place."""
        if not isinstance(operand, Register) or operand.name not in self.entry.registers:
            raise self.error(f"{operand} cannot be written")
        self._access.writes.add(operand.name)
        kind = self.entry.registers[operand.name]
        key = operand.name
        stored = "b1" if kind == "pred" else _STORAGE[SIZES[kind]]
        self.program.registers[key] = stored
        if (stored == "b1") != (dtype == "b1"):
            raise self.error(f"register {operand.name} of type .{kind} cannot take a result of {dtype}")
        if stored == "b1":
            return self._view(key, "b1")
        if int(stored[1]) > int(dtype[1]):
            return self._view(key, ("i" if dtype[0] == "i" else "u") + stored[1])
        return self._view(key, dtype if stored[1] == dtype[1] else stored)

    # Blocks
    def translate(self) -> Program:
        """Translate the kernel."""
        self._split()
        blocks = self.program.blocks
        self.full = False
        for block in blocks:
            block.masked = self._block(block)
        successors = self._successors()
        self.program.tracked = doubtful(self.accesses, blocks, successors)
        self.watches = watches(self.entry.body, blocks, self.accesses, successors)
        for block in blocks if self.program.tracked or self.watches else ():
            block.masked = self._block(block)
        self.full = True
        for block in blocks:
            block.full = self._block(block)
        return self.program

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
        self.next = block.index + 1 if block.last < len(self.entry.body) else EXIT
        self.accesses[block.index] = []
        for i in range(block.first, block.last):
            ins = self.ins = self.entry.body[i]
            self._access = Access(set(), set(), ins.predicate is not None)
            if i == block.first and (found := self.members(ins)) is not None:
                self._quiet = True
                block.members, block.width = self.read(found[0], "u4"), found[1]
                self._quiet = False
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


def _integer(value: int, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "b1":
        return np.array(bool(value))
    size = int(dtype[1])
    return np.array(value % (1 << 8 * size), f"u{size}").view(dtype)
