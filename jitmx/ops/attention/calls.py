"""Calls of `attention` on plain tensors: checked and planned once for each kind of call, then launched."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from jitmx.ops.attention.checks import RARE, Numbers, Tensors, check, refuse
from jitmx.ops.attention.plan import Plan
from jitmx.runtime.alike import alike
from jitmx.runtime.plan import Plans


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor plans depend on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_plans = Plans()
_appends = Plans()
# Of the last call with such numbers, and with or without rare tensors: whether tensors are like its own, the same of
# rare ones, its plan, and whether a gradient is required.
recent: Plans = Plans()


class _Absent(torch.Tensor):  # type: ignore[misc]
    """In the place of a tensor that a call lacks: of a type that no caller's tensor has."""


# One of each.
ABSENT = Tensors(*(torch.empty(0, device="cpu").as_subclass(_Absent) for _ in Tensors._fields))
# Addresses that launches take where a call lacks all in `RARE`.
_usual = operator.itemgetter(*(place for place, name in enumerate(Tensors._fields) if name not in RARE))


def run_attention(
    given: Tensors, numbers: Numbers, knobs: Mapping[str, Any] | None = None, *, keep: bool = False
) -> torch.Tensor:
    """`attention` on plain tensors, by the plan of such a call or a new one; with `keep` calls like it find it in
    `recent`."""
    (
        q, k_new, v_new, k_cache, v_cache, block_table, seq_lens, query_start_loc, slot_mapping, positions, sinks, rope,
        mask, k_scale, v_scale, out,
    ) = given  # fmt: skip
    queries, longest = numbers.max_query_len, numbers.max_seq_len
    key: tuple[Any, ...] = ()
    plan: Plan | None = None
    try:
        assert q is not None
        key = (  # `_kind`, without the calls
            q.shape, q.stride(), q.dtype, q.device,
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device,
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device,
            block_table.shape, block_table.stride(), block_table.dtype, block_table.device,
            seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device,
            query_start_loc.shape, query_start_loc.stride(), query_start_loc.dtype, query_start_loc.device,
            None if k_new is None else (k_new.shape, k_new.stride(), k_new.dtype, k_new.device),
            None if v_new is None else (v_new.shape, v_new.stride(), v_new.dtype, v_new.device),
            None if slot_mapping is None else _kind(slot_mapping), None if positions is None else _kind(positions),
            None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device),
            None if rope is None else (rope.shape, rope.stride(), rope.dtype, rope.device),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
            None if k_scale is None else (k_scale.shape, k_scale.stride(), k_scale.dtype, k_scale.device),
            None if v_scale is None else (v_scale.shape, v_scale.stride(), v_scale.dtype, v_scale.device),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            queries if queries <= 64 else (queries - 1).bit_length(),
            None if longest is None else (longest - 1).bit_length(),
            *numbers[2:], tuple(knobs.items()) if knobs else (),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # what is no tensor, or no number, is refused below
        pass
    if plan is None or (longest is not None and not plan.least <= longest <= plan.most):
        call = check(given, numbers, knobs)
        refuse(given)
        plan = _plans.remember(key, Plan(call))
    if keep and not knobs:
        _keep(given, numbers, plan)
    assert q is not None
    if out is None:
        out = q.new_empty(*plan.shape)
    if plan.run is not None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        addresses[-1] = out.data_ptr()
        if torch.is_grad_enabled() or _lie_wrong(plan, *addresses):
            refuse(given._replace(out=out))
        plan.run(*(addresses if plan.rare else _usual(addresses)))
    return out


def _lie_wrong(
    plan: Plan, q: int, k: int, v: int, k_cache: int, v_cache: int, _table: int, _lengths: int, _starts: int,
    _slots: int, _positions: int, _sinks: int, rope: int, _mask: int, _k_scale: int, _v_scale: int, out: int,
) -> bool:  # fmt: skip
    """Whether addresses may be what `refuse` refuses."""
    astray = bool((q | k | v | k_cache | v_cache | rope | out) & 15)
    return astray or plan.may_overlap(out, q, k, v) or k_cache == v_cache


def _keep(given: Tensors, numbers: Numbers, plan: Plan) -> None:
    """Note in `recent` what calls like this one need."""
    usual: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, tensor, absent in zip(Tensors._fields, given, ABSENT, strict=True):
        (others if name in RARE else usual).append(absent if tensor is None else tensor)
    rare = plan.rare
    gradient = any(tensor is not None and tensor.requires_grad for tensor in given)
    recent.remember(
        (numbers.max_query_len, *numbers[2:], type(numbers.max_seq_len), rare, None),
        (alike(usual), alike(others) if rare else None, plan, gradient),
    )


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
    except (AttributeError, TypeError, RuntimeError):  # what is no tensor, or no number, is refused below
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
        step.run(*(addresses if plan.rare else _usual(addresses)))
