"""Everything of vLLM that the plugin relies on, with the parameters that it is called with or calls.

`hold` is asked once a process before anything is taken over: in a release where one of these is gone or takes other
parameters, jitmx is disabled. The contract tests ask the same of the releases that are supported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jitmx.vllm.log import logger


@dataclass(frozen=True)
class Hook:
    """One name of vLLM: where it is, and parameters that it must have."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def problem(self) -> str:
        """What is wrong with it, or an empty text."""
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} is gone ({error})"
        if not self.parameters:
            return ""
        takes = tuple(inspect.signature(found).parameters)
        missing = [name for name in self.parameters if name not in takes]
        return f"{self.module}.{self.name} takes ({', '.join(takes)}) without {', '.join(missing)}" if missing else ""


# By module: names, each with the parameters that it must have; no text where none matter.
_TABLE: dict[str, dict[str, str]] = {
    "vllm.config": {
        "get_current_vllm_config": "",
        "get_current_vllm_config_or_none": "",
        "get_layers_from_vllm_config": "vllm_config layer_type layer_names",
        "LoRAConfig": "target_modules",
    },
    "vllm.config.offload": {
        "OffloadConfig": "uva prefetch",
        "UVAOffloadConfig": "cpu_offload_gb",
        "PrefetchOffloadConfig": "offload_group_size",
    },
    "vllm.envs": {"VLLM_BATCH_INVARIANT": "", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ""},
    "vllm.compilation.backends": {"model_tag": ""},
    "vllm.model_executor.custom_op": {"op_registry_oot": ""},
    "vllm.model_executor.model_loader.utils": {"configure_quant_config": "quant_config model_class"},
    "vllm.model_executor.utils": {"replace_parameter": "layer param_name new_tensor"},
    "vllm.model_executor.layers.layernorm": {"RMSNorm.__init__": "hidden_size eps var_hidden_size has_weight"},
    "vllm.model_executor.models.gpt_oss": {
        "MLPBlock.forward": "self x",
        "GptOssRoutedExperts": "",
        "GptOssModel.block_cls": "",
        "GptOssModel.forward": "self input_ids positions intermediate_tensors inputs_embeds",
        "TransformerBlock.__init__": "self vllm_config",
        "TransformerBlock.attention_cls": "",
        "OAIAttention._build_attention": "self config cache_config quant_config prefix",
        "Attention": "",
        "OAIAttention.forward": "self hidden_states positions",
        "TransformerBlock.forward": "self hidden_states positions residual",
    },
    "vllm.model_executor.layers.attention": {
        "Attention.__init__": (
            "num_heads head_size scale num_kv_heads cache_config quant_config per_layer_sliding_window prefix "
            "attn_backend extra_impl_args"
        ),
        "Attention.process_weights_after_loading": "self act_dtype",
    },
    "vllm.model_executor.layers.rotary_embedding.base": {
        "RotaryEmbedding.__init__": "head_size rotary_dim is_neox_style dtype",
        "RotaryEmbedding.forward_cuda": "positions query key",
        "RotaryEmbedding.forward_native": "positions query key",
        "RotaryEmbedding.forward_static": "cos_sin_cache",
    },
    "vllm.v1.attention.backend": {
        "AttentionBackend.forward_includes_kv_cache_update": "",
        "AttentionBackend.validate_configuration": (
            "head_size dtype kv_cache_dtype block_size has_sink attn_type has_sliding_window use_dcp"
        ),
        "AttentionBackend.supports_combination": "head_size dtype kv_cache_dtype block_size",
        "AttentionBackend.supported_kv_cache_layouts": "",
        "AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
        "AttentionCGSupport.ALWAYS": "",
        "AttentionImpl.__init__": (
            "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
            "attn_type kv_sharing_target_layer_name"
        ),
        "AttentionImpl.forward": (
            "layer query key value kv_cache attn_metadata output output_scale output_block_scale"
        ),
        "AttentionImpl.process_weights_after_loading": "act_dtype",
        "AttentionMetadata": "",
        "AttentionMetadataBuilder.__init__": "kv_cache_spec layer_names vllm_config device",
        "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
        "AttentionMetadataBuilder.build_for_cudagraph_capture": "common_attn_metadata",
        "AttentionMetadataBuilder.supports_draft_decode_metadata_update": "",
        "AttentionMetadataBuilder.update_draft_decode_metadata": "metadata",
        "AttentionMetadataBuilder.update_block_table": "metadata blk_table slot_mapping",
        "AttentionType.DECODER": "",
        "CommonAttentionMetadata.__init__": (
            "query_start_loc seq_lens max_query_len max_seq_len block_table_tensor slot_mapping causal"
        ),
        "MultipleOf": "base",
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum.CUSTOM": "",
        "AttentionBackendEnum.get_path": "",
        "AttentionBackendEnum.is_overridden": "",
        "register_backend": "backend class_path",
    },
    "vllm.v1.kv_cache_layout": {
        f"KVCacheLayout.{name}": "" for name in ("LBHNC", "BLHNC", "LBNHC", "BLNHC", "LHBNC", "BHLNC")
    },
    "vllm.config.attention": {"AttentionConfig": "backend backend_per_kind use_non_causal"},
    "vllm.config.cache": {"CacheConfig": "block_size cache_dtype kv_cache_dtype_skip_layers"},
    "vllm.model_executor.warmup.jit_warmup": {
        "VllmJitKernel.get_warmup_keys": "self",
        "VllmJitKernel.compile": "self compile_key",
        "VllmJitKernel.compile_many": "self compile_keys",
        "VllmJitKernel.register_warmup": "self",
        "JitWarmupRegistry.activate": "self",
    },
    "vllm.model_executor.layers.quantization": {"register_quantization_config": "quantization"},
    "vllm.model_executor.layers.quantization.mxfp4": {
        "GptOssMxfp4Config.__init__": "ignored_layers",
        "GptOssMxfp4Config.get_quant_method": "layer prefix",
        "GptOssMxfp4Config._make_moe_method": "moe",
        "GptOssMxfp4Config.apply_vllm_mapper": "hf_to_vllm_mapper",
        "GptOssMxfp4Config.override_quantization_method": "hf_quant_cfg user_quant hf_config",
        "GptOssMxfp4MoEMethod.__init__": "moe",
        "GptOssMxfp4MoEMethod.create_weights": (
            "layer num_experts hidden_size intermediate_size_per_partition params_dtype"
        ),
        "GptOssMxfp4MoEMethod.process_weights_after_loading": "layer",
        "GptOssMxfp4MoEMethod.get_fused_moe_quant_config": "layer",
        "GptOssMxfp4MoEMethod.maybe_roundup_sizes": (
            "hidden_size intermediate_size_per_partition act_dtype moe_parallel_config"
        ),
        "GptOssMxfp4MoEMethod.apply": "layer x topk_weights topk_ids shared_experts shared_experts_input",
        "GptOssMxfp4MoEMethod.apply_monolithic": "layer x router_logits input_ids",
        "Mxfp4MoeBackend.NONE": "",
    },
    "vllm.model_executor.layers.fused_moe": {
        "FusedMoEMethodBase.is_monolithic": "",
        "FusedMoEMethodBase.topk_indices_dtype": "",
        "RoutedExperts.__init__": (
            "layer_name moe_config renormalize use_grouped_topk custom_routing_function scoring_func "
            "routed_scaling_factor e_score_correction_bias apply_router_weight_on_input"
        ),
        "RoutedExperts.expert_map": "",
    },
    "vllm.model_executor.layers.fused_moe.activation": {"MoEActivation.SWIGLUOAI": ""},
    "vllm.model_executor.layers.fused_moe.config": {
        "mxfp4_w4a16_moe_quant_config": "w1_scale w2_scale w1_bias w2_bias",
        "FusedMoEConfig.__init__": (
            "num_experts experts_per_token hidden_dim moe_backend max_num_tokens max_capture_size has_bias "
            "is_lora_enabled require_decomposed_backend"
        ),
        "FusedMoEParallelConfig.__init__": "tp_size pcp_size dp_size sp_size tp_rank all2all_backend enable_eplb",
        "FusedMoEParallelConfig.use_all2all_kernels": "",
        "FusedMoEParallelConfig.use_ag_rs_all2all_kernels": "",
        "FusedMoEParallelConfig.use_passthrough_all2all": "",
    },
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": {"MoERunner.do_naive_dispatch_combine": ""},
    "vllm.model_executor.layers.fused_moe.router.gate_linear": {
        "GateLinear.__init__": "input_size output_size bias out_dtype prefix return_bias skip_bias_add",
        "GateLinear.forward": "x",
        "GateLinear.register_oot": "",
    },
}

