"""Float instructions: f32, f64, f16, bf16 and packed pairs, with the rounding, flush and saturation they name.

The approximate ones give a result within the error that PTX allows: of div, rsqrt and ex2 the correctly rounded one or
a neighbour of it, and of tanh one up to 2^-11 of it away, as the operands say; of the others (rcp, lg2, sin, cos, …)
the correctly rounded one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import exact, rounding
from jitmx.sim.ptx import SIZES, Instruction, Operand, Pair, operands
from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_HALF = {"f16x2": "f16", "bf16x2": "bf16"}


class Form:
    """What an opcode says of a float operation."""

    def __init__(self, t: Translator, ins: Instruction, *more: str) -> None:
        self.kind = ins.opcode[-1]
        self.packed = self.kind in _HALF
        self.element = _HALF.get(self.kind, self.kind)
        self.bits = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}.get(self.element, "")
        if not self.bits:
            raise t.error(f"type .{self.kind} is not known")
        self.word = "u4" if self.packed else self.bits
        self.rounding = "rn"
        self.flags: set[str] = set()
        for part in ins.opcode[1:-1]:
            if part in _ROUNDINGS:
                self.rounding = part
            elif part in ("ftz", "sat", "relu", "NaN", "approx", "full", "noftz", *more):
                self.flags.add(part)
            elif part not in SIZES:
                raise t.error(f".{part} is not known")

    def wrap(self, function: Any) -> Any:
        """A function of words from `function(*values, form) -> bits`, with flushing and saturation around it."""

        def run(*words: Array) -> Array:
            values = []
            for word in words:
                bits = np.asarray(word)
                if self.packed:
                    bits = np.ascontiguousarray(np.atleast_1d(bits)).view("u2")
                value = rounding.widen(bits, self.element)
                if "ftz" in self.flags and self.element in ("f32", "f16"):
                    value = flush(value, self.element)
                values.append(value)
            if self.packed:
                values = list(np.broadcast_arrays(*[v.reshape(-1, 2) for v in values]))
            out = self.finish(function(self, *values))
            if self.packed:
                out = np.ascontiguousarray(out).view("u4")[..., 0]
            return out

        return run

    def finish(self, bits: Array) -> Array:
        """Result bits flushed, clamped to [0, 1] or at zero, as the opcode says."""
        flags = self.flags
        if flags.isdisjoint(("ftz", "sat", "relu")):
            return bits
        value = rounding.widen(np.asarray(bits), self.element)
        if "ftz" in flags and self.element in ("f32", "f16"):
            value = flush(value, self.element)
        if "sat" in flags:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)) + np.zeros((), value.dtype)
        if "relu" in flags:
            value = np.where(np.isnan(value), value, np.where(value > 0, value, np.zeros((), value.dtype)))
        return rounding.narrow(value.astype("f8"), self.element, "rn")


def flush(values: Array, kind: str) -> Array:
    """Subnormals of f32 or f16 to zeros of their sign."""
    limit = 2.0**-126 if kind == "f32" else 2.0**-14
    return np.where(np.abs(values) < values.dtype.type(limit), np.copysign(np.zeros((), values.dtype), values), values)


def _emit(t: Translator, form: Form, function: Any, destination: Operand, *sources: Operand) -> None:
    t.call(destination, form.word, form.wrap(function), *(t.word(source, form.kind, form.word) for source in sources))


def _native(function: str) -> Any:
    """Round-to-nearest f32 and f64: NumPy's own arithmetic, canonical NaN."""
    ufunc = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}[function]

    def run(form: Form, a: Array, b: Array) -> Array:
        return np.asarray(rounding.canonical(ufunc(a, b))).view(form.bits)

    return run


def _directed(name: str) -> Any:
    def run(form: Form, a: Array, b: Array) -> Array:
        if name == "add":
            return rounding.add(a, b, form.element, form.rounding)
        if name == "sub":
            return rounding.add(a, -b, form.element, form.rounding)
        if name == "mul":
            return rounding.multiply(a, b, form.element, form.rounding)
        return rounding.divide(a, b, form.element, form.rounding)

    return run


def _directed64(name: str) -> Any:
    return lambda form, *values: exact.directed(name, form.rounding, *values)


