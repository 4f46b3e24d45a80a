"""Attention that vLLM hands to jitmx: its own metadata and cache, simulated kernels, and transformers beside them."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from jitmx.errors import InputError
from jitmx.serving.attention import GRAPH_CONTEXT
from jitmx.serving.needed import variants
from jitmx.vllm import facts
from jitmx.vllm.attention import JitmxAttentionBackend
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
        pad_requests, pad_tokens: that a graph has beyond them.
        null_below: window; pages that no new token attends to are vLLM's null block then.
        max_query_len, max_seq_len: upper bounds, where they are not those of the requests.
        dummy: as vLLM captures graphs and fills ranks: every page is the null block, and nothing has a slot.
    """

    requests: Sequence[tuple[int, int]]
    pad_requests: int = 0
    pad_tokens: int = 0
    null_below: int = 0
    max_query_len: int | None = None
    max_seq_len: int | None = None
    dummy: bool = False

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

    def step(self, batch: Batch, *, slots: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """One step through vLLM's layer: what came out for tokens of requests, and what should have.

        Args:
            slots: whether it is told where new tokens go.
        """
        tokens, rows = batch.tokens + batch.pad_tokens, len(batch.requests) + batch.pad_requests
        qkv = self.random(tokens, (HEADS + 2 * KV) * DIM)
        q, k, v = qkv.split([HEADS * DIM, KV * DIM, KV * DIM], dim=1)
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = batch.tokens
        starts[1 : len(batch.requests) + 1] = torch.tensor(batch.news).cumsum(0)
        lengths, places = torch.zeros(rows, dtype=torch.int32), torch.full((tokens,), -1)
        table = torch.full((rows, self.table.shape[1]), NULL, dtype=torch.int32)
        for request, (old, new) in enumerate(batch.requests):
            lengths[request] = old + new
            used = -(-(old + new) // self.page_size)
            table[request, :used] = self.table[request, :used]
            unseen = max(0, old - batch.null_below + 1) // self.page_size if batch.null_below else 0
            table[request, :unseen] = NULL
            at = torch.arange(old, old + new)
            own = self.table[request][at // self.page_size].long() * self.page_size + at % self.page_size
            if not batch.dummy:
                places[starts[request] : starts[request + 1]] = own
        most, name = max(batch.news), self.layer.layer_name
        if batch.dummy:
            table.fill_(NULL)
        metadata = build_attn_metadata(
            [[self.group]], rows, batch.tokens, starts, starts.clone(), batch.max_query_len or most, lengths,
            batch.max_seq_len or int(lengths.max()), [table], places[None], self.caches,
        )  # fmt: skip
        if not slots:
            metadata = {layer: dataclasses.replace(one, slot_mapping=None) for layer, one in metadata.items()}
        context = set_forward_context(metadata, self.config, num_tokens=tokens, slot_mapping={name: places})
        with vllm_world.world(), torch.no_grad(), context:
            found = self.layer(q, k, v)
        right = self._expected(batch, *(x.unflatten(1, (-1, DIM)) for x in (q, k, v)), starts)
        return found[: batch.tokens].unflatten(1, (HEADS, DIM)), right

    def _expected(
        self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        out = []
        for request, (old, new) in enumerate(batch.requests):
            own = slice(int(starts[request]), int(starts[request + 1]))
            assert len(self.keys[request]) == old
            self.keys[request] = torch.cat([self.keys[request], self.kept(k[own], self.layer._k_scale)])
            self.values[request] = torch.cat([self.values[request], self.kept(v[own], self.layer._v_scale)])
            apart = torch.arange(old, old + new)[:, None] - torch.arange(old + new)[None]
            seen = (apart >= 0) & (apart < (self.layer.sliding_window or old + new + 1))
            module = torch.nn.Module()
            module.num_key_value_groups = HEADS // KV
            sinks = (SINKS if self.layer.has_sink else torch.full((HEADS,), -torch.inf)).clamp_min(-1e30)
            module.sinks = torch.nn.Parameter(sinks.double(), requires_grad=False)
            given = (x.double().transpose(0, 1)[None] for x in (q[own], self.keys[request], self.values[request]))
            bias = torch.where(seen, 0.0, torch.finfo(torch.float64).min).double()[None, None]
            found, _ = eager_attention_forward(module.eval(), *given, bias, DIM**-0.5)
            out.append(found[0])
        return torch.cat(out)


@contextlib.contextmanager
def served(
    host: Any, batch: Batch, *, target: str = "sm_90a", window: int | None = None, sinks: bool = True,
    layout: str = "LBHNC", pages: int = 16, more: int = 4, given: Any = None, **engine: Any,
) -> Iterator[tuple[Served, simulated_card.Simulated]]:  # fmt: skip
    """A layer with jitmx's backend, its cache allocated by vLLM, on a simulated card."""
    options = {"hf_overrides": {"head_dim": DIM}, "block_size": pages, "max_num_batched_tokens": 256} | engine
    config = host.config(max_model_len=256, **options)
    name = "model.layers.1.attn.attn"
    with (
        vllm_world.world(), set_current_vllm_config(config), simulated_card.on_cpu(target) as card,
        pytest.MonkeyPatch.context() as patch,
    ):  # fmt: skip
        patch.setattr(facts, "target", lambda: (card.target, ""))
        made = torch.nn.Parameter(SINKS.bfloat16(), requires_grad=False) if sinks else None
        layer = Attention(
            HEADS, DIM, DIM**-0.5, num_kv_heads=KV, cache_config=config.cache_config, prefix=name, sinks=made,
            per_layer_sliding_window=window, attn_backend=JitmxAttentionBackend, **(given or {}),
        )  # fmt: skip
        if layer.kv_cache_dtype.startswith("fp8"):
            layer._k_scale.fill_(0.5)
            layer._v_scale.fill_(1.25)
        spec = layer.get_kv_cache_spec(config)
        width = -(-256 // spec.block_size)
        requests = len(batch.requests) + more
        blocks, page = requests * width + 1, spec.page_size_bytes
        strides = compute_layout_strides(spec, blocks, 1, KVCacheLayout[layout])
        tensor = KVCacheTensor(size=blocks * page, layers=[name], layer_stride=strides[0], block_stride=strides[1])
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
        (needed,) = host.warmed
        ready = {variant.identity for variant in variants(needed, card.multiprocessors(0))}
        assert {variant.identity for variant in card.launched} <= ready  # the builder had every kernel loaded


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


def check_cache(made: Served, requests: int) -> None:
    """The cache has the keys and values of these requests to the bit, and nothing else."""
    cache = made.layer.kv_cache
    owned = torch.zeros(cache.shape[:3:2], dtype=torch.bool)
    for request in range(requests):
        scales = made.layer._k_scale, made.layer._v_scale
        for kept, wanted, scale in zip(made.at(request), (made.keys, made.values), scales, strict=True):
            if made.quantized:
                wanted_bytes = (wanted[request] / scale).to(torch.float8_e4m3fn).view(torch.uint8)
                assert torch.equal(kept.view(torch.uint8), wanted_bytes)
            else:
                assert torch.equal(kept, wanted[request].bfloat16())
        tokens = torch.arange(len(made.keys[request]))
        owned[made.table[request][tokens // made.page_size].long(), tokens % made.page_size] = True
    assert not cache.view(torch.uint8).transpose(1, 2)[~owned].any()


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_comes_out_as_transformers_make_it_and_the_cache_has_exactly_its_keys(
    host: Any, name: str, window: int | None
) -> None:
    batch = BATCHES[name]
    with served(host, batch, window=window, target="sm_121a") as (made, card):
        found, right = made.step(batch)
        assert {kernel.partition(".")[0] for kernel in card.kernels} == {"attention"}
        few = max(batch.max_query_len or 0, *batch.news) <= 8
        assert card.kernels == ["attention.decode"] or (not few and card.kernels[0] == "attention.append")
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))


@pytest.mark.parametrize("name", ["decodes", "decodes beside chunks", "a graph of drafts, padded"])
def test_on_sm_90_they_come_out_the_same(host: Any, name: str) -> None:
    batch = BATCHES[name]
    with served(host, batch) as (made, _):
        found, right = made.step(batch)
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))


@pytest.mark.parametrize("layout", [one.name for one in KVCacheLayout])
def test_every_layout_of_vllms_caches_is_served(host: Any, layout: str) -> None:
    batch = BATCHES["drafts of several lengths"]
    with served(host, batch, target="sm_121a", layout=layout) as (made, _):
        found, right = made.step(batch)
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))


@pytest.mark.parametrize("pages", [32, 48, 128])
def test_pages_of_other_sizes_are_served(host: Any, pages: int) -> None:
    batch = BATCHES["drafts of several lengths"]
    with served(host, batch, target="sm_121a", pages=pages) as (made, card):
        found, right = made.step(batch)
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))
        assert [variant.knobs.as_dict()["page_size"] for variant in card.launched] == [pages]


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["decodes", "decodes beside chunks"])
def test_an_fp8_cache_has_new_tokens_by_its_scales_and_they_count_as_it_keeps_them(
    host: Any, name: str, dtype: str
) -> None:
    batch = BATCHES[name]
    with served(host, batch, target="sm_121a", kv_cache_dtype=dtype) as (made, _):
        found, right = made.step(batch)
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))


