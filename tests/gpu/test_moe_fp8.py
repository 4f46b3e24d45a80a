"""`jitmx.moe` with x and h in E4M3 on the card: beside float64, and beside float64 of inputs that are rounded alike.

The tensor cores keep fewer bits of sums of E4M3 products than fp32 has, which no simulator shows: the second gate does.
"""

from __future__ import annotations

import pytest
import torch

import jitmx
from gpu.test_moe import SHAPES, Evidence, Layer, error, launched, routed
from jitmx.models import EXPERT_LAYERS
from jitmx.runtime import card
from stored_hidden import further, stored

SERVED = "wgmma" in card.arch(0).features
COST, ALIKE = 0.05, 0.006


class Rounded(Layer):
    """Experts whose weights may be packed either way, and have rows of several passes."""

    def __init__(self, *sizes: int, encoding: str = "nibble", apart: int = 0) -> None:
        super().__init__(*sizes)
        for weight in self.weights:
            weight.scales[:, 7, 0] -= apart
        self.packed = [jitmx.pack_experts(weight, encoding=encoding) for weight in self.weights]

    def alike(
        self, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], activation: str = "swiglu_oai"
    ) -> torch.Tensor:
        """The layer in float64 with x rounded as the kernels round it, and h in bf16 too; of h in E4M3 what they have
        stored, each of which must be a code that its sum may be rounded to (tests/stored_hidden.py).
        """
        ids, weights = routing
        largest = x.double().abs().amax(1, keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
        seen = (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
        coded = activation == "swiglu_oai"
        left = stored(self.packed[0], self.biases[0], x, ids) if coded else None  # type: ignore[arg-type]
        y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for e in ids.unique().tolist():
            rows, slots = (ids == e).nonzero(as_tuple=True)
            values, bias = self._values(0, e), self.biases[0][e].double()  # type: ignore[index]
            a = seen[rows] @ values.T + bias
            if left is None:
                h = (a[:, 1::2] * torch.nn.functional.silu(a[:, 0::2])).bfloat16().double()
            else:
                h = left[rows, slots]
                assert further(h, a, seen[rows].abs() @ values.abs().T + bias.abs(), self.hidden) <= 1
            out = h @ self._values(1, e).T + self.biases[1][e].double()  # type: ignore[index]
            y.index_add_(0, rows, out * weights[rows, slots].double()[:, None])
        return y


def hold(layer: Rounded, m: int, top: int, activation: str = "swiglu_oai") -> float:
    """The error beside rows rounded alike, of a call and of its replay from a graph with other rows."""
    x, routing = torch.randn(m, layer.hidden, device="cuda").bfloat16(), routed(m, top, layer.experts)
    y = layer(x, routing, x_format="fp8", activation=activation)
    assert error(y, layer.wanted(x, routing, activation)) <= COST
    errors = [error(y, layer.alike(x, routing, activation))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, routing, x_format="fp8", activation=activation, out=y)
    x.copy_(torch.randn_like(x))
    for mine, new in zip(routing, routed(m, top, layer.experts), strict=True):
        mine.copy_(new)
    graph.replay()
    errors.append(error(y, layer.alike(x, routing, activation)))
    assert max(errors) <= ALIKE
    return max(errors)


if SERVED:

    @pytest.mark.parametrize("shape", ["gpt-oss-20b", "half tiles"])
    @pytest.mark.parametrize("encoding", ["nibble", "rotated"])
    def test_experts_with_a_scale_a_row_are_within_both_gates(shape: str, encoding: str, evidence: Evidence) -> None:
        experts, top, hidden, intermediate = SHAPES[shape]
        layer = Rounded(experts, hidden, intermediate, encoding=encoding)
        for m in (1, 16, 100, 700, 3000):
            found = hold(layer, m, top)
            fields = {"encoding": encoding, "x_format": "fp8"}
            for variant in launched(m, experts, top, hidden, intermediate, **fields)[:3]:
                evidence(variant, found, f"{shape} m={m}, eager and graph replay")

    @pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"])
    def test_experts_with_silu_are_within_both_gates_with_h_in_bf16(model: str, evidence: Evidence) -> None:
        shape = EXPERT_LAYERS[model]
        experts = min(shape.experts, 32)  # a float64 layer of all of them takes the card's memory
        layer = Rounded(experts, shape.hidden, shape.intermediate)
        if not shape.bias:
            layer.biases = [torch.zeros_like(bias) for bias in layer.biases]
        for m in (1, 16, 300, 2000):
            found = hold(layer, m, shape.top, "silu")
            fields = {"encoding": "nibble", "x_format": "fp8", "activation": "silu"}
            sizes = experts, shape.top, shape.hidden, shape.intermediate
            for variant in launched(m, *sizes, **fields)[:3]:
                evidence(variant, found, f"{model} of {experts} experts m={m}, eager and graph replay")

    @pytest.mark.parametrize("apart", [12, 30])
    def test_rows_of_several_passes_are_within_both_gates(apart: int) -> None:
        layer = Rounded(5, 352, 480, apart=apart)
        assert [weight.row_words.range for weight in layer.packed] == ["wide"] * 2
        for m in (7, 300):
            hold(layer, m, 2)

    def test_the_same_rows_give_the_same_bits_however_many_there_are_beside_them() -> None:
        layer = Rounded(32, 2880, 2880)
        x, routing = torch.randn(900, 2880, device="cuda").bfloat16(), routed(900, 4, 32)
        y = layer(x, routing, x_format="fp8")
        few = tuple(part[:70].contiguous() for part in routing)
        assert torch.equal(layer(x[:70].contiguous(), few, x_format="fp8"), y[:70])
        assert torch.equal(layer(x, routing, x_format="fp8"), y)

else:

    def test_a_card_without_the_instructions_says_so() -> None:
        layer = Rounded(5, 96, 160)
        with pytest.raises(jitmx.errors.KnobError, match="needs the instructions of sm_90a"):
            layer(torch.randn(2, 96, device="cuda").bfloat16(), routed(2, 2, 5), x_format="fp8")
