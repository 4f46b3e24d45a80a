"""The `cvt` instruction: conversions among PTX's integer and floating-point types.

`conversion` reads an instruction's parts and returns a function on arrays over lanes, which works on the natural dtype
of each PTX type (`DTYPES`): numbers for integers, f32 and f64; bits for f16, bf16, tf32 and everything packed.

Rules of the PTX ISA that are easy to get wrong:

- Float to integer clamps to the destination's range. NaN gives 0, but the bit pattern 1 << (width - 1) where the source
  is f64 or the destination has 64 bits.
- `.sat` on a floating-point result clamps to [0, 1] and turns NaN into +0; on an integer result it clamps to the range.
- `.relu` turns negative results (-0 included) into +0 and keeps NaN.
- `.satfinite` turns overflow into the largest finite value; NaN stays NaN where the format has one and becomes the
  largest positive value where it has none (e2m1, e2m3, e3m2).
- Of two sources, the first lands in the upper half.
- NaN results are canonical (0x7fff, 0x7fffffff), except that bf16 to f32 and f32 to f64 only widen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.floats import (
    BF16,
    F16,
    F32,
    FORMATS,
    TF32,
    decode,
    encode,
    encode_scale,
    flush,
    round_magnitude,
    round_to_bf16,
    round_to_f16,
)
from jitmx.sim.ptx import Instruction, Register
from jitmx.sim.warps import plan

if TYPE_CHECKING:
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

INTEGERS = {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}") for kind in "su" for size in (1, 2, 4, 8)
}
PACKED = {"e4m3x2": "u2", "e5m2x2": "u2", "e2m3x2": "u2", "e3m2x2": "u2", "ue8m0x2": "u2", "e2m1x2": "u1"}
DTYPES = {
    **INTEGERS,
    "f16": np.dtype("u2"),
    "bf16": np.dtype("u2"),
    "tf32": np.dtype("u4"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "f16x2": np.dtype("u4"),
    "bf16x2": np.dtype("u4"),
    **{name: np.dtype(code) for name, code in PACKED.items()},
}
_INTEGER_ROUNDINGS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
_ROUNDINGS = {"rn", "rna", "rz", "rm", "rp"}
_FLAGS = {"ftz", "sat", "satfinite", "relu"}
_SATURATING = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1"}  # results that take .rn.satfinite alone


@dataclass(frozen=True)
class Conversion:
    """One `cvt`, ready to run.

    Attributes:
        destination, source: PTX types.
        arity: number of source operands; two for `x2` results from two f32.
        function: takes `arity` arrays of DTYPES[source] and returns one of DTYPES[destination].
    """

    destination: str
    source: str
    arity: int
    function: Callable[..., Array]


def conversion(parts: tuple[str, ...]) -> Conversion:
    """The conversion that `cvt` with these parts ("cvt", "rn", "bf16", "f32") names.

    Raises:
        SimulationError: a type, modifier or combination that is not known.
    """
    modifiers, kinds = parts[1:-2], parts[-2:]
    destination, source = kinds
    rounding = next((item for item in modifiers if item in _ROUNDINGS | _INTEGER_ROUNDINGS.keys()), None)
    flags = {item for item in modifiers if item in _FLAGS}
    unknown = [item for item in modifiers if item != rounding and item not in _FLAGS]
    unknown += [item for item in kinds if item not in DTYPES]
    if unknown:
        raise SimulationError(f"cvt with {', '.join(unknown)} is not known: {'.'.join(parts)}")
    arity = 2 if destination.endswith("x2") and source == "f32" else 1
    if destination.endswith("x2"):
        function = _packed(destination, source, rounding or "rn", flags)
    elif destination in INTEGERS:
        function = _to_integer(destination, source, rounding, flags)
    elif source in INTEGERS:
        function = _from_integer(destination, source, rounding or "rn", flags)
    elif source.endswith("x2") or source == "tf32":
        raise SimulationError(f"{'.'.join(parts)} is not a conversion of the PTX ISA")
    else:
        function = _float_to_float(destination, source, rounding, flags)
    return Conversion(destination, source, arity, function)


@dataclass(frozen=True)
class Wrap:
    """Conversion between integer types that keeps the low bits and extends by the source's sign."""

    dtype: np.dtype[Any]

    def __call__(self, a: Array) -> Array:
        return a.astype(self.dtype)


