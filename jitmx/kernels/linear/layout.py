"""The packed layout of an MXFP4 weight, and the product in float64. docs/packed-layout.md draws it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jitmx.arch import Arch

TILE_ROWS = 16
TILE_K = 64
CODE_BYTES, SCALE_BYTES = 512, 32  # of a tile
TILE_BYTES = CODE_BYTES + SCALE_BYTES

DTYPES = ("bf16", "fp16")
ENCODINGS = ("swizzle", "nibble")
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
    return "nibble" if "mma_block_scale" in arch.features or activation == "fp8" else "swizzle"


def reference(
    x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], bias: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Y in float64 from dequantized weights: what every variant is compared with."""
    y = x @ weight.T
    return y if bias is None else y + bias


# Where pair i of a half-word goes: lowest magnitude bit and sign bit (docs/packed-layout.md).
PAIR_PLACES = {"swizzle": ((6, 15), (3, 12), (0, 14), (9, 13)), "nibble": ((0, 3), (4, 7), (8, 11), (12, 15))}


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
    words = np.zeros((tile_rows, 2, 8, tiles, 2, 4), np.uint32)
    for pair, (magnitude, sign) in enumerate(PAIR_PLACES[encoding]):
        for odd in (0, 1):
            code = codes[..., pair, odd].astype(np.uint32)
            words |= ((code & 7) << magnitude | (code >> 3) << sign) << 16 * odd
    lanes = np.ascontiguousarray(words.transpose(0, 3, 2, 5, 4, 1)).reshape(tile_rows, tiles, 32, 4)
    packed = np.ascontiguousarray(scales.transpose(0, 3, 2, 1, 4)).reshape(tile_rows, tiles, 32).view(np.uint32)
    return lanes, packed
