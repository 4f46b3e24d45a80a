"""`linear.splitk`: heuristics are legal for every shape, the template agrees with Python, and its cases pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts
from jitmx import arch
from jitmx.build import Built
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError
from jitmx.kernels.linear import splitk
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from strategies import assert_legal_and_serving, examples, linear_problems

HOPPER = arch.parse("sm_90")
PROBLEMS = linear_problems(splitk.MAX_ROWS)


def variant(**knobs: Any) -> Variant:
    return splitk.SPEC.variant(HOPPER, **knobs)


@settings(max_examples=examples(300))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 200))
@example(problem=LinearProblem(1, 1, 32), multiprocessors=132)
@example(problem=LinearProblem(1, 1, 32), multiprocessors=1)
@example(problem=LinearProblem(64, 5120, 2880), multiprocessors=132)
@example(problem=LinearProblem(splitk.MAX_ROWS, 201_088, 2880), multiprocessors=132)
def test_the_heuristic_and_all_candidates_are_legal_and_serve_the_problem(
    problem: LinearProblem, multiprocessors: int
) -> None:
    assert_legal_and_serving(splitk.KERNEL, problem, HOPPER, multiprocessors)


@given(
    m=st.integers(1, 300), n=st.integers(1, 3000), k=st.integers(1, 99), groups=st.sampled_from([2, 3]),
    tile_m=st.sampled_from([16, 48, 64]), split=st.integers(1, 8),
)  # fmt: skip
def test_a_launch_has_a_cluster_for_every_tile_of_y(
    m: int, n: int, k: int, groups: int, tile_m: int, split: int
) -> None:
    knobs = variant(groups=groups, tile_m=tile_m, split_k=split).knobs
    launch = splitk.launch(knobs, LinearProblem(m, n, 32 * k), 132)
    assert launch.cluster == split and launch.blocks % split == 0
    rows, tokens = -(-n // (64 * groups)), -(-m // tile_m)
    assert launch.blocks // split == rows * tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "fp16"}, "does not take dtype='fp16', only 'bf16'; linear.tile takes both"),
        ({"scale_range": "full"}, "does not take scale_range='full', only 'normal'"),
        ({"norm": True}, "does not take norm=True, only norm=False"),
        ({"argmax": True}, "does not take argmax=True"),
        ({"activation": "mxfp8"}, "does not take activation='mxfp8', only activation='none'"),
        ({"weight": "mxfp8"}, "does not take weight='mxfp8', only weight='mxfp4'"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_what_it_does(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        splitk.KERNEL.fixed(LinearProblem(64, **fields))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"ring": 3, "tile_m": 128}, "B of shared memory; a block on sm_90a has at most"),
        ({"tile_m": 72}, "tile_m=72 is not one of"),
        ({"chunk": 2, "ring": 1}, "ring=1 chunks of 2 steps are under the 4 that X needs room for; the nearest legal "),
        ({"tile_m": 128, "groups": 4}, "thread of 104; the nearest legal value is tile_m=48"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_nearest_that_do(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        variant(**knobs)


def test_targets_without_wgmma_are_refused_with_what_to_use() -> None:
    with pytest.raises(KnobError, match=r"needs the instructions of sm_90a, which sm_121a lacks; use linear.tile"):
        splitk.SPEC.variant(arch.parse("sm_121"))


def test_more_slices_than_steps_are_refused() -> None:
    with pytest.raises(KnobError, match=r"split_k=3 is over the 2 steps of k=128; the nearest legal value is 2"):
        splitk.KERNEL.check(LinearProblem(64, 64, 128), variant(split_k=3))


def test_a_tile_override_takes_rows_of_x_and_of_w_and_refuses_other_steps() -> None:
    assert splitk.KERNEL.tile is not None
    assert splitk.KERNEL.tile(64, 128, None, 4) == {"tile_m": 64, "groups": 2, "chunk": 2, "ring": 2}
    with pytest.raises(KnobError, match="takes steps of 64 k, not 128"):
        splitk.KERNEL.tile(64, 128, 128, None)
    with pytest.raises(KnobError, match="takes tiles of 128, 192 or 256 rows of W, not 100; the nearest is 128"):
        splitk.KERNEL.tile(64, 100, 64, None)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"split_k": 1, "chunk": 2, "ring": 4},
        {"tile_m": 128, "chunk": 2, "ring": 3},
        {"groups": 4, "tile_m": 32, "ring": 1},
        {"ring": 1},
        {"tile_m": 80, "residual": "pair"},
    ],
    ids=str,
)
def test_shared_memory_and_registers_are_what_the_template_lays_out(knobs: dict[str, Any]) -> None:
    """The compiler evaluates the template's own struct."""
    one = variant(**knobs)
    assert f"setmaxnreg_inc<{splitk.multiplying_registers(one.knobs)}>" in render(one)
    claim(one, f"sizeof(Shared) == {splitk.shared_bytes(one.knobs)}")


