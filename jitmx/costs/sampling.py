"""The cost of the next tokens: logits that the head has left in the L2, and a meeting of the blocks of a row."""

from __future__ import annotations

from jitmx import kernels
from jitmx.costs.work import Cost, Work
from jitmx.kernels.sampling import SamplingProblem
from jitmx.registry.spec import Variant


def work(variant: Variant, problem: SamplingProblem, _rows: int, multiprocessors: int) -> Work:
    """Of one launch."""
    launch = kernels.family("sampling").launch(variant, problem, multiprocessors)
    size = 4 if problem.dtype == "fp32" else 2
    logits = float(size * problem.rows * problem.vocab)
    several = launch.blocks > problem.rows
    return Work(
        bytes=8.0 * problem.rows,
        cached=logits,
        fills=1,
        blocks=launch.blocks,
        busy=min(launch.blocks, multiprocessors),
        clusters=2 * int(several and launch.cluster > 1),  # a barrier before and behind a store to the first block
        merges=int(several and launch.cluster == 1),
    )


COST = Cost(work)
