"""Routing as it is timed: calls that depend on one another, over routers that no cache holds, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jitmx.bench import routing as benchmarks_routing
from jitmx.bench import timing
from jitmx.bench.benchmark import Ceilings
from jitmx.bench.routing import ALLOWED, PEERS_ALLOWED, Chain, Made, Router, Routers, RouterShape
from jitmx.errors import DriverError
from jitmx.kernels.routing import cases as routing_cases
from simulated_card import Card

LIMITS = Ceilings("a card", read=4e12, copy=4e12, matmul=7e14)
SMALL = RouterShape(experts=8, top=2, hidden=64, layers=3)
WAYS: dict[str, tuple[Callable[..., Any], Any]] = {
    "jitmx": (benchmarks_routing.jitmx_way, ALLOWED),
    "torch": (benchmarks_routing.torch_way, PEERS_ALLOWED),
}


@pytest.fixture(autouse=True)
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of a few calls without a graph, beside an L2 of three routers."""

    def chain(calls: list[Any], elements: int, dtype: torch.dtype, repeats: int = 21) -> float:
        buffers = [torch.randn(elements).to(dtype) for _ in range(2)]
        calls[0](*buffers)
        for i, call in enumerate(calls):
            call(buffers[i % 2], buffers[1 - i % 2])
        return 1e-6 * len(calls)

    monkeypatch.setattr(timing, "chain", chain)
    monkeypatch.setattr(timing, "l2_bytes", lambda _device=0: 3 * SMALL.router_bytes)
    monkeypatch.setattr(timing, "calls_of", lambda *_: 7)


def few(seed: int = 0) -> Routers:
    return Routers(SMALL, seed, "cpu")


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("card", ["sm_90a", "sm_121a"], indirect=True)
def test_a_chain_of_calls_routes_as_float64_does(rows: int, norm: bool, card: Card) -> None:
    routers = few()
    spent, off = Chain(routers, rows, norm).time(benchmarks_routing.jitmx_way(routers, rows, norm), ALLOWED)
    assert spent == pytest.approx(6e-6) and 0 < off <= 1e-6
    assert card.kernels == ["routing.route"] * 7
    assert {(v.knobs.norm, v.knobs.normalized, v.knobs.bias) for v in card.launched} == {(norm, norm, "bias_bf16")}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("library", WAYS)
def test_each_call_reads_what_the_last_one_wrote(library: str, norm: bool, card: Card) -> None:
    routers, (make, allowed) = few(), WAYS[library]
    inner, read = make(routers, 3, norm), []

    def way(router: Router, x: torch.Tensor, y: torch.Tensor, first: bool) -> Made:
        before = read[-1] if not first else None
        made = inner(router, x, y, first)
        if before is not None:
            assert made.x.data_ptr() == (before.ids if before.normalized is None else before.normalized).data_ptr()
            if not norm:
                head = made.x.view(-1)[: before.ids.nbytes // 2]
                assert head.isfinite().all() and head.abs().max() < 1e-30
                assert torch.equal(head.view(before.ids.dtype).view(3, 2), before.ids)
        read.append(made)
        return made

    Chain(routers, 3, norm).time(way, allowed)
    assert len(read) == 7 and all((made.normalized is not None) == norm for made in read)


def right(norm: bool) -> tuple[Router, Made]:
    """What a call should make, by the reference of the kernels."""
    router = few().router(1, norm)
    x = torch.randn(5, SMALL.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    arrays = [None if one is None else one.float().numpy().astype(routing_cases.STORED["bf16"]) for one in (x, *router)]
    ids, weights = routing_cases.choose(routing_cases.router(*arrays), SMALL.top, "softmax_topk")  # type: ignore[arg-type]
    normalized = None
    if norm:
        normalized = torch.from_numpy(routing_cases.normalized(arrays[0], arrays[3])).bfloat16()  # type: ignore[arg-type]
    return router, Made(x, torch.from_numpy(ids), torch.from_numpy(weights).float(), normalized)


@pytest.mark.parametrize("norm", [False, True])
def test_what_is_right_by_the_reference_of_the_kernels_is_right(norm: bool) -> None:
    assert benchmarks_routing.error(*right(norm), ALLOWED) <= 1e-7


def changed(tensor: torch.Tensor, row: int, value: Any) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row, 0] = value
    return tensor


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda made: {"ids": made.ids.flip(1)}, r"the logit of an id is .* from that of torch\.topk's, over 0\.0001"),
        (lambda made: {"ids": changed(made.ids, 4, (made.ids[4, 0] + 1) % 8)}, "5 rows are routed wrongly: "),
        (lambda made: {"ids": changed(made.ids, 4, made.ids[4, 1])}, "ids are not 2 different ones of 0 to 7"),
        (lambda made: {"ids": changed(made.ids, 2, -1)}, "ids are not 2 different ones of 0 to 7"),
        (lambda made: {"ids": changed(made.ids, 2, 8)}, "ids are not 2 different ones of 0 to 7"),
        (lambda made: {"weights": made.weights * 1.001}, r"weights are 0\.001 from float64, relative L2, over 0\.0001"),
        (lambda made: {"weights": changed(made.weights, 0, torch.nan)}, "weights are nan from float64"),
        (lambda made: {"normalized": made.normalized * 1.01}, "320 normalised values are off"),
        (lambda made: {"normalized": changed(made.normalized, 3, torch.nan)}, "1 of 320 normalised values are off"),
    ],
)
def test_what_is_wrong_is_an_error_and_no_time(wrong: Callable[[Made], dict[str, torch.Tensor]], said: str) -> None:
    router, made = right(norm=True)
    with pytest.raises(DriverError, match=said):
        benchmarks_routing.error(router, made._replace(**wrong(made)), ALLOWED)


