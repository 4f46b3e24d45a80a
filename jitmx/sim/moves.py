"""Moves, selection and comparison, whatever the type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import arithmetic
from jitmx.sim.alu import FLOATS, check, kind_of
from jitmx.sim.program import dtype_of
from jitmx.sim.ptx import SIZES, Immediate, Instruction, Operand, Pair, Sink, Vector, operands
from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip


def _mov(t: Translator, ins: Instruction) -> None:
    check(t, ins)
    d, a = operands(ins, 2)
    kind = kind_of(ins)
    size = SIZES[kind]
    if isinstance(a, Vector):
        part = size // len(a.items)
        items = ", ".join(t.read(x, f"u{part}") for x in a.items)
        t.write(d, f"{t.const(_pack)}({items})", f"u{size}")
    elif isinstance(d, Vector):
        part = size // len(d.items)
        value = t.read(a, f"u{size}")
        for i, item in enumerate(d.items):
            if not isinstance(item, Sink):
                t.write(item, f"{value} >> {t.scalar(8 * part * i, f'u{size}')}", f"u{part}")
    else:
        if t.constant(d) is not d:
            return  # whoever reads it has the number
        dtype = "b1" if kind == "pred" else f"u{size}"
        if isinstance(a, Immediate) and kind[0] == "f":
            dtype = f"f{size}"
        t.write(d, t.read(a, dtype), dtype)


def _pack(*items: Array) -> Array:
    part = items[0].dtype.itemsize
    wide = f"u{part * len(items)}"
    out = items[0].astype(wide)
    for i, item in enumerate(items[1:], 1):
        out = out | item.astype(wide) << np.dtype(wide).type(8 * part * i)
    return out


def _selp(t: Translator, ins: Instruction) -> None:
    check(t, ins)
    d, a, b, p = operands(ins, 4)
    kind = kind_of(ins)
    dtype = "u" + str(SIZES[kind])
    x, y = (t.word(item, kind, dtype) for item in (a, b))
    t.write(d, f"where({t.read(p, 'b1')}, {x}, {y})", dtype)


def _slct(t: Translator, ins: Instruction) -> None:
    check(t, ins, "ftz")
    d, a, b, c = operands(ins, 4)
    kind, control = ins.opcode[-2], ins.opcode[-1]
    dtype = "u" + str(SIZES[kind])
    if control == "f32":
        # With .ftz a negative subnormal is -0, which is not below zero.
        value = t.read(c, "f4")
        chosen = f"{value} > {t.scalar(-(2.0**-126), 'f4')}" if "ftz" in ins.opcode else f"{value} >= 0"
    else:
        chosen = f"{t.read(c, 'i4')} >= 0"
    t.write(d, f"where({chosen}, {t.word(a, kind, dtype)}, {t.word(b, kind, dtype)})", dtype)


def comparison(t: Translator, ins: Instruction, a: Operand, b: Operand) -> str:
    """Expression of the comparison that set or setp makes."""
    kind, how = kind_of(ins), ins.opcode[1]
    if kind in FLOATS:
        return arithmetic.comparison(t, ins, a, b)
    if how not in _COMPARE:
        raise t.error(f".{how} is not known")
    dtype = dtype_of(kind)
    if how in ("lo", "ls", "hi", "hs"):
        dtype = "u" + dtype[1]
    return f"{_COMPARE[how]}({t.read(a, dtype)}, {t.read(b, dtype)})"


def _setp(t: Translator, ins: Instruction) -> None:
    d, a, b, *c = operands(ins, 3, 4)
    if kind_of(ins) in ("f16x2", "bf16x2"):
        arithmetic.compare_packed(t, ins)
        return
    value = comparison(t, ins, a, b)
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    combine = next((part for part in ins.opcode[2:] if part in ("and", "or", "xor")), None)
    if second is not None:
        t.emit(f"v = {value}")
        t.emit(f"w = ~v{_combined(t, combine, c)}")
        t.write(first, f"v{_combined(t, combine, c)}", "b1")
        t.write(second, "w", "b1")
    elif combine is None and value.endswith(")") and kind_of(ins) not in FLOATS:
        function, arguments = value[:-1].split("(", 1)
        t.ufunc(first, "b1", function, arguments)
    else:
        t.write(first, f"({value}){_combined(t, combine, c)}", "b1")


def _combined(t: Translator, combine: str | None, c: list[Operand]) -> str:
    if combine is None:
        return ""
    return f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[combine]} {t.read(c[0], 'b1')}"


def _set(t: Translator, ins: Instruction) -> None:
    d, a, b, *c = operands(ins, 3, 4)
    combine = next((part for part in ins.opcode[2:] if part in ("and", "or", "xor")), None)
    result = next(part for part in ins.opcode if part in SIZES)
    if result not in _TRUE:
        raise t.error(f"a result of .{result} is not known")
    if kind_of(ins) in ("f16x2", "bf16x2"):
        x, y = arithmetic.halves(t, ins, a, b)
        one, also = t.scalar(_TRUE[result] & 0xFFFF, "u4"), _combined(t, combine, c)
        t.write(d, f"where(({x}){also}, {one}, 0) | where(({y}){also}, {one} << {t.scalar(16, 'u4')}, 0)", "u4")
        return
    value = f"({comparison(t, ins, a, b)}){_combined(t, combine, c)}"
    dtype = "u" + str(SIZES[result])
    t.write(d, f"where({value}, {t.scalar(_TRUE[result], dtype)}, {t.scalar(0, dtype)})", dtype)


# What a comparison that holds writes, by the type of the result.
_TRUE = {
    "u16": 0xFFFF, "s16": 0xFFFF, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f16": 0x3C00, "bf16": 0x3F80,
    "f32": 0x3F800000, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80,
}  # fmt: skip
HANDLERS: dict[str, Handler] = {"mov": _mov, "selp": _selp, "slct": _slct, "setp": _setp, "set": _set}
