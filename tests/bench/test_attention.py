"""Attention as it is timed: calls that depend on one another, over caches that rotate, against float32."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from jitmx.bench import attention as benchmark
from jitmx.bench import attention_peers, timing
from jitmx.bench.attention import Chain, jitmx_way
from jitmx.bench.attention_inputs import Layer, Workload
from jitmx.bench.benchmark import Asked, Ceilings
from jitmx.bench.peers import Unavailable
from jitmx.dispatch.tune import QUICK, Candidate
from jitmx.errors import DriverError, KnobError
from jitmx.kernels.attention import BENCHMARK, TUNING
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.attention.reference import attend, rotate, visible
from simulated_card import Simulated

LIMITS = Ceilings("a card", read=4e12, copy=4e12, matmul=7e14)


def problem(**fields: Any) -> AttentionProblem:
    usual = {"batch": 2, "context": 40, "kv_heads": 1, "group": 8, "sinks": "sinks_bf16", "rope": "neox", "rotary": 64}
    return AttentionProblem(**{**usual, **fields})


DECODE, TREE, PROMPT = problem(), problem(queries=4, mask=32), problem(batch=1, queries=24)
WINDOW, STORED = problem(context=100, window=20), problem(cache="e4m3")


@pytest.fixture(autouse=True)
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of a few calls without a graph, beside an L2 of half a cache."""

    def chain(calls: list[Any], elements: int, dtype: torch.dtype, repeats: int = 21) -> float:
        buffers = [torch.randn(elements).to(dtype) for _ in range(2)]
        for i, call in enumerate(calls):
            call(buffers[i % 2], buffers[1 - i % 2])
        return 1e-6 * len(calls)

    monkeypatch.setattr(timing, "chain", chain)
    monkeypatch.setattr(timing, "l2_bytes", lambda _device=0: Workload(DECODE).cache_bytes // 2)
    monkeypatch.setattr(timing, "calls_of", lambda *_: 4)
    monkeypatch.setattr(benchmark, "_free", lambda: 1 << 40)


def layer(asked: AttentionProblem, seed: int = 0) -> Layer:
    return Layer(Workload(asked), seed, "cpu")


LATER = [
    pytest.param(asked, marks=pytest.mark.nightly) for asked in (WINDOW, problem(append=False), problem(soft_cap=True))
]


@pytest.mark.parametrize("asked", [DECODE, TREE, PROMPT, STORED, *LATER])
@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
def test_what_is_timed_is_right_and_writes_the_cache(asked: AttentionProblem, card: Simulated) -> None:
    chain = Chain(layer(asked))
    error = chain.gap(jitmx_way(chain.layer), writes=asked.append)
    assert 0 < error <= benchmark.GATE[asked.cache]
    assert card.kernels[-1] in ("attention.decode", "attention.wgmma")


@pytest.mark.parametrize(
    "asked",
    [
        DECODE,
        TREE,
        PROMPT,
        WINDOW,
        problem(soft_cap=True),
        problem(rope="interleaved", rotary=32),
        problem(sinks="no_sinks"),
    ],
)
def test_the_right_answer_is_that_of_the_kernels_reference(asked: AttentionProblem) -> None:
    made = layer(asked)
    x, some = made.inputs(), torch.tensor([0, asked.queries - 1])
    found = made.wanted(1, x, asked.batch - 1, some)
    at, queries, context = made.positions.numpy(), asked.queries, made.work.context
    own, old = slice(-queries, None), context - queries
    q, k, v = (part.float().numpy() for part in made.split(x))
    if made.rope is not None:
        table = made.rope.float().numpy()
        q, k = (torch.from_numpy(rotate(part, at, table, asked.rope)).bfloat16().float().numpy() for part in (q, k))
    pages = made.tables[1][-1].long()
    before = [cache[pages].flatten(0, 1)[:old].float().numpy() for cache in (made.k_cache, made.v_cache)]
    keys, values = (np.concatenate([first, new[own]]) for first, new in zip(before, (k, v), strict=True))
    mask = None
    if made.mask is not None:
        words = made.mask[own, 0].numpy().astype(np.int64)
        mask = (words[:, None] >> np.arange(queries)) & 1 == 1
    allowed = visible(queries, context, asked.window, mask)
    sinks = None if made.sinks is None else made.sinks.float().numpy()
    right = attend(q[own], keys, values, asked.head_dim**-0.5, allowed, sinks, made.soft_cap or 0.0).out[some]
    assert float(np.abs(found.numpy() - right).max()) <= 1e-5


@pytest.mark.parametrize("context", [40, 4000])
def test_sinks_take_so_much_that_one_which_is_left_out_is_seen(context: int) -> None:
    made = layer(problem(context=context))
    x, some = made.inputs(), torch.tensor([0])
    right, without = (made.wanted(0, x, 0, some, sinks=sinks) for sinks in (True, False))
    for head in range(8):
        assert (without - right)[:, head].norm() > 0.1 * right[:, head].norm()


WRONG: dict[str, Callable[[Layer, torch.Tensor, torch.Tensor], None]] = {
    "writes no output": lambda made, x, y: made.fill(0, x),
    "writes no cache": lambda made, x, y: _answer(made, x, y),
    "is off": lambda made, x, y: (made.fill(0, x), _answer(made, x, y), made.out(y).mul_(1.1)),  # type: ignore[dict-item,func-returns-value]
    "leaves out the last request": lambda made, x, y: (made.fill(0, x), _answer(made, x, y), made.out(y)[-1].fill_(0)),  # type: ignore[dict-item,func-returns-value]
}


def _answer(made: Layer, x: torch.Tensor, y: torch.Tensor) -> None:
    queries = made.work.problem.queries
    for request in range(made.work.problem.batch):
        rows = made.wanted(0, x, request, torch.arange(queries))
        made.out(y)[request * queries : (request + 1) * queries] = rows.to(y.dtype)


@pytest.mark.parametrize("how", WRONG)
def test_a_call_that_is_wrong_is_found_out(how: str) -> None:
    chain = Chain(layer(DECODE))
    error = chain.gap(lambda _copy, x, y: WRONG[how](chain.layer, x, y))
    assert not error <= benchmark.GATE["same"]
    assert chain.gap(lambda _copy, x, y: (chain.layer.fill(0, x), _answer(chain.layer, x, y))) <= 3e-3  # type: ignore[func-returns-value,arg-type,return-value]


def test_no_time_is_given_where_jitmx_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Layer", lambda work, seed=0: Layer(work, seed, "cpu"))
    monkeypatch.setattr(benchmark, "attention", lambda *_, **__: None)
    with pytest.raises(DriverError, match="attention is nan off on"):
        benchmark.bench_attention([("decode", DECODE)], LIMITS)
    with pytest.raises(DriverError, match="is nan off on"):
        benchmark.Bench()._seconds(DECODE, Candidate("decode", {}, ()), QUICK)


def test_each_call_reads_the_last_one_s_output_and_pages_that_were_read_longest_ago() -> None:
    made, seen = layer(DECODE), []

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append((made.tables[copy].tolist(), made.split(x)[0].data_ptr(), made.out(y).data_ptr()))

    assert Chain(made).time(way) == pytest.approx(4e-6)
    assert len(made) == 3  # half a cache is the L2, which six halves exceed
    pages = [{page for row in table for page in row} for table, _, _ in seen]
    assert pages[0] == pages[3] and not pages[0] & pages[1] and not (pages[0] | pages[1]) & pages[2]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(seen))
    assert set().union(*pages) == set(range(1, 1 + 3 * 2 * 3))


