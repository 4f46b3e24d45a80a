"""`moe.grouped` and `moe.combine` compute products and sums, thread for thread, and their launches fit every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts, some
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.moe import MoeProblem, combine, grouped
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.routing.cases import lists as lists_of_routing
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, verify
from strategies import ARCHES, examples

FAMILY = kernels.family("moe")
PRODUCTS = ("up", "down", "combine")
SIZES = st.integers(1, 128).map(lambda blocks: 32 * blocks)
PROBLEMS = st.builds(
    MoeProblem,
    m=st.integers(65, 20_000),
    experts=st.integers(1, 512),
    top=st.integers(1, 8),
    hidden=SIZES,
    intermediate=SIZES,
    product=st.sampled_from(PRODUCTS),
    activation=st.sampled_from(["swiglu_oai", "silu", "plain", "relu2"]),
    weight_on=st.sampled_from(["output", "input"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(40))
@given(problem=PROBLEMS, multiprocessors=st.integers(40, 256))
def test_the_heuristic_is_legal_and_fits_shared_memory(target: Arch, problem: MoeProblem, multiprocessors: int) -> None:
    choice = choose("moe", problem, target, multiprocessors=multiprocessors)
    assert FAMILY.launch(choice.variant, problem, multiprocessors).shared_bytes <= target.shared_bytes


@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(20))
@given(problem=PROBLEMS)
def test_both_products_take_the_same_tiles_of_rows(target: Arch, problem: MoeProblem) -> None:
    tiles = {
        choose("moe", MoeProblem(**problem.as_dict() | {"product": product}), target).variant.knobs.tile_m
        for product in ("up", "down")
    }
    assert len(tiles) == 1


@pytest.mark.parametrize("target", ["sm_120", "sm_121"])
def test_the_model_holds_tiles_of_64_for_faster_where_an_expert_has_few_rows_and_of_128_where_many(target: str) -> None:
    chip = arch.parse(target)
    for m, rows in ((65, 64), (512, 64), (8192, 128), (32768, 128)):
        knobs = FAMILY.tuned(MoeProblem.on(chip, m=m), chip, chip.multiprocessors, "grouped")
        assert (knobs["tile_m"], knobs["tile_n"]) == (rows, 128)


@settings(max_examples=examples(50))
@given(data=st.data())
def test_the_lists_of_cases_are_those_of_routing(data: st.DataObject) -> None:
    experts, rows, top = (data.draw(st.integers(1, high)) for high in (5, 40, 4))
    drawn = data.draw(st.lists(st.integers(-2, experts), min_size=rows * top, max_size=rows * top))
    ids = np.array(drawn, np.int32).reshape(rows, top)
    wanted = lists_of_routing(ids, experts, 16, None)
    pairs, schedule = lists(ids, experts, 16)
    np.testing.assert_array_equal(pairs, wanted.pairs)
    np.testing.assert_array_equal(schedule, wanted.schedule)


# Knobs away from their defaults that change the instructions most, each on one target.
SAMPLE: dict[str, tuple[str, dict[str, Any]]] = {
    "all scales, silu": ("sm_90a", {"scale_range": "full", "activation": "silu", "tile_n": 64, "stages": 3}),
    "all scales, down": ("sm_80", {"scale_range": "full", "product": "down", "warps_m": 2, "pdl": False}),
    "no bias": ("sm_120a", {"bias": False, "encoding": "nibble", "tile_m": 32, "group": 1}),
    "no bias, down, odd warps": ("sm_90a", {"bias": False, "product": "down", "tile_n": 96, "warps_n": 3}),
    "eight rows, added by atomics": ("sm_121a", {"product": "down", "reduction": "atomic", "tile_m": 8}),
    "eight rows, no gates, weights on the input": (
        "sm_90a",
        {"activation": "plain", "weight_on": "input", "tile_m": 8, "scale_range": "full"},
    ),
    "no gates, squares": ("sm_80", {"activation": "relu2", "tile_n": 64, "tile_m": 16, "pdl": False}),
    "gates, weights on the input": ("sm_120a", {"activation": "silu", "weight_on": "input", "encoding": "nibble"}),
    "down, no weights": ("sm_90a", {"product": "down", "weight_on": "input", "tile_m": 128, "warps_m": 2}),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_variant_passes_its_cases_and_they_reach_its_code(name: str, simulated: Callable[[Variant], Verdict]) -> None:
    target, knobs = SAMPLE[name]
    assert simulated(grouped.SPEC.variant(arch.parse(target), **knobs)).error <= 0.006


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_what_a_target_runs_by_default_passes_its_cases(
    target: str, product: str, simulated: Callable[[Variant], Verdict]
) -> None:
    chip = arch.parse(target)
    for m in (256, 8192):
        for residual in RESIDUALS if product == "combine" else (False,):
            problem = MoeProblem.on(chip, m=m, product=product, residual=residual)
            assert simulated(choose("moe", problem, chip).variant).error <= 0.006


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_121a"])
def test_the_machine_code_keeps_its_contract(target: str, nightly: bool) -> None:
    chip = arch.parse(target)
    problems = [
        MoeProblem.on(chip, m=m, product=product, scale_range=scales)
        for product in PRODUCTS for m, scales in ((65, "normal"), (8192, "normal"), (8192, "full"))
    ]  # fmt: skip
    keep_contracts(some((choose("moe", problem, chip).variant for problem in problems), nightly, every=4))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_121a"])
def test_sums_of_as_many_parts_as_there_may_be_keep_their_contract(target: str, nightly: bool) -> None:
    chip = arch.parse(target)
    keep_contracts(some(
        (combine.SPEC.variant(chip, top=top, residual=residual, warps=warps, pdl="pdl" in chip.features)
         for top in (8, 6, 4) for residual in RESIDUALS for warps in (12, 1, 16)), nightly, every=4,
    ))  # fmt: skip


def test_few_rows_have_a_block_each_to_be_summed_and_of_many_as_many_blocks_as_run_side_by_side() -> None:
    def blocks(rows: int, **knobs: Any) -> int:
        made = combine.SPEC.variant(arch.parse("sm_90"), warps=12, **knobs)
        return combine.launch(made.knobs, MoeProblem(rows, product="combine"), 132).blocks

    assert [blocks(rows) for rows in (1, 64, 528, 529, 8192)] == [1, 64, 528, 528, 528]
    assert blocks(8192, residual="pair") == 132 * 3 and blocks(8192, residual="pair", top=8) == 132 * 2


def test_weights_of_the_wrong_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitmx.sim import verify as verifying

    def broken(variant: Variant) -> str:
        source = render(variant)
        cut = source.replace("(u64(tile.expert) * row_tiles + tile.first_row)", "u64(tile.first_row)")
        assert cut != source
        return cut

    monkeypatch.setattr(verifying, "render", broken)
    assert not verify(grouped.SPEC.variant(arch.parse("sm_90"))).passed


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tile_n": 96}, "tile_n=96 is not a multiple of 16 for each of warps_n=4; the nearest legal warps_n is 3"),
        ({"tile_n": 256, "tile_m": 128}, "256 sums a thread .* are over 128"),
        ({"tile_n": 32, "warps_n": 1}, "32 threads are fewer than tile_m=64 rows"),
        ({"blocks_per_sm": 4, "warps_n": 8, "warps_m": 2}, "the nearest legal value is 3"),
        ({"reduction": "atomic"}, "reduction='atomic' is of product='down'; with product='up' leave it at 'ordered'"),
        ({"product": "down", "activation": "silu"}, "activation='silu' is of product='up'"),
    ],
)
def test_knobs_that_do_not_go_together_are_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        grouped.SPEC.variant(arch.parse("sm_90"), **knobs)


def test_what_a_kernel_does_not_make_is_refused() -> None:
    for kernel, problem, said in (
        ("decode", MoeProblem(product="up"), "moe.decode makes whole layers"),
        ("grouped", MoeProblem(product="combine"), "moe.grouped makes one product, and not product=combine"),
        ("combine", MoeProblem(product="down"), "moe.combine adds up parts"),
        ("combine", MoeProblem(product="combine", reduction="atomic"), "not take reduction='atomic', only ordered"),
        ("decode", MoeProblem(activation="plain"), "not take activation='plain', only swiglu_oai or silu"),
        ("decode", MoeProblem(weight_on="input"), "moe.decode does not take weight_on='input', only output"),
        ("grouped", MoeProblem(x_format="mxfp8"), "moe.grouped does not take x_format='mxfp8', only bf16"),
    ):
        with pytest.raises(KnobError, match=said):
            FAMILY.fixed(problem, kernel)


def test_a_chip_without_atomics_on_pairs_of_bf16_adds_up_in_order() -> None:
    with pytest.raises(KnobError, match="reduction='atomic' needs sm_90 or newer; on sm_89 use reduction='ordered'"):
        grouped.SPEC.variant(arch.parse("sm_89"), product="down", reduction="atomic", pdl=False)


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_a_chip_without_dependent_launches_lacks_is_refused(product: str) -> None:
    kernel = "combine" if product == "combine" else "grouped"
    with pytest.raises(KnobError, match="pdl=True needs sm_90 or newer"):
        FAMILY.spec(kernel).variant(arch.parse("sm_80"), pdl=True)


def test_more_rows_than_offsets_reach_are_refused_with_the_limit() -> None:
    problem = MoeProblem(1 << 20, hidden=4096, product="up")
    variant = grouped.SPEC.variant(arch.parse("sm_90"), tile_m=128, warps_m=2)
    with pytest.raises(KnobError, match="use at most 524288 rows a call"):
        FAMILY.check(problem, variant)


def test_tiles_of_rows_beyond_32_bits_of_offsets_are_refused() -> None:
    chip, wide = arch.parse("sm_90"), {"tile_m": 128, "warps_m": 2, "product": "down", "activation": "swiglu_oai"}
    variant = grouped.SPEC.variant(chip, **wide)
    FAMILY.check(MoeProblem(128, hidden=32, intermediate=1 << 24, product="down"), variant)
    FAMILY.check(MoeProblem(16, top=4, hidden=32, intermediate=(1 << 24) + 32, product="down"), variant)
    with pytest.raises(KnobError, match=r"tile_m=128 with k=16777248: .* use tile_m=127 or less"):
        FAMILY.check(MoeProblem(128, hidden=32, intermediate=(1 << 24) + 32, product="down"), variant)
    wide = {"tile_n": 256, "warps_n": 8, "product": "up"}
    variant = grouped.SPEC.variant(chip, **wide)
    with pytest.raises(KnobError, match=r"tile_n=256 with k=33554464: .* use tile_n=240 or less"):
        FAMILY.check(MoeProblem(8, hidden=(1 << 25) + 32, intermediate=128, product="up"), variant)
    with pytest.raises(KnobError, match="k=268435456 passes; use k=268435392 or less"):
        FAMILY.check(MoeProblem(1, hidden=1 << 28, intermediate=32, product="up"), variant)


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_the_tuner_would_try_is_legal_and_starts_with_the_heuristic(product: str) -> None:
    from jitmx.kernels.moe import KERNELS

    chip, kernel = arch.parse("sm_121a"), "combine" if product == "combine" else "grouped"
    problem = MoeProblem.on(chip, m=256, product=product)
    tried = KERNELS[kernel].candidates(problem, chip, chip.multiprocessors)
    assert tried[0] == FAMILY.tuned(problem, chip, chip.multiprocessors, kernel)
    for knobs in tried:
        FAMILY.check(problem, FAMILY.spec(kernel).variant(chip, **knobs, **FAMILY.fixed(problem, kernel)))


@pytest.mark.parametrize("target", ["sm_90", "sm_121"])
def test_few_rows_an_expert_of_few_rows_take_the_smallest_tiles(target: str) -> None:
    chip = arch.parse(target)
    for m, experts, most in ((1, 128, 8), (16, 128, 8), (64, 8, 64)):
        problem = MoeProblem.on(chip, m=m, experts=experts, top=2, hidden=4096, intermediate=14336, product="up")
        assert 8 <= choose("moe", problem, chip).variant.knobs.tile_m <= most


# hidden, intermediate, experts, top; of models, and of layers that the shared memory of a block is too small for.
LAYERS = [
    (2880, 2880, 128, 4), (2880, 2880, 128, 8), (2048, 512, 256, 8), (2048, 1408, 60, 4), (4096, 1536, 128, 8),
    (7168, 2048, 256, 8), (6144, 10752, 16, 4), (4096, 14336, 8, 2), (2880, 11008, 128, 4),
]  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120", "sm_121"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_few_rows_go_by_expert_where_one_launch_has_no_room(layer: tuple[int, int, int, int], target: str) -> None:
    chip = arch.parse(target)
    hidden, intermediate, experts, top = layer
    kinds = set()
    for m in (1, 2, 8, 32, 64):
        for multiprocessors in (chip.multiprocessors, 36):
            problem = MoeProblem.on(chip, m=m, experts=experts, top=top, hidden=hidden, intermediate=intermediate)
            variant = choose("moe", problem, chip, multiprocessors=multiprocessors).variant
            assert FAMILY.launch(variant, problem, multiprocessors).shared_bytes <= chip.shared_bytes
            kinds.add(variant.spec.name)
    # A table may know better than the heuristic for one row.
    large = ["stream", "token"] if chip.shared_bytes >= 200 << 10 else []
    assert kinds <= {"decode", "grouped", *large, *(["fused"] if "wgmma" in chip.features else [])}
    if chip.shared_bytes <= 101_376:  # some rows go by expert, too, where experts have many
        assert kinds == {"grouped"} if intermediate > 10_000 else "decode" in kinds
