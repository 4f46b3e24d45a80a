"""The simulator's benchmark has a variant of every kernel."""

from __future__ import annotations

from jitmx import kernels
from jitmx.arch import parse
from scripts.bench_sim import kernels_of


def test_every_kernel_of_every_family_has_a_benchmark() -> None:
    listed = {(variant.spec.family, variant.spec.name) for _, variant in kernels_of(parse("sm_90a"))}
    assert listed == {(name, spec.name) for name in kernels.families() for spec in kernels.family(name).specs}
