"""`topk`: launches fit cards and rows, variants keep their contracts, and cases pass thread for thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.topk import DTYPES, MAX_K, SELECT, TopkProblem, launch, numbers_of, reference
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from strategies import ARCHES, examples, variants

FAMILY = kernels.family("topk")
GPT_OSS = 201_088


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(60))
@given(
    rows=st.integers(1, 2048), vocab=st.integers(MAX_K, 300_000), k=st.integers(1, MAX_K),
    dtype=st.sampled_from(DTYPES), multiprocessors=st.integers(1, 256), data=st.data(),
)  # fmt: skip
def test_any_legal_variant_has_a_launch_whose_blocks_all_have_k_values(
    target: Arch, rows: int, vocab: int, k: int, dtype: str, multiprocessors: int, data: st.DataObject
) -> None:
    problem = TopkProblem(rows, vocab, k, dtype)
    chosen = choose("topk", problem, target, multiprocessors=multiprocessors).variant
    assert chosen.knobs.dtype == dtype
    for variant in (chosen, data.draw(variants(SELECT, (target,)))):
        geometry = launch(variant.knobs, problem, multiprocessors)
        parts = 1 << numbers_of(geometry, problem)["shift"]
        assert geometry.blocks == rows * parts and parts <= variant.knobs.parts
        assert geometry.workspace >= (rows * (16 + 8 * parts * k) if parts > 1 else 0)
        if parts > 1:  # blocks of a row begin together, and each finds k ranks
            width = 4 if variant.knobs.dtype == "fp32" else 8
            assert geometry.blocks * variant.threads <= multiprocessors * max(1024, variant.threads)
            assert vocab // width // parts >= variant.threads and variant.threads * width >= k


def test_one_kernel_takes_all_rows_and_every_k_and_more_rows_have_fewer_blocks_each() -> None:
    names, parts = set(), []
    for rows, k in ((1, 1), (1, 64), (8, 8), (9, 8), (132, 10), (1024, 64)):
        problem = TopkProblem(rows, GPT_OSS, k)
        variant = choose("topk", problem, arch.parse("sm_90a"), multiprocessors=132).variant
        names.add(variant.name)
        parts.append(launch(variant.knobs, problem, 132).blocks // rows)
    assert len(names) == 1 and parts == [32, 32, 32, 16, 2, 1]
    for target in ARCHES:
        assert len(default_variants("topk", target)) == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopkProblem(vocab=7), "k=8 is over the 7 values of a row; use k=7 at most"),
        (lambda: TopkProblem(k=65), "k=65 is above its limit; the nearest legal value is 64"),
        (lambda: SELECT.variant(arch.parse("sm_90a"), vectors=4), "vectors=4 of bf16 are 32 values a thread.*is 2"),
        (lambda: SELECT.variant(arch.parse("sm_80")), "pdl=True needs sm_90 or newer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(make: Callable[[], object], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        make()


@given(data=st.data(), vocab=st.integers(1, 40))
def test_the_reference_agrees_with_a_stable_sort_where_all_are_numbers(data: st.DataObject, vocab: int) -> None:
    few = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf])
    row = np.array([[data.draw(few) for _ in range(vocab)]])
    k = data.draw(st.integers(1, vocab))
    wanted = torch.sort(torch.from_numpy(row), stable=True, descending=True).indices[:, :k]
    assert reference(row, k).tolist() == wanted.tolist()


def test_the_reference_has_nan_behind_all_numbers_by_index() -> None:
    nan, least = np.nan, -np.inf
    assert reference(np.array([[nan, 1, nan, least, 1]]), 5).tolist() == [[1, 4, 3, 0, 2]]


def several() -> list[Variant]:
    made: list[tuple[str, dict[str, Any]]] = [
        ("sm_90a", {"dtype": "fp32", "block": 256, "vectors": 1, "parts": 8}),
        ("sm_80", {"block": 128, "vectors": 1, "parts": 2, "pdl": False}),
    ]
    return [SELECT.variant(arch.parse(target), **knobs) for target, knobs in made]


@pytest.mark.parametrize("variant", several(), ids=lambda variant: f"{variant.arch}-{variant.name}")
def test_variants_that_no_heuristic_chooses_pass_their_cases(
    variant: Variant, simulated: Callable[[Variant], Verdict]
) -> None:
    assert simulated(variant).error == 0.0


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_what_heuristic_and_tuning_take_keeps_its_contract(target: str, nightly: bool) -> None:
    chosen, kernel = arch.parse(target), FAMILY.kernel("select")
    found = list(default_variants("topk", chosen))
    for dtype in DTYPES if nightly else DTYPES[:1]:
        candidates = kernel.candidates(TopkProblem(dtype=dtype), chosen, chosen.multiprocessors)
        found += [SELECT.variant(chosen, dtype=dtype, **knobs) for knobs in candidates[:: 1 if nightly else 6]]
    keep_contracts(found)
