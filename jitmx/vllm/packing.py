"""Weights of a layer's experts, packed into the memory that the checkpoint was loaded into."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.utils import replace_parameter

from jitmx.kernels.linear.layout import packed_tiles
from jitmx.ops.experts import PackedExperts, pack_experts

# Bytes of codes that are packed together: packing takes several times as many beside them.
_AT_ONCE = 1 << 26


def pack_layer(layer: Any, name: str, encoding: str) -> PackedExperts:
    """Pack the parameters `<name>_weight` and `<name>_weight_scale` of a layer, and put the outcome in their place.

    Experts are packed some at a time. Where the packed weight is as large as the checkpoint's it takes that memory, so
    that loading needs no more than the model and some experts; else (a shard that does not fill whole tiles) the two
    are there together until this one is packed.

    Args:
        layer: with codes uint8 [experts, n, k / 2] and scales uint8 [experts, n, k / 32], on any device.
        name: "w13" or "w2".
        encoding: "swizzle" or "nibble".

    Raises:
        InputError: parameters that are no MXFP4 weight.
    """
    codes: torch.Tensor = getattr(layer, f"{name}_weight").data
    scales: torch.Tensor = getattr(layer, f"{name}_weight_scale").data
    experts, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    tiles = packed_tiles(n, k)
    words = _memory(codes, (experts, *tiles, 32, 4))
    packed = _memory(scales, (experts, *tiles, 8))
    group = max(1, _AT_ONCE // (n * k // 2))
    full = False
    for first in range(0, experts, group):
        some = slice(first, first + group)
        part = pack_experts((codes[some].contiguous(), scales[some].contiguous()), encoding=encoding)
        words[some], packed[some] = part.words, part.scales
        full = full or part.scale_range == "full"
    if words.is_cuda:  # kernels prefetch weights, ahead of their place in the stream
        torch.cuda.current_stream(words.device).synchronize()
    replace_parameter(layer, f"{name}_weight", words)
    replace_parameter(layer, f"{name}_weight_scale", packed)
    return PackedExperts(words, packed, n, k, encoding, "full" if full else "normal")


def _memory(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """int32 of this shape: the source's own memory if it has as many bytes, else new."""
    size = torch.Size(shape).numel() * 4
    if source.is_contiguous() and source.numel() == size and source.data_ptr() % 16 == 0:
        return source.view(-1).view(torch.int32).view(shape)
    return torch.empty(shape, dtype=torch.int32, device=source.device)
