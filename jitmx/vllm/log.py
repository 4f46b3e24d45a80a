"""The logger of the plugin: vLLM configures and shows what is logged below its own name."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.plugins.jitmx")
