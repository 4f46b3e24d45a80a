"""`moe` and `route` as operators that torch knows by name: traced without a GPU, by tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitmx
from jitmx.errors import InputError, KnobError
from jitmx.kernels.routing.problem import TILES, capacity
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe.experts import PackedExperts
from jitmx.ops.routing import _new_lists

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER, TOP = 6, 96, 64, 2


def packed(n: int, k: int) -> PackedExperts:
    codes = torch.zeros(EXPERTS, n, k // 2, dtype=torch.uint8)
    return jitmx.pack_experts((codes, torch.full((EXPERTS, n, k // 32), 127, dtype=torch.uint8)))


W13, W2 = packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)


def inputs(rows: tuple[int, ...] = (3,), **changes: Any) -> dict[str, Any]:
    """Arguments of a call."""
    made: dict[str, Any] = {
        "x": torch.zeros(*rows, HIDDEN, dtype=BF16),
        "routing": (torch.zeros(*rows, TOP, dtype=torch.int32), torch.zeros(*rows, TOP)),
        "w13": W13, "w2": W2,
        "b13": torch.zeros(EXPERTS, 2 * INNER, dtype=BF16), "b2": torch.zeros(EXPERTS, HIDDEN, dtype=BF16),
    }  # fmt: skip
    return made | changes


def logits(*rows: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*rows, EXPERTS, dtype=dtype)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize("rows", [(), (0,), (1,), (100,), (2, 3)])
@pytest.mark.usefixtures("fake")
def test_a_layer_of_tensors_without_data_is_like_x(rows: tuple[int, ...]) -> None:
    for change in ({}, {"routing": logits(*rows), "top": 4}, {"b13": None, "b2": None, "activation": "silu"}):
        asked = inputs(rows, **change)
        y = jitmx.moe(**asked)
        assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (asked["x"].shape, BF16, asked["x"].device, True)
        out = torch.empty(*rows, HIDDEN, dtype=BF16)
        assert jitmx.moe(**asked, out=out) is out


@pytest.mark.parametrize("m", [0, 1, 70])
@pytest.mark.usefixtures("fake")
def test_routing_of_tensors_without_data_has_shapes_and_types(m: int) -> None:
    x, weight = torch.zeros(m, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    for found in (jitmx.route(x, weight, k=2), jitmx.route(torch.zeros(m, 8), k=2)):
        assert (found.ids.shape, found.ids.dtype) == ((m, 2), torch.int32)
        assert found.weights is not None and (found.weights.shape, found.weights.dtype) == ((m, 2), torch.float32)
        assert found[2:] == (None,) * 5
    norm = torch.ones(64, dtype=BF16)
    normalized = jitmx.route(x, weight, k=2, norm=norm, normalized=True).normalized
    assert normalized is not None and (normalized.shape, normalized.dtype) == (x.shape, BF16)
    with pytest.raises(InputError, match="normalized beside tile cannot be traced"):
        jitmx.route(x, weight, k=2, norm=norm, normalized=True, tile=16)
    lists = jitmx.route(x, weight, k=2, tile=16)
    grouped = jitmx.group_by_expert(lists.ids, 8, tile=16)
    assert grouped.weights is None and grouped.ids is lists.ids
    for made in (lists, grouped):
        shapes = [tuple(tensor.shape) for tensor in made[2:] if tensor is not None]
        assert shapes == [(2 * m,), (9,), (capacity(m, 2, 8, 16), 4), (1,)]


@given(m=st.integers(0, 9000), k=st.integers(1, 8), local=st.integers(1, 512), tile=st.sampled_from(TILES[1:]))
def test_the_schedule_has_the_capacity_that_routing_writes(m: int, k: int, local: int, tile: int) -> None:
    schedule = _new_lists(torch.empty(0, device="meta"), m, k, local, tile)[2]
    assert schedule.shape == (capacity(m, k, local, tile), 4)


def compiled(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Operators of what torch.compile makes of `function`, as one graph."""
    found: list[str] = []

    class Seen(Exception):
        pass

    def backend(module: Any, _inputs: Any) -> Any:
        found.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        raise Seen

    torch.compiler.reset()
    with pytest.raises(Exception, match="Seen"):
        torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    return [name.rpartition("jitmx.")[2] for name in found if "jitmx." in name]