def test_a_layer_with_a_window_has_only_the_pages_that_it_reaches() -> None:
    made = layer(WINDOW)
    assert made.work.context == 84  # four windows tell what lies before one
    assert made.tables[0].shape == (2, 6)
    for table in made.tables:
        assert (table[:, :4] == 0).all() and (table[:, 4:] > 0).all()
    assert made.k_cache.shape[0] == 1 + len(made) * 2 * 2


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (problem(batch=1, context=40, queries=1), 40),
        (problem(batch=1, context=40, queries=3), 38 + 39 + 40),
        (problem(batch=1, context=40, queries=40), 40 * 41 // 2),
        (problem(batch=3, context=40, queries=1, window=16), 3 * 16),
        (problem(batch=1, context=40, queries=40, window=16), 16 * 17 // 2 + 24 * 16),
        (problem(batch=1, context=40, queries=30, window=16), 11 + 12 + 13 + 14 + 15 + 16 * 25),
    ],
)
def test_operations_are_those_of_the_keys_that_tokens_see(asked: AttentionProblem, seen: int) -> None:
    made = Workload(asked)
    allowed = visible(asked.queries, made.context, asked.window)
    assert asked.batch * int(allowed.sum()) == seen
    assert made.flops == 4 * 64 * 8 * seen


