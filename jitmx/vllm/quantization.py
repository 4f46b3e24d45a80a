"""The quantization configuration of a gpt-oss model that jitmx serves: layer by layer, who takes it."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from jitmx import layers, settings
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.serving import attention as attention_kernels
from jitmx.serving.linear import gains
from jitmx.vllm import compiled, facts, hooks, policy, router
from jitmx.vllm.log import logger
from jitmx.vllm.policy import Attention, Block, Decision, Layer
from jitmx.vllm.request import STOCK_KERNELS, Request, requested

_LINEAR = {".qkv_proj": "qkv", ".o_proj": "o"}
# What the log, and the key for compiled code, put before a kind of layer of a draft model.
_DRAFTS = "the draft model's "


class JitmxGptOssConfig(GptOssMxfp4Config):  # type: ignore[misc]
    """vLLM's configuration for gpt-oss checkpoints, with jitmx's methods for the layers that it takes."""

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """What vLLM calls right before it builds a model, in the process that builds it: take over what is built.

        No earlier: importing the model initialises CUDA, and where a configuration is made vLLM may have to fork.
        """
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        started = time.perf_counter()
        if hooks.hold():
            install()
            logger.debug("jitmx is ready to take layers over after %.2f s", time.perf_counter() - started)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method for a layer: jitmx's or vLLM's."""
        if not hooks.hold():
            return super().get_quant_method(layer, prefix)
        kind = next((kind for suffix, kind in _LINEAR.items() if prefix.endswith(suffix)), None)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if kind is not None and isinstance(layer, LinearBase):
            decision = decide(Layer(kind, prefix, draft=facts.draft()))
            if decision.format is not None:
                from jitmx.vllm.linear import JitmxLinearMethod

                activation = _asked(get_current_vllm_config()).activation
                return JitmxLinearMethod(decision.format, prefix, all_scales=decision.all_scales, activation=activation)
        return super().get_quant_method(layer, prefix)

    def _experts(self, layer: Any, prefix: str) -> Any:
        gate = router.take(prefix)
        asked = _asked(get_current_vllm_config())
        decision = decide(Layer("moe", prefix, draft=facts.draft()), against_moe=facts.against_moe(layer))
        if decision.format is None:
            if asked.moe_kernel in STOCK_KERNELS and layer.moe_config.moe_backend == "auto":
                layer.moe_config.moe_backend = asked.moe_kernel
            return super().get_quant_method(layer, prefix)
        if asked.moe_kernel != "gemm" or asked.x_format != "bf16":
            settings.release("moe_knobs")  # which an engine before this one may have chosen
        elif not settings.current().value("moe_knobs"):
            settings.choose("moe_knobs", (("kernel", "grouped"),), asked.said["moe_kernel"])
        from jitmx.vllm.moe import JitmxMoEMethod

        method = JitmxMoEMethod(layer.moe_config, gate, asked.x_format, decision.all_scales)
        if method.gate is not None:
            compiled.add(get_current_vllm_config(), "router", decision.format)
        return method


def decide(layer: Layer, against_moe: str = "") -> Decision:
    """Who serves a layer of the model that is being built; said in the log when it is the first of its kind."""
    config = get_current_vllm_config()
    asked, found = _asked(config), facts.read(config)
    decision = policy.decide(layer, asked, replace(found, against_moe=against_moe))
    if layer.draft and not asked.draft:
        _announce_draft(layer.kind, layer.kind in asked.layers)
        return decision
    wanted, of = (asked.draft, _DRAFTS) if layer.draft else (asked.layers, "")
    _announce(of + layer.kind, decision, layer.kind in wanted, found.target)
    compiled.add(config, of + layer.kind, decision.format)
    return decision


