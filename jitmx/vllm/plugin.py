"""What is registered with vLLM, and the configuration that decides for each layer of a gpt-oss model who serves it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from jitmx.vllm import facts, versions
from jitmx.vllm.log import logger

NAME = "gpt_oss_mxfp4"


class GptOssOnJitmx(QuantizationConfig):  # type: ignore[misc]
    """Stands for vLLM's configuration of this name until a model asks for it; importing that takes seconds."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

        return int(GptOssMxfp4Config.get_min_capability())

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """jitmx's configuration, which leaves every layer to vLLM where that is not what jitmx was written for."""
        from jitmx.vllm.quantization import JitmxGptOssConfig

        return JitmxGptOssConfig.from_config(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

        return GptOssMxfp4Config.override_quantization_method(hf_quant_cfg, user_quant, hf_config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        raise AssertionError("no instance is made of this class; from_config makes one of another")


def register() -> None:
    """Take the place of vLLM's configuration for gpt-oss, and be its backend CUSTOM for attention, where this vLLM is
    one that jitmx was written for."""
    refused = versions.refusal()
    if refused:
        _say_once(refused)
        return
    register_quantization_config(NAME)(GptOssOnJitmx)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, facts.ATTENTION)
    elif custom.get_path() != facts.ATTENTION:
        logger.debug("jitmx: --attention-backend CUSTOM is another plugin's, %s", custom.get_path())


@functools.cache
def _say_once(refused: str) -> None:
    logger.warning("jitmx is disabled, and vLLM serves every layer: %s", refused)
