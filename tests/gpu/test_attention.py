"""`jitmx.attention` on the card against float64: few new tokens and many, windows, caps, sinks, E4M3, any lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import jitmx

GATE = {torch.bfloat16: 4e-3, torch.float16: 4e-3, torch.float8_e4m3fn: 6e-3}  # relative L2, by type of the cache
DEVICE = "cuda"


@dataclass
class World:
    """A call of random requests.

    Attributes:
        lengths: tokens of each request with its new ones.
        news: new tokens of each request.
        group: query heads a KV head.
        layout: "tokens": heads of a token side by side, K and V of a head too; "heads": tokens of a head.
    """

    lengths: tuple[int, ...]
    news: tuple[int, ...]
    kv_heads: int = 2
    group: int = 8
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    layout: str = "tokens"
    rotary: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        requests, d = len(self.lengths), self.head_dim
        wide = max(1, *(-(-length // self.page) for length in self.lengths))
        pages = requests * wide + 1
        shape = (pages, self.kv_heads, self.page, 2 * d) if self.layout == "heads" else (
            pages, self.page, self.kv_heads, 2 * d
        )  # fmt: skip
        both = torch.randn(shape, device=DEVICE).to(self.cache)
        both = both.transpose(1, 2) if self.layout == "heads" else both
        self.k_cache, self.v_cache = both[..., :d], both[..., d:]
        self.table = torch.randperm(pages - 1, device=DEVICE).int().view(requests, wide) + 1
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        starts = [0, *itertools.accumulate(self.news)]
        self.starts = starts
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        tokens, heads = starts[-1], self.kv_heads * self.group
        qkv = torch.randn(tokens, (heads + 2 * self.kv_heads) * d, device=DEVICE).to(self.dtype)
        parts = (heads * d, self.kv_heads * d, self.kv_heads * d)
        self.q, self.k, self.v = (x.unflatten(-1, (-1, d)) for x in torch.split(qkv, parts, dim=-1))
        self.scales: dict[str, torch.Tensor] = {}
        if self.cache == torch.float8_e4m3fn:
            self.scales = {name: torch.rand(self.kv_heads, device=DEVICE) + 0.5 for name in ("k_scale", "v_scale")}
        self.rope = None
        if self.rotary:
            angles = torch.rand(max(self.lengths), self.rotary // 2, device=DEVICE) * 6.28
            self.rope = torch.cat([angles.cos(), angles.sin()], 1).to(self.dtype)

    def call(self, **more: Any) -> torch.Tensor:
        """The result, in memory that held NaN."""
        out = torch.full(self.q.shape, float("nan"), dtype=self.dtype, device=DEVICE)
        found: torch.Tensor = jitmx.attention(
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.table, self.seq_lens, self.query_start, out=out,
            max_query_len=max(self.news), max_seq_len=max(self.lengths), rope=self.rope, **self.scales, **more,
        )  # fmt: skip
        return found

    def _rotated(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if self.rope is None:
            return x
        cos, sin = self.rope[at].double()[:, None].chunk(2, dim=-1)
        half = self.rotary // 2
        a, b, rest = x[..., :half].double(), x[..., half : self.rotary].double(), x[..., self.rotary :].double()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(self.dtype)

    def wanted(
        self, window: int | None = None, soft_cap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same in float64, over keys and values as the cache keeps them."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for r, (length, new) in enumerate(zip(self.lengths, self.news, strict=True)):
            if length < new:
                continue
            rows, old = slice(self.starts[r], self.starts[r + 1]), length - new
            at = torch.arange(old, length, device=DEVICE)
            every = torch.arange(old, device=DEVICE)
            pages = self.table[r].long()[every // self.page]
            values = []
            for name, cache, fresh in (
                ("k_scale", self.k_cache, self._rotated(self.k[rows], at)), ("v_scale", self.v_cache, self.v[rows]),
            ):  # fmt: skip
                scale = self.scales.get(name)
                by = torch.ones(self.kv_heads, 1, device=DEVICE) if scale is None else scale[:, None]
                kept = (fresh.float() / by).to(self.cache) if scale is not None else fresh
                whole = torch.cat([cache[pages, every % self.page].double(), kept.double()])
                values.append((whole * by.double()).repeat_interleave(self.group, 1))
            q = self._rotated(self.q[rows], at).double()
            keys = torch.arange(length, device=DEVICE)
            for first in range(0, new, 256):  # rows at a time, for memory
                some = slice(first, min(first + 256, new))
                logits = torch.einsum("qhd,khd->hqk", q[some], values[0]) * self.head_dim**-0.5
                if soft_cap:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                seen = keys[None] <= at[some, None]
                if window:
                    seen &= at[some, None] - keys[None] < window
                logits = logits.masked_fill(~seen, float("-inf"))
                if sinks is not None:
                    joined = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
                    weights = torch.softmax(torch.cat([logits, joined], -1), -1)[..., :-1]
                else:
                    weights = torch.softmax(logits, -1)
                out[rows][some] = torch.einsum("hqk,khd->qhd", weights, values[1])
        return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2; NaN never passes."""
    return float(torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted))


def check(world: World, **asked: Any) -> None:
    wanted = world.wanted(**asked)
    found = error(world.call(**asked), wanted)
    assert found <= GATE[world.cache], f"{world} {asked}: relative L2 {found:.2e}"


