"""Codes of activations as `moe.scaled` leaves them between its two products (include/jitmx/moe/hidden_codes.cuh).

A row is chunks of 128 features, each 64 bytes (mxfp4) or two times 64 (mxfp8, mxfp6) in the order of the MMA's
fragments; behind all rows lie their scales, four bytes a chunk. Blocks past the last feature hold anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.arguments import X_FORMATS as FORMATS
from jitmx.kernels.moe.problem import MoeProblem

CHUNK = 128  # features
BLOCKS = CHUNK // formats.BLOCK

# k of a lane's eight values, in the order of their codes in its words (mx/encode.cuh).
_BYTES, _NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7], [0, 2, 4, 6, 1, 3, 5, 7]

Bytes = npt.NDArray[np.uint8]


def chunk_bytes(x_format: str) -> int:
    """Codes of a chunk of a row."""
    return CHUNK // 2 if x_format == "mxfp4" else CHUNK


def hidden_bytes(problem: MoeProblem) -> int:
    """Device memory for h of a problem, bytes: bf16, or codes and scales."""
    pairs = problem.m * problem.top
    if problem.x_format == "bf16":
        return pairs * problem.intermediate * 2
    return pairs * -(-problem.intermediate // CHUNK) * (chunk_bytes(problem.x_format) + BLOCKS)


def rounded(x: npt.NDArray[np.float64], x_format: str, rule: str) -> npt.NDArray[np.float64]:
    """What the codes of x [..., k] stand for; x itself where it is bf16."""
    return x if x_format == "bf16" else formats.rounded(x, formats.get(FORMATS[x_format]), rule)


def arrange(x: npt.NDArray[np.float64], x_format: str, rule: str) -> Bytes:
    """Rows [rows, k] as codes and scales in this layout, as one vector of bytes; what may be anything is 255."""
    rows, k = x.shape
    codes, scales = formats.quantize(x, formats.get(FORMATS[x_format]), rule)
    chunks = -(-k // CHUNK)
    codes = np.pad(codes, ((0, 0), (0, chunks * CHUNK - k)), constant_values=255)
    scales = np.pad(scales, ((0, 0), (0, chunks * BLOCKS - k // formats.BLOCK)), constant_values=255)
    eights = codes.reshape(rows, chunks, 2, 2, 4, 8)  # tile, block, lane
    if x_format == "mxfp4":
        nibbles = eights.reshape(rows, chunks, BLOCKS, 4, 8)[..., _NIBBLES] & np.uint8(15)
        lanes = formats.pack_nibbles(nibbles).transpose(0, 1, 3, 2, 4)
    else:
        lanes = eights[..., _BYTES].transpose(0, 1, 2, 4, 3, 5)
    return np.concatenate([np.ascontiguousarray(lanes).ravel(), scales.ravel()])


def restore(data: Bytes, rows: int, k: int, x_format: str) -> npt.NDArray[np.float64]:
    """What rows in this layout stand for: [rows, k]."""
    chunks = -(-k // CHUNK)
    size = rows * chunks * chunk_bytes(x_format)
    lanes: Any = data[:size]
    if x_format == "mxfp4":
        nibbles = formats.unpack_nibbles(lanes.reshape(rows, chunks, 4, BLOCKS, 4).transpose(0, 1, 3, 2, 4))
        eights = nibbles[..., np.argsort(_NIBBLES)]
    else:
        eights = lanes.reshape(rows, chunks, 2, 4, 2, 8).transpose(0, 1, 2, 4, 3, 5)[..., np.argsort(_BYTES)]
    item = formats.get(FORMATS[x_format])
    codes = np.ascontiguousarray(eights).reshape(rows, chunks * CHUNK)[:, :k] & np.uint8((1 << item.bits) - 1)
    scales = data[size:].reshape(rows, chunks * BLOCKS)[:, : k // formats.BLOCK]
    return formats.dequantize(codes, scales, item)
