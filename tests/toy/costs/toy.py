"""The cost of `toy.scale`: bytes in and out, and the instructions of each value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jitmx import kernels
from jitmx.costs.work import Cost, Probe, Work
from jitmx.registry.spec import Variant


def work(variant: Variant, problem: Any, _rows: int, multiprocessors: int) -> Work:
    """Of one launch."""
    values = problem.rows * problem.columns
    blocks = kernels.family("toy").launch(variant, problem, multiprocessors).blocks
    return Work(bytes=8.0 * values, units=float(values), blocks=blocks, busy=min(blocks, multiprocessors))


def probes(variant: Variant, _problem: Any) -> Iterator[Probe]:
    """Its cases, the second of which has more values."""
    for case in kernels.family("toy").cases(variant):
        yield Probe(case, float(case.values["values"]))


COST = Cost(work, probes)
