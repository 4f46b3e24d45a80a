"""Other libraries' attention to a paged cache, for `jitmx bench attention` to run beside jitmx's.

Those of vLLM, and FlashInfer's, are launched as vLLM's backends launch them: rotary embedding in place, the cache
write, a query in E4M3 where the library wants one, attention. What a step makes once for all layers, such as the
metadata of FA3's scheduler, is made before. A library that is not installed, or cannot do this, is a reason in words.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from jitmx.bench.attention_inputs import Layer
from jitmx.bench.peers import Unavailable, module, unavailable

# Relative L2 from float32. Beside an E4M3 cache FA3 rounds q and the shares of the softmax to E4M3 as well.
GATE = {"same": 0.02, "e4m3": 0.1}

_SEGMENTS = 16  # parts of a context in vLLM's Triton kernel, and the blocks that it wants beside one another at least
_BLOCKS = 128
_WORKSPACE = 128 << 20  # bytes of FlashInfer's


class Way(Protocol):
    """A call as a library makes it."""

    def __call__(self, copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Attend to a copy of the cache with q, new keys and values of the flat buffer x, which may be rotated in
        place, and write the output into y where the next call reads q."""


class Peer(NamedTuple):
    """A library.

    Attributes:
        make: calls over a layer's caches.
        sinks, writes: whether it has sinks, and its calls write the layer's cache.
    """

    make: Callable[[Layer], Way]
    sinks: bool = True
    writes: bool = True


def load(name: str, layer: Layer) -> Way:
    """The calls of the library `name`.

    Raises:
        Unavailable: it is not here, or cannot do this.
    """
    with unavailable():
        return PEERS[name].make(layer)


