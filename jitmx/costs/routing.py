"""The cost of choosing experts: the router's weight, rows of x behind the wait, and the meeting of partial logits."""

from __future__ import annotations

from jitmx import kernels
from jitmx.costs.work import Cost, Work
from jitmx.kernels.routing.problem import RoutingProblem
from jitmx.registry.spec import Variant


def work(variant: Variant, problem: RoutingProblem, _rows: int, multiprocessors: int) -> Work:
    """Of one launch."""
    name, knobs, m = variant.spec.name, variant.knobs, problem.m
    lists = 16.0 * m * problem.k * bool(problem.tile)
    if name in ("route", "many"):
        launch = kernels.family("routing").launch(variant, problem, multiprocessors)
        splits = getattr(knobs, "splits", 1)
        tokens = min(m, knobs.tokens)
        wide = 2 if problem.dtype != "fp32" else 4
        many = name == "many"  # a block reads its tokens' logits from the others, which wait until it has
        return Work(
            bytes=2.0 * problem.experts * problem.h + wide * m * problem.h * (1 + problem.normalized) + lists,
            flops=2.0 * -(-m // 8) * 8 * problem.experts * problem.h,
            each=2.0 * problem.experts * problem.h / splits,
            exposed=float(wide * tokens * problem.h / splits),
            blocks=launch.blocks,
            busy=min(launch.blocks, multiprocessors),
            exchanged=4.0 * knobs.tokens * problem.experts * (splits - 1) / splits * many,
            clusters=1 + int(problem.norm or many) if launch.cluster > 1 else 0,
            merges=int(launch.cluster == 1 and splits > 1) + int(bool(problem.tile)),
        )
    logits = problem.experts * 2.0 * m * (name == "topk")
    return Work(bytes=logits + 8.0 * m * problem.k + lists, busy=1, fills=2)


COST = Cost(work)