def test_layers_that_skip_fp8_keep_the_type_of_their_keys(host: Any) -> None:
    batch = BATCHES["decodes"]
    engine = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]}
    with served(host, batch, target="sm_121a", window=24, **engine) as (made, card):
        found, right = made.step(batch)
        assert error(found, right) < GATE
        assert [variant.knobs.as_dict()["cache"] for variant in card.launched] == ["same"]


def test_pages_below_a_window_may_be_the_null_block_whatever_it_holds(host: Any) -> None:
    batch = Batch([(100, 1), (70, 3)], null_below=24)
    with served(host, batch, target="sm_121a", window=24) as (made, _):
        made.layer.kv_cache[NULL] = float("nan")
        found, right = made.step(batch)
        assert error(found, right) < GATE


def test_a_layer_without_sinks_with_a_cap_is_served(host: Any) -> None:
    batch = BATCHES["decodes"]
    with served(host, batch, target="sm_121a", sinks=False, given={"logits_soft_cap": 1e4}) as (made, card):
        found, right = made.step(batch)
        assert error(found, right) < GATE  # a cap far above every logit changes nothing
        knobs = card.launched[0].knobs.as_dict()
        assert (knobs["sinks"], knobs["soft_cap"]) == ("no_sinks", True)


def test_requests_go_on_from_chunk_to_chunk_and_from_token_to_token(host: Any) -> None:
    first = Batch([(0, 20), (0, 1)])
    with served(host, first, target="sm_121a") as (made, _):
        for batch in (first, Batch([(20, 21), (1, 1)]), Batch([(41, 1), (2, 1)]), Batch([(42, 1), (3, 1)])):
            found, right = made.step(batch)
            assert error(found, right) < GATE
        check_cache(made, 2)


