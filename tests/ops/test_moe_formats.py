"""`jitmx.moe` whole on the simulator with x in MX formats, without gates, weights on the input, sums by atomics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jitmx import formats
from jitmx.errors import InputError, KnobError
from jitmx.kernels.moe import layout
from ops.test_moe_simulated import Layer, error
from simulated_card import Simulated

Array = np.ndarray[Any, Any]

LISTS, SUM = ["routing.sort"], ["moe.combine"]
# Relative L2 against float64 without any rounding, of which x and h have one each.
COST = {"mxfp8": 0.06, "mxfp6": 0.06, "mxfp4": 0.25}


class Experts(Layer):
    """Experts with inputs of their own, and weights on either side."""

    def inputs(self, m: int, top: int = 2) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(m)
        ids = torch.randint(-1, self.experts, (m, top), dtype=torch.int32, generator=generator)
        return self.x(m), (ids, torch.rand(m, top, generator=generator) + 0.1)

    def on_input(self, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], activation: str) -> Array:
        """The layer with the router's weights on x."""
        ids, weights = (part.double().numpy() for part in routing)
        b13, b2 = (bias.double().numpy() for bias in self.biases)
        y = np.zeros(x.shape)
        for slot in range(ids.shape[1]):
            rows = x.double().numpy() * weights[:, slot, None]
            listed = ids[:, slot, None].astype(np.int32), np.ones((len(rows), 1))
            y += layout.reference(rows, *listed, *self.values, b13, b2, activation=activation)
        return y


class Ungated(Experts):
    """W13 is that of experts with half as many features, gates and ups; so there are no gates."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__(experts, hidden, inner)
        half = Layer(experts, hidden, inner // 2)
        for mine, other in ((self.values, half.values), (self.packed, half.packed), (self.biases, half.biases)):
            mine[0] = other[0]


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_90a", "sm_121a"], indirect=True)
@pytest.mark.parametrize("x_format", COST)
@pytest.mark.parametrize("m", [4, 66])
def test_quantized_x_goes_by_expert_whatever_the_rows(x_format: str, m: int, card: Simulated) -> None:
    layer = Experts(4, 96, 160)
    x, routing = layer.inputs(m)
    y = layer(x, routing, x_format=x_format)
    assert card.kernels == [*LISTS, "moe.scaled", "moe.scaled", *SUM]
    assert COST[x_format] / 6 <= error(y, layer.wanted(x, *routing)) <= COST[x_format]
    assert torch.equal(layer(x, routing, x_format=x_format), y)


def test_the_scale_rule_changes_the_result(card: Simulated) -> None:
    layer = Experts(3, 64, 64)
    x, routing = layer.inputs(5)
    found = [layer(x, routing, x_format="mxfp4", scale_rule=rule) for rule in formats.SCALE_RULES]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert all(error(y, layer.wanted(x, *routing)) <= COST["mxfp4"] for y in found)


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("x_format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("activation", ["plain", "relu2"])
def test_experts_without_gates(activation: str, x_format: str, card: Simulated) -> None:
    layer = Ungated(3, 64, 64)
    x, routing = layer.inputs(7)
    wanted = layer.wanted(x, *routing, activation=activation)
    assert error(layer(x, routing, activation=activation, x_format=x_format), wanted) <= COST.get(x_format, 0.008)
    with pytest.raises(InputError, match=r"with activation='silu' they must be \[experts, 2 intermediate, hidden\]"):
        layer(x, routing, activation="silu")


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("reduction", ["ordered", "atomic"])
@pytest.mark.parametrize("m", [2, 70])
def test_weights_on_the_input_and_sums_by_atomics(m: int, reduction: str, card: Simulated) -> None:
    layer = Experts(4, 64, 96)
    x, routing = layer.inputs(m)
    out = torch.full_like(x, torch.nan)
    y = layer(x, routing, weight_on="input", reduction=reduction, activation="silu", out=out)
    assert card.kernels == [*LISTS, "moe.grouped", "moe.grouped", *(SUM if reduction == "ordered" else [])]
    assert y is out and error(y, layer.on_input(x, routing, "silu")) <= 0.01


def test_few_rows_that_one_launch_has_no_room_for_go_by_expert(card: Simulated) -> None:
    layer = Experts(2, 8192, 32)
    x, routing = layer.inputs(2, 1)
    routing[0][:] = torch.tensor([[1], [0]])
    assert error(layer(x, routing), layer.wanted(x, *routing)) <= 0.008
    assert card.kernels == [*LISTS, "moe.grouped", "moe.grouped", *SUM]


def test_operators_take_what_the_function_takes(card: Simulated) -> None:
    layer = Experts(3, 64, 32)
    x, routing = layer.inputs(3)
    more = {"x_format": "mxfp8", "weight_on": "input", "scale_rule": "even", "activation": "silu"}
    eager, out = layer(x, routing, **more), torch.zeros_like(x)
    compiled = torch.compile(lambda *given, **said: layer(*given, **more, **said), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, routing), eager)
    compiled(x, routing, out=out)
    assert torch.equal(out, eager)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"x_format": "int8"}, "x_format='int8' is not one of bf16, mxfp8, mxfp6, mxfp4, fp8"),
        ({"scale_rule": "up"}, "scale_rule='up' is not one of floor, ceil, even"),
        ({"weight_on": "both"}, "weight_on='both' is not one of output, input"),
        ({"reduction": "tree"}, "reduction='tree' is not one of ordered, atomic"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(more: dict[str, str], said: str, card: Simulated) -> None:
    layer = Experts(2, 32, 32)
    with pytest.raises(KnobError, match=said):
        layer(*layer.inputs(1), **more)
    assert not card.launched


@pytest.mark.parametrize("card", ["sm_89"], indirect=True)
def test_a_card_without_such_atomics_says_so(card: Simulated) -> None:
    layer = Experts(2, 32, 32)
    with pytest.raises(KnobError, match="reduction='atomic' needs sm_90 or newer"):
        layer(*layer.inputs(1), reduction="atomic")
