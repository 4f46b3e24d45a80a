"""Everything of vLLM that the plugin relies on, with the parameters that it is called with or calls.

`hold` is asked once a process before anything is taken over: in a release where one of these is gone or takes other
parameters, jitmx is disabled. The contract tests ask the same of the releases that are supported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
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
    "vllm._custom_ops": {"rms_norm": "out input weight epsilon"},
    "vllm.model_executor.layers.layernorm": {"RMSNorm.__init__": "hidden_size eps var_hidden_size has_weight"},
    "vllm.model_executor.models.gpt_oss": {
        "MLPBlock.forward": "self x",
        "GptOssRoutedExperts": "",
        "GptOssModel.block_cls": "",
        "GptOssModel.forward": "self input_ids positions intermediate_tensors inputs_embeds",
        "TransformerBlock.__init__": "self vllm_config",
        "OAIAttention.forward": "self hidden_states positions",
        "TransformerBlock.forward": "self hidden_states positions residual",
    },
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

HOOKS = tuple(
    Hook(module, name, tuple(takes.split())) for module, names in _TABLE.items() for name, takes in names.items()
)


def moved() -> list[str]:
    """What is wrong with each hook that is not as it is relied on."""
    return [problem for hook in HOOKS if (problem := hook.problem())]


@functools.cache
def hold() -> bool:
    """Whether vLLM is as this module says; said in the log where it is not."""
    found = moved()
    if found:
        logger.error(
            "jitmx is disabled, and vLLM serves every layer: incompatible vLLM internals: %s", "; ".join(found)
        )
    return not found
