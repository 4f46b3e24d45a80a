"""`linear.slice`: right on every target as simulated, within the chip's limits, with legal heuristics."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError, SimulationError
from jitmx.kernels.linear import GPT_OSS
from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.slice import KERNEL, SPEC, launch
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples, variants

TARGETS = ("sm_80", "sm_90a")
HOPPER = arch.parse("sm_90a")
DENSE = [(n, k) for n, k, _ in GPT_OSS if n < 100_000]
SERVED = [chip for chip in ARCHES if KERNEL.runs_on(chip)]
PROBLEMS = st.builds(
    LinearProblem,
    m=st.integers(1, 40),
    n=st.integers(1, 20_000),
    k=st.integers(1, 512).map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.booleans(),
    residual=st.sampled_from(RESIDUALS),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
)

# Knobs away from their defaults that change the code most, small enough to simulate quickly.
SAMPLE: dict[str, dict[str, Any]] = {
    "one row, scaled as it is decoded": {"warps": 4},
    "four rows, columns split": {"m": 4, "scaling": "post", "warps": 2, "tiles": 3, "predecode": 2, "bias": True},
    "fp16 nibbles of any scale": {
        "m": 2, "dtype": "fp16", "scaling": "bare", "encoding": "nibble", "scale_range": "full", "warps": 4, "tiles": 1,
        "residual": True,
    },
    "two columns of MMA": {"m": 16, "scaling": "halves", "warps": 4, "tiles": 3},
    "pair": {"m": 8, "scaling": "halves", "warps": 4, "tiles": 3, "bias": True, "residual": "pair"},
    "tiles of two rows decoded early": {"m": 16, "warps": 4, "tiles": 2, "predecode": 3},
    "32 rows, whose sums have a place of their own": {"m": 32, "warps": 4, "tiles": 2, "predecode": 2, "bias": True},
    "eight rows of any scale": {"m": 8, "scaling": "post", "scale_range": "full", "warps": 2, "predecode": 1},
}  # fmt: skip
HOPPERS: dict[str, dict[str, Any]] = {
    "bare bf16 in clusters": {"scaling": "bare", "cluster": 2, "warps": 4, "predecode": 2, "window": 1},
    "bare bf16, tiles of two rows decoded early": {"m": 2, "scaling": "bare", "cluster": 2, "warps": 4, "predecode": 3},
    "bare bf16 of any scale": {
        "m": 4, "scaling": "bare", "scale_range": "full", "encoding": "nibble", "warps": 4, "window": 2,
    },
    "fp16 in clusters": {
        "m": 8, "dtype": "fp16", "scaling": "post", "cluster": 2, "warps": 4, "bias": True, "residual": True,
    },
    "32 rows in clusters": {"m": 32, "cluster": 2, "warps": 4, "tiles": 3, "window": 2, "residual": True},
    "two columns of MMA in clusters": {"m": 16, "cluster": 2, "warps": 2, "tiles": 2, "predecode": 1, "window": 3},
    "codes read two tiles ahead": {
        "m": 4, "scaling": "bare", "cluster": 2, "warps": 2, "tiles": 4, "predecode": 5, "window": 1, "residual": True,
    },
    "rows in two copies, sums in two chains": {
        "m": 16, "cluster": 2, "warps": 4, "tiles": 3, "window": 2, "pieces": 2, "chains": 2, "bias": True,
    },
}  # fmt: skip


def variant(target: str, **knobs: Any) -> Variant:
    """On targets that lack bulk copies or dependent launch, without them."""
    chip = arch.parse(target)
    modern = "tma" in chip.features
    return SPEC.variant(chip, **{"pdl": modern, "copy": "bulk" if modern else "async", **knobs})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sample", SAMPLE)
def test_it_passes_its_cases_and_they_reach_its_code(
    sample: str, target: str, simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(variant(target, **SAMPLE[sample]))


@pytest.mark.parametrize("sample", HOPPERS)
def test_what_only_hopper_takes_passes_its_cases(sample: str, simulated: Callable[[Variant], Verdict]) -> None:
    simulated(variant("sm_90a", **HOPPERS[sample]))


@settings(max_examples=examples(8))
@given(picked=variants(SPEC).filter(lambda v: v.knobs.m * v.knobs.warps <= 64))
def test_any_legal_variant_computes_what_it_should(picked: Variant) -> None:
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    for case in KERNEL.cases(picked):
        error, _ = run(case, picked, ptx)
        assert error <= case.gate, case.name


@pytest.mark.parametrize(
    "knobs", [SAMPLE["four rows, columns split"], HOPPERS["fp16 in clusters"], HOPPERS["32 rows in clusters"]]
)
def test_no_byte_of_shared_memory_is_asked_for_in_vain(knobs: dict[str, Any]) -> None:
    """All of it is used, but for what aligns the mbarriers: with 32 less, some access is outside."""
    picked = variant("sm_90a", **knobs)
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    k = 64 * picked.knobs.cluster * picked.knobs.warps * picked.knobs.tiles
    geometry = launch(picked.knobs, LinearProblem(n=16 * 2 * picked.knobs.cluster, k=k), picked.knobs.cluster)

    case = make_case(picked, geometry, picked.knobs.m, 16 * 2 * picked.knobs.cluster, k, 0)
    run(case, picked, ptx)
    short = dataclasses.replace(geometry, shared_bytes=geometry.shared_bytes - 32)
    with pytest.raises(SimulationError):
        run(dataclasses.replace(case, launch=short), picked, ptx)


def test_zeros_stand_for_the_tiles_that_a_warp_lacks_even_where_scales_are_nan() -> None:
    picked = variant("sm_90a", m=2, scaling="post", scale_range="full", warps=2, tiles=3)
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    case = make_case(picked, launch(picked.knobs, LinearProblem(2, 40, 64 * 4), 1), 2, 40, 64 * 4, 3)
    error, _ = run(case, picked, ptx)
    assert error <= case.gate


@given(problem=PROBLEMS, target=st.sampled_from(SERVED), multiprocessors=st.integers(1, 200))
def test_heuristic_knobs_are_legal_wherever_there_are_some(
    problem: LinearProblem, target: Arch, multiprocessors: int
) -> None:
    try:
        tuned = KERNEL.heuristic(problem, target, multiprocessors)
    except KnobError as error:
        assert "use linear.stream" in str(error)
        return
    picked = SPEC.variant(target, **KERNEL.fixed(problem), **tuned)
    KERNEL.check(problem, picked)
    assert KERNEL.launch(picked.knobs, problem, multiprocessors).shared_bytes <= target.shared_bytes


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), DENSE)
def test_small_weights_have_candidates_of_several_shares_and_windows(n: int, k: int, m: int) -> None:
    found = KERNEL.candidates(LinearProblem.on(HOPPER, m=m, n=n, k=k), HOPPER, 132)
    assert {knobs["cluster"] for knobs in found} == {2}
    shares = {(12, 2), (8, 3)} if k == 2880 else {(16, 2), (12, 3), (8, 4)}
    assert {(knobs["warps"], knobs["tiles"]) for knobs in found} == shares
    assert {knobs["window"] for knobs in found} == {0 if m > 16 else 3, 1, 2} and found[0]["window"] == 2
    assert len({SPEC.variant(HOPPER, m=m, **knobs).identity for knobs in found}) == len(found)


@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize(("n", "k"), DENSE)
def test_what_won_is_tried_early(n: int, k: int, m: int) -> None:
    problem = LinearProblem.on(HOPPER, m=m, n=n, k=k)
    shipped = choose("linear", problem, HOPPER).variant
    assert shipped.spec is SPEC
    fixed = KERNEL.fixed(problem)
    found = [SPEC.variant(HOPPER, **fixed, **knobs) for knobs in KERNEL.candidates(problem, HOPPER, 132)]
    assert shipped in found[:12]


@pytest.mark.parametrize("multiprocessors", [132, 114])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_without_clusters_a_block_has_whole_rows(m: int, multiprocessors: int) -> None:
    tuned = KERNEL.heuristic(LinearProblem(m, 2880, 1024), arch.parse("sm_80"), multiprocessors)
    assert (tuned["cluster"], tuned["window"], tuned["copy"]) == (1, 0, "async")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tiles": 2, "predecode": 5}, "nearest legal value is 4"),
        ({"warps": 16, "blocks_per_sm": 4}, "nearest legal value is 3"),
        ({"pdl": False, "window": 1}, "selects nothing"),
        ({"pieces": 2, "window": 0}, "use pieces=1"),
        ({"chains": 2, "tiles": 1}, "use chains=1"),
        ({"scaling": "halves", "dtype": "fp16"}, "use scaling='post'"),
    ],
)
def test_an_illegal_variant_is_refused_with_the_nearest_legal_value(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=re.escape(message)):
        SPEC.variant(HOPPER, **knobs)


def test_a_weight_with_more_k_than_warps_have_registers_for_is_refused() -> None:
    picked = SPEC.variant(HOPPER, warps=4, tiles=2, cluster=2)
    with pytest.raises(KnobError, match="room for 16 tiles"):
        KERNEL.check(LinearProblem(n=64, k=64 * 17), picked)
