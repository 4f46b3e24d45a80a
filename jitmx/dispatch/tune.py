"""Tuning: which kernel and knobs are fastest for each problem, by a timing function that the caller brings.

Every candidate is timed once, cheaply; those beyond `PRUNE` times the best are out. The others are timed again in
rounds until one wins twice in a row at the same time, within `AGREE`. Where that does not happen the row says how far
the winner's times lie apart.

Candidates are compiled in the background, those of the next rows too, and timed as soon as they are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.dispatch.journal import Fault, Journal
from jitmx.errors import JitmxError, KnobError, TacticError
from jitmx.kernels import Problem, family
from jitmx.kernels.tuning import Tuning
from jitmx.registry.spec import Variant

PRUNE = 1.3
AGREE = 0.02
FINALISTS = 5
ROUNDS = 8
QUICK, THOROUGH = 5, 15  # repeats of a timing: in the first pass, and in rounds
_FIRST_PASS = 0.7  # of a task's time, where time is limited
_AHEAD = 2  # further tasks whose candidates are compiled while one is timed


@dataclass(frozen=True)
class Task:
    """One row to be: a problem, and along each axis the least value that the row will serve."""

    problem: Problem
    low: Mapping[str, int]

    @property
    def key(self) -> str:
        """As the journal calls it."""
        return json.dumps([dict(self.low), self.problem.as_dict()])


@dataclass(frozen=True)
class Candidate:
    """A kernel with tuned knobs, and the variants that they make of the ends of a task's range."""

    kernel: str
    knobs: Mapping[str, Any]
    variants: tuple[Variant, ...]

    @property
    def key(self) -> str:
        """As the journal calls it."""
        return json.dumps([self.kernel, dict(sorted(self.knobs.items()))])


@dataclass(frozen=True)
class Outcome:
    """The winner of a task.

    Attributes:
        us: median microseconds a call.
        spread: how far its times lie apart, relative to `us`.
        stable: whether it won twice in a row at the same time.
        tried, failed: candidates that were timed, and that could not be.
    """

    task: Task
    kernel: str
    knobs: Mapping[str, Any]
    us: float
    spread: float
    stable: bool
    tried: int
    failed: int


class Builds(Protocol):
    """What compiles candidates in the background."""

    def ask(self, candidates: Sequence[Candidate]) -> None:
        """Compile them, in their order, after all that was asked for before."""

    def drop(self, candidates: Sequence[Candidate]) -> None:
        """They are no longer wanted: those that were asked for as often as dropped need not be begun."""

    def first(self, candidates: Sequence[Candidate], seconds: float | None) -> tuple[int, Fault | None] | None:
        """The place of the first that is there, and why it must not be timed, or None.

        Waits for one so many seconds, or however long it takes; None where none has come.
        """


class AtHand:
    """Builds of candidates that need no compiling."""

    def ask(self, candidates: Sequence[Candidate]) -> None:
        """Nothing to do."""

    def drop(self, candidates: Sequence[Candidate]) -> None:
        """Nothing to do."""

    def first(self, candidates: Sequence[Candidate], seconds: float | None) -> tuple[int, Fault | None] | None:
        """The first."""
        return 0, None


# Microseconds a call of the problem with a candidate, as the median of so many repeats.
Measure = Callable[[Problem, Candidate, int], float]


def tasks(shapes: Sequence[tuple[Problem, Mapping[str, Sequence[int]]]]) -> list[Task]:
    """Tasks for each shape and each of the values along its axes: each serves what is above the next smaller values."""
    found = []
    for problem, values in shapes:
        steps = []
        for counts in values.values():
            ordered = sorted(set(counts))
            steps.append([(below + 1, count) for below, count in zip([0, *ordered], ordered, strict=False)])
        for ranges in itertools.product(*steps):
            low = dict(zip(values, (least for least, _ in ranges), strict=True))
            high: dict[str, Any] = dict(zip(values, (most for _, most in ranges), strict=True))
            found.append(Task(dataclasses.replace(problem, **high), low))
    return found