_PLAIN = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}


def binary(t: Translator, ins: Instruction) -> None:
    """add, sub, mul, div, min, max."""
    name = ins.opcode[0]
    if name in ("min", "max"):
        form = Form(t, ins, "xorsign", "abs")
        d, *sources = operands(ins, 3, 4)
        _emit(t, form, _minmax(name == "max", len(sources)), d, *sources)
        return
    form = Form(t, ins)
    d, a, b = operands(ins, 3)
    if form.element == "f64" and form.rounding != "rn":
        _emit(t, form, _directed64(name), d, a, b)
        return
    if form.element in ("f32", "f64") and form.rounding == "rn":
        if not form.flags:
            f = "f" + form.bits[1]
            call = t.const(rounding.canonical)
            t.write(d, f"{call}(np.{_PLAIN[name]}({t.read(a, f)}, {t.read(b, f)}))", f)
            return
        function = _native(_PLAIN[name])
        if not form.flags.isdisjoint(("approx", "full")):
            function = _quotient(function)
        _emit(t, form, _tiny_to_zero(form, name, function), d, a, b)
        return
    _emit(t, form, _tiny_to_zero(form, name, _directed(name)), d, a, b)


def _quotient(function: Any) -> Any:
    """Approximate quotients: those without a remainder come out less, for whoever cuts them off."""
    approximate = _approximate(function)

    def run(form: Form, a: Array, b: Array) -> Array:
        bits = np.asarray(function(form, a, b))
        whole = bits.view("f4").astype("f8") * b == a
        less = whole & _normal(bits) & _normal(bits - np.uint32(1))
        return np.where(less, bits - np.uint32(1), approximate(form, a, b))

    return run


def _normal(bits: Array) -> Array:
    exponent = bits >> np.uint32(23) & np.uint32(255)
    return (exponent > 0) & (exponent < 255)


def _approximate(function: Any) -> Any:
    """`function`, whose normal f32 results stay or move by a unit in the last place, as the operands say."""

    def run(form: Form, *values: Array) -> Array:
        bits = np.asarray(function(form, *values))
        moved = bits + _drawn(values) - np.uint32(1)
        return np.where(_normal(bits) & _normal(moved), moved, bits)

    return run


def _drawn(values: tuple[Array, ...]) -> Array:
    """0, 1 or 2, as f32 operands say."""
    mixed = np.zeros((), "u4")
    for value in values:
        mixed = (mixed ^ np.ascontiguousarray(value, "f4").view("u4")) * np.uint32(0x9E3779B1)
    return np.asarray((mixed >> np.uint32(16)) % np.uint32(3))


def _tanh(form: Form, a: Array) -> Array:
    """tanh.approx.f32, whose relative error PTX bounds by 2^-11."""
    right = np.tanh(a.astype("f8"))
    moved = right * (1 + (_drawn((a,)).astype("f8") - 1) * 0.999 * 2.0**-11)
    return rounding.narrow(np.where(np.isinf(a), right, np.clip(moved, -1, 1)), form.element, form.rounding)


_EXACT: dict[str, Any] = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}


def _tiny_to_zero(form: Form, name: str, function: Any) -> Any:
    """With .ftz a result that is tiny before rounding is flushed, though it would round to the smallest normal."""
    if name not in _EXACT or form.element not in ("f32", "f16") or "ftz" not in form.flags:
        return function
    exact, limit = _EXACT[name], 2.0**-126 if form.element == "f32" else 2.0**-14

    def run(form: Form, *values: Array) -> Array:
        bits = function(form, *values)
        with np.errstate(all="ignore"):
            tiny = np.abs(exact(*(value.astype("f8") for value in values))) < limit
        sign = bits.dtype.type(1 << 8 * bits.dtype.itemsize - 1)
        return np.asarray(np.where(tiny, bits & sign, bits))

    return run


def _minmax(largest: bool, count: int) -> Any:
    def run(form: Form, *values: Array) -> Array:
        nan, out = "NaN" in form.flags, values[0]
        for value in values[1:]:
            sign = np.signbit(out) ^ np.signbit(value)
            out = rounding.minimum(out, value, nan=nan, largest=largest, magnitude="abs" in form.flags)
            if "xorsign" in form.flags:
                out = np.where(np.isnan(out), out, np.where(sign, -np.abs(out), np.abs(out)))
        return rounding.narrow(out.astype("f8"), form.element, "rn")

    return run


