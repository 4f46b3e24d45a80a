"""`jitmx.route` and `jitmx.group_by_expert` on the card: ids and lists exact, weights against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jitmx.bench import routing as benchmarks_routing
from jitmx.bench.benchmark import Ceilings
from jitmx.dispatch.choose import choose
from jitmx.errors import CaptureError, InputError
from jitmx.kernels.routing import cases as routing_cases
from jitmx.kernels.routing.problem import FEW_TOKENS, RoutingProblem
from jitmx.ops.routing import Routing, group_by_expert, route
from jitmx.runtime import card

Evidence = Callable[[object, float | None, str], None]

GATE = 1e-4  # relative L2 of the weights against float64
SHAPES = {
    "gpt-oss-120b": (128, 4, 2880),
    "gpt-oss-20b": (32, 4, 2880),
    "256 experts": (256, 8, 2048),
    "60 experts": (60, 4, 2048),
    "512 experts": (512, 8, 2048),
}


def wide(tensor: torch.Tensor) -> np.ndarray:
    stored = routing_cases.STORED[{torch.bfloat16: "bf16", torch.float16: "fp16"}.get(tensor.dtype, "fp32")]
    return tensor.float().cpu().numpy().astype(stored)


def router(experts: int, h: int, m: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(experts, h, device="cuda") * 2 / h**0.5
    return torch.randn(m, h, device="cuda").to(dtype), weight.bfloat16(), torch.randn(experts, device="cuda").bfloat16()


def lists_of(found: Routing) -> list[np.ndarray]:
    tensors = (found.pairs, found.offsets, found.schedule, found.tiles)
    return [tensor.cpu().numpy() for tensor in tensors if tensor is not None]


def check_lists(found: Routing, local: int, tile: int, expert_map: torch.Tensor | None = None) -> None:
    ids = found.ids.cpu().numpy()
    wanted = routing_cases.lists(ids, local, tile, None if expert_map is None else expert_map.cpu().numpy())
    for a, b in zip(lists_of(found), (wanted.pairs, wanted.offsets, wanted.schedule, wanted.tiles), strict=True):
        np.testing.assert_array_equal(a, b)


def check_choice(found: Routing, logits: np.ndarray, k: int, scoring: str = "softmax_topk") -> float:
    """Ids agree but where two float64 logits are nearer than fp32 sums can tell apart; the error of the weights."""
    ids, weights = routing_cases.choose(logits, k, scoring)
    mine = found.ids.cpu().numpy()
    gap = np.abs(np.take_along_axis(logits, mine, 1) - np.take_along_axis(logits, ids, 1))
    assert gap.max() <= 1e-5
    assert (mine == ids).mean() >= 0.999
    assert found.weights is not None
    same = (mine == ids).all(1)
    difference = found.weights.cpu().numpy()[same] - weights[same]
    error = float(np.linalg.norm(difference) / np.linalg.norm(weights[same]))
    assert error <= GATE
    return error


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 64, 65, 97, 200, 300, 2049])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_choice_and_the_lists_are_right_at_every_number_of_tokens(shape: str, m: int, evidence: Evidence) -> None:
    experts, k, h = SHAPES[shape]
    x, weight, bias = router(experts, h, m)
    found = route(x, weight, bias, k=k, tile=64)
    error = check_choice(found, routing_cases.router(wide(x), wide(weight), wide(bias), None), k)
    check_lists(found, experts, 64)
    problem = RoutingProblem(m, experts, k, h, bias="bias_bf16", tile=64 if m <= FEW_TOKENS else 0)
    chosen = choose("routing", problem, card.arch(0), multiprocessors=card.multiprocessors(0))
    evidence(chosen.variant, error, f"m={m} h={h}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", ["softmax_topk", "softmax_all", "softmax_all_renorm"])
@pytest.mark.parametrize("m", [3, 40, 500])
def test_the_norm_the_scoring_and_the_map_are_right(dtype: torch.dtype, scoring: str, m: int) -> None:
    experts, k, h, tile = 128, 4, 2880, 16
    x, weight, _ = router(experts, h, m, dtype)
    norm = (torch.rand(h, device="cuda") + 0.5).to(dtype)
    bias = torch.randn(experts, device="cuda")
    expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
    expert_map[torch.randperm(experts)[:50]] = torch.arange(50, dtype=torch.int32, device="cuda")
    found = route(
        x * 3, weight, bias, k=k, norm=norm, scoring=scoring, tile=tile, expert_map=expert_map, local_experts=50
    )
    logits = routing_cases.router(wide(x * 3), wide(weight), wide(bias), wide(norm))
    check_choice(found, logits, k, "softmax_all" if scoring == "softmax_all" else "softmax_topk")
    check_lists(found, 50, tile, expert_map)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [128, 32])
@pytest.mark.parametrize("m", [1, 2, 7, 64, 300])
def test_what_the_norm_makes_is_written_with_one_rounding(dtype: torch.dtype, experts: int, m: int) -> None:
    x, weight, bias = router(experts, 2880, m, dtype)
    norm = (torch.rand(2880, device="cuda") + 0.5).to(dtype)
    found = route(x * 3, weight, bias, k=4, norm=norm, normalized=True)
    check_choice(found, routing_cases.router(wide(x * 3), wide(weight), wide(bias), wide(norm)), 4)
    assert found.normalized is not None
    wanted = torch.from_numpy(routing_cases.normalized(wide(x * 3), wide(norm))).cuda()
    torch.testing.assert_close(found.normalized.double(), wanted, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m", [1, 64, 1000])
def test_given_logits_agree_with_torch_topk_where_none_are_equal(dtype: torch.dtype, m: int) -> None:
    # 97 distinct values that every type holds.
    logits = torch.stack([torch.randperm(97) - 48 for _ in range(m)]).to(dtype).cuda() / 16
    found = route(logits, k=8, tile=8)
    values, ids = logits.float().topk(8)
    assert torch.equal(found.ids.long(), ids)
    torch.testing.assert_close(found.weights, values.softmax(-1), rtol=1e-5, atol=1e-7)
    check_lists(found, 97, 8)


def test_equal_logits_go_by_ids_and_nan_is_taken_last() -> None:
    logits = torch.tensor([[1.0, torch.nan, 1.0, -torch.inf, -0.0, 0.0], [torch.nan] * 6], device="cuda")
    found = route(logits, k=6)
    assert found.ids.tolist() == [[0, 2, 4, 5, 3, 1], [0, 1, 2, 3, 4, 5]]
    assert found.weights is not None and found.weights[0, 4:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("m", [1, 64, 5000])
def test_one_expert_that_takes_all_and_ids_that_are_none_make_right_lists(m: int) -> None:
    ids = torch.stack([torch.randperm(128)[:4] for _ in range(m)]).int().cuda()
    ids[:, 1] = 77
    ids[::3, 2], ids[::5, 3] = -1, 128
    found = group_by_expert(ids, 128, tile=32)
    check_lists(found, 128, 32)
    assert found.ids is ids and found.weights is None


def test_no_tokens_make_empty_lists() -> None:
    found = route(torch.empty(0, 2880, dtype=torch.bfloat16, device="cuda"), router(128, 2880, 1)[1], k=4, tile=64)
    assert found.ids.shape == (0, 4)
    assert found.offsets is not None and found.offsets.tolist() == [0] * 129
    assert found.tiles is not None and found.tiles.tolist() == [0]
    assert group_by_expert(torch.empty(0, 4, dtype=torch.int32, device="cuda"), 8, tile=8).offsets is not None


@pytest.mark.parametrize("m", [1, 8, 33, 200])
def test_a_hundred_runs_and_replays_write_the_same_bits(m: int) -> None:
    x, weight, bias = router(128, 2880, m)
    call: dict[str, Any] = {"k": 4, "tile": 64}
    first = route(x, weight, bias, **call)
    wanted = [tensor.clone() for tensor in first if tensor is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = route(x, weight, bias, **call)
    for run in range(100):
        if run % 2:
            graph.replay()
            found = again
        else:
            found = route(x, weight, bias, out=first, **call)
        for a, b in zip((tensor for tensor in found if tensor is not None), wanted, strict=True):
            assert torch.equal(a, b)


def test_a_graph_routes_what_lies_in_its_inputs_when_it_is_replayed() -> None:
    x, weight, bias = router(32, 2880, 40)
    route(x, weight, bias, k=4, tile=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = route(x, weight, bias, k=4, tile=64)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        check_choice(found, routing_cases.router(wide(x), wide(weight), wide(bias), None), 4)
        check_lists(found, 32, 64)


def test_a_first_call_within_a_capture_is_refused_with_the_remedy() -> None:
    x, weight, _ = router(19, 296, 1)
    with pytest.raises(CaptureError, match="before capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        route(x, weight, k=3)


def test_inputs_that_do_not_fit_are_refused_with_the_reason() -> None:
    x, weight, bias = router(128, 2880, 2)
    expert_map = torch.zeros(128, dtype=torch.int32, device="cuda")
    for call, message in (
        (lambda: route(x[0], weight, k=4), "must have two dimensions"),
        (lambda: route(x.float(), weight, k=4), "bfloat16 or float16"),
        (lambda: route(x[:, :64].contiguous(), weight, k=4), "both need h values a row"),
        (lambda: route(x, weight.half(), k=4), r"weight is float16 \[128, 2880\] .* be bfloat16"),
        (lambda: route(x, weight, bias[:3], k=4), r"bias is bfloat16 \[3\] .* \[128\] on cuda:0"),
        (lambda: route(x, weight, norm=bias, k=4), r"norm is .* it must be bfloat16 \[2880\]"),
        (lambda: route(x, k=4, norm=bias), "norm is for hidden states"),
        (lambda: route(x, weight, k=4, expert_map=expert_map), "give tile, or leave expert_map out"),
        (lambda: route(x, weight, k=4, tile=8, local_experts=5), "local_experts=5 of 128 needs an expert_map"),
        (lambda: route(x, weight, k=4, out=route(x, weight, k=3)), r"out.ids is int32 \[2, 3\]"),
        (lambda: group_by_expert(expert_map, 8, tile=8), "ids is int32 .* must have two dimensions"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_the_calls_that_are_timed_choose_as_torch_does_and_torch_is_timed_beside_them() -> None:
    shape, limits = benchmarks_routing.RouterShape(layers=4), Ceilings("", 1e15, 1e15, 1e18)
    rows = benchmarks_routing.bench_routing(shape, (1, 70, 600), limits)
    assert [(row["m"], row["norm"]) for row in rows] == [(m, norm) for m in (1, 70, 600) for norm in (False, True)]
    for row in rows:
        assert row["peers"]["torch"]["reason"] is None, row
        times = row["us"], row["model_us"], row["serial_us"], row["peers"]["torch"]["us"]
        assert all(row["floor_us"] < time < 1e4 for time in times), row
        assert 0 < row["error"] <= GATE
