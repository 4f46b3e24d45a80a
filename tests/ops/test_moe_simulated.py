"""`jitmx.moe` and `jitmx.route` whole, their kernels in the simulator, against torch and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import jitmx
from jitmx import formats
from jitmx import settings as jitmx_settings
from jitmx.errors import InputError, KnobError
from jitmx.kernels.moe import layout
from jitmx.ops.linear import compose
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe import plan as moe_plan
from simulated_card import Simulated
from strategies import examples

GATE = 0.008  # with parts in bf16


class Layer:
    """Random experts, packed, with the layer in float64."""

    def __init__(self, experts: int, hidden: int, inner: int, bias: bool = True, encoding: str = "nibble") -> None:
        self.experts, self.hidden, generator = experts, hidden, torch.Generator().manual_seed(experts)
        self.values, self.packed, self.biases = [], [], []
        for n, k in ((2 * inner, hidden), (hidden, inner)):
            codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 124, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
            self.packed.append(jitmx.pack_experts((codes, scales), encoding=encoding))
            table = formats.unpack_nibbles(codes.numpy())
            self.values.append(formats.dequantize(table, scales.numpy(), formats.get("mxfp4")))
            self.biases.append(torch.randn(experts, n, generator=generator).bfloat16() if bias else None)

    def x(self, *rows: int) -> torch.Tensor:
        return torch.randn(*rows, self.hidden, generator=torch.Generator().manual_seed(sum(rows))).bfloat16()

    def __call__(self, x: torch.Tensor, routing: Any, **more: Any) -> torch.Tensor:
        return jitmx.moe(x, routing, *self.packed, *self.biases, **more)

    def wanted(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **more: Any) -> np.ndarray:
        b13, b2 = (None if b is None else b.double().numpy() for b in self.biases)
        rows = x.double().numpy().reshape(-1, self.hidden)
        top = ids.shape[-1]
        y = layout.reference(
            rows, ids.numpy().reshape(-1, top), weights.double().numpy().reshape(-1, top), *self.values, b13, b2, **more
        )
        return y.reshape(x.shape)


def error(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - wanted) / (np.linalg.norm(wanted) or 1))


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    """Logits without ties."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=generator).float() / count * 6 - 3).view(shape)


