"""`jitmx.linear_swiglu`, and what a draft's products ask of few rows, on the card against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu

import jitmx
from jitmx.models import NAMED_DRAFTS
from jitmx.ops.linear import run

HIDDEN, GATES = 2880, 17280
SIZES = NAMED_DRAFTS["gpt-oss-120b-eagle3"]


def made(n: int, k: int, gates: bool) -> tuple[jitmx.PackedWeight, torch.Tensor]:
    """A packed weight, and what it stands for; of gates and ups with all gates first."""
    weight = torch.randn(n, k, device="cuda").bfloat16() / k**0.5
    own = jitmx.dequantize(jitmx.quantize(weight, "mxfp4"), torch.float32).double()
    return jitmx.pack_weight(jitmx.quantize(jitmx.interleave_gate_up(weight) if gates else weight, "mxfp4")), own


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 33, 300])
@pytest.mark.parametrize("norm", [False, True])
def test_gates_and_ups_of_a_draft_are_within_the_gate_eagerly_and_replayed_from_a_graph(rows: int, norm: bool) -> None:
    weight, own = made(2 * GATES, HIDDEN, gates=True)
    gamma = torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5 if norm else None
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()

    def wanted() -> torch.Tensor:
        seen = x.double() if gamma is None else rms_norm(x.double(), (HIDDEN,), gamma.double(), 1e-5)
        gate, up = (seen @ own.T).chunk(2, -1)
        return silu(gate) * up

    y = jitmx.linear_swiglu(x, weight, norm=gamma, out=torch.full((rows, GATES), torch.nan, device="cuda").bfloat16())
    assert off(y, wanted()) < 0.008
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitmx.linear_swiglu(x, weight, norm=gamma, out=y)
    x.copy_(torch.randn_like(x))
    y.fill_(torch.nan)
    graph.replay()
    assert off(y, wanted()) < 0.008


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", ["o", "down", "qkv", "fc"])
def test_products_of_a_draft_add_a_residual_with_its_low_part(kind: str, rows: int) -> None:
    n, k = SIZES.dense[kind]
    weight, own = made(n, k, gates=False)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    residual = 8 * torch.randn(rows, n, device="cuda").bfloat16()
    low = (residual.float() * 2.0**-10 * torch.rand(rows, n, device="cuda")).bfloat16()
    high, rest = run(x, weight, residual=residual, residual_lo=low).double()
    assert off(high + rest, x.double() @ own.T + residual.double() + low.double()) < 1e-4


@pytest.mark.parametrize("vocabulary", [201088, 32000])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_of_a_draft_chooses_the_largest_of_its_normed_rows(vocabulary: int, rows: int) -> None:
    weight, own = made(vocabulary, HIDDEN, gates=False)
    gamma = torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    logits = rms_norm(x.double(), (HIDDEN,), gamma.double(), 1e-5) @ own.T
    chosen = logits.gather(1, jitmx.linear_argmax(x, weight, norm=gamma)[:, None])[:, 0]
    assert bool((logits.amax(1) - chosen <= 0.01 * logits.std(1)).all())
