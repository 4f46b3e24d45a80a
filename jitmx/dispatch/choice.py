"""The answer to what a call runs: the variant, and which of the sources that were asked decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jitmx.kernels import Problem
from jitmx.registry.spec import Variant

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Source:
    """One place that knobs may come from, and what it said.

    Attributes:
        says: gives its knobs. A heuristic that nobody has to follow is asked by whoever wants to know.
    """

    name: str
    detail: str
    says: Callable[[], Mapping[str, Any] | None] = field(compare=False, repr=False)
    decided: bool

    @property
    def knobs(self) -> Mapping[str, Any] | None:
        """Its knobs; None where it has none."""
        return self.says()


@dataclass(frozen=True)
class Choice:
    """The variant for a problem, and why."""

    problem: Problem
    variant: Variant
    multiprocessors: int
    sources: tuple[Source, ...]

    @property
    def decided_by(self) -> Source:
        """The source of highest precedence that named a value."""
        return next(source for source in self.sources if source.decided)

    @property
    def derived(self) -> dict[str, float]:
        """Numbers that follow from the problem's fields, and that choosing goes by."""
        return {name: float(getattr(self.problem, name)) for name in self.problem.derived}

    def to_dict(self) -> dict[str, Any]:
        """What `jitmx explain --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "op": self.variant.spec.family,
            "arch": self.variant.arch.name,
            "multiprocessors": self.multiprocessors,
            "problem": self.problem.as_dict(),
            "derived": self.derived,
            "kernel": self.variant.name,
            "knobs": self.variant.knobs.as_dict(),
            "decided_by": {"source": self.decided_by.name, "detail": self.decided_by.detail},
            "sources": [
                {
                    "source": s.name,
                    "detail": s.detail,
                    "knobs": None if s.knobs is None else dict(s.knobs),
                    "decided": s.decided,
                }
                for s in self.sources
            ],
        }

    def lines(self) -> list[str]:
        """What `jitmx explain` prints."""
        shape = ", ".join(f"{name}={value}" for name, value in self.problem.as_dict().items())
        out = [
            f"{self.variant.spec.family} on {self.variant.arch} ({self.multiprocessors} multiprocessors): {shape}",
            f"kernel      {self.variant.name}",
            f"decided by  {self.decided_by.name}: {self.decided_by.detail}",
            *(f"{name.replace('_', ' ')}  {value:.4g}" for name, value in self.derived.items()),
            "knobs       " + ", ".join(f"{name}={value}" for name, value in self.variant.knobs.as_dict().items()),
            "considered, in order of precedence:",
        ]
        for source in self.sources:
            out.append(f"  {'->' if source.decided else '  '} {source.name:<14}{source.detail}")
        return out