def fma(t: Translator, ins: Instruction) -> None:
    """fma and mad of floats: a * b + c, rounded once."""
    form = Form(t, ins, "oob")
    if "oob" in form.flags:
        raise t.error(".oob is not known")
    d, a, b, c = operands(ins, 4)
    if form.element == "f64":
        if form.rounding != "rn":
            _emit(t, form, _directed64("fma"), d, a, b, c)
            return
        _emit(t, form, lambda form, a, b, c: rounding.fma64(a, b, c).view("u8"), d, a, b, c)
        return
    if ins.opcode == ("fma", "rn", "bf16x2"):
        slow = form.wrap(lambda form, a, b, c: rounding.fma(a, b, c, "bf16", "rn"))
        t.call(d, "u4", functools.partial(_fma_bf16x2, slow), *(t.read(x, "u4") for x in (a, b, c)))
        return
    rounded = _tiny_to_zero(form, "fma", lambda form, a, b, c: rounding.fma(a, b, c, form.element, form.rounding))
    _emit(t, form, rounded, d, a, b, c)


def _fma_bf16x2(slow: Any, a: Array, b: Array, c: Array) -> Array:
    """Pairs of products where every addend is -0 and no product is small or large; else whatever `slow` says."""
    if not np.count_nonzero(c != _NEGATIVE_ZEROS):
        words = (_wide(a) * _wide(b)).view("u4")
        # Products have 16 bits: exact in float32 but where they are subnormal, which these bounds rule out. One that
        # is zero in float32 is so in bf16.
        sizes = words & _MAGNITUDE
        if sizes.max() < _LARGE and (sizes - _ONE).min() >= _SMALL:  # 0 - 1 is the largest
            rounded = words + _ROUND
            rounded += words >> _HALF_BITS & _ONE
            rounded >>= _HALF_BITS
            return np.asarray(rounded.astype("u2").view("u4").reshape(a.shape if a.ndim else b.shape))
    return np.asarray(slow(a, b, c))


def _wide(pairs: Array) -> Array:
    """The bf16 of pairs as float32 [pairs, 2]."""
    words = np.ascontiguousarray(pairs).reshape(-1, 1).view("u2").astype("u4")
    words <<= _HALF_BITS
    return words.view("f4")


_HALF_BITS, _ROUND, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
_NEGATIVE_ZEROS, _MAGNITUDE = np.uint32(0x80008000), np.uint32(0x7FFFFFFF)
_SMALL, _LARGE = 17 << 23, 254 << 23  # bits of 2**-110 and 2**127


def unary(t: Translator, ins: Instruction) -> None:
    """abs and neg: the sign bit and nothing else."""
    form = Form(t, ins)
    d, a = operands(ins, 2)
    sign = 1 << 8 * int(form.bits[1]) - 1
    if form.packed:
        sign |= sign << 16
    if form.flags:
        keep = ins.opcode[0] == "abs"

        def run(form: Form, a: Array) -> Array:
            return rounding.narrow((np.abs(a) if keep else -a).astype("f8"), form.element, "rn")

        _emit(t, form, run, d, a)
        return
    value = t.word(a, form.kind, form.word)
    if ins.opcode[0] == "neg":
        t.ufunc(d, form.word, "bitwise_xor", value, t.scalar(sign, form.word))
    else:
        full = (1 << 8 * int(form.word[1])) - 1
        t.ufunc(d, form.word, "bitwise_and", value, t.scalar(full ^ sign, form.word))


_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _comparator(form: Form, how: str) -> Any:
    def run(a: Array, b: Array) -> Array:
        x, y = (rounding.widen(np.asarray(word), form.element) for word in (a, b))
        if "ftz" in form.flags and form.element in ("f32", "f16"):
            x, y = flush(x, form.element), flush(y, form.element)
        nan = np.isnan(x) | np.isnan(y)
        if how == "num":
            return ~nan
        if how == "nan":
            return nan
        ordered: Array = _COMPARE[how.removesuffix("u")](x, y)
        return ordered | nan if how.endswith("u") else ordered & ~nan

    return run