def test_machine_code_keeps_its_contract() -> None:
    """No spills, products of two steps under way, bulk copies."""
    sampled: list[dict[str, Any]] = [
        {},
        {"bias": True, "residual": True},
        {"encoding": "nibble", "split_k": 5},
        {"tile_m": 48, "split_k": 8, "ring": 1},
        {"tile_m": 128, "chunk": 2, "ring": 3, "residual": True, "bias": True},
        {"groups": 4, "tile_m": 32, "residual": True},
        {"tile_m": 128, "chunk": 2, "ring": 3, "residual": "pair", "bias": True},
    ]
    keep_contracts(variant(**knobs) for knobs in sampled)


@pytest.mark.parametrize(
    "knobs",
    [
        {"groups": 2, "tile_m": 16, "ring": 1, "split_k": 3, "bias": True},
        {"groups": 2, "tile_m": 32, "chunk": 2, "ring": 3, "split_k": 5, "residual": True},
        {"groups": 2, "split_k": 1, "ring": 1, "encoding": "nibble", "residual": True},
        {"groups": 4, "tile_m": 32, "split_k": 8, "chunk": 2},
        {"tile_m": 96, "chunk": 2, "pdl": False, "residual": True, "bias": True},
        {"groups": 2, "tile_m": 16, "split_k": 8, "ring": 3},
        {"groups": 2, "tile_m": 32, "chunk": 2, "ring": 3, "split_k": 5, "residual": "pair", "bias": True},
        {"groups": 2, "split_k": 1, "chunk": 2, "residual": "pair"},
    ],
    ids=str,
)
def test_cases_pass_in_the_simulator(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    simulated(variant(**knobs))


def all_products_are_addressed_by_uniform_registers(built: Built, lines: list[str]) -> None:
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    loop = lines[products[0] : products[-1]]
    assert len(products) == 4 * built.variant.knobs.chunk
    assert not [line for line in loop if "R2UR" in line], built.variant.name


def test_the_loop_over_k_addresses_products_by_uniform_registers_alone() -> None:
    """Where the compiler takes the loop for divergent it moves every descriptor across."""
    keep_contracts([variant(), variant(tile_m=128, chunk=2, ring=3)], all_products_are_addressed_by_uniform_registers)


@pytest.mark.parametrize("m", [17, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_what_won_is_tried_early(n: int, k: int, m: int) -> None:
    problem = LinearProblem.on(HOPPER, m=m, n=n, k=k)
    shipped, fixed = choose("linear", problem, HOPPER).variant, splitk.KERNEL.fixed(problem)
    assert shipped.spec is splitk.SPEC
    found = [splitk.SPEC.variant(HOPPER, **fixed, **knobs) for knobs in splitk.KERNEL.candidates(problem, HOPPER, 132)]
    assert shipped in found[:4]
