"""Weights to the packed layout: by one launch on a GPU, by torch in host memory."""

from __future__ import annotations

import torch

from jitmx import formats
from jitmx.dispatch.choose import choose
from jitmx.errors import CaptureError, InputError
from jitmx.kernels.linear.layout import ENCODINGS, packed_tiles
from jitmx.kernels.pack import PackProblem, encoding_on, geometry, shared_bytes
from jitmx.ops.pack import reference as pack_torch
from jitmx.registry.launch import Launch
from jitmx.runtime import card
from jitmx.runtime.plan import Plans, Step

_AT_ONCE = 1 << 27  # bytes of codes that torch packs together: it takes several times as many


def encoding_for(device: torch.device, format: str) -> str:
    """The encoding that the kernels of a device want of weights in a format."""
    return encoding_on(card.arch(card.number(device)), format) if device.type == "cuda" else "rotated"


def pack(
    codes: torch.Tensor, scales: torch.Tensor, format: str, encoding: str | None, *, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor, str, str]:
    """Pack weights into new memory.

    Args:
        codes, scales, halves: as for `into`, with any strides.
        encoding: of mxfp4, "rotated" or "nibble"; by default what the device wants.

    Returns:
        Words and scales, int32 [experts, tile rows, tiles of k, …], their encoding, and their scale range: "normal"
        where bf16 kernels may fold every scale into decoding, else "full". Work is complete on return, so that kernels
        may prefetch the weight ahead of their place in the stream.

    Raises:
        InputError: an unknown encoding, or codes without data.
        CaptureError: a CUDA graph is being captured.
        NotWarmedError: the kernel is not in the cache, and JITMX_MODE=required.
    """
    device = codes.device
    if device.type == "meta":
        raise InputError("codes and scales are on meta, and have no data to pack", "pack them where they are loaded to")
    if device.type == "cuda" and card.capturing():
        raise CaptureError(
            "a weight was packed while a CUDA graph is captured", "pack weights when the model is loaded"
        )
    encoding = encoding_for(device, format) if encoding is None else encoding
    if encoding not in ENCODINGS:
        raise InputError(f"encoding={encoding!r} is not one of {', '.join(ENCODINGS)}")
    words, packed = room(codes.shape[0], codes.shape[1], scales.shape[2] * formats.BLOCK, format, device)
    seen = watch(device)
    into(codes, scales, words, packed, seen, format, encoding, halves=halves)
    return words, packed, encoding, scale_range(seen)


def room(experts: int, n: int, k: int, format: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for words and scales of weights [experts, n, k]."""
    tiles = packed_tiles(n, k)
    lanes = (32, 4) if format == "mxfp4" else (2, 32, 4)
    words = torch.empty((experts, *tiles, *lanes), dtype=torch.int32, device=device)
    return words, torch.empty((experts, *tiles, 8), dtype=torch.int32, device=device)


def watch(device: torch.device) -> torch.Tensor:
    """What `into` notes scales in, of one weight or of the parts of one."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def scale_range(seen: torch.Tensor) -> str:
    """ "normal" where all scales that were noted are what decoding folds in, else "full"; waits for the packing."""
    return "full" if int(seen) else "normal"


def into(
    codes: torch.Tensor, scales: torch.Tensor, words: torch.Tensor, packed: torch.Tensor, seen: torch.Tensor,
    format: str, encoding: str, *, halves: bool = False,
) -> None:  # fmt: skip
    """Pack weights into given memory, on the current stream; nothing is waited for.

    Args:
        codes: uint8 [experts, n, k / 2] for mxfp4, [experts, n, k] for mxfp8. They are copied first where their rows do
            not start on 16 bytes.
        scales: uint8 [experts, n, k / 32].
        words, packed: int32 [experts, tile rows, tiles of k, …], contiguous, as `room` gives them. They may begin where
            codes and scales do: what `in_place` does not cover is copied first.
        seen: int32 [1], set to 1 if a scale is outside what decoding folds in.
        halves: rows 0 and n / 2 are rows 0 and 1 of what is packed, 1 and n / 2 + 1 the next, and so on.

    Source: templates/pack/pack.cu.j2; reference: jitmx.ops.pack.reference.
    """
    experts, n, blocks = scales.shape
    k = blocks * formats.BLOCK
    own = words.data_ptr() == codes.data_ptr() or packed.data_ptr() == scales.data_ptr()
    if own and (halves or not in_place(codes, scales, words, packed, format)):
        codes, scales, own = _copy(codes), _copy(scales), False
    if not _by_kernel(codes):
        group = max(1, _AT_ONCE // (n * codes.shape[2]))
        for first in range(0, experts, group):
            some = slice(first, first + group)
            *made, full = pack_torch.pack(codes[some], scales[some], format, encoding, halves=halves)
            words[some], packed[some] = made
            seen |= full
        return
    codes = codes if _readable(codes) else _copy(codes)
    scales = scales if scales.stride(2) == 1 else _copy(scales)
    _step(PackProblem(format, encoding), card.number(codes.device), experts, n, k, own)(
        codes=codes.data_ptr(), scales=scales.data_ptr(), words=words.data_ptr(), packed=packed.data_ptr(),
        beyond=seen.data_ptr(), code_row=codes.stride(1), code_expert=codes.stride(0), scale_row=scales.stride(1),
        scale_expert=scales.stride(0), half=n // 2 if halves else 0,
    )  # fmt: skip


def in_place(codes: torch.Tensor, scales: torch.Tensor, words: torch.Tensor, packed: torch.Tensor, format: str) -> bool:
    """Whether one launch packs weights into memory that begins where they do, with no copy of any.

    Sixteen rows have to lie where they lie when packed: a block reads all of them, as far as its shared memory goes,
    before it writes.
    """
    _, tiles = packed_tiles(codes.shape[1], scales.shape[2] * formats.BLOCK)
    row = words.stride(1) * 4 // 16, packed.stride(1) * 4 // 16
    laid_out = (codes.stride(1), scales.stride(1)) == row and codes.stride(2) == scales.stride(2) == 1
    experts = (codes.stride(0), scales.stride(0)) == (words.stride(0) * 4, packed.stride(0) * 4)
    if not (_by_kernel(codes) and laid_out and experts):
        return False
    return shared_bytes(format, tiles) <= card.arch(card.number(codes.device)).shared_bytes


def _by_kernel(codes: torch.Tensor) -> bool:
    return bool(codes.is_cuda)


def _readable(codes: torch.Tensor) -> bool:
    """Whether a kernel can copy rows of codes 16 bytes at a time."""
    places = codes.data_ptr(), codes.stride(0), codes.stride(1)
    return bool(codes.stride(2) == 1) and not any(at % 16 for at in places)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


_plans = Plans(64)


def _step(problem: PackProblem, device: int, experts: int, n: int, k: int, whole: bool) -> Step:
    key = problem, device, experts, n, k, whole
    step: Step | None = _plans.get(key)
    if step is None:
        choice = choose("pack", problem, card.arch(device), multiprocessors=card.multiprocessors(device))
        shape, (tile_rows, tiles) = geometry(problem.format, experts, n, k, whole=whole), packed_tiles(n, k)
        fixed = {
            "n": n, "blocks": k // formats.BLOCK, "tile_rows": tile_rows, "tiles": tiles, "chunk": shape.chunk,
        }  # fmt: skip
        launch = Launch(shape.blocks, shape.shared_bytes)
        step = _plans.remember(key, Step(choice.variant, device, launch, fixed))
    return step
