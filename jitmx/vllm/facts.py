"""What stands for or against jitmx in this process, read from vLLM's configuration."""

from __future__ import annotations

import functools
from typing import Any

from jitmx import arch
from jitmx.errors import ArchError
from jitmx.vllm.policy import OWN_BACKEND, Facts

# The backend that the plugin registers with vLLM.
ATTENTION = "jitmx.vllm.attention.JitmxAttentionBackend"
# What vLLM calls the part of a process that is no draft model.
_TARGET_MODEL = "backbone"


@functools.cache
def target() -> tuple[arch.Arch | None, str]:
    """The SM target of this process's device; or None, and why there is none."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None, f"jitmx's kernels run on CUDA devices, and vLLM runs on {current_platform.device_name}"
    capability = current_platform.get_device_capability()
    if capability is None:
        return None, "the device's compute capability is not known"
    try:
        return arch.of_device(capability.major, capability.minor), ""
    except ArchError as error:
        return None, str(error)


def read(config: Any) -> Facts:
    """Facts of a process that serves `config`, a VllmConfig."""
    from vllm import envs

    found, reason = target()
    lora, model = config.lora_config, config.model_config
    return Facts(
        target=None if found is None else found.name,
        no_target=reason,
        lora=lora is not None,
        lora_experts=lora is not None and adapts_experts(lora.target_modules),
        tied=bool(model is not None and getattr(model.hf_text_config, "tie_word_embeddings", False)),
        backend=str(config.kernel_config.moe_backend),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        ubatches=bool(config.parallel_config.use_ubatching),
        offloaded=offloaded(config.offload_config),
    )


def adapts_experts(targets: list[str] | None) -> bool:
    """Whether adapters may be loaded onto experts of any layer.

    Args:
        targets: modules by the ends of their names or by whole names, `experts` or `model.layers.3.mlp.experts` or, of
            some adapters, `experts.w1`; None for all.
    """
    return targets is None or any("experts" in target.split(".") for target in targets)


def offloaded(config: Any) -> bool:
    """Whether an OffloadConfig asks for weights in the host's memory."""
    return bool(config.uva.cpu_offload_gb > 0 or config.prefetch.offload_group_size > 0)


def draft() -> bool:
    """Whether the model that is being built is a draft model."""
    from vllm.compilation import backends

    return bool(backends.model_tag != _TARGET_MODEL)


def attention_backend(config: Any, windowed: bool) -> str:
    """The attention backend that the user chose for layers with a window, or for those without; else an empty text."""
    kind = "sliding_window" if windowed else "full_attention"
    chosen = config.attention_config.backend_per_kind.get(kind, config.attention_config.backend)
    if chosen is None:
        return ""
    path = chosen.get_path()
    return str(chosen.name) if chosen.name != OWN_BACKEND or path == ATTENTION else f"another plugin's backend, {path}"


def cache_dtype(cache: Any, layer: int, windowed: bool) -> str:
    """What vLLM keeps the cache of a layer in, by its kv_cache_dtype: "auto" is the type of the model.

    Args:
        cache: a CacheConfig, or None.
        layer: its number.
        windowed: its tokens attend to the last ones only.
    """
    if cache is None:
        return "auto"
    skipped = cache.kv_cache_dtype_skip_layers
    return "auto" if str(layer) in skipped or (windowed and "sliding_window" in skipped) else str(cache.cache_dtype)


def against_attention(config: Any) -> str:
    """What jitmx's attention cannot do of what `config`, a VllmConfig, asks for, in words; empty where it can."""
    parallel, model = config.parallel_config, config.model_config
    checks = (
        (parallel.decode_context_parallel_size == 1, "ranks share the cache of a request (decode context parallel)"),
        (parallel.prefill_context_parallel_size == 1, "ranks share a prompt (prefill context parallel)"),
        (not config.attention_config.use_non_causal, "attention is not causal (attention_config.use_non_causal)"),
        (model is None or not model.is_mm_prefix_lm, "tokens of an image attend to later ones"),
        (model is None or model.rswa_window is None, "the model keeps its prompt beside a window (R-SWA)"),
    )
    return next((reason for fine, reason in checks if not fine), "")


def against_moe(layer: Any) -> str:
    """What jitmx's experts cannot do of what a RoutedExperts layer is for, in words; empty where they can."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    checks = (
        (moe.activation == MoEActivation.SWIGLUOAI, f"the activation is {moe.activation.value}, not swigluoai"),
        (
            parallel.use_ag_rs_all2all_kernels
            or not (parallel.use_all2all_kernels or parallel.use_passthrough_all2all),
            f"ranks exchange tokens by {parallel.all2all_backend}; with --all2all-backend allgather_reducescatter "
            "jitmx serves the experts",
        ),
        (not parallel.enable_eplb, "experts are moved between ranks while serving (EPLB)"),
        (not layer.apply_router_weight_on_input, "router weights are applied to the input"),
        (
            layer.scoring_func == "softmax" and not layer.use_grouped_topk and layer.custom_routing_function is None
            and layer.e_score_correction_bias is None and layer.routed_scaling_factor == 1.0,
            "the routing is not a softmax over the experts",
        ),
        (moe.hidden_dim % 32 == 0, f"{moe.hidden_dim} hidden values are no multiple of 32, those that share a scale"),
        (1 <= moe.experts_per_token <= 8, f"{moe.experts_per_token} experts a token are over 8"),
        (moe.num_experts <= 512, f"{moe.num_experts} experts are over 512"),
    )  # fmt: skip
    return next((reason for fine, reason in checks if not fine), "")
