"""What handlers of instructions use to emit Python: constants, and registers that are read and written.

A register is an array over all lanes that lives as long as the machine, or, where no other block needs its value, a
local variable of the function that its block becomes: what is computed there needs no merging with inactive lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.flow import Access
from jitmx.sim.lanes import among, side_by_side, whole
from jitmx.sim.program import SET, Program
from jitmx.sim.ptx import SIZES, Address, Function, Immediate, Instruction, Module, Operand, Register, Sink, Symbol
from jitmx.sim.specials import FLAGS, WIDE

Array = npt.NDArray[Any]

# How registers of a PTX type are stored.
_STORAGE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


class Emitter:
    """Emits the instructions of one program."""

    def __init__(self, module: Module, entry: Function) -> None:
        self.entry = self.function = entry
        self.program = Program(module, entry, [])
        self.full = True
        self.ins = Instruction(("",), (), None, 0)
        self.next = 0
        self._lines: list[str] = []
        self._indent = 1
        self._names: dict[str, str] = {}
        self._view_of: dict[str, str] = {}  # arrays over all lanes by name: which register they are, "" if local
        self._constants: dict[Any, str] = {}
        self._predicated = False
        self._access = Access(set(), set(), False)
        self._quiet = False  # whether reads need no check that the register was set
        self._local: set[str] = set()  # registers that are local to the block at hand
        self._written: set[str] = set()  # those that it writes
        self._types: dict[str, str] = {}  # of local registers, as they were written last
        self._constants_of: dict[str, Immediate] = {}  # registers that hold a number wherever they are read
        self._batching = False
        self._batch: list[tuple[Instruction, Access, Callable[..., None], tuple[Any, ...]]] = []

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
            known = self._constants_of.get(operand.name)
            if known is not None and int(dtype[1]) <= self.width(operand.name):
                return self.bits(known.value, dtype)
            expression = self._register(operand.name, dtype)
            return f"~{expression}" if operand.negated else expression
        raise self.error(f"{operand} cannot be read")

    def word(self, operand: Operand, kind: str, dtype: str) -> str:
        """Expression of the bits of `operand`, of a PTX type, as an unsigned array."""
        if isinstance(operand, Immediate) and kind in ("f32", "f64"):
            return f"{self.read(operand, 'f' + dtype[1])}.view({dtype!r})"
        return self.read(operand, dtype)

    def write(self, operand: Operand, expression: str, dtype: str) -> None:
        """Assign `expression`, an array of `dtype`, to a register where the instruction is active."""
        if isinstance(operand, Sink):
            self.emit(expression)
            return
        if isinstance(operand, Register) and operand.name in self._local:
            self._assign(operand.name, expression, dtype)
            return
        target = self._target(operand, dtype)
        if self.mask == "None":
            self.emit(f"copyto({target}, {expression}, 'unsafe')")
        else:
            self.emit(f"copyto({target}, {expression}, 'unsafe', {self.mask})")

    def _assign(self, name: str, expression: str, dtype: str) -> None:
        """Bind a local register to an array over all lanes that nothing else writes to."""
        width = self._stored(name)[1]
        if dtype != "b1" and dtype[1] != width:
            dtype = ("i" if dtype[0] == "i" else "u") + width
            expression = f"({expression}).astype('{dtype}')"
        elif self._view_of.get(expression) in self._written:
            expression += ".copy()"
        self._access.writes.add(name)
        variable, known = self._variable(name), self.const(np.dtype(dtype), "t")
        self.emit(f"{variable} = {expression}")
        self.emit(
            f"if {variable}.dtype is not {known} or not {variable}.ndim: "
            f"{variable} = {self.const(whole)}(m, {variable}, {known})"
        )
        self._types[name] = dtype

    def ufunc(self, operand: Operand, dtype: str, function: str, *arguments: str) -> None:
        """Assign `function(*arguments)`, where `function` is a NumPy function whose result has `dtype`."""
        listed = ", ".join(arguments)
        if isinstance(operand, Register) and operand.name in self._local:
            if self._same_width(operand.name, dtype) and any(item in self._view_of for item in arguments):
                # The result is an array of its type, with nothing to be checked.
                self._access.writes.add(operand.name)
                self.emit(f"{self._variable(operand.name)} = {function}({listed})")
                self._types[operand.name] = dtype
            else:
                self._assign(operand.name, f"{function}({listed})", dtype)
        elif self.mask == "None" and isinstance(operand, Register) and self._same_width(operand.name, dtype):
            self.emit(f"{function}({listed}, out={self._target(operand, dtype)})")
        else:
            self.write(operand, f"{function}({listed})", dtype)

    def together(self, emit: Callable[..., None], *operands: Any) -> None:
        """Have `emit(self, batch)` emit the instruction, with others of one opcode where it is in a batch of several.

        `batch` lists the operands of each; `self.resume(i)` turns to the instruction whose results are written next.
        """
        self._batch.append((self.ins, self._access, emit, operands))
        if not self._batching:
            self._flush()

    def _flush(self) -> None:
        """Emit the batch."""
        if self._batch:
            self._batch[0][2](self, [operands for *_, operands in self._batch])
            for i in range(len(self._batch)) if self._batching else ():
                self.resume(i)
                self._note_writes()
            self._batch.clear()

    def resume(self, i: int) -> None:
        """Turn to an instruction of the batch."""
        self.ins, self._access = self._batch[i][:2]

    def constant(self, operand: Operand) -> Operand:
        """The number that a register holds wherever it is read; any other operand as it is."""
        return self._constants_of.get(operand.name, operand) if isinstance(operand, Register) else operand

    def call(self, operand: Operand, dtype: str, function: object, *arguments: str) -> None:
        """Assign what a costly function of arrays makes of those of the active lanes; the same one for an opcode."""
        self.together(_emit_calls, operand, dtype, function, arguments)

    def call_one(self, operand: Operand, dtype: str, function: object, *arguments: str) -> None:
        """The same, for a function of this very instruction."""
        name, listed = self.const(function), ", ".join(arguments)
        if self.mask == "None":
            # It may give back an argument, and a local register must not be what the block writes to later.
            kept = any(self._view_of.get(item) in self._written for item in arguments)
            self.write(operand, f"{name}({listed})" + (".copy()" if kept else ""), dtype)
        else:
            self.write(operand, f"{self.const(among)}({self.mask}, {name}, {listed})", dtype)

    def scatter(self, operand: Operand, expression: str, dtype: str, where: str = "") -> None:
        """Assign values of the active lanes only, in order, to a register; `where`: an expression of their numbers."""
        if isinstance(operand, Sink):
            return
        if self.mask == "None":
            self.write(operand, expression, dtype)
        elif isinstance(operand, Register) and operand.name in self._local:
            stored = dtype[0].replace("f", "u") + self._stored(operand.name)[1]
            self._access.writes.add(operand.name)
            self.emit(f"{self._variable(operand.name)} = {self.const(np.empty)}(m.lanes, '{stored}')")
            self.emit(f"{self._variable(operand.name)}[{where or self.mask}] = {expression}")
            self._types[operand.name] = stored
        else:
            self.emit(f"{self._target(operand, dtype)}[{where or self.mask}] = {expression}")

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

    def _stored(self, name: str) -> str:
        kind = self.entry.registers[name]
        return "b1" if kind == "pred" else _STORAGE[SIZES[kind]]

    def _register(self, name: str, dtype: str) -> str:
        kind = self.entry.registers.get(name)
        if kind is None:
            if not name.startswith("%"):
                raise self.error(f"register {name} is not declared")
            self.program.specials.add(name)
            stored = "b1" if name in FLAGS else "u8" if name in WIDE else "u4"
        else:
            stored = self._stored(name)
            self._access.used.add(name)
            if not self._quiet:
                self._access.reads.add(name)
        local = name in self._local
        if not local:
            self.program.registers[name] = stored
        if name in self.program.tracked and not self._quiet:
            self.emit(f"m.need({self._flags(name)}, {self.mask}, {self.line}, {name!r})")
        if stored == "b1" or dtype == "b1":
            if stored != dtype:
                raise self.error(f"register {name} of type .{kind} cannot be used as {dtype}")
            return self._as(name, "b1") if local else self._view(name, "b1")
        have, want = int(stored[1]), int(dtype[1])
        if have < want:
            raise self.error(f"register {name} of type .{kind} is narrower than {8 * want} bits")
        read = self._as if local else self._view
        if have > want:
            narrow = f"{read(name, stored)}.astype('u{want}')"
            return narrow if dtype[0] == "u" else f"{narrow}.view('{dtype}')"
        return read(name, dtype)

    def _variable(self, name: str) -> str:
        """The local variable of a register."""
        made = "l" + self._name(name)
        self._view_of.setdefault(made, "")
        return made

    def _as(self, name: str, dtype: str) -> str:
        """A local register as another type of its width."""
        if name not in self._types:
            raise self.error(f"register {name} is read before it is set")
        same = self._types[name] == dtype
        return self._variable(name) if same else f"{self._variable(name)}.view('{dtype}')"

    def _view(self, key: str, dtype: str) -> str:
        name = self._name(key) + "_" + dtype
        self.program.views[name] = key, dtype
        self._view_of[name] = key
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
        """The array of a register that the handler itself will have written, in place and maybe later."""
        if isinstance(operand, Register):
            self._access.held.add(operand.name)
        return self._target(operand, dtype)

    def _target(self, operand: Operand, dtype: str) -> str:
        """The array of a register that the generated code will write in place."""
        if not isinstance(operand, Register) or operand.name not in self.entry.registers:
            raise self.error(f"{operand} cannot be written")
        self._access.writes.add(operand.name)
        kind = self.entry.registers[operand.name]
        key, stored = operand.name, self._stored(operand.name)
        self.program.registers[key] = stored
        if (stored == "b1") != (dtype == "b1"):
            raise self.error(f"register {operand.name} of type .{kind} cannot take a result of {dtype}")
        if stored == "b1":
            return self._view(key, "b1")
        if int(stored[1]) > int(dtype[1]):
            return self._view(key, ("i" if dtype[0] == "i" else "u") + stored[1])
        return self._view(key, dtype if stored[1] == dtype[1] else stored)


def _emit_calls(t: Emitter, batch: list[tuple[Operand, str, object, tuple[str, ...]]]) -> None:
    """Assign what one function makes of the arguments of each instruction of a batch."""
    operand, dtype, function, arguments = batch[0]
    if len(batch) == 1:
        t.call_one(operand, dtype, function, *arguments)
        return
    columns = zip(*(arguments for *_, arguments in batch), strict=True)
    listed = ", ".join(column[0] if len(set(column)) == 1 else f"({', '.join(column)})" for column in columns)
    t.emit(f"v = {t.const(side_by_side)}(m, {t.mask}, {t.const(function)}, {len(batch)}, {listed})")
    for i, (operand, dtype, *_) in enumerate(batch):
        t.resume(i)
        t.write(operand, f"v[{i}]", dtype)


def _integer(value: int, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "b1":
        return np.array(bool(value))
    size = int(dtype[1])
    return np.array(value % (1 << 8 * size), f"u{size}").view(dtype)
