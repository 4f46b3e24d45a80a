"""The cost of RMSNorm: rows in and out."""

from __future__ import annotations

from jitmx.costs.work import Cost, Work
from jitmx.kernels.norm import NormProblem, launch
from jitmx.registry.spec import Variant


def work(variant: Variant, problem: NormProblem, rows: int, multiprocessors: int) -> Work:
    """Of one launch for so many rows."""
    moved = (4.0 if problem.y == "same" else 3.0) * rows * problem.hidden
    blocks = launch(variant.knobs, rows, multiprocessors).blocks
    return Work(
        bytes=2.0 * problem.hidden,
        early=2.0 * problem.hidden,  # the norm's weight
        cached=moved,
        fills=1,
        blocks=blocks,
        busy=min(blocks, multiprocessors),
    )


COST = Cost(work)
