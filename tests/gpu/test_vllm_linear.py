"""vLLM's dense layers and head on the card: compiled, in CUDA graphs, reloaded under them, and what loading takes."""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx

vllm_world = pytest.importorskip("vllm_world")

from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import reload

from jitmx.vllm.linear import JitmxLinearMethod

N, K = 2880, 4096  # gpt-oss's O
GATE = 0.005  # relative L2 against float64, rounding of the output included
MODEL = SimpleNamespace(dtype=torch.bfloat16, quantization=None)


class Config:
    """A quantization config that gives every layer jitmx's method."""

    online_quantization_config = None

    def __init__(self, format: str) -> None:
        self.format = format

    def get_quant_method(self, _layer: torch.nn.Module, prefix: str) -> Any:
        return JitmxLinearMethod(self.format, prefix)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with vllm_world.world(), torch.inference_mode():
        yield


def o_proj(format: str) -> RowParallelLinear:
    with torch.device("cuda"):
        return RowParallelLinear(K, N, quant_config=Config(format), prefix="o_proj")


def checkpoint(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(N, K, generator=generator) * 0.02).bfloat16(), torch.randn(N, generator=generator).bfloat16()


def load(layer: RowParallelLinear, seed: int) -> None:
    parameters = dict(layer.named_parameters())
    for parameter, values in zip((parameters["weight"], parameters["bias"]), checkpoint(seed), strict=True):
        parameter.weight_loader(parameter, values)


def error(found: torch.Tensor, x: torch.Tensor, seed: int, format: str) -> float:
    """Relative L2 against float64, with what the codes of the weight stand for."""
    weight, bias = (tensor.cuda() for tensor in checkpoint(seed))
    values = jitmx.dequantize(jitmx.quantize(weight, format), torch.float32).double()
    wanted = x.double() @ values.T + bias.double()
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_compiled_and_captured_layers_multiply_by_what_was_loaded_last(format: str, rows: int) -> None:
    layer = o_proj(format)
    model = torch.nn.Sequential(layer)
    with torch.device("cuda"):  # as vLLM records it: where weights are put from now on
        reload.record_metadata_for_reloading(model)
    load(layer, 0)
    x = torch.randn(rows, K, device="cuda").bfloat16()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True)
    assert error(layer(x)[0], x, 0, format) < GATE and error(compiled(x), x, 0, format) < GATE
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    graph.replay()
    assert error(y, x, 0, format) < GATE
    reload.initialize_layerwise_reload(model)
    load(layer, 1)
    reload.finalize_layerwise_reload(model, MODEL)
    torch.cuda.synchronize()
    graph.replay()
    assert error(y, x, 1, format) < GATE


def test_loading_some_layers_takes_less_than_their_bf16_weights() -> None:
    load(o_proj("mxfp4"), 0)  # compiles, and leaves scratch behind
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layers = [o_proj("mxfp4") for _ in range(6)]
    for layer in layers:
        load(layer, 0)
    bf16 = len(layers) * N * K * 2
    assert torch.cuda.max_memory_allocated() - before < bf16
    scratch = 4 << 20  # what one launch leaves, whichever test came first
    assert torch.cuda.memory_allocated() - before < bf16 * 0.266 + scratch


def test_a_head_of_gpt_oss_takes_little_more_than_its_weight_while_it_is_packed() -> None:
    n, k = 201088, 2880
    with torch.device("cuda"):
        head = ParallelLMHead(
            n, k, prefix="lm_head", quant_method=JitmxLinearMethod("mxfp4", "lm_head", UnquantizedEmbeddingMethod())
        )
    weight = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
    x = torch.randn(3, k, device="cuda").bfloat16()
    values = jitmx.dequantize(jitmx.quantize(weight), torch.bfloat16)
    wanted = x.float() @ values.float().T
    weight = weight.cpu()
    del values
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    head.weight.weight_loader(head.weight, weight)
    assert torch.cuda.max_memory_allocated() - before < n * k * 2 * 1.27 + 300e6
    found = head.quant_method.apply(head, x)
    assert float((found.float() - wanted).norm() / wanted.norm()) < GATE
