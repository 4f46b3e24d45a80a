"""`jitmx.route` and `jitmx.group_by_expert`: which experts each token takes, and lists of tokens by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.errors import InputError, KnobError
from jitmx.kernels.routing.problem import MAX_K
from jitmx.ops import checks, custom
from jitmx.ops.routing.calls import (
    SCORING,
    refuse_beside_logits,
    refuse_without_tile,
    require_norm,
    require_scoring,
    require_tile,
    run_group,
    run_route,
)
from jitmx.ops.routing.plan import Routing

__all__ = ["SCORING", "Routing", "group_by_expert", "route"]


def route(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax_topk",
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    normalized: bool = False,
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
        normalized: whether x * rsqrt(mean(x^2) + epsilon) * norm is written as well, rounded once: what the experts
            read.
        tile: rows of a tile of the schedule at most: 8, 16, 32, 48, 64, 128, 192 or 320.
        expert_map: int32 [experts], the local id of each expert or -1 where it is elsewhere; pairs of experts that are
            elsewhere are left out of the lists. `ids` stay as they are.
        local_experts: how many local ids there are, beside `expert_map`; all experts by default.
        out: what an equal call returned, written again; x may not be its `normalized`.
        knobs: overrides of the knobs of the first kernel.

    Returns:
        ids and weights [m, k], and with `tile` the lists.

    Raises:
        InputError: a device, dtype, shape or layout that the kernels cannot take; nothing was launched.
        KnobError: k, scoring, tile or knobs outside their choices.
        CaptureError: a kernel would have to be compiled or loaded during CUDA-graph capture.

    Under `torch.compile` it is `torch.ops.jitmx.route`, `route_normalized`, `topk` or `route_lists`; `out` and `knobs`
    are for eager code, and so is `normalized` beside `tile`.

    Source: templates/routing/route.cu.j2 and topk.cu.j2; reference: jitmx/kernels/routing/cases.py.
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        _refuse_eager_only(out, knobs)
        return _route_traced(x, weight, bias, norm, expert_map, k, scoring, epsilon, tile, local_experts, normalized)
    return run_route(
        x, weight, bias, norm, expert_map, k, scoring, epsilon, tile, local_experts, out, knobs, normalized
    )


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
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Under `torch.compile` it is `torch.ops.jitmx.group_by_expert`; `out` and `knobs` are for eager code.

    Source: templates/routing/sort.cu.j2; reference: jitmx/kernels/routing/cases.py.
    """
    if type(ids) is not torch.Tensor or torch.compiler.is_compiling():
        _refuse_eager_only(out, knobs)
        checks.require_tensor("ids", ids)
        return Routing(ids, None, *torch.ops.jitmx.group_by_expert(ids, experts, tile, expert_map, local_experts))
    return run_group(ids, experts, tile, expert_map, local_experts, out, knobs)


def _refuse_eager_only(out: Routing | None, knobs: Mapping[str, Any] | None) -> None:
    for name, value in (("out", out), ("knobs", knobs)):
        if value is not None:
            raise InputError(
                f"{name} cannot be traced through", "leave it out where the program is compiled or exported"
            )


def _route_traced(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None,
    expert_map: torch.Tensor | None, k: int, scoring: str, epsilon: float, tile: int | None, local_experts: int | None,
    normalized: bool,
) -> Routing:  # fmt: skip
    """`route` as an operator, which can be traced through."""
    checks.require_tensor("x", x)
    require_norm(norm, normalized)
    if tile is not None:
        if normalized:
            raise InputError(
                "normalized beside tile cannot be traced through",
                "leave tile out, and pass the ids to jitmx.group_by_expert",
            )
        return Routing(
            *torch.ops.jitmx.route_lists(x, weight, bias, norm, expert_map, k, scoring, epsilon, tile, local_experts)
        )
    refuse_without_tile(expert_map=expert_map, local_experts=local_experts)
    if weight is None:
        refuse_beside_logits(bias=bias, norm=norm)
        ids, weights = torch.ops.jitmx.topk(x, k, scoring)
    elif normalized:
        ids, weights, hidden = torch.ops.jitmx.route_normalized(x, weight, bias, norm, k, scoring, epsilon)
        return Routing(ids, weights, None, None, None, None, hidden)
    else:
        ids, weights = torch.ops.jitmx.route(x, weight, bias, norm, k, scoring, epsilon)
    return Routing(ids, weights, None, None, None, None)


