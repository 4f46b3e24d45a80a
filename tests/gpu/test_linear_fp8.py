"""`jitmx.linear` with x in E4M3 on the card: beside float64, and beside float64 of inputs that are rounded alike.

The tensor cores keep fewer bits of sums of E4M3 products than fp32 has, which no simulator shows: the second gate does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitmx
from jitmx.bench.linear import random_mxfp4
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan
from jitmx.ops.quantize import dequantize
from jitmx.runtime import card

COST, ALIKE = 0.05, 0.006
EPSILON = 1e-5
WGMMA = "wgmma" in card.arch(0).features
SHAPES = {"QKV": (5120, 2880), "O": (2880, 4096), "ragged": (1000, 1376), "long": (512, 14336)}


def rounded(wide: torch.Tensor) -> torch.Tensor:
    """Rows in float64 as E4M3 with a scale each holds them."""
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
    return (wide / scale).float().to(torch.float8_e4m3fn).double() * scale


def normalized(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    wide = x.double()
    if norm is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * norm.double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def weight_of(n: int, k: int, encoding: str | None = None) -> tuple[PackedWeight, torch.Tensor]:
    tensor = random_mxfp4(n, k)
    return jitmx.pack_weight(tensor, encoding=encoding), dequantize(tensor, torch.float32).double()


@pytest.mark.parametrize("m", [1, 130, 512, 8192])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products_are_right_beside_float64_and_beside_rows_rounded_alike(
    shape: tuple[int, int], m: int, record_property: Any
) -> None:
    n, k = shape
    packed, values = weight_of(n, k)
    bias, norm = torch.randn(n, device="cuda").bfloat16(), (1 + 0.1 * torch.randn(k, device="cuda")).bfloat16()
    for given in (None, norm):
        x = torch.randn(m, k, device="cuda").bfloat16()
        y = jitmx.linear(x, packed, bias, norm=given, epsilon=EPSILON, activation="fp8")
        seen = normalized(x, given)
        assert error(y, seen @ values.T + bias.double()) <= COST
        alike = rounded(seen) @ values.T + bias.double()
        off = float((y.double() - alike).norm() / alike.norm())  # of a row alone few columns would tell little
        record_property("alike", off)
        assert not WGMMA or off <= ALIKE


@pytest.mark.skipif(not WGMMA, reason="products in E4M3 with a scale a row are of sm_90a")
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("k", [2880, 4096, 8192, 16384])
def test_what_sums_in_tensor_cores_lose_is_within_the_gate(k: int, promote: bool, record_property: Any) -> None:
    packed, values = weight_of(1024, k, "nibble")
    knobs = {"promote": promote, "groups": 2, "tile_m": 128, "stages": 6}
    plan = Plan(packed, 512, torch.bfloat16, 0, {"activation": "fp8"}, knobs)
    x, y = torch.randn(512, k, device="cuda").bfloat16(), torch.empty(512, 1024, device="cuda").bfloat16()
    plan(x.data_ptr(), y.data_ptr())
    off = error(y, rounded(x.double()) @ values.T)
    record_property("alike", off)
    assert off <= (ALIKE if promote or k <= 8192 else 2 * ALIKE)


@pytest.mark.skipif(not WGMMA, reason="products in E4M3 with a scale a row are of sm_90a")
def test_rows_of_several_passes_a_residual_and_a_graph() -> None:
    tensor = random_mxfp4(2880, 4096)
    tensor.scales[7, 0] -= 30
    packed, values = jitmx.pack_weight(tensor), dequantize(tensor, torch.float32).double()
    x, residual = torch.randn(700, 4096, device="cuda").bfloat16(), torch.randn(700, 2880, device="cuda").bfloat16()
    y = jitmx.linear(x, packed, residual=residual, activation="fp8")
    assert error(y, rounded(x.double()) @ values.T + residual.double()) <= ALIKE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitmx.linear(x, packed, residual=residual, out=y, activation="fp8")
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert error(y, rounded(x.double()) @ values.T + residual.double()) <= ALIKE
