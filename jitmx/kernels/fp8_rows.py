"""Rows in E4M3 with one scale each, as products by wgmma read them, and the rows of W beside them.

A row's scale is the least power of two with which E4M3 holds the row's largest magnitude; that of h is the same for
all rows, since the activation bounds h (templates/include/jitmx/moe/hidden_scale.cuh). Codes lie in lines of 128 k:
of each block of 32 the even k first, then the odd ones.

W is multiplied as E4M3 too: E2M1 times a power of two is a normal number of E4M3 for 12 powers, from 2^-5 to 2^6. What
a row's scales begin at, its base, joins the sums at the end, so that rows whose scales are at most eleven binades apart
take one pass over k. Others take one for every twelve binades. `row_words` says both of each row.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels import Instead

LINE_K = LINE_BYTES = 128
BINADES = 12
E4M3_MAX = 448.0
ROW_RANGES = ("narrow", "wide")  # whether every row takes one pass, or some take more

RULE = Instead("ceil", "a scale of fp8 is the least that holds its values")  # in place of any other rule of scales

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


def rows_bytes(rows: int, k: int) -> int:
    """Bytes of so many rows as the products read them."""
    return rows * -(-k // LINE_K) * LINE_BYTES


def quantize_rows(x: Floats) -> tuple[Bytes, npt.NDArray[np.float32]]:
    """Codes [rows, k] and scales [rows]; a row that holds a NaN or an infinity has a NaN for a scale, and zeros."""
    largest = np.abs(x).max(axis=1)
    finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(finite & (largest > 0), largest, 1.0))  # fraction in [0.5, 1)
    power = np.maximum(exponent - 1 - 8 + (2 * fraction > 1.75), -126)
    scales = np.where(largest == 0, 1.0, np.exp2(power))
    codes = formats.encode(np.where(finite[:, None], x, 0.0) / scales[:, None], formats.get("mxfp8"))
    return codes.astype(np.uint8), np.where(finite, scales, np.nan).astype(np.float32)


def decode(codes: Bytes) -> Floats:
    """What codes stand for, without a scale."""
    return np.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def hidden_multiplier(alpha: float, limit: float) -> float:
    """What clamped SwiGLU is multiplied by before it is rounded, in the kernels' arithmetic."""
    a, one = np.float32(alpha), np.float32(limit)
    largest = (one + np.float32(1)) * np.maximum(one, np.float32(0.2785) / a)
    return float(np.exp2(np.floor(np.log2(np.float64(np.float32(E4M3_MAX) / largest)))))


def arrange(codes: Any, offsets: npt.NDArray[np.int32]) -> Any:
    """Codes [pairs, k] as the products read them: lines [pairs of all experts * steps, 128].

    An expert's rows lie together, step by step; vectors of a line are swizzled from the expert's first row on.
    """
    steps = -(-codes.shape[1] // LINE_K)
    padded = np.zeros((len(codes), steps * LINE_K), codes.dtype)
    padded[:, : codes.shape[1]] = codes
    # [rows, steps, blocks, pairs of k, 2]: all even k of a block, then all odd ones, are a vector each.
    vectors = padded.reshape(len(codes), steps, 4, 16, 2).swapaxes(3, 4).reshape(len(codes), steps, 8, 16)
    found = []
    for first, end in itertools.pairwise(offsets):
        mine = np.empty_like(vectors[first:end])
        for row in range(end - first):
            mine[row][:, np.arange(8) ^ row % 8] = vectors[first + row]
        found.append(mine.swapaxes(0, 1).reshape(-1, LINE_BYTES))
    return np.concatenate(found)


def restore(lines: Bytes, offsets: npt.NDArray[np.int32], k: int) -> Bytes:
    """What `arrange` was given, [pairs, k]."""
    shape = int(offsets[-1]), -(-k // LINE_K) * LINE_K
    places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    rows: Any = np.empty(shape, lines.dtype)
    rows.ravel()[arrange(places, offsets).ravel()] = lines.ravel()
    return np.asarray(rows[:, :k])


def row_words(codes: Bytes, scales: Bytes) -> npt.NDArray[np.uint16]:
    """Of each row of W [..., n, k], codes a byte each, the base of its scales and, from bit 8 on, its passes over k.

    Blocks of nothing but zeros do not count.
    """
    there = (codes & 7).reshape(*scales.shape, formats.BLOCK).any(axis=-1)
    least = np.where(there, scales, 255).min(axis=-1).astype(np.int64)
    most = np.where(there, scales, 0).max(axis=-1).astype(np.int64)
    base = np.where(there.any(axis=-1), least, formats.SCALE_ONE)
    passes = np.maximum(most - base, 0) // BINADES + 1
    return np.asarray((base | passes << 8).astype(np.uint16))


def spread_scales(codes: Bytes, scales: Bytes, wide: bool) -> None:
    """Put the first rows of a weight [..., n, k] on the edges of a pass over k, for cases.

    Scales of the first are as far apart as one pass takes, and where rows are `wide` those of two more further: two
    passes, and three. A block of zeros may have any scale.
    """
    n, blocks = scales.shape[-2:]
    if blocks < 2:
        return
    spans = (BINADES - 1, BINADES, 2 * BINADES + 5) if wide else (BINADES - 1,)
    for row, apart in enumerate(spans[:n]):
        scales[..., row, 0] = scales[..., row, :].max(axis=-1) - apart
        rest = slice(0 if row else 1, None)
        scales[..., row, rest] = np.maximum(scales[..., row, rest], scales[..., row, :1])
    if n > 5:
        codes[..., 5, :32], scales[..., 5, 0] = 8 * (np.arange(32) % 2), formats.SCALE_ONE + 60  # zeros of either sign
