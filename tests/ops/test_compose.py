"""Which steps of a product are not fused: as little as can be, in an order that keeps the meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch
from jitmx.dispatch import call
from jitmx.ops.linear import compose
from jitmx.ops.linear.packed import PackedWeight
from jitmx.runtime import card

ALL = {"bias": True, "norm": True, "residual": True, "activation": "mxfp8"}


@pytest.fixture
def weight() -> PackedWeight:
    return jitmx.pack_weight((torch.zeros(48, 48, dtype=torch.uint8), torch.full((48, 3), 127, dtype=torch.uint8)))


def unfused(
    monkeypatch: pytest.MonkeyPatch, weight: PackedWeight, extras: dict[str, Any], *served: str
) -> tuple[str, ...]:
    """What is not fused where kernels take a problem in one launch that asks for no more than `served`."""

    def fits(_op: str, problem: Any, _arch: Any) -> bool:
        asked = {name for name in ("norm", "residual") if getattr(problem, name)}
        asked |= {"activation"} if problem.activation != "none" else set()
        assert (problem.m, problem.n, problem.k, problem.bias) == (5, 48, 96, extras.get("bias", False))
        return asked <= set(served)

    monkeypatch.setattr(card, "arch", lambda _device: arch.parse("sm_90"))
    monkeypatch.setattr(call, "fits_one_launch", fits)
    return compose.unfused(weight, 5, torch.bfloat16, 0, extras)


@pytest.mark.parametrize(
    ("served", "wanted"),
    [
        (("norm", "residual", "activation"), ()),
        (("norm", "activation"), ("residual",)),
        (("residual", "activation"), ("norm",)),
        (("activation",), ("norm", "residual")),
        (("residual",), ("norm", "activation")),
        # RMSNorm precedes the quantization: where that goes, it goes.
        (("norm", "residual"), ("norm", "activation")),
        ((), ("norm", "residual", "activation")),
    ],
)
def test_as_little_as_can_be_runs_apart(
    served: tuple[str, ...], wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, weight: PackedWeight
) -> None:
    assert sorted(unfused(monkeypatch, weight, ALL, *served)) == sorted(wanted)


def test_a_plain_product_has_nothing_apart_even_where_no_launch_takes_all_rows(
    monkeypatch: pytest.MonkeyPatch, weight: PackedWeight
) -> None:
    assert unfused(monkeypatch, weight, {"bias": True, "norm": False, "residual": False, "activation": "none"}) == ()


def test_what_runs_apart_is_not_asked_of_the_kernel() -> None:
    assert compose.left(ALL, ("norm", "activation")) == {
        "bias": True, "norm": False, "residual": True, "activation": "none"
    }  # fmt: skip
    assert compose.left(ALL, ()) == ALL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_is_that_of_float64_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 2880, generator=generator) * 3).to(dtype)
    norm = torch.rand(2880, generator=generator).add(0.5).to(dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    found = compose.rms_norm(x, norm, 1e-5)
    assert found.dtype is dtype
    # Half a unit in the last place, and a little for fp32 on the way.
    assert float(((found.double() - wanted) / wanted).abs().max()) <= torch.finfo(dtype).eps * 0.51
