"""`jitmx.rms_norm` whole, its kernel simulated: values, layouts, what is refused, and what torch knows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

import jitmx
from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.norm import MAX_HIDDEN, NormProblem
from jitmx.ops import norm
from jitmx.ops.linear import compose
from rms_oracle import normalized, rounded_once
from simulated_card import Simulated

BF16 = torch.bfloat16
HIDDEN = 72


def inputs(*shape: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """x of this shape, and a weight."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, weight = torch.randn(shape, generator=generator), torch.rand(shape[-1], generator=generator).add(0.5)
    return x.to(dtype), weight.to(dtype)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"], indirect=True)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_it_is_what_float64_says_rounded_once(card: Simulated, dtype: torch.dtype) -> None:
    for shape in ((HIDDEN,), (1, 8), (5, HIDDEN), (2, 3, HIDDEN), (3, 2880), (2, 8192)):
        x, weight = inputs(*shape, dtype=dtype)
        y = jitmx.rms_norm(x, weight)
        assert y.shape == x.shape and y.dtype is dtype and y.is_contiguous() and rounded_once(y, normalized(x, weight))
    assert card.kernels == ["norm.rms"] * 6
    x, weight = inputs(3, HIDDEN, dtype=dtype)
    assert rounded_once(jitmx.rms_norm(x, weight, 0.5), normalized(x, weight, 0.5))


def test_more_rows_than_blocks_run_side_by_side_are_all_there(card: Simulated) -> None:
    """4 multiprocessors take 48 blocks of 128 threads."""
    x, weight = inputs(131, 16)
    assert rounded_once(jitmx.rms_norm(x, weight), normalized(x, weight))


def test_no_rows_launch_nothing(card: Simulated) -> None:
    weight = inputs(HIDDEN)[1]
    for shape in ((0, HIDDEN), (2, 0, HIDDEN)):
        assert jitmx.rms_norm(torch.empty(shape, dtype=BF16), weight).shape == shape
    assert card.kernels == []


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "a slice of columns": lambda: inputs(4, 3 * HIDDEN)[0][:, HIDDEN : 2 * HIDDEN],
    "every other row": lambda: inputs(7, HIDDEN)[0][::2],
    "the same row": lambda: inputs(1, HIDDEN)[0].expand(3, HIDDEN),
    "heads of a slice": lambda: inputs(3, 4 * HIDDEN)[0][:, : 2 * HIDDEN].unflatten(1, (2, HIDDEN))[:, 1],
    "one row among others": lambda: inputs(3, 2, HIDDEN)[0][1:2, 1],
    "an outer dimension of one": lambda: inputs(5, 2, HIDDEN)[0][:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_lie_at_a_distance(layout: str, card: Simulated) -> None:
    x, weight = LAYOUTS[layout](), inputs(HIDDEN)[1]
    y = jitmx.rms_norm(x, weight)
    assert y.is_contiguous() and rounded_once(y, normalized(x, weight))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "values apart": (lambda: inputs(2, 2 * HIDDEN)[0][:, ::2], r"x has strides \[144, 2\]"),
    "rows at an odd distance": (lambda: inputs(3, HIDDEN + 4)[0][:, :HIDDEN], "lie at one distance, a multiple of 8"),
    "rows at two distances": (lambda: inputs(3, 4, HIDDEN)[0][:, :2], r"pass x\.contiguous\(\)"),
    "astray": (lambda: inputs(2 * HIDDEN + 8)[0][1:][: 2 * HIDDEN].view(2, HIDDEN), "no multiple of 16 bytes"),
    "ragged": (lambda: inputs(2, HIDDEN + 4)[0], "must be a multiple of 8, 16384 at most"),
    "long": (lambda: inputs(1, MAX_HIDDEN + 8)[0], "must be a multiple of 8, 16384 at most"),
    "a number": (lambda: torch.zeros((), dtype=BF16), "its last dimension must be"),
    "float32": (lambda: inputs(2, HIDDEN)[0].float(), "rms_norm takes bfloat16 or float16"),
    "traced": (lambda: inputs(2, HIDDEN)[0].requires_grad_(), "x requires a gradient"),
    "no tensor": (lambda: [1.0], "x is a list, not a torch tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_x_that_the_kernel_cannot_take_is_refused_with_the_reason(what: str, card: Simulated) -> None:
    make, said = REFUSED[what]
    x = make()
    weight = torch.ones(x.shape[-1] if isinstance(x, torch.Tensor) and x.dim() else HIDDEN, dtype=BF16)
    jitmx.rms_norm(*inputs(2, HIDDEN))
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            jitmx.rms_norm(x, weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(HIDDEN)}, r"weight is float32 \[72\].* must be contiguous bfloat16 \[72\]"),
        ({"weight": torch.ones(HIDDEN + 8, dtype=BF16)}, r"weight is bfloat16 \[80\]"),
        ({"weight": torch.ones(HIDDEN + 1, dtype=BF16)[1:]}, "weight starts at an address that is no multiple of 16"),
        ({"weight": torch.ones(HIDDEN, dtype=BF16, requires_grad=True)}, "weight requires a gradient"),
        ({"weight": None}, "weight is a NoneType, not a torch tensor"),
        ({"epsilon": -1.0}, "epsilon=-1.0 is not a finite number of 0 or more"),
        ({"epsilon": float("nan")}, "epsilon=nan is not"),
        ({"out": torch.zeros(2, HIDDEN)}, r"out is float32 \[2, 72\]"),
        ({"out": torch.zeros(2 * HIDDEN, dtype=BF16)}, r"out is bfloat16 \[144\]"),
        ({"out": torch.zeros(HIDDEN, 2, dtype=BF16).t()}, r"out is .* with strides \[1, 2\]"),
        ({"out": torch.zeros(2 * HIDDEN + 1, dtype=BF16)[1:].view(2, HIDDEN)}, "out starts at an address"),
        ({"out": 7}, "out is a int, not a torch tensor"),
    ],
)
def test_other_inputs_that_do_not_fit_are_refused_warm_too(change: dict[str, Any], said: str, card: Simulated) -> None:
    x, weight = inputs(2, HIDDEN)
    jitmx.rms_norm(x, weight)
    card.launched.clear()
    with pytest.raises(InputError, match=said):
        jitmx.rms_norm(x, **{"weight": weight, **change})
    assert card.kernels == []


