"""`jitmx.route` and `jitmx.group_by_expert`: which experts each token takes, and lists of tokens by expert."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from jitmx.errors import InputError, KnobError
from jitmx.kernels import routing
from jitmx.kernels.routing import RoutingProblem
from jitmx.ops import checks, scratch
from jitmx.ops.routing_plan import Call, Plan, Routing

__all__ = ["SCORING", "Routing", "group_by_expert", "route"]

SCORING = ("softmax_topk", "softmax_all", "softmax_all_renorm")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# By everything that decides the launches: calls that were checked and planned before. Row counts vary from call to call
# where prompts are read: what is kept for them has a limit.
_plans: dict[tuple[Any, ...], Plan] = {}
_MOST_PLANS = 1024


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.get_device())


def _seen(key: tuple[Any, ...], **tensors: torch.Tensor | None) -> Plan | None:
    """The plan of an equal call before; of its tensors only what the key does not say is checked again."""
    plan = _plans.get(key)
    if plan is not None:
        for name, tensor in tensors.items():
            if tensor is not None:
                if tensor.data_ptr() & 15 or not tensor.is_contiguous():
                    checks.require_layout(name, tensor)
                if tensor.requires_grad:
                    checks.require_no_grad(name, tensor)
    return plan


def _remember(key: tuple[Any, ...], call: Call) -> Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = Plan(call)
    return plan


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def _run(
    plan: Plan, x: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    norm: torch.Tensor | None, expert_map: torch.Tensor | None, ids: torch.Tensor | None, epsilon: float,
    out: Routing | None,
) -> Routing:  # fmt: skip
    if out is None:
        out = plan.outputs(ids, torch.device("cuda", plan.device))
    else:
        _check_out(out, plan.wanted, plan.device)
    if plan.device == torch._C._cuda_getDevice():
        _launch(plan, out, _address(x), _address(weight), _address(bias), _address(norm), _address(expert_map), epsilon)
    else:
        with torch.cuda.device(plan.device):
            _launch(
                plan, out, _address(x), _address(weight), _address(bias), _address(norm), _address(expert_map), epsilon
            )
    return out


def _launch(
    plan: Plan, out: Routing, x: int, weight: int, bias: int, norm: int, expert_map: int, epsilon: float
) -> None:
    stream, outputs = _raw_stream(plan.device), [_address(tensor) for tensor in out]
    for step in plan.steps:
        memory = scratch.memory(step.scratch, step.kind, plan.device, stream) if step.scratch else None
        step.launcher(
            stream, x, weight, bias, norm, expert_map, *outputs, plan.local, plan.capacity, _address(memory), epsilon,
            plan.m, plan.h,
        )  # fmt: skip


def route(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax_topk",
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    tile: int | None = None,
    expert_map: torch.Tensor | None = None,
    local_experts: int | None = None,
    out: Routing | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> Routing:
    """The k experts of each token and their weights; with `tile`, also the lists that grouped products read.

    Logits are x W^T + bias with sums in fp32; with `norm`, x is RMSNorm's input: (x * norm) W^T is scaled by
    rsqrt(mean(x^2) + epsilon), x * norm being rounded to bfloat16 once (float16: taken to 16 bits). The larger logit
    comes first, then the lower id; a NaN is chosen only where numbers run out, and counts as -inf in the softmax.

    Up to 64 tokens are one launch. Runs on the current stream and waits for nothing; works under `torch.cuda.graph`
    once the shape has been called before capture.

    Args:
        x: hidden states [m, h], bfloat16 or float16, h a multiple of 8; or, without `weight`, logits [m, experts],
            bfloat16, float16 or float32.
        weight: [experts, h], bfloat16.
        bias: [experts], bfloat16, float16 or float32; only with `weight`.
        k: experts a token, at most 8.
        scoring: what the weights are: "softmax_topk", the softmax over the k chosen; "softmax_all", over all experts;
            "softmax_all_renorm", that divided by its sum over the chosen, which is the same as "softmax_topk".
        norm: [h], x's dtype: RMSNorm's weight; only with `weight`.
        tile: rows of a tile of the schedule at most: 8, 16, 32, 64, 128 or 256.
        expert_map: int32 [experts], the local id of each expert or -1 where it is elsewhere; pairs of experts that are
            elsewhere are left out of the lists. `ids` stay as they are.
        local_experts: how many local ids there are; all experts by default.
        out: what an equal call returned, written again.
        knobs: overrides of the knobs of the first kernel.

    Raises:
        InputError: a device, dtype, shape or layout that the kernels cannot take; nothing was launched.
        KnobError: k, scoring, tile or knobs outside their choices.
        CaptureError: a kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/routing/route.cu.j2 and topk.cu.j2; reference: jitmx/kernels/routing_cases.py.
    """
    key: tuple[Any, ...] = ()
    with contextlib.suppress(AttributeError, TypeError):  # what is no tensor is refused below
        key = (
            _kind(x), _kind(weight), _kind(bias), _kind(norm), _kind(expert_map), k, scoring, tile, local_experts,
            tuple(knobs.items()) if knobs else (),
        )  # fmt: skip
    plan = _seen(key, x=x, weight=weight, bias=bias, norm=norm, expert_map=expert_map)
    if plan is None:
        if scoring not in SCORING:
            raise KnobError(f"scoring={scoring!r} is not one of {', '.join(SCORING)}")
        _check_matrix("x", x, tuple(_DTYPES) if weight is None else (torch.bfloat16, torch.float16))
        experts = _check_router(x, weight, bias, norm)
        call = _call(
            x.device, knobs, expert_map, local_experts, m=x.shape[0], experts=experts, k=k,
            h=8 if weight is None else x.shape[1], source="logits" if weight is None else "hidden",
            dtype=_DTYPES[x.dtype], bias="none" if bias is None else f"bias_{_DTYPES[bias.dtype]}",
            norm=norm is not None, scoring="softmax_all" if scoring == "softmax_all" else "softmax_topk", tile=tile,
        )  # fmt: skip
        plan = _remember(key, call)
    return _run(plan, x, weight, bias, norm, expert_map, None, epsilon, out)


def group_by_expert(
    ids: torch.Tensor,
    experts: int,
    *,
    tile: int,
    expert_map: torch.Tensor | None = None,
    local_experts: int | None = None,
    out: Routing | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> Routing:
    """The lists that grouped products read, for ids that are given. One launch.

    Args:
        ids: int32 [m, k], k at most 8; an id that names no expert is left out.
        experts: how many there are, at most 512.
        tile, expert_map, local_experts, out, knobs: as for `route`.

    Returns:
        `ids` itself, no weights, and the lists.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take; nothing was launched.
        KnobError: experts, tile or knobs outside their choices.

    Source: templates/routing/sort.cu.j2; reference: jitmx/kernels/routing_cases.py.
    """
    key: tuple[Any, ...] = ()
    with contextlib.suppress(AttributeError, TypeError):
        key = _kind(ids), _kind(expert_map), experts, tile, local_experts, tuple(knobs.items()) if knobs else ()
    plan = _seen(key, ids=ids, expert_map=expert_map)
    if plan is None:
        _check_matrix("ids", ids, (torch.int32,))
        call = _call(
            ids.device, knobs, expert_map, local_experts, m=ids.shape[0], experts=experts, k=ids.shape[1], h=8,
            source="ids", tile=tile,
        )  # fmt: skip
        plan = _remember(key, call)
    return _run(plan, None, None, None, None, expert_map, ids, 0.0, out if out is None else out._replace(ids=ids))


def _call(
    device: torch.device, knobs: Mapping[str, Any] | None, expert_map: torch.Tensor | None, local_experts: int | None,
    *, tile: int | None, **fields: Any,
) -> Call:  # fmt: skip
    experts = fields["experts"]
    if tile is None and expert_map is not None:
        raise InputError("expert_map is for the lists, and tile is None; give tile, or leave expert_map out")
    if tile == 0 or (tile is None and fields["source"] == "ids"):
        raise KnobError(f"tile={tile} is not one of {', '.join(map(str, routing.TILES[1:]))}")
    if expert_map is not None:
        _check_vector("expert_map", expert_map, experts, (torch.int32,), device)
    local = experts if local_experts is None else local_experts
    if not 1 <= local <= experts:
        raise InputError(f"local_experts={local} is not between 1 and the {experts} experts there are")
    if expert_map is None and local != experts:
        raise InputError(f"local_experts={local} of {experts} needs an expert_map that says which they are")
    problem = RoutingProblem(mapped=expert_map is not None, tile=tile or 0, **fields)
    return Call(problem, local, device.index, tuple(sorted((knobs or {}).items())))


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_matrix(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    checks.require_cuda(name, tensor)
    if tensor.dtype not in dtypes or tensor.dim() != 2:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must have two dimensions and be {_names(dtypes)}")
    checks.require_layout(name, tensor)
    checks.require_no_grad(name, tensor)


def _check_vector(
    name: str, tensor: torch.Tensor, size: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    checks.require_cuda(name, tensor)
    if tensor.shape != (size,) or tensor.dtype not in dtypes or tensor.device != device:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must be {_names(dtypes)} [{size}] on {device}")
    checks.require_layout(name, tensor)
    checks.require_no_grad(name, tensor)


def _check_router(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None
) -> int:
    """How many experts there are."""
    if weight is None:
        for name, tensor in (("bias", bias), ("norm", norm)):
            if tensor is not None:
                raise InputError(f"{name} is for hidden states, and without a weight x are logits: leave {name} out")
        return int(x.shape[1])
    _check_matrix("weight", weight, (torch.bfloat16,))
    if weight.shape[1] != x.shape[1] or weight.device != x.device:
        raise InputError(f"weight is {checks.describe(weight)} and x {checks.describe(x)}; both need h values a row")
    if bias is not None:
        _check_vector("bias", bias, weight.shape[0], tuple(_DTYPES), x.device)
    if norm is not None:
        _check_vector("norm", norm, x.shape[1], (x.dtype,), x.device)
    return int(weight.shape[0])


def _check_out(out: Routing, wanted: Routing, device: int) -> None:
    for name, tensor, like in zip(Routing._fields, out, wanted, strict=True):
        if tensor is None and like is None:
            continue
        if tensor is None or like is None:
            found = "None" if tensor is None else "a tensor"
            raise InputError(f"out.{name} is {found}, unlike what this call writes; pass what an equal call returned")
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.get_device() != device:
            raise InputError(
                f"out.{name} is {checks.describe(tensor)}; this call writes {_names((like.dtype,))} {list(like.shape)} "
                f"on the device of its inputs"
            )
        if tensor.data_ptr() & 15 or not tensor.is_contiguous():
            checks.require_layout(f"out.{name}", tensor)
