"""`jitmx.topk` on a simulated card."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import jitmx
from jitmx.errors import InputError
from simulated_card import Simulated
from strategies import examples

BF16 = torch.bfloat16
TARGETS = pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"], indirect=True)


def some(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Values of which many are equal."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By a sort that leaves equals in their order."""
    order = np.argsort(-x.double().numpy(), axis=-1, kind="stable")[..., :k]
    return torch.from_numpy(np.take_along_axis(x.double().numpy(), order, -1)).to(x.dtype), torch.from_numpy(order)


@pytest.mark.nightly(by_day="each value")
@TARGETS
@pytest.mark.parametrize(
    ("shape", "k", "dtype"),
    [((7,), 7, BF16), ((2, 3, 130), 5, torch.float16), ((1, 9001), 64, BF16), ((2, 5003), 10, torch.float32)],
)
def test_values_and_indices_are_those_of_a_stable_sort(
    card: Simulated, shape: tuple[int, ...], k: int, dtype: torch.dtype
) -> None:
    x = some(*shape, dtype=dtype)
    found = jitmx.topk(x, k)
    values, indices = wanted(x, k)
    assert found.values.dtype == dtype and found.indices.dtype == torch.int64
    assert torch.equal(found.values, values) and torch.equal(found.indices, indices)
    assert card.kernels == ["topk.select"]


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(st.floats(-3, 3, width=16), min_size=1, max_size=200), k=st.integers(1, 64))
def test_any_row_agrees_with_a_stable_sort(card: Simulated, values: list[float], k: int) -> None:
    x = torch.tensor(values, dtype=torch.float16) + 0  # no zero with a sign
    k = min(k, len(values))
    assert torch.equal(jitmx.topk(x, k).indices, wanted(x, k)[1])


def test_rows_of_a_slice_are_read_where_they_lie(card: Simulated) -> None:
    whole = some(4, 3, 300)
    whole[..., 251:] = 99
    for x in (whole[..., :251], whole[:, 1, 3:200], whole[1, :, :8]):
        assert torch.equal(jitmx.topk(x, 6).indices, wanted(x, 6)[1])


def test_nothing_is_launched_for_no_rows_and_one_kernel_takes_every_k(card: Simulated) -> None:
    assert jitmx.topk(some(0, 40), 3).values.shape == (0, 3) and not card.launched
    for k in (1, 2, 40):
        jitmx.topk(some(2, 40), k)
    assert len({variant.identity for variant in card.launched}) == 1


def test_the_operator_does_the_same_and_traces_without_data(card: Simulated) -> None:
    x = some(2, 3, 50)
    for one, other in zip(torch.ops.jitmx.topk_rows(x, 4), jitmx.topk(x, 4), strict=True):
        assert torch.equal(one, other)
    with FakeTensorMode():
        found = jitmx.topk(torch.empty(2, 3, 50, dtype=BF16), 4)
    assert (found.values.shape, found.values.dtype, found.indices.dtype) == ((2, 3, 4), BF16, torch.int64)


@pytest.mark.parametrize(
    ("x", "k", "said"),
    [
        (some(3, 8).double(), 2, "topk takes bfloat16, float16 or float32"),
        (some(3, 8).t(), 2, r"strides \[1, 8\]; values of a row must follow one another"),
        (some(3, 0), 1, "a row has 1 to"),
        (some(3, 8), 9, r"k=9 of rows of 8: topk takes 1 to 8; use k=8 at most"),
        (some(3, 80), 65, r"k=65 of rows of 80: topk takes 1 to 64; use k=64 at most"),
        (some(3, 8), 0, "k=0 of rows of 8"),
        (some(3, 8), True, "k=True is not a whole number; pass k as an int"),
        (some(3, 8).float().requires_grad_(), 2, "requires a gradient"),
        ([1.0], 1, "x is a list, not a torch tensor"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(card: Simulated, x: torch.Tensor, k: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        jitmx.topk(x, k)
    assert not card.launched