def heads_side_by_side(cache: torch.Tensor) -> torch.Tensor:
    """The same tensor, with the heads of a token one behind the other."""
    kept, (_, heads, _, width) = cache.clone(), cache.shape
    return cache.as_strided_(cache.shape, (cache.stride(0), width, heads * width, 1)).copy_(kept)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another": lambda cache: cache.clone(),
    "its memory elsewhere": lambda cache: cache.set_(cache.clone()),  # type: ignore[call-overload]
    "its strides": heads_side_by_side,
    "other pages": lambda cache: torch.cat([cache, cache])[: len(cache) - 1],
    "another layout": lambda cache: cache.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_is_replaced_between_steps_is_written_and_read_as_it_is_now(host: Any, change: str) -> None:
    batch = Batch([(37, 1), (50, 1)])
    with served(host, batch, target="sm_121a") as (made, _):
        olds, layer = [37, 50], made.layer
        for _ in range(2):
            found, right = made.step(Batch([(old, 1) for old in olds]))
            assert error(found, right) < GATE
            olds = [old + 1 for old in olds]
            layer.kv_cache = CHANGES[change](layer.kv_cache)
        found, right = made.step(Batch([(old, 1) for old in olds]))
        assert error(found, right) < GATE
        check_cache(made, 2)


def test_a_layer_holds_no_cache_that_vllm_let_go_of(host: Any) -> None:
    batch = Batch([(37, 1)])
    with served(host, batch, target="sm_121a") as (made, _):
        made.step(batch)
        assert made.layer.impl._cache is not None
        made.layer.kv_cache = torch.empty(0)
        assert made.layer.impl._cache is None


