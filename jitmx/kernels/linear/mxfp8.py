"""The packed layout of an MXFP8 (E4M3) weight. docs/packed-layout.md draws it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles

MXFP8_TILE_BYTES = 1056  # 1024 of codes, 32 of scales

# Scale bytes that bf16 kernels fold into decoding (mx/mxfp8.cuh): 2^-117 to 2^7.
MXFP8_NORMAL_SCALES = (10, 134)

# Which of k = 0 … 3 the bytes of a word hold, lowest first: pair (0, 1) above in the half-words, pair (2, 3) below.
BYTE_ORDER = (2, 0, 3, 1)


def pack_mxfp8(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The packed layout in NumPy, as `jitmx.pack_weight` makes it.

    A block that holds a NaN code gets the NaN scale, which makes the same outputs NaN: those of its row.

    Args:
        codes: [n, k], one E4M3 code a byte.
        scales: [n, k / 32].

    Returns:
        Words [tile rows, tiles of k, 2 blocks, 32 lanes, 4] and scales [tile rows, tiles of k, 8].
    """
    n, k = codes.shape
    nan = ((codes & 0x7F) == 0x7F).reshape(n, k // formats.BLOCK, formats.BLOCK).any(-1)
    scales = np.where(nan, np.uint8(formats.SCALE_NAN), scales)
    tile_rows, tiles = packed_tiles(n, k)
    rows, columns = tile_rows * TILE_ROWS - n, tiles * TILE_K - k
    padded = np.pad(codes, ((0, rows), (0, columns))).reshape(
        tile_rows, 2, 8, tiles, 2, 4, 2, 4
    )  # half, g, tile, block, t, word, k
    ordered = padded[..., BYTE_ORDER].transpose(0, 3, 4, 2, 5, 1, 6, 7)
    lanes = np.ascontiguousarray(ordered).reshape(tile_rows, tiles, 2, 32, 16).view(np.uint32)
    blocks = np.pad(scales, ((0, rows), (0, columns // formats.BLOCK)), constant_values=formats.SCALE_ONE)
    packed = np.ascontiguousarray(blocks.reshape(tile_rows, 2, 8, tiles, 2).transpose(0, 3, 2, 1, 4))
    return lanes, packed.reshape(tile_rows, tiles, 32).view(np.uint32)
