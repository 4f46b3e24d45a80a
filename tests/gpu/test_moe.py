"""`jitmx.moe` on the card, against float64. Tests of what its target does not have are not collected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

import jitmx
from jitmx.errors import InputError
from jitmx.kernels.moe import KERNELS, MoeProblem, of_one_launch
from jitmx.kernels.moe.problem import REDUCTIONS
from jitmx.kernels.moe.stream import COLUMNS, SCALINGS
from jitmx.ops.linear import compose
from jitmx.ops.moe import plan as moe_plan
from jitmx.registry.spec import Variant
from jitmx.runtime import card

CARD = card.arch(0)
FEW_ROWS = of_one_launch(CARD)
GATE = 0.006
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# experts, top, hidden, intermediate
SHAPES = {
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "many small": (256, 8, 2048, 512),
    "sixty": (60, 4, 2048, 1408),
    "half tiles": (5, 2, 96, 160),
}

Evidence = Callable[[object, float | None, str], None]
Test = TypeVar("Test")


def collected_where(served: bool) -> Callable[[Test], Test | None]:
    """Leaves a test out where the card's target lacks what it is about."""
    return lambda test: test if served else None


class Layer:
    """Random experts, packed, with the layer in float64."""

    def __init__(self, experts: int, hidden: int, intermediate: int, bias: bool = True, full: bool = False) -> None:
        self.hidden, self.experts = hidden, experts
        self.weights = [self._weight(n, k, full) for n, k in ((2 * intermediate, hidden), (hidden, intermediate))]
        self.packed = [jitmx.pack_experts(weight) for weight in self.weights]
        self.biases = [
            torch.randn(experts, n, device="cuda").bfloat16() if bias else None for n in (2 * intermediate, hidden)
        ]

    def _weight(self, n: int, k: int, full: bool) -> jitmx.MXTensor:
        codes = torch.randint(0, 256, (self.experts, n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 122, (self.experts, n, k // 32), device="cuda").to(torch.uint8)
        if full:
            scales[:, 0, 0] = 0
        return jitmx.MXTensor(codes, scales)

    def __call__(self, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], **more: object) -> torch.Tensor:
        return jitmx.moe(x, routing, *self.packed, *self.biases, **more)  # type: ignore[arg-type]

    def wanted(
        self, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], activation: str = "swiglu_oai"
    ) -> torch.Tensor:
        ids, weights = routing
        y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for e in range(self.experts):
            rows, slots = (ids == e).nonzero(as_tuple=True)
            if not len(rows):
                continue
            a = x[rows].double() @ self._values(0, e).T
            a = a if self.biases[0] is None else a + self.biases[0][e].double()
            gate, up = a[:, 0::2], a[:, 1::2]
            if activation == "swiglu_oai":
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                h = up * torch.nn.functional.silu(gate)
            out = h @ self._values(1, e).T
            out = out if self.biases[1] is None else out + self.biases[1][e].double()
            y.index_add_(0, rows, out * weights[rows, slots].double()[:, None])
        return y

    def _values(self, which: int, expert: int) -> torch.Tensor:
        table = torch.tensor(E2M1, dtype=torch.float64, device="cuda")
        codes, scales = self.weights[which].codes[expert], self.weights[which].scales[expert]
        values = table[torch.stack([codes & 15, codes >> 4], -1).long()].view(*scales.shape, 32)
        return (values * torch.exp2(scales.double() - 127)[..., None]).flatten(1)


def routed(m: int, top: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(m, experts, device="cuda") * 1.5 + torch.randn(experts, device="cuda")
    chosen, ids = logits.topk(top, -1)
    return ids.int().contiguous(), chosen.softmax(-1).contiguous()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = wanted.norm()
    return float((found.double() - wanted).norm() / (scale if scale > 0 else 1))  # where all experts are elsewhere


def launched(*shape: int, **fields: str) -> tuple[Variant, ...]:
    """The variants that a layer of so many rows runs, in order; its lists aside."""
    return moe_plan.launches(MoeProblem(*shape, **fields), 0).variants


def eager_and_replayed(layer: Layer, m: int, top: int) -> float:
    """The larger of the errors of a call and of its replay with other rows to other experts."""
    x, routing = torch.randn(m, layer.hidden, device="cuda").bfloat16(), routed(m, top, layer.experts)
    y = torch.full((m, layer.hidden), torch.nan, device="cuda").bfloat16()
    eager = error(layer(x, routing, out=y), layer.wanted(x, routing))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, routing, out=y)
    x.copy_(torch.randn(m, layer.hidden, device="cuda"))
    for old, new in zip(routing, routed(m, top, layer.experts), strict=True):
        old.copy_(new)
    y.fill_(torch.nan)
    graph.replay()
    return max(eager, error(y, layer.wanted(x, routing)))


Ask = Callable[..., None]


@pytest.fixture
def ask(environment: Callable[..., None]) -> Ask:
    """Asks for a kernel by name and knobs."""

    def use(kernel: str, **knobs: Any) -> None:
        environment(JITMX_MOE_KNOBS=",".join(f"{name}={value}" for name, value in {"kernel": kernel, **knobs}.items()))

    return use


@pytest.fixture(scope="module")
def small() -> Layer:
    return Layer(8, 256, 192)


@pytest.fixture(scope="module")
def large() -> Layer:
    """A layer of gpt-oss-20b."""
    return Layer(32, 2880, 2880)


@pytest.fixture(scope="module")
def ragged() -> Layer:
    """Half tiles in both products, and fewer rows of tiles than a card has multiprocessors."""
    return Layer(5, 96, 160)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_within_the_gate_eagerly_and_replayed_from_a_graph(shape: str, evidence: Evidence) -> None:
    experts, top, hidden, intermediate = SHAPES[shape]
    layer = Layer(experts, hidden, intermediate)
    for m in (1, 2, 5, 8, 16, 64, 65, 300):
        found = eager_and_replayed(layer, m, top)
        assert found <= GATE, m
        for variant in launched(m, experts, top, hidden, intermediate, encoding=layer.packed[0].encoding):
            evidence(variant, found, f"{shape} m={m}, eager and graph replay")


FEW = (1, 3, 8, 17, 64)


def hold(layer: Layer, top: int, kernel: str, intermediate: int, evidence: Evidence, note: str) -> Variant:
    """Few rows to some experts, by a kernel that makes the layer in one launch; the variant that did."""
    for m in FEW:
        found = eager_and_replayed(layer, m, top)
        assert found <= GATE, m
        problem = (m, layer.experts, top, layer.hidden, intermediate)
        (variant,) = launched(*problem, encoding=layer.packed[0].encoding)
        assert variant.spec.name == kernel
        evidence(variant, found, f"{note} m={m}, eager and graph replay")
    return variant


@collected_where("stream" in FEW_ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_stream_is_within_the_gate_by_every_scaling_and_number_of_columns(
    columns: int, scaling: str, large: Layer, ragged: Layer, ask: Ask, evidence: Evidence
) -> None:
    ask("stream", columns=columns, scaling=scaling, warps=8, chunk=5, stages=2, unroll=3)
    for variant in (
        hold(large, 4, "stream", 2880, evidence, "gpt-oss-20b"),
        hold(ragged, 2, "stream", 160, evidence, "half tiles"),
    ):
        assert (variant.knobs.columns, variant.knobs.scaling) == (columns, scaling)


@collected_where("stream" in FEW_ROWS)
@pytest.mark.parametrize(
    ("warps", "chunk", "stages", "unroll"),
    [(4, 1, 3, 1), (4, 45, 1, 9), (8, 15, 2, 3), (10, 9, 2, 5), (12, 9, 2, 1), (12, 9, 2, 5), (12, 3, 4, 3),
     (14, 9, 2, 3), (16, 5, 3, 3), (16, 9, 2, 7)],
    ids=str,
)  # fmt: skip
def test_stream_is_within_the_gate_whatever_its_rings(
    warps: int, chunk: int, stages: int, unroll: int, large: Layer, ragged: Layer, ask: Ask, evidence: Evidence
) -> None:
    ask("stream", columns=2, warps=warps, chunk=chunk, stages=stages, unroll=unroll)
    hold(large, 4, "stream", 2880, evidence, "gpt-oss-20b")
    hold(ragged, 2, "stream", 160, evidence, "half tiles")


@collected_where("stream" in FEW_ROWS)
@pytest.mark.parametrize("scaling", ["bare", "post"])
@pytest.mark.parametrize("columns", [1, 8])
def test_stream_takes_scales_of_every_kind(scaling: str, columns: int, ask: Ask) -> None:
    ask("stream", columns=columns, scaling=scaling, warps=8, chunk=5)
    layer = Layer(4, 160, 96, bias=False, full=True)
    x, routing = torch.randn(11, 160, device="cuda").bfloat16(), routed(11, 3, 4)
    assert error(layer(x, routing, activation="silu"), layer.wanted(x, routing, "silu")) <= GATE


def test_decode_is_within_the_gate_where_it_is_asked_for(
    large: Layer, ragged: Layer, ask: Ask, evidence: Evidence
) -> None:
    ask("decode")
    hold(large, 4, "decode", 2880, evidence, "gpt-oss-20b")
    hold(ragged, 2, "decode", 160, evidence, "half tiles")


@pytest.mark.parametrize(
    ("kernel", "m"),
    [(kernel, m) for kernel in FEW_ROWS for m in (1, 9, 64, 128) if m <= {"token": 1, "stream": 128}.get(kernel, 64)],
)
def test_layers_in_one_launch_take_any_routing(kernel: str, m: int, small: Layer, ask: Ask) -> None:
    """All experts in use, one for all rows, holes; and in between, on the same memory, rows without any."""
    ask(kernel)
    x, (ids, weights) = torch.randn(m, 256, device="cuda").bfloat16(), routed(m, 4, 8)
    holes = torch.where(torch.rand(ids.shape, device="cuda") < 0.5, -1, ids).int()
    holes[:, 0] = ids[:, 0]
    nobody, nothing = torch.full_like(ids, -1), torch.zeros(1, dtype=torch.int32, device="cuda")
    for chosen in (ids, torch.full_like(ids, 7), holes, ids):
        assert error(small(x, (chosen, weights)), small.wanted(x, (chosen, weights))) <= GATE
        assert not small(x, (nobody, weights)).any()
        assert not small(x, (chosen, weights), count=nothing).any()


@collected_where("stream" in FEW_ROWS)
def test_kernels_that_make_a_layer_in_one_launch_take_turns(small: Layer, ask: Ask) -> None:
    """What one leaves in memory that both use is no other's trouble."""
    x, routing = torch.randn(16, 256, device="cuda").bfloat16(), routed(16, 2, 8)
    wanted = small.wanted(x, routing)
    first: dict[str, torch.Tensor] = {}
    for _ in range(5):
        for kernel in ("stream", "decode"):
            ask(kernel)
            y = small(x, routing)
            assert error(y, wanted) <= GATE
            assert torch.equal(first.setdefault(kernel, y), y)


# Rows an expert by which moe.wgmma has one tile, several, and tiles of all widths; half steps of h and of x.
MANY = {
    "gpt-oss-20b": (2048, 32, 4, 2880, 2880),
    "one expert": (500, 1, 1, 256, 192),
    "half steps": (1500, 5, 2, 96, 160),
    "many small": (3000, 60, 8, 512, 96),
}


@pytest.mark.parametrize("shape", MANY)
def test_many_rows_an_expert_are_within_the_gate_whatever_the_routing(shape: str, evidence: Evidence) -> None:
    m, experts, top, hidden, intermediate = MANY[shape]
    layer = Layer(experts, hidden, intermediate)
    x = torch.randn(m, hidden, device="cuda").bfloat16()
    ids, weights = routed(m, top, experts)
    holes = torch.where(torch.rand(ids.shape, device="cuda") < 0.3, -1, ids).int()
    lopsided = torch.where(torch.rand(ids.shape, device="cuda") < 0.8, experts - 1, ids).int()
    worst = 0.0
    for chosen in (ids, holes, lopsided):
        y = layer(x, (chosen, weights))
        worst = max(worst, error(y, layer.wanted(x, (chosen, weights))))
        for _ in range(10):
            assert torch.equal(layer(x, (chosen, weights)), y)
    assert worst <= GATE
    for variant in launched(m, experts, top, hidden, intermediate, encoding=layer.packed[0].encoding):
        evidence(variant, worst, f"{shape} m={m}, even, with holes, lopsided")


@collected_where(KERNELS["wgmma"].runs_on(CARD))
@pytest.mark.parametrize("tile", [(32, 320), (48, 320), (64, 256), (128, 192), (192, 192), (320, 128)])
@pytest.mark.parametrize("grain", [16, 64])
def test_tiles_of_every_size_are_within_the_gate(
    tile: tuple[int, int], grain: int, environment: Callable[..., None], evidence: Evidence
) -> None:
    tile_m, tile_n = tile
    knobs = {
        "kernel": "wgmma", "tile_m": tile_m, "tile_n": tile_n, "grain": math.gcd(tile_m, grain),
        "stages": {32: 8, 48: 8, 64: 8, 128: 6, 192: 5, 320: 4}[tile_m], "depth": 1,
    }  # fmt: skip
    environment(JITMX_MOE_KNOBS=",".join(f"{name}={value}" for name, value in knobs.items()))
    layer = Layer(6, 320, 352)
    x, routing = torch.randn(1100, 320, device="cuda").bfloat16(), routed(1100, 3, 6)
    found = error(layer(x, routing), layer.wanted(x, routing))
    assert found <= GATE
    used = launched(1100, 6, 3, 320, 352, encoding=layer.packed[0].encoding)
    assert used[0].knobs.tile_m == tile_m and {variant.spec.name for variant in used[1:3]} == {"wgmma"}
    for variant in used:
        evidence(variant, found, "1100 rows to 3 of 6 experts")


@collected_where(KERNELS["fused"].runs_on(CARD))
@pytest.mark.parametrize(
    "tile",
    [
        (32, 8, 320, 3, 4),
        (48, 8, 320, 3, 4),
        (64, 8, 192, 3, 4),
        (64, 16, 256, 2, 4),
        (128, 16, 192, 3, 3),
        (192, 16, 192, 3, 2),
        (320, 32, 128, 4, 1),
    ],
)
@pytest.mark.parametrize("shape", [(64, 32, 4, 2880, 2880), (1100, 6, 3, 320, 352), (500, 1, 1, 256, 192)], ids=str)
def test_both_products_in_one_launch_are_within_the_gate_and_have_the_bits_of_two(
    tile: tuple[int, ...], shape: tuple[int, ...], environment: Callable[..., None], evidence: Evidence
) -> None:
    m, experts, top, hidden, intermediate = shape
    names = ("tile_m", "grain", "tile_n", "stages", "depth")
    knobs = ",".join(f"{name}={value}" for name, value in zip(names, tile, strict=True))
    layer = Layer(experts, hidden, intermediate)
    x, (ids, weights) = torch.randn(m, hidden, device="cuda").bfloat16(), routed(m, top, experts)
    holes = torch.where(torch.rand(ids.shape, device="cuda") < 0.3, -1, ids).int()
    for routing in ((ids, weights), (holes, weights)):
        environment(JITMX_MOE_KNOBS=f"kernel=wgmma,{knobs}")
        two = layer(x, routing)
        environment(JITMX_MOE_KNOBS=f"kernel=fused,{knobs}")
        found = error(layer(x, routing), layer.wanted(x, routing))
        assert found <= GATE
        for _ in range(100):
            assert torch.equal(layer(x, routing), two)
    for variant in launched(m, experts, top, hidden, intermediate, encoding=layer.packed[0].encoding):
        evidence(variant, found, f"{shape} with holes")


@pytest.mark.parametrize("m", [1, 7, 64, 200])
def test_every_row_may_go_to_one_expert(small: Layer, m: int) -> None:
    x = torch.randn(m, 256, device="cuda").bfloat16()
    ids = torch.full((m, 2), 3, dtype=torch.int32, device="cuda")
    ids[:, 1] = -1
    routing = ids, torch.rand(m, 2, device="cuda")
    assert error(small(x, routing), small.wanted(x, routing)) <= GATE


def test_a_row_may_name_an_expert_twice(small: Layer) -> None:
    x = torch.randn(9, 256, device="cuda").bfloat16()
    routing = torch.full((9, 4), 5, dtype=torch.int32, device="cuda"), torch.rand(9, 4, device="cuda")
    assert error(small(x, routing), small.wanted(x, routing)) <= GATE


@pytest.mark.parametrize("times", [1, 20])
def test_rows_without_an_expert_are_zero(small: Layer, times: int) -> None:
    x = torch.randn(6 * times, 256, device="cuda").bfloat16()
    ids = torch.tensor([-1, 8, 1 << 30, -(1 << 31), 99, -2], dtype=torch.int32, device="cuda").repeat(times).view(-1, 1)
    out = torch.full_like(x, torch.nan)
    assert not small(x, (ids, torch.ones(6 * times, 1, device="cuda")), out=out).any()


@pytest.mark.parametrize("m", [1, 5, 64, 200])
@pytest.mark.parametrize("reduction", [one for one in REDUCTIONS if one == "ordered" or CARD.major >= 9])
def test_a_residual_is_added_eagerly_and_replayed_from_a_graph(large: Layer, m: int, reduction: str) -> None:
    x, routing = torch.randn(m, 2880, device="cuda").bfloat16(), routed(m, 4, 32)
    residual = torch.randn(m, 2880, device="cuda").mul(20).bfloat16()
    y = torch.full_like(x, torch.nan)
    gate = GATE if reduction == "ordered" else 2 * GATE
    wanted = large.wanted(x, routing) + residual.double()
    assert error(large(x, routing, residual=residual, reduction=reduction, out=y), wanted) <= gate
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        large(x, routing, residual=residual, reduction=reduction, out=y)
    residual.neg_()
    graph.replay()
    assert error(y, wanted + 2 * residual.double()) <= gate


@pytest.mark.parametrize("m", [1, 5, 64, 200])
def test_a_residual_that_is_a_pair_is_added_whole_and_left_as_one(large: Layer, m: int) -> None:
    x, routing = torch.randn(m, 2880, device="cuda").bfloat16(), routed(m, 4, 32)
    residual = compose.pair(torch.randn(m, 2880, device="cuda") * 200, torch.bfloat16)
    wanted = large.wanted(x, routing) + residual.double().sum(0)
    y = large(x, routing, residual=residual)
    assert bool((y[1].abs() <= y[0].abs() * 2.0**-8).all()) and error(y.double().sum(0), wanted) <= GATE / 10


def test_no_rows_are_no_launch(small: Layer) -> None:
    x = torch.empty(0, 256, device="cuda").bfloat16()
    empty = torch.empty(0, 2, dtype=torch.int32, device="cuda"), torch.empty(0, 2, device="cuda")
    assert small(x, empty).shape == (0, 256)


@pytest.mark.parametrize("m", [16, 130])
def test_a_map_takes_ids_of_all_experts_to_those_at_hand(small: Layer, m: int) -> None:
    x = torch.randn(m, 256, device="cuda").bfloat16()
    ids, weights = routed(m, 4, 32)
    to = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    to[::4] = torch.randperm(8, device="cuda").int()
    local = to[ids.long()].contiguous()
    y = small(x, (ids, weights), expert_map=to)
    assert error(y, small.wanted(x, (local, weights))) <= GATE


@pytest.mark.parametrize("m", [8, 100])
def test_padding_past_the_count_costs_no_expert_and_is_zero(small: Layer, m: int) -> None:
    x, routing = torch.randn(m, 256, device="cuda").bfloat16(), routed(m, 2, 8)
    whole = small(x, routing)
    for rows in (0, 3, m):
        part = small(x, routing, count=torch.tensor([rows], dtype=torch.int32, device="cuda"))
        assert not part[rows:].any()
        assert error(part[:rows], small.wanted(x, routing)[:rows]) <= GATE if rows else True
    assert torch.equal(part, whole)


@pytest.mark.parametrize("activation", ["swiglu_oai", "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("m", [11, 150])
def test_activations_biases_and_scales_of_every_kind(activation: str, bias: bool, full: bool, m: int) -> None:
    layer = Layer(4, 160, 96, bias, full)
    x, routing = torch.randn(m, 160, device="cuda").bfloat16(), routed(m, 3, 4)
    assert error(layer(x, routing, activation=activation), layer.wanted(x, routing, activation)) <= GATE


# Rows and, where it is not to be the usual kernel, which one with what knobs.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"kernel": "stream", "columns": 1}),
    (5, {"kernel": "stream", "columns": 2}),
    (16, {}),
    (16, {"kernel": "stream", "columns": 4}),
    (64, {"kernel": "stream", "columns": 8, "warps": 8, "chunk": 5}),
    (16, {"kernel": "decode"}),
    (512, {}),
]
ASKED = [(m, asked) for m, asked in ASKED if not asked or asked["kernel"] in FEW_ROWS]


@pytest.mark.parametrize(("m", "asked"), ASKED, ids=str)
def test_a_hundred_runs_and_replays_give_the_same_bits(m: int, asked: dict[str, Any], large: Layer, ask: Ask) -> None:
    if asked:
        ask(**asked)
    layer = large
    x, routing = torch.randn(m, 2880, device="cuda").bfloat16(), routed(m, 4, 32)
    first = layer(x, routing)
    out = torch.empty_like(first)
    for _ in range(100):
        assert torch.equal(layer(x, routing), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, routing, out=out)
    for _ in range(100):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize(("m", "asked"), [*ASKED, (96, {})], ids=str)
def test_calls_that_feed_one_another_wait_for_one_another(
    small: Layer, m: int, asked: dict[str, Any], ask: Ask
) -> None:
    if asked:
        ask(**asked)
    x, routing = torch.randn(m, 256, device="cuda").bfloat16(), routed(m, 2, 8)
    serial = chained = x
    for _ in range(30):
        serial = small(serial, routing)
        torch.cuda.synchronize()
    for _ in range(30):
        chained = small(chained, routing)
    assert torch.equal(serial, chained)


def test_inputs_that_do_not_fit_are_refused_with_the_reason(small: Layer) -> None:
    x, (ids, weights) = torch.randn(2, 256, device="cuda").bfloat16(), routed(2, 2, 8)
    w13, w2 = small.packed
    b13, b2 = small.biases
    many = torch.zeros(65, 256, device="cuda").bfloat16()
    cases: list[tuple[dict[str, object], str]] = [
        ({"x": x.half()}, "moe takes bfloat16"),
        ({"x": x[:, :128].contiguous()}, "hidden=256"),
        (
            {"x": many, "routing": routed(65, 2, 8), "expert_map": torch.zeros(4, dtype=torch.int32, device="cuda")},
            "expert_map has 4 ids for 8 local experts",
        ),
        (
            {"x": many, "routing": routed(65, 2, 8), "expert_map": torch.zeros(513, dtype=torch.int32, device="cuda")},
            "at most 512",
        ),
        ({"routing": (ids.long(), weights)}, "ids is int64"),
        ({"routing": (ids, weights.half())}, "weights is float16"),
        ({"routing": (ids[:1], weights)}, "ids is int32"),
        ({"routing": ids}, "are no logits"),
        ({"w2": w13}, "do not fit"),
        ({"b2": None}, "pass both or neither"),
        ({"b13": b13[:, :-1]}, "b13 is bfloat16"),  # type: ignore[index]
        ({"expert_map": torch.zeros(4, device="cuda")}, "expert_map is float32"),
        ({"count": torch.zeros(2, dtype=torch.int32, device="cuda")}, "count is int32"),
        ({"out": x}, "out overlaps x"),
        ({"out": torch.empty(2, 255, device="cuda").bfloat16()}, "out is bfloat16"),
        ({"out": many.view(-1)[1:513].view(2, 256)}, "out starts at an address that is no multiple of 16 bytes"),
    ]
    usual = {"x": x, "routing": (ids, weights), "w13": w13, "w2": w2, "b13": b13, "b2": b2}
    for change, message in cases:
        with pytest.raises(InputError, match=message):
            jitmx.moe(**{**usual, **change})  # type: ignore[arg-type]
