"""What tuning tries for a task: the knobs that each kernel offers, as candidates; and what is tuned after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch import tune
from jitmx.dispatch.choose import agrees
from jitmx.dispatch.tune import Candidate, Outcome, Task


def offer(op: str, problem: Any, arch: Arch, multiprocessors: int) -> list[tuple[str, Mapping[str, Any]]]:
    """What every kernel that serves the problem would have tried."""
    return list(kernels.family(op).offered(problem, arch, multiprocessors))


def candidates(
    op: str, task: Task, arch: Arch, multiprocessors: int, agree: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """The candidates of a task on a target; those that have not the knobs in `agree` are left out."""
    found = tune.candidates(op, task, arch, multiprocessors, offer(op, task.problem, arch, multiprocessors))
    return [item for item in found if all(agrees(variant, agree or {}) for variant in item.variants)]


def after(op: str, done: Outcome | tuple[Task, Candidate]) -> list[tuple[Task, Mapping[str, Any]]]:
    """Tasks that follow from an outcome, or would if a candidate won; each with the knobs that its own must have."""
    tuning = kernels.family(op).tuning
    if tuning is None or tuning.follows is None:
        return []
    task, winner = (done.task, done) if isinstance(done, Outcome) else done
    found = tuning.follows(task.problem, winner.kernel, winner.knobs)
    return [(Task(follow.problem, task.low), follow.agree) for follow in found]


def everything(op: str, tasks: Sequence[Task], arch: Arch, multiprocessors: int) -> list[tuple[Task, list[Candidate]]]:
    """All that a run over the tasks may time, whatever wins: also what follows from candidates."""
    found = []
    for task in tasks:
        offered = candidates(op, task, arch, multiprocessors)
        found.append((task, offered))
        followers: dict[str, tuple[Task, list[Mapping[str, Any]]]] = {}
        for one in offered:
            for follow, agree in after(op, (task, one)):
                followers.setdefault(follow.key, (follow, []))[1].append(agree)
        for follow, some in followers.values():
            seconds = candidates(op, follow, arch, multiprocessors)
            allowed = [one for one in seconds if any(agrees(one.variants[0], agree) for agree in some)]
            found.append((follow, allowed))
    return found
