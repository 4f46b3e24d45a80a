"""Calls of `routing` on plain tensors: checked and planned once for each kind of call, then launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.errors import InputError, KnobError
from jitmx.kernels.routing.problem import TILES, RoutingProblem
from jitmx.ops import checks
from jitmx.ops.checks import names
from jitmx.ops.routing.plan import Call, Plan, Routing
from jitmx.quoting import short
from jitmx.runtime import card
from jitmx.runtime.plan import Plans

SCORING = ("softmax_topk", "softmax_all", "softmax_all_renorm")

_plans = Plans()


def kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What of a tensor plans depend on."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.get_device())


def _address(name: str, tensor: torch.Tensor | None) -> int:
    """Where a tensor lies, 0 for None; of one that an equal call had before, what the key does not say is checked."""
    if tensor is None:
        return 0
    found: int = tensor.data_ptr()
    if found & 15 or not tensor.is_contiguous():
        checks.require_layout(name, tensor)
    if tensor.requires_grad:
        checks.require_no_grad(name, tensor)
    return found


def _run(
    plan: Plan, given: tuple[int, ...], ids: torch.Tensor | None, epsilon: float, out: Routing | None,
    x: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """Launch; `given` are the addresses of x, weight, bias, norm and expert_map."""
    if out is None:
        out = plan.outputs(ids, plan.place)
    else:
        _check_out(out, plan.wanted, plan.device)
        if out.normalized is not None:  # which x may be, of the call before
            checks.require_apart(out.normalized, "pass another Routing", x=x)
    outputs = [0 if tensor is None else tensor.data_ptr() for tensor in out]
    for step in plan.steps:
        step.run(*given, *outputs, epsilon)
    return out


def run_route(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None,
    expert_map: torch.Tensor | None, k: int, scoring: str, epsilon: float, tile: int | None, local_experts: int | None,
    out: Routing | None = None, knobs: Mapping[str, Any] | None = None, normalized: bool = False,
) -> Routing:  # fmt: skip
    """`route` on plain tensors."""
    key: tuple[Any, ...] = ()
    plan: Plan | None = None
    try:
        key = (
            kind(x), kind(weight), kind(bias), kind(norm), kind(expert_map), k, scoring, tile, local_experts,
            type(k), type(tile), type(local_experts), normalized, tuple(knobs.items()) if knobs else (),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # what is no tensor, or no mapping, is refused below
        pass
    if plan is None:
        require_scoring(scoring)
        checks.require_whole(k=k)
        _check_matrix("x", x, tuple(checks.DTYPES) if weight is None else (torch.bfloat16, torch.float16))
        experts = _check_router(x, weight, bias, norm)
        require_norm(norm, normalized)
        call = _call(
            x.device, knobs, expert_map, local_experts, m=x.shape[0], experts=experts, k=k,
            h=8 if weight is None else x.shape[1], source="logits" if weight is None else "hidden",
            dtype=checks.DTYPES[x.dtype], bias="none" if bias is None else f"bias_{checks.DTYPES[bias.dtype]}",
            norm=norm is not None, normalized=normalized,
            scoring=scoring_of(scoring), tile=tile,
        )  # fmt: skip
        plan = _plans.remember(key, Plan(call))
    given = (
        _address("x", x), _address("weight", weight), _address("bias", bias), _address("norm", norm),
        _address("expert_map", expert_map),
    )  # fmt: skip
    checks.require_epsilon(epsilon)
    return _run(plan, given, None, epsilon, out, x)


def run_group(
    ids: torch.Tensor, experts: int, tile: int, expert_map: torch.Tensor | None, local_experts: int | None,
    out: Routing | None = None, knobs: Mapping[str, Any] | None = None,
) -> Routing:  # fmt: skip
    """`group_by_expert` on plain tensors."""
    key: tuple[Any, ...] = ()
    plan: Plan | None = None
    try:
        key = (
            kind(ids), kind(expert_map), experts, tile, local_experts, type(experts), type(tile), type(local_experts),
            tuple(knobs.items()) if knobs else (),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # what is no tensor, or no mapping, is refused below
        pass
    if plan is None:
        checks.require_whole(experts=experts)
        _check_matrix("ids", ids, (torch.int32,))
        call = _call(
            ids.device, knobs, expert_map, local_experts, m=ids.shape[0], experts=experts, k=ids.shape[1], h=8,
            source="ids", tile=tile,
        )  # fmt: skip
        plan = _plans.remember(key, Plan(call))
    _address("ids", ids)
    given = 0, 0, 0, 0, _address("expert_map", expert_map)
    return _run(plan, given, ids, 0.0, out._replace(ids=ids) if isinstance(out, Routing) else out)


def _call(
    device: torch.device, knobs: Mapping[str, Any] | None, expert_map: torch.Tensor | None, local_experts: int | None,
    *, tile: int | None, **fields: Any,
) -> Call:  # fmt: skip
    experts = fields["experts"]
    if tile is not None or fields["source"] == "ids":
        require_tile(tile)
    else:
        refuse_without_tile(expert_map=expert_map, local_experts=local_experts)
    problem = RoutingProblem(mapped=expert_map is not None, tile=tile or 0, **fields)
    if expert_map is not None:
        _check_vector("expert_map", expert_map, experts, (torch.int32,), device)
    local = experts if local_experts is None else local_experts
    if type(local) is not int or not 1 <= local <= experts:
        raise InputError(
            f"local_experts={short(local)} is not a whole number from 1 to the {experts} experts there are"
        )
    if expert_map is None and local != experts:
        raise InputError(f"local_experts={local} of {experts} needs an expert_map that says which they are")
    return Call(problem, local, card.number(device), checks.require_knobs(knobs))


def require_tile(tile: Any) -> None:
    """Raise KnobError unless lists are made with tiles of so many rows."""
    if type(tile) is not int or tile not in TILES[1:]:
        raise KnobError(f"tile={short(tile)} is not one of {', '.join(map(str, TILES[1:]))}")


def refuse_without_tile(**given: Any) -> None:
    """Raise InputError for what says how lists are made, where none are."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} is for the lists, and tile is None", f"give tile, or leave {name} out")


