"""Oracles for the tests that nobody here wrote: ml_dtypes for the formats, float64 NumPy for the sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

ELEMENT = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
}
EMAX = {"mxfp4": 2, "mxfp6e2m3": 2, "mxfp6e3m2": 4, "mxfp8": 8}
LARGEST = {"mxfp4": 6.0, "mxfp6e2m3": 7.5, "mxfp6e3m2": 28.0, "mxfp8": 448.0}
MANTISSA = {"mxfp4": 1, "mxfp6e2m3": 3, "mxfp6e3m2": 2, "mxfp8": 3}

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


def quantize(x: Floats, format: str, rule: str = "floor") -> tuple[Bytes, Bytes]:
    """One code a byte and the scales, by the words of the OCP standard and ml_dtypes' rounding."""
    blocks = x.reshape(-1, 32)
    codes = np.zeros(blocks.shape, np.uint8)
    scales = np.zeros(len(blocks), np.uint8)
    for i, block in enumerate(blocks):
        largest = np.abs(block).max()
        if not np.isfinite(largest):
            scales[i] = 255
            continue
        if largest == 0:
            exponent = 0
        else:
            mantissa, power = np.frexp(largest)
            exponent = int(power) - 1
            if rule == "ceil":
                exponent += bool(mantissa != 0.5)
            elif rule == "even":
                exponent += bool(mantissa * 2 + 2.0 ** -(MANTISSA[format] + 1) >= 2.0)
            exponent = int(np.clip(exponent - EMAX[format], -127, 127))
        scales[i] = exponent + 127
        scaled = np.clip(np.ldexp(block, -exponent), -LARGEST[format], LARGEST[format])
        codes[i] = scaled.astype(ELEMENT[format]).view(np.uint8)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def dequantize(codes: Bytes, scales: Bytes, format: str) -> Floats:
    """float64 values of one-byte codes."""
    values = codes.view(ELEMENT[format]).astype(np.float64)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return (values.reshape(*scales.shape, 32) * powers[..., None]).reshape(codes.shape)


def relative_l2(found: Floats, wanted: Floats) -> float:
    """||found - wanted|| / ||wanted||; NaN never passes a comparison with it."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
