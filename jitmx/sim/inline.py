"""What a kernel calls and jumps to through tables, written out in place.

A call becomes the body of its function, with registers, labels and local variables of its own and a jump to its end for
each `ret`. Parameters in the .param space are local variables that both sides name. A jump through a table becomes a
comparison and a branch for each of its labels. So everything after knows one flat list of instructions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.ptx import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]
_DEEPEST = 32


def inline(module: Module, entry: Function) -> Function:
    """`entry` without calls and jump tables.

    Raises:
        SimulationError: a call through a register, of a function without a body, or of itself.
    """
    if not any(ins.opcode[0] in ("call", "brx") for ins in entry.body):
        return entry
    out = _Body(module, entry)
    out.add(entry, "", {}, None, ())
    return out.made


class _Body:
    def __init__(self, module: Module, entry: Function) -> None:
        self.module = module
        self.made = replace(entry, body=[], labels={}, registers={}, variables=[])
        self.sites = 0
        self.shared: set[str] = set()

    def error(self, ins: Instruction, text: str) -> SimulationError:
        return SimulationError(f"{self.made.name}, PTX line {ins.line}: {ins.name}: {text}")

    def add(
        self, function: Function, suffix: str, names: dict[str, str], end: str | None, callers: tuple[str, ...]
    ) -> None:
        """Append a function's body; `names` are those of its parameters on the caller's side."""
        local = {variable.name for variable in function.variables if variable.space in ("local", "param")}
        if callers:
            own = {name: name + suffix for name in (*function.registers, *function.labels, *local)}
            names = {**own, **names}
        formals = {item.name for item in (*function.parameters, *function.results)} if callers else set()
        for name, kind in function.registers.items():
            self.made.registers[names.get(name, name)] = kind
        for variable in function.variables:
            if variable.name in local:
                name = names.get(variable.name, variable.name)
                self.made.variables.append(replace(variable, name=name, space="local"))
            elif variable.name not in self.shared:
                self.shared.add(variable.name)
                self.made.variables.append(variable)
        at: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            at.setdefault(index, []).append(names.get(label, label))
        for index, ins in enumerate(function.body):
            self._label(at.get(index, []))
            if ins.opcode[0] == "call":
                self._call(function, ins, names, suffix, (*callers, function.name))
            elif ins.opcode[0] == "brx":
                self._jump(function, ins, names)
            else:
                self._plain(ins, names, local | formals, end)
        self._label(at.get(len(function.body), []))

    def _label(self, labels: list[str]) -> None:
        for label in labels:
            self.made.labels[label] = len(self.made.body)

    def _put(self, like: Instruction, opcode: str, *operands: Operand, predicate: Register | None = None) -> None:
        self.made.body.append(Instruction(tuple(opcode.split(".")), operands, predicate, like.line))

    def _plain(self, ins: Instruction, names: dict[str, str], local: set[str], end: str | None) -> None:
        predicate = _renamed(ins.predicate, names) if ins.predicate is not None else None
        assert predicate is None or isinstance(predicate, Register)
        if ins.opcode[0] == "ret" and end is not None:
            self._put(ins, "bra", Symbol(end), predicate=predicate)
            return
        opcode = ins.opcode
        bases = {item.base.name for item in ins.operands if isinstance(item, Address) and isinstance(item.base, Symbol)}
        if bases & local:
            opcode = tuple("local" if part.partition("::")[0] == "param" else part for part in opcode)
        operands = tuple(_renamed(item, names) for item in ins.operands)
        self.made.body.append(Instruction(opcode, operands, predicate, ins.line))

    def _guard(self, ins: Instruction, names: dict[str, str]) -> str | None:
        """Skip over what follows where the instruction's predicate does not hold; the label to put after it."""
        if ins.predicate is None:
            return None
        self.sites += 1
        after = f"after~{self.sites}"
        held = _renamed(ins.predicate, names)
        assert isinstance(held, Register)
        self._put(ins, "bra", Symbol(after), predicate=Register(held.name, not held.negated))
        return after

    def _call(
        self, caller: Function, ins: Instruction, names: dict[str, str], suffix: str, callers: tuple[str, ...]
    ) -> None:
        listed = list(ins.operands)
        results = listed.pop(0).items if isinstance(listed[0], Vector) else ()  # type: ignore[union-attr]
        target = listed.pop(0) if listed else None
        given = listed.pop(0).items if listed and isinstance(listed[0], Vector) else ()  # type: ignore[union-attr]
        function = self.module.functions.get(target.name) if isinstance(target, Symbol) else None
        if not isinstance(target, Symbol) or listed:
            raise self.error(ins, "a call through a register is not known")
        if function is None or not function.body:
            raise self.error(ins, f"function {target.name} has no body in this PTX")
        if function.name in callers or len(callers) > _DEEPEST:
            raise self.error(ins, f"recursion ({' → '.join((*callers, function.name))}) is not known")
        if len(given) != len(function.parameters) or len(results) != len(function.results):
            has = f"{len(function.parameters)} parameters and {len(function.results)} results"
            raise self.error(ins, f"{target.name} has {has}; the call gives {len(given)} and {len(results)}")
        after = self._guard(ins, names)
        self.sites += 1
        here = f"{suffix}@{self.sites}"
        inner: dict[str, str] = {}
        entering: list[tuple[str, Operand, Operand]] = []
        leaving: list[tuple[str, Operand, Operand]] = []
        for formals, actuals, moves in (
            (function.parameters, given, entering), (function.results, results, leaving),
        ):  # fmt: skip
            for formal, actual in zip(formals, actuals, strict=True):
                outer, kind = _renamed(actual, names), function.registers.get(formal.name)
                if kind is not None:
                    moves.append((kind, Register(formal.name + here), outer))
                elif isinstance(outer, Symbol):
                    inner[formal.name] = outer.name
                else:
                    raise self.error(ins, f"{actual} is no variable of the .param space")
        for kind, formal_register, outer in entering:
            self._put(ins, f"mov.{kind}", formal_register, outer)
        self.add(function, here, inner, f"end{here}", callers)
        self._label([f"end{here}"])
        for kind, formal_register, outer in leaving:
            self._put(ins, f"mov.{kind}", outer, formal_register)
        if after is not None:
            self._label([after])

    def _jump(self, function: Function, ins: Instruction, names: dict[str, str]) -> None:
        index, table = ins.operands[0], ins.operands[1]
        labels = function.tables.get(table.name) if isinstance(table, Symbol) else None
        if ins.opcode[1:2] != ("idx",) or labels is None:
            raise self.error(ins, f"{table} is no list of .branchtargets")
        after = self._guard(ins, names)
        self.made.registers.setdefault("%jump", "pred")
        flag, value = Register("%jump"), _renamed(index, names)
        for number, label in enumerate(labels):
            self._put(ins, "setp.eq.u32", flag, value, Immediate(number))
            self._put(ins, "bra", Symbol(names.get(label, label)), predicate=flag)
        self._put(ins, "brx.outside", value, Immediate(len(labels)))
        if after is not None:
            self._label([after])


