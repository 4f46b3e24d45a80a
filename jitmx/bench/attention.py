"""What `jitmx bench attention` measures, a layer's attention from q, k and v to its output, and what `jitmx tune
attention` times.

A call is all of it: rotary embedding of q and of new keys, the cache write, attention with sinks and window, the merge
of parts. Calls are dependent (the output of one is q of the next) and lie in a CUDA graph; each reads pages that no
cache holds (see attention_inputs.py). Other libraries run the launches that vLLM makes with them in the same order.

Floors are bytes of keys and values that are seen, of q, new keys and values and the output at the read rate of this
run, and operations of both products at its matmul rate; no launch is in them. A prompt also takes a power of each
logit, which is in neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from jitmx.bench import attention_peers, timing, tuning
from jitmx.bench.attention_inputs import Layer, Workload
from jitmx.bench.attention_peers import Way
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.bench.peers import Unavailable, loaded, timed
from jitmx.dispatch import call, tune
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.models import NAMED
from jitmx.ops.attention import attention
from jitmx.runtime import card

BATCHES, CONTEXTS = (1, 16, 64), (256, 2048, 8192, 65536)
PROMPTS = ((2048, 2048), (8192, 8192), (32768, 32768), (2048, 32768))  # new tokens, and tokens with those before
DRAFTED = 4  # tokens that a step of speculation verifies
# Relative L2 from float32, of new keys and values as the cache has them too: bf16 rounds to 2^-9, E4M3 to 2^-4.
GATE = {"same": 0.01, "e4m3": 0.02}
CHECKED = 16  # new tokens of a request that are compared, in each of the first and the last


def problems(model: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, AttentionProblem]]:
    """Names and problems of what is measured: steps of decoding, prompts and verification of a model's layers, or those
    with the fields that are given."""
    sizes = NAMED[model]
    usual = AttentionProblem(
        kv_heads=sizes.kv_heads, group=sizes.heads // sizes.kv_heads, head_dim=sizes.head_dim, sinks="sinks_bf16",
        rope="neox", rotary=sizes.head_dim,
    )  # fmt: skip
    caches = (fields["cache"],) if "cache" in fields else ("same", "e4m3")
    windows = (fields["window"],) if "window" in fields else (0, sizes.window)
    if fields.keys() & {"batch", "context", "queries", "mask"}:
        axes = (fields.get("batch", (1,)), fields.get("queries", (1,)), fields.get("context", (8192,)))
        mask = fields.get("mask", 0)
        for cache, window, batch, queries, context in itertools.product(caches, windows, *axes):
            asked = replace(usual, cache=cache, window=window, batch=batch, queries=queries, mask=mask)
            yield "verify" if mask else "decode" if queries == 1 else "prompt", replace(asked, context=context)
        return
    for cache, window in itertools.product(caches, windows):
        asked = replace(usual, cache=cache, window=window)
        for batch, context in itertools.product(BATCHES, (8192,) if window else CONTEXTS):
            yield "decode", replace(asked, batch=batch, context=context)
        for batch in () if window else BATCHES:
            yield "verify", replace(asked, batch=batch, context=2048, queries=DRAFTED, mask=32)
        for queries, context in PROMPTS:
            yield "prompt", replace(asked, queries=queries, context=context)


class Chain:
    """Calls of a workload over caches that rotate."""

    def __init__(self, layer: Layer) -> None:
        work = layer.work
        self.layer = layer
        self._calls = timing.calls_of(work.bytes, len(layer), 1, 1, work.flops // 2)

    def time(self, way: Way, repeats: int = 21) -> float:
        """Median seconds a call."""
        calls = [partial(way, index % len(self.layer)) for index in range(self._calls)]
        return timing.chain(calls, self.layer.elements, self.layer.dtype, repeats)

    def gap(self, way: Way, *, sinks: bool = True, writes: bool = True) -> float:
        """How far a call is from the right answer, relative L2: its output, and the new keys and values in the cache.

        Args:
            sinks, writes: whether the way has sinks, and writes the cache.
        """
        layer, work = self.layer, self.layer.work
        x, y = layer.inputs(), torch.full((layer.elements,), torch.nan, dtype=layer.dtype, device=layer.device)
        given = x.clone()  # a way may rotate in place
        layer.fill(0, torch.zeros_like(x))
        if not writes:
            layer.fill(0, x)
        way(0, given, y)
        batch, queries = work.problem.batch, work.problem.queries
        some = torch.arange(queries, device=layer.device)
        some = torch.cat([some[: CHECKED // 2], some[CHECKED // 2 :][-CHECKED // 2 :]])
        worst = [_off(*pair) for pair in zip(layer.written(0), layer.stored(*layer.split(x)[1:]), strict=True)]
        for request in sorted({0, batch - 1}):
            found = layer.out(y)[request * queries : (request + 1) * queries][some]
            worst.append(_off(found, layer.wanted(0, x, request, some, sinks=sinks)))
        return max(worst, key=lambda gap: (gap != gap, gap))


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def jitmx_way(layer: Layer, knobs: Mapping[str, Any] | None = None) -> Way:
    """`jitmx.attention`, given what vLLM gives its backends."""
    problem = layer.work.problem
    k_scale, v_scale = layer.scales or (None, None)

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        q, k, v = layer.split(x)
        attention(
            q, k if problem.append else None, v if problem.append else None, layer.k_cache, layer.v_cache,
            layer.tables[copy], layer.seq_lens, layer.starts, max_query_len=problem.queries,
            max_seq_len=layer.work.context, sinks=layer.sinks, window=layer.window, soft_cap=layer.soft_cap,
            rope=layer.rope, rope_style="neox" if layer.rope is None else problem.rope,
            slot_mapping=layer.slots[copy] if problem.append else None, mask=layer.mask, k_scale=k_scale,
            v_scale=v_scale, fp16_qk=problem.qk == "qk_fp16", out=layer.out(y), early=True, knobs=knobs,
        )  # fmt: skip

    return way


def bench_attention(
    asked: Iterable[tuple[str, AttentionProblem]], limits: Ceilings, wanted: Sequence[str] = (), seed: int = 0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of `name, batch, queries, context, window, cache, mask, kernel, launches, us, error, bytes, flops,
    memory_us, compute_us, floor_us, peers`, and what was left out for its memory, in words.

    `peers` has for each library that was wanted its `us`, None where it could not be measured, and then the `reason`.

    Args:
        wanted: names of libraries to run beside jitmx.
        seed: of all that is random.

    Raises:
        DriverError: what jitmx computes here is wrong.
    """
    rows, left_out = [], []
    for name, problem in asked:
        work = Workload(problem)
        free = _free()
        if work.memory > free:
            size, of = f"{work.memory / 1e9:.0f}", f"{free / 1e9:.0f}"
            left_out.append(f"{name} of {problem.batch} x {problem.context} takes {size} GB, and {of} are free")
            continue
        layer = Layer(work, seed)
        chain, way = Chain(layer), jitmx_way(layer)
        error = chain.gap(way, writes=problem.append)
        if not error <= GATE[problem.cache]:
            raise DriverError(f"attention is {error:.2g} off on {problem.as_dict()}, over {GATE[problem.cache]}")
        launched = _launched(replace(problem, context=work.context))
        row: dict[str, Any] = {"name": name, **problem.pick("batch", "queries", "context", "window", "cache", "mask")}
        row |= {"kernel": launched[0], "launches": len(launched), "us": chain.time(way) * 1e6, "error": error}
        row |= limits.floors(work.bytes, work.flops)
        others = loaded(wanted, partial(attention_peers.load, layer=layer))
        row["peers"] = {peer: time_peer(chain, other, peer) for peer, other in others.items()}
        rows.append(row)
        del layer, chain, way, others
    return rows, left_out


