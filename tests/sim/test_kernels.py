"""Every default variant computes what it should, thread for thread, on targets of every generation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jitmx import arch
from jitmx.dispatch.choose import default_variants
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict

TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
FAMILIES = ("bandwidth", "linear", "pack", "quantize")
DEFAULTS = [v for target in TARGETS for family in FAMILIES for v in default_variants(family, arch.parse(target))]


@pytest.mark.parametrize("variant", DEFAULTS, ids=lambda variant: f"{variant.arch}-{variant.name}")
def test_it_passes_its_cases_and_they_reach_its_code(variant: Variant, simulated: Callable[[Variant], Verdict]) -> None:
    verdict = simulated(variant)
    assert verdict.error <= 0.005 if variant.spec.family == "linear" else verdict.error == 0.0
