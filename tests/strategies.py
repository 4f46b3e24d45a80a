"""Problems and legal variants of kernels, for properties that hold for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from jitmx import kernels
from jitmx.arch import SUPPORTED, Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.moe import MoeProblem
from jitmx.registry.spec import KernelSpec, Variant

ARCHES = tuple(SUPPORTED.values())
SPECS = tuple(spec for family in kernels.families().values() for spec in family.specs)
SPEC_NAMES = tuple(f"{spec.family}.{spec.name}" for spec in SPECS)
# For what is asked of each of these: together they have many examples.
OF_EACH = settings(max_examples=settings.default.max_examples // 4)


def examples(count: int) -> int:
    """A third of so many by day, five times as many in the nightly run: of a property that has a number of its own."""
    return max(count * settings.default.max_examples // 60, min(count, 3))


_SIZES = st.integers(1, 128).map(lambda blocks: 32 * blocks)
# Layers of experts that one launch may make.
SMALL_LAYERS = st.builds(
    MoeProblem,
    m=st.integers(1, 64),
    experts=st.integers(1, 512),
    top=st.integers(1, 8),
    hidden=_SIZES,
    intermediate=_SIZES,
    activation=st.sampled_from(["swiglu_oai", "silu"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
)


def linear_problems(max_rows: int) -> st.SearchStrategy[LinearProblem]:
    """Products of up to so many rows with what kernels of warpgroups serve."""
    return st.builds(
        LinearProblem,
        m=st.integers(1, max_rows),
        n=st.integers(1, 300_000),
        k=st.integers(1, 512).map(lambda blocks: 32 * blocks),
        bias=st.booleans(),
        residual=st.sampled_from(RESIDUALS),
        encoding=st.sampled_from(["rotated", "nibble"]),
    )


def assert_legal_and_serving(kernel: Kernel, problem: LinearProblem, arch: Arch, multiprocessors: int) -> None:
    """The heuristic and every candidate are legal and serve the problem; the heuristic is the first of 60 at most."""
    fixed = kernel.fixed(problem)
    chosen = kernel.heuristic(problem, arch, multiprocessors)
    candidates = kernel.candidates(problem, arch, multiprocessors)
    assert candidates[0] == chosen and len(candidates) <= 60
    for knobs in candidates:
        assert not knobs.keys() & fixed.keys()
        kernel.check(problem, kernel.spec.variant(arch, **knobs, **fixed))


def values(item: dataclasses.Field[Any]) -> Sequence[Any]:
    """Every legal value of one knob, of which there may be a million."""
    if isinstance(item.default, bool):
        return tuple(item.metadata["choices"] or (False, True))
    if item.metadata["choices"] is not None:
        return tuple(item.metadata["choices"])
    return range(item.metadata["low"], item.metadata["high"] + 1)


def sampled(item: dataclasses.Field[Any]) -> Sequence[Any]:
    """Values of one knob that tests take each of: all, but of a range of thousands its end and powers of two."""
    low, high = item.metadata["low"], item.metadata["high"]
    if item.metadata["choices"] is None and not isinstance(item.default, bool) and high - low > 4096:
        return tuple(sorted({high, *(1 << i for i in range(high.bit_length()) if low <= 1 << i)}))
    return values(item)


@functools.cache
def served(spec: KernelSpec, arch: Arch) -> Problem | None:
    """A problem that the kernel serves on a target: a typical one, or one that asks for a thing that is not typical."""
    family = kernels.family(spec.family)
    if not family.kernel(spec.name).runs_on(arch):
        return None
    for problem in _asked(list(family.typical(arch))):
        larger = [problem, dataclasses.replace(problem, m=512)] if hasattr(problem, "m") else [problem]
        for asked in larger:
            if spec.name in family.serving(asked, arch):
                return asked
    return None


def _asked(typical: Sequence[Problem]) -> Iterator[Problem]:
    """Typical problems, then the first and the last of them with each other value of each flag and word."""
    yield from typical
    for one in (typical[0], typical[-1]):
        for item in dataclasses.fields(one):
            if isinstance(item.default, bool) or item.metadata.get("choices"):
                for value in values(item):
                    with contextlib.suppress(KnobError):  # not beside what the typical one asks for
                        yield dataclasses.replace(one, **{item.name: value})


def arches_of(spec: KernelSpec) -> tuple[Arch, ...]:
    """The targets that a kernel has variants for."""
    return tuple(arch for arch in ARCHES if served(spec, arch) is not None)


@functools.cache
def usual(spec: KernelSpec, arch: Arch) -> Variant:
    """What the heuristic makes of a problem that the kernel serves: legal on `arch`."""
    family, problem = kernels.family(spec.family), served(spec, arch)
    assert problem is not None, f"{spec.family}.{spec.name} serves nothing on {arch}"
    tuned = family.tuned(problem, arch, arch.multiprocessors, spec.name)
    return spec.variant(arch, **{**tuned, **family.fixed(problem, spec.name)})


def changed(variant: Variant, **knobs: Any) -> Variant | None:
    """`variant` with other knobs, or None where that is illegal."""
    try:
        return dataclasses.replace(variant, knobs=dataclasses.replace(variant.knobs, **knobs))
    except KnobError:
        return None


@functools.cache
def changes_of(spec: KernelSpec) -> st.SearchStrategy[tuple[str, Any]]:
    """A knob and one of its values."""
    return st.sampled_from([(item.name, value) for item in dataclasses.fields(spec.knobs) for value in sampled(item)])


@st.composite
def variants(draw: st.DrawFn, spec: KernelSpec, arches: tuple[Arch, ...] = (), changes: int = 24) -> Variant:
    """A legal variant: the usual one after up to so many changes of one knob, of which illegal ones are passed over."""
    variant = usual(spec, draw(st.sampled_from(arches or arches_of(spec))))
    for name, value in draw(st.lists(changes_of(spec), max_size=changes)):
        variant = changed(variant, **{name: value}) or variant
    return variant
