"""vLLM on a machine without a GPU: its CPU platform, one rank of gloo, and what layers look up while they are built."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
pytest.importorskip("vllm.config", reason="vLLM is not installed: pip install 'jitmx[vllm]'")

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.models import registry

# vLLM looks at a model's class in a process that imports all of vLLM again, lest this one touch a GPU: there is none.
registry._run_in_subprocess = lambda look: look()

# gpt-oss with every size made small; what a test leaves out is as in the 20b model.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "hidden_act": "silu",
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "max_position_embeddings": 512,
    "rope_theta": 150000, "rms_norm_eps": 1e-5, "vocab_size": 100, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "original_max_position_embeddings": 128, "truncate": False},
}  # fmt: skip


def model_config(folder: Path, **changes: Any) -> ModelConfig:
    """vLLM's config of a small gpt-oss, written to `folder`."""
    (folder / "config.json").write_text(json.dumps(GPT_OSS | changes))
    return ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16")


def decoded(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight [experts, n, k] of a checkpoint, in float64."""
    blocks, scales = (tensors[f"{name}_{part}"].numpy() for part in ("blocks", "scales"))
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values *= np.exp2(scales.astype(np.float64) - 127)[..., None]
    return torch.from_numpy(values.reshape(*scales.shape[:2], -1))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2."""
    return float((found.double() - wanted).norm() / wanted.norm())


def reference(checkpoint: tuple[Path, dict[str, torch.Tensor]], prompts: torch.Tensor) -> Any:
    """What transformers makes of prompts in float64, with the weights of QKV and O rounded to MXFP4."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel

    import jitmx

    folder, tensors = checkpoint
    config = GptOssConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    model = GptOssModel(config).double()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.") or name.endswith(("_blocks", "_scales")):
            continue
        if name.endswith("_proj.weight"):
            tensor = jitmx.dequantize(jitmx.quantize(tensor, "mxfp4"))
        state[name.removeprefix("model.")] = tensor.double()
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            own = f"layers.{layer}.mlp.experts.{name}"
            state[own] = decoded(tensors, f"model.{own}").transpose(1, 2)
    model.load_state_dict(state)
    with torch.no_grad():
        return model(prompts, output_hidden_states=True)


@contextlib.contextmanager
def world(rank: int = 0, size: int = 1, meeting: str | None = None, config: VllmConfig | None = None) -> Iterator[None]:
    """One of so many ranks over gloo, unless there is one already; bf16 is the default dtype in it.

    Args:
        config: says how ranks share the work; without it that is tensor parallelism.
    """
    made = not parallel_state.model_parallel_is_initialized()
    dtype = torch.get_default_dtype()
    with set_current_vllm_config(config or VllmConfig()):
        if made:
            file = meeting or tempfile.mktemp()
            parallel_state.init_distributed_environment(size, rank, f"file://{file}", rank, "gloo")
            parallel_state.initialize_model_parallel(config.parallel_config.tensor_parallel_size if config else size, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if made:
                # vLLM's clean-up of both would then walk all objects of the process, and thaw those that are frozen.
                parallel_state.destroy_model_parallel()
                parallel_state.destroy_distributed_environment()