def test_tokens_after_rejected_drafts_take_their_places(host: Any) -> None:
    first = Batch([(30, 4)])
    with served(host, first, target="sm_121a") as (made, _):
        made.step(first)
        for kept in (made.keys, made.values):
            kept[0] = kept[0][:32]  # one draft of three was right
        found, right = made.step(Batch([(32, 4)]))
        assert error(found, right) < GATE
        check_cache(made, 1)


@pytest.mark.parametrize("name", ["decodes", "a graph of decodes, padded", "decodes beside chunks"])
def test_without_slots_tokens_go_where_the_block_table_has_them(host: Any, name: str) -> None:
    """What a graph pads a batch with has no tokens, and goes nowhere."""
    batch = BATCHES[name]
    with served(host, batch, window=24) as (made, _):
        found, right = made.step(batch, slots=False)
        assert error(found, right) < GATE
        check_cache(made, len(batch.requests))


def test_requests_may_share_the_pages_of_a_prefix(host: Any) -> None:
    batch = Batch([(32, 1), (32, 18)])
    with served(host, batch, target="sm_121a") as (made, _):
        made.table[1, :2] = made.table[0, :2]
        for kept in (made.keys, made.values):
            kept[1] = kept[0].clone()
        found, right = made.step(batch)
        assert error(found, right) < GATE


def test_what_the_host_knows_of_lengths_is_a_bound_and_the_device_decides(host: Any) -> None:
    batch = Batch([(37, 2), (64, 3)], max_query_len=4, max_seq_len=256)
    with served(host, batch, target="sm_121a") as (made, _):
        found, right = made.step(batch)
        assert error(found, right) < GATE


