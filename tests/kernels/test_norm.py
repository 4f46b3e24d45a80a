"""`norm`: knobs by the length of a row, geometry by the number of rows, and the order of the machine code."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.build import Built
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.norm import BLOCKS, MAX_HIDDEN, RMS, NormProblem, RmsKnobs, concat, launch, of_rows, reference
from jitmx.registry.spec import Variant

TARGETS = ("sm_80", "sm_90a", "sm_121a")


def chosen(hidden: int, target: str = "sm_90a", dtype: str = "bf16") -> Variant:
    return choose("norm", NormProblem(hidden, dtype), arch.parse(target)).variant


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_warm_up_compiles_one_kernel_of_rms(target: str) -> None:
    (variant,) = (one for one in default_variants("norm", arch.parse(target)) if one.spec.name == "rms")
    assert variant.knobs == RmsKnobs(pdl="pdl" in arch.parse(target).features)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_warm_up_compiles_one_kernel_that_puts_rows_of_a_table_beside_those_of_x(target: str) -> None:
    (variant,) = (one for one in default_variants("norm", arch.parse(target)) if one.spec.name == "concat")
    assert variant == beside(2880, target)


def beside(hidden: int, target: str = "sm_90a") -> Variant:
    return choose("norm", NormProblem(hidden, concat=True), arch.parse(target)).variant


def _asks_for_the_weight_and_waits_before_the_next_begins(built: Built, lines: list[str]) -> None:
    order = [found[0] for line in lines if (found := re.search(r"PREEXIT|ACQBULK|LDG\.E[\w.]*", line))]
    vectors = ["LDG.E.128"] * built.variant.knobs.vectors
    assert order[: 2 + len(vectors)] == [*vectors, "ACQBULK", "PREEXIT"]


def test_rows_side_by_side_have_two_blocks_each_and_both_weights_ahead_of_the_wait() -> None:
    assert [concat.launch(rows).blocks for rows in (1, 8, 8192)] == [2, 16, 16384]
    keep_contracts(map(beside, (64, 2880, 8192, 16384)), _asks_for_the_weight_and_waits_before_the_next_begins)


def test_problems_that_another_kernel_takes_are_refused() -> None:
    for kernel, fields, said in (
        ("concat", {}, "norm.concat has rows of a table beside those of x"),
        ("rms", {"concat": True}, "norm.concat puts rows of a table beside them"),
        ("rows", {"concat": True, "y": "e4m3"}, "concat=True"),
        ("concat", {"concat": True, "y": "e4m3"}, "norm.concat"),
    ):
        with pytest.raises(KnobError, match=said):
            kernels.family("norm").fixed(NormProblem(**fields), kernel)


@given(st.integers(1, MAX_HIDDEN // 8).map(lambda vectors: vectors * 8))
def test_a_row_fits_its_block_and_no_smaller_one_of_as_many_vectors(hidden: int) -> None:
    knobs = chosen(hidden).knobs
    assert knobs.capacity >= hidden
    smaller = [block for block in BLOCKS if block < knobs.block]
    assert all(block * knobs.vectors * 8 < hidden for block in smaller)
    assert knobs.vectors == (1 if hidden <= 512 * 8 else 2)


@given(st.integers(1, 1 << 20), st.integers(1, 256), st.sampled_from(BLOCKS), st.sampled_from((1, 2)))
def test_every_row_has_a_block_and_blocks_share_rows_evenly(
    rows: int, multiprocessors: int, block: int, vectors: int
) -> None:
    knobs = RmsKnobs(block=block, vectors=vectors)
    blocks = launch(knobs, rows, multiprocessors).blocks
    assert 1 <= blocks <= min(rows, multiprocessors * knobs.resident)
    most = -(-rows // blocks)
    assert most == -(-rows // (multiprocessors * knobs.resident))
    # The last block that begins takes as many, or one less.
    assert rows // blocks >= most - 1


def test_few_rows_have_a_block_each() -> None:
    assert [launch(RmsKnobs(), rows, 132).blocks for rows in (1, 16, 528, 529, 8192)] == [1, 16, 528, 265, 512]


def test_rows_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(KnobError, match=r"hidden=2881 is not a multiple of 8.*2880"):
        chosen(2881)
    with pytest.raises(KnobError, match="above its limit"):
        NormProblem(MAX_HIDDEN + 8)
    knobs = {"block": 256, "vectors": 1}
    with pytest.raises(KnobError, match="takes rows of 2048 values, and hidden is 2880"):
        choose("norm", NormProblem(2880), arch.parse("sm_90"), knobs=knobs)


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code_of_every_length_meets_its_contract(target: str) -> None:
    lengths = (64, 2048, 2880, 4096, 5120, 8192, 12288, 16384)
    keep_contracts(chosen(hidden, target, dtype) for dtype in ("bf16", "fp16") for hidden in lengths)


def _lets_the_next_begin_and_asks_for_the_weight_ahead_of_the_wait(built: Built, lines: list[str]) -> None:
    """ptxas moves loads through .nc behind the wait."""
    order = [found[0] for line in lines if (found := re.search(r"PREEXIT|ACQBULK|LDG\.E[\w.]*|SHFL|STG\.E", line))]
    loads = ["LDG.E.128"] * built.variant.knobs.vectors
    # x of the first row, and of the next one.
    assert order[: order.index("SHFL")] == ["PREEXIT", *loads, "ACQBULK", *loads, *loads]
    assert order[-1] == "STG.E"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_121a"])
def test_the_next_launch_may_begin_then_the_weight_is_asked_for_then_the_previous_one_is_waited_for(
    target: str,
) -> None:
    look = _lets_the_next_begin_and_asks_for_the_weight_ahead_of_the_wait
    keep_contracts((chosen(hidden, target) for hidden in (2880, 8192)), look)


def test_the_reference_is_what_float64_says_and_follows_fp32_where_squares_overflow() -> None:
    x = np.array([[3.0, 4.0], [0.0, -0.0], [1e30, 1.0], [np.inf, 1.0], [np.nan, 1.0]])
    found = reference(x, np.array([1.0, 2.0]), 0.0)
    root = np.sqrt(12.5)
    np.testing.assert_allclose(found[0], [3 / root, 8 / root])
    assert np.isnan(found[1]).all() and (found[2] == 0).all()
    assert np.isnan(found[3, 0]) and found[3, 1] == 0 and np.isnan(found[4]).all()


def test_far_cases_pass_2_to_the_32_in_vectors_of_x_and_of_y() -> None:
    cases = [case for case in kernels.family("norm").cases(chosen(2880)) if case.sparse]
    assert len(cases) == 3
    for case in cases:
        sizes = [case.buffers(RMS.arguments(RmsKnobs()))[name].nbytes for name in ("x", "y")]
        assert max(sizes) > 1 << 36 and sum(sizes) < 80 << 30


def test_fields_of_rows_are_counted_in_vectors() -> None:
    assert of_rows(3, 2880, 5760) == {"stride": 720, "rows": 3, "vectors": 360, "inverse": 1 / 2880}
