"""Weights of a layer's experts, packed into the memory that they were loaded into; and how long all packing took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.utils import replace_parameter

from jitmx import formats
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles
from jitmx.ops import pack
from jitmx.ops.moe.experts import PackedExperts
from jitmx.vllm.log import logger

# Bytes of codes that are copied and packed together, where they cannot be packed as they lie.
_AT_ONCE = 1 << 26

_took: list[float] = []
_spent: list[float] = []


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Count a weight that is packed, and how long that takes, for `say`."""
    started = time.perf_counter()
    yield
    _took.append(time.perf_counter() - started)


@contextlib.contextmanager
def processing() -> Iterator[None]:
    """Count what a layer takes once its weights are there, kernels that it waits for included, for `say`."""
    started = time.perf_counter()
    yield
    _spent.append(time.perf_counter() - started)


def say() -> None:
    """One line in the log on what was packed since the last one; none where nothing was."""
    if _took:
        logger.info(
            "jitmx: %d weights were packed in %.2f s, of %.2f s that layers took with their kernels",
            len(_took), sum(_took), sum(_spent),
        )  # fmt: skip
        _took.clear()
        _spent.clear()


def pack_layer(layer: Any, name: str, encoding: str) -> PackedExperts:
    """Pack the parameters `<name>_weight` and `<name>_weight_scale` of a layer, and put the outcome in their place.

    Experts are packed into their own memory (`make_room`): loading needs that of the model, and of a copy of some
    experts where no launch can do without. Parameters that are laid out in another way are packed into new memory.

    Args:
        layer: with codes uint8 [experts, n, k / 2] and scales uint8 [experts, n, k / 32], on any device.
        name: "w13" or "w2".
        encoding: "rotated" or "nibble".

    Raises:
        InputError: parameters that are no MXFP4 weight.
    """
    codes: torch.Tensor = getattr(layer, f"{name}_weight").data
    scales: torch.Tensor = getattr(layer, f"{name}_weight_scale").data
    experts, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    tiles = packed_tiles(n, k)
    words = _memory(codes, (experts, *tiles, 32, 4))
    packed = _memory(scales, (experts, *tiles, 8))
    at_once = experts if pack.in_place(codes, scales, words, packed, "mxfp4") else max(1, _AT_ONCE // (n * k // 2))
    seen = pack.watch(codes.device)
    for first in range(0, experts, at_once):
        some = slice(first, first + at_once)
        pack.into(codes[some], scales[some], words[some], packed[some], seen, "mxfp4", encoding)
    # Waits: kernels prefetch weights, ahead of their place in the stream.
    scale_range = pack.scale_range(seen)
    replace_parameter(layer, f"{name}_weight", words)
    replace_parameter(layer, f"{name}_weight_scale", packed)
    return PackedExperts(words, packed, n, k, encoding, scale_range)


def make_room(layer: Any, name: str) -> None:
    """Before anything is loaded, give the parameters of a weight as much memory as it takes when packed.

    A shard that does not fill whole tiles is packed into more memory than the checkpoint's values take. Parameters that
    have it from the start are views of it, and no weight is ever there twice.
    """
    for part, values in (("weight", 2), ("weight_scale", formats.BLOCK)):
        old = getattr(layer, f"{name}_{part}")
        experts, n, width = old.shape
        rows, tiles = packed_tiles(n, width * values)
        whole = rows * TILE_ROWS, tiles * TILE_K // values
        if whole != (n, width):
            new = torch.nn.Parameter(old.new_zeros(experts, *whole)[:, :n, :width], requires_grad=False)
            new.__dict__.update(old.__dict__)  # vLLM's attributes, its loader among them
            setattr(layer, f"{name}_{part}", new)


def _memory(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """int32 of this shape: the memory of the source's experts where each has as much, else new."""
    experts, size = shape[0], torch.Size(shape[1:]).numel() * 4
    room = source.untyped_storage().nbytes() - source.storage_offset()
    if source.stride(0) == size and room >= experts * size and source.data_ptr() % 16 == 0:
        return source.as_strided((experts * size,), (1,)).view(torch.int32).view(shape)
    return torch.empty(shape, dtype=torch.int32, device=source.device)