def test_bytes_are_those_of_keys_and_values_that_are_seen_and_of_the_rows() -> None:
    rows = 64 * 2 * (2 * 8 + 2)
    assert Workload(problem(batch=1, context=40)).bytes == 40 * 2 * 64 * 2 + rows
    assert Workload(problem(batch=1, context=40, cache="e4m3")).bytes == 40 * 2 * 64 + rows
    assert Workload(problem(batch=3, context=400, window=128)).bytes == 3 * (128 * 2 * 64 * 2 + rows)
    assert Workload(problem(batch=1, context=40, append=False)).bytes == 40 * 2 * 64 * 2 + 64 * 2 * 16


def test_the_step_of_gpt_oss_has_the_floor_that_its_bytes_have() -> None:
    """2 KiB a token and layer: 1 us at 2k tokens and 4.3 TB/s, 499 us at 16 x 64k."""
    for batch, context, us in ((1, 2048, 0.98), (16, 65536, 499), (64, 8192, 250)):
        asked = AttentionProblem(batch=batch, context=context)
        assert Workload(asked).bytes / 4.3e12 * 1e6 == pytest.approx(us, rel=0.03)


def test_what_is_measured_by_default() -> None:
    found = list(benchmark.problems("gpt-oss-120b", {}))
    decode = {(p.batch, p.context, p.window, p.cache) for name, p in found if name == "decode"}
    assert decode == {
        (batch, context, window, cache)
        for batch in (1, 16, 64) for cache in ("same", "e4m3")
        for window, contexts in ((0, (256, 2048, 8192, 65536)), (128, (8192,))) for context in contexts
    }  # fmt: skip
    prompts = {(p.queries, p.context, p.window) for name, p in found if name == "prompt" and p.cache == "same"}
    sizes = ((2048, 2048), (8192, 8192), (32768, 32768), (2048, 32768))
    assert prompts == {(*size, window) for size in sizes for window in (0, 128)}
    trees = {(p.batch, p.context, p.queries, p.mask, p.window) for name, p in found if name == "verify"}
    assert trees == {(batch, 2048, 4, 32, 0) for batch in (1, 16, 64)}
    assert {(p.kv_heads, p.group, p.head_dim, p.sinks, p.rope) for _, p in found} == {(8, 8, 64, "sinks_bf16", "neox")}


