"""Calls of `attention` on plain tensors: checked and planned once for each kind of call, then launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.ops.attention.checks import Numbers, Tensors, check, refuse, require_room
from jitmx.ops.attention.plan import Plan
from jitmx.runtime.plan import Plans

_plans = Plans()
_appends = Plans()


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor plans depend on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _any_gradient(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def run_attention(
    q: torch.Tensor, k_new: torch.Tensor | None, v_new: torch.Tensor | None, k_cache: torch.Tensor,
    v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor | None, positions: torch.Tensor | None, sinks: torch.Tensor | None,
    rope: torch.Tensor | None, mask: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
    out: torch.Tensor | None, max_query_len: int, max_seq_len: int | None, scale: float | None, window: int | None,
    soft_cap: float | None, rope_style: str, fp16_qk: bool, knobs: Mapping[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`attention` on plain tensors."""
    key: tuple[Any, ...] = ()
    plan: Plan | None = None
    try:
        key = (  # `_kind`, without the calls
            q.shape, q.stride(), q.dtype, q.get_device(),
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.get_device(),
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.get_device(),
            block_table.shape, block_table.stride(), block_table.dtype, block_table.get_device(),
            seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device(),
            query_start_loc.shape, query_start_loc.stride(), query_start_loc.dtype, query_start_loc.get_device(),
            None if k_new is None else (k_new.shape, k_new.stride(), k_new.dtype, k_new.get_device()),
            None if v_new is None else (v_new.shape, v_new.stride(), v_new.dtype, v_new.get_device()),
            None if slot_mapping is None else _kind(slot_mapping), None if positions is None else _kind(positions),
            None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.get_device()),
            None if rope is None else (rope.shape, rope.stride(), rope.dtype, rope.get_device()),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.get_device()),
            None if k_scale is None else (k_scale.shape, k_scale.stride(), k_scale.dtype, k_scale.get_device()),
            None if v_scale is None else (v_scale.shape, v_scale.stride(), v_scale.dtype, v_scale.get_device()),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            max_query_len if max_query_len <= 64 else (max_query_len - 1).bit_length(),
            None if max_seq_len is None else (max_seq_len - 1).bit_length(),
            scale, window, soft_cap, rope_style, fp16_qk, tuple(knobs.items()) if knobs else (),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # what is no tensor is refused below
        pass
    if plan is None:
        given = Tensors(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out,
        )  # fmt: skip
        numbers = Numbers(max_query_len, max_seq_len, scale, window, soft_cap, rope_style, fp16_qk)
        call = check(given, numbers, knobs)
        refuse(given)
        plan = _plans.remember(key, Plan(call))
    if max_seq_len is not None and max_seq_len > plan.capacity:
        require_room(max_seq_len, plan.capacity)
    if out is None:
        out = q.new_empty(*plan.shape)  # numbers: torch takes twice the time to read a torch.Size
    if not plan.steps:
        return out
    q_at, k_cache_at, v_cache_at, out_at = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
    k_at = v_at = 0
    if k_new is not None and v_new is not None:
        k_at, v_at = k_new.data_ptr(), v_new.data_ptr()
    rope_at = 0 if rope is None else rope.data_ptr()
    if (
        (q_at | k_at | v_at | k_cache_at | v_cache_at | out_at | rope_at) & 15
        or out_at in (q_at, k_at, v_at)
        or (k_at and k_cache_at == v_cache_at)
        or (torch.is_grad_enabled() and _any_gradient(q, k_new, v_new, k_cache, v_cache, sinks, rope, out))
    ):
        given = Tensors(
            q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks,
            rope, mask, k_scale, v_scale, out,
        )  # fmt: skip
        refuse(given)
    given_at = (
        q_at, k_at, v_at, k_cache_at, v_cache_at, block_table.data_ptr(), seq_lens.data_ptr(),
        query_start_loc.data_ptr(), 0 if slot_mapping is None else slot_mapping.data_ptr(),
        0 if positions is None else positions.data_ptr(), 0 if sinks is None else sinks.data_ptr(), rope_at,
        0 if mask is None else mask.data_ptr(), 0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(), out_at, *plan.numbers,
    )  # fmt: skip
    for step in plan.steps:
        step.run(*given_at)
    return out


def run_append(
    k_new: torch.Tensor, v_new: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, slot_mapping: torch.Tensor | None,
    positions: torch.Tensor | None, rope: torch.Tensor | None, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, max_query_len: int, rope_style: str, knobs: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """`append_kv` on plain tensors."""
    given = Tensors(
        None, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, None,
        rope, None, k_scale, v_scale, None,
    )  # fmt: skip
    key: tuple[Any, ...] = ()
    plan: Plan | None = None
    try:
        kinds = tuple(None if tensor is None else _kind(tensor) for tensor in given)
        key = *kinds, max_query_len, rope_style, tuple(knobs.items()) if knobs else ()
        plan = _appends.get(key)
    except (AttributeError, TypeError):  # what is no tensor is refused below
        pass
    call = None
    if plan is None:
        call = check(given, Numbers(max_query_len, None, None, None, None, rope_style, False), knobs)
    refuse(given)
    if plan is None:
        assert call is not None
        plan = _appends.remember(key, Plan(call, only_append=True))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    for step in plan.steps:
        step.run(*addresses, *plan.numbers)
