"""Launch every kernel of this card once in each of its ways, on the largest case of a usual variant: for a sanitizer.

    compute-sanitizer --tool memcheck python -m scripts.protocol.launches [--smallest] [WAY]…

Knobs decide which of jitmx's headers a kernel is made of. The way of its first usual variant has its name,
`linear.stream`; one made of another header besides is `linear.stream+whole_ring`, one that lacks some is named
`linear.scaled-arrival`.

A fault takes the process's context with it, and the kernels behind it; `scripts.protocol.sanitize` gives each its own.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import click

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import default_variants
from jitmx.errors import KnobError
from jitmx.registry.case import Buffer, Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import headers


def alternatives(family: str, arch: Arch) -> Iterator[Variant]:
    """What each kernel of a family would run for the typical problems that it serves."""
    found = kernels.family(family)
    for spec in found.specs:
        for problem in found.typical(arch):
            if spec.name not in found.serving(problem, arch):
                continue
            try:
                tuned = found.tuned(problem, arch, arch.multiprocessors, spec.name)
                variant = spec.variant(arch, **tuned, **found.fixed(problem, spec.name))
            except KnobError:  # it has no room for so many rows
                continue
            yield variant


def usual(arch: Arch) -> Iterator[tuple[str, Variant]]:
    """Usual variants of each kernel on `arch`, with the kernel's name, FAMILY.KERNEL.

    Default variants come first, then kernels that serve where they are asked for by name. What one family takes by
    default may be a kernel of another: experts of many rows are listed by routing.
    """
    for variants in (default_variants, alternatives):
        for family in kernels.families():
            for variant in variants(family, arch):
                yield f"{variant.spec.family}.{variant.spec.name}", variant


@functools.cache
def ways(arch: Arch, only: frozenset[str] = frozenset()) -> tuple[tuple[str, Variant], ...]:
    """The first usual variant of each way of each kernel on `arch` that has a case, with the way's name.

    Args:
        only: FAMILY.KERNEL of those to look at; empty, all.
    """
    first: dict[str, frozenset[str]] = {}
    found: dict[str, Variant] = {}
    for kernel, variant in usual(arch):
        if only and kernel not in only:
            continue
        made_of = parts(variant)
        way = kernel + difference(first.setdefault(kernel, made_of), made_of)
        if way not in found and any(True for _ in kernels.family(variant.spec.family).cases(variant)):
            found[way] = variant
    return tuple(found.items())


def parts(variant: Variant) -> frozenset[str]:
    """Stems of the headers that its source includes."""
    return frozenset(PurePosixPath(each.name).stem for each in headers.directives(render(variant), headers.SOURCE))


def difference(one: frozenset[str], other: frozenset[str]) -> str:
    """What `other` has more and less than `one`, as text that goes behind a kernel's name."""
    return "".join((*(f"+{part}" for part in sorted(other - one)), *(f"-{part}" for part in sorted(one - other))))


def kernel_of(way: str) -> str:
    """FAMILY.KERNEL of a way."""
    return re.split("[+-]", way)[0]


def chosen(arch: Arch, only: Sequence[str] = (), smallest: bool = False) -> Iterator[tuple[Variant, Case]]:
    """What `ways` gives, each with its largest case, in which rings turn, or its smallest; none of many GB.

    Args:
        only: ways; empty, all.
    """

    def size(case: Case) -> int:
        return sum(item.data.nbytes for item in case.values.values() if isinstance(item, Buffer))

    pick = min if smallest else max
    for way, variant in ways(arch, frozenset(map(kernel_of, only))):
        if not only or way in only:
            cases = kernels.family(variant.spec.family).cases(variant)
            yield variant, pick((case for case in cases if not case.sparse), key=size)


def launch(variant: Variant, case: Case) -> float:
    """The error of one launch on device 0."""
    from jitmx.runtime import trial

    return case.check(trial.outputs(case, variant, poison=False))


@click.command()
@click.argument("only", nargs=-1, metavar="[WAY]...")
@click.option("--smallest", is_flag=True, help="Launch the smallest case, in which hardly a ring turns.")
def main(only: tuple[str, ...], smallest: bool) -> None:
    """A line a launch: how far it is from its reference."""
    from jitmx.runtime import card

    count = failed = 0
    for variant, case in chosen(card.arch(0), only, smallest):
        try:
            error = launch(variant, case)
        except Exception as fault:
            sys.exit(f"{variant.name}, {case.name}: {type(fault).__name__}: {fault}\nnothing was launched after it")
        count, failed = count + 1, failed + (not error <= case.gate)
        print(f"{variant.name}, {case.name}: error {error:.3g}, gate {case.gate:g}", flush=True)
    if not count:
        sys.exit(f"no kernel of this card is among {', '.join(only) or 'the default variants'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
