"""OCP Microscaling formats and their reference arithmetic in NumPy.

A block is 32 values along the last axis that share an E8M0 scale, a power of two from 2^-127 (byte 0) to 2^127 (byte
254); byte 255 is NaN. Element formats (OCP MX v1.0, section 5.3):

    name      element          max     bytes a value as stored here
    mxfp4     E2M1             6       1/2 (even k in the low nibble)
    mxfp6e2m3 E2M3             7.5     1 (low six bits: the container that block-scaled MMA takes)
    mxfp6e3m2 E3M2             28      1 (likewise)
    mxfp8     E4M3             448     1

Values are rounded to nearest even and saturate. A block that holds a NaN or an infinity gets the NaN scale and zero
codes; a block of zeros gets scale 1 (byte 127).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jitmx.errors import KnobError
from jitmx.quoting import short

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255
SCALE_ONE = 127
SCALE_RULES = ("floor", "ceil", "even")


@dataclass(frozen=True)
class Format:
    """One element format.

    Attributes:
        name: as the public API spells it.
        exponent_bits, mantissa_bits: E and M; one more bit is the sign.
        bias: exponent bias.
        largest: largest finite magnitude.
        codes_per_byte: 2 for packed FP4, else 1.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    codes_per_byte: int

    @property
    def emax(self) -> int:
        """Exponent of the largest normal value."""
        return int(np.floor(np.log2(self.largest)))

    @property
    def largest_code(self) -> int:
        """Magnitude bits of the largest finite value."""
        fraction = self.largest / 2.0**self.emax - 1.0
        return (self.emax + self.bias << self.mantissa_bits) + int(fraction * (1 << self.mantissa_bits))

    @property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits


FORMATS = {
    item.name: item
    for item in (
        Format("mxfp4", 2, 1, 1, 6.0, 2),
        Format("mxfp6e2m3", 2, 3, 1, 7.5, 1),
        Format("mxfp6e3m2", 3, 2, 3, 28.0, 1),
        Format("mxfp8", 4, 3, 7, 448.0, 1),
    )
}


def get(name: object) -> Format:
    """The format called `name`.

    Raises:
        KnobError: there is none; the message lists those there are.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise KnobError(f"{short(name)} is not a format; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def values(item: Format) -> npt.NDArray[np.float64]:
    """The value of every code of `item`, sign bit last: 2^bits values. NaN where a code is NaN (E4M3 0x7F and 0xFF)."""
    codes = np.arange(1 << item.bits)
    magnitude = codes & (1 << item.bits - 1) - 1
    exponent, mantissa = magnitude >> item.mantissa_bits, magnitude & (1 << item.mantissa_bits) - 1
    normal = np.exp2(np.maximum(exponent, 1) - item.bias)
    out = np.where(exponent > 0, 1.0, 0.0) * normal + mantissa * normal / (1 << item.mantissa_bits)
    out = np.where(magnitude > item.largest_code, np.nan, out)
    return np.where(codes >> item.bits - 1, -out, out)


def block_scales(blocks: npt.NDArray[np.float64], item: Format, rule: str = "floor") -> npt.NDArray[np.uint8]:
    """E8M0 byte of each block.

    Args:
        blocks: [..., 32] values.
        rule: how the exponent of the largest magnitude is taken: "floor" (OCP), "ceil" (up unless a power of two), or
            "even" (after rounding the magnitude to the element's mantissa).

    Returns:
        [...] bytes.
    """
    if rule not in SCALE_RULES:
        raise KnobError(f"{rule!r} is not a scale rule; rules: {', '.join(SCALE_RULES)}")
    largest = np.abs(blocks).max(axis=-1)
    finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(finite & (largest > 0), largest, 1.0))  # fraction in [0.5, 1)
    floor = exponent - 1
    if rule == "ceil":
        floor = floor + (fraction > 0.5)
    elif rule == "even":
        # A fraction that rounds up to 2 counts as the next power: half a unit of the last mantissa bit below 2.
        floor = floor + (2.0 * fraction >= 2.0 - 2.0 ** -(item.mantissa_bits + 1))
    byte = np.clip(floor - item.emax + SCALE_BIAS, 0, 254)
    byte = np.where(largest == 0, SCALE_ONE, byte)
    return np.where(finite, byte, SCALE_NAN).astype(np.uint8)


def scale_values(scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """2^(byte - 127), NaN for byte 255."""
    return np.where(scales == SCALE_NAN, np.nan, np.exp2(scales.astype(np.float64) - SCALE_BIAS))


def quantize(
    x: npt.NDArray[np.float64], item: Format, rule: str = "floor"
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes and scales of `x`, one code a byte.

    Args:
        x: [..., k], k a multiple of 32.

    Returns:
        Codes [..., k] and scales [..., k / 32].
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scales = block_scales(blocks, item, rule)
    with np.errstate(invalid="ignore"):
        scaled = blocks / scale_values(scales)[..., None]
    codes = np.where((scales == SCALE_NAN)[..., None], 0, encode(scaled, item))
    return codes.astype(np.uint8).reshape(x.shape), scales


def encode(x: npt.NDArray[np.float64], item: Format) -> npt.NDArray[np.uint8]:
    """Codes nearest to `x`, ties to even, saturating; NaN becomes the largest magnitude."""
    magnitude = np.minimum(np.where(np.isnan(x), np.inf, np.abs(x)), item.largest)
    _, exponent = np.frexp(magnitude)
    unit = np.exp2(np.maximum(exponent - 1, 1 - item.bias) - item.mantissa_bits)
    rounded = np.round(magnitude / unit) * unit  # np.round takes ties to even
    table = values(item)[: item.largest_code + 1]
    codes: npt.NDArray[np.int64] = np.searchsorted(table, rounded) | np.signbit(x) * (1 << item.bits - 1)
    return codes.astype(np.uint8)


def dequantize(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], item: Format) -> npt.NDArray[np.float64]:
    """Values of one-byte codes [..., k] with scales [..., k / 32], in float64."""
    blocks = values(item)[codes].reshape(*scales.shape, BLOCK)
    blocks *= scale_values(scales)[..., None]  # in place: new memory takes longer than the products
    return blocks.reshape(codes.shape)


def rounded(x: npt.NDArray[np.float64], item: Format, rule: str = "floor") -> npt.NDArray[np.float64]:
    """What the codes of `x` [..., k] stand for."""
    return dequantize(*quantize(x, item, rule), item)


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two FP4 codes a byte, even k in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """One FP4 code a byte."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