def test_fields_say_what_is_measured() -> None:
    given = {"batch": (2, 3), "queries": (4,), "window": 128, "mask": 32}
    found = list(benchmark.problems("gpt-oss-20b", given))
    assert [(name, p.batch, p.queries, p.context, p.window, p.cache, p.mask) for name, p in found] == [
        ("verify", batch, 4, 8192, 128, cache, 32) for cache in ("same", "e4m3") for batch in (2, 3)
    ]  # fmt: skip
    only = {p.cache for _, p in benchmark.problems("gpt-oss-20b", {"cache": "e4m3"})}
    assert only == {"e4m3"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"queries": (1, 300), "context": (256,)}, "context=256 is less than its queries=300"),
        ({"queries": (40,), "mask": 32}, "mask=32 bits are fewer than queries=40"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        BENCHMARK.check(fields)
    BENCHMARK.check({"queries": (32,), "mask": 32, "context": (64,)})


def test_a_row_has_time_floor_error_and_a_reason_for_each_library_that_is_missing(
    card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "Layer", lambda work, seed=0: Layer(work, seed, "cpu"))
    for absent in ("vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, absent, None)
    rows, left_out = benchmark.bench_attention([("decode", DECODE)], LIMITS, BENCHMARK.peers)
    (row,) = rows
    assert (row["name"], row["batch"], row["kernel"], row["launches"]) == ("decode", 2, "decode", 1)
    assert row["us"] == pytest.approx(4) and 0 < row["error"] < 0.01 and left_out == []
    assert row["bytes"] == Workload(DECODE).bytes and row["memory_us"] == row["bytes"] / 4e6 == row["floor_us"]
    absent = {"us": None, "reason": "vllm is not installed"}
    assert row["peers"]["fa3"] == row["peers"]["triton"] == absent
    assert row["peers"]["flashinfer"] == {"us": None, "reason": "flashinfer is not installed"}
    assert row["peers"]["sdpa"] == {"us": pytest.approx(4), "reason": None}
    payload = {"model": "gpt-oss-120b", "seed": 0, "rows": rows, "left_out": ["prompt takes 9 GB"]}
    (table,) = benchmark.tables(payload, LIMITS)
    assert len(table.rows[0]) == len(table.headers) and table.headers[-1] == "SDPA US"
    assert table.notes == [
        "fa3: vllm is not installed", "triton: vllm is not installed", "flashinfer: flashinfer is not installed",
        "prompt takes 9 GB",
    ]  # fmt: skip


def test_what_does_not_fit_into_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_free", lambda: 10 << 30)
    asked = Asked({"batch": (64,), "context": (65536,), "window": 0, "cache": "same"}, limits=LIMITS)
    payload = benchmark.bench(asked)
    assert payload["rows"] == [] and payload["left_out"] == ["decode of 64 x 65536 takes 17 GB, and 11 are free"]
    assert benchmark.tables(payload, LIMITS)[0].notes == payload["left_out"]


@pytest.mark.parametrize("asked", [DECODE, PROMPT, WINDOW, TREE, problem(batch=1, queries=24, context=24)])
def test_torch_attends_to_the_same_without_sinks(asked: AttentionProblem) -> None:
    chain = Chain(layer(asked))
    way = attention_peers.load("sdpa", chain.layer)
    assert 0 < chain.gap(way, sinks=False, writes=False) <= attention_peers.GATE["same"]
    assert not chain.gap(way, writes=False) <= attention_peers.GATE["same"]


class FakeLibraries:
    """vLLM and FlashInfer by what the adapters use of them, from the layer's own right answer."""

    def __init__(self, made: Layer, wrong: float = 1.0) -> None:
        self.made, self.wrong = made, wrong
        self.called: list[str] = []
        self.given: dict[str, Any] = {}

    def rotary_embedding(self, positions: Any, q: Any, k: Any, size: int, table: Any, neox: bool) -> None:
        made = self.made
        self.called.append("rope")
        assert size == 64 and neox and table is made.rope and positions is made.positions
        self.q = q.clone()
        for part in (q, k):
            part.copy_(made.rotated(part.unflatten(1, (-1, 64))).flatten(1))

    def reshape_and_cache_flash(
        self, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, kind: str, *scales: Any
    ) -> None:
        self.called.append("write")
        made = self.made
        assert kind == ("auto" if made.scales is None else "fp8") and k_cache.data_ptr() == made.k_cache.data_ptr()
        for cache, new, scale in zip((k_cache, v_cache), (k, v), scales, strict=True):
            stored = new if made.scales is None else (new.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            cache.flatten(0, 1)[slots] = stored
        self.k, self.v = k, v

    def scaled_fp8_quant(self, q: Any, scale: Any) -> Any:
        self.called.append("quantize")
        return q.float().to(torch.float8_e4m3fn), scale

    def get_scheduler_metadata(self, **given: Any) -> Any:
        self.called.append("schedule")
        assert given["causal"] and given["num_heads_q"] == 8
        return "metadata"

    def attend(self, out: Any, **given: Any) -> None:
        """The answer for q before it was rotated, and for new keys as they were given."""
        made, self.given = self.made, given
        self.called.append("attend")
        x = made.inputs()
        queries = made.work.problem.queries
        for request in range(made.work.problem.batch):
            rows = made.wanted(0, x, request, torch.arange(queries))
            out[request * queries : (request + 1) * queries] = (self.wrong * rows).to(out.dtype)

    def flash(
        self, *, out: Any, s_aux: Any, window_size: Any, fa_version: int, scheduler_metadata: Any, **given: Any
    ) -> None:
        made = self.made
        assert fa_version == 3 and s_aux is made.sinks and scheduler_metadata == "metadata"
        assert window_size == ([made.work.problem.window - 1, 0] if made.window else [-1, -1])
        assert (given["q"].dtype is torch.float8_e4m3fn) == (made.scales is not None)
        self.attend(out, **given)

    def unified(self, q: Any, k: Any, v: Any, out: Any, block_table: Any, seqused_k: Any, window_size: Any, sinks: Any,
                k_descale: Any) -> None:  # fmt: skip
        assert sinks is self.made.sinks and (k_descale is None) == (self.made.scales is None)
        assert window_size == ((self.made.work.problem.window - 1, 0) if self.made.window else (-1, -1))
        self.attend(out)

    def xqa(self, *, query: Any, out: Any, window_left: int, sinks: Any, bmm1_scale: float, **given: Any) -> None:
        assert sinks.dtype is torch.float32 and window_left == (self.made.work.problem.window or 0) - 1
        assert bmm1_scale == pytest.approx((1 if self.made.scales is None else float(self.made.scales[0])) / 8)
        self.attend(out, **given)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def put(name: str, **contents: Any) -> None:
            module = ModuleType(name)
            module.__spec__ = "there"  # type: ignore[assignment]
            for key, value in contents.items():
                setattr(module, key, value)
            monkeypatch.setitem(sys.modules, name, module)

        for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
            put(name)
        names = ("rotary_embedding", "reshape_and_cache_flash", "scaled_fp8_quant")
        put("vllm._custom_ops", **{name: getattr(self, name) for name in names})
        flash = {"flash_attn_varlen_func": self.flash, "get_scheduler_metadata": self.get_scheduler_metadata}
        put("vllm.vllm_flash_attn", **flash)
        put("vllm.v1.attention.ops.triton_unified_attention", unified_attention=self.unified)
        outer = self

        class Wrapper:
            def __init__(self, workspace: torch.Tensor, layout: str, **typed: Any) -> None:
                assert layout == "NHD" and typed["head_dim_qk"] == 64

            def plan(self, starts: Any, ends: Any, pages: Any, last: Any, *sizes: int, **given: Any) -> None:
                made = outer.made
                assert given["causal"] and given["window_left"] == made.work.problem.window - 1
                assert (last == (made.work.context - 1) % 16 + 1).all() and ends[-1] == pages.numel()

            def run(self, q: Any, caches: Any, sinks: Any, scale: float, out: Any) -> None:
                assert scale == 1 / 8 and sinks.dtype is torch.float32
                outer.attend(out)

        put("flashinfer", BatchAttentionWithAttentionSinkWrapper=Wrapper)
        put("flashinfer.decode", trtllm_batch_decode_with_kv_cache=self.xqa)


@pytest.mark.parametrize("asked", [DECODE, WINDOW, STORED, PROMPT])
@pytest.mark.parametrize("name", ["fa3", "triton", "flashinfer"])
def test_a_library_runs_rope_write_and_attention_in_this_order(
    name: str, asked: AttentionProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(layer(asked))
    fake = FakeLibraries(chain.layer)
    fake.install(monkeypatch)
    way = attention_peers.load(name, chain.layer)
    fake.called.clear()
    peer = attention_peers.PEERS[name]
    assert chain.gap(way, sinks=peer.sinks, writes=peer.writes) <= attention_peers.GATE[asked.cache]
    quantized = ["quantize"] if name == "fa3" and asked.cache == "e4m3" else []
    assert fake.called == ["rope", "write", *quantized, "attend"]
    assert benchmark.time_peer(chain, way, name) == {"us": pytest.approx(4), "reason": None}


@pytest.mark.parametrize("name", ["fa3", "triton", "flashinfer"])
def test_a_library_that_computes_something_else_or_fails_is_a_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(layer(DECODE))
    for wrong in (1.2, math.nan):
        fake = FakeLibraries(chain.layer, wrong)
        fake.install(monkeypatch)
        found = benchmark.time_peer(chain, attention_peers.load(name, chain.layer), name)
        assert found["us"] is None and "away from attention, relative L2" in found["reason"]

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel image\nfor this card")

    assert benchmark.time_peer(chain, fails, name) == {"us": None, "reason": "RuntimeError: no kernel image"}


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("fa3", TREE, "FlashAttention 3 has no mask of the new tokens"),
        ("triton", TREE, "vLLM's Triton attention has no mask of the new tokens"),
        ("flashinfer", TREE, "FlashInfer with sinks has no mask of the new tokens"),
        ("flashinfer", problem(soft_cap=True), "FlashInfer with sinks has no soft cap"),
        ("flashinfer", problem(batch=1, queries=24, cache="e4m3"), "FlashInfer's prefill with sinks takes no scales"),
        ("sdpa", STORED, "torch's attention has neither an E4M3 cache nor a soft cap"),
        ("sdpa", problem(rope="interleaved"), "torch is given rotary embedding of two halves only"),
    ],
)
def test_what_a_library_cannot_do_is_a_reason(
    name: str, asked: AttentionProblem, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layer(asked)
    FakeLibraries(made).install(monkeypatch)
    with pytest.raises(Unavailable, match=said):
        attention_peers.load(name, made)


def test_candidates_are_timed_with_their_kernel_and_knobs_and_checked_once(
    card: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Layer] = []

    def of(work: Workload, seed: int = 0) -> Layer:
        made.append(Layer(work, seed, "cpu"))
        return made[-1]

    monkeypatch.setattr(benchmark, "Layer", of)
    bench, knobs = benchmark.Bench(), {"warps": 2, "keys": 16, "stages": 3, "reduction": "none", "parts": 1}
    assert bench._seconds(DECODE, Candidate("decode", knobs, ()), QUICK) == pytest.approx(1e-6 * 4)
    assert len(card.launched) == 5
    assert {(v.spec.name, v.knobs.warps, v.knobs.stages) for v in card.launched} == {("decode", 2, 3)}
    bench._seconds(DECODE, Candidate("decode", knobs | {"warps": 1}, ()), QUICK + 1)
    assert len(card.launched) == 9 and card.launched[-1].knobs.warps == 1 and len(made) == 1
    bench._seconds(PROMPT, Candidate("prefill", {}, ()), QUICK + 1)
    assert card.kernels[-2:] == ["attention.append", "attention.prefill"] and len(made) == 2


def test_rows_of_a_table_name_what_decides_and_serve_calls_with_and_without_sinks_and_angles() -> None:
    fields = {*AttentionProblem.__dataclass_fields__}
    left_open = {*TUNING.nameless}
    assert left_open == {"sinks", "soft_cap", "rope", "rotary", "table"}
    assert {"cache", "append", "dtype", "step"} <= {*TUNING.named} <= fields
    for problems in TUNING.models.values():
        assert {(one["window"], one["cache"]) for one in problems} == {
            (window, cache) for window in (0, 128) for cache in ("same", "e4m3")
        }
