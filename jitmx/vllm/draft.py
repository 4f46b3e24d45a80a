"""The Eagle3 draft model of a served gpt-oss on jitmx: packed weights, attention, and its head's largest logit.

A draft is built and loaded by vLLM's own classes, behind the target. Taken over are the configuration that its layers
ask for a method, its block (for its attention), whether its head is the target's, and how a token is taken of its head:
vLLM writes the logits of a reduced vocabulary into a row of the whole one and looks that through; here one launch
compares the products of an MXFP4 head, and one looks up the token that the best of them stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models import llama_eagle3
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.model_executor.models.llama import Attention
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils, utils
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

import jitmx.ops.linear.argmax  # noqa: F401 - defines torch.ops.jitmx.linear_argmax
from jitmx.draft_kernels import Argmax
from jitmx.ops.linear import operand
from jitmx.ops.linear.plan import DTYPES
from jitmx.vllm import ahead, aux_layers, facts, linear, warmup
from jitmx.vllm.attention import JitmxAttentionBackend
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.log import logger
from jitmx.vllm.policy import Decision, Layer

# By the last part of a layer's name.
_KINDS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "fc": "fc"}

_layers: Callable[[Any], tuple[str, ...]] | None = None
_decide: Callable[[Layer], Decision] | None = None
_decide_attention: Callable[..., Decision] | None = None
# vLLM's, whose places are taken.
_stock_config = llama_eagle3.get_draft_quant_config
_stock_share = utils._should_share
_stock_load = EagleSpeculator.load_draft_model
_stock_aux = eagle3_utils.get_eagle3_aux_layers_from_config


class JitmxDraftConfig(QuantizationConfig):  # type: ignore[misc]
    """What the layers of a draft model in bf16 ask for their method."""

    jitmx_draft = True  # which `lm_head` reads: of this configuration it decides itself

    def get_name(self) -> str:
        return "jitmx_draft"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JitmxDraftConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """jitmx's method, or vLLM's for bf16; None for what is no product."""
        if not isinstance(layer, LinearBase):
            return None
        kind = _KINDS.get(prefix.rpartition(".")[2])
        if kind is not None and _decide is not None:
            decision = _decide(Layer(kind, prefix, draft=True))
            if decision.format is not None:
                return JitmxLinearMethod(decision.format, prefix, all_scales=decision.all_scales)
        return UnquantizedLinearMethod()


class JitmxDraftLayer(llama_eagle3.LlamaDecoderLayer):  # type: ignore[misc]
    """vLLM's block of an Eagle3 draft, with jitmx's attention where the policy says so. Arguments are those of vLLM."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None, layer_idx: int = 0) -> None:
        super().__init__(vllm_config, prefix, config, layer_idx)
        self._take_over()

    def _take_over(self) -> None:
        config = get_current_vllm_config()
        if _layers is None or not _layers(config):
            return
        attn = self.self_attn
        for layer in (attn.qkv_proj, attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj):
            if isinstance(layer.quant_method, JitmxLinearMethod):
                layer.quant_method.begin(layer)
        if isinstance(attn.qkv_proj.quant_method, JitmxLinearMethod):
            attn.qkv_proj.quant_method.prefetch = attn.o_proj  # attention, between them, leaves memory idle
        _take_attention(attn, config)


def _take_attention(attn: Any, config: Any) -> None:
    """Put attention by jitmx into a LlamaAttention where the policy says so, and begin with its kernels."""
    stock = attn.attn
    if type(stock) is not Attention or stock.attn_backend is JitmxAttentionBackend or _decide_attention is None:
        return
    window, name = stock.sliding_window, stock.layer_name
    heads = SimpleNamespace(
        num_local_attention_heads=attn.num_heads, num_local_key_value_heads=attn.num_kv_heads, head_dim=attn.head_dim,
        layer_idx=next(int(part) for part in name.split(".") if part.isdecimal()),
    )  # fmt: skip
    if _decide_attention(heads, window, config.cache_config, "no_sinks").format is None:
        return
    del config.compilation_config.static_forward_context[name]  # where a layer of the same name is refused
    attn.attn = Attention(
        attn.num_heads, attn.head_dim, attn.scaling, num_kv_heads=attn.num_kv_heads, cache_config=config.cache_config,
        per_layer_sliding_window=window, prefix=name, attn_backend=JitmxAttentionBackend,
    )  # fmt: skip
    needed = attn.attn.impl.needed(config, torch.get_default_device(), config.cache_config.block_size or 16)
    if needed is not None:
        ahead.begin(needed)


def install(
    layers: Callable[[Any], tuple[str, ...]], decide: Callable[[Layer], Decision],
    decide_attention: Callable[..., Decision],
) -> None:  # fmt: skip
    """Have vLLM build drafts of gpt-oss through this module. Again, it changes nothing but the policy.

    Args:
        layers: the layers of its draft that an engine is to have from jitmx, by its VllmConfig.
        decide: who serves a layer.
        decide_attention: who serves its attention, by what has the numbers of its heads, the window, the CacheConfig
            and whether it has sinks.
    """
    global _layers, _decide, _decide_attention
    _layers, _decide, _decide_attention = layers, decide, decide_attention
    for (owner, name), own in PATCHED.items():
        setattr(owner, name, own)


