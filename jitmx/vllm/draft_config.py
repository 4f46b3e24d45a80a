"""The quantization configuration of an Eagle3 draft model in bf16: layer by layer, who takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from jitmx.ops.checks import HALF_DTYPES
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.policy import Decision, Layer

# By the last part of a layer's name.
_KINDS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "fc": "fc"}


class JitmxDraftConfig(QuantizationConfig):  # type: ignore[misc]
    """Quantizes a draft's dense layers while they are loaded; its head is decided where vLLM builds heads.

    Args:
        decide: who serves a layer.
    """

    def __init__(self, decide: Callable[[Layer], Decision]) -> None:
        super().__init__()
        self._decide = decide

    @classmethod
    def get_name(cls) -> str:
        return "jitmx_draft"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(HALF_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        raise AssertionError("no checkpoint names this configuration; jitmx makes it of its own settings")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """jitmx's method for a dense layer that it takes, vLLM's for others; None where a layer has its own."""
        if not isinstance(layer, LinearBase):
            return None
        kind = _KINDS.get(prefix.rpartition(".")[2])
        decision = None if kind is None else self._decide(Layer(kind, prefix, draft=True))
        if decision is None or decision.format is None:
            return UnquantizedLinearMethod()
        return JitmxLinearMethod(decision.format, prefix, all_scales=decision.all_scales)
