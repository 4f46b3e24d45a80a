"""`sampling`: launches fit cards and rows, variants keep their contracts, and cases pass thread for thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts, some
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.sampling import DTYPES, GREEDY, SamplingProblem, launch, parts_of, reference
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from strategies import ARCHES, examples, variants

FAMILY = kernels.family("sampling")
GPT_OSS = 201_088


def greedy(target: str, **knobs: Any) -> Variant:
    return GREEDY.variant(arch.parse(target), **knobs)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(100))
@given(
    rows=st.integers(1, 2048), vocab=st.integers(1, 300_000), dtype=st.sampled_from(DTYPES),
    multiprocessors=st.integers(1, 256), data=st.data(),
)  # fmt: skip
def test_any_legal_variant_has_a_launch_whose_blocks_all_have_work(
    target: Arch, rows: int, vocab: int, dtype: str, multiprocessors: int, data: st.DataObject
) -> None:
    problem = SamplingProblem(rows, vocab, dtype)
    chosen = choose("sampling", problem, target, multiprocessors=multiprocessors).variant
    assert chosen.knobs.dtype == dtype
    for variant in (chosen, data.draw(variants(GREEDY, (target,)))):
        geometry = launch(variant.knobs, problem, multiprocessors)
        parts = parts_of(geometry, rows)
        assert geometry.blocks == rows * parts and parts & parts - 1 == 0 and parts <= variant.knobs.parts
        assert geometry.cluster == (parts if variant.knobs.cluster else 1) <= 16
        assert geometry.workspace == (16 * rows if parts > 1 and not variant.knobs.cluster else 0)
        if parts > 1:  # blocks of a row begin together, each with a vector a thread
            assert geometry.blocks * variant.threads <= multiprocessors * max(1024, variant.threads)
            assert vocab * (4 if variant.knobs.dtype == "fp32" else 2) // 16 // parts >= variant.threads


def test_one_kernel_takes_all_rows_and_more_rows_have_fewer_blocks_each() -> None:
    h200 = arch.parse("sm_90a")
    names, parts = set(), []
    for rows in (1, 16, 33, 34, 64, 132, 1024):
        problem = SamplingProblem(rows, GPT_OSS)
        variant = choose("sampling", problem, h200, multiprocessors=132).variant
        names.add(variant.name)
        parts.append(parts_of(launch(variant.knobs, problem, 132), rows))
    assert len(names) == 1 and parts == [8, 8, 8, 4, 4, 2, 1]
    for target in ARCHES:
        assert len(default_variants("sampling", target)) == 2


def test_a_row_has_one_block_a_multiprocessor_and_more_where_blocks_meet_in_the_workspace() -> None:
    problem = SamplingProblem(1, GPT_OSS)
    assert launch(greedy("sm_90a", cluster=False, parts=128, block=128).knobs, problem, 132).blocks == 128
    assert launch(choose("sampling", problem, arch.parse("sm_121a")).variant.knobs, problem, 48).blocks == 32


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: greedy("sm_80", pdl=False), "cluster=True needs sm_90 or newer; on sm_80 use cluster=False"),
        (lambda: greedy("sm_90a", parts=32), "parts=32 is over the 16 blocks of a cluster; the nearest .* is 16"),
        (lambda: greedy("sm_80", cluster=False), "pdl=True needs sm_90 or newer"),
        (lambda: greedy("sm_90a", parts=3), "parts=3"),
        (lambda: SamplingProblem(vocab=0), "vocab=0 is below its limit; the nearest legal value is 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(make: Callable[[], object], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        make()


@given(data=st.data(), rows=st.integers(1, 4), vocab=st.integers(1, 40))
def test_the_reference_agrees_with_torch_where_there_is_a_number(data: st.DataObject, rows: int, vocab: int) -> None:
    few = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf])
    logits = np.array([[data.draw(few) for _ in range(vocab)] for _ in range(rows)])
    assert reference(logits).tolist() == torch.from_numpy(logits).argmax(1).tolist()


def test_the_reference_passes_over_nan_and_has_the_first_index_of_nothing_else() -> None:
    nan, least = np.nan, -np.inf
    rows = np.array([[nan, 1, 1], [nan, nan, least], [nan, nan, nan], [-0.0, 0.0, nan], [least, least, least]])
    assert reference(rows.astype(ml_dtypes.bfloat16)).tolist() == [1, 2, 0, 0, 0]


# Of every kind: many blocks a row, one warp more than there must be, all threads that a block may have.
SEVERAL = [
    greedy("sm_90a", parts=16, block=128, vectors=1),
    greedy("sm_90a", dtype="fp16", parts=2, block=1024, vectors=1),
    greedy("sm_90a", dtype="fp32", parts=8, block=256, vectors=4, cluster=False),
    greedy("sm_120a", dtype="fp32", parts=1, block=128, vectors=2),
    greedy("sm_80", parts=128, block=128, vectors=2, cluster=False, pdl=False),
]


@pytest.mark.parametrize("variant", SEVERAL, ids=lambda variant: f"{variant.arch}-{variant.name}")
def test_variants_that_no_heuristic_chooses_pass_their_cases(
    variant: Variant, simulated: Callable[[Variant], Verdict]
) -> None:
    assert simulated(variant).error == 0.0


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_what_heuristic_and_tuning_take_keeps_its_contract(target: str, nightly: bool) -> None:
    chosen, kernel = arch.parse(target), FAMILY.kernel("greedy")
    found = list(default_variants("sampling", chosen))
    for dtype in DTYPES:
        problem = SamplingProblem(dtype=dtype)
        knobs = kernel.candidates(problem, chosen, chosen.multiprocessors)
        found += some([GREEDY.variant(chosen, dtype=dtype, **each) for each in knobs], nightly)
    keep_contracts(found)
