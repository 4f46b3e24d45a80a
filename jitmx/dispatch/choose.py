"""Choosing the variant for a call.

Order of precedence for the tuned knobs: the call's own, the environment's (JITMX_<FAMILY>_KNOBS, and below it
JITMX_<FAMILY>_TILE where the kernel has a tile), the user's table, the shipped table, the heuristic. What the problem
fixes (rows, dtype, bias …) is never up for choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jitmx import kernels, resources, setting_text, settings
from jitmx.arch import Arch
from jitmx.dispatch import tactics
from jitmx.dispatch.choice import Choice, Source
from jitmx.errors import KnobError, TacticError
from jitmx.kernels import Companion, Family, Problem
from jitmx.registry.spec import Variant


def choose(
    op: str, problem: Problem, arch: Arch, *, multiprocessors: int | None = None,
    knobs: Mapping[str, Any] | None = None, kernel: str | None = None,
) -> Choice:  # fmt: skip
    """The variant of family `op` that serves `problem` on `arch`.

    Args:
        multiprocessors: SM count of the device; by default that of the card that `arch` stands for.
        knobs: tuned knobs that override every other source.
        kernel: one that was chosen before, for more rows of the same call; its knobs are open.

    Raises:
        KnobError: the knobs of a source are illegal, or cannot serve the problem.
        TacticError: a table cannot be read, or its row for the problem is illegal.
    """
    family = kernels.family(op)
    count = multiprocessors or arch.multiprocessors
    able = family.serving(problem, arch)
    if not able:
        reasons = "; ".join(dict.fromkeys(_refusal(family, problem, spec.name) for spec in family.specs))
        raise KnobError(f"no kernel of {family.name} on {arch} serves {_text(problem)}: {reasons}")
    # What an override leaves out comes from the best source below it.
    first = able if kernel is None else (kernel,)
    base_sources, kernel, base = _base(family, problem, arch, count, first, kernel)
    own = dict(knobs) if knobs else None
    environment = _environment(family, problem)
    asked = [("argument", "knobs of the call" if own else "knobs of the call: none", own), environment]
    named = next((values["kernel"] for _, _, values in asked if values and "kernel" in values), None)
    named = named or _steered(family, problem, arch, kernel, able)
    if named != kernel:
        with _naming("" if own and "kernel" in own else _naming_kernel(family, environment)):
            family.spec(named)
            if named not in able:
                others = ", ".join(_tunable(family, problem, arch, count, able))
                reason = f"{_refusal(family, problem, named)}; on {arch} these serve it: {others}"
                raise KnobError(f"kernel={named} cannot serve {_text(problem)}: {reason}")
            base_sources, kernel, base = _base(family, problem, arch, count, (named,), named)
    asked = [(name, detail, values and _typed(family, kernel, values, detail)) for name, detail, values in asked]
    given = {name for _, _, values in asked for name in values or ()}
    tile, asked[1] = _tile(family, problem, arch, kernel, asked[1], base, given)
    merged = dict(base)
    sources: list[Source] = []
    decided = False
    for name, detail, values in asked:
        says: Callable[[], Mapping[str, Any] | None] = partial(dict, values) if values else _nothing
        sources.append(Source(name, detail, says, bool(values) and not decided))
        decided = decided or bool(values)
    for _name, _detail, values in reversed(asked):
        merged.update({name: value for name, value in (values or {}).items() if name != "kernel"})
    sources += [dataclasses.replace(source, decided=False) for source in base_sources] if decided else base_sources
    with _naming("" if own or not asked[1][2] else asked[1][1]):
        try:
            variant = _variant(family, problem, arch, kernel, merged)
        except KnobError as error:
            sizes = setting_text.tile(_tile_asked(family, problem) or "")[:2] if tile else None
            given |= (asked[1][2] or {}).keys()  # with what the tile says
            nearest = _nearest_tile(family, problem, arch, kernel, merged, given, sizes) if sizes else ""
            if not nearest:
                raise
            raise KnobError(error.message, nearest) from error
    return Choice(problem, variant, count, tuple(sources))


def split(
    op: str, problem: Problem, arch: Arch, *, multiprocessors: int | None = None, knobs: Mapping[str, Any] | None = None
) -> tuple[tuple[Choice, int], ...]:
    """The launches of one call: choices, and how many times each is launched, in the order of the rows.

    Where the chosen kernel takes fewer rows than the problem has, it is launched for each that many, and the rows that
    are left are a problem of their own.
    """
    choice = choose(op, problem, arch, multiprocessors=multiprocessors, knobs=knobs)
    family = kernels.family(op)
    rows = family.rows(problem)
    most = family.kernel(choice.variant.spec.name).max_rows
    if most is None or rows <= most:
        return ((choice, 1),)

    def part(count: int, kernel: str | None) -> Choice:
        some = family.of_rows(problem, count)
        return choose(op, some, arch, multiprocessors=multiprocessors, knobs=knobs, kernel=kernel)

    full = (part(most, choice.variant.spec.name), rows // most)
    return (full, (part(rows % most, None), 1)) if rows % most else (full,)


def launches(
    op: str, problem: Problem, arch: Arch, *, multiprocessors: int | None = None, knobs: Mapping[str, Any] | None = None
) -> tuple[Choice, ...]:
    """Every launch of one call, once each: those of `split`, and of what follows from the first of them."""
    chosen = tuple(choice for choice, _ in split(op, problem, arch, multiprocessors=multiprocessors, knobs=knobs))
    return chosen + companions(dataclasses.replace(chosen[0], problem=problem))


def companions(choice: Choice) -> tuple[Choice, ...]:
    """The companion launches of the one chosen for a call."""
    items = kernels.family(choice.variant.spec.family).companions(choice.problem, choice.variant)
    return tuple(companion(choice, item) for item in items)


def companion(choice: Choice, item: Companion) -> Choice:
    """The choice for a companion launch, with the knobs that it must share."""
    arch, count = choice.variant.arch, choice.multiprocessors
    with contextlib.suppress(KnobError):  # a tile by name may not be one of the kernel that is chosen alone
        one = choose(item.op, item.problem, arch, multiprocessors=count)
        if agrees(one.variant, item.agrees):
            return one
    return choose(item.op, item.problem, arch, multiprocessors=count, knobs={**item.otherwise, **item.agrees})


def agrees(variant: Variant, knobs: Mapping[str, Any]) -> bool:
    """Whether a variant has these knobs, and under "kernel" is of this kernel."""
    has = {**variant.knobs.as_dict(), "kernel": variant.spec.name}
    return all(has.get(name) == value for name, value in knobs.items())


def fits_one_launch(op: str, problem: Problem, arch: Arch) -> bool:
    """Whether some kernel of family `op` serves all rows of `problem` in one launch on `arch`."""
    family = kernels.family(op)
    most = [family.kernel(name).max_rows for name in family.serving(problem, arch)]
    if not any(limit is None or family.rows(problem) <= limit for limit in most):
        return False
    try:
        _guess(family, problem, arch, arch.multiprocessors, None)
    except KnobError:  # none of them has room for the shape
        return False
    return True


def _text(problem: Problem) -> str:
    return ", ".join(f"{name}={value}" for name, value in problem.as_dict().items())


def _refusal(family: Family, problem: Problem, kernel: str) -> str:
    """Why a kernel cannot serve a problem."""
    try:
        family.fixed(problem, kernel)
    except KnobError as error:
        return str(error)
    return "it does not run on this target"


@contextlib.contextmanager
def _naming(said: str) -> Iterator[None]:
    """Have a KnobError begin with what asked for the knobs, unless that is empty."""
    try:
        yield
    except KnobError as error:
        if not said:
            raise
        raise KnobError(f"{said}: {error.message}", error.remedy) from error


def _variant(family: Family, problem: Problem, arch: Arch, kernel: str, knobs: Mapping[str, Any]) -> Variant:
    """The variant of `kernel` with tuned `knobs` that serves `problem`."""
    fixed = family.fixed(problem, kernel)
    for name in knobs.keys() & fixed.keys():
        if knobs[name] != fixed[name]:
            raise KnobError(
                f"{name}={knobs[name]!r} cannot be overridden: the call itself fixes {name}={fixed[name]!r}"
            )
    variant = family.spec(kernel).variant(arch, **{**knobs, **fixed})
    family.check(problem, variant)
    return variant


def _environment(family: Family, problem: Problem) -> tuple[str, str, dict[str, Any] | None]:
    field = f"{family.name}_knobs"
    pairs = dict(settings.current().overrides.get(field, ()))
    if not pairs:
        return "environment", f"JITMX_{field.upper()}: none", None
    if not problem.overridable:
        return "environment", f"{settings.origin(field)} is not for this launch", None
    return "environment", f"{settings.origin(field)}={','.join(f'{k}={v}' for k, v in pairs.items())}", pairs


def _tile_asked(family: Family, problem: Problem) -> str | None:
    """The tile that the environment sets, or None."""
    text: str | None = settings.current().overrides.get(f"{family.name}_tile") if problem.overridable else None
    return text


def _naming_kernel(family: Family, environment: tuple[str, str, dict[str, Any] | None]) -> str:
    """What of the environment names a kernel: the variable of knobs, or else that of a tile."""
    if "kernel" in (environment[2] or {}):
        return environment[1]
    field = f"{family.name}_tile"
    return f"{settings.origin(field)}={settings.current().overrides[field]}"


def _tunable(
    family: Family, problem: Problem, arch: Arch, multiprocessors: int, able: tuple[str, ...]
) -> tuple[str, ...]:
    """Of the kernels that can serve a problem, those that find knobs for its shape; all where none does."""
    found = []
    for name in able:
        with contextlib.suppress(KnobError):
            family.tuned(problem, arch, multiprocessors, name)
            found.append(name)
    return tuple(found) or able


def _steered(family: Family, problem: Problem, arch: Arch, kernel: str, able: tuple[str, ...]) -> str:
    """The kernel that the environment's tile is for: the chosen one, or the first of the family's that has it."""
    text, tiled = _tile_asked(family, problem), [name for name in family.tiled(problem) if name in able]
    if text is None or not tiled:
        return kernel
    offered = tiled if family.kernel(kernel).tile is None else [kernel, *tiled]
    return next((name for name in offered if _has_tile(family, problem, arch, name, text)), offered[0])


def _has_tile(family: Family, problem: Problem, arch: Arch, kernel: str, text: str) -> bool:
    """Whether a kernel has a legal tile of this size."""
    make = family.kernel(kernel).tile
    assert make is not None, f"{family.name}.{kernel} has tiles"
    try:
        knobs = make(*setting_text.tile(text))
    except KnobError:
        return False
    return family.spec(kernel).legal(arch, **{**family.fixed(problem, kernel), **knobs}) is not None


def _tile(
    family: Family, problem: Problem, arch: Arch, kernel: str, environment: tuple[str, str, dict[str, Any] | None],
    base: Mapping[str, Any], given: set[str],
) -> tuple[str, tuple[str, str, dict[str, Any] | None]]:  # fmt: skip
    """The variable that sets a tile where it applies, else an empty text; and what the environment says with it.

    Args:
        base: knobs of the source below.
        given: names of those that overrides have.
    """
    name, detail, values = environment
    field, text = f"{family.name}_tile", _tile_asked(family, problem)
    if text is None:
        return "", environment
    said = f"{settings.origin(field)}={text}"
    make = family.kernel(kernel).tile
    if make is None:
        return "", (name, f"{said} does not apply, {family.name}.{kernel} has no tile; {detail}", values)
    sizes = setting_text.tile(text)
    with _naming(said):
        try:
            knobs = make(*sizes)
        except KnobError as error:
            nearest = _nearest_tile(family, problem, arch, kernel, {**base, **(values or {})}, given, sizes[:2])
            try:
                make(*sizes[:2], None, None)
            except KnobError:
                raise KnobError(error.message, nearest or error.remedy) from error
            # Columns or stages are what is wrong.
            raise KnobError(error.message, "; ".join(filter(None, (error.remedy, nearest)))) from error
    return said, (name, f"{said},{detail}" if values else said, {**knobs, **(values or {})})


def _nearest_tile(
    family: Family, problem: Problem, arch: Arch, kernel: str, knobs: Mapping[str, Any], given: set[str],
    wanted: tuple[int, int],
) -> str:  # fmt: skip
    """In words: of the tiles that serve the problem with these knobs, the one that is least away from `wanted`.

    Empty where none does, or where it is `wanted` itself: what is wrong is another knob then. Where that is one that
    nobody gave, it is what to give.

    Args:
        given: names of knobs that overrides have.
    """
    make = family.kernel(kernel).tile
    fields = {item.name: item for item in dataclasses.fields(family.spec(kernel).knobs)}
    choices = [fields[name].metadata.get("choices") or () for name in ("tile_m", "tile_n") if name in fields]
    if make is None or len(choices) != 2:
        return ""
    variable = f"JITMX_{family.name.upper()}_KNOBS"

    def away(tile: tuple[int, int]) -> float:
        return sum(abs(math.log2(size / asked)) for size, asked in zip(tile, wanted, strict=True))

    for m, n in sorted(itertools.product(*choices), key=away):
        with contextlib.suppress(KnobError):
            made = make(m, n, None, None)
            more = _lacking(family, problem, arch, kernel, {**knobs, **made}, given | made.keys())
            if (m, n) != wanted:
                return f"the nearest legal tile is {m}x{n}" + (f", with {more} in {variable}" if more else "")
            return f"give {more} in {variable}" if more else ""
    return ""


def _lacking(
    family: Family, problem: Problem, arch: Arch, kernel: str, knobs: Mapping[str, Any], given: set[str]
) -> str:
    """The knob, name=value, that nobody gave and that has to be at its default for the others to be legal, or nothing.

    Raises:
        KnobError: no one knob makes them so.
    """
    try:
        _variant(family, problem, arch, kernel, knobs)
    except KnobError:
        for name in (name for name in knobs if name not in given):
            with contextlib.suppress(KnobError):
                others = {other: value for other, value in knobs.items() if other != name}
                variant = _variant(family, problem, arch, kernel, others)
                return f"{name}={variant.knobs.as_dict()[name]}"
        raise
    return ""


def _typed(family: Family, kernel: str, values: Mapping[str, Any], said: str) -> dict[str, Any]:
    """An override's values with those that are text read as what the knobs of `kernel` are."""
    texts = {name: value for name, value in values.items() if isinstance(value, str) and name != "kernel"}
    with _naming(said):
        read = family.spec(kernel).knobs.from_text(texts)
    return {**values, **{name: getattr(read, name) for name in texts}}