@pytest.mark.parametrize("norm", [False, True])
def test_a_kernel_that_writes_nothing_is_found_out(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks_routing, "route", lambda *_, **__: None)
    routers = few()
    with pytest.raises(DriverError, match="3 rows are routed wrongly"):
        Chain(routers, 3, norm).time(benchmarks_routing.jitmx_way(routers, 3, norm), ALLOWED)


def test_weights_that_are_not_written_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, out: Any, **_: Any) -> None:
        out.ids.copy_((x.double() @ weight.double().T + bias.double()).topk(SMALL.top, -1).indices)

    monkeypatch.setattr(benchmarks_routing, "route", without)
    routers = few()
    with pytest.raises(DriverError, match="weights are nan from float64"):
        Chain(routers, 3, False).time(benchmarks_routing.jitmx_way(routers, 3, False), ALLOWED)


@pytest.mark.parametrize(("over", "seen"), [(None, 18), (3, 3)])
def test_routers_take_turns_over_all_copies_or_over_one_model_s(
    over: int | None, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "calls_of", lambda *_: 20)
    routers, places = few(), []
    assert len(routers) == 18  # three are the L2, which six times as many exceed
    inner = benchmarks_routing.torch_way(routers, 2, False)

    def way(router: Router, x: torch.Tensor, y: torch.Tensor, first: bool) -> Made:
        places.append(router.weight.data_ptr())
        return inner(router, x, y, first)

    Chain(routers, 2, False).time(way, PEERS_ALLOWED, over)
    assert len(set(places)) == seen and places[1 : 1 + seen] == list(dict.fromkeys(places))
    for copy in range(3, 18):
        mine, first = (routers.router(index, True) for index in (copy, copy % 3))
        assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))  # type: ignore[arg-type]


class Counted:
    """Routers that take no memory."""

    def __init__(self, shape: RouterShape) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return benchmarks_routing.sets(self.shape) * self.shape.layers


