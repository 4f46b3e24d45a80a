"""The layer and the head of an Eagle3 draft model (`LlamaForCausalLMEagle3`) on jitmx's kernels.

A draft step takes as long as its weights take to be read: the layer, and a head as large as three. O and down add the
residual to what they make, as a hi/lo residual (`jitmx.vllm.block`), and gate-up leaves up * silu(gate); for one row
gate-up and the head normalise what they read. The head takes the largest logit without writing any. What QKV of the
first layer reads, norms of a token's embedding and of the states before it, is one launch that takes ids of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models import llama, llama_eagle3
from vllm.model_executor.models.llama import Attention
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM, LlamaDecoderLayer

import jitmx.ops.linear.argmax
import jitmx.ops.norm_concat
import jitmx.vllm.products  # noqa: F401 - defines torch.ops.jitmx.vllm_linear
from jitmx.kernels.linear.layout import TILE_ROWS
from jitmx.kernels.norm import takes
from jitmx.ops.checks import HALF_DTYPES
from jitmx.ops.linear import compose
from jitmx.serving.draft import DraftInputs, gates
from jitmx.serving.linear import NORMED_ROWS
from jitmx.vllm import ahead, attention, compiled, facts, hooks, warmup
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionImpl
from jitmx.vllm.draft_config import JitmxDraftConfig
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.log import logger
from jitmx.vllm.policy import Decision, Layer

# What vLLM's code was when this was written from it, by digest: whoever changes a step there has it back.
_KNOWN = {
    "LlamaDecoderLayer.__init__": (LlamaDecoderLayer.__init__, "b8e94053e669764d"),
    "LlamaDecoderLayer.forward": (LlamaDecoderLayer.forward, "9ec591e707b8c393"),
    "LlamaModel.forward": (llama_eagle3.LlamaModel.forward, "58a7224a3592d8a3"),
    "Eagle3LlamaForCausalLM.compute_logits": (Eagle3LlamaForCausalLM.compute_logits, "7fe5ad6de5da9a2f"),
    "Eagle3LlamaForCausalLM.get_top_tokens": (Eagle3LlamaForCausalLM.get_top_tokens, "907ef31068e766e1"),
    "LlamaAttention.__init__": (llama.LlamaAttention.__init__, "0eb7ca7a6336774f"),
    "LlamaAttention.forward": (llama.LlamaAttention.forward, "52a4c32d47977aad"),
    "LlamaMLP.forward": (llama.LlamaMLP.forward, "11828a2086fd9236"),
}

_layers: Callable[[Any], tuple[str, ...]] | None = None
_decide: Callable[[Layer], Decision] | None = None
_decide_block: Callable[[Any, str], bool] | None = None
_decide_attention: Callable[..., Decision] | None = None
# vLLM's, whose places are taken.
_stock_config = llama_eagle3.get_draft_quant_config
_stock_forward = llama_eagle3.LlamaModel.forward


class JitmxDraftLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """vLLM's layer of a draft, fused where the policy says so. Arguments are those of vLLM's.

    Attributes:
        jitmx_fused: norms and residual are in its products.
        jitmx_rotates: rotary embedding is left to the launch of attention.
        jitmx_keeps: the residual stream begins behind hidden_norm.
        jitmx_inputs: what the launch needs that makes what QKV reads of ids of tokens; None where that is vLLM's.
    """

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None, layer_idx: int = 0) -> None:
        super().__init__(vllm_config, prefix=prefix, config=config, layer_idx=layer_idx)
        self.jitmx_fused = self.jitmx_rotates = False
        # Compared here: torch.compile has no word for two methods' being the same.
        self.jitmx_keeps = self._residual_norm == self._norm_before_residual
        self.jitmx_inputs: DraftInputs | None = None
        attn, mlp = self.self_attn, self.mlp
        products = attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj
        if type(self) is not JitmxDraftLayer or not served(vllm_config):
            self._begin(products)
            return
        self._take_attention(vllm_config)
        qkv, o, gate_up, down = (layer.quant_method for layer in products)
        if _decide_block is not None and all(isinstance(method, JitmxLinearMethod) for method in (o, gate_up, down)):
            self.jitmx_fused = _decide_block(self, _other(self))
        if isinstance(qkv, JitmxLinearMethod):
            qkv.prefetch = attn.o_proj  # attention, between them, leaves memory idle
        if self.jitmx_fused:
            o.extras = down.extras = {"residual": "pair"}
            gate_up.extras = {"norm": True}
            self._take_rope(vllm_config)
            self._take_inputs(vllm_config)
        if JitmxMLP.takes(mlp):
            gate_up.extras |= {"swiglu": True}
            mlp.__class__ = JitmxMLP
            compiled.add(vllm_config, "the draft model's gates", "product")
        self._begin(products)
        if isinstance(attn.attn.impl, JitmxAttentionImpl):
            needed = attn.attn.impl.needed(
                vllm_config, torch.get_default_device(), vllm_config.cache_config.block_size or 16
            )
            if needed is not None:
                ahead.begin(needed, later=True)

    @staticmethod
    def _begin(products: Iterable[Any]) -> None:
        for layer in products:
            if isinstance(layer.quant_method, JitmxLinearMethod):
                layer.quant_method.begin(layer)

    def _take_attention(self, config: Any) -> None:
        """Have the attention that vLLM has built built anew with jitmx's backend, where the policy says so."""
        own, built = self.self_attn, self.self_attn.attn
        if _decide_attention is None or type(built) is not Attention or built.attn_backend is JitmxAttentionBackend:
            return
        name, window = built.layer_name, built.sliding_window
        heads = SimpleNamespace(
            num_local_attention_heads=own.num_heads, num_local_key_value_heads=own.num_kv_heads, head_dim=own.head_dim,
            layer_idx=next(int(part) for part in name.split(".") if part.isdecimal()),
        )  # fmt: skip
        if _decide_attention(heads, window, config.cache_config, "no_sinks").format is None:
            return
        del config.compilation_config.static_forward_context[name]  # where a layer of the same name is refused
        own.attn = Attention(
            own.num_heads, own.head_dim, own.scaling, num_kv_heads=own.num_kv_heads, cache_config=config.cache_config,
            quant_config=built.quant_config, per_layer_sliding_window=window, attn_type=built.attn_type,
            prefix=name, attn_backend=JitmxAttentionBackend,
        )  # fmt: skip

    def _take_rope(self, config: Any) -> None:
        impl, rope = self.self_attn.attn.impl, self.self_attn.rotary_emb
        if isinstance(impl, JitmxAttentionImpl):
            if not attention.rotates(rope, impl.head_size, config.model_config.max_model_len):
                impl.rope = rope
            self.jitmx_rotates = impl.rope is not None
            compiled.add(config, "the draft model's rope", "attention" if self.jitmx_rotates else None)

    def _take_inputs(self, config: Any) -> None:
        """Have what QKV reads made in one launch, where it is the first layer's."""
        norms = self.input_layernorm, self.hidden_norm
        arch, _ = facts.target()
        same = len({(norm.variance_epsilon, norm.weight.dtype) for norm in norms}) == 1
        if self.layer_idx != 0 or arch is None or not same or not takes(self.hidden_size):
            return
        self.jitmx_inputs = DraftInputs(
            arch.name, warmup.device_of(torch.get_default_device()), config.scheduler_config.max_num_batched_tokens,
            self.hidden_size, HALF_DTYPES[norms[0].weight.dtype],
        )  # fmt: skip
        ahead.begin(self.jitmx_inputs)
        compiled.add(config, "the draft model's inputs", "norm")

    def forward(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the layer: its high and its low part.

        Args:
            positions: [tokens].
            embeds, hidden_states: [tokens, hidden]; for embeds also ids [tokens] and the table that has them.
            residual: what hidden_states lack of the stream, like them; None before the first layer.
        """
        if not self.jitmx_fused:
            stock: tuple[torch.Tensor, torch.Tensor] = super().forward(positions, embeds, hidden_states, residual)
            return stock
        own, norm = self.self_attn, self.input_layernorm
        residual_lo: torch.Tensor | None = None
        if isinstance(embeds, tuple) and self.layer_idx == 0:
            normed, x = torch.ops.jitmx.rms_norm_concat(
                *embeds, hidden_states, norm.weight.data, self.hidden_norm.weight.data, norm.variance_epsilon,
                self.jitmx_keeps,
            )  # fmt: skip
            x = x if self.jitmx_keeps else hidden_states
        elif self.layer_idx == 0:
            normed, x = self._residual_norm(hidden_states=hidden_states)
            normed = torch.cat([norm(embeds), normed], dim=-1)
        else:
            x, residual_lo = torch.ops.jitmx.vllm_pair(hidden_states, residual).unbind()
            normed = norm(x)
        qkv, _ = own.qkv_proj(normed)
        q, k, v = qkv.split([own.q_size, own.kv_size, own.kv_size], dim=-1)
        if not self.jitmx_rotates:
            q, k = own.rotary_emb(positions, q, k)
        stream = own.o_proj.quant_method.apply_in_block(
            own.o_proj, own.attn(q, k, v), residual=x, residual_lo=residual_lo
        )
        x, residual_lo = stream.unbind()
        norm, mlp = self.post_attention_layernorm, self.mlp
        gated = mlp.gate_up_proj.quant_method.apply_in_block(
            mlp.gate_up_proj, x, norm=norm.weight.data, epsilon=norm.variance_epsilon
        )
        stream = mlp.down_proj.quant_method.apply_in_block(
            mlp.down_proj, gated if isinstance(mlp, JitmxMLP) else mlp.act_fn(gated), residual=x,
            residual_lo=residual_lo,
        )  # fmt: skip
        x, residual_lo = stream.unbind()
        return x, residual_lo


class JitmxMLP(llama.LlamaMLP):  # type: ignore[misc]
    """vLLM's MLP of a draft, whose gates and ups meet in their product."""

    @staticmethod
    def takes(mlp: Any) -> bool:
        """Whether an MLP that vLLM has built can become one."""
        layer = mlp.gate_up_proj
        known = type(mlp) is llama.LlamaMLP and "LlamaMLP.forward" not in changed()
        ours = isinstance(layer.quant_method, JitmxLinearMethod) and getattr(layer, "bias", None) is None
        return known and ours and gates(layer.weight.shape[0], layer.quant_method.format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """vLLM's, with the product of gates and ups in one operator.

        Args:
            x: [tokens, hidden].
        """
        gated = self.gate_up_proj.quant_method.apply_in_block(self.gate_up_proj, x)
        y: torch.Tensor
        y, _ = self.down_proj(gated)
        return y


def _forward(
    self: Any, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor,
    input_embeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """vLLM's model of a draft, whose first layer looks embeddings up where it can."""
    if input_embeds is not None or not _reads_ids(self):
        found: tuple[torch.Tensor, torch.Tensor] = _stock_forward(
            self, input_ids, positions, hidden_states, input_embeds
        )
        return found
    embeds = input_ids, self.embed_tokens.weight.data
    residual = None
    for layer in self.layers:
        hidden_states, residual = layer(
            positions=positions, embeds=embeds, hidden_states=hidden_states, residual=residual
        )
    hidden_states, before = self.norm(hidden_states, residual)
    return hidden_states, hidden_states if self.norm_output else before


def _reads_ids(model: Any) -> bool:
    """Whether the first layer of a model looks embeddings up: rows of a table that this rank has whole, in 16 bits."""
    table = model.embed_tokens
    plain = type(table) is VocabParallelEmbedding and type(table.quant_method) is UnquantizedEmbeddingMethod
    inputs = getattr(model.layers[0], "jitmx_inputs", None)
    return plain and table.tp_size == 1 and inputs is not None and HALF_DTYPES.get(table.weight.dtype) == inputs.dtype


class _LeftToHead(RMSNorm):  # type: ignore[misc]
    """The last norm of a draft whose head normalises what it reads: hands the stream's high part on."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class JitmxEagle3LlamaForCausalLM(Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """vLLM's draft, whose head is read once a token. Arguments are those of vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        model = self.model
        fc = getattr(model, "fc", None)
        if fc is not None and isinstance(fc.quant_method, JitmxLinearMethod):
            fc.quant_method.begin(fc)
        if not model.norm_output and all(getattr(layer, "jitmx_fused", False) for layer in model.layers):
            model.norm = _LeftToHead(self.config.hidden_size, eps=self.config.rms_norm_eps)
            compiled.add(vllm_config, "the draft model's norm", "head")
        if self.draft_id_to_target_id is not None and served(vllm_config):
            # Of each draft's token the target's; a buffer, so that sleep keeps it and graphs find it.
            self.register_buffer("jitmx_targets", torch.zeros_like(self.draft_id_to_target_id), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """vLLM's, and the table of tokens made of d2t."""
        found = super().load_weights(weights)
        for layer in self.model.layers:
            if (inputs := getattr(layer, "jitmx_inputs", None)) is not None:
                warmup.prepare(inputs)
        offsets = self.draft_id_to_target_id
        if hasattr(self, "jitmx_targets") and not offsets.is_meta:
            self.jitmx_targets.copy_(torch.arange(len(offsets), device=offsets.device) + offsets)
        return found

    @property
    def jitmx_norm(self) -> RMSNorm | None:
        """The norm that is left to the head, or None."""
        norm = self.model.norm
        return norm if isinstance(norm, _LeftToHead) else None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the target's vocabulary, [tokens, vocabulary].

        Args:
            hidden_states: [tokens, hidden], as `forward` gives them.
        """
        logits: torch.Tensor | None = super().compute_logits(self._normed(hidden_states))
        return logits

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's token whose logit in the draft is largest, int64 [tokens]; the lowest of several.

        Args:
            hidden_states: [tokens, hidden], as `forward` gives them.
        """
        own = argmax_weight(self)
        if own is None:
            found: torch.Tensor = super().get_top_tokens(self._normed(hidden_states))
            return found
        words, scales, n, k, layout = own
        norm, weight, epsilon = self.jitmx_norm, None, 0.0
        if norm is not None and hidden_states.shape[0] <= NORMED_ROWS:
            weight, epsilon = norm.weight.data, norm.variance_epsilon
        else:
            hidden_states = self._normed(hidden_states)
        top: torch.Tensor = torch.ops.jitmx.linear_argmax(
            hidden_states.contiguous(), words, scales, n, k, layout, None, weight, epsilon
        )
        return top if self.draft_id_to_target_id is None else self.jitmx_targets[top]

    def _normed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm = self.jitmx_norm
        if norm is None or hidden_states.shape[0] == 0:
            return hidden_states
        return compose.rms_norm(hidden_states, norm.weight.data, norm.variance_epsilon)


def argmax_weight(model: Any) -> tuple[torch.Tensor, torch.Tensor, int, int, str] | None:
    """The packed head of a draft as `linear_argmax` takes it, without rows of padding, whose logits would be zeros.

    None where vLLM has to compare: a head that is not packed, that ranks share, or whose logits are turned around.
    """
    head = model.lm_head
    if not isinstance(getattr(head, "quant_method", None), JitmxLinearMethod) or not hasattr(head, "jitmx_packed"):
        return None
    logits = model.logits_processor
    if head.tp_size > 1 or not logits.scale > 0 or logits.logits_as_input or getattr(head, "bias", None) is not None:
        return None
    _, k, layout = head.jitmx_packed
    n = model.logits_processor.org_vocab_size
    tiles = -(-n // TILE_ROWS)
    return head.weight_packed.data[:tiles], head.weight_scale.data[:tiles], n, k, layout


def install(
    layers: Callable[[Any], tuple[str, ...]],
    decide: Callable[[Layer], Decision],
    decide_block: Callable[[Any, str], bool],
    decide_attention: Callable[..., Decision],
) -> None:
    """Have vLLM build drafts of these layers. Again, it changes nothing but the policy.

    Args:
        layers: the layers of its draft that an engine is to have from jitmx, by its VllmConfig.
        decide: who serves a layer.
        decide_block: whether a layer is fused, by the layer and what stands against it, in words.
        decide_attention: who serves its attention, by what has the numbers of its heads, the window, the CacheConfig
            and whether it has sinks.
    """
    global _layers, _decide, _decide_block, _decide_attention
    _layers, _decide, _decide_block, _decide_attention = layers, decide, decide_block, decide_attention
    for (owner, name), own in PATCHED.items():
        setattr(owner, name, own)


def served(vllm_config: Any) -> bool:
    """Whether an engine is to have layers of its draft from jitmx."""
    return _layers is not None and bool(_layers(vllm_config))


def _config(vllm_config: Any) -> Any:
    """The configuration of a draft model: its checkpoint's, or jitmx's where that has none."""
    found = _stock_config(vllm_config)
    if not served(vllm_config):
        return found
    if found is not None:
        say_left(f"its checkpoint is quantized already ({found.get_name()})")
        return found
    assert _decide is not None, "it is there where layers are"
    return JitmxDraftConfig(_decide)


@functools.cache
def say_left(why: str) -> None:
    """One line where vLLM serves a draft that jitmx was asked for."""
    logger.warning("vLLM serves the draft model, whose layers jitmx was asked for: %s", why)


def _other(layer: Any) -> str:
    """What of vLLM's own stands against a fused layer, in words; empty where nothing."""
    attn, mlp = layer.self_attn, layer.mlp
    norms = layer.input_layernorm, layer.post_attention_layernorm, layer.hidden_norm
    checks = (
        (type(attn) is llama.LlamaAttention and type(mlp) is llama.LlamaMLP, "its parts are of other classes"),
        (all(type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None for norm in norms),
         "its RMSNorm is another than vLLM's"),
        (not attn.o_proj.skip_bias_add and not mlp.down_proj.skip_bias_add, "a bias is added elsewhere"),
        (attn.o_proj.tp_size == 1, f"products are added up over {attn.o_proj.tp_size} ranks before the residual is"),
        (not changed(), f"vLLM's code of the draft is another than jitmx knows ({', '.join(changed())})"),
    )  # fmt: skip
    return next((reason for fine, reason in checks if not fine), "")


@functools.cache
def changed() -> tuple[str, ...]:
    """Which functions that the draft takes the place of are not as they were when it was written."""
    return hooks.changed(_KNOWN)


# By the module and the name there: what is put in its place.
PATCHED: dict[tuple[Any, str], Any] = {
    (llama_eagle3, "get_draft_quant_config"): _config,
    (llama_eagle3, "LlamaDecoderLayer"): JitmxDraftLayer,
    (llama_eagle3.LlamaModel, "forward"): _forward,
    (llama_eagle3, "Eagle3LlamaForCausalLM"): JitmxEagle3LlamaForCausalLM,
}
