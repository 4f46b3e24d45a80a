"""The cost of RMSNorm: rows in and out."""

from __future__ import annotations

from jitmx.costs.work import Cost, Work
from jitmx.kernels.norm import NormProblem, concat, launch
from jitmx.registry.spec import Variant


def work(variant: Variant, problem: NormProblem, rows: int, multiprocessors: int) -> Work:
    """Of one launch for so many rows."""
    norms = 2 if problem.concat else 1
    moved = norms * (4.0 if problem.y == "same" else 3.0) * rows * problem.hidden
    geometry = concat.launch(rows) if problem.concat else launch(variant.knobs, rows, multiprocessors)
    blocks = geometry.blocks
    return Work(
        bytes=norms * 2.0 * problem.hidden,
        early=norms * 2.0 * problem.hidden,  # the weights
        cached=moved,
        fills=1,
        blocks=blocks,
        busy=min(blocks, multiprocessors),
    )


COST = Cost(work)
