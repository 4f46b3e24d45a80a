"""The packed layout by torch, on tensors of any device: what packs in host memory, and the kernel's reference."""

from __future__ import annotations

import torch

from jitmx import formats
from jitmx.kernels.linear.layout import NORMAL_SCALES, TILE_K, TILE_ROWS, packed_tiles, rotated
from jitmx.kernels.linear.mxfp8 import BYTE_ORDER, MXFP8_NORMAL_SCALES


def pack(
    codes: torch.Tensor, scales: torch.Tensor, format: str, encoding: str, *, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Words and scales of weights in MXFP4 or MXFP8, and whether a scale is outside what decoding folds in.

    A block of zeros gets scale 1, so that stray zero bytes cost no slow path; a block of MXFP8 that holds a NaN code
    gets the NaN scale, which makes the same outputs NaN.

    Args:
        codes: uint8 [experts, n, k / 2] for mxfp4, [experts, n, k] for mxfp8.
        scales: uint8 [experts, n, k / 32].
        encoding: of mxfp4, "rotated" or "nibble".
        halves: rows 0 and n / 2 are rows 0 and 1 of what is packed, 1 and n / 2 + 1 the next, and so on.

    Returns:
        int32 [experts, tile rows, tiles of k, …], as PackedExperts and PackedWeight have them for an expert.
    """
    if halves:
        codes, scales = (t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for t in (codes, scales))
    experts, n, blocks = scales.shape
    by_block = codes.unflatten(-1, (blocks, -1))
    magnitudes = by_block & (0x77 if format == "mxfp4" else 0x7F)
    largest = magnitudes.amax(dim=-1)
    scales = torch.where((largest == 0) & (scales != formats.SCALE_NAN), formats.SCALE_ONE, scales)
    if format == "mxfp8":
        scales = torch.where(largest == 0x7F, formats.SCALE_NAN, scales)
    low, high = NORMAL_SCALES if format == "mxfp4" else MXFP8_NORMAL_SCALES
    full = bool(((scales < low) | (scales > high)).any())

    tile_rows, tiles = packed_tiles(n, blocks * formats.BLOCK)
    rows, columns = tile_rows * TILE_ROWS - n, tiles * TILE_K // formats.BLOCK - blocks
    by_block = torch.nn.functional.pad(by_block, (0, 0, 0, columns, 0, rows))
    scales = torch.nn.functional.pad(scales, (0, columns, 0, rows), value=formats.SCALE_ONE)
    # Expert and tile row, half, g, k tile, block, and the bytes of a block as t and what it has.
    split = by_block.reshape(experts * tile_rows, 2, 8, tiles, 2, 4, -1).contiguous()  # codes may lie apart
    if format == "mxfp4":
        words = _encode(split.view(torch.int32).squeeze(-1).permute(0, 3, 2, 5, 4, 1).contiguous(), encoding)
        words = words.view(experts, tile_rows, tiles, 32, 4)
    else:
        order = torch.tensor(BYTE_ORDER, device=codes.device)
        split = split.unflatten(-1, (2, 4)).index_select(-1, order).permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous()
        words = split.view(experts, tile_rows, tiles, 2, 32, 16).view(torch.int32)
    scales = scales.reshape(experts * tile_rows, 2, 8, tiles, 2).permute(0, 3, 2, 1, 4).contiguous()
    return words, scales.view(experts, tile_rows, tiles, 32).view(torch.int32), full


def _encode(words: torch.Tensor, encoding: str) -> torch.Tensor:
    """From eight nibbles in order of k to even k in the low half-word and odd k in the high one, in `encoding`."""
    even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    nibbles = _squeeze(even) | _squeeze(odd) << 16
    if encoding == "nibble":
        return nibbles
    wide = nibbles.long()
    return rotated([wide >> 4 * i & 0xF000F for i in range(4)]).to(words.dtype)


def _squeeze(nibbles: torch.Tensor) -> torch.Tensor:
    """The low nibbles of four bytes side by side in 16 bits."""
    pairs = (nibbles | nibbles >> 4) & 0x00FF00FF
    return (pairs | pairs >> 8) & 0xFFFF
