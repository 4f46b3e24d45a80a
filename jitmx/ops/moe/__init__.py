"""`jitmx.moe`: a mixture of experts with weights in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitmx.kernels.moe.choice import logits_of
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.ops import custom
from jitmx.ops.checks import require_apart, require_cuda, require_layout, require_tensor
from jitmx.ops.custom import is_exporting, is_tracing
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe.checks import (
    Chosen,
    Recipe,
    address,
    is_pair,
    require_data,
    require_experts,
    require_layer,
    require_like,
    require_numbers,
    require_out,
    require_residual,
    taken_apart,
)
from jitmx.ops.moe.experts import PackedExperts
from jitmx.ops.moe.grouped import GroupedPlan, check_lists
from jitmx.ops.moe.operand import Experts
from jitmx.ops.moe.plan import Call, LayerPlan, Plan, bases_of, launches, problem_of, reads_rows
from jitmx.ops.routing.calls import kind, logits_type, run_route, scoring_of
from jitmx.ops.routing.plan import Routing


def moe(
    x: torch.Tensor,
    routing: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Routing,
    w13: PackedExperts,
    w2: PackedExperts,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    top: int | None = None,
    scoring: str = "softmax_topk",
    activation: str = "swiglu_oai",
    x_format: str = "bf16",
    scale_rule: str = "floor",
    weight_on: str = "output",
    reduction: str = "ordered",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    expert_map: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = sum over slots of w[t, slot] (W2[e] h + b2[e]), h = act(W13[e] x[t] + b13[e]), e = ids[t, slot].

    With a residual, y[t] is residual[t] more.

    Accumulated in fp32; h, with the row's weight, and y are rounded to bf16. Deterministic, unless `reduction` is
    "atomic": the same inputs give the same bits. Nothing of the routing has to be known on the host. Runs on the
    current stream of x's device and works under `torch.cuda.graph` once the shape has been called before capture, and
    under `torch.compile`, where it is the operator `torch.ops.jitmx.moe`.

    Few rows are one launch (on sm_90a 512 / top at most, elsewhere 64), unless a table or the environment has them go
    by expert, or experts have so many of them that it would read weights more than once. More are four or five: lists
    by expert, on sm_90a the rows by expert, the two products, and the sum over a row's experts in the order of its
    slots; each expert's part is then rounded to bf16. So are fewer rows of what the one launch does not make: another
    `x_format`, `weight_on` or `reduction`, experts without gates, and layers that it has no shared memory for. From
    logits, the choice of experts is one launch before them; of one row, where all experts are local, it is part of the
    one launch.

    The launch for few rows takes all multiprocessors, and its blocks wait for one another: do not run two, or one and a
    `jitmx.linear` of many rows, at a time on two streams.

    Args:
        x: [..., hidden], bfloat16, contiguous, on the weights' GPU.
        routing: router logits [..., experts], bfloat16, float16 or float32; or ids int32 and weights float32
            [..., top], top at most 8; or what `jitmx.route` returned. All contiguous. An id that is not in
            0 … experts - 1 (-1, say) is skipped.
        w13: [experts, 2 intermediate, hidden], from `jitmx.pack_experts`, interleaved gate and up rows; without gates
            [experts, intermediate, hidden].
        w2: [experts, hidden, intermediate], likewise.
        b13, b2: [experts, 2 intermediate] (without gates, intermediate) and [experts, hidden], bfloat16, contiguous;
            both or neither.
        top: experts a row, for logits.
        scoring: of logits: what the weights are, as for `jitmx.route`.
        activation: "swiglu_oai", (up + 1) gate sigmoid(alpha gate) of gate up to `limit` and up within ± `limit`; or
            "silu", up gate sigmoid(gate). Without gates: "relu2", max(up, 0)^2; or "plain", up itself.
        x_format: "bf16", or what x and h are rounded to, in blocks of 32: "mxfp8" (E4M3), "mxfp6" (E2M3) or "mxfp4"
            (E2M1). On random numbers that costs 5, 5 and 20 % of y in relative L2. sm_12x multiplies these by
            block-scaled MMA, and sm_89 "mxfp8" by MMA in E4M3; elsewhere bf16 MMA give the same and save nothing. Or
            "fp8": on sm_90a, with gates, E4M3 with one power of two a row for a scale, which the card multiplies at
            twice the rate of bf16; that costs 4 %. With silu, which gives h no bound to take a scale from, h stays in
            bf16 and so does the second product; that costs 3 %. Weights are quickest packed with `encoding="nibble"`
            there. On other targets, of weights with scales outside 2 to 128, and with weight_on="input",
            reduction="atomic" or an activation without gates, "fp8" is "mxfp8" with the scale rule "ceil".
        scale_rule: how the exponent of such a block is taken: "floor" (OCP), "ceil" or "even".
        weight_on: "output", w (W2 h + b2) as above; or "input", where the row's weight multiplies W13 x instead, as if
            it were on x.
        reduction: "ordered", or "atomic": parts are added to y in bf16 as they come, which saves a launch and their
            memory, rounds y after each, and gives other bits from run to run. Needs sm_90.
        alpha, limit: of swiglu_oai.
        expert_map: int32, contiguous, from the ids in `routing` to the local experts, -1 for those elsewhere; there
            are then as many logits as it has ids. For more than 64 rows, and for what one launch does not make, it has
            at least as many ids as there are local experts, and at most 512.
        count: int32, one element: rows that count; the others have no experts, and y is zero or their residual. For
            batches padded to the rows of a graph.
        residual: like x; added before y is rounded. Or a pair [2, ..., hidden]: values, and what their rounding to
            bf16 lost. y is such a pair then, so that a stream of residuals keeps 16 bits of a value.
        out: like x, or like a residual that is a pair; written and returned. It must overlap neither x nor residual.

    Returns:
        [..., hidden] bfloat16, or a pair of them.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        KnobError: an unknown activation, format or scoring, or more rows than offsets reach.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/moe/, chosen by jitmx/dispatch (`jitmx explain moe`).
    """
    recipe = Recipe(activation, x_format, scale_rule, weight_on, reduction)
    if type(x) is not Tensor or is_tracing() or is_exporting():
        return _traced(
            x, routing, w13, w2, b13, b2, expert_map, count, top, scoring, recipe, alpha, limit, out, residual
        )
    chosen = taken_apart(routing)
    return run(x, chosen, w13, w2, b13, b2, expert_map, count, top, scoring, recipe, alpha, limit, out, residual)


