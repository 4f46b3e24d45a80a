"""What a call runs: unfused steps, and every launch. Operators, `jitmx explain` and warm-up ask the same functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import companion, companions, fits_one_launch, split
from jitmx.errors import KnobError
from jitmx.kernels import Companion, Decomposition, Instead, Problem
from jitmx.registry.spec import Variant


@dataclass(frozen=True)
class Launch:
    """A launch of a call, and how many times the call makes it."""

    choice: Choice
    times: int = 1


@dataclass(frozen=True)
class Call:
    """What a call runs.

    Attributes:
        problem: what the call asks for.
        unfused: the steps that run on their own, by name, each in words.
        launches: the first is the one that its kernel was chosen for.
        instead: fields that the call takes as something else than was asked for, each with what was, and what it takes.
    """

    problem: Problem
    unfused: Mapping[str, str]
    launches: tuple[Launch, ...]
    instead: Mapping[str, tuple[Any, Instead]] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        """Why its kernel."""
        return self.launches[0].choice

    def to_dict(self) -> dict[str, Any]:
        """What `jitmx explain --json` prints: the choice, of the whole call; and what else it runs."""
        first, *others = self.launches
        return {
            **first.choice.to_dict(),
            "problem": self.problem.as_dict(),
            "instead_of": {name: asked for name, (asked, _) in self.instead.items()},
            "launched": first.choice.problem.as_dict(),
            "times": first.times,
            "unfused": [{"step": name, "detail": detail} for name, detail in self.unfused.items()],
            "companions": [{**other.choice.to_dict(), "times": other.times} for other in others],
        }

    def lines(self) -> list[str]:
        """What `jitmx explain` prints."""
        first, *others = self.launches
        title, kernel, *rest = dataclasses.replace(first.choice, problem=self.problem).lines()
        instead = [
            f"instead     of {name}={asked}, {taken.value}: {taken.why}"
            for name, (asked, taken) in self.instead.items()
        ]
        steps = [f"unfused     {name}: {detail}" for name, detail in self.unfused.items()]
        rows = kernels.family(first.choice.variant.spec.family).rows
        asked, launched = rows(self.problem), rows(first.choice.problem)
        if launched != asked:
            kernel += f", {_times(first.times)} with {launched} of {asked} rows"
        more = ["the same call also launches:"] if others else []
        for other in others:
            name, decided = other.choice.variant.name, other.choice.decided_by
            often = f", {_times(other.times)}" if other.times > 1 else ""
            more.append(f"     {name}{often}, by {decided.name}: {decided.detail}")
        return [title, *instead, *steps, kernel, *rest, *more]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def decomposition(op: str, problem: Problem, arch: Arch) -> Decomposition:
    """How a call is made: with the fewest unfused steps that let one launch take all rows, or with all of them."""
    *better, last = kernels.family(op).decompositions(problem)
    return next((one for one in better if fits_one_launch(op, one.problem, arch)), last)


def call(op: str, problem: Problem, arch: Arch, *, multiprocessors: int | None = None) -> Call:
    """What a call of family `op` runs on `arch`.

    Args:
        multiprocessors: SM count of the device; by default that of the card that `arch` stands for.

    Raises:
        KnobError, TacticError: as `choose` does.
    """
    family = kernels.family(op)
    found = decomposition(op, problem, arch)
    parts = split(op, found.problem, arch, multiprocessors=multiprocessors)
    launches = [Launch(choice, times * found.passes) for choice, times in parts]
    whole = dataclasses.replace(launches[0].choice, problem=problem)
    launches += [Launch(companion(whole, item), found.passes) for item in (*_made(problem, found), *found.before)]
    launches += [Launch(choice) for choice in companions(whole)]
    if found.rest is not None:
        launches += call(op, found.rest, arch, multiprocessors=multiprocessors).launches
    named = (*found.unfused, *(item.step for item in family.companions(problem, whole.variant) if item.step))
    return Call(problem, {name: family.steps[name] for name in named}, tuple(launches))


def _made(problem: Problem, found: Decomposition) -> Iterator[Companion]:
    """Launches of other families that make unfused steps."""
    for name in found.unfused:
        for other in kernels.families().values():
            asked = other.makes(name, problem)
            if asked is not None:
                yield Companion(other.name, asked, {}, {})


def explain(op: str, arch: Arch, *, multiprocessors: int | None = None, **shape: Any) -> Call:
    """What a call with this shape would run on `arch`, and why; fields left out are those of the first typical call.

    Raises:
        KnobError: `op` is no family, has no such field, takes no such value, or no call has all of these.
    """
    problem = _asked(op, arch, shape)
    found = call(op, problem, arch, multiprocessors=multiprocessors)
    taken = kernels.family(op).instead(dataclasses.replace(problem, **shape), found.choice.variant)
    instead = {name: (shape[name], one) for name, one in taken.items() if shape.get(name, one.value) != one.value}
    return dataclasses.replace(found, instead=instead)


def call_variants(op: str, arch: Arch, *, multiprocessors: int | None = None, **shape: Any) -> tuple[Variant, ...]:
    """Every variant that a call with this shape launches on `arch`, once each; fields left out as for `explain`."""
    found = explain(op, arch, multiprocessors=multiprocessors, **shape).launches
    return tuple({one.choice.variant.identity: one.choice.variant for one in found}.values())


def _asked(op: str, arch: Arch, shape: Mapping[str, Any]) -> Problem:
    family = kernels.family(op)
    fields = [item.name for item in dataclasses.fields(family.problem)]
    for name in shape:
        if name not in fields:
            raise KnobError(f"{family.name} problems have no {name!r}; they have {', '.join(fields)}")
    usual = next((problem.as_dict() for problem in family.typical(arch)), {})
    # How weights are packed, say, follows from the other fields: of the usual ones only what a target does not decide.
    own = family.problem.on(arch).as_dict()
    usual = {name: value for name, value in usual.items() if value != own[name]}
    problem = family.problem.on(arch, **{**usual, **shape})
    problem.require_call()
    return problem
