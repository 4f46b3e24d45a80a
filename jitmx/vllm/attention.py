"""jitmx's attention as a backend of vLLM: cache write, attention and merging of a layer by `jitmx.attention`.

Lengths, slots and tables stay on the device and are read where vLLM keeps them from step to step. A launch depends on
how many requests there are and on upper bounds alone, so that a captured graph serves whatever batch fits into it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import jitmx
from jitmx.errors import InputError
from jitmx.kernels.attention import decode
from jitmx.kernels.attention.problem import HEAD_DIMS, AttentionProblem
from jitmx.runtime.alike import Alike, alike
from jitmx.serving.attention import GRAPH_CONTEXT
from jitmx.serving.attention import Attention as Kernels
from jitmx.serving.needed import Needed
from jitmx.vllm import facts, hooks, monitor, policy, warmup

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ROPE = "jitmx_rope_"  # and the type: a buffer of vLLM's rotary embedding, so that sleep keeps it as it keeps others

# A block of (page, head) lies together in the first two, and is read by the fewest requests to memory.
_LAYOUTS = ("LBHNC", "BLHNC", "LBNHC", "BLNHC", "LHBNC", "BHLNC")


class JitmxAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend: `--attention-backend CUSTOM`, or the policy's choice for a layer of gpt-oss."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that stands for it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[JitmxAttentionImpl]:
        return JitmxAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[JitmxAttentionMetadataBuilder]:
        return JitmxAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, *_rest: Any
    ) -> str | None:
        """What stands against it beside the rules that vLLM checks by the other methods; None where nothing."""
        if not hooks.hold():
            return "incompatible vLLM internals, which the log names"
        config = get_current_vllm_config_or_none()
        given = policy.Facts(*_target()) if config is None else facts.read(config)
        own = policy.Attention(
            1, 1, head_size, str(dtype).removeprefix("torch."), kv_cache_dtype or "auto", block_size
        )  # fmt: skip
        return policy.against_any(given) or policy.against_attention(own) or None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """All, those first whose pages of a head lie together."""
        return tuple(KVCacheLayout[name] for name in _LAYOUTS)


def _target() -> tuple[str | None, str]:
    found, reason = facts.target()
    return None if found is None else found.name, reason


class Part(NamedTuple):
    """Requests of a batch that one call takes.

    Attributes:
        requests, tokens: which of the batch; tokens is None for all.
        block_table, seq_lens: theirs, as in the batch.
        query_start_loc: int32 [requests + 1], from the first of `tokens`.
        max_query_len: new tokens of one, at most.
    """

    requests: slice
    tokens: slice | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int


@dataclass
class JitmxAttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """One batch, for the layers of one group of the cache.

    Attributes:
        parts: one; or decodes and chunks of prompts apart, outside of graphs.
        slot_mapping: int64 [tokens], -1 of padding; None where block table and lengths say it: nothing is padding then
            but requests without tokens.
        max_seq_len: tokens of a request, at most.
    """

    parts: tuple[Part, ...]
    slot_mapping: torch.Tensor | None
    max_seq_len: int


class JitmxAttentionMetadataBuilder(AttentionMetadataBuilder[JitmxAttentionMetadata]):  # type: ignore[misc]
    """Hands a batch's tensors on. Made once the size of pages is known, it has the kernels loaded.

    Args:
        kv_cache_spec: of the group; its block_size is that of pages.
        layer_names: the layers of the group.
        vllm_config, device: as vLLM gives them.

    Raises:
        NotWarmedError: a kernel is not in the cache, and JITMX_MODE=required.
    """

    # Grids are fixed by the number of requests and the most tokens of one; a graph of a mixed batch is captured for a
    # request that has all of its tokens.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    # All that changes from step to step is read from vLLM's own buffers.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = int(kv_cache_spec.block_size)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        own = [layer.impl for layer in layers if isinstance(layer.impl, JitmxAttentionImpl)]
        found = (impl.needed(vllm_config, device, self.page_size) for impl in own)
        for needed in dict.fromkeys(item for item in found if item is not None):
            warmup.prepare(needed)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        group = max((impl.num_heads // impl.num_kv_heads for impl in own), default=1)
        # New tokens up to which a request is put apart from longer ones, and up to which it need not be.
        self._short = max(decode.ROWS[0] // group, self.reorder_batch_threshold, 1)
        self._few = max(decode.ROWS[-1] // group, self._short)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> JitmxAttentionMetadata:
        """What a batch's layers ask for.

        Raises:
            InputError: tokens that attend to later ones.
        """
        return self._batch(common_attn_metadata, self._decodes(common_attn_metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> JitmxAttentionMetadata:
        """The same in one part: what comes first in a batch is not what a graph is captured for; nor is its length."""
        found = self._batch(common_attn_metadata, 0)
        return replace(found, max_seq_len=min(found.max_seq_len, GRAPH_CONTEXT))

    def _decodes(self, given: Any) -> int:
        """How many requests of few tokens go before longer ones: 0 where there are only such, or none is first.

        A call has as many blocks for each request as its longest one needs.
        """
        if given.max_query_len <= self._few:
            return 0
        starts = given.query_start_loc_cpu.numpy()  # of so few numbers torch would take ten times as long
        longer = starts[1:] - starts[:-1] > self._short
        first = int(longer.argmax())
        return first if longer[first] else 0

    def _batch(self, given: Any, decodes: int) -> JitmxAttentionMetadata:
        if given.causal is not True:
            raise InputError("a batch is not causal, and jitmx's attention is", _REMEDY)
        table, lengths, starts = given.block_table_tensor, given.seq_lens, given.query_start_loc
        most = int(given.max_query_len)
        if decodes:
            tokens, first, rest = int(given.query_start_loc_cpu[decodes]), slice(decodes), slice(decodes, None)
            after = starts[rest]
            parts: tuple[Part, ...] = (
                Part(first, slice(tokens), table[first], lengths[first], starts[: decodes + 1], self._short),
                Part(rest, slice(tokens, None), table[rest], lengths[rest], after - after[:1], most),
            )
        else:
            parts = (Part(slice(None), None, table, lengths, starts, most),)
        longest = min(int(given.max_seq_len), table.shape[1] * self.page_size)
        return JitmxAttentionMetadata(parts, given.slot_mapping, longest)

    def update_block_table(
        self, metadata: JitmxAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> JitmxAttentionMetadata:
        """The same batch for a group whose pages are others."""
        parts = tuple(part._replace(block_table=blk_table[part.requests]) for part in metadata.parts)
        return replace(metadata, parts=parts, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: JitmxAttentionMetadata) -> None:
        """Nothing: buffers that a draft's graph advances are those that metadata has."""