class _Planned(NamedTuple):
    """What is kept of a call that was checked: its launches, None where it has no rows, and what they rest on.

    Attributes:
        w2: the second weight, whose identity is part of the key.
        pair: whether the residual is a pair.
        weights: addresses of words and scales of W13, then of W2.
        bases: of fp8 what there is to be known of rows of W13 and of W2.
    """

    made: Plan | None
    w2: Experts
    pair: bool
    weights: tuple[int, int, int, int]
    bases: tuple[int, int]


def run(
    x: torch.Tensor, chosen: Chosen, w13: Experts, w2: Experts, b13: torch.Tensor | None, b2: torch.Tensor | None,
    expert_map: torch.Tensor | None, count: torch.Tensor | None, top: int | None, scoring: str, recipe: Recipe,
    alpha: float, limit: float, out: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`moe` on plain tensors, its routing taken apart."""
    ids, weights = chosen
    # The warm path: one look-up says that a call like this one was checked and planned before.
    key: tuple[Any, ...] = ()
    found: _Planned | None = None
    try:
        key = (
            kind(x), kind(ids), kind(weights), kind(b13), kind(b2), kind(expert_map), kind(count), id(w2), top,
            type(top), scoring, recipe, kind(residual),
        )  # fmt: skip
        found = w13.plans.get(key)
    except (AttributeError, TypeError):  # what is no tensor, or not packed, is refused below
        pass
    if found is None:
        require_experts(w13, w2, recipe)
        top_found = require_layer(x, chosen, w13, w2, b13, b2, expert_map, count, top, scoring)
        if residual is not None:
            require_residual(residual, x)
        named: dict[str, Any] = {"x": x, "ids": ids} if weights is not None else {"x": x, "router logits": ids}
        named |= {"weights": weights, "residual": residual}
        require_data(**named, b13=b13, b2=b2, expert_map=expert_map, count=count)
    if alpha is not ALPHA or limit is not LIMIT:
        require_numbers(recipe, alpha, limit)
    at_x, at_residual = address("x", x), address("residual", residual)
    address("ids" if weights is not None else "router logits", ids)
    address("weights", weights)
    device, pair = x.get_device(), is_pair(residual, x) if found is None else found.pair
    like = x if residual is None or not pair else residual
    if out is None:
        out = torch.empty_like(like)
        at_out: int = out.data_ptr()
    else:
        at_out = require_out(out, like, device)
        end = at_out + out.nbytes
        if (at_x < end and at_out < at_x + x.nbytes) or (
            residual is not None and at_residual < end and at_out < at_residual + residual.nbytes
        ):
            require_apart(out, x=x, residual=residual)
    if found is None:
        more: dict[str, Any] = {"bias": b13 is not None, "residual": "pair" if pair else residual is not None}
        if weights is None:
            rows, mapped = x.numel() // w13.k, expert_map is not None
            more |= logits_of(rows, mapped, logits_type(ids.dtype), scoring_of(scoring))
        made = _plan(x, top_found, w13, w2, recipe, expert_map, more)
        bases = bases_of(w13, w2, recipe.x_format, recipe.activation)
        found = w13.plans.remember(key, _Planned(made, w2, pair, (*w13.addresses, *w2.addresses), bases))
    call = Call(
        at_x, at_out, found.weights, address("b13", b13), address("b2", b2), address("expert_map", expert_map),
        0 if expert_map is None else expert_map.numel(), address("count", count), at_residual, alpha, limit,
        found.bases,
    )  # fmt: skip
    if found.made is not None:
        if found.made.adds:
            out.zero_() if residual is None else out.copy_(residual)
        found.made(call, _routed(found.made, chosen, w13, expert_map, count, top, scoring))
    return out


def _plan(
    x: torch.Tensor, top: int, w13: Experts, w2: Experts, recipe: Recipe, expert_map: torch.Tensor | None,
    more: Mapping[str, Any],
) -> Plan | None:  # fmt: skip
    """The launches of a call, `more` of whose problem is given; None where there are no rows."""
    rows = x.numel() // w13.k
    if rows == 0:
        return None
    made = launches(problem_of(w13, w2, rows, top, **more, **recipe._asdict()), x.get_device())
    if isinstance(made, GroupedPlan):
        check_lists(w13.experts, expert_map)
    return made


def _routed(
    made: Plan, chosen: Chosen, w13: Experts, expert_map: torch.Tensor | None, count: torch.Tensor | None,
    top: int | None, scoring: str,
) -> Routing:  # fmt: skip
    """Ids and weights of a call, and the lists where its launches read some; or logits, where they read these."""
    ids, weights = chosen
    if isinstance(made, LayerPlan) and weights is not None:
        return Routing(ids, weights, None, None, None, None)
    if isinstance(made, LayerPlan) and made.routing != "ids":
        if ids.data_ptr() & 15:  # read several at a time
            require_layout("router logits", ids)
        return Routing(ids, None, None, None, None, None)
    if weights is None:
        assert top is not None
        logits = ids.view(-1, ids.shape[-1])
        if made.tile is not None and count is None:
            local = w13.experts if expert_map is not None else None
            return run_route(logits, None, None, None, expert_map, top, scoring, 0.0, made.tile, local)
        ids, weights, *_ = run_route(logits, None, None, None, None, top, scoring, 0.0, None, None)
    else:
        ids = ids.view(-1, ids.shape[-1])
    assert weights is not None
    if isinstance(made, GroupedPlan):
        return made.lists(ids, expert_map, count)._replace(weights=weights)
    return Routing(ids, weights, None, None, None, None)


def _traced(
    x: torch.Tensor, routing: Any, w13: PackedExperts, w2: PackedExperts, b13: torch.Tensor | None,
    b2: torch.Tensor | None, expert_map: torch.Tensor | None, count: torch.Tensor | None, top: int | None, scoring: str,
    recipe: Recipe, alpha: float, limit: float, out: torch.Tensor | None, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`moe` as an operator, which can be traced through."""
    require_tensor("x", x)
    require_experts(w13, w2, recipe)
    chosen = taken_apart(routing)
    packed = w13.words, w13.scales, w2.words, w2.scales, w13.k, w2.k
    layouts = expert_operand.layout(w13), expert_operand.layout(w2)
    activation, *others = recipe
    rest = b13, b2, expert_map, count, top, scoring, activation, alpha, limit
    if out is None:
        y: torch.Tensor = torch.ops.jitmx.moe(x, *chosen, *packed, *layouts, *rest, *others, residual)
        return y
    torch.ops.jitmx.moe_out(x, *chosen, *packed, *layouts, *rest, out, *others, residual)
    return out


def _parted(
    rest: tuple[Any, ...],
) -> tuple[tuple[Any, ...], Recipe, tuple[Any, ...], torch.Tensor | None, torch.Tensor | None]:
    """Arguments behind the layouts: those up to scoring, the recipe, alpha and limit, what is written and the residual.

    The dispatcher leaves out what has its default.
    """
    activation, alpha, limit, *more = rest[6:]
    out = more.pop(0) if more and isinstance(more[0], torch.Tensor) else None
    own = len(Recipe._fields) - 1  # the activation is no default
    return rest[:6], Recipe(activation, *more[:own]), (alpha, limit), out, more[own] if len(more) > own else None


def _run_operator(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, words13: torch.Tensor, scales13: torch.Tensor,
    words2: torch.Tensor, scales2: torch.Tensor, hidden: int, intermediate: int, layout13: str, layout2: str, *rest: Any
) -> torch.Tensor:  # fmt: skip
    (b13, b2, expert_map, count, top, scoring), recipe, (alpha, limit), out, residual = _parted(rest)
    recipe.require()
    w13 = expert_operand.find(words13, scales13, recipe.rows * intermediate, hidden, layout13)
    w2 = expert_operand.find(words2, scales2, hidden, intermediate, layout2)
    if recipe.x_format == "fp8":
        require_cuda("x", x)
        if reads_rows(recipe.x_format, w13, w2):
            w13.look_at(words13, scales13)
            w2.look_at(words2, scales2)
    return run(
        custom.plain(x), (ids, weights), w13, w2, b13, b2, expert_map, count, top, scoring, recipe, alpha, limit, out,
        residual,
    )  # fmt: skip


def _fake_operator(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, words13: torch.Tensor, scales13: torch.Tensor,
    words2: torch.Tensor, scales2: torch.Tensor, hidden: int, intermediate: int, layout13: str, layout2: str, *rest: Any
) -> torch.Tensor:  # fmt: skip
    (b13, b2, expert_map, count, top, scoring), recipe, _, _, residual = _parted(rest)
    name = "weights" if weights is not None else "router logits"
    custom.refuse_gradients(**{name: ids if weights is None else weights}, x=x, b13=b13, b2=b2, residual=residual)
    w13 = expert_operand.without_data(words13, recipe.rows * intermediate, hidden, layout13)
    w2 = expert_operand.without_data(words2, hidden, intermediate, layout2)
    require_experts(w13, w2, recipe)
    require_layer(x, (ids, weights), w13, w2, b13, b2, expert_map, count, top, scoring)
    if residual is None:
        return x.new_empty(x.shape)
    require_residual(residual, x)
    return x.new_empty(residual.shape)


def _run_into(*arguments: Any) -> None:
    _run_operator(*arguments)


def _fake_into(x: torch.Tensor, *arguments: Any) -> None:
    require_like("out", _parted(arguments[10:])[3], _fake_operator(x, *arguments))


_ARGUMENTS = (
    "Tensor x, Tensor ids_or_logits, Tensor? weights, Tensor words13, Tensor scales13, Tensor words2, Tensor scales2, "
    "int hidden, int intermediate, str layout13, str layout2, Tensor? b13, Tensor? b2, Tensor? expert_map, "
    "Tensor? count, int? top, str scoring, str activation, float alpha, float limit"
)
# Defaults come last, behind what is written.
_RECIPE = (
    "str x_format='bf16', str scale_rule='floor', str weight_on='output', str reduction='ordered', "
    "Tensor? residual=None"
)
custom.define(f"moe({_ARGUMENTS}, {_RECIPE}) -> Tensor", _run_operator, _fake_operator)
custom.define(f"moe_out({_ARGUMENTS}, Tensor(a!) out, {_RECIPE}) -> ()", _run_into, _fake_into)
