"""What tuning is offered for a row: few enough to time, and what is known to win among the first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch
from jitmx.dispatch import offers, tune
from jitmx.kernels.kernel import spread
from jitmx.kernels.linear import FAMILY, GPT_OSS, LinearProblem, candidates, gemv, stream

HOPPER = arch.parse("sm_90a")
DENSE = [(n, k) for n, k, _ in GPT_OSS if n < 100_000]


def whole(knobs: dict[str, Any]) -> dict[str, Any]:
    """Every tuned knob of `stream` that the tests name."""
    return {**stream.SPEC.knobs().as_dict(), **knobs}


@given(st.lists(st.lists(st.integers(), max_size=20), max_size=4))
def test_a_beginning_of_what_is_spread_has_its_share_of_every_part(parts: list[list[int]]) -> None:
    named = [[(number, item) for item in part] for number, part in enumerate(parts)]
    found = spread(*named)
    assert [[item for number, item in found if number == one] for one in range(len(parts))] == parts
    for end in range(len(found)):
        for number, part in enumerate(parts):
            taken = sum(one == number for one, _ in found[:end])
            assert abs(taken - len(part) * end / len(found)) <= len(parts) if found else True


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32, 64, 512, 8192])
@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k, _ in GPT_OSS])
def test_a_row_has_about_a_hundred_candidates_that_open_with_each_kernels_heuristic(m: int, n: int, k: int) -> None:
    (task,) = tune.tasks([(LinearProblem.on(HOPPER, m=m, n=n, k=k), {"m": (m,)})])
    found = offers.candidates("linear", task, HOPPER, 132)
    assert 30 <= len(found) <= 110
    kernels = {one.kernel for one in found}
    assert {one.kernel for one in found[: len(kernels) + 1]} == kernels
    offered = candidates(task.problem, HOPPER, 132)
    assert offered[0][0] == FAMILY.heuristic(task.problem, HOPPER, 132)[0]


@pytest.mark.parametrize(("n", "k"), DENSE)
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_what_won_for_one_row_is_tried_early_for_all_few_and_so_are_its_neighbours(m: int, n: int, k: int) -> None:
    problem = LinearProblem.on(HOPPER, m=m, n=n, k=k)
    found = [whole(knobs) for name, knobs in candidates(problem, HOPPER, 132) if name == "stream"]
    won = {"warps": 20, "split_k": 4, "cluster": 2, "predecode": 1, "unroll": 1, "scaling": "bare"}
    places = [place for place, knobs in enumerate(found) if won.items() <= knobs.items()]
    assert places and places[0] < 6
    early = found[:40]
    for name, values in {
        "cluster": (1, 2, 4), "warps": (12, 16, 20, 24), "sums": ("warp", "block"), "predecode": (0, 1),
        "unroll": (1, 2), "late": (False, True), "ahead": (0, 2),
    }.items():  # fmt: skip
        assert {knobs[name] for knobs in early} >= set(values), name


def test_gemv_is_a_handful_where_stream_serves_and_many_where_it_does_not() -> None:
    def count(problem: LinearProblem, target: arch.Arch) -> int:
        return sum(name == "gemv" for name, _ in candidates(problem, target, target.multiprocessors))

    for m in (1, 4, 8):
        assert count(LinearProblem.on(HOPPER, m=m, n=5120, k=2880), HOPPER) <= 8
        spark = arch.parse("sm_121a")
        assert count(LinearProblem.on(spark, m=m, n=5120, k=2880), spark) >= 20
    # X of these rows does not fit the shared memory that stream keeps it in.
    assert count(LinearProblem.on(HOPPER, m=8, n=64, k=65_536), HOPPER) >= 20


def test_candidates_of_gemv_begin_near_its_heuristic() -> None:
    problem = LinearProblem.on(HOPPER, m=4, n=5120, k=2880)
    usual = gemv.KERNEL.heuristic(problem, HOPPER, 132)
    away = [sum(usual[name] != value for name, value in knobs.items())
            for knobs in gemv.KERNEL.candidates(problem, HOPPER, 132)]  # fmt: skip
    assert away == sorted(away) and away[0] == 0