# What jitmx's sampler relies on: where one of these has changed, it is left out, and nothing else is.
_SAMPLER_TABLE: dict[str, dict[str, str]] = {
    "vllm.model_executor.models.gpt_oss": {"GptOssForCausalLM": "vllm_config prefix"},
    "vllm.v1.worker.gpu.model_states": {"resolve_model_state_cls": "vllm_config model"},
    "vllm.v1.worker.gpu.model_states.interface": {
        "ModelState.__init__": "vllm_config model encoder_cache device",
        "ModelState.custom_sampler": "sampler",
    },
    "vllm.v1.worker.gpu.sample.sampler": {
        "Sampler.__init__": "max_num_reqs enable_trace_replay return_sampling_mask custom_logits_processors",
        "Sampler.__call__": "logits input_batch",
        "Sampler.add_request": "req_idx sampling_params",
    },
    "vllm.v1.worker.gpu.sample.output": {
        "SamplerOutput": "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected sampling_mask_tensors",
    },
    "vllm.v1.worker.gpu.sample.states": {"NO_LOGPROBS": ""},
    "vllm.v1.worker.gpu.input_batch": {
        "InputBatch": "num_reqs idx_mapping idx_mapping_np num_draft_tokens seq_lens",
        "get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
    },
}


# What a draft model on jitmx relies on: where one of these has changed, the draft is vLLM's, and nothing else is.
_DRAFT_TABLE: dict[str, dict[str, str]] = {
    "vllm.config.speculative": {
        "SpeculativeConfig": "draft_sample_method enable_adaptive_verification use_heterogeneous_vocab "
        "use_local_argmax_reduction rejection_sample_method",
    },
    "vllm.model_executor.layers.linear": {"LinearBase": "", "UnquantizedLinearMethod": ""},
    "vllm.model_executor.layers.quantization.base_config": {
        "QuantizationConfig.get_quant_method": "layer prefix",
    },
    "vllm.model_executor.models.llama": {
        "LlamaAttention.forward": "positions hidden_states",
        "LlamaMLP.forward": "x",
        "Attention": "",
    },
    "vllm.model_executor.models.llama_eagle3": {
        "LlamaDecoderLayer.__init__": "vllm_config prefix config layer_idx",
        "LlamaDecoderLayer.forward": "positions embeds hidden_states residual",
        "LlamaDecoderLayer._norm_before_residual": "hidden_states",
        "LlamaModel.forward": "input_ids positions hidden_states input_embeds",
        "Eagle3LlamaForCausalLM.__init__": "vllm_config prefix",
        "Eagle3LlamaForCausalLM.compute_logits": "hidden_states",
        "Eagle3LlamaForCausalLM.get_top_tokens": "hidden_states",
        "Eagle3LlamaForCausalLM.load_weights": "weights",
        "get_draft_quant_config": "vllm_config",
    },
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": {
        "get_eagle3_aux_layers_from_config": "spec_config",
        "set_eagle3_aux_hidden_state_layers": "model spec_config",
    },
    "vllm.v1.worker.gpu.spec_decode.eagle.utils": {"_should_share": "eagle flag draft target"},
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator": {
        "EagleSpeculator.load_draft_model": "target_model target_attn_layer_names",
        "EagleSpeculator.sample_draft": "hidden_states draft_logits",
        "EagleSpeculator.get_draft_top_tokens": "hidden_states",
    },
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": {
        "TargetDependentARSpeculator._generate_fused_drafts": "num_reqs num_tokens_padded attn_metadata slot_mappings",
        "TargetDependentARSpeculator._generate_draft": "num_reqs num_tokens_padded attn_metadata slot_mappings "
        "num_tokens_across_dp cudagraph_runtime_mode num_speculative_steps",
        "TargetDependentARSpeculator._update_draft_decode_metadata": "attn_metadata num_reqs",
    },
    "vllm.v1.worker.gpu.block_table": {
        "BlockTables.__init__": "cp_size",
        "BlockTables.compute_slot_mappings": "idx_mapping query_start_loc positions num_tokens_padded out",
    },
}


