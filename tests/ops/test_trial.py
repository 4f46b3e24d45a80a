"""Cases on a card, which is the simulator here: one launch, and chains on one workspace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jitmx import arch, kernels
from jitmx.errors import SimulationError
from jitmx.registry.case import Buffer, Case, chains
from jitmx.registry.spec import Variant
from jitmx.runtime import trial
from simulated_card import on_cpu

ONE = (
    kernels.family("linear")
    .spec("tile")
    .variant(
        arch.parse("sm_121a"),
        encoding="nibble",
        tile_n=32,
        tile_m=16,
        warps_n=2,
        warps_m=1,
        stages=3,
        split_k=2,
        bias=True,
    )
)


def smallest(variant: Variant) -> Case:
    return next(iter(kernels.family(variant.spec.family).cases(variant)))


def test_a_case_alone_gives_its_outputs() -> None:
    case = smallest(ONE)
    with on_cpu():
        assert case.check(trial.outputs(case, ONE)) <= case.gate


def test_a_chain_launches_each_case_on_what_the_one_before_left() -> None:
    chain = next(chains([smallest(ONE)]))
    assert len(chain) == 3
    with on_cpu() as card:
        found = trial.sequence(chain, ONE)
    assert len(card.launched) == len(found) == 3
    for case, outputs in zip(chain, found, strict=True):
        assert case.check(outputs) <= case.gate
    assert found[0][0].tobytes() == found[1][0].tobytes() != found[2][0].tobytes()


def test_the_workspace_is_that_of_the_first_case() -> None:
    case = smallest(ONE)
    left = Buffer(np.full(case.launch.workspace, 1, np.uint8), scratch=True)  # counters that nobody set back
    other = replace(case, values=case.values | {"workspace": left})
    with on_cpu():
        assert all(case.check(found) <= case.gate for found in trial.sequence((case, other), ONE))
        with pytest.raises(SimulationError, match="with nothing between them that orders the two"):
            trial.sequence((other, case), ONE)
