"""Layers to time: routing spreads as it is said to, comes anywhere the same, and finds its experts cold."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitmx
from jitmx import formats
from jitmx.bench import moe as benchmarks_moe
from jitmx.bench import moe_inputs, moe_peers, timing
from jitmx.bench.moe import Chain, gap
from jitmx.bench.moe_inputs import LayerShape, spread_logits
from jitmx.errors import KnobError
from jitmx.kernels.moe import MoeProblem, layout
from jitmx.ops.moe import plan as moe_plan
from simulated_card import Card
from strategies import examples


def dequantize(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """By NumPy, so that no GPU is needed."""
    codes = formats.unpack_nibbles(tensor.codes.numpy())
    return torch.from_numpy(formats.dequantize(codes, tensor.scales.numpy(), formats.get("mxfp4"))).to(dtype)


GPT_OSS = moe_inputs.MODELS["gpt-oss-120b"]


@pytest.mark.parametrize(("m", "low", "high"), [(1, 4, 4), (4, 13, 16), (16, 46, 56), (64, 105, 117), (1024, 128, 128)])
def test_tokens_spread_over_the_experts_of_gpt_oss_120b(m: int, low: float, high: float) -> None:
    logits, hit = spread_logits(GPT_OSS, m, 8)
    assert low <= hit <= high
    assert [(one.shape, one.dtype) for one in logits] == [((m, 128), torch.bfloat16)] * 8
    assert all(len(row.unique()) == 128 for row in logits[0])
    assert hit == np.mean([len(one.topk(4).indices.unique()) for one in logits])


def test_routing_is_that_of_its_seed_wherever_it_is_made() -> None:
    first, second = (spread_logits(LayerShape(experts=16, hidden=64), 3, 4, seed=5)[0] for _ in range(2))
    other = spread_logits(LayerShape(experts=16, hidden=64), 3, 4, seed=6)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


@settings(max_examples=examples(30))
@given(experts=st.integers(1, 24), m=st.integers(1, 5), top=st.integers(1, 4), calls=st.integers(2, 12))
def test_no_expert_is_read_again_before_others_that_were_read_earlier(
    experts: int, m: int, top: int, calls: int
) -> None:
    shape = LayerShape(experts=experts, top=min(top, experts), hidden=64)
    last = dict.fromkeys(range(experts), -1)
    for number, logits in enumerate(spread_logits(shape, m, calls)[0]):
        hit = set(logits.topk(shape.top).indices.unique().tolist())
        assert max(last[expert] for expert in hit) <= min((last[e] for e in last.keys() - hit), default=number)
        last |= dict.fromkeys(hit, number)


def test_bytes_and_operations_of_a_layer_are_those_of_its_experts() -> None:
    assert GPT_OSS.expert_bytes == 5760 * 2880 * 17 // 32 + 2880 * 2880 * 17 // 32 + 2 * (5760 + 2880)
    assert GPT_OSS.bytes(1, 4) == pytest.approx(52.9e6, rel=2e-3)
    assert GPT_OSS.flops(3) == 2 * 3 * 4 * (5760 * 2880 + 2880 * 2880)
    assert moe_inputs.MODELS["gpt-oss-20b"] == LayerShape(experts=32)


@pytest.mark.parametrize(("activation", "bias"), [("swiglu_oai", True), ("silu", False), ("relu2", True)])
def test_the_layer_that_results_are_held_against_is_that_of_the_reference(
    activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_inputs, "dequantize", dequantize)
    layer = moe_inputs.random_layer(LayerShape(5, 2, 64, 96, activation, bias), device="cpu")
    x, ids = torch.randn(7, 64).bfloat16(), torch.randint(0, 5, (7, 2), dtype=torch.int32)
    ids[0, 1], weights = -1, torch.rand(7, 2)
    values = [dequantize(w, torch.float64).numpy() for w in (layer.w13, layer.w2)]
    biases = [None if b is None else b.double().numpy() for b in (layer.b13, layer.b2)]
    wanted = layout.reference(
        x.double().numpy(), ids.numpy(), weights.double().numpy(), *values, *biases, activation=activation
    )
    found = layer.reference(x, ids, weights).double().numpy()
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert 0.05 < np.abs(wanted).mean() < 20  # neither grows nor vanishes along a chain


@pytest.mark.parametrize("activation", ["swiglu_oai", "silu"])
def test_the_layer_that_fp8_is_held_against_rounds_what_the_kernels_round(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_inputs, "dequantize", dequantize)
    shape = LayerShape(4, 2, 64, 96, activation=activation, x_format="fp8")
    assert shape.h_format == ("fp8" if activation == "swiglu_oai" else "bf16")
    layer = moe_inputs.random_layer(shape, device="cpu")
    x, ids = torch.randn(5, 64).bfloat16(), torch.arange(10).view(5, 2).remainder(4).int()
    weights = torch.rand(5, 2)
    seen = moe_inputs._seen(x, shape, "fp8")
    rounded = layer.reference(x, ids, weights)
    plain = dataclasses.replace(layer, shape=dataclasses.replace(shape, x_format="bf16"))
    of_rounded_x = plain.reference(seen, ids, weights)
    assert torch.equal(rounded, of_rounded_x) == (activation == "silu")
    assert 0.005 < float((rounded - plain.reference(x, ids, weights)).norm() / rounded.norm()) < 0.08


@pytest.mark.parametrize(("m", "tile"), [pytest.param(2, "", marks=pytest.mark.nightly), (2, "16x128"), (66, "")])
def test_the_calls_of_a_chain_are_the_layer_from_logits_and_from_ids(
    m: int, tile: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_inputs, "dequantize", dequantize)
    monkeypatch.setattr(timing, "l2_bytes", lambda _device=0: 1)
    layer = moe_inputs.random_layer(LayerShape(6, 2, 64, 32), device="cpu")
    packed = [jitmx.pack_experts(weight, encoding="nibble") for weight in (layer.w13, layer.w2)]
    chain = Chain(layer, [(packed[0], packed[1])], m)
    problem = MoeProblem(m, 6, 2, 64, 32, encoding="nibble")
    knobs = {"kernel": "grouped", "tile_m": 16, "down": {"kernel": "grouped", "tile_m": 16}} if tile else {}
    plan = moe_plan.launches(problem, 0, knobs)
    assert gap(chain, chain.call(plan, 0, routed=True)) <= 0.01
    assert card.kernels.count("routing.topk") == 0 and (plan.tile == 16 if tile else True)
    assert gap(chain, chain.call(plan, 0, routed=False)) <= 0.01
    assert card.kernels.count("routing.topk") == 1
    with pytest.raises(KnobError, match="tile_m=16 of the first product and tile_m=32 of the second"):
        moe_plan.launches(problem, 0, {"kernel": "grouped", "tile_m": 16, "down": {"kernel": "grouped", "tile_m": 32}})


def test_experts_are_copied_until_all_of_them_exceed_the_l2_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = jitmx.pack_experts(moe_inputs.random_layer(LayerShape(2, 1, 32, 32), device="cpu").w13)
    for l2, count in ((1, 1), (experts.nbytes * 2, 6), (experts.nbytes * 2 // 6, 1), (experts.nbytes * 2 // 6 + 1, 2)):
        monkeypatch.setattr(timing, "l2_bytes", lambda _device=0, l2=l2: l2)
        assert len(list(moe_inputs.rotated((experts, experts)))) == count


def test_a_library_that_is_not_here_or_computes_something_else_is_a_row_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    layer = moe_inputs.random_layer(LayerShape(2, 1, 32, 32), device="cpu")
    for name in moe_peers.PEERS:
        with pytest.raises(moe_peers.Unavailable, match=r"vllm\.model_executor\.layers\.fused_moe cannot be imported"):
            moe_peers.load(name, layer)
    silu = moe_inputs.random_layer(LayerShape(2, 1, 32, 32, "silu", False), device="cpu")
    with pytest.raises(moe_peers.Unavailable, match="clamped SwiGLU and biases"):
        moe_peers.load("marlin", silu)


class Counted:
    """A chain whose calls are counted and take no time."""

    rows, logits = 2, [torch.zeros(2, 4)] * 3
    layer = type("Layer", (), {"shape": LayerShape(4, 1, 32, 32)})

    def time(self, calls: list[Any]) -> float:
        x, y = torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
        for call in calls:
            call(x, y)
        return float(y[0]) * 1e-6


@pytest.mark.parametrize(
    ("off", "wanted"),
    [
        (0.001, {"us": 3.0, "reason": None}),
        (0.5, {"us": None, "reason": "what it computes here is 0.5 away from the layer, relative L2"}),
        (float("nan"), {"us": None, "reason": "what it computes here is nan away from the layer, relative L2"}),
        (None, {"us": None, "reason": "RuntimeError: no kernel image"}),
    ],
)
def test_what_another_library_does_is_checked_before_it_is_timed(
    off: float | None, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gap(_chain: Any, _call: Any, x_format: str) -> float:
        assert x_format == "bf16"
        if off is None:
            raise RuntimeError("no kernel image\nfor this card")
        return off

    monkeypatch.setattr(benchmarks_moe, "gap", gap)

    def other(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert benchmarks_moe.time_peer(Counted(), other) == wanted  # type: ignore[arg-type]
    assert benchmarks_moe.time_peer(Counted(), "it is not here") == {"us": None, "reason": "it is not here"}  # type: ignore[arg-type]
