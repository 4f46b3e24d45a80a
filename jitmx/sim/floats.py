"""Floating-point formats of PTX: decoding their bits and rounding values to them.

    name   sign exponent mantissa  bias  infinity  NaN    largest
    f32      1      8       23      127    yes     yes    3.4e38
    tf32     1      8       10      127    yes     yes    3.4e38   (the upper 19 bits of a 32-bit word)
    f16      1      5       10       15    yes     yes    65504
    bf16     1      8        7      127    yes     yes    3.39e38
    e5m2     1      5        2       15    yes     yes    57344
    e4m3     1      4        3        7    no      0x7f   448
    e3m2     1      3        2        3    no      no     28
    e2m3     1      2        3        1    no      no     7.5
    e2m1     1      2        1        1    no      no     6
    ue4m3    0      4        3        7    no      0x7f   448      (bit 7 is ignored)
    ue8m0    0      8        0      127    no      0xff   2^127    (code c is 2^(c-127); it has no zero)

Values pass as float32 or float64 arrays, which hold every value of these formats exactly, and bits as unsigned integer
arrays. All functions work element by element on arrays of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Bits = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class FloatFormat:
    """One format.

    Attributes:
        name: as PTX spells it.
        exponent_bits, mantissa_bits, bias: of the binary interchange form.
        largest: magnitude bits of the largest finite value.
        infinity: magnitude bits of infinity, or None where the format has none.
        nan: bits of the NaN that conversions give, or None where the format has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    infinity: int | None
    nan: int | None

    @property
    def bits(self) -> int:
        """Width in bits, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias


F32 = FloatFormat("f32", 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF)
TF32 = FloatFormat("tf32", 8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF)
F16 = FloatFormat("f16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = FloatFormat("bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF)
E5M2 = FloatFormat("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F)
E4M3 = FloatFormat("e4m3", 4, 3, 7, 0x7E, None, 0x7F)
E3M2 = FloatFormat("e3m2", 3, 2, 3, 0x1F, None, None)
E2M3 = FloatFormat("e2m3", 2, 3, 1, 0x1F, None, None)
E2M1 = FloatFormat("e2m1", 2, 1, 1, 0x7, None, None)

FORMATS = {item.name: item for item in (F32, TF32, F16, BF16, E5M2, E4M3, E3M2, E2M3, E2M1)}


def encode(values: Floats, target: FloatFormat, rounding: str = "rn", *, saturate: bool = False) -> Bits:
    """Round `values` to `target` once.

    Args:
        values: float32 or float64, of any shape.
        rounding: rn (nearest, ties to even), rna (nearest, ties away from zero), rz, rm (down) or rp (up).
        saturate: what overflows becomes the largest finite value instead of infinity; formats without infinity always
            saturate.

    Returns:
        uint32 bits. NaN becomes the format's NaN, or the largest positive value where the format has none.
    """
    negative = np.signbit(values)
    magnitude = np.abs(values).astype(np.float64)
    finite = np.isfinite(magnitude)
    bounded = np.where(finite, magnitude, 0.0)
    mantissa, exponent = np.frexp(bounded)
    exponent = np.where(mantissa == 0.0, target.smallest_exponent, np.maximum(exponent - 1, target.smallest_exponent))
    # The last place of the result is worth 1 here; scaling up by a power of two is exact.
    scaled = np.ldexp(bounded, target.mantissa_bits - exponent)
    rounded = round_magnitude(scaled, negative, rounding).astype(np.int64)
    code = ((exponent.astype(np.int64) - target.smallest_exponent) << target.mantissa_bits) + rounded
    largest = np.int64(target.largest)
    infinity = largest if saturate or target.infinity is None else np.int64(target.infinity)
    beyond: npt.NDArray[np.int64] | np.int64
    if rounding == "rz":
        beyond = largest
    elif rounding in ("rm", "rp"):
        beyond = np.where(negative == (rounding == "rm"), infinity, largest)
    else:
        beyond = infinity
    code = np.where(code > largest, beyond, code)
    code = np.where(finite, code, infinity)
    code |= negative.astype(np.int64) << (target.bits - 1)
    nan = target.largest if target.nan is None else target.nan
    return np.where(np.isnan(magnitude), nan, code).astype(np.uint32)


def round_magnitude(
    magnitude: npt.NDArray[np.float64], negative: npt.NDArray[np.bool_], rounding: str
) -> npt.NDArray[np.float64]:
    """Round non-negative numbers to integers; `negative` tells which stand for negative numbers."""
    if rounding == "rn":
        return np.rint(magnitude)
    floor = np.floor(magnitude)
    if rounding == "rz":
        return floor
    if rounding == "rna":
        return np.where(magnitude - floor >= 0.5, floor + 1.0, floor)
    upwards = negative if rounding == "rm" else ~negative
    return np.where(upwards, np.ceil(magnitude), floor)


@cache
def _table(source: FloatFormat) -> npt.NDArray[np.float32]:
    """Value of each code of a format of at most eight bits; for six and four bits, the upper bits are ignored."""
    code = np.arange(256) & ((1 << source.bits) - 1)
    magnitude = code & ((1 << source.bits - 1) - 1)
    field = magnitude >> source.mantissa_bits
    fraction = magnitude & ((1 << source.mantissa_bits) - 1)
    significand = fraction + np.where(field > 0, 1 << source.mantissa_bits, 0)
    value = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - source.bias - source.mantissa_bits)
    value = np.where(magnitude > source.largest, np.nan, value)
    if source.infinity is not None:
        value = np.where(magnitude == source.infinity, np.inf, value)
    return np.where(code >> source.bits - 1 == 1, -value, value).astype(np.float32)


@cache
def _scale_table() -> npt.NDArray[np.float32]:
    exponents = np.arange(256) - 127
    return np.where(exponents == 128, np.nan, np.ldexp(1.0, np.minimum(exponents, 127))).astype(np.float32)


def decode(bits: Bits, name: str) -> npt.NDArray[np.float32]:
    """Values, as float32, of the low bits of each element in the format called `name`.

    tf32 takes 32-bit words and ignores their lower 13 bits, as tensor cores do.
    """
    if name == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f32":
        return bits.astype(np.uint32).view(np.float32)
    if name == "tf32":
        return (bits.astype(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "ue8m0":
        return _scale_table().take(bits & 0xFF)
    if name == "ue4m3":
        return _table(E4M3).take(bits & 0x7F)
    return _table(FORMATS[name]).take(bits & 0xFF)


def encode_scale(values: Floats, rounding: str, *, saturate: bool) -> Bits:
    """Round the magnitudes of `values` to powers of two, as ue8m0.

    Args:
        values: float32; the sign is ignored.
        rounding: rz (down to a power of two) or rp (up).
        saturate: what lies beyond 2^127 becomes 2^127 (code 254) instead of code 255.

    Returns:
        uint32 codes. NaN becomes 255; what is below 2^-127, zero included, becomes 2^-127 (code 0).
    """
    magnitude = values.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    code = magnitude >> np.uint32(23)
    if rounding == "rp":
        # 2^-127 itself is the subnormal 0x00400000.
        inexact = ((magnitude & np.uint32(0x7FFFFF)) != 0) & (magnitude > 0x00400000) & (magnitude < 0x7F800000)
        code = code + inexact.astype(np.uint32)
    if saturate:
        code = np.minimum(code, np.uint32(254))
    return np.where(magnitude > 0x7F800000, np.uint32(255), code)


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of float32 values rounded to bf16, to nearest even; NaN becomes 0x7fff."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def round_to_f16(values: Floats) -> npt.NDArray[np.uint16]:
    """Bits of float32 or float64 values rounded to f16, to nearest even; NaN becomes 0x7fff."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def flush(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 values with subnormals replaced by zeros of their sign (.ftz)."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0.0), values), values)