def _to_integer(destination: str, source: str, rounding: str | None, flags: set[str]) -> Callable[[Array], Array]:
    dtype = INTEGERS[destination]
    if source in INTEGERS:
        if "sat" not in flags:
            return Wrap(dtype)
        low = max(np.iinfo(dtype).min, np.iinfo(INTEGERS[source]).min)
        high = min(np.iinfo(dtype).max, np.iinfo(INTEGERS[source]).max)
        return lambda a: np.clip(a, low, high).astype(dtype)
    mode, ftz = _INTEGER_ROUNDINGS.get(rounding or "rzi", "rz"), "ftz" in flags
    info = np.iinfo(dtype)
    odd = source == "f64" or info.bits == 64
    nan = np.array((1 << info.bits - 1) if odd else 0, f"u{dtype.itemsize}").view(dtype)

    def convert(a: Array) -> Array:
        values = _widen(a, source, ftz)
        negative = np.signbit(values)
        with np.errstate(invalid="ignore"):
            whole = np.copysign(round_magnitude(np.abs(values), negative, mode), values)
            above, below = whole >= 2.0 ** (info.bits - (dtype.kind == "i")), whole < float(info.min)
            inside = np.where(above | below | np.isnan(whole), 0.0, whole)
        result = inside.astype(dtype)
        result = np.where(above, dtype.type(info.max), np.where(below, dtype.type(info.min), result))
        return np.where(np.isnan(whole), nan, result)

    return convert


def _widen(a: Array, source: str, ftz: bool) -> npt.NDArray[np.float64]:
    """Values of registers of a scalar floating-point type, as float64."""
    if source == "f64":
        return a
    values = a if source == "f32" else decode(a, source)
    with np.errstate(invalid="ignore"):
        return (flush(values) if ftz and source == "f32" else values).astype(np.float64)


def _from_integer(destination: str, source: str, rounding: str, flags: set[str]) -> Callable[[Array], Array]:
    if rounding == "rn" and not flags and destination in ("f32", "f64"):
        # NumPy's conversion rounds once, to nearest even.
        return lambda a: a.astype(DTYPES[destination])
    narrow = INTEGERS[source].itemsize < 8

    def convert(a: Array) -> Array:
        if narrow:
            values = a.astype(np.float64)
        elif destination == "f64":
            values = _round_wide(a, rounding)
        else:
            values = _round_wide(a, "odd")
        return _narrow(values, destination, rounding, flags)

    return convert


def _round_wide(a: Array, rounding: str) -> npt.NDArray[np.float64]:
    """64-bit integers as float64, rounded by `rounding` or "odd".

    Rounding to odd keeps enough for one more rounding to a narrower format to be right.
    """
    high: npt.NDArray[np.float64] = (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32
    low: npt.NDArray[np.float64] = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
    total = high + low
    error = low - (total - high)
    if rounding == "rn":
        return total
    if rounding == "odd":
        step = (error != 0) & ((total.view(np.uint64) & np.uint64(1)) == 0)
    else:
        wanted = {"rz": np.where(total > 0, -1, 1), "rm": -1, "rp": 1}[rounding]
        step = (error != 0) & (np.sign(error) == wanted)
    beside: npt.NDArray[np.float64] = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(step, beside, total)


def _float_to_float(destination: str, source: str, rounding: str | None, flags: set[str]) -> Callable[[Array], Array]:
    ftz = "ftz" in flags
    if rounding == "rn" and source == "f32" and not flags and destination in ("f16", "bf16"):
        return round_to_bf16 if destination == "bf16" else round_to_f16
    if rounding is None and destination == "f32" and not flags and source in ("f16", "bf16"):
        return _f16_to_f32 if source == "f16" else lambda a: decode(a, "bf16")
    mode = _INTEGER_ROUNDINGS.get(rounding or "")

    def convert(a: Array) -> Array:
        values = _widen(a, source, ftz)
        if mode is not None:
            values = np.copysign(round_magnitude(np.abs(values), np.signbit(values), mode), values)
        return _narrow(values, destination, rounding if rounding in _ROUNDINGS else "rn", flags)

    return convert


def _f16_to_f32(a: Array) -> Array:
    values = decode(a, "f16")
    return np.where(np.isnan(values), np.uint32(F32.nan or 0), values.view(np.uint32)).view(np.float32)


def _narrow(values: npt.NDArray[np.float64], destination: str, rounding: str, flags: set[str]) -> Array:
    """float64 values as registers of a scalar floating-point type, rounded once."""
    if "relu" in flags:
        values = np.where(np.signbit(values) & ~np.isnan(values), 0.0, values)
    if "sat" in flags:
        values = np.where(values > 0, np.minimum(values, 1.0), 0.0)
    if destination == "f64":
        return values
    saturate = "satfinite" in flags
    if destination == "f32":
        result = encode(values, F32, rounding, saturate=saturate).view(np.float32)
        return flush(result) if "ftz" in flags else result
    if destination == "tf32":
        # The 13 low bits of a NaN are ones: the whole word is the canonical f32 NaN.
        code = encode(values, TF32, rounding, saturate=saturate) << np.uint32(13)
        return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), code)
    if rounding == "rn" and not saturate and destination == "f16":
        return round_to_f16(values)
    return encode(values, {"f16": F16, "bf16": BF16}[destination], rounding, saturate=saturate).astype(np.uint16)


