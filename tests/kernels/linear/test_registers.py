"""Blocks a multiprocessor, held to the registers that they leave a thread: what is refused would have spilled."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from contracts import keep_contracts
from jitmx import arch as arches
from jitmx.build import Built
from jitmx.errors import KnobError
from jitmx.kernels.linear import KERNELS
from jitmx.registry.contract import Contract

# Kernel, target, and knobs of one block too many: each takes its registers for another reason.
TOO_MANY: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gemv", "sm_90a", {"unroll": 8, "chunk": 8, "blocks_per_sm": 5}),
    ("gemv", "sm_120a", {"engine": "fma", "m": 8, "blocks_per_sm": 3}),
    ("gemv", "sm_80", {"copy": "async", "pdl": False, "chunk": 8, "unroll": 8, "blocks_per_sm": 6}),
    ("stream", "sm_90a", {"predecode": 3, "warps": 12, "blocks_per_sm": 3}),
    ("stream", "sm_121a", {"scaling": "post", "m": 16, "warps": 12, "blocks_per_sm": 3}),
    ("stream", "sm_120a", {"m": 32, "tile_rows": 2, "blocks_per_sm": 3}),
    ("stream", "sm_90a", {"norm": True, "m": 4, "warps": 10, "split_k": 5, "blocks_per_sm": 4}),
    ("stream", "sm_90a", {"norm": True, "predecode": 3, "blocks_per_sm": 4}),
    ("stream", "sm_80", {"warps": 24, "copy": "async", "pdl": False, "blocks_per_sm": 2}),
    ("slice", "sm_90a", {"m": 16, "tiles": 4, "blocks_per_sm": 3}),
    ("slice", "sm_90a", {"tiles": 3, "predecode": 6, "blocks_per_sm": 3}),
    ("tile", "sm_120a", {"tile_m": 96, "blocks_per_sm": 3}),
    ("tile", "sm_90a", {"tile_m": 64, "weight": "mxfp8", "stages": 3, "blocks_per_sm": 3}),
)


def its_registers_are_spilled(built: Built, lines: list[str]) -> None:
    assert built.record.outputs["spill_bytes"] > 0


@pytest.mark.parametrize(("kernel", "target", "knobs"), TOO_MANY)
def test_blocks_that_leave_too_few_registers_are_refused_and_the_nearest_that_are_not_spill_nothing(
    kernel: str, target: str, knobs: dict[str, Any]
) -> None:
    spec, arch = KERNELS[kernel].spec, arches.parse(target)
    with pytest.raises(KnobError, match="registers, under the") as error:
        spec.variant(arch, **knobs)
    loose = dataclasses.replace(spec, check=lambda *_: None, contract=lambda *_: Contract(max_spill_bytes=1 << 20))
    keep_contracts([loose.variant(arch, **knobs)], its_registers_are_spilled)
    nearest = re.search(r"the nearest legal value is blocks_per_sm=(\d+)$", str(error.value))
    assert nearest
    most = int(nearest[1])
    keep_contracts([spec.variant(arch, **{**knobs, "blocks_per_sm": most})])
    with pytest.raises(KnobError, match="registers, under the"):
        spec.variant(arch, **{**knobs, "blocks_per_sm": most + 1})
