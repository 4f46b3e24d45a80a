"""Choosing the variant for a call.

Order of authority for the tuned knobs: the call's own, the environment's (JITMX_LINEAR_KNOBS), the user's table, the
shipped table, the heuristic. What the problem fixes (rows, dtype, bias …) is never up for choice. `explain` answers
with the same function that a call uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitmx import kernels, settings
from jitmx.arch import Arch
from jitmx.dispatch import tactics
from jitmx.errors import KnobError, TacticError
from jitmx.kernels import Family, Problem
from jitmx.registry.spec import Variant

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Source:
    """One place that knobs may come from, and what it said."""

    name: str
    detail: str
    knobs: Mapping[str, Any] | None
    decided: bool


@dataclass(frozen=True)
class Choice:
    """The variant for a problem, and why."""

    problem: Problem
    variant: Variant
    multiprocessors: int
    sources: tuple[Source, ...]

    @property
    def decided_by(self) -> Source:
        """The source with the most authority that had a say."""
        return next(source for source in self.sources if source.decided)

    def to_dict(self) -> dict[str, Any]:
        """What `jitmx explain --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "op": self.variant.spec.family,
            "arch": self.variant.arch.name,
            "multiprocessors": self.multiprocessors,
            "problem": self.problem.as_dict(),
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
            "knobs       " + ", ".join(f"{name}={value}" for name, value in self.variant.knobs.as_dict().items()),
            "considered, by falling authority:",
        ]
        for source in self.sources:
            out.append(f"  {'->' if source.decided else '  '} {source.name:<14}{source.detail}")
        return out


def choose(
    op: str, problem: Problem, arch: Arch, *, multiprocessors: int | None = None, knobs: Mapping[str, Any] | None = None
) -> Choice:
    """The variant of family `op` that serves `problem` on `arch`.

    Args:
        multiprocessors: SM count of the device; by default that of the card that `arch` stands for.
        knobs: tuned knobs that override every other source.

    Raises:
        KnobError: the knobs of a source are illegal, or cannot serve the problem.
        TacticError: a table cannot be read, or its row for the problem is illegal.
    """
    family = kernels.family(op)
    count = multiprocessors or arch.multiprocessors
    spec = family.spec(problem.kernel)
    spec.knobs(**problem.fixed())  # a problem that no kernel takes is the caller's error, not a table's
    # What an override leaves out comes from the best source below it.
    base_sources, base = _base(family, problem, arch, count)
    overrides = [
        ("argument", "knobs of the call", dict(knobs) if knobs else None),
        _environment(family, spec.knobs),
    ]
    merged = dict(base)
    sources: list[Source] = []
    decided = False
    for name, detail, values in overrides:
        sources.append(Source(name, detail if values else f"{detail}: none", values, bool(values) and not decided))
        decided = decided or bool(values)
    for _name, _detail, values in reversed(overrides):
        merged.update(values or {})
    sources += [dataclasses.replace(source, decided=source.decided and not decided) for source in base_sources]
    return Choice(problem, _variant(family, problem, arch, merged), count, tuple(sources))


def _variant(family: Family, problem: Problem, arch: Arch, knobs: Mapping[str, Any]) -> Variant:
    """The variant with tuned `knobs` that serves `problem`."""
    fixed = problem.fixed()
    for name in knobs.keys() & fixed.keys():
        if knobs[name] != fixed[name]:
            raise KnobError(
                f"{name}={knobs[name]!r} cannot be overridden: the call itself fixes {name}={fixed[name]!r}"
            )
    variant = family.spec(problem.kernel).variant(arch, **{**knobs, **fixed})
    family.check(problem, variant)
    return variant


def _environment(family: Family, knobs: type[Any]) -> tuple[str, str, dict[str, Any] | None]:
    field = f"{family.name}_knobs"
    pairs = dict(getattr(settings.current(), field, ()))
    if not pairs:
        return "environment", f"JITMX_{field.upper()}", None
    said = f"{settings.origin(field)}={','.join(f'{k}={v}' for k, v in pairs.items())}"
    try:
        read = knobs.from_text(pairs)
    except KnobError as error:
        raise KnobError(f"{said}: {error}") from error
    return "environment", said, {name: getattr(read, name) for name in pairs}


def _base(family: Family, problem: Problem, arch: Arch, multiprocessors: int) -> tuple[list[Source], dict[str, Any]]:
    """Tables and heuristic: each as a source, and the knobs of the first that has any."""
    user = settings.current().tactics_dir
    found: dict[str, Any] | None = None
    sources = []
    own, shipped = tactics.tables(family, arch, user)
    for name, table, where in (("user table", own, f" under {user}"), ("shipped table", shipped, "")):
        row = next((row for row in table.rows if row.fits(problem)), None) if table else None
        if table is None:
            detail = f"none for {arch}{where}"
        elif row is None:
            detail = f"no row fits ({table.provenance})"
        else:
            detail = f"{table.provenance}" + (f", {row.us:.2f} us" if row.us else "")
        decided = row is not None and found is None
        if row is not None and table is not None and found is None:
            found = dict(row.knobs)
            try:
                _variant(family, problem, arch, found)
            except KnobError as error:
                raise TacticError(f"{table.path}: the row for {dict(row.when)} is illegal: {error}") from error
        sources.append(Source(name, detail, None if row is None else row.knobs, decided))
    guess = family.heuristic(problem, arch, multiprocessors)
    sources.append(Source("heuristic", "computed from shape and target, not measured", guess, found is None))
    return sources, guess if found is None else found


def explain(op: str, arch: Arch, *, multiprocessors: int | None = None, **shape: Any) -> Choice:
    """What a call with this shape would run on `arch`, and why; fields left out are those of the first typical call.

    Raises:
        KnobError: `op` is no family, has no such field, or takes no such value.
    """
    family = kernels.family(op)
    return choose(op, family.problem.on(arch, **_asked(family, arch, shape)), arch, multiprocessors=multiprocessors)


def call_variants(op: str, arch: Arch, *, multiprocessors: int | None = None, **shape: Any) -> tuple[Variant, ...]:
    """Every variant that a call with this shape launches on `arch`; fields left out as for `explain`."""
    family = kernels.family(op)
    problems = family.problem.launches(arch, **_asked(family, arch, shape))
    return tuple(choose(op, problem, arch, multiprocessors=multiprocessors).variant for problem in problems)


def _asked(family: Family, arch: Arch, shape: Mapping[str, Any]) -> dict[str, Any]:
    fields = [item.name for item in dataclasses.fields(family.problem)]
    for name in shape:
        if name not in fields:
            raise KnobError(f"{family.name} problems have no {name!r}; they have {', '.join(fields)}")
    usual = next((problem.as_dict() for problem in family.typical(arch)), {})
    return {**usual, **shape}


def default_variants(op: str, arch: Arch, *, multiprocessors: int | None = None) -> tuple[Variant, ...]:
    """The variants that warm-up compiles for family `op` on `arch`: those that its typical calls would run.

    Args:
        multiprocessors: SM count of the device; by default that of the card that `arch` stands for.
    """
    family = kernels.family(op)
    chosen = (choose(op, problem, arch, multiprocessors=multiprocessors).variant for problem in family.typical(arch))
    return tuple({variant.identity: variant for variant in chosen}.values())
