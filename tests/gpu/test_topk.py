"""`jitmx.topk` on the card: against a stable sort, at the sizes that are served, in graphs, launch after launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitmx
from jitmx import kernels
from jitmx.bench import timing
from jitmx.dispatch.choose import choose
from jitmx.kernels.topk import SELECT, TopkProblem, launch, numbers_of
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

VOCAB = 201_088
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Evidence = Callable[[object, float | None, str], None]


def wanted(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices by a sort that leaves equals in their order, NaN behind all numbers."""
    key = torch.where(x.isnan(), -torch.inf, x.float())
    order = torch.sort(key, dim=-1, descending=True, stable=True).indices
    # Behind numbers, -inf among them, NaN: they go by their indices too.
    nothing = x.isnan().gather(-1, order)
    behind = torch.sort(nothing.byte(), dim=-1, stable=True).indices
    return order.gather(-1, behind)[..., :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 9, 64, 133, 300])
def test_indices_are_those_of_a_stable_sort(rows: int, dtype: str, evidence: Evidence) -> None:
    for seed, k in enumerate((1, 8, 64, 33, 10, 64)):
        draw = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, VOCAB + 8 * seed, device="cuda", generator=draw).to(DTYPES[dtype])[:, :VOCAB]
        if seed == 1:  # nearly all values are shared
            x = x.round()
        if seed == 2:
            x[torch.rand(rows, VOCAB, device="cuda", generator=draw) < 0.01] = torch.nan
            x[:: max(rows // 2, 1)] = -torch.inf
        if seed == 3:  # each round is above all before it
            x = (torch.arange(VOCAB, device="cuda") / 8).expand(rows, -1).to(DTYPES[dtype]).contiguous()
        if seed == 5:
            x[:, 1000:5000] += 100
        found = jitmx.topk(x, k)
        right = wanted(x, k)
        assert torch.equal(found.indices, right), seed
        values = x.gather(-1, right)
        assert ((found.values == values) | (found.values.isnan() & values.isnan())).all()
    problem = TopkProblem(rows, VOCAB, 8, dtype)
    chosen = choose("topk", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(chosen, None, f"{rows} rows of {VOCAB}, exact")


@pytest.mark.parametrize("vocab", [1, 7, 63, 100, 1000, 50_257, 151_669])
def test_rows_may_start_on_any_value(vocab: int) -> None:
    x = torch.randn(9, vocab + 1, device="cuda").bfloat16()[:, 1:]
    k = min(vocab, 64)
    assert torch.equal(jitmx.topk(x, k).indices, wanted(x, k))


def candidates() -> list[Variant]:
    arch = card.arch(0)
    kernel, problem = kernels.family("topk").kernel("select"), TopkProblem()
    return [SELECT.variant(arch, **knobs) for knobs in kernel.candidates(problem, arch, card.multiprocessors(0))]


def test_every_candidate_leaves_its_workspace_as_it_found_it() -> None:
    for variant in candidates():
        for rows, k in ((1, 64), (5, 3), (64, 8)):
            problem = TopkProblem(rows, VOCAB, k)
            geometry = launch(variant.knobs, problem, card.multiprocessors(0))
            step = Step(variant, 0, geometry, {"stride": VOCAB, **numbers_of(geometry, problem)})
            values = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda")
            indices = torch.empty(rows, k, dtype=torch.int64, device="cuda")
            for seed in range(5):
                x = torch.randn(rows, VOCAB, device="cuda").bfloat16() - 3 * seed
                step(x=x.data_ptr(), values=values.data_ptr(), indices=indices.data_ptr())
                assert torch.equal(indices, wanted(x, k)), (variant.name, rows, seed)


def test_it_works_from_a_graph() -> None:
    x = torch.randn(3, VOCAB, device="cuda").bfloat16()
    jitmx.topk(x, 10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = jitmx.topk(x, 10)
    for _ in range(3):
        x.copy_(torch.randn(3, VOCAB, device="cuda"))
        graph.replay()
        assert torch.equal(found.indices, wanted(x, 10))


@pytest.mark.alone
@pytest.mark.parametrize(("k", "most"), [(8, 12e-6), (64, 18e-6)])
def test_one_row_takes_no_longer_than_was_measured_and_a_third(k: int, most: float) -> None:
    rows = [torch.randn(1, VOCAB, device="cuda").bfloat16() for _ in range(3)]

    def run() -> None:
        for call in range(48):
            jitmx.topk(rows[call % 3], k)

    assert timing.replayed(run) / 48 <= most
