"""Attention that vLLM hands to jitmx: its own metadata and cache, simulated kernels, and transformers beside them."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionMetadataBuilder
from vllm_world import error

HEADS, KV, DIM = 4, 2, 64
GATE = 6e-3
NULL = 0  # vLLM's block that no request owns
SINKS = torch.tensor([0.5, -1.0, 2.0, -torch.inf])


@dataclass
class Batch:
    """Requests of a step: tokens in the cache and new ones.

    Attributes:
        requests: (old, new) of each.
        rows, slots_of: requests and tokens that a graph pads to.
        uniform: whether new tokens are said to be as many, for a graph of decodes.
    """

    requests: Sequence[tuple[int, int]]
    pad_requests: int = 0
    pad_tokens: int = 0
    null_below: int = 0
    max_query_len: int | None = None
    max_seq_len: int | None = None
    capture: bool = False

    @property
    def news(self) -> list[int]:
        return [new for _, new in self.requests]

    @property
    def tokens(self) -> int:
        return sum(self.news)


@dataclass
class Served:
    """A layer of vLLM's with a cache, and what it should have made of its steps.

    Attributes:
        keys, values: of each request, as the cache keeps them, float32 [tokens, kv_heads, head_dim].
    """

    layer: Any
    group: Any
    caches: Any
    config: Any
    page_size: int
    table: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def quantized(self) -> bool:
        return bool(self.layer.kv_cache_dtype.startswith("fp8"))

    def kept(self, new: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """New keys or values as the cache should keep them."""
        if not self.quantized:
            return new.float()
        return (new.float() / scale).to(torch.float8_e4m3fn).float() * scale

    def at(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache has of a request, [tokens, kv_heads, head_dim], as bytes or bf16."""
        tokens = torch.arange(len(self.keys[request]))
        pages, places = self.table[request][tokens // self.page_size].long(), tokens % self.page_size
        found = self.layer.kv_cache[pages, :, places]
        return found[..., :DIM], found[..., DIM:]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def fill(self, batch: Batch) -> None:
        """Have every request's old tokens in the cache, written by vLLM's rule: page x page_size + place."""
        for request, (old, _) in enumerate(batch.requests):
            k, v = self.random(old, KV, DIM), self.random(old, KV, DIM)
            kept = [self.kept(new, scale) for new, scale in ((k, self.layer._k_scale), (v, self.layer._v_scale))]
            self.keys.append(kept[0])
            self.values.append(kept[1])
            scales = (self.layer._k_scale, self.layer._v_scale) if self.quantized else (torch.ones(()), torch.ones(()))
            stored = torch.float8_e4m3fn if self.quantized else torch.bfloat16
            both = torch.cat([(x / scale).to(stored) for x, scale in zip(kept, scales, strict=True)], dim=2)
            tokens = torch.arange(old)
            pages, places = self.table[request][tokens // self.page_size].long(), tokens % self.page_size
            cache = self.layer.kv_cache
            if self.quantized:
                cache.view(torch.uint8)[pages, :, places] = both.view(torch.uint8)
            else:
                cache[pages, :, places] = both

    def step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One step through vLLM's layer: what came out for tokens of requests, and what should have."""
        tokens, rows = batch.tokens + batch.pad_tokens, len(batch.requests) + batch.pad_requests
        qkv = self.random(tokens, (HEADS + 2 * KV) * DIM)
        q, k, v = qkv.split([HEADS * DIM, KV * DIM, KV * DIM], dim=1)
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = batch.tokens
        starts[1 : len(batch.requests) + 1] = torch.tensor(batch.news).cumsum(0)
        lengths, slots = torch.zeros(rows, dtype=torch.int32), torch.full((tokens,), -1)
        table = torch.full((rows, self.table.shape[1]), NULL, dtype=torch.int32)
        for request, (old, new) in enumerate(batch.requests):
            lengths[request] = old + new
            used = -(-(old + new) // self.page_size)
            table[request, :used] = self.table[request, :used]
            table[request, : max(0, old - batch.null_below) // self.page_size if batch.null_below else 0] = NULL
            at = torch.arange(old, old + new)
            own = self.table[request][at // self.page_size].long() * self.page_size + at % self.page_size
            slots[starts[request] : starts[request + 1]] = own
        most, name = max(batch.news), self.layer.layer_name
        metadata = build_attn_metadata(
            [[self.group]], rows, batch.tokens, starts, starts.clone(), batch.max_query_len or most, lengths,
            batch.max_seq_len or int(lengths.max()), [table], slots[None], self.caches,
            for_cudagraph_capture=batch.capture,
        )  # fmt: skip
        context = set_forward_context(metadata, self.config, num_tokens=tokens, slot_mapping={name: slots})
        with vllm_world.world(), torch.no_grad(), context:
            found = self.layer(q, k, v)
        right = self._expected(batch, *(x.unflatten(1, (-1, DIM)) for x in (q, k, v)), starts)
        return found[: batch.tokens].unflatten(1, (HEADS, DIM)), right

    def _expected(
        self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        out = []
        impl = self.layer.impl
        for request, (old, new) in enumerate(batch.requests):
            own = slice(int(starts[request]), int(starts[request + 1]))
            assert len(self.keys[request]) == old
            self.keys[request] = torch.cat([self.keys[request], self.kept(k[own], self.layer._k_scale)])
            self.values[request] = torch.cat([self.values[request], self.kept(v[own], self.layer._v_scale)])
            apart = torch.arange(old, old + new)[:, None] - torch.arange(old + new)[None]
            seen = (apart >= 0) & (apart < (impl.window or old + new + 1))
            module = torch.nn.Module()
            module.num_key_value_groups = HEADS // KV
            sinks = torch.full((HEADS,), -1e30) if impl.sinks is None else impl.sinks.float().clamp_min(-1e30)
            module.sinks = torch.nn.Parameter(sinks.double(), requires_grad=False)
            given = (x.double().transpose(0, 1)[None] for x in (q[own], self.keys[request], self.values[request]))
            bias = torch.where(seen, 0.0, torch.finfo(torch.float64).min).double()[None, None]
            found, _ = eager_attention_forward(module.eval(), *given, bias, impl.scale)
            out.append(found[0])
        return torch.cat(out)


@contextlib.contextmanager
def served(
    host: Any, batch: Batch, *, target: str = "sm_90a", window: int | None = None, sinks: bool = True,
    layout: str = "LBHNC", pages: int = 16, more: int = 4, **engine: Any,
) -> Iterator[tuple[Served, simulated_card.Simulated]]:  # fmt: skip
    """A layer with jitmx's backend, its cache allocated by vLLM, on a simulated card."""
    options = {"hf_overrides": {"head_dim": DIM}, "block_size": pages, "max_num_batched_tokens": 256} | engine
    config = host.config(max_model_len=256, **options)
    name = "model.layers.1.attn.attn"
    with vllm_world.world(), set_current_vllm_config(config), simulated_card.on_cpu(target) as card:
        made = torch.nn.Parameter(SINKS.bfloat16(), requires_grad=False) if sinks else None
        layer = Attention(
            HEADS, DIM, DIM**-0.5, num_kv_heads=KV, cache_config=config.cache_config, prefix=name, sinks=made,
            per_layer_sliding_window=window, attn_backend=JitmxAttentionBackend,
        )  # fmt: skip
        if layer.kv_cache_dtype.startswith("fp8"):
            layer._k_scale.fill_(0.5)
            layer._v_scale.fill_(1.25)
        spec = layer.get_kv_cache_spec(config)
        width = -(-256 // spec.block_size)
        requests = len(batch.requests) + more
        blocks, page = requests * width + 1, spec.page_size_bytes
        tensor = KVCacheTensor(size=blocks * page, layers=[name], layer_stride=blocks * page, block_stride=page)
        caches = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec([name], spec)])
        layer.kv_cache = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[layout])[name]
        layer.kv_cache.view(torch.uint8).fill_(0)
        group = AttentionGroup(JitmxAttentionBackend, [name], spec, 0)
        group.create_metadata_builders(config, torch.device("cpu"), spec.block_size)
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(3)).int() + 1
        table = order.view(requests, width)
        made_ = Served(layer, group, caches, config, spec.block_size, table)
        made_.fill(batch)
        yield made_, card


BATCHES = {
    "decodes": Batch([(37, 1), (0, 1), (100, 1)]),
    "a prompt": Batch([(0, 40)]),
    "a chunk of a prompt": Batch([(48, 33)]),
    "decodes beside chunks": Batch([(20, 1), (130, 1), (16, 21), (0, 35)]),
    "drafts to be verified": Batch([(37, 4), (64, 4), (5, 4)]),
    "drafts of several lengths": Batch([(37, 4), (64, 1), (5, 2)]),
    "a graph of decodes, padded": Batch(
        [(37, 1), (90, 1)], pad_requests=2, pad_tokens=2, max_query_len=1, max_seq_len=256
    ),
    "a graph of drafts, padded": Batch([(37, 3), (8, 3)], pad_requests=1, pad_tokens=3, max_seq_len=256),
    "a graph of a mixed batch": Batch([(37, 1), (8, 20)], pad_requests=3, pad_tokens=11, max_query_len=32),
    "a step padded to a piecewise graph": Batch([(3, 5)], pad_tokens=3),
}


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_comes_out_as_transformers_make_it_and_the_cache_has_exactly_its_keys(
    host: Any, name: str, window: int | None
) -> None:
    batch = BATCHES[name]
    with served(host, batch, window=window) as (made, card):
        found, right = made.step(batch)
        assert {kernel.partition(".")[0] for kernel in card.kernels} == {"attention"}
        assert error(found, right) < GATE
        owned = torch.zeros(made.layer.kv_cache.shape[:3:2], dtype=torch.bool)
        for request in range(len(batch.requests)):
            for kept, wanted in zip(made.at(request), (made.keys[request], made.values[request]), strict=True):
                assert torch.equal(kept, wanted.bfloat16())
            tokens = torch.arange(len(made.keys[request]))
            owned[made.table[request][tokens // made.page_size].long(), tokens % made.page_size] = True
        assert not made.layer.kv_cache.transpose(1, 2)[~owned].any()  # and nothing else is written
