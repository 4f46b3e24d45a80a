"""Blocks as they are timed: launched as a served model's, right beside float32, and what each launch adds to them."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import simulated_card
from jitmx.bench import block as benchmark
from jitmx.bench import timing
from jitmx.bench.benchmark import Asked, Ceilings
from jitmx.bench.block import Blocks
from jitmx.errors import DriverError
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.models import Model

LIMITS = Ceilings("a card", read=4e12, copy=4e12, matmul=7e14)
TINY = Model(
    hidden=64, intermediate=64, layers=2, experts=8, top=2, heads=8, kv_heads=1, head_dim=64, vocabulary=128, window=24,
    bias=True,
)  # fmt: skip
ONE = ["linear.stream", "attention.decode", "linear.stream", "routing.route", "moe.token"]
SEVERAL = ["norm.rms", *ONE[:3], "norm.rms", "routing.route", "moe.stream"]


@pytest.fixture(autouse=True)
def a_small_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda _device=0: 1 << 10)


def problem(**fields: Any) -> AttentionProblem:
    usual = {"context": 40, "kv_heads": 1, "group": 8, "sinks": "sinks_bf16", "rope": "neox", "rotary": 64}
    return AttentionProblem(**{**usual, **fields})


def blocks(count: int = 1, **fields: Any) -> Blocks:
    return Blocks(TINY, problem(**fields), device="cpu", count=count)


@pytest.mark.parametrize(
    ("batch", "cache"), [pytest.param(1, "same", marks=pytest.mark.nightly), (3, "same"), (2, "e4m3")]
)
def test_a_block_is_as_far_from_float32_as_bf16_rounds(batch: int, cache: str) -> None:
    with simulated_card.on_cpu("sm_90a"):
        assert 0 < blocks(batch=batch, cache=cache).gap() < benchmark.GATE


@pytest.mark.parametrize("left_out", ["router", "o_bias", "norms"])
def test_a_block_that_lacks_something_is_far_off(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_card.on_cpu("sm_90a"):
        made = blocks(batch=2)
        right, one = made.run(), made.blocks[0]
        lacking = {
            "router": {"router": one.router.roll(1, 0)},
            "o_bias": {"o_bias": torch.zeros_like(one.qkv_bias[:64])},
            "norms": {"norms": (one.norms[0], one.norms[1] * 1.5)},
        }[left_out]
        made.blocks[0] = dataclasses.replace(one, **lacking)
        monkeypatch.setattr(made, "run", lambda only: right)
        assert made.gap() > benchmark.GATE


@pytest.mark.parametrize(("batch", "wanted"), [(1, ONE), (2, SEVERAL)])
def test_it_launches_what_a_served_block_does(batch: int, wanted: list[str]) -> None:
    with simulated_card.on_cpu("sm_90a") as card:
        made = blocks(count=2, batch=batch)
        card.launched.clear()
        made.run()
        assert card.kernels == wanted * 2


def test_windows_alternate_and_weights_routers_and_caches_are_those_of_each_block() -> None:
    with simulated_card.on_cpu("sm_90a"):
        made = blocks(count=4)
    assert [block.attention.window for block in made.blocks] == [24, None, 24, None]
    for name in ("router", "qkv_bias", "norms"):
        values = [getattr(block, name) for block in made.blocks]
        firsts = [value[0] if isinstance(value, tuple) else value for value in values]
        assert all(not torch.equal(firsts[0], other) for other in firsts[1:])
    assert not torch.equal(made.blocks[0].qkv[1].codes, made.blocks[1].qkv[1].codes)


TIMES = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 50)), min_size=1, max_size=8)


@given(TIMES)
def test_what_launches_add_sums_up_to_the_end_of_the_last(times: list[tuple[float, float]]) -> None:
    begins = sorted(begin for begin, _ in times)
    run = [(f"k{at}", begin, begin + times[at][1]) for at, begin in enumerate(begins)]
    found = benchmark.added([run])
    assert [name for name, _ in found] == [name for name, _, _ in run] and all(us >= 0 for _, us in found)
    assert sum(us for _, us in found) == pytest.approx(max(end for _, _, end in run))


def test_a_launch_that_ends_within_another_adds_nothing_and_medians_are_over_replays() -> None:
    first = [("a", 0.0, 10.0), ("b", 2.0, 9.0), ("c", 9.0, 14.0)]
    later = [("a", 0.0, 12.0), ("b", 2.0, 13.0), ("c", 9.0, 16.0)]
    assert benchmark.added([first]) == [("a", 10.0), ("b", 0.0), ("c", 4.0)]
    assert benchmark.added([first, later, first]) == [("a", 10.0), ("b", 0.0), ("c", 4.0)]


def test_launches_of_a_graph_are_those_of_two_blocks_and_none_where_the_profiler_lost_some() -> None:
    names = ["jitmx_a", "jitmx_b", "jitmx_a", "cublas"]
    graph = [(name, float(at % 4)) for at, name in enumerate(names * (benchmark.BLOCKS * benchmark.TURNS // 2))]
    found = benchmark._of_two(graph)
    assert [one["kernel"] for one in found] == names
    assert [one["us"] for one in found] == [0.0, 1.0, 2.0, 3.0]
    assert benchmark._of_two(graph[:-1]) == []
    zeroed = [*graph[:2], ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", 8.0), *graph[2:]]
    assert [one["us"] for one in benchmark._of_two(zeroed)] == [0.0, 1.0, 2.0 + 8.0 * 2 / len(graph) * 2, 3.0]


@pytest.mark.parametrize("batch", [1, 5])
def test_experts_that_are_hit_are_those_that_the_launches_choose(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_card.on_cpu("sm_90a"):
        made = blocks(count=2, batch=batch)
        hit = made.hit()
        assert TINY.top <= min(hit) and max(hit) <= min(TINY.experts, TINY.top * batch)
        # Weights of experts that no token hits are never read: without them nothing changes.
        seen = made.run()
        stream, block = made._attended(made.blocks[0], made._stream), made.blocks[0]
        x = benchmark._normed(stream.float().sum(0), block.norms[1])
        logits = x @ block.router.float().T
        chosen = logits.topk(TINY.top, -1).indices.unique()
        assert len(chosen) == hit[0]
        rest = [expert for expert in range(TINY.experts) if expert not in chosen.tolist()]
        block.w13.words.view(TINY.experts, -1)[rest] = 0
        assert torch.equal(made.run(), seen)


class Graph:
    """A CUDA graph that does nothing."""

    def replay(self) -> None:
        pass


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's part of `bench_block`, where there is none."""
    cuda = SimpleNamespace(
        empty_cache=lambda: None, synchronize=lambda: None, CUDAGraph=Graph, graph=contextlib.nullcontext,
    )  # fmt: skip
    for name, value in vars(cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing, "seconds", lambda run: 1e-6 * benchmark.BLOCKS * benchmark.TURNS * 30)
    line = [("jitmx_linear_stream", 0.0, 3.0), ("jitmx_attention_decode", 1.0, 5.5)] * (
        benchmark.BLOCKS * benchmark.TURNS
    )
    monkeypatch.setattr(benchmark, "timeline", lambda graph: [line])
    monkeypatch.setattr(benchmark, "NAMED", {"gpt-oss-120b": TINY})
    made = benchmark.Blocks
    monkeypatch.setattr(benchmark, "Blocks", lambda model, asked, seed: made(model, asked, seed, "cpu", 2))


def test_rows_have_time_floor_and_launches_and_tables_show_them(timed: None) -> None:
    with simulated_card.on_cpu("sm_90a"):
        payload = benchmark.bench(Asked({"batch": (1, 2), "context": (40,)}, limits=LIMITS))
    assert [(row["batch"], row["context"], round(row["us"])) for row in payload["rows"]] == [(1, 40, 30), (2, 40, 30)]
    for row in payload["rows"]:
        assert 0 < row["floor_us"] < row["us"] and row["error"] < benchmark.GATE
        assert {one["kernel"] for one in row["launches"]} == {"jitmx_linear_stream", "jitmx_attention_decode"}
    first, *added = benchmark.tables(payload, LIMITS)
    assert "US A BLOCK" in first.headers and len(first.rows) == 2 and len(added) == 2
    assert first.rows[0][-1] == "0.060"


def test_a_block_that_is_wrong_is_an_error_and_no_time(timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "gap", lambda self: float("nan"))
    with simulated_card.on_cpu("sm_90a"), pytest.raises(DriverError, match="a block is nan off with 1 requests"):
        benchmark.bench(Asked({"batch": (1,), "context": (40,)}, limits=LIMITS))
