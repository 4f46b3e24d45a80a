"""What tuning tries for a task: the knobs that each kernel offers, as candidates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch import tune
from jitmx.dispatch.choose import agrees
from jitmx.dispatch.tune import Candidate, Task
from jitmx.errors import KnobError
from jitmx.kernels import linear, moe
from jitmx.kernels.moe.tiles import makes_products


def offer(op: str, problem: Any, arch: Arch, multiprocessors: int) -> list[tuple[str, Mapping[str, Any]]]:
    """What every kernel that serves the problem would have tried: its heuristic first, then its candidates."""
    if op == "linear":
        return list(linear.candidates(problem, arch, multiprocessors))
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name in kernels.family(op).serving(problem, arch):
        # A kernel may find that nothing of it fits the shape.
        with contextlib.suppress(KnobError):
            found += [(name, kernels.family(op).tuned(problem, arch, multiprocessors, name))]
            asked = moe.asked(problem, name)
            found += [(name, knobs) for knobs in moe.KERNELS[name].candidates(asked, arch, multiprocessors)]
    return found


def candidates(
    op: str, task: Task, arch: Arch, multiprocessors: int, agree: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """The candidates of a task on a target; those that have not the knobs in `agree` are left out."""
    found = tune.candidates(op, task, arch, multiprocessors, offer(op, task.problem, arch, multiprocessors))
    return [item for item in found if all(agrees(variant, agree or {}) for variant in item.variants)]


def second_product(task: Task) -> Task:
    """The second product of a layer of experts, as a task of its own."""
    fields: dict[str, Any] = {"product": "down"}
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, **fields))


def everything(op: str, tasks: Sequence[Task], arch: Arch, multiprocessors: int) -> list[tuple[Task, list[Candidate]]]:
    """All that a run over the tasks may time, whatever wins: also second products of layers that go by expert."""
    found = []
    for task in tasks:
        offered = candidates(op, task, arch, multiprocessors)
        found.append((task, offered))
        first = [one for one in offered if op == "moe" and makes_products(one.variants[0].spec)]
        tiles = {one.knobs["tile_m"] for one in first}
        if tiles:
            follow = second_product(task)
            seconds = candidates(op, follow, arch, multiprocessors)
            found.append((follow, [one for one in seconds if one.knobs.get("tile_m") in tiles]))
    return found