def test_what_it_writes_may_be_x_itself_and_may_overlap_it_in_no_other_way(card: Simulated) -> None:
    x, weight = inputs(5, HIDDEN)
    y = jitmx.rms_norm(x, weight)
    assert jitmx.rms_norm(x, weight, out=x) is x and torch.equal(x, y)
    memory = torch.zeros(8, HIDDEN, dtype=BF16)
    for x, out in (
        (memory[:4], memory[1:5]), (memory[1:5], memory[:4]), (memory[::2], memory[:4]), (memory[:1].expand(4, -1),
        memory[:4]), (memory[:7:2], memory[3:7]),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"out overlaps x, .*pass another tensor, or x itself, where"):
            jitmx.rms_norm(x, weight, out=out)
    assert jitmx.rms_norm(memory[:4], weight, out=memory[4:]).data_ptr() == memory[4:].data_ptr()


def test_a_warm_call_that_writes_into_a_given_tensor_asks_for_no_variant(
    card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs(3, HIDDEN)
    first = jitmx.rms_norm(x, weight)
    monkeypatch.setattr(norm, "choose", None)
    out = torch.full_like(x, torch.nan)
    assert jitmx.rms_norm(x, weight, out=out) is out and torch.equal(out, first)


def test_torch_knows_it_by_name(card: Simulated) -> None:
    x, weight = inputs(3, HIDDEN)
    out = torch.full_like(x, torch.nan)
    for check in (
        (torch.ops.jitmx.rms_norm.default, (x, weight, 1e-5)),
        (
            torch.ops.jitmx.rms_norm_out.default,
            (x, weight, 1e-5, out),
        ),
    ):
        opcheck(*check, test_utils=("test_schema", "test_faketensor"))
    step = torch.compile(lambda x: jitmx.rms_norm(x, weight) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = inputs(rows, HIDDEN)[0]
        assert torch.equal(step(x), jitmx.rms_norm(x, weight) * 2)


def test_compiled_code_writes_over_its_input(card: Simulated) -> None:
    x, weight = inputs(3, HIDDEN)
    y = jitmx.rms_norm(x, weight)
    torch.compile(lambda x: jitmx.rms_norm(x, weight, out=x), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(x, y)


@given(hidden=st.integers(1, 40).map(lambda vectors: vectors * 8), stride=st.integers(0, 4), rows=st.integers(1, 4))
def test_a_plan_knows_where_rows_lie(hidden: int, stride: int, rows: int) -> None:
    """Of every view of rows at one distance: where its values end, and whether it lies as y does."""
    distance = hidden + stride * 8
    x = torch.zeros(rows * distance, dtype=BF16).as_strided((rows, hidden), (distance, 1))
    found = norm._row_stride(x)
    assert found == (distance if rows > 1 else hidden)
    places = np.arange(rows)[:, None] * x.stride(0) + np.arange(hidden)
    assert ((rows - 1) * found + hidden) == places.max() + 1
    assert norm._row_stride(x.unsqueeze(1).expand(rows, 1, hidden)) == found


def test_products_normalise_by_it_and_by_torch_what_it_does_not_take(card: Simulated) -> None:
    x, weight = inputs(3, HIDDEN)
    assert torch.equal(compose.rms_norm(x, weight, 1e-5), jitmx.rms_norm(x, weight))
    card.launched.clear()
    for hidden in (MAX_HIDDEN + 32, 12):
        x, weight = inputs(2, hidden)
        assert rounded_once(compose.rms_norm(x, weight, 1e-5), normalized(x, weight))
    assert card.kernels == []
    assert choose("norm", NormProblem(HIDDEN), card.target).variant.knobs.block == 128