def test_compiled_code_calls_the_operators_in_one_graph() -> None:
    def step(x: torch.Tensor, router: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        y = jitmx.moe(x, jitmx.route(x, router, k=TOP), W13, W2)
        jitmx.moe(y, x @ router.T, W13, W2, top=TOP, out=out)
        found = jitmx.route(out @ router.T, k=TOP)
        jitmx.group_by_expert(found.ids, EXPERTS, tile=16)
        return jitmx.moe(out, (found.ids, found.weights), W13, W2)  # type: ignore[arg-type]

    x, router = torch.zeros(3, HIDDEN, dtype=BF16), torch.zeros(EXPERTS, HIDDEN, dtype=BF16)
    assert compiled(step, x, router, torch.zeros_like(x)) == [
        "route", "moe", "moe_out", "topk", "group_by_expert", "moe"
    ]  # fmt: skip
    assert compiled(lambda x: jitmx.route(x, router, k=TOP, tile=16).schedule, x) == ["route_lists"]


class Layer(torch.nn.Module):
    """A router and its experts, as a model holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, dtype=BF16), requires_grad=False)
        self.w13, self.w2 = W13, W2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return jitmx.moe(x, jitmx.route(x, self.router, k=TOP), self.w13, self.w2) + 1


def test_a_layer_can_be_exported_with_any_number_of_rows() -> None:
    rows = torch.export.Dim("rows", min=1, max=4096)
    x = torch.zeros(3, HIDDEN, dtype=BF16)
    program = torch.export.export(Layer(), (x,), dynamic_shapes={"x": {0: rows}}, strict=False)
    names = [str(node.target) for node in program.graph.nodes if "jitmx." in str(node.target)]
    assert names == ["jitmx.route.default", "jitmx.moe.default"]


def test_the_number_of_rows_may_be_unknown() -> None:
    def step(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found = jitmx.route(scores, k=TOP, tile=16)
        assert found.schedule is not None and isinstance(found.schedule.shape[0], torch.SymInt)
        return jitmx.moe(x, found, W13, W2)

    traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(inputs()["x"], logits(3))
    node = next(node for node in traced.graph.nodes if str(node.target) == "jitmx.moe.default")
    assert isinstance(node.meta["val"].shape[0], torch.SymInt) and node.meta["val"].shape[1] == HIDDEN


@pytest.mark.parametrize("name", ["x", "weights", "router logits", "b13", "b2"])
@pytest.mark.usefixtures("fake")
def test_a_gradient_is_refused_with_the_remedy(name: str) -> None:
    asked = inputs()
    if name == "router logits":
        asked |= {"routing": logits(3).requires_grad_(), "top": TOP}
    elif name == "weights":
        asked["routing"][1].requires_grad_()
    else:
        asked[name].requires_grad_()
    with pytest.raises(InputError, match=rf"{name} requires a gradient, .* call under torch\.no_grad\(\)"):
        jitmx.moe(**asked)
    with torch.no_grad():
        assert jitmx.moe(**asked).shape == (3, HIDDEN)


@pytest.mark.usefixtures("fake")
def test_a_gradient_through_routing_is_refused_with_the_remedy() -> None:
    x, weight = torch.zeros(3, 64, dtype=BF16, requires_grad=True), torch.zeros(8, 64, dtype=BF16)
    for call in (lambda: jitmx.route(x, weight, k=2), lambda: jitmx.route(x, weight, k=2, tile=8)):
        with pytest.raises(InputError, match="x requires a gradient"):
            call()
    with pytest.raises(InputError, match="logits requires a gradient"):
        jitmx.route(x, k=2)


UNFIT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(3, 64, dtype=BF16)}, InputError, "last dimension is hidden=96"),
    ({"x": torch.zeros(3, 96)}, InputError, "moe takes bfloat16"),
    ({"routing": logits(3)}, InputError, "top=None of router logits is not 1 to 6; say how many experts a row takes"),
    ({"routing": logits(3), "top": 7}, InputError, "top=7 of router logits is not 1 to 6"),
    ({"routing": logits(4), "top": 2}, InputError, r"router logits is bfloat16 \[4, 6\].*bfloat16 or float16 or "),
    ({"routing": torch.zeros(3, 5), "top": 2}, InputError, r"router logits is float32 \[3, 5\].*\[3, 6\]"),
    ({"routing": logits(3), "top": 2, "scoring": "sigmoid"}, KnobError, "scoring='sigmoid' is not one of softmax_topk"),
    ({"routing": torch.zeros(3, 2, dtype=torch.int32)}, InputError, "are no logits; of ids and weights pass both"),
    ({"routing": [1]}, InputError, r"routing is a list; pass router logits, \(ids, weights\), or what jitmx\.route"),
    ({"top": 3}, InputError, "top=3 is for router logits"),
    ({"routing": (torch.zeros(3, 2), torch.zeros(3, 2))}, InputError, "ids is float32"),
    ({"b2": None}, InputError, "one of b13 and b2 is missing"),
    ({"b13": torch.zeros(EXPERTS, INNER, dtype=BF16)}, InputError, r"b13 is bfloat16 \[6, 64\]"),
    ({"w2": W13}, InputError, "do not fit"),
    ({"w2": torch.zeros(3)}, InputError, r"w2 is a Tensor; pack it once with jitmx\.pack_experts"),
    ({"activation": "gelu"}, KnobError, "activation='gelu' is not one of swiglu_oai, silu"),
    ({"count": torch.zeros(2, dtype=torch.int32)}, InputError, r"count is int32 \[2\]"),
    ({"expert_map": torch.zeros(4)}, InputError, "expert_map is float32"),
    ({"out": torch.zeros(3, 95, dtype=BF16)}, InputError, r"out is bfloat16 \[3, 95\]"),
]


@pytest.mark.parametrize(("change", "error", "said"), UNFIT, ids=[said[:30] for _, _, said in UNFIT])
def test_tensors_that_do_not_fit_are_refused_with_data_and_without(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=said):
        jitmx.moe(**inputs(**change) | {"x": change.get("x", torch.zeros(3, HIDDEN, dtype=BF16))})
    if "out" not in change:  # looked at once x is known to lie on a GPU
        with pytest.raises(error, match=said):
            jitmx.moe(**inputs(**change))


@pytest.mark.usefixtures("fake")
def test_what_only_eager_code_takes_is_refused_where_it_is_traced() -> None:
    with pytest.raises(InputError, match="knobs cannot be traced through"):
        jitmx.route(torch.zeros(3, 8), k=2, knobs={"warps": 1})
    with pytest.raises(InputError, match="expert_map is for the lists, and tile is None"):
        jitmx.route(torch.zeros(3, 8), k=2, expert_map=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(InputError, match="bias is for hidden states"):
        jitmx.route(torch.zeros(3, 8), k=2, bias=torch.zeros(8))


def test_operators_find_experts_again_by_where_they_lie() -> None:
    layout = expert_operand.layout(W13)
    found = expert_operand.find(W13.words, W13.scales, 2 * INNER, HIDDEN, layout)
    assert found.shape == W13.shape and found.addresses == W13.addresses
    assert (found.encoding, found.scale_range) == (W13.encoding, W13.scale_range)
    assert expert_operand.find(W13.words, W13.scales, 2 * INNER, HIDDEN, layout) is found
    assert expert_operand.find(W13.words.clone(), W13.scales, 2 * INNER, HIDDEN, layout) is not found
    for change, said in (
        ({"n": 64}, r"words of packed experts \[6, 64, 96\] is int32 .* on cpu; it must be int32"),
        ({"layout": "mxfp8/rotated/normal"}, "format='mxfp8' of packed experts is not mxfp4"),
        ({"layout": "mxfp4"}, "layout='mxfp4' is not format/encoding/scale range"),
    ):
        with pytest.raises(InputError, match=said):
            expert_operand.find(W13.words, W13.scales, **{"n": 2 * INNER, "k": HIDDEN, "layout": layout} | change)  # type: ignore[arg-type]


def test_what_runs_without_a_gpu_says_so() -> None:
    for change in ({}, {"routing": logits(3), "top": 2}):
        asked = inputs(**change)
        with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
            jitmx.moe(**asked)
        with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
            jitmx.moe(**asked | {"x": torch.nn.Parameter(asked["x"], requires_grad=False)})
    with pytest.raises(InputError, match="jitmx runs on CUDA tensors"):
        torch.ops.jitmx.topk(torch.zeros(3, 8), 2, "softmax_topk")