def _base(
    family: Family, problem: Problem, arch: Arch, multiprocessors: int, able: tuple[str, ...], named: str | None
) -> tuple[list[Source], str, dict[str, Any]]:
    """Tables and heuristic, each as a source, and kernel and knobs of the first that has any; `named` is a must."""
    user = settings.current().tactics_dir
    found: tuple[str, dict[str, Any]] | None = None
    sources = []
    shipping = resources.directories("tactics", settings.current().families)
    own, shipped = tactics.tables(family, arch, user, shipping)
    for name, table, where in (("user table", own, f" under {user}"), ("shipped table", shipped, "")):
        row = next((row for row in table.rows if row.kernel in able and row.fits(problem)), None) if table else None
        if table is None:
            detail = f"none for {arch}{where}"
        elif row is None:
            detail = f"no row fits ({table.provenance})"
        else:
            detail = table.provenance_of(row) + (f", {row.timing}" if row.timing else "")
        decided = row is not None and found is None
        if row is not None and table is not None and found is None:
            try:
                variant = _variant(family, problem, arch, row.kernel, row.knobs)
            except KnobError as error:
                raise TacticError(
                    f"{table.path}: the row for {dict(row.when)} is illegal: {error}",
                    f"take the row out, or measure anew: jitmx tune {family.name}",
                ) from error
            if family.fits(problem, variant, multiprocessors):
                found = row.kernel, dict(row.knobs)
            else:
                decided, detail = False, f"its row does not fit {multiprocessors} multiprocessors ({table.provenance})"
        sources.append(Source(name, detail, _nothing if row is None else partial(dict, row.knobs), decided))

    def guess() -> tuple[str, dict[str, Any]]:
        return _guess(family, problem, arch, multiprocessors, named)

    said = "computed from shape and target, not measured"
    sources.append(Source("heuristic", said, lambda: guess()[1], found is None))
    return sources, *(guess() if found is None else found)


