"""`jitmx.moe` on the card: x in MX formats against float64 of what its codes stand for, and layers of other models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitmx
from gpu.test_moe import SHAPES, Layer, error, routed
from jitmx import formats
from jitmx.dispatch.choose import choose
from jitmx.kernels.moe import MoeProblem
from jitmx.kernels.moe.hidden import rounded
from jitmx.runtime import card

Evidence = Callable[[object, float | None, str], None]

GATE, ATOMIC_GATE = 0.006, 0.01
COST = {"mxfp8": 0.06, "mxfp6": 0.06, "mxfp4": 0.25}  # against the layer without any rounding
ATOMICS = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def on_host(x: torch.Tensor, x_format: str, rule: str) -> torch.Tensor:
    """What the codes of x stand for, in float64, by the reference on the host."""
    return torch.from_numpy(rounded(x.double().cpu().numpy(), x_format, rule)).cuda()


def wanted(
    layer: Layer, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], x_format: str, rule: str = "floor"
) -> torch.Tensor:
    """The layer in float64 with x rounded to a format, and h to bf16 and to the format."""
    ids, weights = routing
    seen = on_host(x, x_format, rule)
    y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for e in range(layer.experts):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        if not len(rows):
            continue
        a = seen[rows] @ layer._values(0, e).T + layer.biases[0][e].double()  # type: ignore[index]
        gate, up = a[:, 0::2].clamp(max=7.0), a[:, 1::2].clamp(-7.0, 7.0)
        h = on_host(((up + 1) * gate * torch.sigmoid(1.702 * gate)).bfloat16(), x_format, rule)
        out = h @ layer._values(1, e).T + layer.biases[1][e].double()  # type: ignore[index]
        y.index_add_(0, rows, out * weights[rows, slots].double()[:, None])
    return y


@pytest.mark.parametrize("x_format", COST)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_what_their_codes_stand_for_eagerly_and_replayed_from_a_graph(
    shape: str, x_format: str, evidence: Evidence
) -> None:
    experts, top, hidden, intermediate = SHAPES[shape]
    layer = Layer(experts, hidden, intermediate)
    for m in (1, 2, 8, 64, 65, 300, 1024):
        x, routing = torch.randn(m, hidden, device="cuda").bfloat16(), routed(m, top, experts)
        y = torch.full((m, hidden), torch.nan, device="cuda").bfloat16()
        eager = error(layer(x, routing, x_format=x_format, out=y), wanted(layer, x, routing, x_format))
        assert eager <= GATE, m
        assert error(y, layer.wanted(x, routing)) <= COST[x_format] * (1.5 if m < 8 else 1), m
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, routing, x_format=x_format, out=y)
        x.copy_(torch.randn(m, hidden, device="cuda"))
        for old, new in zip(routing, routed(m, top, experts), strict=True):
            old.copy_(new)
        y.fill_(torch.nan)
        graph.replay()
        replayed = error(y, wanted(layer, x, routing, x_format))
        assert replayed <= GATE, m
        for product in ("up", "down"):
            problem = MoeProblem(
                m, experts, top, hidden, intermediate, encoding=layer.packed[0].encoding, product=product,
                x_format=x_format,
            )  # fmt: skip
            variant = choose("moe", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant
            evidence(variant, max(eager, replayed), f"{shape} m={m} {x_format}, eager and graph replay")


@pytest.mark.parametrize("rule", formats.SCALE_RULES)
@pytest.mark.parametrize("x_format", COST)
def test_scales_follow_their_rule(x_format: str, rule: str) -> None:
    layer = Layer(4, 160, 96)
    x, routing = torch.randn(40, 160, device="cuda").bfloat16(), routed(40, 2, 4)
    x[3, :32] = 0
    y = layer(x, routing, x_format=x_format, scale_rule=rule)
    assert error(y, wanted(layer, x, routing, x_format, rule)) <= GATE


@pytest.mark.parametrize("m", [16, 512])
def test_a_hundred_runs_give_the_same_bits(m: int) -> None:
    layer = Layer(32, 2880, 2880)
    x, routing = torch.randn(m, 2880, device="cuda").bfloat16(), routed(m, 4, 32)
    first = layer(x, routing, x_format="mxfp8")
    for _ in range(100):
        assert torch.equal(layer(x, routing, x_format="mxfp8"), first)


@pytest.mark.parametrize("x_format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("m", [1, 7, 130])
def test_rows_past_the_count_and_experts_elsewhere_take_no_part(m: int, x_format: str) -> None:
    layer = Layer(8, 256, 192)
    x, (ids, weights) = torch.randn(m, 256, device="cuda").bfloat16(), routed(m, 4, 32)
    to = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    to[::4] = torch.randperm(8, device="cuda").int()
    count = torch.tensor([max(m - 2, 1)], dtype=torch.int32, device="cuda")
    local = to[ids.long()].contiguous()
    local[count:] = -1
    y = layer(x, (ids, weights), expert_map=to, count=count, x_format=x_format)
    assert error(y, wanted(layer, x, (local, weights), x_format)) <= GATE and not y[count:].any()


@pytest.mark.skipif(not ATOMICS, reason="atomics on pairs of bf16 came with sm_90")
@pytest.mark.parametrize("x_format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("m", [3, 300])
def test_sums_by_atomics_are_the_same_up_to_rounding(m: int, x_format: str) -> None:
    layer = Layer(8, 2880, 192)
    x, routing = torch.randn(m, 2880, device="cuda").bfloat16(), routed(m, 4, 8)
    out = torch.full_like(x, torch.nan)
    y = layer(x, routing, reduction="atomic", x_format=x_format, out=out)
    assert error(y, wanted(layer, x, routing, x_format)) <= ATOMIC_GATE


@pytest.mark.parametrize("activation", ["plain", "relu2"])
@pytest.mark.parametrize("m", [5, 200])
def test_experts_without_gates(activation: str, m: int) -> None:
    layer = Layer(4, 256, 96)  # its W13 [192, 256] is that of 192 ups
    narrow = Layer(4, 256, 192)
    x, (ids, weights) = torch.randn(m, 256, device="cuda").bfloat16(), routed(m, 2, 4)
    y = jitmx.moe(
        x, (ids, weights), layer.packed[0], narrow.packed[1], layer.biases[0], narrow.biases[1], activation=activation
    )
    found = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for e in range(4):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        h = x[rows].double() @ layer._values(0, e).T + layer.biases[0][e].double()  # type: ignore[index]
        h = h.clamp(min=0) ** 2 if activation == "relu2" else h
        out = h @ narrow._values(1, e).T + narrow.biases[1][e].double()  # type: ignore[index]
        found.index_add_(0, rows, out * weights[rows, slots].double()[:, None])
    assert error(y, found) <= GATE


def test_weights_on_the_input_are_those_of_scaled_rows() -> None:
    layer = Layer(4, 256, 192, bias=False)
    x, (ids, weights) = torch.randn(90, 256, device="cuda").bfloat16(), routed(90, 1, 4)
    y = layer(x, (ids, weights * 2), weight_on="input")
    scaled = x.double() * 2  # of one expert a row, all weights are one
    assert error(y, layer.wanted(scaled.bfloat16(), (ids, weights))) <= GATE


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_of_a_large_layer_take_whichever_kernel_has_room(m: int) -> None:
    layer = Layer(2, 7168, 2048)
    x, routing = torch.randn(m, 7168, device="cuda").bfloat16(), routed(m, 2, 2)
    assert error(layer(x, routing), layer.wanted(x, routing)) <= GATE