def _new_routing(
    x: torch.Tensor, weight: torch.Tensor | None, k: int, scoring: str, tile: int | None, local_experts: int | None,
    normalized: bool,
) -> Routing:  # fmt: skip
    """What a call writes, not written yet."""
    require_scoring(scoring)
    experts = x.shape[-1] if weight is None else weight.shape[0]
    if x.dim() != 2:
        raise InputError(f"x is {checks.describe(x)}; it must have two dimensions")
    if not 1 <= k <= min(MAX_K, experts):
        raise KnobError(f"k={k} is not 1 to {min(MAX_K, experts)}, of {experts} experts")
    ids, weights = (x.new_empty((x.shape[0], k), dtype=dtype) for dtype in (torch.int32, torch.float32))
    lists: tuple[torch.Tensor | None, ...] = None, None, None, None
    if tile is not None:
        lists = _new_lists(x, x.shape[0], k, experts if local_experts is None else local_experts, tile)
    return Routing(ids, weights, *lists)._replace(normalized=torch.empty_like(x) if normalized else None)


def _new_lists(like: torch.Tensor, m: Any, k: int, local: int, tile: int) -> tuple[torch.Tensor, ...]:
    """Pairs, offsets, schedule and tiles that are not written yet; `m` may be unknown."""
    require_tile(tile)
    pairs = m * k
    # routing.capacity, without asking which of the two is less.
    capacity = (pairs + torch.sym_min(local, pairs) * (tile - 1)) // tile
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in ((pairs,), (local + 1,), (capacity, 4), (1,)))


def _run_route(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None,
    expert_map: torch.Tensor | None, k: int, scoring: str, epsilon: float, tile: int | None = None,
    local_experts: int | None = None, normalized: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What every operator of `route` does; each gives back what it asks for of a Routing."""
    out = _new_routing(x, weight, k, scoring, tile, local_experts, normalized)
    x, weight, bias, norm, expert_map = map(custom.plain, (x, weight, bias, norm, expert_map))
    run_route(x, weight, bias, norm, expert_map, k, scoring, epsilon, tile, local_experts, out, normalized=normalized)
    return tuple(tensor for tensor in out if tensor is not None)


def _fake_route(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: torch.Tensor | None,
    _expert_map: torch.Tensor | None, k: int, scoring: str, _epsilon: float, tile: int | None = None,
    local_experts: int | None = None, normalized: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    custom.refuse_gradients(x=x, weight=weight, bias=bias, norm=norm)
    out = _new_routing(x, weight, k, scoring, tile, local_experts, normalized)
    return tuple(tensor for tensor in out if tensor is not None)


def _fake_topk(logits: torch.Tensor, k: int, scoring: str) -> tuple[torch.Tensor, ...]:
    custom.refuse_gradients(logits=logits)
    return _fake_route(logits, None, None, None, None, k, scoring, 0.0)


def _run_group(
    ids: torch.Tensor, experts: int, tile: int, expert_map: torch.Tensor | None, local_experts: int | None
) -> tuple[torch.Tensor, ...]:
    made = _fake_group(ids, experts, tile, expert_map, local_experts)
    out = Routing(ids, None, *made)
    run_group(custom.plain(ids), experts, tile, custom.plain(expert_map), local_experts, out)
    return made


def _fake_group(
    ids: torch.Tensor, experts: int, tile: int, _expert_map: torch.Tensor | None, local_experts: int | None
) -> tuple[torch.Tensor, ...]:
    if ids.dim() != 2:
        raise InputError(f"ids is {checks.describe(ids)}; it must have two dimensions")
    return _new_lists(ids, ids.shape[0], ids.shape[1], experts if local_experts is None else local_experts, tile)


_SCORED = "int k, str scoring, float epsilon"
custom.define(
    f"route(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, {_SCORED}) -> (Tensor, Tensor)",
    lambda x, weight, bias, norm, *rest: _run_route(x, weight, bias, norm, None, *rest),
    lambda x, weight, bias, norm, *rest: _fake_route(x, weight, bias, norm, None, *rest),
)
custom.define(
    f"route_normalized(Tensor x, Tensor weight, Tensor? bias, Tensor norm, {_SCORED}) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, bias, norm, k, scoring, epsilon: _run_route(
        x, weight, bias, norm, None, k, scoring, epsilon, normalized=True
    ),
    lambda x, weight, bias, norm, k, scoring, epsilon: _fake_route(
        x, weight, bias, norm, None, k, scoring, epsilon, normalized=True
    ),
)
custom.define(
    "topk(Tensor logits, int k, str scoring) -> (Tensor, Tensor)",
    lambda logits, k, scoring: _run_route(logits, None, None, None, None, k, scoring, 0.0),
    _fake_topk,
)
custom.define(
    f"route_lists(Tensor x, Tensor? weight, Tensor? bias, Tensor? norm, Tensor? expert_map, {_SCORED}, int tile, "
    "int? local_experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_route,
    _fake_route,
)
custom.define(
    "group_by_expert(Tensor ids, int experts, int tile, Tensor? expert_map, int? local_experts) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _run_group,
    _fake_group,
)
