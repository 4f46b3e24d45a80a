"""What `jitmx bench block` measures: a model's transformer blocks in one graph, launched as vLLM's are on jitmx.

A launch of a block may begin while those before it still run, and its blocks take what room these leave: what it costs
is not what it takes alone. So blocks with and without a window, each with weights, routing and a cache of its own, lie
in one CUDA graph, in several turns. What a launch adds is by how much later, behind it, the last of all launches so far
ends, as the profiler saw it; beside it stands what the cost model expects of the launch. Memory that a graph zeroes
once counts to the launch behind it.

Floors are bytes of weights that a block reads, with those of the experts that its tokens hit, of keys and values that
are seen, at the read rate of this run; operations of so few rows are below that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitmx.bench import timing
from jitmx.bench.attention_inputs import Layer, Workload
from jitmx.bench.benchmark import Asked, Ceilings, Table
from jitmx.bench.linear import random_mxfp4
from jitmx.bench.moe_inputs import HIDDEN_DEVIATION, LayerShape, RandomLayer, random_layer
from jitmx.costs import cards
from jitmx.errors import DriverError
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.models import NAMED, Model
from jitmx.ops.attention import attention
from jitmx.ops.linear import operand
from jitmx.ops.linear.packed import PackedWeight, pack_weight
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe.experts import PackedExperts, pack_experts
from jitmx.ops.mx import MXTensor
from jitmx.ops.quantize import dequantize
from jitmx.runtime import card
from jitmx.serving import model_step, products

BATCHES, CONTEXT = (1, 4, 16, 64), 2048
BLOCKS = 4  # every second one with a window: their weights exceed an L2
TURNS = 4  # that a graph takes through them: its first launch begins beside nothing
EPSILON = 1e-5
GATE = 0.03  # relative L2 of what a block adds to the stream, from float32
_REPLAYS = 12  # that the profiler sees
# Logits of a router whose choice is compared: bf16 may take another expert where two are nearer.
_APART = 0.03


@dataclass(frozen=True)
class Block:
    """A block's weights and its cache.

    Attributes:
        attention: the cache, with all that its launch is given.
        qkv, o: weights as packed, and as a checkpoint holds them.
        qkv_bias, o_bias: [n], or None.
        experts: weights of the experts as a checkpoint holds them.
        w13, w2: the same, packed.
        router, router_bias: [experts, hidden] and [experts].
        norms: weights of both RMSNorms, [hidden].
    """

    attention: Layer
    qkv: tuple[PackedWeight, MXTensor]
    o: tuple[PackedWeight, MXTensor]
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    experts: RandomLayer
    w13: PackedExperts
    w2: PackedExperts
    router: torch.Tensor
    router_bias: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]


class Blocks:
    """Blocks of a model with a batch of requests of one context.

    Attributes:
        model: whose blocks.
        problem: of their attention, without a window.
        blocks: with a window and without, in turns.
        x: what comes in, [requests, hidden].
    """

    def __init__(
        self, model: Model, problem: AttentionProblem, seed: int = 0, device: str = "cuda", count: int = BLOCKS
    ) -> None:
        self.model, self.problem = model, problem
        torch.manual_seed(seed)
        windows = [model.window if index % 2 == 0 else 0 for index in range(count)]
        self.blocks = [self._block(window, seed + index, device) for index, window in enumerate(windows)]
        drawn = torch.randn(problem.batch, model.hidden, device=device).mul_(HIDDEN_DEVIATION)
        self._stream = torch.stack([drawn, torch.zeros_like(drawn)]).bfloat16()
        self.x = self._stream[0]

    def _block(self, window: int, seed: int, device: str) -> Block:
        model = self.model

        def product(n: int, k: int) -> tuple[tuple[PackedWeight, MXTensor], torch.Tensor | None]:
            weight = random_mxfp4(n, k, device=device)
            bias = torch.randn(n, device=device).bfloat16() if model.bias else None
            return (pack_weight(weight), weight), bias

        (qkv, qkv_bias), (o, o_bias) = product(*model.qkv), product(*model.o)
        shape = LayerShape(model.experts, model.top, model.hidden, model.intermediate)
        experts = random_layer(shape, device)
        w13, w2 = pack_experts(experts.w13), pack_experts(experts.w2)
        router = torch.randn(model.experts, model.hidden, device=device).mul_(model.hidden**-0.5).bfloat16()
        norms = tuple(torch.rand(model.hidden, device=device).add_(0.5).bfloat16() for _ in range(2))
        return Block(
            Layer(Workload(replace(self.problem, window=window)), seed, device), qkv, o, qkv_bias, o_bias, experts,
            w13, w2, router, torch.zeros(model.experts, device=device).bfloat16(), (norms[0], norms[1]),
        )  # fmt: skip

    def run(self, blocks: Sequence[Block] | None = None) -> torch.Tensor:
        """The residual stream [2, tokens, hidden], high and low part, behind blocks, by default all."""
        stream = self._stream
        for block in self.blocks if blocks is None else blocks:
            stream = self._run(block, stream)
        return stream

    def _run(self, block: Block, stream: torch.Tensor) -> torch.Tensor:
        return self._fed_forward(block, self._attended(block, stream))

    def _fed_forward(self, block: Block, stream: torch.Tensor) -> torch.Tensor:
        w13, w2 = block.w13, block.w2
        return products.run_experts(
            stream, block.norms[1], EPSILON, block.router, block.router_bias, w13.words, w13.scales, w2.words,
            w2.scales, self.model.hidden, self.model.intermediate, expert_operand.layout(w13),
            expert_operand.layout(w2), block.experts.b13, block.experts.b2, self.model.top, "softmax_topk", "bf16",
        )  # fmt: skip

    def _attended(self, block: Block, stream: torch.Tensor) -> torch.Tensor:
        """The residual stream behind a block's attention, as its experts get it."""
        x, low = stream.unbind()
        qkv, o = block.qkv[0], block.o[0]

        def product(weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
            packed = weight.words, weight.scales, weight.n, weight.k, operand.layout(weight)
            return products.run_linear(x, *packed, bias, *rest)

        # Attention, between them, leaves memory idle: QKV brings the weight of O to the L2.
        y = product(qkv, x, block.qkv_bias, None, None, block.norms[0], EPSILON, False, "none", o.words, o.scales)
        heads = self._attend(block, y).flatten(1)
        return product(o, heads, block.o_bias, x, low, None, 0.0, False, "none")

    def _attend(self, block: Block, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(qkv)
        layer, out = block.attention, torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = layer.scales or (None, None)
        found: torch.Tensor = attention(
            q, k, v, layer.k_cache, layer.v_cache, layer.tables[0], layer.seq_lens, layer.starts, max_query_len=1,
            max_seq_len=layer.work.context, sinks=layer.sinks, window=layer.window, rope=layer.rope,
            rope_style="neox", slot_mapping=layer.slots[0], k_scale=k_scale, v_scale=v_scale, out=out, early=True,
        )  # fmt: skip
        return found

    def _split(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """q, new keys and new values [tokens, heads, head_dim], as views of QKV's output."""
        model = self.model
        heads = [count * model.head_dim for count in (model.heads, model.kv_heads, model.kv_heads)]
        return [part.unflatten(1, (-1, model.head_dim)) for part in qkv.split(heads, -1)]

    def gap(self) -> float:
        """How far what the first block adds to the stream is from float32: relative L2, the worst of some requests.

        Requests for which two experts are about as good don't count; where none does, x is drawn anew.
        """
        while not (found := [off for off in self._off() if off is not None]):
            self.x.copy_(torch.randn(self.x.shape, device=self.x.device).mul_(HIDDEN_DEVIATION))
        return max(found, key=lambda gap: (gap != gap, gap))

    def _off(self) -> Iterator[float | None]:
        """The same of the first and the last request, None of one that doesn't count."""
        block, model, x = self.blocks[0], self.model, self.x.float()
        found = self.run([block]).float().sum(0) - x
        qkv = _product(_normed(x, block.norms[0]), block.qkv[1], block.qkv_bias)
        flat = torch.cat([part.flatten() for part in self._split(qkv.bfloat16())])
        some = torch.zeros(1, dtype=torch.long, device=x.device)
        for request in sorted({0, len(x) - 1}):
            heads = block.attention.wanted(0, flat, request, some).flatten(1)
            added = _product(heads, block.o[1], block.o_bias)
            seen = _normed(x[request] + added, block.norms[1])
            logits = _logits(block, seen)
            best = logits.topk(model.top + 1)
            if bool((best.values[:, -2] - best.values[:, -1] < _APART).any()):
                yield None
                continue
            weights, ids = best.values[:, :-1].softmax(-1), best.indices[:, :-1]
            wanted = added + block.experts.reference(seen.bfloat16(), ids, weights)
            yield float((found[request] - wanted[0]).norm() / wanted.norm())

    def bytes(self, hit: float) -> float:
        """Bytes that a block whose tokens hit so many experts moves at the least, on the average."""
        model, shape = self.model, self.blocks[0].experts.shape
        dense = sum(n * k * 17 // 32 for n, k in (model.qkv, model.o))
        seen = statistics.mean(block.attention.work.bytes for block in self.blocks)
        return dense + seen + shape.bytes(len(self.x), hit)

    def hit(self) -> list[int]:
        """Of each block, how many experts its tokens hit."""
        found, stream = [], self._stream
        for block in self.blocks:
            stream = self._attended(block, stream)
            logits = _logits(block, _normed(stream.float().sum(0), block.norms[1]))
            found.append(len(logits.topk(self.model.top, -1).indices.unique()))
            stream = self._fed_forward(block, stream)
        return found


def _logits(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x @ block.router.float().T + block.router_bias.float()


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float(), EPSILON)


def _product(x: torch.Tensor, weight: MXTensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.bfloat16().float() @ dequantize(weight, torch.float32).T
    return y if bias is None else y + bias.float()


def timeline(graph: torch.cuda.CUDAGraph, replays: int = _REPLAYS) -> list[list[tuple[str, float, float]]]:
    """Launches of each replay in their order: name, begin and end in microseconds from the first one's begin.

    Replays of which the profiler lost some are left out.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    runs = []
    for _ in range(replays):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        found = sorted(
            (event.time_range.start, event.time_range.end, str(event.name))
            for event in seen.events() or ()
            if event.device_type == DeviceType.CUDA
        )
        runs.append([(name, start - found[0][0], end - found[0][0]) for start, end, name in found])
    names = [tuple(name for name, _, _ in run) for run in runs]
    usual = statistics.mode(names)
    return [run for run, these in zip(runs, names, strict=True) if these == usual]


def added(runs: Sequence[Sequence[tuple[str, float, float]]]) -> list[tuple[str, float]]:
    """Of each launch of a replay its name, and the median of what it adds: by how much later all so far have ended."""
    found: list[list[float]] = [[] for _ in runs[0]]
    for run in runs:
        last = 0.0
        for place, (_, _, end) in enumerate(run):
            found[place].append(max(0.0, end - last))
            last = max(last, end)
    return [(name, statistics.median(times)) for (name, _, _), times in zip(runs[0], found, strict=True)]


def problems(model: str, fields: dict[str, Any]) -> Iterator[AttentionProblem]:
    """Problems of a model's full attention, of what is asked."""
    sizes = NAMED[model]
    usual = AttentionProblem(
        kv_heads=sizes.kv_heads, group=sizes.heads // sizes.kv_heads, head_dim=sizes.head_dim, sinks="sinks_bf16",
        rope="neox", rotary=sizes.head_dim, cache=fields.get("cache", "same"),
    )  # fmt: skip
    for context in fields.get("context", (CONTEXT,)):
        for batch in fields.get("batch", BATCHES):
            yield replace(usual, batch=batch, context=context)


def bench_block(
    model: Model, asked: Sequence[AttentionProblem], limits: Ceilings, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of `batch, context, cache, hit, us, error, expected_us, launches` and of the floor, all of one block; `hit`
    is how many experts its tokens hit on the average, `launches` has of each launch of two blocks, one with a window
    and one without, its `kernel` and the `us` that it adds.

    Raises:
        DriverError: what jitmx computes here is wrong.
    """
    rows = []
    for problem in asked:
        torch.cuda.empty_cache()
        blocks = Blocks(model, problem, seed)
        error = blocks.gap()
        if not error <= GATE:
            raise DriverError(f"a block is {error:.2g} off with {problem.batch} requests, over {GATE}")
        blocks.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TURNS):
                blocks.run()
        us = timing.seconds(graph.replay) / (BLOCKS * TURNS) * 1e6
        row: dict[str, Any] = {"batch": problem.batch, "context": problem.context, "cache": problem.cache, "us": us}
        row |= {"hit": statistics.mean(blocks.hit()), "error": error, "expected_us": _expected(model, problem)}
        row |= limits.floors(blocks.bytes(row["hit"]), 0)
        row["launches"] = _of_two(added(timeline(graph)))
        rows.append(row)
        del blocks, graph
    return rows


def _of_two(launches: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Launches of two blocks, each the mean of those in its place; what zeroes memory counts to the one behind it."""
    waited = 0.0
    blocks: list[tuple[str, float]] = []
    for name, us in launches:
        waited += us
        if not any(word in name for word in ("FillFunctor", "Memset", "memset")):
            blocks.append((name, waited))
            waited = 0.0
    each, rest = divmod(len(blocks), BLOCKS * TURNS // 2)
    if rest:  # a profiler that lost some
        return []
    places = [blocks[at::each] for at in range(each)]
    return [{"kernel": place[0][0], "us": statistics.mean(us for _, us in place)} for place in places]


def _expected(model: Model, problem: AttentionProblem) -> float | None:
    """Microseconds of a block by the cost model; None on a target of which it knows no card."""
    arch = card.arch(0)
    if arch.name not in cards.CARDS:
        return None
    step = model_step.price(model, arch, problem.batch, problem.context, cache=problem.cache)
    layers = [one.us for one in step.launches if one.label not in ("last norm", "lm_head", "sampler")]
    return sum(layers) / model.layers


def bench(asked: Asked) -> dict[str, Any]:
    """Model, seed, and the rows of `bench_block`."""
    found = list(problems(asked.model, dict(asked.fields)))
    rows = bench_block(NAMED[asked.model], found, asked.ceilings, asked.seed)
    return {"model": asked.model, "seed": asked.seed, "rows": rows}


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Times of a block, then what each launch of a block with a window and of one without adds."""
    rows, model = payload["rows"], NAMED[payload["model"]]
    headers = [
        "BATCH",
        "CONTEXT",
        "CACHE",
        "EXPERTS HIT",
        "US A BLOCK",
        "FLOOR US",
        "OF FLOOR",
        "EXPECTED US",
        f"MS OF {model.layers}",
    ]
    cells = [
        (
            row["batch"], row["context"], row["cache"], f"{row['hit']:.1f}", f"{row['us']:.2f}",
            f"{row['floor_us']:.2f}", f"{row['floor_us'] / row['us']:.0%}",
            None if row["expected_us"] is None else f"{row['expected_us']:.2f}",
            f"{row['us'] * model.layers / 1e3:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    title = f"blocks of {payload['model']}, with a window and without, in one graph, seed {payload['seed']}"
    found = [Table(headers, cells, (*headers[:2], *headers[3:]), title)]
    for row in rows:
        if row["launches"]:
            added_us = [(one["kernel"], f"{one['us']:.2f}") for one in row["launches"]]
            said = f"what each launch of two blocks adds, {row['batch']} requests with {row['context']} tokens"
            found.append(Table(("LAUNCH", "ADDS US"), added_us, ("ADDS US",), said))
    return found