def _renamed(operand: Operand, names: dict[str, str]) -> Operand:
    """An operand with the names of a call's own registers, labels and variables."""
    if isinstance(operand, Register):
        return Register(names.get(operand.name, operand.name), operand.negated)
    if isinstance(operand, Symbol):
        return Symbol(names.get(operand.name, operand.name), operand.offset)
    if isinstance(operand, Address):
        base = _renamed(operand.base, names)
        assert isinstance(base, Register | Symbol | Immediate)
        return Address(base, operand.offset, tuple(_renamed(item, names) for item in operand.coordinates))
    if isinstance(operand, Vector):
        return Vector(tuple(_renamed(item, names) for item in operand.items))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, names), _renamed(operand.second, names))
    assert isinstance(operand, Immediate | Sink)
    return operand


def _outside(m: Machine, mask: Array | None, index: Array, count: int, line: int) -> None:
    lane = int(m.active(mask)[0])
    m.fault(line, lane, f"jumps to entry {int(np.broadcast_to(index, m.lanes)[lane])} of a table of {count}")


def _brx(t: Translator, ins: Instruction) -> None:
    index, count = ins.operands
    assert isinstance(count, Immediate)
    t.emit(f"{t.const(_outside)}(m, {t.mask}, {t.read(index, 'u4')}, {count.value}, {t.line})")


HANDLERS: dict[str, Handler] = {"brx.outside": _brx}