class JitmxAttentionImpl(AttentionImpl[JitmxAttentionMetadata]):  # type: ignore[misc]
    """Attention of one layer. Arguments are those of vLLM; its own method `forward` says what it takes.

    Attributes:
        rope: vLLM's rotary embedding, where the layer's block leaves it to the launch: q and k come unrotated then.

    Raises:
        InputError: ALiBi, another kind than a decoder's, a cache or a group of heads that no kernel takes.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None, **more: Any,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None:
            raise InputError("the model has ALiBi, and jitmx's attention adds nothing to logits", _REMEDY)
        if attn_type != AttentionType.DECODER:
            raise InputError(f"attention of an {attn_type} layer is not a decoder's, which jitmx has", _REMEDY)
        unknown = {name: value for name, value in more.items() if value not in (None, -1, False)}
        if unknown:
            raise InputError(f"jitmx's attention knows nothing of {', '.join(unknown)}", _REMEDY)
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        found = policy.Attention(num_heads, num_kv_heads or num_heads, head_size, dtype, kv_cache_dtype)
        if against := policy.against_attention(found):
            raise InputError(f"jitmx's attention cannot serve the layer: {against}", _REMEDY)
        self.num_heads, self.num_kv_heads, self.head_size = found.heads, found.kv_heads, head_size
        self.scale, self.sinks = float(scale), sinks
        self.window = sliding_window
        self.soft_cap = logits_soft_cap or None
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.quantized = policy.cache_format(found) == "e4m3"
        self.dtype = torch.get_default_dtype()
        self.rope: Any = None
        # Lengths, slots and tables are there before the first layer's embedding; a connector may write keys and values
        # of a layer right before its attention.
        config = get_current_vllm_config_or_none()
        self.early = config is None or config.kv_transfer_config is None
        self._cache: tuple[Alike, int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Round cosines and sines, of which all layers share one table."""
        if self.rope is not None:
            _rope_table(self.rope, act_dtype)

    def needed(self, config: Any, device: torch.device, page_size: int) -> Needed | None:
        """What decides the kernels of the layer's calls; None where there is no target.

        Args:
            config: the VllmConfig, which says how many requests and tokens there may be.
            page_size: tokens of a page of the cache.
        """
        arch, _ = facts.target()
        if arch is None:
            return None
        scheduler, rope, sinks = config.scheduler_config, self.rope, self.sinks
        problem = AttentionProblem(
            batch=scheduler.max_num_seqs, context=config.model_config.max_model_len, kv_heads=self.num_kv_heads,
            dtype=_TYPES[self.dtype], cache="e4m3" if self.quantized else "same", head_dim=self.head_size,
            group=self.num_heads // self.num_kv_heads, page_size=page_size,
            sinks="no_sinks" if sinks is None else f"sinks_{_TYPES[sinks.dtype]}", soft_cap=self.soft_cap is not None,
            window=self.window or 0, rope="no_rope" if rope is None else _style(rope),
            rotary=0 if rope is None else rope.rotary_dim,
            table="table_bf16" if rope is None else f"table_{_TYPES[self.dtype]}",
            append=self.kv_sharing_target_layer_name is None,
        )  # fmt: skip
        return Kernels(
            arch.name, warmup.device_of(device), scheduler.max_num_batched_tokens, problem
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: JitmxAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write new keys and values to the cache, and attend to it.

        Args:
            layer: vLLM's, which has `_k_scale` and `_v_scale`, float32, of an FP8 cache.
            query: [tokens, heads, head_dim]; tokens may lie apart.
            key, value: [tokens, kv_heads, head_dim], like it; or None, where the cache has them.
            kv_cache: [pages, kv_heads, page_size, 2 head_dim], keys beside values, in any of vLLM's layouts.
            attn_metadata: None where vLLM measures how much memory a step takes.
            output: [tokens, heads, head_dim]; rows of padding are zeros, or as they were behind the last request.

        Returns:
            output.

        Raises:
            InputError: an output that is to be quantized.
        """
        monitor.look()
        if output_scale is not None or output_block_scale is not None:
            raise InputError("vLLM asks for a quantized output, and jitmx's attention writes none", _REMEDY)
        rope = None if self.rope is None else _rope_table(self.rope, query.dtype)
        if attn_metadata is None:
            return output.zero_()
        given = attn_metadata
        if self.kv_sharing_target_layer_name is not None:
            key = value = None
        keys, values = self._halves(kv_cache)
        sinks = None if self.sinks is None else self.sinks.data
        style = "neox" if self.rope is None else _style(self.rope)
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.quantized else (None, None)
        new, there = (query, key, value, given.slot_mapping, output), query.shape[0]
        tokens = there if given.slot_mapping is None else given.slot_mapping.shape[0]
        whole, tokens = tokens == there, min(tokens, there)  # of a piecewise graph, or of the batch
        for part in given.parts:
            if part.tokens is None and whole:
                q, k, v, slots, out = new
            else:
                rows = slice(*(part.tokens or slice(None)).indices(tokens))
                q, k, v, slots, out = (None if tensor is None else tensor[rows] for tensor in new)
            jitmx.attention(
                q, k, v, keys, values, part.block_table, part.seq_lens, part.query_start_loc,
                max_query_len=part.max_query_len, max_seq_len=given.max_seq_len, scale=self.scale, sinks=sinks,
                window=self.window, soft_cap=self.soft_cap, rope=rope, rope_style=style,
                slot_mapping=None if k is None else slots, k_scale=k_scale, v_scale=v_scale, out=out,
                early=self.early,
            )  # fmt: skip
        return output

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a cache as `jitmx.attention` takes them, made anew where it is not as the last one was."""
        if self._cache is not None:
            same, at, halves = self._cache
            if same(kv_cache) and kv_cache.data_ptr() == at:
                return halves
        # Of `data`, as views of the tensor itself would keep it: they go with it, and so does its memory.
        keys, values = kv_cache.data.transpose(1, 2).split(self.head_size, dim=3)
        self._cache = alike((kv_cache,)), kv_cache.data_ptr(), (keys, values)
        self._watch = weakref.ref(kv_cache, self._forget)
        return keys, values

    def _forget(self, _cache: object) -> None:
        self._cache = None


_REMEDY = "serve with another --attention-backend, or without one"


def _style(rope: Any) -> str:
    return "neox" if rope.is_neox_style else "interleaved"


def _rope_table(rope: Any, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of an embedding, rounded as vLLM's kernel takes them: to the type of what is rotated."""
    if rope.cos_sin_cache.dtype is dtype:
        table: torch.Tensor = rope.cos_sin_cache
        return table
    name = _ROPE + _TYPES[dtype]
    found: torch.Tensor | None = getattr(rope, name, None)
    if found is None:
        found = rope.cos_sin_cache.to(dtype).contiguous()
        rope.register_buffer(name, found, persistent=False)
    return found


def rotates(rope: Any, head_size: int, positions: int) -> str:
    """What stands against a launch that rotates as a rotary embedding of vLLM does, or an empty text.

    Args:
        positions: that requests have, at most.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    plain = all(getattr(type(rope), name, None) is getattr(RotaryEmbedding, name)
                for name in ("forward_cuda", "forward_static", "forward_native"))  # fmt: skip
    if not plain:
        return f"{type(rope).__name__} rotates in a way of its own"
    step = 16 if rope.is_neox_style else 8
    if rope.rotary_dim % step or not 0 < rope.rotary_dim <= head_size:
        return f"it rotates {rope.rotary_dim} values of a head"
    if rope.cos_sin_cache.shape[0] < positions:
        return f"its table has {rope.cos_sin_cache.shape[0]} positions, and requests up to {positions}"
    return ""