def comparison(t: Translator, ins: Instruction, a: Operand, b: Operand) -> str:
    """Expression of a float comparison for set and setp."""
    how = ins.opcode[1]
    form = Form(t, ins, how, "and", "or", "xor")
    if how not in ("num", "nan") and how.removesuffix("u") not in _COMPARE:
        raise t.error(f".{how} is not known")
    return f"{t.const(_comparator(form, how))}({t.word(a, form.kind, form.word)}, {t.word(b, form.kind, form.word)})"


def halves(t: Translator, ins: Instruction, a: Operand, b: Operand) -> tuple[str, str]:
    """Expressions of the comparisons of the lower and the upper halves of f16x2 or bf16x2."""
    how = ins.opcode[1]
    form = Form(t, ins, how, "and", "or", "xor")
    call = t.const(_comparator(form, how))
    x, y, up = t.read(a, "u4"), t.read(b, "u4"), t.scalar(16, "u4")
    return (
        f"{call}(({x}).astype('u2'), ({y}).astype('u2'))",
        f"{call}(({x} >> {up}).astype('u2'), ({y} >> {up}).astype('u2'))",
    )


def compare_packed(t: Translator, ins: Instruction) -> None:
    """setp of f16x2 and bf16x2: a predicate for each half."""
    d, a, b = operands(ins, 3)
    if not isinstance(d, Pair):
        raise t.error("it needs two predicates")
    low, high = halves(t, ins, a, b)
    t.emit(f"v = {low}")
    t.emit(f"w = {high}")
    t.write(d.first, "v", "b1")
    t.write(d.second, "w", "b1")


_FUNCTIONS: dict[str, Any] = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


def _special(t: Translator, ins: Instruction) -> None:
    form = Form(t, ins)
    d, a = operands(ins, 2)
    if form.element == "f64" and form.rounding != "rn":
        if ins.opcode[0] not in ("sqrt", "rcp"):
            raise t.error(f".{form.rounding} of f64 is not known")
        _emit(t, form, _directed64(ins.opcode[0]), d, a)
        return
    function = _FUNCTIONS[ins.opcode[0]]

    def run(form: Form, a: Array) -> Array:
        return rounding.narrow(function(a.astype("f8")), form.element, form.rounding)

    if ins.opcode[0] == "tanh" and form.element == "f32":
        _emit(t, form, _tanh, d, a)
        return
    if ins.opcode[0] not in ("ex2", "rsqrt") or form.element != "f32" or "approx" not in form.flags:
        _emit(t, form, run, d, a)
        return
    approximate = _approximate(run)

    def moved(form: Form, a: Array) -> Array:
        right = run(form, a)
        exact = rounding.widen(right, form.element).astype("f8") == function(a.astype("f8"))
        return np.where(exact, right, approximate(form, a))

    _emit(t, form, moved, d, a)


def _copysign(t: Translator, ins: Instruction) -> None:
    form = Form(t, ins)
    d, a, b = operands(ins, 3)
    sign = t.scalar(1 << 8 * int(form.bits[1]) - 1, form.bits)
    t.write(d, f"{t.word(b, form.kind, form.word)} & ~{sign} | {t.word(a, form.kind, form.word)} & {sign}", form.bits)


_TESTS: dict[str, Any] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ((a == 0) | (np.abs(a) >= np.finfo(a.dtype).tiny)),  # zeros count as normal
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


def _testp(t: Translator, ins: Instruction) -> None:
    d, a = operands(ins, 2)
    if ins.opcode[1] not in _TESTS or ins.opcode[-1] not in ("f32", "f64"):
        raise t.error("this test is not known")
    t.write(d, f"{t.const(_TESTS[ins.opcode[1]])}({t.read(a, ins.opcode[-1][0] + str(SIZES[ins.opcode[-1]]))})", "b1")


HANDLERS: dict[str, Handler] = {
    "fma": fma, "copysign": _copysign, "testp": _testp, **dict.fromkeys(_FUNCTIONS, _special),
}  # fmt: skip
