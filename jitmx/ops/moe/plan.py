"""Launches of `moe`, planned once for a layer's shape and a number of rows; all layers of a model share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jitmx import settings
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import choose, companions
from jitmx.errors import KnobError
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.moe import FAMILY, MoeProblem
from jitmx.kernels.moe.choice import reads
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.kernels.moe.problem import BOUNDED
from jitmx.kernels.moe.tiles import goes_by_expert
from jitmx.ops.moe.grouped import GroupedPlan, check_lists
from jitmx.ops.moe.operand import Experts
from jitmx.ops.routing.plan import Routing
from jitmx.runtime import card
from jitmx.runtime import plan as plans
from jitmx.runtime.plan import Plans, Step

# What calls differ in; the workspace lies between.
_TAKES = (
    "x", "w13", "w13_scales", "w2", "w2_scales", "b13", "b2", "ids", "weights", "map", "count", "residual", "y",
    "alpha", "limit", "map_size",
)  # fmt: skip


@dataclass(slots=True)  # not frozen, which takes four times the time to make
class Call:
    """Addresses on the device of what one call reads and writes, 0 for what it lacks.

    Attributes:
        x, y: [rows, hidden].
        weights: words and scales of W13, then of W2.
        b13, b2: biases.
        expert_map, map_size: the map, and how many ids it has.
        count: rows that count.
        residual: [rows, hidden], added to y; or a pair [2, rows, hidden], as which y is left then.
        alpha, limit: of the activation.
        bases: of fp8, what there is to be known of rows of W13 and of W2.
    """

    x: int
    y: int
    weights: tuple[int, int, int, int]
    b13: int = 0
    b2: int = 0
    expert_map: int = 0
    map_size: int = 0
    count: int = 0
    residual: int = 0
    alpha: float = ALPHA
    limit: float = LIMIT
    bases: tuple[int, int] = (0, 0)


class LayerPlan(plans.Plan):
    """A layer in one launch.

    Attributes:
        routing: what it reads: "ids" and weights, or router logits of this type.
    """

    tile: int | None = None  # of lists: it reads none
    adds = False

    def __init__(self, problem: MoeProblem, choice: Choice, device: int) -> None:
        variant = choice.variant
        geometry = FAMILY.launch(variant, problem, choice.multiprocessors)
        fixed = {
            "rows": problem.m, "top": problem.top, "experts": problem.experts, "hidden": problem.hidden,
            "intermediate": problem.intermediate,
        }  # fmt: skip
        self.steps = (Step(variant, device, geometry, fixed, _TAKES),)
        self.routing = reads(variant)

    def __call__(self, call: Call, found: Routing) -> None:
        """Launch on torch's current stream of the device; from logits, they are the ids of `found`."""
        weights = 0 if found.weights is None else found.weights.data_ptr()
        assert weights or self.routing != "ids"
        self.steps[0].run(
            call.x, *call.weights, call.b13, call.b2, found.ids.data_ptr(), weights, call.expert_map, call.count,
            call.residual, call.y, call.alpha, call.limit, call.map_size,
        )  # fmt: skip


Plan = LayerPlan | GroupedPlan


def problem_of(
    w13: Experts,
    w2: Experts,
    rows: int,
    top: int,
    activation: str = "swiglu_oai",
    bias: bool = True,
    residual: bool | str = False,
    **more: str,
) -> MoeProblem:
    """What a call with so many rows, each to `top` experts, asks for; `more` are other fields of its problem."""
    scales = "normal" if w13.scale_range == w2.scale_range == "normal" else "full"
    arch = card.arch(card.number(w13.device))
    problem = MoeProblem(
        rows, w13.experts, top, w13.k, w2.k, activation, bias, w13.encoding, scales, residual=residual, **more
    ).taken(arch)
    if problem.x_format != "fp8":
        return problem
    wide = "wide" in (weight.row_words.range for weight in (w13, w2)[: 1 + (problem.h_format == "fp8")])
    return replace(problem, row_range=ROW_RANGES[wide])


def reads_rows(x_format: str | None, w13: Experts, w2: Experts) -> bool:
    """Whether products are in E4M3 with a scale a row, which are told of the rows of weights."""
    if x_format != "fp8" or not w13.scale_range == w2.scale_range == "normal":
        return False
    return "wgmma" in card.arch(card.number(w13.device)).features


def bases_of(w13: Experts, w2: Experts, x_format: str, activation: str) -> tuple[int, int]:
    """Where lies what products in E4M3 are told of the rows of both weights; zeros for others."""
    if not reads_rows(x_format, w13, w2):
        return 0, 0
    second = w2.row_words.words.data_ptr() if activation in BOUNDED else 0  # else that product is in bf16
    return w13.row_words.words.data_ptr(), second


def launches(problem: MoeProblem, device: int, knobs: Mapping[str, Any] | None = None) -> Plan:
    """The launches of a problem.

    Args:
        knobs: as for `choose`; `down`, where it is among them, holds knobs of the second product.
    """
    own = dict(knobs or {})
    down = own.pop("down", {})
    key = problem, device, tuple(own.items()), tuple(down.items()), settings.current()
    found: Plan | None = _known.get(key)
    return _known.remember(key, _plan(problem, device, own, down)) if found is None else found


_known = Plans()


def _plan(problem: MoeProblem, device: int, knobs: Mapping[str, Any], down: Mapping[str, Any]) -> Plan:
    arch, count = card.arch(device), card.multiprocessors(device)
    choice = choose("moe", problem, arch, multiprocessors=count, knobs=dict(knobs))
    if not goes_by_expert(choice.variant.spec):
        return LayerPlan(problem, choice, device)
    check_lists(problem.experts, None)
    choices = {getattr(choice.variant.knobs, "product", "both"): choice}
    choices |= {one.problem.product: one for one in companions(choice) if isinstance(one.problem, MoeProblem)}
    if down and "down" not in choices:
        raise KnobError(
            f"down={down}: {choice.variant.name} makes both products", "leave down out, or name kernel=wgmma"
        )
    if down:
        choices["down"] = choose("moe", choices["down"].problem, arch, multiprocessors=count, knobs=dict(down))
    return GroupedPlan(problem, choices, device)