def _packed(destination: str, source: str, rounding: str, flags: set[str]) -> Callable[..., Array]:
    """Conversions that pack two results: from two f32, or from the halves of one packed register."""
    name = destination[:-2]
    if name in _SATURATING and (rounding, "satfinite" in flags) != ("rn", True):
        raise SimulationError(f"cvt to {destination} is not a conversion of the PTX ISA but with .rn.satfinite")
    dtype, width = DTYPES[destination], 4 if name == "e2m1" else DTYPES[destination].itemsize * 4

    if source == "f32":

        def unpack(*operands: Array) -> tuple[Array, Array]:
            return operands[0], operands[1]
    elif source.endswith("x2"):
        half = 4 if source == "e2m1x2" else DTYPES[source].itemsize * 4

        def unpack(*operands: Array) -> tuple[Array, Array]:
            bits = operands[0].astype(np.uint32)
            low = bits & np.uint32((1 << half) - 1)
            return decode(bits >> np.uint32(half), source[:-2]), decode(low, source[:-2])
    else:
        raise SimulationError(f"cvt to {destination} from {source} is not a conversion of the PTX ISA")

    def one(values: Array) -> Array:
        if "ftz" in flags:
            values = flush(values)
        if name == "ue8m0":
            return encode_scale(values, rounding, saturate="satfinite" in flags)
        if "relu" in flags:
            values = np.where(np.signbit(values) & ~np.isnan(values), np.float32(0.0), values)
        if rounding == "rn" and "satfinite" not in flags and name in ("f16", "bf16"):
            return (round_to_f16(values) if name == "f16" else round_to_bf16(values)).astype(np.uint32)
        return encode(values, FORMATS[name], rounding, saturate="satfinite" in flags)

    def convert(*operands: Array) -> Array:
        # One pass over both halves: the cost of these conversions is in the number of array operations.
        both = one(np.stack(np.broadcast_arrays(*unpack(*operands))))
        packed: Array = ((both[0] << np.uint32(width)) | both[1]).astype(dtype)
        return packed

    return convert


def _cvt(t: Translator, ins: Instruction) -> None:
    wanted = plan(t, conversion, ins)
    destination, *sources = ins.operands
    if len(sources) != wanted.arity:
        raise t.error(f"{len(sources)} sources; it takes {wanted.arity}")
    source, dtype = DTYPES[wanted.source].str[1:], DTYPES[wanted.destination].str[1:]
    registers = [t.read(operand, source) for operand in sources]
    if isinstance(wanted.function, Wrap):
        same = isinstance(destination, Register) and t.width(destination.name) == int(dtype[1])
        # Copying between registers of the types' own widths wraps and extends by itself.
        t.write(destination, registers[0] if same else f"{registers[0]}.astype({dtype!r})", dtype)
        return
    t.call(destination, dtype, wanted.function, *registers)


HANDLERS: dict[str, Handler] = {"cvt": _cvt}
