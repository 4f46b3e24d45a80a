"""The transformer block of gpt-oss with one residual stream: RMSNorm and residual are fused into its products.

vLLM's block adds and normalises twice, each time in a launch of its own between two products. This one hands the sum
on: for one row QKV and the router normalise what they read; O and the experts add what they are given. For more rows
the norm is still a launch of its own, in the same operators.

The stream is a hi/lo residual: two bf16 tensors, which together keep 16 bits of a value. O and the experts add to both
and leave both; norms read the high part. They are the two tensors that vLLM's blocks hand on as well, of which the
stream is the sum: the final norm adds them, the next rank gets them, and states that a draft model reads between blocks
are the high part, which their sum in bf16 rounds to.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models import gpt_oss

import jitmx.vllm.products  # noqa: F401 - defines torch.ops.jitmx.vllm_linear and vllm_experts
from jitmx.vllm import ahead, attention, compiled, hooks
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionImpl
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.moe import JitmxMoEMethod
from jitmx.vllm.policy import Block, Decision

# What vLLM's code was when this was written from it, by digest: whoever changes a step there has it back.
_KNOWN = {
    "TransformerBlock.forward": "861ddff41826f934",
    "OAIAttention.forward": "e17af60a4f4d1621",
    "OAIAttention._build_attention": "aacdd44cd186d5f2",
    "MLPBlock.forward": "cf449f16e6b527ce",
    "GptOssModel.forward": "192486690d25e780",
}

_decide: Callable[[Block], bool] | None = None
_decide_attention: Callable[..., Decision] | None = None

# The fused block that was made last: whose model's configuration, which may be gone, and which layer.
_made: tuple[weakref.ref[Any], int] | None = None


class JitmxAttention(gpt_oss.OAIAttention):  # type: ignore[misc]
    """vLLM's attention of a block, whose inner layer has jitmx's backend where the policy says so."""

    def _build_attention(self, *args: Any, **kwargs: Any) -> Any:
        """The inner layer. Arguments are those of vLLM."""
        given = inspect.signature(gpt_oss.OAIAttention._build_attention).bind(self, *args, **kwargs).arguments
        window = given["config"].sliding_window if self.layer_idx % 2 == 0 else None
        decision = None if _decide_attention is None else _decide_attention(self, window, given["cache_config"])
        if decision is None or decision.format is None:
            return super()._build_attention(*args, **kwargs)
        return gpt_oss.Attention(
            self.num_local_attention_heads, self.head_dim, self.scaling, num_kv_heads=self.num_local_key_value_heads,
            cache_config=given["cache_config"], quant_config=given["quant_config"], per_layer_sliding_window=window,
            prefix=f"{given['prefix']}.attn", sinks=self.sinks, attn_backend=JitmxAttentionBackend,
        )  # fmt: skip


class JitmxTransformerBlock(gpt_oss.TransformerBlock):  # type: ignore[misc]
    """vLLM's block; with its norms in its products where the policy says so. Arguments are those of vLLM's.

    Attributes:
        jitmx_rotates: rotary embedding is left to the launch of attention.
    """

    attention_cls = JitmxAttention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _made
        super().__init__(*args, **kwargs)
        self.jitmx_fused = _decide is not None and _decide(_facts(self))
        signature = inspect.signature(gpt_oss.TransformerBlock.__init__)
        config = signature.bind(self, *args, **kwargs).arguments["vllm_config"]
        # What another kind of block, or another rank, hands on may be any two tensors.
        self.jitmx_joins = _made is None or _made[0]() is not config or _made[1] != self.layer_idx - 1
        _made = (weakref.ref(config), self.layer_idx) if self.jitmx_fused else None
        if isinstance(self.attn.qkv_proj.quant_method, JitmxLinearMethod):
            self.attn.qkv_proj.quant_method.prefetch = self.attn.o_proj  # attention, between them, leaves memory idle
        layers = self.attn.qkv_proj, self.attn.o_proj, self.mlp.experts.routed_experts
        if self.jitmx_fused:
            layers[0].quant_method.extras = {"norm": True}
            layers[1].quant_method.extras = {"residual": "pair"}
            layers[2].quant_method.in_block()
        for layer in layers:
            if isinstance(layer.quant_method, JitmxLinearMethod | JitmxMoEMethod):
                layer.quant_method.begin(layer)
        self.jitmx_rotates = self._take_rope(config)

    def _take_rope(self, config: Any) -> bool:
        """Begin with the kernels of attention, where it is jitmx's, and have it rotate in a block with fused norms."""
        impl = self.attn.attn.impl
        if not isinstance(impl, JitmxAttentionImpl):
            return False
        rope = self.attn.rotary_emb
        against = attention.rotates(rope, impl.head_size, config.model_config.max_model_len)
        if self.jitmx_fused and not against:
            impl.rope = rope
        needed = impl.needed(config, torch.get_default_device(), config.cache_config.block_size or 16)
        if needed is not None:
            ahead.begin(needed, later=True)
        compiled.add(config, "rope", None if impl.rope is None else "attention")
        return impl.rope is not None

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the block: its high and its low part.

        Args:
            hidden_states: [tokens, hidden].
            positions: [tokens].
            residual: what hidden_states lack of the stream, like them, or None.
        """
        if not self.jitmx_fused:
            stock: tuple[torch.Tensor, torch.Tensor] = super().forward(hidden_states, positions, residual)
            return stock
        x, residual_lo = hidden_states, residual
        if residual_lo is not None and self.jitmx_joins:
            x, residual_lo = torch.ops.jitmx.vllm_pair(x, residual_lo).unbind()
        attn, norm = self.attn, self.input_layernorm
        qkv = attn.qkv_proj.quant_method.apply_in_block(
            attn.qkv_proj, x, norm=norm.weight.data, epsilon=norm.variance_epsilon
        )
        q, k, v = qkv.split([attn.q_size, attn.kv_size, attn.kv_size], dim=-1)
        if not self.jitmx_rotates:
            q, k = attn.rotary_emb(positions, q, k)
        stream = attn.o_proj.quant_method.apply_in_block(
            attn.o_proj, attn.attn(q, k, v), residual=x, residual_lo=residual_lo
        )
        norm, experts = self.post_attention_layernorm, self.mlp.experts.routed_experts
        stream = experts.quant_method.apply_in_block(experts, stream, norm.weight.data, norm.variance_epsilon)
        x, residual_lo = stream.unbind()
        return x, residual_lo


def install(decide: Callable[[Block], bool], decide_attention: Callable[..., Decision] | None = None) -> None:
    """Have vLLM build gpt-oss of these blocks. Another plugin's block stays.

    Args:
        decide: whether a block is fused.
        decide_attention: who serves its attention, by vLLM's module for it, the window and the CacheConfig.
    """
    global _decide, _decide_attention
    _decide, _decide_attention = decide, decide_attention
    if gpt_oss.GptOssModel.block_cls is gpt_oss.TransformerBlock:
        gpt_oss.GptOssModel.block_cls = JitmxTransformerBlock


def _facts(block: Any) -> Block:
    """What the policy asks of a block."""
    attn, mlp = block.attn, block.mlp
    layers = {"qkv": attn.qkv_proj, "o": attn.o_proj, "moe": mlp.experts.routed_experts}
    methods = {kind: layer.quant_method for kind, layer in layers.items()}
    own = {"qkv": JitmxLinearMethod, "o": JitmxLinearMethod, "moe": JitmxMoEMethod}
    served = {
        kind: getattr(method, "format", "mxfp4") for kind, method in methods.items() if isinstance(method, own[kind])
    }
    norms = block.input_layernorm, block.post_attention_layernorm
    return Block(
        served=served,
        router=getattr(methods["moe"], "gate", None) is not None,
        ranks=attn.qkv_proj.tp_size,
        n=sum(attn.qkv_proj.output_partition_sizes),
        hidden=attn.hidden_size,
        other=next((reason for fine, reason in (
            (type(block) is JitmxTransformerBlock, "the block is of another class"),
            (type(attn) is JitmxAttention and type(mlp) is gpt_oss.MLPBlock, "its parts are of other classes"),
            (all(type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None for norm in norms),
             "its RMSNorm is another than vLLM's"),
            (not attn.qkv_proj.skip_bias_add and not attn.o_proj.skip_bias_add, "a bias is added elsewhere"),
            (not changed(), f"vLLM's code of the block is another than jitmx knows ({', '.join(changed())})"),
        ) if not fine), ""),
    )  # fmt: skip


@functools.cache
def changed() -> tuple[str, ...]:
    """Which functions that the block takes the place of are not as they were when it was written."""
    return hooks.changed({name: (operator.attrgetter(name)(gpt_oss), digest) for name, digest in _KNOWN.items()})
