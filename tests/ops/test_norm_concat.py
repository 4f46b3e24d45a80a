"""RMSNorm of rows of a table beside rows of x, its kernel simulated: values, layouts, what is refused, tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

from jitmx.errors import InputError
from jitmx.ops import norm_concat
from rms_oracle import normalized, rounded_once
from simulated_card import Simulated

BF16 = torch.bfloat16
HIDDEN = 72


def inputs(rows: int, hidden: int = HIDDEN, dtype: torch.dtype = BF16, n: int = 9) -> dict[str, Any]:
    torch.manual_seed(rows + hidden)
    table, x = torch.randn(n, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    weights = [torch.rand(hidden).add(0.5).to(dtype) for _ in range(2)]
    return {
        "ids": torch.randint(0, n, (rows,), dtype=torch.int32), "table": table, "x": x, "table_weight": weights[0],
        "weight": weights[1], "epsilon": 1e-5,
    }  # fmt: skip


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"], indirect=True)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_it_is_what_float64_says_rounded_once(card: Simulated, dtype: torch.dtype) -> None:
    for rows, hidden, wide in ((1, 2880, False), (5, HIDDEN, True), (3, 8192, False)):
        given = inputs(rows, hidden, dtype)
        given["ids"] = given["ids"].to(torch.int64 if wide else torch.int32)
        y, kept = norm_concat.run(**given, keep=wide)
        epsilon = given["epsilon"]
        first = normalized(given["table"][given["ids"].long()], given["table_weight"], epsilon)
        assert y.shape == (rows, 2 * hidden) and rounded_once(
            y, torch.cat([first, normalized(given["x"], given["weight"], epsilon)], 1)
        )
        assert torch.equal(kept, y[:, hidden:]) if wide else kept.shape == (0, hidden)
    assert card.kernels == ["norm.concat"] * 3


def test_an_id_that_the_table_has_not_is_zeros_and_rows_of_x_may_lie_apart(card: Simulated) -> None:
    given = inputs(4)
    given["ids"] = torch.tensor([-1, 8, 9, 1 << 30], dtype=torch.int32)
    given["x"] = torch.randn(4, 3 * HIDDEN).bfloat16()[:, HIDDEN : 2 * HIDDEN]
    y, _ = norm_concat.run(**given)
    first = normalized(given["table"][8], given["table_weight"], 1e-5)
    assert not y[[0, 2, 3], :HIDDEN].any() and rounded_once(y[1, :HIDDEN], first)
    assert rounded_once(y[:, HIDDEN:], normalized(given["x"], given["weight"], 1e-5))


def test_no_rows_launch_nothing(card: Simulated) -> None:
    y, kept = norm_concat.run(**inputs(0), keep=True)
    assert y.shape == (0, 2 * HIDDEN) and kept.shape == (0, HIDDEN) and card.kernels == []


REFUSED: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "ids of another type": ({"ids": lambda: torch.zeros(3)}, "ids is float32"),
    "fewer ids": ({"ids": lambda: torch.zeros(2, dtype=torch.int32)}, r"ids is int32 \[2\].*contiguous int32 \[3\]"),
    "a table of another width": ({"table": lambda: torch.zeros(4, 8).bfloat16()}, r"it must be \[n, 72\]"),
    "a table of another type": ({"table": lambda: torch.zeros(4, HIDDEN)}, "table is float32"),
    "a table with gaps": ({"table": lambda: torch.zeros(4, 2 * HIDDEN).bfloat16()[:, :HIDDEN]}, "table is .*strides"),
    "another weight": ({"weight": lambda: torch.zeros(8).bfloat16()}, r"weight is bfloat16 \[8\]"),
    "no tensor": ({"table_weight": lambda: None}, "table_weight is a NoneType"),
    "one dimension": ({"x": lambda: torch.zeros(HIDDEN).bfloat16()}, r"\[rows, hidden\]"),
    "an odd width": ({"x": lambda: torch.zeros(3, 71).bfloat16()}, "hidden a multiple of 8"),
    "rows at an odd distance": ({"x": lambda: torch.zeros(3, 76).bfloat16()[:, :HIDDEN]}, "multiple of 8 values"),
    "float32": ({"x": lambda: torch.zeros(3, HIDDEN)}, "takes bfloat16 or float16"),
    "a gradient": ({"weight": lambda: torch.ones(HIDDEN).bfloat16().requires_grad_()}, "weight requires a gradient"),
    "epsilon": ({"epsilon": lambda: -1.0}, "epsilon=-1.0 is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("warm", [False, True])
def test_what_the_kernel_cannot_take_is_refused_before_a_launch(name: str, warm: bool, card: Simulated) -> None:
    changes, said = REFUSED[name]
    if warm:
        norm_concat.run(**inputs(3))
    launched = len(card.kernels)
    with pytest.raises(InputError, match=said):
        norm_concat.run(**{**inputs(3), **{field: value() for field, value in changes.items()}})
    assert len(card.kernels) == launched


@pytest.mark.parametrize("keep", [False, True])
def test_the_operator_is_one_that_torch_can_trace(keep: bool, card: Simulated) -> None:
    given = inputs(3)
    opcheck(torch.ops.jitmx.rms_norm_concat.default, (*given.values(), keep))
    whole = torch.compile(torch.ops.jitmx.rms_norm_concat, fullgraph=True, backend="eager")
    found, wanted = whole(*given.values(), keep), norm_concat.run(**given, keep=keep)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