def _nothing() -> None:
    """What a source says that has no knobs."""


@functools.lru_cache(maxsize=4096)
def _guess(
    family: Family, problem: Problem, arch: Arch, multiprocessors: int, named: str | None
) -> tuple[str, dict[str, Any]]:
    """The heuristic's answer, which may take a cost model milliseconds and is asked for each layer of a model.

    The kernel is that of the problem, its knobs those of the problem's bucket, unless they are illegal here or the
    kernel's heuristic has few answers by itself.
    """
    kernel, knobs = named, None
    if kernel is None:
        kernel, knobs = family.guess(problem, arch, multiprocessors)
    bucket = problem if family.kernel(kernel).few_answers else family.bucket(problem)
    if bucket != problem:
        with contextlib.suppress(KnobError):
            shared = family.tuned(bucket, arch, multiprocessors, kernel)
            if family.fits(problem, _variant(family, problem, arch, kernel, shared), multiprocessors):
                return kernel, shared
    return kernel, family.tuned(problem, arch, multiprocessors, kernel) if knobs is None else knobs


def default_variants(op: str, arch: Arch, *, multiprocessors: int | None = None) -> tuple[Variant, ...]:
    """The variants that warm-up compiles for family `op` on `arch`: those that its typical calls would run.

    Args:
        multiprocessors: SM count of the device; by default that of the card that `arch` stands for.
    """
    family = kernels.family(op)
    first = [choose(op, problem, arch, multiprocessors=multiprocessors) for problem in family.typical(arch)]
    chosen = [choice.variant for one in first for choice in (one, *companions(one))]
    return tuple({variant.identity: variant for variant in chosen}.values())
