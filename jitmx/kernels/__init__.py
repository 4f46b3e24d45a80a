"""Kernel families, one file each. A module here that defines `FAMILY` is a family; nothing else registers it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.quoting import short
from jitmx.registry.case import Case
from jitmx.registry.spec import Fields, KernelSpec, Variant


@dataclass(frozen=True)
class Problem(Fields):
    """Base of what one call asks of a family: its shape, and whatever else is not a matter of taste.

    Frozen dataclasses whose fields all have defaults, and limits where `knob` gives some. Choosing is a function of one
    of these, a target and its multiprocessor count.
    """

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> Self:
        """A problem with these fields, the others at the defaults that suit `arch`."""
        return cls(**shape)

    @property
    def overridable(self) -> bool:
        """Whether knobs and tiles in the environment are meant for it."""
        return True


@dataclass(frozen=True)
class Following:
    """A launch that a call makes beside the one that was chosen for it.

    Attributes:
        op: its family.
        problem: what it is asked.
        agrees: knobs that it must share with the chosen one, and under "kernel" the kernel.
        otherwise: kernel and knobs that it takes where what was chosen for it does not.
        step: the step of the call that it is, where another launch could have had that fused; else empty.
    """

    op: str
    problem: Problem
    agrees: Mapping[str, Any]
    otherwise: Mapping[str, Any]
    step: str = ""


@dataclass(frozen=True)
class Way:
    """One way to make a call: what runs as steps of its own, and what is left to launch.

    Attributes:
        problem: what the launches are asked.
        apart: names of the steps that run on their own.
        passes: how many times the launches are made, each time for the next rows.
        rest: what is asked for the rows that full passes leave; None where they leave none.
        before: launches that steps make before those of the problem.
    """

    problem: Problem
    apart: tuple[str, ...] = ()
    passes: int = 1
    rest: Problem | None = None
    before: tuple[Following, ...] = ()


def _unchecked(problem: Any, variant: Variant) -> None:
    """A family whose variants all serve all problems."""


def _anywhere(problem: Any, variant: Variant, multiprocessors: int) -> bool:
    """A family whose launches fit cards of a target however many multiprocessors they have."""
    return True


def _unlimited(kernel: str) -> int | None:
    """A family whose launches take all rows there are."""
    return None


def _untiled(kernel: str) -> Callable[[int, int, int | None, int | None], dict[str, Any]] | None:
    """A family whose kernels have no tiles to choose."""
    return None


def _alone(problem: Any, variant: Variant) -> tuple[Following, ...]:
    """A family whose calls are all of one kind of launch."""
    return ()


def _whole(problem: Any) -> tuple[Way, ...]:
    """A family of whose calls nothing runs apart."""
    return (Way(problem),)


def _as_asked(problem: Any) -> Any:
    """A family whose heuristic answers each problem for itself."""
    return problem


def _steered(problem: Any) -> str | None:
    """A family in which a tile chooses no kernel."""
    return None


def rounded_up(problem: Problem, usual: Sequence[int]) -> Problem:
    """`problem` with the next larger of the `usual` row counts, ascending; as it is above them all."""
    rows: dict[str, Any] = {"m": next((count for count in usual if count >= problem.m), problem.m)}  # type: ignore[attr-defined]
    return replace(problem, **rows)


def taking(fixed: Callable[[Any, str], dict[str, Any]], problem: Problem, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the kernels called `names` that take the problem: for which `fixed` raises no KnobError."""
    found = []
    for name in names:
        try:
            fixed(problem, name)
        except KnobError:
            continue
        found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class Family:
    """A set of kernels that together serve one operator.

    Attributes:
        name: the operator, and the template folder.
        summary: one line for listings.
        specs: its kernels.
        problem: the dataclass of its problems.
        typical: the problems on a target whose kernels warm-up compiles when told nothing else.
        serving: names of the kernels that can serve a problem on a target.
        fixed: knobs that a problem itself decides, for one of those kernels.
        heuristic: kernel and tuned knobs for a problem on a target with so many multiprocessors, without a table.
        tuned: the same for a kernel that something else named.
        bucket: the problem whose tuned knobs serve others too, so that few variants are compiled: that of the next
            larger row count which is usual.
        cases: launches of a variant with known results, small and ragged.
        check: raises KnobError where a legal variant cannot serve a problem, its shared memory too small for it, say.
        fits: whether a variant that serves a problem does so on a card with so many multiprocessors; a table's row that
            was made for more of them, and does not, is passed over.
        max_rows: rows (the problem's field m) that one launch of a kernel takes at most, or None.
        tile: of a kernel, what gives knobs for a tile M x N (x K) with so many stages, or None.
        tiled: the kernel that a tile in the environment chooses where that of the problem has none, or None.
        following: the launches of a call beside that of the variant chosen for it, in order.
        ways: how a call may be made, the best first; the last serves where no kernel takes another in one launch.
        steps: what each step is that may run apart, in words.
    """

    name: str
    summary: str
    specs: tuple[KernelSpec, ...]
    problem: type[Problem]
    typical: Callable[[Arch], tuple[Problem, ...]]
    serving: Callable[[Any, Arch], tuple[str, ...]]
    fixed: Callable[[Any, str], dict[str, Any]]
    heuristic: Callable[[Any, Arch, int], tuple[str, dict[str, Any]]]
    tuned: Callable[[Any, Arch, int, str], dict[str, Any]]
    cases: Callable[[Variant], Iterable[Case]]
    bucket: Callable[[Any], Any] = _as_asked
    check: Callable[[Any, Variant], None] = _unchecked
    fits: Callable[[Any, Variant, int], bool] = _anywhere
    max_rows: Callable[[str], int | None] = _unlimited
    tile: Callable[[str], Callable[[int, int, int | None, int | None], dict[str, Any]] | None] = _untiled
    tiled: Callable[[Any], str | None] = _steered
    following: Callable[[Any, Variant], tuple[Following, ...]] = _alone
    ways: Callable[[Any], Iterable[Way]] = _whole
    steps: Mapping[str, str] = field(default_factory=dict, hash=False)

    def spec(self, name: str) -> KernelSpec:
        """The kernel called `name`.

        Raises:
            KnobError: there is none; the message lists those there are.
        """
        for spec in self.specs:
            if spec.name == name:
                return spec
        listed = ", ".join(spec.name for spec in self.specs)
        raise KnobError(f"{short(name)} is no kernel of {self.name}; its kernels: {listed}")


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        KnobError: there is none; the message lists those there are.
    """
    known = families()
    if name not in known:
        raise KnobError(f"{short(name)} is not a kernel family; families: {', '.join(known)}")
    return known[name]