RAGGED = (1, 17, 128, 129, 700, 4096)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 4096])
def test_few_new_tokens_are_within_the_gate(head_dim: int, group: int, window: int | None) -> None:
    world = World(RAGGED, (1,) * 6, group=group, head_dim=head_dim, rotary=head_dim, seed=group)
    for cap in (None, 30.0, 50.0):
        check(world, window=window, soft_cap=cap)


@pytest.mark.parametrize("layout", ["tokens", "heads"])
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_pages_and_layouts_are_within_the_gate(dtype: torch.dtype, cache: str, page: int, layout: str) -> None:
    kept = dtype if cache == "same" else torch.float8_e4m3fn
    for news in ((1,) * 6, (1, 8, 3, 1, 2, 4), (1, 17, 100, 1, 300, 8)):
        world = World(RAGGED, news, dtype=dtype, cache=kept, page=page, layout=layout, rotary=64)
        check(world)
        check(world, window=128)


@pytest.mark.parametrize("sink", [float("-inf"), -5.0, 0.0, 3.0, 20.0, 80.0])
def test_sinks_join_once_whatever_their_size(sink: float) -> None:
    for lengths, news in (((5, 600, 40000), (1, 1, 1)), ((64, 600), (64, 200))):
        world = World(lengths, news, rotary=64)
        sinks = torch.full((16,), sink, device=DEVICE, dtype=torch.bfloat16)
        sinks[3] = 1.0
        check(world, sinks=sinks)
        check(world, sinks=sinks.float(), window=128)


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 64])
def test_requests_of_any_lengths_share_the_grid(batch: int) -> None:
    lengths = torch.randint(1, 9000, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    lengths[0] = 131072 if batch < 16 else 30000
    check(World(tuple(lengths), (1,) * batch, kv_heads=8, rotary=64), sinks=torch.randn(64, device=DEVICE).bfloat16())


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6, 7, 8, 8192])
def test_every_number_of_new_tokens_is_within_the_gate(queries: int) -> None:
    world = World((queries + 3000, queries), (queries,) * 2, rotary=64)
    check(world)
    check(world, window=128)
    check(world, soft_cap=30.0)


def test_padding_is_zero_and_leaves_the_cache_alone() -> None:
    world = World((300, 0, 40), (1, 1, 1), rotary=64)
    before = world.k_cache.clone()
    found = world.call()
    assert not found[1].any() and error(found, world.wanted()) <= 4e-3
    changed = (world.k_cache != before).any(-1).any(-1).sum()
    assert int(changed) == 2  # tokens of the two requests


def test_a_tree_mask_has_its_rows_see_what_it_says() -> None:
    world = World((2048,), (4,), kv_heads=8, rotary=64)
    bits = torch.tensor([[0b0001], [0b0011], [0b0101], [0b1011]], dtype=torch.int32, device=DEVICE)
    found = world.call(mask=bits)
    chain = World((2048,), (4,), kv_heads=8, rotary=64)
    assert error(found[:2], chain.wanted()[:2]) <= 4e-3  # the first two are a chain
    assert error(found[2:3], chain.wanted()[2:3]) > 4e-3  # the third does not see the second


@pytest.mark.parametrize("case", ["one request", "many", "window", "prompts"])
def test_a_call_gives_the_same_bits_a_hundred_times_and_in_a_graph(case: str) -> None:
    made: dict[str, tuple[World, dict[str, Any]]] = {
        "one request": (World((5000,), (1,), kv_heads=8, rotary=64), {}),
        "many": (World(tuple(range(100, 6100, 375)), (1,) * 16, kv_heads=8, rotary=64), {}),
        "window": (World((5000, 77), (1, 1), kv_heads=8, rotary=64), {"window": 128}),
        "prompts": (World((500, 777, 1), (300, 777, 1), kv_heads=8, rotary=64), {}),
    }
    world, asked = made[case]
    first = world.call(**asked).clone()
    for _ in range(100):
        assert torch.equal(world.call(**asked), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = world.call(**asked)
    for _ in range(10):
        kept.fill_(float("nan"))
        graph.replay()
        assert torch.equal(kept, first)


def test_attention_sees_the_mask_that_the_launch_right_before_it_makes() -> None:
    """`pack_mask` lets what follows begin before it has waited itself, here for a long product."""
    rows, rounds = 8, 20
    world = World((300,), (rows,), rotary=64)
    trees = (torch.rand(rounds, rows, rows, device=DEVICE) < 0.5).tril() | torch.eye(rows, device=DEVICE).bool()
    large, out = torch.randn(8192, 8192, device=DEVICE).bfloat16(), torch.empty_like(world.q)
    words = torch.zeros(rounds, rows, 1, dtype=torch.int32, device=DEVICE)

    def attend(mask: torch.Tensor) -> None:
        jitmx.attention(
            world.q, world.k, world.v, world.k_cache, world.v_cache, world.table, world.seq_lens, world.query_start,
            out=out, max_query_len=rows, max_seq_len=300, rope=world.rope, mask=mask,
        )  # fmt: skip

    wanted = []
    for tree, packed in zip(trees, words, strict=True):
        packed.copy_(jitmx.pack_mask(tree))
        torch.cuda.synchronize()
        attend(packed)
        wanted.append(out.clone())
    for number in range(rounds):
        torch.mm(large, large)
        attend(jitmx.pack_mask(trees[number]))
        assert torch.equal(out, wanted[number]), number