def require_norm(norm: torch.Tensor | None, normalized: bool) -> None:
    """Raise InputError unless `normalized` is a bool, and false where there is no RMSNorm."""
    if not isinstance(normalized, bool):
        raise InputError(f"normalized={normalized!r} is not True or False")
    if normalized and norm is None:
        raise InputError("normalized=True asks for what RMSNorm makes of x, and norm is None", "pass its weight")


def require_scoring(scoring: str) -> None:
    """Raise KnobError unless there is such a scoring."""
    if scoring not in SCORING:
        raise KnobError(f"scoring={scoring!r} is not one of {', '.join(SCORING)}")


def scoring_of(scoring: str) -> str:
    """The knob of a scoring: softmax over all that is renormalized is softmax over the chosen."""
    return "softmax_all" if scoring == "softmax_all" else "softmax_topk"


def logits_type(dtype: torch.dtype) -> str:
    """The knob of a type of logits."""
    return checks.DTYPES[dtype]


def _check_matrix(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    checks.require_cuda(name, tensor)
    if tensor.dtype not in dtypes or tensor.dim() != 2:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must have two dimensions and be {names(dtypes)}")
    _address(name, tensor)


def _check_vector(
    name: str, tensor: torch.Tensor, size: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    checks.require_cuda(name, tensor)
    if tensor.shape != (size,) or tensor.dtype not in dtypes or tensor.device != device:
        raise InputError(f"{name} is {checks.describe(tensor)}; it must be {names(dtypes)} [{size}] on {device}")
    _address(name, tensor)


def _check_router(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None
) -> int:
    """How many experts there are."""
    if weight is None:
        refuse_beside_logits(bias=bias, norm=norm)
        return int(x.shape[1])
    _check_matrix("weight", weight, (torch.bfloat16,))
    if weight.shape[1] != x.shape[1] or weight.device != x.device:
        raise InputError(f"weight is {checks.describe(weight)} and x {checks.describe(x)}; both need h values a row")
    if bias is not None:
        _check_vector("bias", bias, weight.shape[0], tuple(checks.DTYPES), x.device)
    if norm is not None:
        _check_vector("norm", norm, x.shape[1], (x.dtype,), x.device)
    return int(weight.shape[0])


def refuse_beside_logits(**tensors: torch.Tensor | None) -> None:
    """Raise InputError for what goes with hidden states, where x are logits."""
    for name, tensor in tensors.items():
        if tensor is not None:
            raise InputError(f"{name} is for hidden states, and without a weight x are logits", f"leave {name} out")


def _check_out(out: object, wanted: Routing, device: int) -> None:
    if not isinstance(out, Routing):
        raise InputError(f"out is a {type(out).__name__}, not a Routing", "pass what an equal call returned")
    for name, tensor, like in zip(Routing._fields, out, wanted, strict=True):
        if tensor is None and like is None:
            continue
        if tensor is None or like is None:
            found = "None" if tensor is None else "a tensor"
            raise InputError(f"out.{name} is {found}, unlike what this call writes", "pass what an equal call returned")
        checks.require_tensor(f"out.{name}", tensor)
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.get_device() != device:
            raise InputError(
                f"out.{name} is {checks.describe(tensor)}; this call writes {names((like.dtype,))} {list(like.shape)} "
                f"on the device of its inputs"
            )
        if tensor.data_ptr() & 15 or not tensor.is_contiguous():
            checks.require_layout(f"out.{name}", tensor)
