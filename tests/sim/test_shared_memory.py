"""Dynamic shared memory: what Python asks for is what the kernel uses, neither less nor, beyond an alignment, more.

Where its size does not depend on the launch, a static assertion in the source says so; here it is shown by running each
kernel with less.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from jitmx import arch, kernels
from jitmx.dispatch.choose import default_variants
from jitmx.errors import SimulationError
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import launch
from jitmx.toolchain import nvrtc

KERNELS = (
    "linear.gemv", "linear.slice", "linear.stream", "linear.tile", "moe.decode", "moe.grouped", "pack.pack",
    "routing.route", "routing.sort", "routing.topk",
)  # fmt: skip
LARGE = ("moe.stream", "moe.token", "routing.many")
SLACK = 144  # bytes: a region that starts on 128, and a barrier


@functools.cache
def quick() -> dict[str, Variant]:
    """Of each kernel whose shared memory no assertion holds, the smallest default variant, on sm_90a or sm_121a."""
    found: dict[str, Variant] = {}
    for target in ("sm_90a", "sm_121a"):
        for family in kernels.families():
            variants = [v for v in default_variants(family, arch.parse(target))[::-1] if v.spec.family == family]
            for variant in sorted(variants, key=lambda one: one.spec.shared_bytes(one.knobs)):
                name = f"{family}.{variant.spec.name}"
                if name not in found and _open(variant):
                    found[name] = variant
    return found


def _open(variant: Variant) -> bool:
    """Whether a variant uses dynamic shared memory, and no assertion holds how much."""
    source = render(variant)
    return "extern __shared__" in source and "static_assert(sizeof(Shared) == " not in source


def cases(variant: Variant) -> list[kernels.Case]:
    return list(kernels.family(variant.spec.family).cases(variant))


def test_these_are_the_kernels_whose_shared_memory_no_assertion_holds() -> None:
    assert sorted(quick()) == sorted([*KERNELS, *LARGE])


@pytest.mark.parametrize("name", [*KERNELS, *(pytest.param(name, marks=pytest.mark.nightly) for name in LARGE)])
def test_a_kernel_with_less_shared_memory_than_its_launch_asks_for_is_caught(name: str) -> None:
    variant = quick()[name]
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
    smallest_first = sorted(cases(variant), key=lambda case: case.launch.blocks * case.launch.shared_bytes)
    for case in smallest_first:
        if case.launch.shared_bytes <= SLACK:
            continue
        less = dataclasses.replace(case.launch, shared_bytes=case.launch.shared_bytes - SLACK)
        try:
            launch(dataclasses.replace(case, launch=less), variant, ptx)
        except SimulationError as fault:
            assert "shared" in str(fault), fault
            return
    raise AssertionError(f"no case of {variant.name} uses the last {SLACK} bytes that its launch asks for")
