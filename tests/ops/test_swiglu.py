"""`jitmx.linear_swiglu` on simulated kernels, beside torch in float64; and the order of gates and ups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

import jitmx
import simulated_card
from jitmx import arch, kernels, settings
from jitmx.dispatch import call
from jitmx.errors import InputError, KnobError
from jitmx.kernels.linear import LinearProblem
from jitmx.ops.linear.packed import PackedWeight

HIDDEN, FEATURES = 96, 40


def made(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[PackedWeight, torch.Tensor]:
    """Gates and ups packed, and what they stand for, [2 features, hidden], gates first."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2 * FEATURES, HIDDEN, generator=generator).to(dtype) / 4
    coded = jitmx.quantize(jitmx.interleave_gate_up(weight), "mxfp4")
    own = jitmx.dequantize(jitmx.quantize(weight, "mxfp4"), torch.float32)
    return jitmx.pack_weight(coded), own.double()


def wanted(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
    x = x.double()
    if norm is not None:
        x = rms_norm(x, norm.shape, norm.double(), 1e-5)
    gate, up = (x @ weight.T).chunk(2, -1)
    return silu(gate) * up


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)


def test_rows_are_eight_gates_and_their_eight_ups_by_turns() -> None:
    rows = torch.arange(32)[:, None].expand(32, 3)
    order = jitmx.interleave_gate_up(rows)[:, 0].tolist()
    assert order == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    for bad in (torch.zeros(24, 32), torch.zeros(0, 32), torch.tensor(1.0)):
        with pytest.raises(InputError, match="multiple of 8 each"):
            jitmx.interleave_gate_up(bad)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("norm", [False, True])
def test_few_rows_are_one_launch_that_writes_no_product(target: str, rows: int, norm: bool) -> None:
    with simulated_card.on_cpu(target) as card:
        weight, own = made()
        x, gamma = rows_of(rows), torch.linspace(0.5, 1.5, HIDDEN).bfloat16() if norm else None
        card.launched.clear()
        found = jitmx.linear_swiglu(x, weight, norm=gamma)
        assert [variant.knobs.as_dict()["swiglu"] for variant in card.launched] == [True]
        assert found.shape == (rows, FEATURES) and off(found, wanted(x, own, gamma)) < 0.01
        into = torch.empty_like(found)
        assert jitmx.linear_swiglu(x, weight, norm=gamma, out=into) is into and torch.equal(into, found)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
@pytest.mark.parametrize("norm", [False, True])
def test_many_rows_are_a_product_that_is_written_and_read(target: str, norm: bool) -> None:
    with simulated_card.on_cpu(target) as card:
        weight, own = made(dtype=torch.float16)
        x = rows_of(40, torch.float16).view(2, 20, HIDDEN)
        gamma = torch.linspace(0.5, 1.5, HIDDEN).half() if norm else None
        card.launched.clear()
        found = jitmx.linear_swiglu(x, weight, norm=gamma)
        assert [v.spec.family for v in card.launched if v.knobs.as_dict().get("swiglu")] == []
        assert found.shape == (2, 20, FEATURES) and off(found, wanted(x, own, gamma)) < 0.005


def test_no_rows_are_no_launch() -> None:
    with simulated_card.on_cpu("sm_90a") as card:
        weight, _ = made()
        card.launched.clear()
        assert jitmx.linear_swiglu(rows_of(0), weight).shape == (0, FEATURES) and card.launched == []


def test_a_traced_call_is_the_operator_and_makes_the_same() -> None:
    with simulated_card.on_cpu("sm_90a"):
        weight, _ = made()
        x, gamma = rows_of(2), torch.ones(HIDDEN).bfloat16()
        program = torch.compile(lambda x: jitmx.linear_swiglu(x, weight, norm=gamma), backend="eager", fullgraph=True)
        assert torch.equal(program(x), jitmx.linear_swiglu(x, weight, norm=gamma))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 64).bfloat16()}, "must be k=96"),
        ({"x": torch.zeros(2, HIDDEN)}, "bfloat16 or float16"),
        ({"norm": torch.zeros(HIDDEN).half()}, "norm"),
        ({"epsilon": -1.0, "norm": torch.zeros(HIDDEN).bfloat16()}, "epsilon"),
        ({"out": torch.zeros(2, 2 * FEATURES).bfloat16()}, "out"),
        ({"x": torch.zeros(2, HIDDEN).bfloat16().requires_grad_()}, "gradient"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_a_launch(change: dict[str, Any], said: str) -> None:
    with simulated_card.on_cpu("sm_90a") as card:
        weight, _ = made()
        given = {"x": rows_of(2)} | change
        card.launched.clear()
        with pytest.raises(InputError, match=said):
            jitmx.linear_swiglu(given.pop("x"), weight, **given)
        assert card.launched == []


def test_problems_that_leave_no_gates_and_ups_are_refused() -> None:
    for fields, said in (({"n": 24}, "nearest legal value is 32"), ({"bias": True}, "swiglu=True leaves none"),
                         ({"residual": True}, "leaves none"), ({"argmax": True}, "leaves none")):  # fmt: skip
        with pytest.raises(KnobError, match=said):
            LinearProblem(**({"n": 32, "swiglu": True} | fields))


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_explain_says_which_step_is_unfused(target: str) -> None:
    settings.reload()
    few, many = (
        call.explain("linear", arch.parse(target), m=m, n=34560, k=2880, bias=False, swiglu=True) for m in (4, 64)
    )
    assert not few.unfused and few.choice.variant.knobs.as_dict()["swiglu"]
    assert list(many.unfused) == ["swiglu"] and not many.choice.variant.knobs.as_dict().get("swiglu")


@pytest.mark.parametrize(("rows", "kernel"), [(1, "stream"), (2, "stream"), (8, "stream"), (16, "tile")])
def test_few_rows_of_w_and_many_columns_leave_no_multiprocessor_idle(rows: int, kernel: str) -> None:
    found = call.explain("linear", arch.parse("sm_90a"), m=rows, n=2880, k=17280, bias=False, residual="pair")
    launched = found.choice.variant
    problem = LinearProblem(rows, 2880, 17280, residual="pair")
    assert launched.spec.name == kernel and not found.unfused
    assert 2 * kernels.family("linear").launch(launched, problem, 132).blocks > 132
