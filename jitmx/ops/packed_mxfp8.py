"""MXFP8 weights in the packed layout: tiles of 16 rows by 64 k in two planes of 512 bytes, one for each 32-block."""

from __future__ import annotations

import torch

from jitmx import formats
from jitmx.errors import CaptureError, InputError
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.mxfp8 import BYTE_ORDER, MXFP8_NORMAL_SCALES
from jitmx.ops.mx import MXTensor


def pack_mxfp8_weight(weight: MXTensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Words, scales and scale range of an MXFP8 weight.

    A block that holds a NaN code gets the NaN scale, which makes the same outputs NaN; a block of zeros gets scale 1.

    Args:
        weight: mxfp8 [n, k]; k is a multiple of 32, n is any.

    Returns:
        int32 words [tile rows, tiles of k, 2 blocks, 32 lanes, 4], int32 scales [tile rows, tiles of k, 8], and
        "normal" where bf16 kernels may fold every scale into decoding, else "full". Work is complete on return, so that
        kernels may prefetch the weight ahead of their place in the stream.

    Raises:
        InputError: another format, another number of dimensions, or none of either feature.
        CaptureError: a CUDA graph is being captured.
    """
    if weight.format != "mxfp8":
        raise InputError(f"weight is {weight.format}; this layout is of mxfp8 weights (jitmx.quantize(w, 'mxfp8'))")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError(f"weight has shape {list(weight.shape)}; a linear weight is [n, k] with n and k of 1 or more")
    if weight.codes.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError("a weight was packed while a CUDA graph is captured; pack weights when the model is loaded")
    n, k = weight.shape
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    largest = (codes & 0x7F).view(n, k // formats.BLOCK, formats.BLOCK).amax(dim=-1)
    scales = torch.where((largest == 0) & (scales != formats.SCALE_NAN), formats.SCALE_ONE, scales)
    scales = torch.where(largest == 0x7F, formats.SCALE_NAN, scales)
    low, high = MXFP8_NORMAL_SCALES
    full = bool(((scales < low) | (scales > high)).any())

    tile_rows, tiles_k = packed_tiles(n, k)
    rows, columns = tile_rows * TILE_ROWS - n, tiles_k * TILE_K - k
    codes = torch.nn.functional.pad(codes, (0, columns, 0, rows))
    scales = torch.nn.functional.pad(scales, (0, columns // formats.BLOCK, 0, rows), value=formats.SCALE_ONE)
    split = codes.view(tile_rows, 2, 8, tiles_k, 2, 4, 2, 4)  # half, g, k tile, block, t, word, k
    order = torch.tensor(BYTE_ORDER, device=codes.device)
    words = split.index_select(-1, order).permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous()
    words = words.view(tile_rows, tiles_k, 2, 32, 16).view(torch.int32)
    scales = scales.view(tile_rows, 2, 8, tiles_k, 2).permute(0, 3, 2, 1, 4).contiguous()
    packed = scales.view(tile_rows, tiles_k, 32).view(torch.int32)
    if words.is_cuda:
        torch.cuda.current_stream(words.device).synchronize()
    return words, packed, "full" if full else "normal"
