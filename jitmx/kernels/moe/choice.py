"""Choosing the experts of one row from its router logits, within the launch that makes its layer: the knobs of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jitmx.errors import KnobError
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.problem import ROUTINGS, MoeProblem
from jitmx.kernels.routing.cases import STORED, choose
from jitmx.kernels.routing.knobs import MAX_EXPERTS, SCORINGS
from jitmx.kernels.routing.problem import RoutingProblem, parts
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import Variant, knob

ROUTING: Any = knob("ids", choices=ROUTINGS, doc="ids and weights are given, or router logits of this type, of one row")
LOGITS: Any = knob(GPT_OSS_120B.experts, low=1, high=MAX_EXPERTS, doc="of logits: how many")
SCORING: Any = knob(SCORINGS[0], choices=SCORINGS, doc="of logits: softmax over the chosen, or over all experts")
UNASKED: dict[str, Any] = {"experts": GPT_OSS_120B.experts, "scoring": SCORINGS[0]}  # where there are no logits


def reads(variant: Variant) -> str:
    """What a kernel of `moe` reads the routing from: "ids" and weights, or logits of a type."""
    return str(getattr(variant.knobs, "routing", "ids"))


def logits_of(rows: int, mapped: bool, dtype: str, scoring: str) -> dict[str, Any]:
    """Fields of the problem of a call from logits: where it has one row, and all experts, its launch may choose."""
    return {"routing": dtype, "scoring": scoring} if rows == 1 and not mapped else {}


def launched(problem: MoeProblem) -> MoeProblem:
    """What the launch of a layer is asked: ids, where a launch of routing chooses from logits before it."""
    if problem.routing == "ids" or logits_of(problem.m, False, problem.routing, problem.scoring):
        return problem
    return replace(problem, routing="ids", scoring=SCORINGS[0])


def routing_before(problem: MoeProblem, variant: Variant, tile: int) -> tuple[RoutingProblem, ...]:
    """The launches that choose from logits for a layer that reads ids, or lists in tiles; none where it chooses itself.

    Args:
        tile: rows of a tile of the lists, 0 where the layer reads none.
    """
    if (problem.routing == "ids" and not tile) or reads(variant) != "ids":
        return ()
    given = RoutingProblem(problem.m, problem.experts, min(problem.top, problem.experts), 8, "ids", tile=tile)
    if problem.routing == "ids":
        return (given,)
    return tuple(parts(replace(given, source="logits", dtype=problem.routing, scoring=problem.scoring)))


def choice_of(problem: MoeProblem) -> dict[str, Any]:
    """The knobs for a problem.

    Raises:
        KnobError: logits of several rows, or of more experts than are chosen from.
    """
    if problem.routing == "ids":
        return {"routing": "ids"} | UNASKED
    if problem.m != 1 or problem.experts > MAX_EXPERTS:
        raise KnobError(
            f"logits of m={problem.m} rows and experts={problem.experts} are chosen from by a launch of routing",
            f"of one row and at most {MAX_EXPERTS} experts the layer's does it",
        )
    return problem.pick("routing", *UNASKED)


def check_choice(knobs: Any) -> None:
    """Raise KnobError for knobs of a choice that is not made, or cannot be."""
    if knobs.routing == "ids":
        told = {name: getattr(knobs, name) for name, value in UNASKED.items() if getattr(knobs, name) != value}
        if told:
            said = ", ".join(f"{name}={value}" for name, value in told.items())
            raise KnobError(f"{said} is of logits, and routing=ids", "say by routing= what they are, or leave it out")
    elif knobs.top > knobs.experts:
        raise KnobError(
            f"top={knobs.top} is over experts={knobs.experts}", f"the nearest legal value is {knobs.experts}"
        )


def routings_of(knobs: Any) -> Iterator[Routing]:
    """Choices from logits of one row, two local experts; some elsewhere, equal or NaN; equal ones; NaN; and no row."""
    generator = np.random.default_rng(knobs.experts)
    for turn in range(5):
        logits = generator.standard_normal((1, knobs.experts)).astype(STORED[knobs.routing])
        if turn in (1, 2):
            logits[:] = np.round(logits.astype(np.float32))
        if turn == 1:
            logits = np.minimum(logits, np.ones_like(logits))
            logits[0, :: max(knobs.experts // 8, 2)] = np.nan
        if turn == 3:
            logits[0, generator.permutation(knobs.experts)[: knobs.experts * 3 // 4]] = np.nan
        chosen, weights = choose(logits, knobs.top, knobs.scoring)
        expert_map = np.arange(knobs.experts, dtype=np.int32) % 2
        if turn == 1:
            expert_map[chosen[0, 1::2]] = -1
        yield Routing(chosen, expert_map, 0 if turn == 4 else None, logits, weights)
