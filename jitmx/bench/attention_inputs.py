"""What `attention` is timed on: random caches that rotate past the L2, and the right answer for some tokens.

Pages lie in no order, all requests have the longest context, and every call reads pages that were read longest ago. A
call writes its new keys where those of the last call on the same pages were. In layers with a window only the pages
that it reaches are there; the block table has page 0 before them, as vLLM has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from jitmx.bench import timing
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.attention.reference import E4M3_MAX

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALES = 0.0625, 0.03125  # of E4M3 keys and values
SOFT_CAP = 30.0
SPREAD = 2.0  # deviation of logits, by that of q
_CHUNK = 1 << 26  # values that are drawn at once


@dataclass(frozen=True)
class Workload:
    """What one step of a decoder asks of a layer, and what it costs at the least.

    Attributes:
        problem: `context` tokens of each of `batch` requests, the last `queries` of them new.
    """

    problem: AttentionProblem

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.problem.batch * self.problem.queries

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.problem.kv_heads * self.problem.group

    @property
    def context(self) -> int:
        """Tokens of each request: at least its new ones; with a window, no more than tell of what lies before it."""
        problem = self.problem
        if not problem.window:
            return max(problem.context, problem.queries)
        return max(min(problem.context, 4 * (problem.window + problem.queries)), problem.queries)

    @property
    def seen(self) -> int:
        """Tokens of a request that its new ones see, themselves included."""
        problem = self.problem
        return min(self.context, problem.window + problem.queries - 1) if problem.window else self.context

    @property
    def first_page(self) -> int:
        """The first page of a request that a token sees."""
        return (self.context - self.seen) // self.problem.page_size

    @property
    def pages(self) -> int:
        """Pages of a request that are there."""
        return -(-self.context // self.problem.page_size) - self.first_page

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in the cache."""
        problem = self.problem
        return 2 * problem.kv_heads * problem.head_dim * (1 if problem.cache == "e4m3" else 2)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages that a call reads."""
        return self.problem.batch * self.pages * self.problem.page_size * self.token_bytes

    @property
    def bytes(self) -> int:
        """Bytes that a call moves at the least: keys and values that are seen, q, new keys and values, the output."""
        problem = self.problem
        new = self.tokens * problem.head_dim * 2 * (2 * self.heads + 2 * problem.kv_heads * problem.append)
        return problem.batch * self.seen * self.token_bytes + new

    @property
    def flops(self) -> int:
        """Operations of both products over the keys that are seen; causal, also where a mask says less."""
        problem, old = self.problem, self.context - self.problem.queries
        most = problem.window or self.context
        whole = max(0, min(problem.queries, most - old))  # tokens that see all before them
        seen = whole * old + whole * (whole + 1) // 2 + (problem.queries - whole) * most
        return 4 * problem.head_dim * self.heads * problem.batch * seen

    @property
    def copies(self) -> int:
        """How many caches take turns, so that together they exceed the L2 several times."""
        return timing.copies_past_l2(self.cache_bytes)

    @property
    def memory(self) -> int:
        """Bytes of device memory that it takes, about."""
        buffers = 6 * self.tokens * (self.heads + 2 * self.problem.kv_heads) * self.problem.head_dim * 2
        return self.copies * self.cache_bytes + buffers + (1 << 28)


class Layer:
    """Caches that rotate, and all else that calls of a workload take.

    Attributes:
        work: what is asked.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim].
        tables, slots: of each copy, int32 [batch, pages a request] and int64 [tokens].
        seq_lens, starts, positions: of all calls.
        sinks, rope, mask, scales: what the problem has of these, or None; scales of keys and of values.
        window, soft_cap: likewise.
    """

    def __init__(self, work: Workload, seed: int = 0, device: str = "cuda") -> None:
        problem, generator = work.problem, torch.Generator(device).manual_seed(seed)
        batch, size, width = problem.batch, problem.page_size, work.first_page + work.pages
        self.work, self.device, self.dtype = work, torch.device(device), TYPES[problem.dtype]
        count = work.copies * batch * work.pages
        stored = torch.float8_e4m3fn if problem.cache == "e4m3" else self.dtype
        # As vLLM has them: tokens of a head side by side, K and V of a token too.
        both = torch.empty(count + 1, problem.kv_heads, size, 2 * problem.head_dim, dtype=stored, device=device)
        self.k_cache, self.v_cache = both.transpose(1, 2).split(problem.head_dim, -1)
        self.scales = None if problem.cache == "same" else tuple(torch.full((1,), x, device=device) for x in SCALES)
        for cache, scale in zip((self.k_cache, self.v_cache), SCALES, strict=True):
            _draw(cache, scale, generator)
        order = 1 + torch.randperm(count, generator=generator, device=device).to(torch.int32)
        tables = torch.zeros(work.copies, batch, width, dtype=torch.int32, device=device)
        tables[:, :, work.first_page :] = order.view(work.copies, batch, work.pages)
        self.tables = list(tables)
        at = torch.arange(work.context - problem.queries, work.context, device=device)
        places = (tables[:, :, at // size].long() * size + at % size).view(work.copies, work.tokens)
        self.slots = list(places)
        self.seq_lens = torch.full((batch,), work.context, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, work.tokens + 1, problem.queries, dtype=torch.int32, device=device)
        self.positions = at.repeat(batch)
        self.window = problem.window or None
        self.soft_cap = SOFT_CAP if problem.soft_cap else None
        self.sinks = None
        if problem.sinks != "no_sinks":
            kind = TYPES[problem.sinks.removeprefix("sinks_")]
            # Where a sink takes about as much as all keys do, it is seen if one is left out.
            drawn = torch.randn(work.heads, generator=generator, device=device)
            self.sinks = (drawn + math.log(work.seen) + SPREAD**2 / 2).to(kind)
        self.rope = None if problem.rope == "no_rope" else _angles(problem, work.context).to(device)
        self.mask = _tree(problem).repeat(batch, 1).to(device) if problem.mask else None

    def __len__(self) -> int:
        """Copies."""
        return len(self.tables)

    @property
    def elements(self) -> int:
        """Values of q, new keys and new values of a call, one behind the other."""
        work = self.work
        return work.tokens * (work.heads + 2 * work.problem.kv_heads) * work.problem.head_dim

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, new keys and new values [tokens, heads, head_dim], as views of a flat buffer."""
        work, problem = self.work, self.work.problem
        heads = (work.heads, problem.kv_heads, problem.kv_heads)
        parts = x[: self.elements].split([work.tokens * count * problem.head_dim for count in heads])
        q, k, v = (
            part.view(work.tokens, count, problem.head_dim) for part, count in zip(parts, heads, strict=True)
        )  # fmt: skip
        return q, k, v

    def out(self, y: torch.Tensor) -> torch.Tensor:
        """The output [tokens, heads, head_dim] as a view of a flat buffer, where the next call reads q."""
        return self.split(y)[0]

    def inputs(self, seed: int = 1) -> torch.Tensor:
        """q, new keys and new values at random in a flat buffer."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(self.elements, generator=generator, device=self.device)
        self.split(x)[0].mul_(SPREAD)
        return x.to(self.dtype)

    def fill(self, copy: int, x: torch.Tensor) -> None:
        """Write new keys and values of a flat buffer to the cache, as a call with such would have."""
        _, k, v = self.split(x)
        for cache, stored in zip((self.k_cache, self.v_cache), self.stored(k, v), strict=True):
            _bytes(cache)[self._places(copy)] = _bytes(stored)

    def written(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache has where new keys and values go."""
        k, v = (_bytes(x)[self._places(copy)].view(x.dtype) for x in (self.k_cache, self.v_cache))
        return k, v

    def _places(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of the new tokens, and places in them."""
        size = self.work.problem.page_size
        return self.slots[copy] // size, self.slots[copy] % size

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys, rotated, and new values as the cache has them."""
        k = self.rotated(k)
        if self.scales is None:
            return k, v
        scaled = ((x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX) for x, scale in zip((k, v), self.scales, strict=True))
        first, second = (x.to(torch.float8_e4m3fn) for x in scaled)
        return first, second

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim] by the angles of its positions, rounded to its type."""
        if self.rope is None:
            return x
        rotary = self.rope.shape[1]
        cos, sin = self.rope[self.positions].double()[:, None].chunk(2, -1)
        halves = self.work.problem.rope == "neox"
        first = slice(rotary // 2) if halves else slice(0, rotary, 2)
        second = slice(rotary // 2, rotary) if halves else slice(1, rotary, 2)
        a, b, out = x[..., first].double(), x[..., second].double(), x.clone()
        out[..., first] = (a * cos - b * sin).to(x.dtype)
        out[..., second] = (b * cos + a * sin).to(x.dtype)
        return out

    def wanted(self, copy: int, x: torch.Tensor, request: int, tokens: torch.Tensor, *, sinks: bool = True) -> Any:
        """The right output [tokens, heads, head_dim] in float32 for some of a request's new tokens, by their place.

        What the cache has of new tokens is not looked at: they are those of x.
        """
        work, problem = self.work, self.work.problem
        own = slice(request * problem.queries, (request + 1) * problem.queries)
        q, k, v = self.split(x)
        q, new = self.rotated(q)[own][tokens], [part[own] for part in self.stored(k, v)]
        old, first = work.context - problem.queries, work.first_page * problem.page_size
        pages = self.tables[copy][request][work.first_page :].long()
        keys, values = (
            torch.cat([_bytes(cache)[pages].flatten(0, 1)[: old - first], _bytes(part)]).view(cache.dtype).float()
            for cache, part in zip((self.k_cache, self.v_cache), new, strict=True)
        )
        if self.scales is not None:
            keys, values = keys * self.scales[0], values * self.scales[1]
        logits = torch.einsum("qhgd,khd->hgqk", q.float().unflatten(1, (problem.kv_heads, -1)), keys)
        logits *= problem.head_dim**-0.5
        if self.soft_cap:
            logits = self.soft_cap * (logits / self.soft_cap).tanh()
        logits = logits.masked_fill(~self.visible(first, tokens), -math.inf)
        most = logits.amax(-1, keepdim=True)
        sink = None
        if self.sinks is not None and sinks:
            sink = self.sinks.float().view(problem.kv_heads, -1, 1, 1)
            most = torch.maximum(most, sink)
        shares = (logits - most).exp()
        total = shares.sum(-1, keepdim=True) + (0 if sink is None else (sink - most).exp())
        return torch.einsum("hgqk,khd->qhgd", shares / total, values).flatten(1, 2)

    def visible(self, first: int, tokens: torch.Tensor) -> torch.Tensor:
        """Which keys from the place `first` on new tokens attend to, [tokens, keys]."""
        work, problem = self.work, self.work.problem
        old = work.context - problem.queries
        at, keys = old + tokens[:, None], torch.arange(first, work.context, device=self.device)
        allowed = keys <= at
        if self.mask is not None:
            words = self.mask[: problem.queries][tokens].long() & 0xFFFFFFFF
            places = torch.arange(problem.queries, device=self.device)
            bits = words[:, places // 32] >> (places % 32)
            allowed[:, old - first :] = (bits & 1).bool()
        return allowed & (at - keys < problem.window) if problem.window else allowed


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, which torch can gather; others as they are."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def _draw(cache: torch.Tensor, scale: float, generator: torch.Generator) -> None:
    """Fill a cache with normal values of deviation 1, divided by the scale of E4M3."""
    factor = 1 / scale if cache.dtype is torch.float8_e4m3fn else 1.0
    for part in cache.split(max(1, _CHUNK // cache[0].numel())):
        drawn = torch.randn(part.shape, generator=generator, device=cache.device).mul_(factor)
        part.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX).to(cache.dtype))


def _angles(problem: AttentionProblem, positions: int) -> torch.Tensor:
    """Cosines, then sines, [positions, rotary]."""
    rotary = problem.rotary or problem.head_dim
    rates = 150000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1).to(TYPES[problem.table.removeprefix("table_")])


def _tree(problem: AttentionProblem) -> torch.Tensor:
    """The mask of a binary tree of new tokens, int32 [queries, words]: a token sees its ancestors and itself."""
    rows = []
    for token in range(problem.queries):
        bits, at = 1 << token, token
        while at:
            at = (at - 1) // 2
            bits |= 1 << at
        rows.append([(bits >> 32 * word) & 0xFFFFFFFF for word in range(problem.mask // 32)])
    words = torch.tensor(rows, dtype=torch.int64)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
