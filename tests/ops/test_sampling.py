"""`jitmx.greedy_sample`, and the tokens of requests as vLLM wants them, on a simulated card."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import jitmx
from jitmx import arch
from jitmx.errors import InputError
from jitmx.kernels.sampling import reference
from jitmx.ops import sampling
from simulated_card import Simulated

BF16 = torch.bfloat16
TARGETS = pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"], indirect=True)


def logits(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Values of which many are equal."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(given: torch.Tensor) -> torch.Tensor:
    rows = given.double().reshape(-1, given.shape[-1]).numpy()
    return torch.from_numpy(reference(rows)).view(given.shape[:-1])


@pytest.mark.nightly(by_day="each value")
@TARGETS
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (77,), (1, 5003), (3, 9001), (2, 3, 130), (5, 1)])
def test_tokens_are_the_first_of_the_largest(card: Simulated, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = logits(*shape, dtype=dtype)
    found = jitmx.greedy_sample(given)
    assert found.dtype == torch.int64 and torch.equal(found, wanted(given))
    assert card.kernels == ["sampling.greedy"]


def test_rows_of_a_slice_are_read_where_they_lie(card: Simulated) -> None:
    whole = logits(4, 3, 300)
    whole[..., 251:] = 99
    for given in (whole[..., :251], whole[:, 1, 3:200], whole[1, :, :8]):
        assert torch.equal(jitmx.greedy_sample(given), wanted(given))


def test_out_is_written_and_returned_and_nothing_is_launched_for_no_rows(card: Simulated) -> None:
    given, out = logits(3, 40), torch.empty(3, dtype=torch.int64)
    assert jitmx.greedy_sample(given, out=out) is out and torch.equal(out, wanted(given))
    assert jitmx.greedy_sample(logits(0, 40)).shape == (0,) and len(card.launched) == 1


def test_the_operator_does_the_same_and_traces_without_data(card: Simulated) -> None:
    given = logits(2, 3, 50)
    assert torch.equal(torch.ops.jitmx.greedy_sample(given), wanted(given))
    with FakeTensorMode():
        found = jitmx.greedy_sample(torch.empty(2, 3, 50, dtype=BF16))
    assert (found.shape, found.dtype) == ((2, 3), torch.int64)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (logits(3, 8).double(), "greedy_sample takes bfloat16, float16 or float32"),
        (logits(3, 8).t(), r"strides \[1, 8\]; values of a row must follow one another"),
        (logits(4, 6, 8)[:, ::2, ::1][::2], "rows lie evenly"),
        (logits(3, 0), "a row has 1 to"),
        (logits(3, 8).float().requires_grad_(), "requires a gradient"),
        (torch.tensor(1.0), "a row has 1 to"),
        ([1.0], "logits is a list, not a torch tensor"),
    ],
)
def test_logits_that_do_not_fit_are_refused_with_the_reason(card: Simulated, given: torch.Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        jitmx.greedy_sample(given)
    assert not card.launched


def test_an_out_that_does_not_fit_is_refused(card: Simulated) -> None:
    for out in (torch.empty(3), torch.empty(2, dtype=torch.int64), torch.empty(6, dtype=torch.int64)[::2]):
        with pytest.raises(InputError, match=r"it must be contiguous int64 \[3\]"):
            jitmx.greedy_sample(logits(3, 40), out=out)
    assert not card.launched


def stock(
    given: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vLLM's sampler and `get_num_sampled_and_rejected` make of one row a request."""
    reading = lengths < prompts[requests]
    sampled = torch.where(reading, 0, torch.ones_like(lengths))
    return given.float().argmax(-1).view(-1, 1), sampled, torch.where(reading, 0, 1 - sampled)


@TARGETS
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_requests_get_what_vllm_gives_them(card: Simulated, rows: int) -> None:
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        given = torch.randn(rows, 700, generator=draw).to(BF16)
        prompts = torch.randint(1, 50, (rows + 5,), generator=draw, dtype=torch.int32)
        requests = torch.randperm(rows + 5, generator=draw)[:rows]
        lengths = prompts[requests] + torch.randint(-1, 2, (rows,), generator=draw, dtype=torch.int32)
        padding = torch.zeros(seed, dtype=torch.int32)
        found = sampling.sample_requests(given, requests, torch.cat([lengths, padding]), prompts)
        for tensor, right in zip(found, stock(given, requests, lengths, prompts), strict=True):
            assert tensor.dtype == right.dtype and torch.equal(tensor, right)
    assert card.kernels == ["sampling.greedy"] * 3


def test_requests_that_do_not_go_with_the_logits_are_refused(card: Simulated) -> None:
    given, requests = logits(2, 40), torch.arange(2)
    lengths, prompts = torch.ones(2, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    for wrong in (
        (given, requests.int(), lengths, prompts), (given, requests[:1], lengths, prompts),
        (given, requests, lengths[:1], prompts),
        (given, requests, lengths.long(), prompts), (given, requests, lengths, prompts[::2]),
        (given[None], requests[:1], lengths[:1], prompts),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"they must be \[rows, vocab\], int64 and int32 of as many"):
            sampling.sample_requests(*wrong)
    assert not card.launched


def test_launches_of_other_numbers_of_rows_are_of_one_kernel(card: Simulated) -> None:
    for rows in (1, 2, 40):
        jitmx.greedy_sample(logits(rows, 3000))
    assert len({variant.identity for variant in card.launched}) == 1 and card.target == arch.parse("sm_121a")