def test_decodes_before_a_long_chunk_are_a_call_of_their_own_but_for_a_graph(host: Any) -> None:
    batch = Batch([(20, 1), (5, 2), (16, 70)], pad_tokens=2)
    with served(host, batch, target="sm_121a") as (made, card):
        found, right = made.step(batch)
        assert card.kernels == ["attention.decode", "attention.append", "attention.prefill"]
        assert error(found, right) < GATE
        check_cache(made, 3)
        builder = made.group.get_metadata_builder(0)
        starts, lengths = torch.tensor([0, 1, 3, 73], dtype=torch.int32), torch.tensor([21, 7, 86], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=3, num_actual_tokens=73,
            max_query_len=70, max_seq_len=86, block_table_tensor=torch.zeros(3, 16).int(), slot_mapping=torch.zeros(73),
        )  # fmt: skip
        apart = builder.build(0, common)
        assert [part.query_start_loc.tolist() for part in apart.parts] == [[0, 1, 3], [0, 70]]
        captured = builder.build_for_cudagraph_capture(common)
        assert len(captured.parts) == 1 and captured.max_seq_len == 86
        wide = torch.zeros(3, 2 * GRAPH_CONTEXT // builder.page_size).int()
        longer = common.replace(block_table_tensor=wide, max_seq_len=2 * GRAPH_CONTEXT)
        assert builder.build(0, longer).max_seq_len == longer.max_seq_len
        assert builder.build_for_cudagraph_capture(longer).max_seq_len == GRAPH_CONTEXT
        assert len(builder.build(0, common.replace(max_query_len=64)).parts) == 1
        other = torch.arange(48).int().view(3, 16)
        moved = builder.update_block_table(apart, other, common.slot_mapping)
        assert [part.block_table.tolist() for part in moved.parts] == [other[:2].tolist(), other[2:].tolist()]
        assert all(not part.block_table.any() for part in apart.parts)


def test_a_layer_that_shares_anothers_cache_reads_it_and_writes_nothing(host: Any) -> None:
    with served(host, Batch([(38, 0), (22, 0)]), target="sm_121a") as (made, card):
        made.layer.impl.kv_sharing_target_layer_name = "model.layers.0.attn.attn"
        olds, before = (37, 20), made.layer.kv_cache.clone()
        written = iter([kept[i][old:] for i, old in enumerate(olds) for kept in (made.keys, made.values)])
        made.kept = lambda *_: next(written)  # type: ignore[method-assign]
        for i, old in enumerate(olds):
            made.keys[i], made.values[i] = made.keys[i][:old], made.values[i][:old]
        found, right = made.step(Batch([(37, 1), (20, 2)]))
        assert error(found, right) < GATE and torch.equal(made.layer.kv_cache, before)
        assert not card.launched[-1].knobs.as_dict()["append"]
        card.launched.clear()  # the builder took the layer for one with a cache of its own


@pytest.mark.parametrize("news", [1, 70])
def test_a_dummy_batch_writes_nothing_to_the_null_block(host: Any, news: int) -> None:
    batch = Batch([(0, news), (0, 1)], dummy=True)
    with served(host, batch, target="sm_121a") as (made, card):
        found, _ = made.step(batch)
        assert card.kernels and found.isfinite().all() and not made.layer.kv_cache.view(torch.uint8).any()


def test_memory_is_measured_without_a_batch(host: Any) -> None:
    with served(host, BATCHES["decodes"], target="sm_121a") as (made, card):
        x = torch.ones(3, (HEADS + 2 * KV) * DIM, dtype=torch.bfloat16)
        q, k, v = x.split([HEADS * DIM, KV * DIM, KV * DIM], dim=1)
        with vllm_world.world(), set_forward_context(None, made.config, num_tokens=3, slot_mapping={}):
            assert not made.layer(q, k, v).any()
        assert card.kernels == []


def test_a_batch_that_is_not_causal_is_refused(host: Any) -> None:
    batch = BATCHES["decodes"]
    with served(host, batch, target="sm_121a") as (made, _):
        zeros = torch.zeros(2, dtype=torch.int32)
        with pytest.raises(InputError, match="not causal"):
            build_attn_metadata(
                [[made.group]], 1, 1, zeros, zeros, 1, zeros[:1], 1, [zeros[None]], zeros[None].long(), made.caches,
                causal=False,
            )  # fmt: skip


def test_an_output_that_is_to_be_quantized_is_refused(host: Any) -> None:
    with served(host, BATCHES["decodes"], target="sm_121a") as (made, _):
        x = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16)
        with pytest.raises(InputError, match="quantized output"):
            made.layer.impl.forward(made.layer, x, x, x, made.layer.kv_cache, None, x, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"chunk_lookback": 3}, "knows nothing of chunk_lookback|Triton"),
    ],
)
def test_what_no_kernel_has_is_refused_where_the_layer_is_built(host: Any, given: dict[str, Any], said: str) -> None:
    with (
        pytest.raises((InputError, AssertionError), match=said),
        served(host, BATCHES["decodes"], target="sm_121a", given=given),
    ):
        pass


def test_more_than_sixteen_query_heads_a_kv_head_are_refused(host: Any) -> None:
    config = host.config(hf_overrides={"head_dim": DIM})
    with vllm_world.world(), set_current_vllm_config(config), pytest.raises(InputError, match="17 query heads"):
        Attention(17, DIM, 0.125, num_kv_heads=1, prefix="model.layers.0.x", attn_backend=JitmxAttentionBackend)


@pytest.mark.parametrize("connector", [None, "ExampleConnector"])
def test_attention_begins_behind_all_before_it_where_a_connector_may_write_the_cache(
    connector: str | None, host: Any
) -> None:
    config = host.config(max_model_len=256, hf_overrides={"head_dim": DIM}, block_size=16)
    if connector:
        config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    with vllm_world.world(), set_current_vllm_config(config):
        layer = Attention(
            HEADS, DIM, 0.125, num_kv_heads=KV, prefix="model.layers.0.x", attn_backend=JitmxAttentionBackend
        )
        assert layer.impl.early == (connector is None)