def _hooks(table: Mapping[str, Mapping[str, str]]) -> tuple[Hook, ...]:
    return tuple(
        Hook(module, name, tuple(takes.split())) for module, names in table.items() for name, takes in names.items()
    )


HOOKS = _hooks(_TABLE)
SAMPLER_HOOKS = _hooks(_SAMPLER_TABLE)
DRAFT_HOOKS = _hooks(_DRAFT_TABLE)


def moved(hooks: Iterable[Hook] | None = None) -> list[str]:
    """What is wrong with each hook, by default of `HOOKS`, that is not as it is relied on."""
    return [problem for hook in (HOOKS if hooks is None else hooks) if (problem := hook.problem())]


def digest(found: Any) -> str:
    """Of the code of a function or class, or of what Triton compiles, whatever its comments and spaces."""
    source = textwrap.dedent(inspect.getsource(getattr(found, "fn", found)))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:  # the last of its line; other kinds of tokens differ between Pythons
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return hashlib.sha256("".join("".join(lines).split()).encode()).hexdigest()[:16]


def changed(known: Mapping[str, tuple[Any, str]]) -> tuple[str, ...]:
    """Names of functions and classes whose code is another than the one beside them in `known`, by `digest`."""

    def is_known(found: Any, wanted: str) -> bool:
        try:
            return digest(found) == wanted
        except (OSError, TypeError):  # it has no source
            return False

    return tuple(name for name, (found, wanted) in known.items() if not is_known(found, wanted))


@functools.cache
def hold() -> bool:
    """Whether vLLM is as this module says; said in the log where it is not."""
    found = moved()
    if found:
        logger.error(
            "jitmx is disabled, and vLLM serves every layer: incompatible vLLM internals: %s", "; ".join(found)
        )
    return not found
