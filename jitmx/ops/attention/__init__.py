"""`jitmx.attention` and `jitmx.append_kv`: attention of new tokens to a paged cache and to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor  # where every call looks it up: torch's own attributes are slow

from jitmx.errors import InputError
from jitmx.ops import custom
from jitmx.ops.attention.calls import ABSENT, recent, run_append, run_attention
from jitmx.ops.attention.checks import ROPE_STYLES, Numbers, Tensors, refuse
from jitmx.ops.checks import describe, require_tensor
from jitmx.ops.custom import is_exporting, is_tracing

__all__ = ["ROPE_STYLES", "append_kv", "attention"]

_, _NO_K, _NO_V, _, _, _, _, _, _NO_SLOTS, _NO_POSITIONS, _NO_SINKS, _NO_ROPE, _NO_MASK, *_, _NO_OUT = ABSENT
_NO_K_SCALE, _NO_V_SCALE = ABSENT.k_scale, ABSENT.v_scale


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
    early: bool = False,
    out: torch.Tensor | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of each request to its tokens in the cache and to one another.

    Logits are q k times `scale`, capped, then masked; a sink joins the softmax's sum and gives nothing. Sums are in
    fp32. Rotary embedding and cache write are part of it, and a new key counts as the cache keeps it. Where the new
    tokens of every request times heads / kv_heads are 128 at most (of head_dim 256: as shared memory holds), all is one
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
        query_start_loc: int32 [requests + 1]: where the new tokens of each request start, from 0 on. Rows of q from
            the last on belong to no request, and of out they are not written.
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
        early: whether all but q, k_new and v_new, old keys and values among them, may be read while launches before
            this one are still at work on the stream (programmatic dependent launch, sm_90 and newer). That is quicker,
            and right where an ordinary launch, such as one of torch, lies between this one and the last that writes any
            of these. By default all launches before this one end first.
        out: like q; written and returned. It must not overlap q, k_new or v_new; it may lie beside them in a matrix.
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
    if type(q) is not Tensor or is_tracing() or is_exporting():
        if knobs is not None:
            raise InputError("knobs cannot be traced through", "leave them out where the program is compiled")
        require_tensor("q", q)
        if out is None:
            out = q.new_empty(q.shape)
        torch.ops.jitmx.attention(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out, max_query_len, max_seq_len, scale, window, soft_cap, rope_style, fp16_qk,
            early,
        )  # fmt: skip
        return out
    # The warm path: one look-up by the numbers, and one question to C whether the tensors are like those of that call.
    rare = not (positions is None and mask is None and k_scale is None and v_scale is None)
    try:
        usual, others, plan, doubt = recent[
            max_query_len, scale, window, soft_cap, rope_style, fp16_qk, early, type(max_seq_len), rare, knobs
        ]
        known = usual(
            q, _NO_K if k_new is None else k_new, _NO_V if v_new is None else v_new, k_cache, v_cache, block_table,
            seq_lens, query_start_loc, _NO_SLOTS if slot_mapping is None else slot_mapping,
            _NO_SINKS if sinks is None else sinks, _NO_ROPE if rope is None else rope, _NO_OUT if out is None else out,
        ) and (max_seq_len is None or plan.least <= max_seq_len <= plan.most)  # fmt: skip
        if rare and known:
            known = others(
                _NO_POSITIONS if positions is None else positions, _NO_MASK if mask is None else mask,
                _NO_K_SCALE if k_scale is None else k_scale, _NO_V_SCALE if v_scale is None else v_scale,
            )  # fmt: skip
    except (KeyError, TypeError):  # a call that is new, or wrong
        known = False
    if not known:
        given = Tensors(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out,
        )  # fmt: skip
        numbers = Numbers(max_query_len, max_seq_len, scale, window, soft_cap, rope_style, fp16_qk, early)
        return run_attention(given, numbers, knobs, keep=True)
    if out is None:
        out = q.new_empty(*plan.shape)  # numbers: torch takes twice the time to read a torch.Size
    if plan.run is None:
        return out
    q_at, k_cache_at, v_cache_at, out_at = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
    k_at, v_at = 0 if k_new is None else k_new.data_ptr(), 0 if v_new is None else v_new.data_ptr()
    rope_at = 0 if rope is None else rope.data_ptr()
    addresses: tuple[int, ...] = (
        q_at, k_at, v_at, k_cache_at, v_cache_at, block_table.data_ptr(), seq_lens.data_ptr(),
        query_start_loc.data_ptr(), 0 if slot_mapping is None else slot_mapping.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), rope_at, out_at,
    )  # fmt: skip
    if rare:
        addresses = (
            *addresses[:9], 0 if positions is None else positions.data_ptr(), *addresses[9:11],
            0 if mask is None else mask.data_ptr(), 0 if k_scale is None else k_scale.data_ptr(),
            0 if v_scale is None else v_scale.data_ptr(), out_at,
        )  # fmt: skip
    last = plan.last.get(k_cache_at)
    if last is not None and last[0] == addresses and not doubt:  # then they were looked at
        packed = last[1]
        if packed is not None:
            packed()
        else:
            plan.again(k_cache_at, last)
        return out
    doubt = doubt or (k_at and k_cache_at == v_cache_at)
    if (
        doubt
        or (q_at | k_at | v_at | k_cache_at | v_cache_at | out_at | rope_at) & 15
        or plan.may_overlap(out_at, q_at, k_at, v_at)
    ):
        refuse(Tensors(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out,
        ))  # fmt: skip
    if last is None:
        plan.make_room()
    plan.last[k_cache_at] = addresses, None, 1
    plan.run(*addresses)
    return out


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

    Arguments are those of `attention`. Under `torch.compile` it is `torch.ops.jitmx.append_kv`.

    Raises:
        InputError, KnobError, CaptureError: as `attention` does.

    Source: templates/attention/append.cu.j2; reference: jitmx/kernels/attention/reference.py.
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
    count = len(Tensors._fields)
    run_attention(Tensors(*map(custom.plain, given[:count])), Numbers(*given[count:]))


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
    "int? max_seq_len, float? scale, int? window, float? soft_cap, str rope_style, bool fp16_qk, "
    "bool early=False) -> ()",
    _run,
    _fake,
)
custom.define(
    f"append_kv(Tensor k_new, Tensor v_new, {_CACHES}, Tensor? slot_mapping, Tensor? positions, Tensor? rope, "
    "Tensor? k_scale, Tensor? v_scale, int max_query_len, str rope_style) -> ()",
    _run_append,
    _fake_append,
)
