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

SLACK = 144  # bytes: a region that starts on 128, and a barrier


@functools.cache
def quick() -> dict[str, Variant]:
    """Of each kernel whose shared memory no assertion holds, the smallest default variant, on sm_90a or sm_121a."""
    found: dict[str, Variant] = {}
    for target in ("sm_121a", "sm_90a"):
        for family in kernels.families():
            variants = [
                variant
                for variant in default_variants(family, arch.parse(target))
                if variant.spec.family == family
                and any(case.launch.shared_bytes for case in cases(variant))
                and "static_assert(sizeof(Shared) == " not in render(variant)
            ]
            for variant in sorted(variants, key=lambda one: -one.spec.shared_bytes(one.knobs)):
                found[f"{family}.{variant.spec.name}"] = variant
    return found


def cases(variant: Variant) -> list[kernels.Case]:
    return list(kernels.family(variant.spec.family).cases(variant))


@pytest.mark.parametrize("name", sorted(quick()))
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