def time_peer(chain: Chain, other: Way | str, name: str) -> dict[str, Any]:
    """`us` a call of another library on a chain's layer, or the `reason` why there is none."""
    if isinstance(other, str):
        return {"us": None, "reason": other}

    def seconds() -> float:
        peer = attention_peers.PEERS[name]
        error = chain.gap(other, sinks=peer.sinks, writes=peer.writes)
        if not error <= attention_peers.GATE[chain.layer.work.problem.cache]:
            raise Unavailable(f"what it computes here is {error:.2g} away from attention, relative L2")
        return chain.time(other)

    return timed(seconds)


def _free() -> int:
    """Bytes of device memory that a layer may take."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _launched(problem: AttentionProblem) -> list[str]:
    """Kernels of a call, that of attention first."""
    found = call.call("attention", problem, card.arch(0), multiprocessors=card.multiprocessors(0))
    return [str(launch.choice.variant.spec.name) for launch in found.launches]


def bench(asked: Asked) -> dict[str, Any]:
    """Model, seed, the rows of `bench_attention`, and what was left out."""
    found = problems(asked.model, asked.fields)
    rows, left_out = bench_attention(found, asked.ceilings, asked.peers, asked.seed)
    return {"model": asked.model, "seed": asked.seed, "rows": rows, "left_out": left_out}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Times beside the floor and other libraries."""
    rows = payload["rows"]
    if not rows:
        return [Table(("STEP",), (), (), notes=payload["left_out"])]
    headers = ["STEP", "BATCH", "NEW", "CONTEXT", "WINDOW", "CACHE", "KERNEL", "US", "FLOOR US", "OF FLOOR", "TB/S",
               "OF COPY", "TFLOP/S"]  # fmt: skip
    others = peer_headers(rows)
    cells = [
        (
            row["name"], row["batch"], row["queries"], row["context"], row["window"] or None, row["cache"],
            row["kernel"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}", f"{row['floor_us'] / row['us']:.0%}",
            f"{row['bytes'] / row['us'] / 1e6:.2f}", f"{row['bytes'] / row['us'] * 1e6 / limits.copy:.0%}",
            f"{row['flops'] / row['us'] / 1e6:.1f}", *peer_cells(row),
        )
        for row in rows
    ]  # fmt: skip
    title = (
        f"attention of {payload['model']}, with sinks, rotary embedding and cache write, caches that rotate past the "
        f"L2, seed {payload['seed']}"
    )
    notes = [*peer_notes(rows), *payload["left_out"]]
    return [Table((*headers, *others), cells, (*headers[1:5], *headers[7:], *others), title, notes)]


class Bench(tuning.Timer):
    """Times candidates in CUDA graphs of dependent calls over caches that rotate; the last layer is kept."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self._last: tuple[AttentionProblem, Layer] | None = None

    def _seconds(self, problem: AttentionProblem, candidate: Candidate, repeats: int) -> float:
        if self._last is None or self._last[0] != problem:
            self._last = None
            self._last = problem, Layer(Workload(problem))
        chain = Chain(self._last[1])
        way = jitmx_way(chain.layer, {"kernel": candidate.kernel, **candidate.knobs})
        if repeats <= tune.QUICK:
            error = chain.gap(way, writes=problem.append)
            gate = GATE[problem.cache] if problem.qk == "qk_fp32" else 2 * GATE[problem.cache]
            if not error <= gate:
                raise DriverError(f"{candidate.key} is {error:.2g} off on {problem.as_dict()}")
        return chain.time(way, repeats)