def candidates(
    op: str, task: Task, arch: Arch, multiprocessors: int, offered: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[Candidate]:
    """Those of the kernels and knobs on offer that serve both ends of the task's range, each variant once.

    What a call would take today comes first, so that tuning never makes it slower, then the first of each kernel, then
    others of today's kernel, of which the quickest most often is one: time may be short. Kernels that would need
    several launches are left out where another needs one.
    """
    fields: dict[str, Any] = dict(task.low)
    lowest = dataclasses.replace(task.problem, **fields)
    today = choose(op, task.problem, arch, multiprocessors=multiprocessors)
    limits = {name: family(op).kernel(name).max_rows for name in family(op).serving(task.problem, arch)}
    rows = family(op).rows(task.problem)
    whole = {name for name, most in limits.items() if most is None or most >= rows} or set(limits)
    usual: dict[str, dict[str, Any]] = {}
    for name in whole:
        with contextlib.suppress(KnobError):
            usual[name] = family(op).tuned(task.problem, arch, multiprocessors, name)
    found: dict[str, Candidate] = {}
    of_today = today.variant.spec.name
    first = len({kernel for kernel, _ in offered})  # offers open with one of each kernel
    ordered = [*offered[:first], *sorted(offered[first:], key=lambda offer: offer[0] != of_today)]
    for kernel, some in ((of_today, _tuned(op, task.problem, today.variant)), *ordered):
        if kernel not in usual:
            continue
        # A row stands alone: it holds every knob that the problem leaves open.
        knobs = {**usual[kernel], **some, "kernel": kernel}
        try:
            variant = choose(op, task.problem, arch, multiprocessors=multiprocessors, knobs=knobs).variant
            knobs = _tuned(op, task.problem, variant)
            low = choose(op, lowest, arch, multiprocessors=multiprocessors, knobs={**knobs, "kernel": kernel}).variant
        except KnobError:
            continue
        found.setdefault(variant.identity, Candidate(kernel, knobs, (variant, low)))
    return list(found.values())


def _tuned(op: str, problem: Problem, variant: Variant) -> dict[str, Any]:
    """Knobs of a variant that the problem does not fix."""
    fixed = family(op).fixed(problem, variant.spec.name)
    return {name: value for name, value in variant.knobs.as_dict().items() if name not in fixed}


class Tuner:
    """A run over tasks.

    Args:
        measure: times one candidate; raises JitmxError where it cannot run, TacticError where none can.
        offer: candidates of a task.
        journal: where outcomes are kept.
        builds: what compiles the candidates.
        seconds: time for the whole run, or None; what is left is shared evenly among the tasks that are left.
        clock: seconds, monotonic.
        step: called after each timing with the task, how many are done and how many there may be.
    """

    def __init__(
        self,
        measure: Measure,
        offer: Callable[[Task], list[Candidate]],
        journal: Journal,
        *,
        builds: Builds | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[Task, int, int], None] = lambda _task, _done, _all: None,
    ) -> None:
        self._measure, self._offer, self._journal, self._builds = measure, offer, journal, builds or AtHand()
        self._offered: dict[str, list[Candidate]] = {}
        self._clock, self._step = clock, step
        self._end = None if seconds is None else clock() + seconds

    def run(self, wanted: Sequence[Task], done: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
        """The outcome of each task, in order; those that the journal has are not measured again.

        Raises:
            TacticError: no candidate of a task could be timed.
        """
        outcomes = []
        for number, task in enumerate(wanted):
            kept = self._journal.rows.get(task.key)
            if kept is None:
                self._look_ahead([later for later in wanted[number:] if later.key not in self._journal.rows])
                outcome = self._one(task, len(wanted) - number)
                fields = {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__ if name != "task"}
                self._journal.finished(task.key, {**fields, "knobs": dict(outcome.knobs)})
            else:
                outcome = Outcome(task, **kept)
            outcomes.append(outcome)
            done(outcome)
        return outcomes

    def _look_ahead(self, tasks: Sequence[Task]) -> None:
        """Have candidates of the first few tasks compiled."""
        for task in tasks[: 1 + _AHEAD]:
            if task.key not in self._offered:
                self._offered[task.key] = self._offer(task)
                self._builds.ask(self._unknown(task))

    def _unknown(self, task: Task) -> list[Candidate]:
        """Candidates of which the journal says nothing, in their order."""
        return [one for one in self._offered[task.key] if (task.key, one.key) not in self._journal.timings]

    def _one(self, task: Task, left: int) -> Outcome:
        offered = self._offered[task.key]
        until = None if self._end is None else self._clock() + (self._end - self._clock()) / left
        begun = self._clock()
        asked = self._unknown(task)
        times, failed = self._first_pass(task, offered, begun, until)
        self._builds.drop(asked)
        if not times:
            raise TacticError(f"none of {len(offered)} candidates for {task.problem.as_dict()} could be timed")
        best = min(times.values())
        ranked = sorted(times, key=lambda candidate: times[candidate])
        finalists = [offered[index] for index in ranked if times[index] <= PRUNE * best][:FINALISTS]
        rounds, stable = self._rounds(task, finalists, until, len(offered))
        judged = rounds[-2:] if stable else rounds
        # One that failed in any round is out, however fast it was before.
        lasting = [index for index in range(len(finalists)) if math.isfinite(max(turn[index] for turn in rounds))]
        if not lasting:
            raise TacticError(f"no finalist for {task.problem.as_dict()} could be timed to the end")
        winner = min(lasting, key=lambda index: statistics.median(turn[index] for turn in judged))
        taken = [turn[winner] for turn in judged]
        us = statistics.median(taken)
        chosen = finalists[winner]
        return Outcome(
            task, chosen.kernel, chosen.knobs, us, (max(taken) - min(taken)) / us, stable, len(times), failed
        )

    def _first_pass(
        self, task: Task, offered: list[Candidate], begun: float, until: float | None
    ) -> tuple[dict[int, float], int]:
        """Microseconds of each candidate by its place, and how many failed; the first ones only where time is short."""
        last = None if until is None else begun + _FIRST_PASS * (until - begun)
        known = self._journal.timings
        waiting = [index for index, one in enumerate(offered) if (task.key, one.key) not in known]
        timed = len(waiting) < len(offered) and any(known.get((task.key, one.key)) is not None for one in offered)
        while waiting:
            left = last - self._clock() if last is not None and timed else None
            if left is not None and left <= 0:
                # What a call would take today is timed whatever it costs: no row makes it slower.
                waiting, left = [index for index in waiting if index == 0], None
                if not waiting:
                    break
            found = self._builds.first([offered[index] for index in waiting], left)
            if found is None:
                continue
            place, fault = found
            timed |= self._first_timing(task, offered[waiting.pop(place)], fault)
            self._step(task, len(offered) - len(waiting), len(offered) + FINALISTS * 2)
        outcomes = [known.get((task.key, one.key), math.nan) for one in offered]
        times = {index: us for index, us in enumerate(outcomes) if us is not None and math.isfinite(us)}
        return times, sum(us is None for us in outcomes)

    def _first_timing(self, task: Task, candidate: Candidate, fault: Fault | None) -> bool:
        """Time a candidate, unless it has a fault, and say whether it was."""
        key = task.key, candidate.key
        us = None
        if fault is None:
            with self._journal.launching(*key):
                us, fault = self._time(task, candidate, QUICK)
        self._journal.timed(*key, us, fault)
        return us is not None

    def _time(self, task: Task, candidate: Candidate, repeats: int) -> tuple[float | None, Fault | None]:
        """Microseconds, or why there are none."""
        try:
            return self._measure(task.problem, candidate, repeats), None
        except TacticError:  # nothing could be timed, whatever the candidate
            raise
        except JitmxError as error:
            return None, Fault(str(error))

    def _again(self, task: Task, candidate: Candidate) -> float:
        """Microseconds of a finalist; infinite where it cannot run any more, which no later run tries again."""
        key = task.key, candidate.key
        with self._journal.launching(*key):
            us, fault = self._time(task, candidate, THOROUGH)
        if us is None:
            self._journal.timed(*key, None, fault)
            return math.inf
        self._journal.timed_again(*key, us)
        return us

    def _rounds(
        self, task: Task, finalists: list[Candidate], until: float | None, before: int
    ) -> tuple[list[list[float]], bool]:
        """Times of all finalists in each round, and whether the last two rounds agree."""
        rounds: list[list[float]] = []
        for number in range(ROUNDS):
            if number >= 2 and until is not None and self._clock() > until:
                break
            turn = [self._again(task, candidate) for candidate in finalists]
            rounds.append(turn)
            self._step(task, before + (number + 1) * len(finalists), before + max(2, number + 1) * len(finalists))
            if number and agree(rounds[-2], turn):
                return rounds, True
        return rounds, False


def agree(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether two rounds have one winner, or winners that are as fast, and see it at the same time, within `AGREE`."""
    first, second = min(before), min(after)
    if not math.isfinite(first + second):
        return False
    same = after[before.index(first)] <= (1 + AGREE) * second and before[after.index(second)] <= (1 + AGREE) * first
    return same and abs(first - second) <= AGREE * min(first, second)


def row(outcome: Outcome, tuning: Tuning) -> dict[str, Any]:
    """The row of a tuning table: it serves the task's ranges and what else the problem asks for, bias or not."""
    problem = outcome.task.problem.as_dict()
    usual = {item.name: item.default for item in dataclasses.fields(outcome.task.problem)}
    when: dict[str, Any] = {name: [low, problem[name]] for name, low in outcome.task.low.items()}
    for name, value in problem.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if name not in (*when, *tuning.nameless) and (number or name in tuning.named or value != usual[name]):
            when[name] = value
    made = {"when": when, "kernel": outcome.kernel, "knobs": dict(outcome.knobs), "us": round(outcome.us, 3)}
    return made if outcome.stable else made | {"spread": round(outcome.spread, 3)}


def rows(outcome: Outcome, tuning: Tuning) -> list[dict[str, Any]]:
    """The rows of an outcome: its own, and one for each further problem that it serves."""
    task = outcome.task
    others = tuning.serves(task.problem, outcome.kernel)
    tasks = (task, *(dataclasses.replace(task, problem=problem) for problem in others))
    return [row(dataclasses.replace(outcome, task=one), tuning) for one in tasks]
