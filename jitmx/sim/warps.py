"""What the handlers of warp-wide instructions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.lanes import span
from jitmx.sim.ptx import Immediate, Instruction, Operand, Vector

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Translator

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
T = TypeVar("T")


def plan(t: Translator, parse: Callable[[tuple[str, ...]], T], ins: Instruction) -> T:
    """What `parse` makes of an opcode; its errors name the kernel and the PTX line."""
    try:
        return parse(ins.opcode)
    except SimulationError as error:
        raise t.error(str(error)) from None


def items(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector operand; a scalar is a vector of one."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def immediate(t: Translator, operand: Operand) -> int:
    """The value of an operand that must be a number in the text."""
    if not isinstance(operand, Immediate):
        raise t.error(f"{operand} must be an immediate")
    return operand.value


def chosen(value: Array, lanes: Array) -> Array:
    """What lanes have of a register, or of a value that all have."""
    return value.take(lanes) if value.ndim else np.full(len(lanes), value)


def alike(*columns: Array) -> list[Array]:
    """Positions with equal values in every column, by the first of each."""
    every = np.arange(len(columns[0]))
    breaks = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        breaks |= column[1:] != column[:-1]
    ends = [*(breaks.nonzero()[0] + 1).tolist(), len(every)]
    if len(ends) == 1:
        return [every] if len(every) else []
    starts = [0, *ends[:-1]]
    found: dict[tuple[int, ...], list[Array]] = {}
    keys = zip(*(column.take(starts).tolist() for column in columns), strict=True)
    for key, start, end in zip(keys, starts, ends, strict=True):
        found.setdefault(key, []).append(every[start:end])
    return [runs[0] if len(runs) == 1 else np.concatenate(runs) for runs in found.values()]


def fragment(m: Machine, lanes: Array | None, *registers: Array) -> Words:
    """Registers of lanes of whole warps, None for all, side by side: uint32 [warps, 32, registers]."""
    words = np.empty((m.lanes if lanes is None else len(lanes), len(registers)), np.uint32)
    index = slice(None) if lanes is None else span(lanes)
    for i, register in enumerate(registers):
        words[:, i] = register[index] if register.ndim else register
    return words.reshape(-1, 32, len(registers))


def planes(m: Machine, lanes: Array | None, *registers: Array) -> Words:
    """Registers of lanes, None for all, one after the other: uint32 [registers, lanes]."""
    index = slice(None) if lanes is None else span(lanes)
    width = m.lanes if lanes is None else len(lanes)
    listed = [register[index] if register.ndim else np.full(width, register) for register in registers]
    return np.concatenate(listed).reshape(len(registers), width)


def emit_warps(t: Translator) -> None:
    """Have `w` hold the active lanes, None for all; they must be whole warps."""
    check = f"{t.const(whole_warps)}(m, {t.mask}, {t.line}, {'.'.join(t.ins.opcode)!r})"
    t.emit(f"w = {check if t.mask != 'None' else None}")


def emit_fragment(t: Translator, operand: Operand) -> str:
    """Expression of the fragment that a vector operand holds in the lanes `w`."""
    listed = ", ".join(t.read(item, "u4") for item in items(operand))
    return f"{t.const(fragment)}(m, w, {listed})"


def emit_planes(t: Translator, registers: tuple[Operand, ...]) -> str:
    """Expression of the planes of registers in the lanes `w`."""
    return f"{t.const(planes)}(m, w, {', '.join(t.read(item, 'u4') for item in registers)})"


def write_planes(t: Translator, registers: tuple[Operand, ...], expression: str) -> None:
    """Write uint32 [registers, active lanes], whose lanes are `w`, to registers."""
    t.emit(f"v = {expression}")
    where = "" if t.mask == "None" else f"{t.const(span)}(w)"
    if where:
        t.emit(f"x = {where}")
    for i, item in enumerate(registers):
        t.scatter(item, f"v[{i}]", "u4", "x")


def write_fragment(t: Translator, operand: Operand, expression: str) -> None:
    """Write uint32 [warps, 32, registers] of active lanes to the registers of a vector operand."""
    listed = items(operand)
    t.emit(f"v = {expression}.reshape(-1, {len(listed)})")
    if t.mask != "None":
        t.emit(f"w = {t.const(span)}(w)")
    for i, item in enumerate(listed):
        t.scatter(item, f"v[:, {i}]", "u4", "w")


def whole_warps(m: Machine, mask: Array | None, line: int, what: str) -> Array:
    """Lanes of a mask, which must be whole warps.

    Raises:
        SimulationError: a warp of which only some lanes came.
    """
    lanes = m.active(mask)
    if mask is not None and not m.masks.known(mask):
        here = mask.reshape(-1, 32)
        partial = here.any(1) & ~here.all(1)
        if partial.any():
            warp = int(np.flatnonzero(partial)[0])
            absent = int(np.flatnonzero(~here[warp])[0])
            m.fault(line, int(lanes[lanes // 32 == warp][0]), f"{what} without lane {absent} of its warp")
    return lanes


def emit_check(t: Translator) -> None:
    """Check that whole warps run the instruction, where that is not sure."""
    if t.mask != "None":
        t.emit(f"{t.const(whole_warps)}(m, {t.mask}, {t.line}, {'.'.join(t.ins.opcode)!r})")
