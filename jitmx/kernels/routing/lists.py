"""What lists of tokens by expert take of the kernels of `routing` that make them."""

from __future__ import annotations

from typing import Any

from jitmx.errors import KnobError
from jitmx.kernels.routing.problem import RoutingProblem


def round_up(count: int, step: int) -> int:
    """The least multiple of `step` that is no less."""
    return -(-count // step) * step


def words(warps: int, local: int) -> int:
    """Words of shared memory that list_many of routing/expert_lists.cuh needs."""
    return (round_up(warps, 4) + 4) * local + 2


def fixed(problem: RoutingProblem) -> dict[str, Any]:
    """Knobs of lists that a problem decides."""
    return problem.pick("experts", "k", "tile") | {"mapped": problem.mapped and problem.tile > 0}


def check_mapped(knobs: Any) -> None:
    """Raise KnobError where an expert map is given and no lists are made."""
    if knobs.mapped and not knobs.tile:
        raise KnobError("mapped=True is for the lists, and tile=0 makes none", "use mapped=False or tile=64")
