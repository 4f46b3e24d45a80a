"""`jitmx.pack_mask`: masks of trees to the bits that attention takes."""

from __future__ import annotations

import torch

from jitmx.errors import InputError
from jitmx.kernels.tree.problem import MAX_NODES, words_of
from jitmx.ops import checks, custom
from jitmx.ops.tree import calls
from jitmx.ops.tree.calls import INT32

_BYTES = (torch.bool, torch.uint8)


def pack_mask(
    mask: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    *,
    tokens: int | None = None,
    max_query_len: int | None = None,
) -> torch.Tensor:
    """Which new tokens of its request each new token attends to, from bytes to bits, in one launch.

    Args:
        mask: bool or uint8, contiguous: [batch, n, n], or [n, n] of one request; a row for each token, n up to 64. Or
            flat, the masks [n, n] of requests with different n one behind the other, beside the rest.
        query_start_loc: int32 [batch + 1], where the tokens of each request start, from 0 on, as `jitmx.attention`
            takes it.
        tokens: rows that come out, as many as q has there; those behind the last request become 0.
        max_query_len: tokens of a request, at most.

    Returns:
        int32 [tokens, 1 or 2], two words from 33 tokens a request on: what `jitmx.attention` takes as `mask`.

    Raises:
        InputError: a device, dtype, shape or number that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/pack.cu.j2; reference: jitmx.kernels.tree.pack.packed.
    """
    if type(mask) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("mask", mask)
        found: torch.Tensor = torch.ops.jitmx.pack_mask(mask, query_start_loc, tokens, max_query_len)
        return found
    return run(mask, query_start_loc, tokens, max_query_len)


def _check(
    mask: torch.Tensor, query_start_loc: torch.Tensor | None, tokens: int | None, max_query_len: int | None
) -> tuple[int, int, int]:
    """Requests, rows that come out, and tokens of a request at most."""
    if query_start_loc is None:
        if tokens is not None or max_query_len is not None:
            raise InputError("tokens and max_query_len are for a flat mask", "leave them out, or pass query_start_loc")
        if mask.dim() not in (2, 3) or mask.shape[-1] != mask.shape[-2]:
            raise InputError(
                f"mask is {checks.describe(mask)}; it must be [batch, n, n] or [n, n]",
                "pass query_start_loc beside a flat one",
            )
        calls.require("mask", mask, _BYTES, tuple(mask.shape))
        nodes = mask.shape[-1]
        batch = mask.shape[0] if mask.dim() == 3 else 1
        calls.require_sizes(batch, nodes)
        return batch, batch * nodes, nodes
    calls.require("mask", mask, _BYTES, ("bytes of all masks",))
    calls.require("query_start_loc", query_start_loc, INT32, ("batch + 1",), mask)
    if type(tokens) is not int or type(max_query_len) is not int or not 0 <= tokens < 1 << 31:
        raise InputError(f"tokens={tokens!r}, max_query_len={max_query_len!r}: a flat mask takes both, as numbers")
    batch = query_start_loc.numel() - 1
    if batch < 1:
        raise InputError("query_start_loc is empty; it has one element more than there are requests")
    if not 1 <= max_query_len <= MAX_NODES:
        raise InputError(f"max_query_len={max_query_len}; a mask is for 1 to {MAX_NODES} new tokens of a request")
    calls.require_sizes(batch, max_query_len)
    return batch, tokens, max_query_len


def run(
    mask: torch.Tensor, query_start_loc: torch.Tensor | None, tokens: int | None, max_query_len: int | None
) -> torch.Tensor:
    """`pack_mask` on plain tensors."""
    checks.require_cuda("mask", mask)
    batch, rows, nodes = _check(mask, query_start_loc, tokens, max_query_len)
    packed = mask.new_empty((rows, words_of(nodes)), dtype=torch.int32)
    if batch and rows:
        step = calls.step("pack", batch, mask.device, bytes=mask.numel(), rows=rows, nodes=nodes, words=words_of(nodes))
        step.run(mask.data_ptr(), calls.address(query_start_loc), packed.data_ptr())
    return packed


def _run(
    mask: torch.Tensor, query_start_loc: torch.Tensor | None, tokens: int | None, max_query_len: int | None
) -> torch.Tensor:
    return run(custom.plain(mask), custom.plain(query_start_loc), tokens, max_query_len)


def _fake(
    mask: torch.Tensor, query_start_loc: torch.Tensor | None, tokens: int | None, max_query_len: int | None
) -> torch.Tensor:
    _, rows, nodes = _check(mask, query_start_loc, tokens, max_query_len)
    return mask.new_empty((rows, words_of(nodes)), dtype=torch.int32)


custom.define("pack_mask(Tensor mask, Tensor? query_start_loc, int? tokens, int? max_query_len) -> Tensor", _run, _fake)
