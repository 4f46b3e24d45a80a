"""`jitmx.moe` whole on the simulator with x and h in E4M3, a scale a row."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import jitmx
import short_sums
from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels import fp8_rows
from jitmx.kernels.linear.layout import ENCODINGS
from jitmx.kernels.moe import layout
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.ops.linear.row_words import row_words
from jitmx.ops.moe import operand
from ops.test_moe_simulated import Layer, error, scores
from simulated_card import Simulated
from stored_hidden import MULTIPLIER, further, stored

pytestmark = pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
LAUNCHES = ["routing.sort", "moe.gather_fp8", "moe.fused_fp8", "moe.combine"]
COST, ALIKE = 0.05, 0.006  # relative L2 against float64, and against the same inputs rounded alike


class Spread(Layer):
    """Experts, some rows of whose weights have scales that are further apart than one pass over k takes."""

    def __init__(self, apart: int, encoding: str = "nibble") -> None:
        super().__init__(3, 96, 160, encoding=encoding)
        generator = torch.Generator().manual_seed(apart)
        for at, (n, k) in enumerate(((320, 96), (96, 160))):
            codes = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8, generator=generator)
            scales = torch.full((3, n, k // 32), 122, dtype=torch.uint8)
            scales[1, 5, 0] -= apart
            self.packed[at] = jitmx.pack_experts((codes, scales), encoding=encoding)
            table = formats.unpack_nibbles(codes.numpy())
            self.values[at] = formats.dequantize(table, scales.numpy(), formats.get("mxfp4"))


def rounded_alike(
    layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation: str = "swiglu_oai"
) -> np.ndarray:
    """The layer in float64 with x and h rounded as the kernels round them, and nothing else."""
    b13, b2 = (bias.double().numpy() for bias in layer.biases)
    codes, scales = fp8_rows.quantize_rows(x.double().numpy())
    seen = fp8_rows.decode(codes) * scales[:, None]
    multiplier = fp8_rows.hidden_multiplier(ALPHA, LIMIT)
    y = np.zeros(x.shape)
    for row, slot in np.argwhere((ids.numpy() >= 0) & (ids.numpy() < layer.experts)):
        expert = int(ids[row, slot])
        h = layout.activate(layer.values[0][expert] @ seen[row] + b13[expert], activation)
        if activation == "swiglu_oai":
            h = (h * multiplier).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / multiplier
        else:
            h = h.astype(ml_dtypes.bfloat16).astype(np.float64)
        y[row] += float(weights[row, slot]) * (layer.values[1][expert] @ h + b2[expert])
    return y


def beside_stored(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[np.ndarray, float]:
    """The layer in float64 from the h that is stored, and the largest distance of one from what it may be."""
    b13, b2 = (bias.double() for bias in layer.biases)
    w13, w2 = (torch.from_numpy(values) for values in layer.values)
    codes, scales = fp8_rows.quantize_rows(x.double().numpy())
    seen = torch.from_numpy(fp8_rows.decode(codes) * scales[:, None])
    h, y, worst = stored(layer.packed[0], layer.biases[0], x, ids), torch.zeros(x.shape, dtype=torch.float64), 0.0
    for expert in range(layer.experts):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        sums = seen[rows] @ w13[expert].T + b13[expert]
        size = seen[rows].abs() @ w13[expert].abs().T + b13[expert].abs()
        worst = max(worst, further(h[rows, slots], sums, size, x.shape[1]))
        out = h[rows, slots] @ w2[expert].T + b2[expert]
        y.index_add_(0, rows, out * weights[rows, slots].double()[:, None])
    return y.numpy(), worst


def chosen(m: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores(m, experts).topk(2)
    return ids.int(), values.softmax(-1).contiguous()


@pytest.mark.parametrize(
    ("m", "encoding"), [pytest.param(1, "nibble", marks=pytest.mark.nightly), (5, "rotated"), (70, "nibble")]
)
def test_experts_with_a_scale_a_row_go_by_expert_whatever_the_rows(m: int, encoding: str, card: Simulated) -> None:
    layer, routing = Layer(3, 96, 160, encoding=encoding), chosen(m, 3)
    x = layer.x(m)
    y = layer(x, routing, x_format="fp8")
    assert card.kernels == LAUNCHES
    assert 0.005 <= error(y, layer.wanted(x, *routing)) <= COST
    assert error(y, rounded_alike(layer, x, *routing)) <= ALIKE
    assert m > 5 or torch.equal(layer(x, routing, x_format="fp8"), y)


@pytest.mark.parametrize(("m", "encoding"), [(5, "rotated"), (70, "nibble")])
def test_with_sums_as_tensor_cores_make_them_experts_are_right_beside_the_h_that_they_store(
    m: int, encoding: str, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_sums.in_the_simulator(monkeypatch)
    layer, routing = Layer(3, 96, 160, encoding=encoding), chosen(m, 3)
    x = layer.x(m)
    wanted, worst = beside_stored(layer, x, *routing)
    y = layer(x, routing, x_format="fp8")
    assert worst <= 1 and error(y, wanted) <= ALIKE / 2
    assert error(y, wanted) < error(y, rounded_alike(layer, x, *routing))  # whose h has other codes


def test_an_h_that_is_a_code_off_is_found(card: Simulated) -> None:
    sums = torch.randn(7, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    codes = torch.from_numpy(layout.activate(sums.numpy(), "swiglu_oai") * MULTIPLIER).float().to(torch.float8_e4m3fn)
    h = codes.double() / MULTIPLIER
    assert further(h, sums, sums.abs() * 4, 96) <= 1
    h[3, 5] = (codes.view(torch.uint8) + 1).view(torch.float8_e4m3fn)[3, 5].double() / MULTIPLIER
    assert further(h, sums, sums.abs() * 4, 96) > 1


@pytest.mark.parametrize(("m", "encoding"), [(5, "rotated"), pytest.param(70, "nibble", marks=pytest.mark.nightly)])
def test_experts_with_silu_go_by_expert_with_h_in_bf16(m: int, encoding: str, card: Simulated) -> None:
    layer, routing = Layer(3, 96, 160, encoding=encoding), chosen(m, 3)
    x = layer.x(m)
    y = layer(x, routing, x_format="fp8", activation="silu")
    assert card.kernels == [*LAUNCHES[:2], "moe.wgmma_fp8", "moe.wgmma", "moe.combine"]
    assert 0.005 <= error(y, layer.wanted(x, *routing, activation="silu")) <= 0.035  # h is not rounded to E4M3
    assert error(y, rounded_alike(layer, x, *routing, "silu")) <= ALIKE
    assert m > 5 or torch.equal(layer(x, routing, x_format="fp8", activation="silu"), y)


def test_h_of_silu_may_be_of_any_magnitude(card: Simulated) -> None:
    """Ups of millions beside ups of millionths: what no one scale of E4M3 holds."""
    layer, routing = Spread(0), chosen(9, 3)
    x, exponents = layer.x(9), torch.arange(9) * 5 - 20
    x *= torch.exp2(exponents)[:, None].bfloat16()
    layer.biases = [torch.zeros_like(bias) for bias in layer.biases]
    y = layer(x, routing, x_format="fp8", activation="silu")
    wanted = rounded_alike(layer, x, *routing, "silu")
    for row in range(9):  # each by itself: the largest would hide the others
        assert error(y[row], wanted[row]) <= ALIKE


@pytest.mark.parametrize("which", [0, 1])
def test_with_silu_rows_of_w13_alone_take_more_passes(which: int, card: Simulated) -> None:
    layer, narrow, routing = Spread(30), Spread(0), chosen(20, 3)
    layer.packed[1 - which], layer.values[1 - which] = narrow.packed[1 - which], narrow.values[1 - which]
    x = layer.x(20)
    y = layer(x, routing, x_format="fp8", activation="silu")
    assert card.launched[2].knobs.as_dict()["rows"] == ("narrow" if which else "wide")
    assert error(y, rounded_alike(layer, x, *routing, "silu")) <= ALIKE


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_torch_s_own_e4m3_and_silu_say_the_same(activation: str, card: Simulated) -> None:
    layer, (ids, weights) = Layer(3, 96, 160), chosen(12, 3)
    x = layer.x(12)
    largest = x.double().abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    seen = (x.double() / scale).to(torch.float8_e4m3fn).double() * scale
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    values = [torch.from_numpy(value) for value in layer.values]
    for row, slot in itertools.product(range(12), range(2)):
        expert = int(ids[row, slot])
        rows = values[0][expert] @ seen[row] + layer.biases[0][expert].double()
        gate, up = rows[0::2], rows[1::2]
        if activation == "silu":
            h = torch.nn.functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            h = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
        wanted[row] += weights[row, slot].double() * (values[1][expert] @ h + layer.biases[1][expert].double())
    found = layer(x, (ids, weights), x_format="fp8", activation=activation)
    assert error(found, wanted.numpy()) <= (ALIKE if activation == "silu" else COST)


@pytest.mark.parametrize(("apart", "passes", "encoding"), [(11, 1, "nibble"), (12, 2, "rotated"), (40, 4, "nibble")])
def test_rows_whose_scales_are_far_apart_take_more_passes(
    apart: int, passes: int, encoding: str, card: Simulated, nightly: bool
) -> None:
    layer, routing = Spread(apart, encoding), chosen(20, 3)
    for weight in layer.packed:
        found = weight.row_words
        assert found.range == ("narrow" if passes == 1 else "wide")
        assert sorted(set((found.words >> 8).flatten().tolist())) == sorted({1, passes})
        assert found.words[1, 5] == (122 - apart) | passes << 8
    if passes == 2 and not nightly:
        return
    x = layer.x(20)
    y = layer(x, routing, x_format="fp8")
    assert card.kernels == LAUNCHES
    assert error(y, rounded_alike(layer, x, *routing)) <= ALIKE


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_said_of_rows_is_what_numpy_finds(encoding: str, card: Simulated) -> None:
    generator = np.random.default_rng(5)
    codes = generator.integers(0, 16, (3, 40, 160)).astype(np.uint8)
    scales = generator.integers(60, 130, (3, 40, 5)).astype(np.uint8)
    codes[:, ::3, 32:96] = 8 * generator.integers(0, 2, (3, 14, 64))  # zeros of either sign
    codes[1, 7] = 0
    packed = jitmx.pack_experts(
        (torch.from_numpy(formats.pack_nibbles(codes)), torch.from_numpy(scales)), encoding=encoding
    )
    found = row_words(packed.words, packed.scales, 40, encoding)
    assert np.array_equal(found.words.numpy().view(np.uint16), fp8_rows.row_words(codes, scales))
    assert found.range == "wide"


def test_a_row_with_a_nan_is_nan_and_no_other_is(card: Simulated) -> None:
    layer, routing = Layer(3, 96, 160), chosen(9, 3)
    x = layer.x(9)
    x[4, 17], x[6] = torch.nan, 0
    y = layer(x, routing, x_format="fp8")
    assert y[4].isnan().all() and not y[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


def test_the_operator_of_torch_takes_it(card: Simulated) -> None:
    layer, routing = Spread(30), chosen(5, 3)
    x = layer.x(5)
    packed = [part for weight in layer.packed for part in (weight.words, weight.scales)]

    layouts = [operand.layout(weight) for weight in layer.packed]
    found = torch.ops.jitmx.moe(
        x, *routing, *packed, 96, 160, *layouts, *layer.biases, None, None, None, "softmax_topk", "swiglu_oai", ALPHA,
        LIMIT, "fp8",
    )  # fmt: skip
    assert torch.equal(found, layer(x, routing, x_format="fp8"))


@pytest.mark.parametrize(
    ("more", "said", "kind"),
    [
        ({"alpha": 0.0}, "give h no bound", InputError),
        ({"limit": float("nan")}, "give h no bound", InputError),
        ({"activation": "relu2"}, "do not fit: with activation='relu2'", InputError),
    ],
)
def test_what_has_no_scale_a_row_is_refused(more: dict[str, Any], said: str, kind: type, card: Simulated) -> None:
    layer, routing = Layer(3, 96, 160), chosen(2, 3)
    with pytest.raises(kind, match=said):
        layer(layer.x(2), routing, x_format="fp8", **more)
    assert not card.kernels


@pytest.mark.parametrize("more", [{"weight_on": "input"}, {"reduction": "atomic"}], ids=str)
def test_what_no_kernel_of_a_scale_a_row_takes_is_made_with_a_scale_a_block(
    more: dict[str, str], card: Simulated
) -> None:
    layer, (ids, weights) = Layer(3, 96, 160), chosen(4, 3)
    x, routing = layer.x(4), (ids[:, :1].contiguous(), weights[:, :1].contiguous())  # whose sums have no order
    found = layer(x, routing, x_format="fp8", **more)
    assert torch.equal(found, layer(x, routing, x_format="mxfp8", scale_rule="ceil", **more))
    assert not any("fp8." in name for name in card.kernels)


@pytest.mark.parametrize("which", [0, 1])
def test_weights_of_any_scale_take_a_scale_a_block(which: int, card: Simulated) -> None:
    layer, routing = Layer(3, 96, 160), chosen(4, 3)
    n, k = ((320, 96), (96, 160))[which]
    codes = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8)
    layer.packed[which] = jitmx.pack_experts((codes, torch.full((3, n, k // 32), 130, dtype=torch.uint8)))
    layer.packed[1 - which] = jitmx.pack_experts(
        (codes.new_zeros(3, *((96, 80), (320, 48))[which]), codes.new_full((3, *((96, 5), (320, 3))[which]), 127))
    )
    x = layer.x(4)
    found = layer(x, routing, x_format="fp8")
    assert torch.equal(found, layer(x, routing, x_format="mxfp8", scale_rule="ceil"))
    again = layer(torch.nn.Parameter(x, requires_grad=False), routing, x_format="fp8")
    assert torch.equal(again, found) and not any("fp8" in name for name in card.kernels)


def test_weights_that_are_loaded_again_are_looked_at_again(card: Simulated) -> None:
    layer, other, routing = Spread(20), Spread(30), chosen(4, 3)
    x = layer.x(4)
    layer(x, routing, x_format="fp8")
    places = [weight.row_words.words.data_ptr() for weight in layer.packed]
    for weight, new in zip(layer.packed, other.packed, strict=True):
        weight.words.copy_(new.words)
        weight.scales.copy_(new.scales)
        weight.refresh_rows()
    assert [weight.row_words.words.data_ptr() for weight in layer.packed] == places
    found = [weight.row_words.words for weight in layer.packed]
    assert all(torch.equal(words, weight.row_words.words) for words, weight in zip(found, other.packed, strict=True))
    narrow = Spread(0).packed[0]
    assert narrow.row_words.range == "narrow"
    narrow.scales.copy_(other.packed[0].scales)
    with pytest.raises(InputError, match="further apart than one pass over k takes"):
        narrow.refresh_rows()
