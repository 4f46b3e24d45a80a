"""`moe.fused` computes both products in one launch, and is taken where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.dispatch.choose import choose, companions
from jitmx.errors import KnobError
from jitmx.kernels.moe import KERNELS, MoeProblem, fused, wgmma
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from strategies import examples

FAMILY = kernels.family("moe")
HOPPER = arch.parse("sm_90")
SIZES = st.integers(1, 128).map(lambda blocks: 32 * blocks)
LAYERS = st.builds(
    MoeProblem,
    m=st.integers(1, 20_000),
    experts=st.integers(1, 128),
    top=st.integers(1, 8),
    hidden=SIZES,
    intermediate=SIZES,
    activation=st.sampled_from(["swiglu_oai", "silu"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
)
SMALL = {"tile_m": 64, "tile_n": 128, "depth": 2, "stages": 2}


def variant(**knobs: Any) -> Variant:
    return fused.SPEC.variant(HOPPER, **knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {**SMALL, "grain": 8},
        {**SMALL, "grain": 16, "pdl": False, "bias": False, "activation": "silu"},
        {"tile_m": 64, "grain": 8, "stages": 3, "depth": 4},
        {"tile_m": 128, "grain": 64, "stages": 3, "depth": 3, "encoding": "nibble"},
    ],
    ids=str,
)
def test_cases_pass_in_the_simulator(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    assert simulated(variant(**knobs)).error <= 0.006


def test_machine_code_keeps_its_contract() -> None:
    tiles = ((64, 8, 192, 3, 4), (64, 8, 256, 2, 4), (128, 16, 192, 3, 3), (192, 16, 192, 3, 2), (320, 32, 128, 4, 1))
    names = ("tile_m", "grain", "tile_n", "stages", "depth")
    keep_contracts(variant(**dict(zip(names, tile, strict=True))) for tile in tiles)


@settings(max_examples=examples(60))
@given(problem=LAYERS, multiprocessors=st.integers(1, 200))
def test_a_layer_that_asks_for_it_takes_four_launches_of_the_same_tiles(
    problem: MoeProblem, multiprocessors: int
) -> None:
    layer = choose("moe", problem, HOPPER, multiprocessors=multiprocessors, knobs={"kernel": "fused"})
    assert FAMILY.launch(layer.variant, problem, multiprocessors).shared_bytes <= HOPPER.shared_bytes
    others = [one.variant for one in companions(layer)]
    assert [one.spec.name for one in others] == ["sort", "gather", "combine"]
    sort, gather, _ = others
    assert sort.knobs.tile == gather.knobs.tile_m == layer.variant.knobs.tile_m and gather.knobs.tile_counters


@settings(max_examples=examples(60))
@given(problem=LAYERS, multiprocessors=st.integers(1, 200))
def test_what_is_tried_is_legal(problem: MoeProblem, multiprocessors: int) -> None:
    tried = KERNELS["fused"].candidates(problem, HOPPER, multiprocessors)
    assert tried[0] == FAMILY.tuned(problem, HOPPER, multiprocessors, "fused")
    for knobs in tried:
        FAMILY.check(problem, variant(**knobs, **FAMILY.fixed(problem, "fused")))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ({"product": "up"}, "moe.fused makes both products, and not product=up"),
        ({"x_format": "fp8"}, "moe.fused does not take x_format='fp8'"),
        ({"scale_range": "full"}, "moe.fused"),
        ({"activation": "relu2"}, "moe.fused does not take activation='relu2'"),
        ({"reduction": "atomic"}, "moe.fused does not take reduction='atomic'"),
    ],
)
def test_what_it_cannot_serve_is_refused(problem: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        choose("moe", MoeProblem(**{"m": 64} | problem), HOPPER, knobs={"kernel": "fused"})


def test_other_targets_and_tiles_that_do_not_fit_registers_are_refused() -> None:
    with pytest.raises(KnobError, match="needs the instructions of sm_90a, which sm_121a lacks"):
        fused.SPEC.variant(arch.parse("sm_121"))
    with pytest.raises(KnobError, match="the nearest legal value is tile_m=192"):
        variant(tile_m=320)


@pytest.mark.parametrize("rows", [16, 64, 128, 256, 512])
def test_its_tiles_are_those_of_two_launches(rows: int) -> None:
    problem = MoeProblem(rows, 32)
    first = wgmma._heuristic(MoeProblem(rows, 32, product="up"), HOPPER, 132)
    assert FAMILY.tuned(problem, HOPPER, 132, "fused") == first