@pytest.mark.parametrize("name", benchmarks_routing.MODELS)
@pytest.mark.parametrize("m", [1, 4, 16, 64, 512, 8192])
def test_no_l2_holds_a_router_until_its_next_turn(name: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(timing, "l2_bytes", lambda _device=0: 50 << 20)
    shape = benchmarks_routing.MODELS[name]
    routers = Counted(shape)
    between = min(len(routers), Chain(routers, m, False)._calls)  # type: ignore[arg-type]
    assert between * shape.router_bytes + 4 * m * shape.hidden >= 2.5 * (50 << 20)
    assert between * shape.router_bytes >= 5 * (50 << 20) or m == 8192


def test_routers_of_the_120b_have_the_bytes_that_its_weights_have() -> None:
    assert 36 * benchmarks_routing.MODELS["gpt-oss-120b"].router_bytes == 26_542_080


def test_a_value_comes_out_of_all_norms_as_it_went_in() -> None:
    routers = Routers(RouterShape(8, 2, 512, layers=36), device="cpu")
    norms = np.stack([routers.router(layer, True).norm.double().numpy() for layer in range(36)])  # type: ignore[union-attr]
    passed = np.cumprod(norms, axis=0)
    assert passed.min() == 0.5 and passed.max() == 2 and (passed[-1] == 1).all()
    assert all(set(np.unique(layer)) == {0.5, 1, 2} for layer in norms)


@pytest.mark.parametrize(("most", "calls"), [(1, 3), (3, 3), (8, 6), (9, 9)])
def test_a_chain_is_of_whole_rounds_of_the_layers(most: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calls_of", lambda *_: most)
    assert Chain(few(), 2, True)._calls == calls


def test_rows_are_still_spread_after_many_rounds() -> None:
    routers, x = few(), torch.randn(4, SMALL.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = x
    for index in range(1500):
        norm = routers.router(index % 3, True).norm
        rows = torch.nn.functional.rms_norm(rows, (SMALL.hidden,), norm, benchmarks_routing.EPSILON)
    kept = torch.nn.functional.cosine_similarity(x.float(), rows.float())
    assert kept.min() > 0.95


def test_routers_are_those_of_their_seed() -> None:
    same, other = few(7).router(2, True), few(8).router(2, True)
    assert all(torch.equal(a, b) for a, b in zip(few(7).router(2, True), same, strict=True))  # type: ignore[arg-type]
    assert not any(torch.equal(a, b) for a, b in zip(other, same, strict=True))  # type: ignore[arg-type]


def test_bytes_are_those_of_the_router_and_the_rows() -> None:
    shape = benchmarks_routing.MODELS["gpt-oss-120b"]
    assert shape.bytes(1, False) == 128 * 2880 * 2 + 128 * 2 + 2880 * 2 + 4 * 8
    assert shape.bytes(3, True) - shape.bytes(3, False) == 2880 * 2 * (1 + 3)
    assert shape.flops(3) == 2 * 3 * 128 * 2880


def test_a_row_has_all_times_and_its_floor_and_the_same_of_torch(card: Card) -> None:
    taken: list[int] = []

    class Watched(Routers):
        def router(self, index: int, norm: bool) -> Router:
            taken.append(index)
            return super().router(index, norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarks_routing, "Routers", lambda shape, seed: Watched(shape, seed, "cpu"))
        found = benchmarks_routing.bench_routing(SMALL, (2,), LIMITS, seed=3)
        alone = benchmarks_routing.bench_routing(SMALL, (2,), LIMITS, wanted=())
    assert [(row["m"], row["norm"], row["kernel"]) for row in found] == [
        (2, False, "route"), (2, True, "route"),
    ]  # fmt: skip
    for row in found:
        assert row["us"] == row["model_us"] == row["serial_us"] == pytest.approx(6)
        assert row["peers"] == {"torch": {"us": pytest.approx(6), "reason": None}}
        moved, flops = SMALL.bytes(2, row["norm"]), SMALL.flops(2)
        assert (row["bytes"], row["memory_us"]) == (moved, moved / 4e6) and row["compute_us"] == flops / 7e8
        assert row["floor_us"] == row["memory_us"] and 0 < row["error"] <= 1e-6
    # A model has three routers; the first call of a chain is made once more before it.
    rotated, kept = [0, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 0, 1, 2]
    assert taken[:28] == [*rotated, *kept, *rotated, *rotated]
    assert [variant.knobs.pdl for variant in card.launched[:21]] == [True] * 14 + [False] * 7
    assert all(row["peers"] == {} for row in alone)


def test_another_library_that_fails_or_routes_elsewhere_is_a_reason() -> None:
    routers = few()

    def fails(*_: Any) -> Made:
        raise RuntimeError("no kernel image\nfor this card")

    inner = benchmarks_routing.torch_way(routers, 2, False)

    def lies(*call: Any) -> Made:
        made = inner(*call)
        return made._replace(weights=2 * made.weights)

    chain = Chain(routers, 2, False)
    assert benchmarks_routing.time_peer(chain, fails) == {"us": None, "reason": "RuntimeError: no kernel image"}
    said = benchmarks_routing.time_peer(chain, lies)
    assert said["us"] is None and said["reason"].startswith("2 rows are routed wrongly: weights are 1 from float64")
    assert benchmarks_routing.time_peer(chain, inner) == {"us": pytest.approx(6), "reason": None}