def _config(vllm_config: Any) -> Any:
    """The configuration of a draft model: its checkpoint's, or jitmx's where that has none."""
    found = _stock_config(vllm_config)
    if _layers is None or not _layers(vllm_config):
        return found
    if found is not None:
        _say_left(f"its checkpoint is quantized already ({found.get_name()})")
        return found
    return JitmxDraftConfig()


def _aux_layers(spec_config: Any) -> tuple[int, ...] | None:
    """The boundaries of the target's blocks whose states a draft reads; None where its configuration has none."""
    found: tuple[int, ...] | None = _stock_aux(spec_config)
    return aux_layers.find(spec_config, found)


def _shares(eagle: Any, flag: str, draft: Any, target: Any) -> bool:
    """Whether a draft takes a layer of the target's for its own: where it has none, or the same."""
    if getattr(eagle, flag, False) and isinstance(getattr(target, "quant_method", None), JitmxLinearMethod):
        return draft is not None and _alike(draft, target)
    return bool(_stock_share(eagle, flag, draft, target))


def _alike(draft: Any, target: Any) -> bool:
    """Whether a head is packed as one that is packed already is, now or if it were."""
    words, scales = target.weight_packed, target.weight_scale
    if isinstance(draft.quant_method, JitmxLinearMethod):
        if draft.jitmx_packed != target.jitmx_packed:
            return False
        own = draft.weight_packed, draft.weight_scale
    else:
        n, k, layout = target.jitmx_packed
        if draft.weight.shape != (n, k) or draft.weight.dtype not in DTYPES:
            return False
        packed = linear.pack(draft.weight.data, operand.parts(layout)[0])
        own = packed.words, packed.scales
    return bool(torch.equal(own[0], words) and torch.equal(own[1], scales))


def _load(self: Any, target_model: Any, target_attn_layer_names: set[str]) -> Any:
    """The draft model of a speculator, whose tokens are taken by one launch where that can be."""
    model = _stock_load(self, target_model, target_attn_layer_names)
    if _layers is None or not _layers(self.vllm_config):
        return model
    if not isinstance(model, llama_eagle3.Eagle3LlamaForCausalLM):
        _say_left(f"it is a {type(model).__name__}, and jitmx serves Eagle3 drafts of Llama blocks")
        return model
    _take_argmax(self, model)
    return model


def _take_argmax(speculator: Any, model: Any) -> None:
    """Have a speculator take its tokens by `top_tokens`, and the kernels for that ready."""
    against = _against_argmax(speculator, model)
    if against:
        logger.info("vLLM takes the draft model's tokens of its logits: %s", against)
        return
    head, found = model.lm_head, facts.target()[0]
    n, k, layout = head.jitmx_packed
    format, encoding, scale_range = operand.parts(layout)
    assert found is not None, "no layer is served without a target"
    warmup.prepare(
        Argmax(
            found.name, warmup.device_of(head.weight_packed.device), speculator.max_num_reqs, n, k,
            DTYPES[head.weight.dtype], format, encoding, scale_range,
        )
    )  # fmt: skip
    d2t = model.draft_id_to_target_id
    model.jitmx_targets = None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t.data
    speculator.use_local_argmax_reduction = True
    logger.info("jitmx takes the draft model's tokens with the product of its head")


def _against_argmax(speculator: Any, model: Any) -> str:
    """What stands against taking tokens with the product of the head, in words; empty where nothing."""
    head, logits = model.lm_head, model.logits_processor
    checks = (
        (isinstance(head.quant_method, JitmxLinearMethod), "its head is vLLM's"),
        (speculator.draft_logits is None, "they are drawn at random (draft_sample_method)"),
        (not speculator.enable_adaptive_verification, "their logits say how sure it is (enable_adaptive_verification)"),
        (getattr(head, "tp_size", 1) == 1, f"{head.tp_size} ranks share its head"),
        (not head.shard_indices.num_org_vocab_padding, f"{head.org_vocab_size} tokens are no multiple of 64"),
        (logits.scale > 0 and not logits.logits_as_input, "its logits are scaled by another than a positive number"),
    )
    return next((reason for fine, reason in checks if not fine), "")


def top_tokens(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The target's token of each row's largest logit, int64 [rows], of an Eagle3LlamaForCausalLM.

    Args:
        hidden_states: [rows, hidden].
    """
    if not hasattr(self, "jitmx_targets"):
        stock: torch.Tensor = LocalArgmaxMixin.get_top_tokens(self, hidden_states)
        return stock
    head = self.lm_head
    n, k, layout = head.jitmx_packed
    best: torch.Tensor = torch.ops.jitmx.linear_argmax(
        hidden_states.contiguous(), head.weight_packed, head.weight_scale, n, k, layout, None, None, 0.0
    )
    return best if self.jitmx_targets is None else self.jitmx_targets[best]


# By who has it and under which name: what is put in its place.
PATCHED: dict[tuple[Any, str], Any] = {
    (llama_eagle3, "get_draft_quant_config"): _config,
    (llama_eagle3, "LlamaDecoderLayer"): JitmxDraftLayer,
    (llama_eagle3.Eagle3LlamaForCausalLM, "get_top_tokens"): top_tokens,
    (utils, "_should_share"): _shares,
    (EagleSpeculator, "load_draft_model"): _load,
    (eagle3_utils, "get_eagle3_aux_layers_from_config"): _aux_layers,
}


@functools.cache
def _say_left(why: str) -> None:
    logger.warning("vLLM serves the draft model, whose layers jitmx was asked for: %s", why)
