"""`jitmx.attention` and `jitmx.append_kv`: attention of new tokens to a paged cache and to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.errors import InputError
from jitmx.ops import custom
from jitmx.ops.attention.calls import run_append, run_attention
from jitmx.ops.attention.checks import ROPE_STYLES
from jitmx.ops.checks import describe, require_tensor

__all__ = ["ROPE_STYLES", "append_kv", "attention"]


def attention(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    rope: torch.Tensor | None = None,
    rope_style: str = "neox",
    positions: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fp16_qk: bool = False,
    out: torch.Tensor | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of each request to its tokens in the cache and to one another.

    Logits are q k times `scale`, capped, then masked; a sink joins the softmax's sum and gives nothing. Sums are in
    fp32. Rotary embedding and cache write are part of it, and a new key counts as the cache keeps it. Where the new
    tokens of every request times heads / kv_heads are 64 at most (32 of head_dim 96 and 128, 16 of 256), all is one
    launch. Lengths stay on the device: nothing is read back or waited for, and a call works under `torch.cuda.graph`
    once its shape has been called before capture.

    Args:
        q: [tokens, heads, head_dim], bfloat16 or float16; head_dim 64, 96, 128 or 256. Tokens may lie apart, as in
            QKV's output; the heads of one follow one another, and each token starts on 16 bytes.
        k_new, v_new: [tokens, kv_heads, head_dim], like q: written to the cache; heads is a multiple of kv_heads, by 16
            at most. Or None for both: the cache has the new tokens already.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim] of q's dtype, or E4M3 as float8_e4m3fn or uint8; equal
            strides, multiples of 16 bytes, the last 1; page_size is a multiple of 16.
        block_table: int32 [requests, pages a request]. Pages wholly before a window are not read.
        seq_lens: int32 [requests], tokens of a request with its new ones. Fewer than its new ones, such as 0, is
            padding: zeros come out, and nothing is written to the cache.
        query_start_loc: int32 [requests + 1]: where the new tokens of each request start. Rows of q from the last on
            belong to no request, and of out they are not written.
        max_query_len: new tokens of a request, at most.
        max_seq_len: tokens of a request, at most; by default as many as a row of block_table has pages for. It decides
            which kernel is quick, and nothing else; plans are kept by its next power of two.
        scale: 1 / sqrt(head_dim) by default.
        sinks: [heads], bfloat16, float16 or float32: a logit a head, in natural logarithms as others; -inf is none.
        window: how many tokens a token attends to, itself included; None: all.
        soft_cap: a logit s becomes soft_cap tanh(s / soft_cap).
        rope: [positions, rotary], bfloat16, float16 or float32: cosines, then sines, by which the first `rotary` values
            of q and of new keys are rotated; the outcome is rounded to q's dtype.
        rope_style: "neox", two halves; or "interleaved", neighbours.
        positions: int64 [tokens]; by default seq_lens - new tokens + i for a request's i-th.
        slot_mapping: int64 [tokens], page x page_size + place for each new key, -1: written nowhere. By default the
            block table says.
        mask: uint32 or int32 [tokens, 1 or 2]: bit j says that a new token attends to the j-th new token of its
            request, in the place of causal order. A row with nothing left to attend to is 0.
        k_scale, v_scale: float32, 1 or kv_heads elements on the device: what E4M3 keys and values are multiplied by.
        fp16_qk: sums of q k in fp16, beside float16 only.
        out: like q; written and returned.
        knobs: overrides of the kernel's knobs.

    Returns:
        [tokens, heads, head_dim], q's dtype.

    Raises:
        InputError: a device, dtype, shape, layout or number that kernels cannot take; nothing was launched.
        KnobError: a size or knob outside of their choices; more new tokens than a kernel takes.
        CaptureError: a kernel would have to be compiled or loaded during CUDA-graph capture.

    Under `torch.compile` it is `torch.ops.jitmx.attention`, which mutates caches and out; `knobs` are for eager code.

    Source: templates/attention/decode.cu.j2; reference: jitmx/kernels/attention/reference.py.
    """
    if type(q) is not torch.Tensor or torch.compiler.is_compiling():
        if knobs is not None:
            raise InputError("knobs cannot be traced through", "leave them out where the program is compiled")
        require_tensor("q", q)
        if out is None:
            out = q.new_empty(q.shape)
        torch.ops.jitmx.attention(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out, max_query_len, max_seq_len, scale, window, soft_cap, rope_style, fp16_qk,
        )  # fmt: skip
        return out
    return run_attention(
        q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
        rope, mask, k_scale, v_scale, out, max_query_len, max_seq_len, scale, window, soft_cap, rope_style, fp16_qk,
        knobs,
    )  # fmt: skip


def append_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    slot_mapping: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    rope_style: str = "neox",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> None:
    """Rotate new keys and write them and new values to the cache: what `attention` does first with many new tokens.

    Arguments are those of `attention`, and so are the errors. Under `torch.compile` it is `torch.ops.jitmx.append_kv`.
    """
    if type(k_new) is not torch.Tensor or torch.compiler.is_compiling():
        if knobs is not None:
            raise InputError("knobs cannot be traced through", "leave them out where the program is compiled")
        require_tensor("k_new", k_new)
        torch.ops.jitmx.append_kv(
            k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, rope,
            k_scale, v_scale, max_query_len, rope_style,
        )  # fmt: skip
        return
    run_append(
        k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, rope, k_scale,
        v_scale, max_query_len, rope_style, knobs,
    )  # fmt: skip


def _run(*given: Any) -> None:
    run_attention(*map(custom.plain, given))


def _fake(q: torch.Tensor, k_new: Any, v_new: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
    out = rest[10]
    custom.refuse_gradients(q=q, k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache, sinks=rest[5])
    if q.dim() != 3 or k_cache.dim() != 4:
        raise InputError(
            f"q is {describe(q)} and k_cache {describe(k_cache)}; they must be [tokens, heads, head_dim] "
            "and [pages, page_size, kv_heads, head_dim]"
        )
    if out.dtype is not q.dtype or out.shape != q.shape:
        raise InputError(f"out is {describe(out)}; it must be like q, {describe(q)}")


def _run_append(*given: Any) -> None:
    run_append(*map(custom.plain, given))


def _fake_append(k_new: torch.Tensor, v_new: torch.Tensor, *_rest: Any) -> None:
    custom.refuse_gradients(k_new=k_new, v_new=v_new)


_CACHES = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc"
custom.define(
    f"attention(Tensor q, Tensor? k_new, Tensor? v_new, {_CACHES}, Tensor? slot_mapping, Tensor? positions, "
    "Tensor? sinks, Tensor? rope, Tensor? mask, Tensor? k_scale, Tensor? v_scale, Tensor(c!) out, int max_query_len, "
    "int? max_seq_len, float? scale, int? window, float? soft_cap, str rope_style, bool fp16_qk) -> ()",
    _run,
    _fake,
)
custom.define(
    f"append_kv(Tensor k_new, Tensor v_new, {_CACHES}, Tensor? slot_mapping, Tensor? positions, Tensor? rope, "
    "Tensor? k_scale, Tensor? v_scale, int max_query_len, str rope_style) -> ()",
    _run_append,
    _fake_append,
)