def with_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take this kernel."""
    monkeypatch.setenv("JITMX_MOE_KNOBS", f"kernel={name}")
    jitmx_settings.reload()


BY_EXPERT = ["routing.sort", "moe.grouped", "moe.grouped", "moe.combine"]


@pytest.mark.parametrize("m", [1, 3, 70])
def test_a_layer_from_logits_is_that_of_torch_topk_and_softmax(m: int, card: Simulated) -> None:
    layer = Layer(5, 64, 32)
    x, logits = layer.x(m), scores(m, 5)
    y = layer(x, logits, top=2)
    chosen, ids = logits.topk(2)
    assert error(y, layer.wanted(x, ids, chosen.softmax(-1))) <= GATE
    expected = ["routing.topk", "moe.decode"] if m <= 64 else ["routing.topk", *BY_EXPERT]
    assert card.kernels == expected
    again = layer(x, (ids.int(), chosen.softmax(-1).contiguous()))
    assert card.kernels == expected + expected[1:]
    assert error(again, layer.wanted(x, ids, chosen.softmax(-1))) <= GATE


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kernel", ["wgmma", None])
def test_many_rows_an_expert_are_gathered_for_products_by_wgmma(
    kernel: str | None, mapped: bool, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        with_kernel(kernel, monkeypatch)
    layer = Layer(3, 96, 160, encoding="rotated")
    to = torch.tensor([2, -1, 0, 1], dtype=torch.int32) if mapped else None
    x, logits = layer.x(100), scores(100, 4 if mapped else 3)
    chosen, ids = logits.topk(2)
    weights = chosen.softmax(-1).contiguous()
    y = layer(x, (ids.int(), weights), expert_map=to)
    products = ["moe.fused"] if kernel is None else ["moe.wgmma", "moe.wgmma"]
    assert card.kernels == ["routing.sort", "moe.gather", *products, "moe.combine"]
    assert error(y, layer.wanted(x, ids if to is None else to[ids], weights)) <= GATE


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("mapped", [False, True])
def test_both_products_in_one_launch_have_the_bits_of_two(
    mapped: bool, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(3, 96, 160, encoding="rotated")
    to = torch.tensor([2, -1, 0, 1], dtype=torch.int32) if mapped else None
    x, logits = layer.x(100), scores(100, 4 if mapped else 3)
    chosen, ids = logits.topk(2)
    routing = ids.int(), chosen.softmax(-1).contiguous()
    with_kernel("wgmma", monkeypatch)
    two = layer(x, routing, expert_map=to, residual=x)
    with_kernel("fused", monkeypatch)
    y = layer(x, routing, expert_map=to, residual=x)
    assert card.kernels[5:] == ["routing.sort", "moe.gather", "moe.fused", "moe.combine"]
    assert torch.equal(y, two)


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("kernel", ["wgmma", "fused"])
def test_of_no_row_that_has_an_expert_there_is_the_residual(
    kernel: str, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(3, 96, 160, encoding="rotated")
    x, ids = layer.x(70), torch.full((70, 2), -1, dtype=torch.int32)
    with_kernel(kernel, monkeypatch)
    y = layer(x, (ids, torch.ones(70, 2)), residual=x)
    assert torch.equal(y, x) and f"moe.{kernel}" in card.kernels


def test_logits_of_every_type_and_scoring(card: Simulated) -> None:
    layer = Layer(6, 64, 32)
    x = layer.x(2, 3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = scores(2, 3, 6).to(dtype)  # distinct in all of them
        chosen, ids = logits.float().topk(3)
        assert error(layer(x, logits, top=3), layer.wanted(x, ids, chosen.softmax(-1))) <= GATE
    weights = scores(2, 3, 6).softmax(-1).gather(-1, ids)
    y = layer(x, scores(2, 3, 6), top=3, scoring="softmax_all")
    assert error(y, layer.wanted(x, ids, weights)) <= GATE


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scoring", ["softmax_topk", "softmax_all"])
def test_one_row_of_logits_is_one_launch_and_has_the_bits_of_two(
    dtype: torch.dtype, scoring: str, card: Simulated
) -> None:
    layer = Layer(5, 64, 32, encoding="rotated")
    x, logits = layer.x(1), scores(1, 5).to(dtype)
    y = layer(x, logits, top=2, scoring=scoring)
    assert card.kernels == ["moe.token"]
    again = layer(x, jitmx.route(logits, k=2, scoring=scoring))
    assert card.kernels == ["moe.token", "routing.topk", "moe.token"]
    assert torch.equal(y, again)
    # Of logits for more experts than are at hand, the choice is a launch of its own.
    layer(x, scores(1, 9).to(dtype), top=2, expert_map=torch.arange(9, dtype=torch.int32) - 4)
    assert card.kernels[3:] == ["routing.topk", "moe.token"]


@pytest.mark.parametrize("m", [3, 67])
def test_a_map_takes_logits_of_all_experts_to_those_at_hand(m: int, card: Simulated) -> None:
    layer = Layer(4, 64, 32)
    to = torch.tensor([-1, 2, -1, 0, 1, 3, -1, -1, -1], dtype=torch.int32)
    x, logits = layer.x(m), scores(m, 9)
    chosen, ids = logits.topk(2)
    wanted = layer.wanted(x, to[ids], chosen.softmax(-1))
    assert error(layer(x, logits, top=2, expert_map=to), wanted) <= GATE
    found = jitmx.route(logits, k=2)
    assert error(layer(x, found, expert_map=to), wanted) <= GATE


@pytest.mark.parametrize("m", [4, 66])
def test_rows_past_the_count_are_zero_and_take_no_expert(m: int, card: Simulated) -> None:
    layer = Layer(3, 64, 32)
    x, logits = layer.x(m), scores(m, 3)
    chosen, ids = logits.topk(2)
    wanted = layer.wanted(x, ids, chosen.softmax(-1))
    y = layer(x, logits, top=2, count=torch.tensor([m - 2], dtype=torch.int32))
    assert not y[m - 2 :].any() and error(y[: m - 2], wanted[: m - 2]) <= GATE


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("m", "reduction"),
    [(1, "ordered"), pytest.param(4, "ordered", marks=pytest.mark.nightly), (70, "ordered"), (6, "atomic")],
)
def test_a_residual_is_added_before_the_one_rounding(m: int, reduction: str, card: Simulated) -> None:
    layer = Layer(3, 96, 64, encoding="rotated")
    x, logits = layer.x(m), scores(m, 3)
    residual = torch.randn(m, 96, generator=torch.Generator().manual_seed(9)).mul(30).bfloat16()
    chosen, ids = logits.topk(2)
    wanted = layer.wanted(x, ids, chosen.softmax(-1)) + residual.double().numpy()
    y = layer(x, logits, top=2, residual=residual, reduction=reduction)
    assert error(y, wanted) <= GATE
    if reduction == "ordered":  # half a unit of bf16, and what h was rounded by
        ulp = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64) * 2.0**16
        assert (np.abs(y.double().numpy() - wanted) <= 0.5 * ulp + 0.03).all()
    assert sum(getattr(variant.knobs, "residual", False) for variant in card.launched) == (reduction == "ordered")


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("card", ["sm_80", "sm_90a"], indirect=True)
@pytest.mark.parametrize("m", [1, 4, 70])
def test_a_residual_that_is_a_pair_is_added_whole_and_left_as_one(m: int, card: Simulated) -> None:
    layer = Layer(3, 96, 64, encoding="rotated")
    x, logits = layer.x(m), scores(m, 3)
    total = torch.randn(m, 96, generator=torch.Generator().manual_seed(9)).mul(1000)
    residual = compose.pair(total, torch.bfloat16)
    chosen, ids = logits.topk(2)
    wanted = layer.wanted(x, ids, chosen.softmax(-1)) + residual.double().sum(0).numpy()
    y = layer(x, logits, top=2, residual=residual)
    assert y.shape == (2, m, 96) and bool((y[1].abs() <= y[0].abs() * 2.0**-8).all())
    # Sixteen bits of a value, and what h was rounded by.
    assert (np.abs(y.double().sum(0).numpy() - wanted) <= np.abs(wanted) * 2.0**-16 + 0.03).all()
    assert [variant.knobs.residual for variant in card.launched if hasattr(variant.knobs, "residual")] == ["pair"]
    with pytest.raises(KnobError, match="reduction='atomic' adds to y in bf16"):
        layer(x, logits, top=2, residual=residual, reduction="atomic")


def test_a_residual_of_another_shape_or_that_is_written_over_is_refused(card: Simulated) -> None:
    layer = Layer(3, 64, 32)
    x, logits = layer.x(2), scores(2, 3)
    for more, said in (
        ({"residual": x[:1]}, r"residual is bfloat16 \[1, 64\]"), ({"residual": x.float()}, "residual is float32"),
        ({"residual": (other := x.clone()), "out": other}, "out overlaps residual"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            layer(x, logits, top=2, **more)
    assert card.launched == []


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("m", [1, 11])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_with_a_norm_also_writes_what_the_experts_read(m: int, dtype: torch.dtype, card: Simulated) -> None:
    generator = torch.Generator().manual_seed(m)
    x, norm = torch.randn(m, 72, generator=generator).mul(4).to(dtype), torch.rand(72, generator=generator).to(dtype)
    router = torch.randn(8, 72, generator=generator).bfloat16()
    found = jitmx.route(x, router, k=2, norm=norm, normalized=True)
    assert len(card.launched) == 1 and found.normalized is not None
    wanted = torch.nn.functional.rms_norm(x.double(), (72,), norm.double(), 1e-5)
    assert found.normalized.dtype == dtype and found.normalized.shape == x.shape
    torch.testing.assert_close(found.normalized.double(), wanted, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)
    plain = jitmx.route(x, router, k=2, norm=norm)
    assert plain.normalized is None and torch.equal(plain.ids, found.ids) and torch.equal(plain.weights, found.weights)
    *chosen, hidden = torch.ops.jitmx.route_normalized(x, router, None, norm, 2, "softmax_topk", 1e-5)
    assert torch.equal(chosen[0], found.ids) and torch.equal(hidden, found.normalized)
    listed = jitmx.route(x, router, k=2, norm=norm, normalized=True, tile=8)
    assert torch.equal(listed.normalized, hidden) and torch.equal(listed.ids, found.ids) and listed.pairs is not None
    opcheck(torch.ops.jitmx.route_normalized.default, (x, router, None, norm, 2, "softmax_topk", 1e-5))
    with pytest.raises(InputError, match="normalized=True asks for what RMSNorm makes of x, and norm is None"):
        jitmx.route(x, router, k=2, normalized=True)


@pytest.mark.parametrize("m", [1, 5, 90])
def test_every_row_may_go_to_one_expert_and_others_have_none(m: int, card: Simulated) -> None:
    layer = Layer(7, 32, 32)
    x, ids = layer.x(m), torch.full((m, 1), 4, dtype=torch.int32)
    weights = torch.rand(m, 1, generator=torch.Generator().manual_seed(1))
    assert error(layer(x, (ids, weights)), layer.wanted(x, ids, weights)) <= GATE


@pytest.mark.parametrize("m", [2, 65])
def test_rows_whose_experts_are_elsewhere_are_zero(m: int, card: Simulated) -> None:
    layer = Layer(3, 32, 32)
    ids = torch.tensor([[-1, 3]], dtype=torch.int32).repeat(m, 1)
    out = torch.full((m, 32), torch.nan).bfloat16()
    assert layer(layer.x(m), (ids, torch.ones(m, 2)), out=out) is out
    assert not out.any()


def test_no_rows_launch_nothing(card: Simulated) -> None:
    layer = Layer(3, 32, 32)
    empty = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    for routing, more in ((empty, {}), (torch.empty(0, 3), {"top": 2})):
        for _ in range(2):
            assert layer(torch.empty(0, 32).bfloat16(), routing, **more).shape == (0, 32)
    assert card.launched == []


@pytest.mark.parametrize(
    ("experts", "top", "hidden", "inner"),
    [pytest.param(16, 8, 64, 32, marks=pytest.mark.nightly), (15, 4, 64, 96), (8, 4, 96, 96)],
    ids=["many", "60", "20b"],
)
def test_models_of_other_proportions(experts: int, top: int, hidden: int, inner: int, card: Simulated) -> None:
    layer = Layer(experts, hidden, inner, bias=experts == 8)
    activation = "swiglu_oai" if experts == 8 else "silu"
    for m in (2, 80):
        x, logits = layer.x(m), scores(m, experts)
        chosen, ids = logits.topk(top)
        wanted = layer.wanted(x, ids, chosen.softmax(-1), activation=activation)
        assert error(layer(x, logits, top=top, activation=activation), wanted) <= GATE


@pytest.mark.parametrize("tile", ["16x128", "64x128", pytest.param("128x128s3", marks=pytest.mark.nightly)])
def test_a_tile_of_the_environment_takes_few_rows_by_expert_on_that_tile(
    tile: str, card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_MOE_TILE", tile)
    jitmx_settings.reload()
    layer = Layer(4, 64, 32)
    x, logits = layer.x(5), scores(5, 4)
    chosen, ids = logits.topk(2)
    for routing, more in ((logits, {"top": 2}), ((ids.int(), chosen.softmax(-1).contiguous()), {})):
        assert error(layer(x, routing, **more), layer.wanted(x, ids, chosen.softmax(-1))) <= GATE
    lists = ["routing.topk", *BY_EXPERT[1:]]  # the choice makes the lists as well
    assert card.kernels == lists + BY_EXPERT
    rows = int(tile.partition("x")[0])
    assert {v.knobs.tile_m for v in card.launched if v.spec.name == "grouped"} == {rows}
    assert {v.knobs.tile for v in card.launched if v.spec.family == "routing"} == {rows}


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_are_those_of_torch_topk_in_the_same_order(data: st.DataObject, card: Simulated) -> None:
    m, experts = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([4, 32, 60, 128, 256]))
    k = data.draw(st.integers(1, min(8, experts)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    # All values of a type that lie apart: no two are the same after rounding.
    grid = torch.arange(-1024, 1024).float().mul(1 / 128).to(dtype).unique()
    order = torch.randperm(len(grid), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**31))))
    logits = torch.stack([grid[order.roll(row * experts)[:experts]] for row in range(m)]).contiguous()
    wanted, ids = logits.float().topk(k)
    found = jitmx.route(logits, k=k)
    assert torch.equal(found.ids.long(), ids)
    torch.testing.assert_close(found.weights, wanted.softmax(-1), rtol=2e-6, atol=1e-7)


def test_lists_of_traced_routing_are_those_of_eager_routing(card: Simulated) -> None:
    logits = scores(9, 6)
    eager = jitmx.route(logits, k=2, tile=8)
    traced = torch.ops.jitmx.route_lists(logits, None, None, None, None, 2, "softmax_topk", 0.0, 8, None)
    again = torch.ops.jitmx.group_by_expert(eager.ids, 6, 8, None, None)
    assert eager.normalized is None
    for wanted, found in zip(eager[:6], traced, strict=True):
        assert wanted is not None and torch.equal(wanted, found)
    for wanted, found in zip(eager[2:6], again, strict=True):
        assert wanted is not None and torch.equal(wanted, found)
    hidden, router = torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    wanted = jitmx.route(hidden, router, k=3)
    ids, weights = torch.ops.jitmx.route(hidden, router, None, None, 3, "softmax_topk", 1e-5)
    assert torch.equal(ids, wanted.ids) and torch.equal(weights, wanted.weights)


def test_the_operator_computes_what_eager_code_computes(card: Simulated) -> None:
    layer = Layer(4, 64, 32)
    x, logits, out = layer.x(3), scores(3, 4), torch.zeros(3, 64).bfloat16()
    eager = layer(x, logits, top=2)
    assert torch.equal(layer(torch.nn.Parameter(x, requires_grad=False), logits, top=2), eager)
    compiled = torch.compile(lambda x, logits: layer(x, logits, top=2), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, logits), eager)
    w13, w2 = layer.packed
    tensors = w13.words, w13.scales, w2.words, w2.scales, w13.k, w2.k
    layouts = (expert_operand.layout(w13), expert_operand.layout(w2))
    rest = (*layer.biases, None, None, 2, "softmax_topk", "swiglu_oai", 1.702, 7.0)
    torch.ops.jitmx.moe_out(x, logits, None, *tensors, *layouts, *rest, out)
    assert torch.equal(out, eager)
    opcheck(torch.ops.jitmx.moe.default, (x, logits, None, *tensors, *layouts, *rest))
    recipe = "bf16", "floor", "output", "ordered"
    opcheck(torch.ops.jitmx.moe.default, (x, logits, None, *tensors, *layouts, *rest, *recipe, x))
    added = layer(x, logits, top=2, residual=x)
    compiled = torch.compile(lambda x: layer(x, logits, top=2, residual=x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), added)
    torch.ops.jitmx.moe_out(x, logits, None, *tensors, *layouts, *rest, out, *recipe, x)
    assert torch.equal(out, added)
    opcheck(torch.ops.jitmx.topk.default, (logits, 2, "softmax_topk"))


def test_layers_of_one_shape_share_their_launches_and_a_warm_call_plans_nothing(card: Simulated) -> None:
    first, second = Layer(3, 32, 32), Layer(3, 32, 32, bias=True)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    for _ in range(2):
        for layer in (first, second):
            layer(layer.x(2), (ids, weights))
    assert len(moe_plan._known) == 1
    assert [len(layer.packed[0].plans) for layer in (first, second)] == [1, 1]


def test_inputs_that_lie_wrong_are_refused_before_anything_is_launched(card: Simulated) -> None:
    layer = Layer(3, 64, 32)
    x, (ids, weights) = layer.x(2), (torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))
    many, to = layer.x(65), torch.zeros(65, 2, dtype=torch.int32)
    for arguments, more, said in (
        ((x, (ids.t(), weights)), {}, r"ids is not contiguous"),
        ((x, (ids, weights)), {"out": x}, "out overlaps x"),
        ((x, (ids, weights)), {"out": torch.zeros(129).bfloat16()[1:].view(2, 64)}, "out starts at an address"),
        ((many, (to, torch.ones(65, 2))), {"expert_map": torch.zeros(2, dtype=torch.int32)}, "expert_map has 2 ids"),
        ((many, (to, torch.ones(65, 2))), {"expert_map": torch.zeros(513, dtype=torch.int32)}, "at most 512"),
    ):
        for _ in range(2):  # what was refused is not remembered as planned
            with pytest.raises(InputError, match=said):
                layer(*arguments, **more)
    assert card.launched == []


def test_more_experts_than_lists_take_are_refused_for_many_rows_and_served_for_few(card: Simulated) -> None:
    layer = Layer(513, 32, 32)
    ids, weights = torch.full((65, 1), 512, dtype=torch.int32), torch.ones(65, 1)
    with pytest.raises(InputError, match=r"there are 513 ids of experts; .* at most 512"):
        layer(layer.x(65), (ids, weights))
    x = layer.x(2)
    assert error(layer(x, (ids[:2], weights[:2])), layer.wanted(x, ids[:2], weights[:2])) <= GATE
