"""The experts of a gpt-oss layer: vLLM's method for them, on jitmx's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoeBackend

import jitmx
from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import NORMAL_SCALES, preferred_encoding
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe.experts import PackedExperts
from jitmx.serving.experts import Experts, of_experts, routed_rows
from jitmx.serving.linear import Packer
from jitmx.serving.rounded_inputs import x_format_of
from jitmx.vllm import ahead, compiled, facts, monitor, warmup
from jitmx.vllm.log import logger
from jitmx.vllm.packing import make_room, pack_layer, processing, timed
from jitmx.vllm.router import RouterLinear


class JitmxMoEMethod(GptOssMxfp4MoEMethod):  # type: ignore[misc]
    """Experts whose routing, products and sum are jitmx's.

    vLLM gives it hidden states and router logits. Where the router was taken over it gives no logits, and few
    tokens are two launches: the routing, and the experts. With LoRA, and where vLLM itself has to see which experts
    are chosen, vLLM chooses and jitmx gets ids and weights.

    Args:
        moe: vLLM's configuration of the layer.
        gate: the router, if it can be taken over.
        x_format: what the experts' inputs are rounded to, as for `jitmx.moe`; with fp8 those of many rows an expert.
        all_scales: take kernels for all scales from the start: weights that are loaded again may have any.
    """

    def __init__(self, moe: Any, gate: RouterLinear | None, x_format: str = "bf16", all_scales: bool = False) -> None:
        # Not the parent's, which picks one of vLLM's own kernels.
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend = Mxfp4MoeBackend.NONE
        self.experts_cls = None
        self.max_capture_size = moe.max_capture_size
        self._whole = not (moe.is_lora_enabled or moe.require_decomposed_backend or _routing_is_returned())
        # Ranks that gather each other's tokens before the experts gather logits with them.
        parallel = moe.moe_parallel_config
        self._gathered = parallel.dp_size * parallel.pcp_size
        # Where tensor parallel ranks split them first, each takes as many.
        self._rows = self._gathered * -(-moe.max_num_tokens // parallel.sp_size) * parallel.sp_size
        # vLLM's simulated routing gives random logits for the router's, which someone has to look at.
        simulated = bool(envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY)
        self.gate = gate if self._whole and self._gathered == 1 and not simulated else None
        if self.gate is not None:
            self.gate.taken = True
        # A scale a row goes with weights whose scales are folded into them.
        self._x_format, self._all_scales = "mxfp8" if x_format == "fp8" and all_scales else x_format, all_scales
        self._packed: tuple[PackedExperts, PackedExperts] | None = None
        self._in_block = False

    def in_block(self) -> None:
        """From now on, before weights are loaded, the layer is served by `apply_in_block`."""
        assert self.gate is not None, "a block normalises for the router as well, which has to be taken over"
        self._in_block = True

    @property
    def is_monolithic(self) -> bool:
        """Whether it gets router logits, not ids and weights."""
        return self._whole

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """Of the ids that vLLM chooses."""
        return torch.int32

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sizes of this rank's shard: whole blocks that share a scale, which is how a checkpoint is split."""
        hidden, intermediate = FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return hidden, -(-intermediate // formats.BLOCK) * formats.BLOCK

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's parameters. What no checkpoint fills, in the last shard of an uneven split, has scales of one."""
        super().create_weights(layer, *args, **kwargs)
        for name in ("w13", "w2"):
            make_room(layer, name)
            getattr(layer, f"{name}_weight_scale").data.fill_(formats.SCALE_ONE)

    def begin(self, layer: Any) -> None:
        """Begin with the kernels that the layer will ask for; its block has said whether it fuses."""
        for needed in self._needed(layer):
            ahead.begin(needed)

    @processing()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights in place, and have every kernel that serving needs compiled and loaded.

        Weights that are loaded again take the kernels of the first: vLLM copies them to where those are.

        Raises:
            InputError: a reloaded weight has scales that the kernels in use do not take.
        """
        encoding = preferred_encoding(_arch(), self._x_format)
        packer, _ = self._needed(layer)
        warmup.prepare(packer)
        self._clear_rest(layer)
        with timed():
            w13 = pack_layer(layer, "w13", encoding)
        with timed():
            packed = w13, pack_layer(layer, "w2", encoding)
        if self._packed is None:
            w13, w2 = packed
            if self._all_scales:
                w13, w2 = replace(w13, scale_range="full"), replace(w2, scale_range="full")
            if self._x_format == "fp8" and _scale_range((w13, w2)) == "full":
                self._x_format = "mxfp8"
                logger.warning(
                    "%s: a weight has scales outside %s to %s, which fp8 products do not take; its inputs are rounded "
                    "to mxfp8",
                    layer.layer_name, *NORMAL_SCALES,
                )  # fmt: skip
            self._packed = w13, w2
        elif _scale_range(self._packed) == "normal" != _scale_range(packed):
            raise InputError(
                f"{layer.layer_name}: a reloaded weight has scales outside {' to '.join(map(str, NORMAL_SCALES))}, and "
                "CUDA graphs were made for those within. Layers before this one have new weights by now",
                "start a new engine on these, with JITMX_ALL_SCALES=1 (additional_config's all_scales) "
                "if it is to take any",
            )
        if self._x_format == "fp8":  # of weights that are loaded again, too
            for weight in self._packed:
                weight.refresh_rows()
                found = expert_operand.find(
                    weight.words, weight.scales, weight.n, weight.k, expert_operand.layout(weight)
                )
                found.adopt(weight.row_words, weight.words)
        w13, w2 = self._packed
        layer.jitmx_packed = w13.k, w2.k, expert_operand.layout(w13), expert_operand.layout(w2)
        for name, weight in (("w13", w13), ("w2", w2)):
            if self._in_block and weight.scale_range != "normal":
                compiled.full_scales(get_current_vllm_config_or_none(), f"{layer.layer_name}.{name}")
        self.moe_quant_config = None  # vLLM asks for it again, of what is there then
        _, experts = self._needed(layer)
        warmup.prepare(experts)

    def _clear_rest(self, layer: Any) -> None:
        """Clear what no checkpoint fills: memory that vLLM makes to load weights again holds anything."""
        size, rank = self.intermediate_size, self.moe.moe_parallel_config.tp_rank
        filled = max(0, min(size, self.moe.intermediate_size - rank * size))
        layer.w13_weight.data[:, 2 * filled :].zero_()
        layer.w13_weight_scale.data[:, 2 * filled :].fill_(formats.SCALE_ONE)
        layer.w2_weight.data[..., filled // 2 :].zero_()
        layer.w2_weight_scale.data[..., filled // formats.BLOCK :].fill_(formats.SCALE_ONE)
        if self.moe.has_bias:
            layer.w13_bias.data[:, 2 * filled :].zero_()

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """What vLLM wants to know of the formats: weights in MXFP4, activations as they come."""
        return mxfp4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None), w2_bias=getattr(layer, "w2_bias", None),
        )  # fmt: skip

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer, routing and all.

        Args:
            x: [tokens, hidden], bfloat16.
            router_logits: [tokens, experts]; not looked at where the router was taken over.
        """
        scoring = _scoring(layer)
        gate = self.gate
        if gate is None:
            return self._serve(layer, x, router_logits.contiguous(), scoring)
        if x.shape[0] > routed_rows(_arch()):  # a product for tensor cores
            return self._serve(layer, x, gate.logits(x), scoring)
        return self._serve(layer, x, jitmx.route(x, gate.weight, gate.bias, k=layer.top_k, scoring=scoring), scoring)

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The experts that vLLM chose.

        Args:
            x: [tokens, hidden], bfloat16.
            topk_weights, topk_ids: [tokens, top], float32 and int32.
        """
        chosen = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        return self._serve(layer, x, chosen, _scoring(layer))

    def apply_in_block(self, layer: Any, stream: torch.Tensor, norm: torch.Tensor, epsilon: float) -> torch.Tensor:
        """The stream with what the layer behind its RMSNorm, routing and all, adds to it.

        Args:
            stream: [2, tokens, hidden], bfloat16: a hi/lo residual.
            norm, epsilon: of the RMSNorm.
        """
        gate = self.gate
        assert gate is not None
        y: torch.Tensor = torch.ops.jitmx.vllm_experts(
            stream, norm, epsilon, gate.weight, gate.bias, layer.w13_weight, layer.w13_weight_scale,
            layer.w2_weight, layer.w2_weight_scale, *layer.jitmx_packed, getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None), layer.top_k, _scoring(layer), self._x_format,
        )  # fmt: skip
        return y

    def _serve(self, layer: Any, x: torch.Tensor, routing: Any, scoring: str) -> torch.Tensor:
        w13, w2 = self._experts(layer)
        top = layer.top_k if isinstance(routing, torch.Tensor) else None
        x_format = x_format_of(x.shape[0], w13.experts, layer.top_k, self._x_format, _arch())
        monitor.look()
        return jitmx.moe(
            x.contiguous(), routing, w13, w2, getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None),
            expert_map=layer.expert_map, top=top, scoring=scoring, x_format=x_format,
        )  # fmt: skip

    def _experts(self, layer: Any) -> tuple[PackedExperts, PackedExperts]:
        """The packed weights, where the layer has them now: new ones may have been loaded elsewhere."""
        assert self._packed is not None, "weights are packed before anything is served"
        w13, w2 = self._packed
        if w13.words.data_ptr() != layer.w13_weight.data_ptr() or w2.words.data_ptr() != layer.w2_weight.data_ptr():
            w13 = replace(w13, words=layer.w13_weight.data, scales=layer.w13_weight_scale.data)
            w2 = replace(w2, words=layer.w2_weight.data, scales=layer.w2_weight_scale.data)
            self._packed = w13, w2
        return w13, w2

    def _needed(self, layer: Any) -> tuple[Packer, Experts]:
        """Of the weights as they are packed, or as they most likely will be."""
        if self._packed is not None:
            w13, w2 = self._packed
            local, hidden, intermediate, scale_range = w13.experts, w13.k, w2.k, _scale_range(self._packed)
        else:
            (local, _, hidden), (*_, intermediate) = layer.w13_weight.shape, layer.w2_weight.shape
            hidden, intermediate = hidden * 2, intermediate * 2  # values of a byte
            scale_range = "full" if self._all_scales else "normal"
        mapped = layer.expert_map is not None
        return of_experts(
            _arch(), warmup.device_of(layer.w13_weight.device), self._rows, fused=self._in_block,
            experts=layer.expert_map.numel() if mapped else local, local=local, mapped=mapped, top=layer.top_k,
            hidden=hidden, intermediate=intermediate, bias=self.moe.has_bias, x_format=self._x_format,
            row_range=_row_range(self._packed) if self._x_format == "fp8" else "narrow",
            scale_range=scale_range, scoring=_scoring(layer),
            routing="hidden" if self.gate is not None else "logits" if self._whole else "ids",
            router_bias=self.gate is not None and self.gate.bias is not None,
        )  # fmt: skip


def _arch() -> Arch:
    """The target of this process's device."""
    arch, _ = facts.target()
    assert arch is not None, "the policy lets no layer come here without a target"
    return arch


def _scale_range(packed: tuple[PackedExperts, PackedExperts]) -> str:
    return "normal" if all(weight.scale_range == "normal" for weight in packed) else "full"


def _row_range(packed: tuple[PackedExperts, PackedExperts] | None) -> str:
    return "wide" if packed is not None and "wide" in (weight.row_words.range for weight in packed) else "narrow"


def _scoring(layer: Any) -> str:
    return "softmax_topk" if layer.renormalize else "softmax_all"


def _routing_is_returned() -> bool:
    """Whether vLLM was asked to tell its users which experts were chosen."""
    config = get_current_vllm_config().model_config
    return bool(config is not None and getattr(config, "enable_return_routed_experts", False))
