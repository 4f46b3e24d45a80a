"""The packed layout of an MXFP4 weight, and the product in float64. docs/packed-layout.md draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.arch import Arch

TILE_ROWS = 16
TILE_K = 64
CODE_BYTES, SCALE_BYTES = 512, 32  # of a tile
TILE_BYTES = CODE_BYTES + SCALE_BYTES

DTYPES = ("bf16", "fp16")
ENCODINGS = ("rotated", "nibble")
SCALE_RANGES = ("normal", "full")
# What is added on the way out: nothing, values of Y's type, or a pair of tensors that is added and left as one
# (epilogue/residual_pair.cuh): values, and what their rounding lost.
RESIDUALS = (False, True, "pair")

# Scale bytes that bf16 kernels fold into decoding (mxfp4/decode.cuh): 2^-125 to 2.
NORMAL_SCALES = (2, 128)


def packed_tiles(n: int, k: int) -> tuple[int, int]:
    """Rows of tiles and tiles of k that pad [n, k] to whole tiles."""
    return -(-n // TILE_ROWS), -(-k // TILE_K)


def preferred_encoding(arch: Arch, activation: str = "bf16") -> str:
    """The encoding that a target's tensor cores want of weights beside activations in a format.

    Nibbles where block-scaled MMA takes them as they are, and where they are looked up to become E4M3.
    """
    return "nibble" if "mma_block_scale" in arch.features or activation == "fp8" else "rotated"


def reference(
    x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], bias: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Y in float64 from dequantized weights: what every variant is compared with."""
    y = x @ weight.T
    return y if bias is None else y + bias


_FIELDS = 0x81C081C0  # sign and magnitude of a pair in bf16, in both half-words
_ROTATIONS = (4, 10, 14)  # of pairs 1, 2 and 3 of a rotated word


def rotated(pairs: Sequence[Any]) -> Any:
    """Words in the rotated encoding (docs/packed-layout.md).

    Args:
        pairs: four arrays or tensors of integers of 64 bits: codes of even k in bits 0 to 3, of odd k in 16 to 19.
    """
    fields = [(pair & 0x70007) << 6 | (pair & 0x80008) << 12 for pair in pairs]
    word = fields[0] & 0
    for pair, rotation in zip(fields[1:], _ROTATIONS, strict=True):
        word = word | pair >> rotation | pair << (32 - rotation) & 0xFFFFFFFF
    # Bits of pair 0 fill what these leave, and read w ^ w << 8.
    left = fields[0] ^ (word ^ word << 8) & _FIELDS
    chain = left & 0x80808080
    chain = chain ^ chain << 8 & 0xFFFFFFFF
    chain = chain ^ chain << 16 & 0xFFFFFFFF
    return word | left & 0x00400040 | left >> 8 & 0x00010001 | chain


def pairs_of(words: Any) -> tuple[Any, ...]:
    """Of words in the rotated encoding the four pairs, each in its places in bf16."""
    pairs = (words ^ words << 8, *(words << rotation | words >> (32 - rotation) for rotation in _ROTATIONS))
    return tuple(pair & _FIELDS for pair in pairs)


def pack(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], encoding: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The packed layout in NumPy, as `jitmx.pack_weight` makes it on a device.

    Args:
        codes: [n, k], one E2M1 code a byte.
        scales: [n, k / 32].

    Returns:
        Words [tile rows, tiles of k, 32, 4] and scales [tile rows, tiles of k, 8].
    """
    n, k = codes.shape
    tile_rows, tiles = packed_tiles(n, k)
    rows, columns = tile_rows * TILE_ROWS - n, tiles * TILE_K - k
    codes = np.pad(codes, ((0, rows), (0, columns))).reshape(
        tile_rows, 2, 8, tiles, 2, 4, 4, 2
    )  # half, g, tile, block, t, pair, odd
    scales = np.pad(scales, ((0, rows), (0, columns // 32)), constant_values=127).reshape(tile_rows, 2, 8, tiles, 2)
    halves = codes.astype(np.uint64)
    pairs = halves[..., 0] | halves[..., 1] << 16  # nibbles of even and odd k
    if encoding == "nibble":
        words = np.bitwise_or.reduce([pairs[..., i] << 4 * i for i in range(4)])
    else:
        words = rotated([pairs[..., i] for i in range(4)])
    lanes = words.astype(np.uint32).transpose(0, 3, 2, 5, 4, 1).reshape(tile_rows, tiles, 32, 4)
    packed = np.ascontiguousarray(scales.transpose(0, 3, 2, 1, 4)).reshape(tile_rows, tiles, 32).view(np.uint32)
    return lanes, packed