def decide_lm_head(prefix: str, tied: bool, against: str = "") -> Decision:
    """Who serves a language-model head; only that of a model of this configuration is jitmx's to take.

    Args:
        against: what stands against a packed one, in words; empty where nothing.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not isinstance(config.quant_config, JitmxGptOssConfig):
        return Decision(None, "the model is not gpt-oss in MXFP4")
    return decide(Layer("lm_head", prefix, tied=tied, draft=facts.draft(), against=against))


def decide_block(found: Block) -> bool:
    """Whether norms and residual of a transformer block go into its products; said in the log once.

    Where vLLM serves some of them, each has a line of its own.
    """
    config = get_current_vllm_config()
    if not isinstance(config.quant_config, JitmxGptOssConfig) or facts.draft():
        return False
    asked, (target, _) = _asked(config), facts.target()

    def lacking(format: str) -> str:
        assert target is not None, "no layer is served without a target"
        if gains(target, found.n, found.hidden, format):
            return ""
        return f"the kernel for one row of QKV in {format} on {target} has no RMSNorm in it"

    against = policy.against_fusing(found, asked, lacking)
    if found.whole:
        _announce_block(against, None if target is None else target.name)
    compiled.add(config, "block", None if against else "fused")
    return not against


def decide_attention(module: Any, window: int | None, cache: Any, sinks: str = "sinks_bf16") -> Decision:
    """Who serves the attention of a layer; said in the log when it is the first of its kind.

    Args:
        module: vLLM's OAIAttention, which has the numbers of heads, or what has them by the same names.
        window: tokens that a token attends to, or None for all.
        cache: a CacheConfig, or None.
        sinks: as in `AttentionProblem`.
    """
    from jitmx.vllm import block

    config = get_current_vllm_config()
    asked, found = _asked(config), facts.read(config)
    other = "" if "OAIAttention._build_attention" not in block.changed() else "vLLM's code that builds it has changed"
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    layer = Attention(
        module.num_local_attention_heads, module.num_local_key_value_heads, module.head_dim, dtype,
        facts.cache_dtype(cache, module.layer_idx, window is not None),
        cache.block_size if cache is not None and cache.user_specified_block_size else None, facts.draft(),
        facts.attention_backend(config, window is not None), other or facts.against_attention(config),
    )  # fmt: skip

    def lacking() -> str:
        arch, _ = facts.target()
        assert arch is not None, "no layer is served without a target"
        problem = AttentionProblem(
            kv_heads=layer.kv_heads, dtype="fp16" if dtype == "float16" else "bf16", head_dim=layer.head_dim,
            cache="e4m3" if policy.cache_format(layer) == "e4m3" else "same", sinks=sinks, window=window or 0,
            group=layer.heads // layer.kv_heads, page_size=layer.page_size or 16,
        )  # fmt: skip
        return attention_kernels.lacking(problem, arch)

    decision = policy.decide_attention(layer, asked, found, lacking)
    if layer.draft and not asked.draft:
        _announce_draft("attention", asked.serves_attention(found.lora))
    else:
        kind = f"{_DRAFTS if layer.draft else ''}attention{'' if window is None else ' within a window'}"
        told = bool(asked.attention) or layer.backend == policy.OWN_BACKEND
        _announce(kind, decision, told, found.target)
        if decision.format is None and not told and asked.serves_attention(found.lora):
            _announce_other(kind, decision.reason)
        compiled.add(config, _DRAFTS + "attention" if layer.draft else "attention", decision.format)
    return decision


def draft_layers(config: Any) -> tuple[str, ...]:
    """The layers of its draft model that the engine of a VllmConfig is to have from jitmx."""
    if not isinstance(config.quant_config, JitmxGptOssConfig):
        return ()
    return tuple(_asked(config).draft)


def decide_draft_block(layer: Any, against: str) -> bool:
    """Whether norm and residual of a draft's layer go into its products; said in the log once.

    Args:
        layer: vLLM's, whose O, gate-up and down are jitmx's.
        against: what stands against it, in words; empty where nothing.
    """
    config = get_current_vllm_config()
    asked, (target, _) = _asked(config), facts.target()
    assert target is not None, "no layer is served without a target"
    gate_up = layer.mlp.gate_up_proj
    if not asked.fuse_norm:
        against = f"{asked.said['fuse_norm']} asks for norms in launches of their own"
    elif not against and not gains(
        target, sum(gate_up.output_partition_sizes), layer.hidden_size, gate_up.quant_method.format
    ):
        against = f"the kernel for one row of gate-up in {gate_up.quant_method.format} on {target} has no RMSNorm in it"
    _announce_draft_block(against, target.name)
    compiled.add(config, _DRAFTS + "block", None if against else "fused")
    return not against


def decide_draft_head(head: Any) -> Decision:
    """Whether a draft without a head of its own has the target's, which is in bf16, packed.

    Args:
        head: the target's.
    """
    from jitmx.vllm.linear import refusal

    config = get_current_vllm_config()
    wanted = _asked(config).draft.get("lm_head")
    against = "" if wanted is None else refusal(wanted, head.embedding_dim, head.weight.dtype) or ""
    if config.speculative_config.draft_lm_head_quantization is not None:
        against = "draft_lm_head_quantization makes the draft's head of the bf16 weight"
    return decide(Layer("lm_head", "lm_head of the draft", draft=True, against=against))


def decide_sampler(config: Any, against: str) -> bool:
    """Whether jitmx takes the tokens of greedy batches; said in the log once.

    Args:
        config: the VllmConfig of the engine.
        against: what stands against it, in words; empty where nothing.
    """
    if not isinstance(config.quant_config, JitmxGptOssConfig):
        return False
    asked, found = _asked(config), facts.read(config)
    if not (asked.layers or asked.attention):
        return False
    against = policy.against_greedy(asked, found) or against
    _announce_sampler(against, found.target)
    return not against


def install() -> None:
    """Put jitmx's classes in the place of vLLM's where a layer asks for no configuration. Again, it changes nothing."""
    from jitmx.vllm import block, lm_head

    router.install()
    lm_head.register(decide_lm_head)
    block.install(decide_block, decide_attention)
    moved = hooks.moved(hooks.DRAFT_HOOKS)
    if moved:
        _announce_no_draft(f"incompatible vLLM internals: {'; '.join(moved)}")
    else:
        from jitmx.vllm import draft, speculation

        draft.install(draft_layers, decide, decide_draft_block, decide_attention)
        speculation.install(decide_draft_head)
    moved = hooks.moved(hooks.SAMPLER_HOOKS)
    if moved:
        _announce_sampler(f"incompatible vLLM internals: {'; '.join(moved)}", None)
    else:
        from jitmx.vllm import sampler

        sampler.install(decide_sampler)


def _asked(config: Any) -> Request:
    options = config.additional_config
    return requested(options.get("jitmx") if isinstance(options, dict) else None)


@functools.cache
def _announce(kind: str, decision: Decision, wanted: bool, target: str | None) -> None:
    """One line for each kind of layer and decision on it; none for a layer that nobody asked jitmx to take."""
    if decision.format is not None:
        logger.info("jitmx serves %s in %s on %s (%s)", kind, decision.format, target, decision.reason)
    elif wanted:
        logger.warning("vLLM serves %s, jitmx is disabled for it: %s", kind, decision.reason)


@functools.cache
def _announce_other(kind: str, reason: str) -> None:
    """One line for what would be jitmx's by default; no warning, for nobody asked for it."""
    logger.info("vLLM serves %s: %s", kind, reason)


