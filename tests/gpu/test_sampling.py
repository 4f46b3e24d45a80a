"""`jitmx.greedy_sample` on the card: against torch, at the sizes that are served, in graphs, launch after launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitmx
from jitmx import kernels
from jitmx.dispatch.choose import choose
from jitmx.kernels.sampling import GREEDY, SamplingProblem, launch, parts_of
from jitmx.ops import sampling
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

VOCAB = 201_088
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Evidence = Callable[[object, float | None, str], None]


def first_of_largest(logits: torch.Tensor) -> torch.Tensor:
    """By torch, whose own argmax does not say which of several it takes, and takes NaN."""
    found = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    equal = (found == found.amax(-1, keepdim=True)) & ~logits.isnan()
    places = torch.arange(logits.shape[-1], device="cuda", dtype=torch.int32)
    first = torch.where(equal, places, logits.shape[-1]).amin(-1)
    return torch.where(first == logits.shape[-1], 0, first).long()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33, 64, 133, 1024])
def test_tokens_are_the_first_of_the_largest(rows: int, dtype: str, evidence: Evidence) -> None:
    for seed in range(4):
        draw = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn(rows, VOCAB + 8 * seed, device="cuda", generator=draw).to(DTYPES[dtype])[:, :VOCAB]
        if seed == 1:  # nearly all values are shared
            logits = logits.round()
        if seed == 2:
            logits[torch.rand(rows, VOCAB, device="cuda", generator=draw) < 0.01] = torch.nan
            logits[:: max(rows // 2, 1)] = -torch.inf
        assert torch.equal(jitmx.greedy_sample(logits), first_of_largest(logits))
    problem = SamplingProblem(rows, VOCAB, dtype)
    chosen = choose("sampling", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
    evidence(chosen, None, f"{rows} rows of {VOCAB}, exact")


@pytest.mark.parametrize("vocab", [1, 7, 63, 1000, 50_257, 151_669])
def test_rows_may_start_on_any_value(vocab: int) -> None:
    logits = torch.randn(9, vocab + 1, device="cuda").bfloat16()[:, 1:]
    assert torch.equal(jitmx.greedy_sample(logits), first_of_largest(logits))


def candidates() -> list[Variant]:
    arch = card.arch(0)
    kernel, problem = kernels.family("sampling").kernel("greedy"), SamplingProblem()
    return [GREEDY.variant(arch, **knobs) for knobs in kernel.candidates(problem, arch, card.multiprocessors(0))]


def test_every_candidate_leaves_its_workspace_as_it_found_it() -> None:
    for variant in candidates():
        for rows in (1, 5, 64):
            geometry = launch(variant.knobs, SamplingProblem(rows, VOCAB), card.multiprocessors(0))
            shift = parts_of(geometry, rows).bit_length() - 1
            step = Step(variant, 0, geometry, {"stride": VOCAB, "vocab": VOCAB, "shift": shift})
            tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
            for seed in range(5):
                logits = torch.randn(rows, VOCAB, device="cuda").bfloat16() - 3 * seed
                step(logits=logits.data_ptr(), tokens=tokens.data_ptr())
                assert torch.equal(tokens, first_of_largest(logits)), (variant.name, rows, seed)


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_requests_get_what_vllm_gives_them(rows: int) -> None:
    logits = torch.randn(rows, VOCAB, device="cuda").bfloat16()
    prompts = torch.randint(1, 50, (rows + 5,), dtype=torch.int32, device="cuda")
    requests = torch.randperm(rows + 5, device="cuda")[:rows]
    lengths = prompts[requests] + torch.randint(-1, 2, (rows,), dtype=torch.int32, device="cuda")
    tokens, sampled, rejected = sampling.sample_requests(logits, requests, lengths, prompts)
    assert torch.equal(tokens[:, 0], first_of_largest(logits))
    assert torch.equal(sampled, (lengths >= prompts[requests]).int()) and not rejected.any()


def test_it_works_from_a_graph() -> None:
    logits = torch.randn(16, VOCAB, device="cuda").bfloat16()
    jitmx.greedy_sample(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = jitmx.greedy_sample(logits)
    for _ in range(3):
        logits.copy_(torch.randn(16, VOCAB, device="cuda"))
        graph.replay()
        assert torch.equal(tokens, first_of_largest(logits))