def _require(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{name} is not installed")


def _require_causal(layer: Layer, who: str) -> None:
    if layer.mask is not None:
        raise Unavailable(f"{who} has no mask of the new tokens")


def _prepared(layer: Layer) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """vLLM's rotary embedding and cache write; gives q."""
    _require("vllm")
    operators, problem = module("vllm._custom_ops"), layer.work.problem
    one = torch.ones(1, device=layer.device)
    k_scale, v_scale = layer.scales or (one, one)
    kind = "auto" if layer.scales is None else "fp8"
    caches = [cache if layer.scales is None else cache.view(torch.uint8) for cache in (layer.k_cache, layer.v_cache)]
    rope, neox = layer.rope, problem.rope == "neox"

    def prepare(copy: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer.split(x)
        if rope is not None:
            operators.rotary_embedding(layer.positions, q.flatten(1), k.flatten(1), problem.head_dim, rope, neox)
        operators.reshape_and_cache_flash(k, v, *caches, layer.slots[copy], kind, k_scale, v_scale)
        return q

    return prepare


def _descale(layer: Layer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales of keys and values, [batch, kv_heads]."""
    if layer.scales is None:
        return None, None
    problem = layer.work.problem
    k_scale, v_scale = (scale.expand(problem.batch, problem.kv_heads) for scale in layer.scales)
    return k_scale, v_scale


def _fa3(layer: Layer) -> Way:
    """FlashAttention 3 as vLLM has it."""
    _require("vllm")
    _require_causal(layer, "FlashAttention 3")
    flash, operators = module("vllm.vllm_flash_attn"), module("vllm._custom_ops")
    prepare, work, problem = _prepared(layer), layer.work, layer.work.problem
    window = [problem.window - 1, 0] if problem.window else [-1, -1]
    k_descale, v_descale = _descale(layer)
    one = torch.ones(1, device=layer.device)
    q_descale = None if k_descale is None else one.expand(problem.batch, problem.kv_heads)
    metadata = flash.get_scheduler_metadata(
        batch_size=problem.batch, max_seqlen_q=problem.queries, max_seqlen_k=work.context, num_heads_q=work.heads,
        num_heads_kv=problem.kv_heads, headdim=problem.head_dim, cache_seqlens=layer.seq_lens,
        qkv_dtype=layer.dtype if layer.scales is None else torch.float8_e4m3fn, cu_seqlens_q=layer.starts,
        page_size=problem.page_size, causal=True, window_size=window, num_splits=0,
    )  # fmt: skip

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        q = prepare(copy, x)
        if q_descale is not None:
            q = operators.scaled_fp8_quant(q.flatten(1), one)[0].view(q.shape)
        flash.flash_attn_varlen_func(
            q=q, k=layer.k_cache, v=layer.v_cache, out=layer.out(y), cu_seqlens_q=layer.starts,
            max_seqlen_q=problem.queries, seqused_k=layer.seq_lens, max_seqlen_k=work.context,
            softmax_scale=problem.head_dim**-0.5, causal=True, window_size=window, block_table=layer.tables[copy],
            softcap=layer.soft_cap or 0.0, scheduler_metadata=metadata, fa_version=3, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, num_splits=0, s_aux=layer.sinks,
        )  # fmt: skip

    return way


def _triton(layer: Layer) -> Way:
    """vLLM's unified attention in Triton, with the buffers that its backend makes."""
    _require("vllm")
    _require_causal(layer, "vLLM's Triton attention")
    run = module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    prepare, work, problem = _prepared(layer), layer.work, layer.work.problem
    k_descale, v_descale = _descale(layer)
    few = max(1, _BLOCKS // problem.kv_heads)  # requests up to which a context goes in parts
    wide = 1 << (problem.head_dim - 1).bit_length()
    parts = torch.empty(few, work.heads, _SEGMENTS, wide, device=layer.device)
    most, total = (torch.empty(few, work.heads, _SEGMENTS, device=layer.device) for _ in range(2))
    given: dict[str, Any] = {
        "cu_seqlens_q": layer.starts, "max_seqlen_q": problem.queries, "seqused_k": layer.seq_lens,
        "max_seqlen_k": work.context, "softmax_scale": problem.head_dim**-0.5, "causal": True,
        "window_size": (problem.window - 1, 0) if problem.window else (-1, -1), "softcap": layer.soft_cap or 0.0,
        "q_descale": None, "k_descale": k_descale, "v_descale": v_descale, "seq_threshold_3D": few,
        "num_par_softmax_segments": _SEGMENTS, "softmax_segm_output": parts, "softmax_segm_max": most,
        "softmax_segm_expsum": total, "sinks": layer.sinks,
    }  # fmt: skip
    known = inspect.signature(run).parameters
    if layer.scales is not None and "kv_quant_mode" in known:
        given["kv_quant_mode"] = module("vllm.v1.kv_cache_interface").get_kv_quant_mode("fp8")
    given = {name: value for name, value in given.items() if name in known}

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        q = prepare(copy, x)
        run(
            q=q, k=layer.k_cache, v=layer.v_cache, out=layer.out(y), block_table=layer.tables[copy], **given,
        )  # fmt: skip

    return way


def _flashinfer(layer: Layer) -> Way:
    """FlashInfer: its kernel for single new tokens (XQA on sm_90 and sm_12x), else its prefill with sinks."""
    _require("flashinfer")
    _require_causal(layer, "FlashInfer with sinks")
    if layer.soft_cap:
        raise Unavailable("FlashInfer with sinks has no soft cap")
    return _flashinfer_decode(layer) if layer.work.problem.queries == 1 else _flashinfer_prompt(layer)


def _flashinfer_decode(layer: Layer) -> Way:
    run = module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    prepare, problem = _prepared(layer), layer.work.problem
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=layer.device)
    sinks = None if layer.sinks is None else layer.sinks.float()
    k_scale, v_scale = (1.0, 1.0) if layer.scales is None else (float(scale) for scale in layer.scales)

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        run(
            query=prepare(copy, x), kv_cache=(layer.k_cache, layer.v_cache), workspace_buffer=workspace,
            block_tables=layer.tables[copy], seq_lens=layer.seq_lens, max_seq_len=layer.work.context,
            bmm1_scale=k_scale * problem.head_dim**-0.5, bmm2_scale=v_scale, window_left=problem.window - 1,
            out=layer.out(y), sinks=sinks, kv_layout="NHD",
        )  # fmt: skip

    return way


def _flashinfer_prompt(layer: Layer) -> Way:
    if layer.scales is not None:
        raise Unavailable("FlashInfer's prefill with sinks takes no scales of an E4M3 cache")
    wrappers, problem = module("flashinfer"), layer.work.problem
    prepare, size, scale = _prepared(layer), layer.work.problem.page_size, layer.work.problem.head_dim**-0.5
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=layer.device)
    kind = wrappers.BatchAttentionWithAttentionSinkWrapper
    if layer.sinks is None:
        kind = wrappers.BatchPrefillWithPagedKVCacheWrapper
    sinks = () if layer.sinks is None else (layer.sinks.float(), scale)
    made = []
    for table in layer.tables:
        wrapper = kind(workspace, "NHD", **({} if layer.sinks is None else _typed(layer)))
        width = table.shape[1]
        ends = torch.arange(0, (problem.batch + 1) * width, width, dtype=torch.int32, device=layer.device)
        wrapper.plan(
            layer.starts, ends, table.flatten(), (layer.seq_lens - 1) % size + 1, layer.work.heads, problem.kv_heads,
            problem.head_dim, size, causal=True, window_left=problem.window - 1, sm_scale=scale,
            q_data_type=layer.dtype, kv_data_type=layer.dtype,
        )  # fmt: skip
        made.append(wrapper)

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        made[copy].run(prepare(copy, x), (layer.k_cache, layer.v_cache), *sinks, out=layer.out(y))

    return way


def _typed(layer: Layer) -> dict[str, Any]:
    """What FlashInfer compiles its kernel with sinks for."""
    problem = layer.work.problem
    return {
        "q_data_type": layer.dtype, "kv_data_type": layer.dtype, "head_dim_qk": problem.head_dim,
        "head_dim_vo": problem.head_dim, "window_left": problem.window - 1,
    }  # fmt: skip


def _sdpa(layer: Layer) -> Way:
    """torch: rotary embedding, a cache of contiguous requests, scaled_dot_product_attention without sinks."""
    if layer.scales is not None or layer.soft_cap:
        raise Unavailable("torch's attention has neither an E4M3 cache nor a soft cap")
    work, problem, old = layer.work, layer.work.problem, layer.work.context - layer.work.problem.queries
    first = work.first_page * problem.page_size
    caches = []
    for table in layer.tables:
        pages = table[:, work.first_page :].long()
        both = (cache[pages].flatten(1, 2)[:, : work.context - first] for cache in (layer.k_cache, layer.v_cache))
        caches.append([one.transpose(1, 2).contiguous() for one in both])
    whole = old == 0 and not problem.window and layer.mask is None
    mask = None
    if problem.queries > 1 and not whole:
        mask = layer.visible(first, torch.arange(problem.queries, device=layer.device))
    angles = None
    if layer.rope is not None:
        angles = [part[:, None] for part in layer.rope[layer.positions].to(layer.dtype).chunk(2, -1)]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if angles is None:
            return x
        cos, sin = angles
        a, b = x[..., : cos.shape[-1] * 2].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., cos.shape[-1] * 2 :]], -1)

    def way(copy: int, x: torch.Tensor, y: torch.Tensor) -> None:
        q, k, v = (part.unflatten(0, (problem.batch, -1)).transpose(1, 2) for part in _with(layer.split(x), rotated))
        keys, values = caches[copy]
        keys[:, :, old - first :].copy_(k)
        values[:, :, old - first :].copy_(v)
        found = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=whole and problem.queries > 1, enable_gqa=True
        )
        layer.out(y).unflatten(0, (problem.batch, -1)).copy_(found.transpose(1, 2))

    if problem.rope == "interleaved":
        raise Unavailable("torch is given rotary embedding of two halves only")
    return way


def _with(parts: tuple[torch.Tensor, ...], rotated: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    q, k, v = parts
    return rotated(q), rotated(k), v


PEERS = {
    "fa3": Peer(_fa3), "triton": Peer(_triton), "flashinfer": Peer(_flashinfer),
    "sdpa": Peer(_sdpa, sinks=False, writes=False),
}  # fmt: skip