@functools.cache
def _announce_draft(kind: str, wanted: bool) -> None:
    """One line for each kind of layer of a draft model; no warning, for who asked for it meant the target's."""
    if wanted:
        logger.info("vLLM serves the draft model's own %s; jitmx serves layers of the target model only", kind)


@functools.cache
def _announce_draft_block(against: str, target: str) -> None:
    """One line on the layers of a draft whose products are jitmx's."""
    if against:
        logger.warning("vLLM normalises and adds the residual of the draft model in launches of its own: %s", against)
    else:
        logger.info("jitmx normalises and adds the residual within the products of the draft model on %s", target)


@functools.cache
def _announce_no_draft(why: str) -> None:
    """One line where no draft model can be taken over."""
    logger.warning("vLLM serves every layer of a draft model: %s", why)


@functools.cache
def _announce_block(against: str, target: str | None) -> None:
    """One line on the blocks of a model whose layers are all to be jitmx's."""
    if against:
        logger.warning("vLLM normalises and adds the residual in launches of its own: %s", against)
    else:
        logger.info("jitmx normalises and adds the residual within the products of a block on %s", target)


@functools.cache
def _announce_sampler(against: str, target: str | None) -> None:
    """One line on who takes the tokens of greedy batches."""
    if against:
        logger.info("vLLM samples the tokens of every batch: %s", against)
    else:
        logger.info("jitmx takes the tokens of batches whose requests are all greedy on %s, in one launch", target)


assert set(_LINEAR.values()) < set(layers.KINDS)
