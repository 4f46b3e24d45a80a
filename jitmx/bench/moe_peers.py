"""Other libraries' MXFP4 experts, for `jitmx bench moe` to run beside jitmx's: those that vLLM has for gpt-oss.

Each is vLLM's own layer, with its router, weights converted by vLLM's own code and the backend asked for by name, so
that what is timed is what vLLM runs. What is not installed, or cannot take a shape or this card, is a reason in words.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jitmx.bench.moe_inputs import RandomLayer
from jitmx.bench.peers import Unavailable, module, unavailable
from jitmx.models import GPT_OSS_120B

PEERS = ("humming", "triton", "marlin")  # as vLLM's moe_backend names them

GATE = 0.02  # relative L2 against the layer in float32

# A layer of another library: y [m, hidden] of x [m, hidden] and router logits [m, experts], all bfloat16.
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def load(name: str, layer: RandomLayer) -> Layer:
    """The layer as the backend `name` runs it.

    Raises:
        Unavailable: the library is not here, or cannot do this.
    """
    with unavailable():
        return _vllm(name, layer)


def _vllm(backend: str, layer: RandomLayer) -> Layer:
    """vLLM's layer of gpt-oss with one of its backends."""
    if layer.shape.activation != "swiglu_oai" or not layer.shape.bias:
        raise Unavailable("vLLM's experts of gpt-oss have the clamped SwiGLU and biases; this layer has not")
    factory = module("vllm.model_executor.layers.fused_moe").FusedMoEFactory
    method = module("vllm.model_executor.layers.quantization.mxfp4").GptOssMxfp4Config
    experts_class = module("vllm.model_executor.models.gpt_oss").GptOssRoutedExperts
    device, shape = layer.w13.codes.device, layer.shape
    config = _config(backend, layer)
    with _inside(config, device), torch.device(device):
        runner = factory(
            num_experts=shape.experts, top_k=shape.top, hidden_size=shape.hidden,
            intermediate_size=shape.intermediate, renormalize=True, quant_config=method(),
            params_dtype=torch.bfloat16, prefix=f"jitmx.{backend}.experts", apply_router_weight_on_input=False,
            has_bias=True, activation="swigluoai", routed_experts_cls=experts_class,
        )  # fmt: skip
        _fill(runner, layer)
        for part in runner.modules():
            quantized = getattr(part, "quant_method", None)
            if quantized is not None:
                quantized.process_weights_after_loading(part)

    def call(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        with _inside(config, device):
            y: torch.Tensor = runner(hidden_states=x, router_logits=logits)
        return y[:, : shape.hidden]

    return call


def _config(backend: str, layer: RandomLayer) -> Any:
    """A configuration of vLLM for a gpt-oss model of one such layer, which asks for one backend."""
    configs, shape = module("vllm.config"), layer.shape
    folder = Path(tempfile.mkdtemp(prefix="jitmx-bench-"))
    sizes = replace(
        GPT_OSS_120B, layers=1, experts=shape.experts, top=shape.top, hidden=shape.hidden,
        intermediate=shape.intermediate,
    )  # fmt: skip
    model = sizes.config() | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"], "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))
    known = configs.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")
    return configs.VllmConfig(model_config=known, kernel_config=configs.KernelConfig(moe_backend=backend))


@contextlib.contextmanager
def _inside(config: Any, device: torch.device) -> Iterator[None]:
    """Where vLLM's layers are made and called: one rank of one, with a workspace."""
    forward = module("vllm.forward_context")
    with module("vllm.config").set_current_vllm_config(config):
        _alone(device)
        with forward.set_forward_context(None, config):
            yield


@functools.cache
def _alone(device: torch.device) -> None:
    """Make this process the only rank of vLLM's groups, once."""
    groups = module("vllm.distributed.parallel_state")
    meeting = Path(tempfile.mkdtemp(prefix="jitmx-bench-")) / "rank"
    backend = "nccl" if device.type == "cuda" else "gloo"
    groups.init_distributed_environment(1, 0, f"file://{meeting}", 0, backend)
    groups.ensure_model_parallel_initialized(1, 1)
    module("vllm.v1.worker.workspace").init_workspace_manager(device)


def _fill(runner: torch.nn.Module, layer: RandomLayer) -> None:
    """Copy weights into the layer's parameters, whose sizes vLLM may have rounded up; what is over stays zero."""
    assert layer.b13 is not None and layer.b2 is not None
    wanted = {
        "w13_weight": layer.w13.codes, "w13_weight_scale": layer.w13.scales, "w13_bias": layer.b13,
        "w2_weight": layer.w2.codes, "w2_weight_scale": layer.w2.scales, "w2_bias": layer.b2,
    }  # fmt: skip
    found = {name.rpartition(".")[2]: parameter for name, parameter in runner.named_parameters()}
    for name, values in wanted.items():
        if name not in found:
            raise Unavailable(f"vLLM's layer has no parameter {name}; it has {', '.join(found)}")
        place = found[name].data
        sizes = tuple(zip(place.shape, values.shape, strict=False))
        if place.dim() != values.dim() or any(has < needs for has, needs in sizes):
            raise Unavailable(f"vLLM's {name} is {list(place.shape)}, which does not hold {list(values.shape)}")
        place.zero_()
        place[tuple(slice(size) for size in values.shape)] = values
