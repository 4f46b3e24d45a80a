"""Float arithmetic rounded once: f16, bf16, f32 and f64, in every rounding that PTX names.

Sums and fused products are formed in float64 and rounded to odd there, which keeps enough for one more rounding to a
narrower format to be right. Operands and results are arrays of bits; NaN results are the canonical NaN.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.floats import BF16, F16, F32, FloatFormat, encode

Array = npt.NDArray[Any]

FORMATS: dict[str, FloatFormat] = {"f16": F16, "bf16": BF16, "f32": F32}
_NAN32, _NAN64 = np.uint32(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF)


def canonical(values: Array) -> Array:
    """float32 or float64 with every NaN the canonical one."""
    bad = np.isnan(values)
    if np.count_nonzero(bad):
        bits = _NAN32 if values.dtype.itemsize == 4 else _NAN64
        return np.where(bad, bits.view(values.dtype), values)
    return values


def widen(bits: Array, kind: str) -> Array:
    """Values, as float32 or float64, of bits in format `kind`."""
    if kind == "f16":
        return bits.view("f2").astype("f4")
    if kind == "bf16":
        return (bits.astype("u4") << np.uint32(16)).view("f4")
    return bits.view("f4" if kind == "f32" else "f8")


def narrow(values: Array, kind: str, rounding: str) -> Array:
    """Bits of float64 `values` in format `kind`, NaN canonical."""
    if kind == "f64":
        return canonical(values).view("u8")
    if rounding == "rn" and kind == "f32":
        return canonical(values.astype("f4")).view("u4")
    if rounding == "rn" and kind == "f16":
        return np.where(np.isnan(values), np.uint16(0x7FFF), np.asarray(values.astype("f2")).view("u2"))
    if rounding == "rn" and kind == "bf16" and values.dtype.itemsize == 8:
        return _bf16(values)
    out = encode(np.atleast_1d(values), FORMATS[kind], rounding)
    return np.asarray(out).astype("u4" if kind == "f32" else "u2").reshape(np.shape(values))


def _bf16(values: Array) -> Array:
    """float64 to bf16, to nearest even, by way of float32 rounded to odd."""
    near = np.asarray(values.astype("f4"))
    back = near.astype("f8")
    bits = near.view("i4")
    short = (back != values) & (bits & 1 == 0)
    if np.count_nonzero(short):
        step = np.where(np.abs(values) > np.abs(back), np.int32(1), np.int32(-1))
        bits = np.where(short & ~np.isnan(values), bits + step, bits)
    return bf16_bits(bits.view("u4"))


def bf16_bits(bits: Array) -> Array:
    """Bits of float32, rounded to odd or exact, to those of bf16, to nearest even; NaN canonical."""
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype("u2")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint16(0x7FFF), rounded) if np.count_nonzero(nan) else rounded


def odd_sum(a: Array, b: Array) -> Array:
    """a + b of float64, rounded to odd: exact sums stay, others get an odd last bit."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    if not np.count_nonzero(error):
        return total
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    bits = np.asarray(total).view("i8")
    even = inexact & (bits & 1 == 0)
    # Towards the error: away from zero where it has the sum's sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + step, bits).view("f8")


def add(a: Array, b: Array, kind: str, rounding: str) -> Array:
    """Bits of the sum."""
    return _signed_zero(narrow(odd_sum(a.astype("f8"), b.astype("f8")), kind, rounding), a, b, rounding)


def _signed_zero(bits: Array, a: Array, b: Array, rounding: str) -> Array:
    """Sums of opposites are -0 where rounding is towards minus infinity."""
    if rounding != "rm":
        return bits
    sign = bits.dtype.type(1 << 8 * bits.dtype.itemsize - 1)
    cancelled = (a.astype("f8") == -b.astype("f8")) & ~((a == 0) & ~np.signbit(a) & ~np.signbit(b))
    return np.where(cancelled & (bits & ~sign == 0), sign, bits)


def multiply(a: Array, b: Array, kind: str, rounding: str) -> Array:
    """Bits of the product."""
    return narrow(a.astype("f8") * b.astype("f8"), kind, rounding)


def fma(a: Array, b: Array, c: Array, kind: str, rounding: str) -> Array:
    """Bits of a * b + c, rounded once. Operands have at most 24 bits."""
    product = a.astype("f8") * b.astype("f8")
    return _signed_zero(narrow(odd_sum(product, c.astype("f8")), kind, rounding), product, c, rounding)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """float64 fma, exact by rational numbers, one element at a time."""
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    rows = zip(*(np.broadcast_to(x, shape).ravel().tolist() for x in (a, b, c)), strict=True)
    out = np.array([_fma64(*row) for row in rows]).reshape(shape)
    return canonical(out)


def _fma64(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        if math.isfinite(a) and math.isfinite(b):
            return c
        return float(np.multiply(a, b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(np.float64(a) * np.float64(b) + np.float64(c)) if c == 0 else 0.0
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def divide(a: Array, b: Array, kind: str, rounding: str) -> Array:
    """Bits of the quotient."""
    return narrow(a.astype("f8") / b.astype("f8"), kind, rounding)


def minimum(a: Array, b: Array, *, nan: bool, largest: bool = False, magnitude: bool = False) -> Array:
    """min or max: -0 below +0; a NaN gives way to a number, or with `nan` wins."""
    x, y = (np.abs(a), np.abs(b)) if magnitude else (a, b)
    less = (x < y) | ((x == y) & np.signbit(a) & ~np.signbit(b))
    more = (x > y) | ((x == y) & ~np.signbit(a) & np.signbit(b))
    first = more if largest else less
    out = np.where(first | np.isnan(b), a, b)
    if nan:
        out = np.where(np.isnan(a) | np.isnan(b), np.full((), np.nan, out.dtype), out)
    return canonical(out)
