"""The vocabulary projection of a vLLM model on a packed weight.

gpt-oss builds its lm_head without a quantization config, so that no config can decide on it. vLLM lets a plugin replace
the class; this one differs from vLLM's only in which method it is built with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from jitmx.layers import FORMATS
from jitmx.vllm.draft_config import JitmxDraftConfig
from jitmx.vllm.linear import JitmxLinearMethod, refusal
from jitmx.vllm.log import logger
from jitmx.vllm.policy import Decision

# What vLLM compiles the served model under; a draft is built under a tag of its own.
_SERVED = "backbone"


_decide: Callable[[str, bool, str], Decision] | None = None


def register(decide: Callable[[str, bool, str], Decision]) -> None:
    """Have vLLM build every `ParallelLMHead` through this module, from now on and by this policy.

    May be called again, as vLLM does with its plugins in every process: the last policy counts. Where another plugin
    has replaced the class before, that one stays, and a warning says so.

    Args:
        decide: from a head's full name, whether it shares its weight with the embedding, and what else stands against
            a packed one (in words; empty where nothing), to its format and why. The name of a draft's head starts with
            the tag that vLLM builds the draft under, such as `eagle_head.lm_head`: by its own name alone it could not
            be told from the served model's.
    """
    global _decide
    _decide = decide
    name = ParallelLMHead.__name__
    if op_registry_oot.setdefault(name, JitmxLMHead) is not JitmxLMHead:
        logger.warning("lm_head stays in bf16: another plugin has replaced vLLM's %s", name)


class JitmxLMHead(ParallelLMHead):  # type: ignore[misc]
    """vLLM's `ParallelLMHead`, by the method that the policy picks; arguments are those of vLLM's.

    Vocabulary, padding and shards are vLLM's: rows of padding are zeros, and `LogitsProcessor` cuts their logits off.
    """

    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(ParallelLMHead.__init__).bind(self, *args, **kwargs)
        asked.apply_defaults()
        if asked.arguments["quant_method"] is None:
            kwargs["quant_method"] = _method(
                asked.arguments["prefix"],
                asked.arguments["embedding_dim"],
                asked.arguments["params_dtype"] or torch.get_default_dtype(),
                asked.arguments["quant_config"],
            )
        super().__init__(*args, **kwargs)
        if isinstance(self.quant_method, JitmxLinearMethod):
            self.quant_method.begin(self)

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> Any:
        """Share the embedding's weight, which is looked up in as well and stays as it is."""
        if isinstance(self.quant_method, JitmxLinearMethod):
            logger.warning("%s stays in bf16: it shares its weight with the embedding", self.prefix)
            self.quant_method = self.quant_method.stock
            get_layerwise_info(self).reset()  # nothing will be loaded into the head itself
        return super().tie_weights(embed_tokens)


def _method(prefix: str, k: int, dtype: torch.dtype, quant_config: Any) -> JitmxLinearMethod | None:
    """What a head is built with; None is vLLM's own choice."""
    from vllm.compilation.backends import model_tag

    if _decide is None:
        return None
    config = get_current_vllm_config_or_none()
    named = model_tag == _SERVED or prefix.startswith(f"{model_tag}.")
    name = prefix if named else f"{model_tag}.{prefix}"
    tied = config is not None and _tied(config, model_tag)
    against = _obstacle(config, tied, dtype, quant_config) or refusal(FORMATS["lm_head"][0], k, dtype) or ""
    decision = _decide(name, tied, against)
    if decision.format is None:
        logger.debug("%s stays in bf16: %s", name, decision.reason)
        return None
    if against:
        logger.warning("%s stays in bf16: %s", name, against)
        return None
    logger.debug("%s is quantized to %s: %s", name, decision.format, decision.reason)
    return JitmxLinearMethod(decision.format, name, UnquantizedEmbeddingMethod(), decision.all_scales)


def _tied(config: VllmConfig, tag: str) -> bool:
    """Whether the config of the model that is being built says that its head shares the embedding's weight.

    A checkpoint may hold a copy of its own all the same; vLLM then loads that and shares again if both are equal.
    """
    model, draft = config.model_config, getattr(config.speculative_config, "draft_model_config", None)
    if tag != _SERVED and draft is not None:
        model = draft
    if model is None:
        return False
    said = (getattr(found, "tie_word_embeddings", False) for found in (model.hf_config, model.hf_text_config))
    return any(said) or bool(model.word_embeddings_untied_by_checkpoint)


def _obstacle(config: VllmConfig | None, tied: bool, dtype: torch.dtype, quant_config: Any) -> str | None:
    """What of vLLM's own needs a head in bf16, or None."""
    if tied:
        return "its config says that it shares its weight with the embedding, which is looked up in as well"
    if quant_config is not None and not isinstance(quant_config, JitmxDraftConfig):
        return f"the model has a quantization config for it, {type(quant_config).__name__}"
    if config is None:
        return None
    if config.lora_config is not None:
        return "LoRA adapters may be added to it"
    if config.model_config is not None and config.model_config.head_dtype != dtype:
        return f"head_dtype={config.model_config.head_dtype} asks for logits that are not of the weight's {dtype}"
    if getattr(config.speculative_config, "draft_lm_head_quantization", None) is not None:
        return "draft_lm_head_quantization makes the draft's head of the bf16 weight"
    return None
