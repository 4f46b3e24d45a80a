"""Integer arithmetic, logic and shifts; what is of floats goes on to jitmx.sim.arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import arithmetic, integers
from jitmx.sim.program import dtype_of
from jitmx.sim.ptx import SIZES, Immediate, Instruction, Operand, Pair, Register, operands, pair
from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2"}
PACKED = {"u16x2", "s16x2"}


def kind_of(ins: Instruction) -> str:
    """The type that ends an opcode."""
    return ins.opcode[-1]


def check(t: Translator, ins: Instruction, *known: str) -> None:
    """Error where the opcode has a part that is neither known nor a type."""
    for part in ins.opcode[1:]:
        if part not in known and part not in SIZES:
            raise t.error(f".{part} is not known")


def _binary(function: str) -> Handler:
    """add, sub, min, max: of integers, packed integers, or passed on to floats."""

    def handler(t: Translator, ins: Instruction) -> None:
        kind = kind_of(ins)
        if kind in FLOATS:
            arithmetic.binary(t, ins)
            return
        name = ins.opcode[0]
        if "cc" in ins.opcode or name in ("addc", "subc"):
            carry(t, ins)
            return
        d, a, b = operands(ins, 3)
        if "relu" in ins.opcode:
            check(t, ins, "relu")
            if name not in ("min", "max") or kind not in ("s32", "s16x2"):
                raise t.error(".relu is of min and max of s32 and s16x2")
            dtype = "i4" if kind == "s32" else "i2"
            t.write(d, f"{t.const(_relu)}({function}, {t.read(a, 'u4')}, {t.read(b, 'u4')}, {dtype!r})", "u4")
            return
        if kind in PACKED:
            check(t, ins)
            half = "i2" if kind[0] == "s" else "u2"
            t.write(d, f"{t.const(_halves)}({function}, {t.read(a, 'u4')}, {t.read(b, 'u4')}, {half!r})", "u4")
            return
        if "sat" in ins.opcode:
            check(t, ins, "sat")
            t.write(d, f"{t.const(integers.saturating)}({t.read(a, 'i4')}, {t.read(b, 'i4')}, {name == 'sub'})", "i4")
            return
        check(t, ins)
        dtype = dtype_of(kind)
        if name in ("add", "sub"):
            dtype = "u" + dtype[1]
        t.ufunc(d, dtype, function, t.read(a, dtype), t.read(b, dtype))

    return handler


def _relu(function: Any, a: Array, b: Array, dtype: str) -> Array:
    """The lesser or the greater, or zero where that is negative."""
    return _halves(lambda x, y: np.maximum(function(x, y), 0), a, b, dtype)


def _halves(function: Any, a: Array, b: Array, half: str) -> Array:
    pairs = function(a.reshape(-1, 1).view(half), b.reshape(-1, 1).view(half))
    return np.asarray(pairs.view("u4").reshape(a.shape if a.ndim else b.shape))


def carry(t: Translator, ins: Instruction) -> None:
    """Extended-precision addition and subtraction, with a carry that each thread keeps."""
    name, kind = ins.opcode[0], kind_of(ins)
    multiply = name in ("mad", "madc")
    check(t, ins, "cc", *(("lo", "hi") if multiply else ()))
    d, a, b, *c = operands(ins, 4 if multiply else 3)
    dtype = "u" + str(SIZES[kind])
    if multiply:
        product, product_type = _product(t, ins, a, b)
        first, second = f"({product})" + (f".view({dtype!r})" if product_type != dtype else ""), t.read(c[0], dtype)
    else:
        first, second = t.read(a, dtype), t.read(b, dtype)
    flag = Register("%carry")
    t.function.registers.setdefault(flag.name, "u32")
    use = f"{t.read(flag, 'u4')}" if name in ("addc", "subc", "madc") else "None"
    t.emit(f"v, w = {t.const(_carry)}({first}, {second}, {use}, {name.startswith('sub')})")
    t.write(d, "v", dtype)
    if "cc" in ins.opcode:
        t.write(flag, "w", "u4")


def _carry(a: Array, b: Array, flag: Array | None, subtract: bool) -> tuple[Array, Array]:
    extra = a.dtype.type(0) if flag is None else flag.astype(a.dtype)
    if subtract:
        first = a - b
        result = first - extra
        return result, ((a < b) | (first < extra)).astype("u4")
    first = a + b
    result = first + extra
    return result, ((first < a) | (result < first)).astype("u4")


def _mul(t: Translator, ins: Instruction) -> None:
    kind = kind_of(ins)
    if kind in FLOATS:
        arithmetic.binary(t, ins)
        return
    d, a, b = operands(ins, 3)
    t.write(d, *_product(t, ins, a, b))


def _product(t: Translator, ins: Instruction, a: Operand, b: Operand) -> tuple[str, str]:
    check(t, ins, "lo", "hi", "wide", "cc")
    dtype = dtype_of(kind_of(ins))
    x, y = t.read(a, dtype), t.read(b, dtype)
    if "wide" in ins.opcode:
        wide = dtype[0] + str(2 * int(dtype[1]))
        return f"multiply({x}, {y}, dtype={wide!r})", wide
    if "hi" in ins.opcode:
        return f"{t.const(integers.multiply_high)}({x}, {y})", dtype
    dtype = "u" + dtype[1]
    return f"multiply({t.read(a, dtype)}, {t.read(b, dtype)})", dtype


def _mad(t: Translator, ins: Instruction) -> None:
    kind = kind_of(ins)
    if kind in FLOATS:
        arithmetic.fma(t, ins)
        return
    if "cc" in ins.opcode or ins.opcode[0] == "madc":
        carry(t, ins)
        return
    if "sat" in ins.opcode:
        raise t.error("multiplication with saturation is not known")
    d, a, b, c = operands(ins, 4)
    product, dtype = _product(t, ins, a, b)
    t.ufunc(d, dtype, "add", product, t.read(c, dtype))


def _mul24(t: Translator, ins: Instruction) -> None:
    check(t, ins, "lo", "hi")
    signed = kind_of(ins) == "s32"
    d, a, b, *c = operands(ins, 3, 4)
    value = f"{t.const(_product24)}({t.read(a, 'u4')}, {t.read(b, 'u4')}, {signed}, {'hi' in ins.opcode})"
    if c:
        value = f"add({value}, {t.read(c[0], 'u4')})"
    t.write(d, value, "u4")


def _product24(a: Array, b: Array, signed: bool, high: bool) -> Array:
    def low(x: Array) -> Array:
        word = (x & 0xFFFFFF).astype(np.int64)
        return np.where(word >> 23 & 1, word - (1 << 24), word) if signed else word

    product = low(a) * low(b)
    return (product >> 16 if high else product).astype(np.uint32)


def _simple(function: Any, count: int, result: str = "", *, floats: Handler | None = None) -> Handler:
    """An instruction that is one function of `count` operands of its type, with a result of that type or `result`.

    Args:
        floats: handles the instruction where its type is one of floats.
    """

    def handler(t: Translator, ins: Instruction) -> None:
        kind = kind_of(ins)
        if floats and kind in FLOATS:
            floats(t, ins)
            return
        check(t, ins)
        d, *sources = operands(ins, count + 1)
        dtype = dtype_of(kind)
        listed = [t.read(source, dtype) for source in sources]
        if isinstance(function, str):
            t.ufunc(d, result or dtype, function, *listed)
        else:
            t.write(d, f"{t.const(function)}({', '.join(listed)})", result or dtype)

    return handler


def _logical(function: str) -> Handler:
    def handler(t: Translator, ins: Instruction) -> None:
        check(t, ins)
        d, a, b = operands(ins, 3)
        dtype = dtype_of(kind_of(ins))
        t.ufunc(d, dtype, function, t.read(a, dtype), t.read(b, dtype))

    return handler


def _not(t: Translator, ins: Instruction) -> None:
    check(t, ins)
    d, a = operands(ins, 2)
    dtype = dtype_of(kind_of(ins))
    t.ufunc(d, dtype, "invert", t.read(a, dtype))


def _cnot(t: Translator, ins: Instruction) -> None:
    check(t, ins)
    d, a = operands(ins, 2)
    dtype = dtype_of(kind_of(ins))
    t.write(d, f"{t.read(a, dtype)} == 0", dtype)


def _shift(t: Translator, ins: Instruction) -> None:
    check(t, ins)
    d, a, b = operands(ins, 3)
    dtype = dtype_of(kind_of(ins))
    if ins.opcode[0] == "shl":
        dtype = "u" + dtype[1]
    if isinstance(b, Immediate):
        amount = t.scalar(min(b.value % (1 << 32), 64), dtype)
    elif dtype == "u4":
        amount = t.read(b, "u4")
    else:
        amount = f"minimum({t.read(b, 'u4')}, {t.scalar(64, 'u4')}).astype({dtype!r})"
    # NumPy gives 0, or the sign, for shifts past the width, as PTX has it.
    t.ufunc(d, dtype, "left_shift" if ins.opcode[0] == "shl" else "right_shift", t.read(a, dtype), amount)


def _lop3(t: Translator, ins: Instruction) -> None:
    check(t, ins, "or", "and")
    d, a, b, c, table, *rest = operands(ins, 5, 6)
    combine = [part for part in ins.opcode[1:] if part in ("or", "and")]
    result, flag = pair(d)
    if not isinstance(table, Immediate) or len(rest) != len(combine) or bool(combine) != isinstance(d, Pair):
        raise t.error("this form is not known")
    listed = ", ".join(t.read(x, "u4") for x in (a, b, c))
    value = f"{t.const(integers.logic)}({listed}, {table.value & 255})"
    if not combine:
        t.write(result, value, "u4")
        return
    t.emit(f"v = {value}")
    t.emit(f"w = (v != 0) {'|' if combine == ['or'] else '&'} {t.read(rest[0], 'b1')}")
    t.write(result, "v", "u4")
    t.write(flag, "w", "b1")


def _shf(t: Translator, ins: Instruction) -> None:
    check(t, ins, "l", "r", "wrap", "clamp")
    d, a, b, c = operands(ins, 4)
    listed = ", ".join(t.read(x, "u4") for x in (a, b, c))
    t.write(d, f"{t.const(integers.funnel)}({listed}, {'l' in ins.opcode}, {'clamp' in ins.opcode})", "u4")


def _prmt(t: Translator, ins: Instruction) -> None:
    d, a, b, c = operands(ins, 4)
    mode, c = ins.opcode[2] if len(ins.opcode) > 2 else "", t.constant(c)
    if isinstance(c, Immediate) and not mode:
        t.call_one(d, "u4", integers.permuter(c.value), t.read(a, "u4"), t.read(b, "u4"))
        return
    t.call_one(d, "u4", functools.partial(integers.permute, mode), *(t.read(x, "u4") for x in (a, b, c)))


def _bits(function: Any) -> Handler:
    """bfe and bfi: position and length are u32 whatever the type."""

    def handler(t: Translator, ins: Instruction) -> None:
        check(t, ins)
        d, *sources = operands(ins, 4, 5)
        dtype = dtype_of(kind_of(ins))
        listed = [t.read(x, dtype) for x in sources[:-2]] + [t.read(x, "u4") for x in sources[-2:]]
        t.write(d, f"{t.const(function)}({', '.join(listed)})", dtype)

    return handler


def _bfind(t: Translator, ins: Instruction) -> None:
    check(t, ins, "shiftamt")
    d, a = operands(ins, 2)
    value = t.read(a, dtype_of(kind_of(ins)))
    t.write(d, f"{t.const(integers.find_bit)}({value}, {'shiftamt' in ins.opcode})", "u4")


def _fns(t: Translator, ins: Instruction) -> None:
    d, *sources = operands(ins, 4)
    t.write(d, f"{t.const(integers.find_nth)}({', '.join(t.read(x, 'u4') for x in sources)})", "u4")


def _dot(t: Translator, ins: Instruction) -> None:
    check(t, ins, "lo", "hi")
    d, *sources = operands(ins, 4)
    types = [part for part in ins.opcode if part in SIZES]
    listed = ", ".join(t.read(x, "u4") for x in sources)
    signs = f"{types[0] == 's32'}, {types[-1] == 's32'}"
    if ins.opcode[0] == "dp4a":
        t.write(d, f"{t.const(integers.dot4)}({listed}, {signs})", "u4")
    else:
        t.write(d, f"{t.const(integers.dot2)}({listed}, {signs}, {'hi' in ins.opcode})", "u4")


HANDLERS: dict[str, Handler] = {
    "add": _binary("add"), "sub": _binary("subtract"), "addc": _binary("add"), "subc": _binary("subtract"),
    "min": _binary("minimum"), "max": _binary("maximum"),
    "mul": _mul, "mad": _mad, "madc": _mad, "mul24": _mul24, "mad24": _mul24,
    "div": _simple(integers.divide, 2, floats=arithmetic.binary), "rem": _simple(integers.remainder, 2),
    "sad": _simple(integers.absolute_difference, 3),
    "abs": _simple("absolute", 1, floats=arithmetic.unary), "neg": _simple("negative", 1, floats=arithmetic.unary),
    "popc": _simple(integers.population, 1, "u4"), "clz": _simple(integers.leading_zeros, 1, "u4"),
    "brev": _simple(integers.reverse, 1), "bfind": _bfind, "fns": _fns,
    "bfe": _bits(integers.extract), "bfi": _bits(integers.insert), "dp4a": _dot, "dp2a": _dot,
    "and": _logical("bitwise_and"), "or": _logical("bitwise_or"), "xor": _logical("bitwise_xor"),
    "not": _not, "cnot": _cnot, "shl": _shift, "shr": _shift, "shf": _shf, "lop3": _lop3, "prmt": _prmt,
}  # fmt: skip
