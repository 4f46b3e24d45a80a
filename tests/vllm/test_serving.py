"""Experts that vLLM loaded, served: by simulated kernels, compared with transformers' own gpt-oss in float64."""

# ruff: noqa: E402

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from vllm.forward_context import set_forward_context

import jitmx
from jitmx import settings
from jitmx.kernels.moe.arguments import GATE
from jitmx.serving.experts import Experts
from vllm_world import decoded, error


def expected(checkpoint: tuple[Path, dict[str, torch.Tensor]], layer: int, x: torch.Tensor) -> torch.Tensor:
    """What transformers makes of a layer's experts and router."""
    folder, tensors = checkpoint
    prefix = f"model.layers.{layer}.mlp."
    mlp = GptOssMLP(GptOssConfig.from_pretrained(folder)).double()
    state = {"router.weight": tensors[prefix + "router.weight"], "router.bias": tensors[prefix + "router.bias"]}
    for name in ("gate_up_proj", "down_proj"):
        state[f"experts.{name}"] = decoded(tensors, f"{prefix}experts.{name}").transpose(1, 2)
        state[f"experts.{name}_bias"] = tensors[f"{prefix}experts.{name}_bias"]
    mlp.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    with torch.no_grad():
        y = mlp(x.double()[None])
    return (y[0] if isinstance(y, tuple) else y)[0]


def serve(model: Any, layer: int, x: torch.Tensor) -> torch.Tensor:
    """What vLLM's layer makes of x."""
    config = model.vllm_config
    with vllm_world.world(), torch.no_grad(), set_forward_context(None, config, num_tokens=len(x)):
        y: torch.Tensor = model.model.layers[layer].mlp(x)
    return y


def hidden(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_with_its_router_is_two_launches_and_right(
    host: Any, checkpoint: tuple[Path, dict[str, torch.Tensor]], layer: int
) -> None:
    model, x = host.build(load=True), hidden(3)
    with simulated_card.on_cpu("sm_90a") as card:
        y = serve(model, layer, x)
    assert card.kernels == ["routing.route", "moe.stream"]
    assert y.dtype == torch.bfloat16 and error(y, expected(checkpoint, layer, x)) < GATE


def test_experts_that_vllm_chose_are_served_the_same(
    host: Any, checkpoint: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = host.build(load=True, enable_lora=True, max_lora_rank=8, lora_target_modules=["o_proj"])
    x = hidden(2)
    runner = model.model.layers[0].mlp.experts

    # vLLM's own top-k has no kernel on this machine.
    def select(hidden_states: Any, router_logits: torch.Tensor, topk_indices_dtype: Any, input_ids: Any = None) -> Any:
        assert topk_indices_dtype == torch.int32
        weights, ids = router_logits.float().topk(2)
        return weights.softmax(-1), ids.to(topk_indices_dtype)

    monkeypatch.setattr(runner.router, "select_experts", select)
    with simulated_card.on_cpu("sm_90a") as card:
        y = serve(model, 0, x)
    assert card.kernels == ["moe.stream"]
    assert error(y, expected(checkpoint, 0, x)) < GATE


def test_ranks_with_some_of_the_experts_add_up_to_the_layer(
    host: Any, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    model, x = host.build(load=True), hidden(3)
    layer = model.model.layers[0].mlp.experts.routed_experts
    parts = []
    with simulated_card.on_cpu("sm_90a"):
        for map_of_rank in ([0, -1, -1, 3], [-1, 1, 2, -1]):
            layer._expert_map = torch.tensor(map_of_rank, dtype=torch.int32)
            parts.append(serve(model, 0, x).double())
    assert all(part.any() for part in parts) and error(parts[0] + parts[1], expected(checkpoint, 0, x)) < GATE
    assert layer.quant_method._needed(layer)[1].mapped


def test_many_tokens_give_the_experts_logits(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, seen = host.build(load=True), hidden(513), []

    def moe(x: torch.Tensor, routing: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append((routing, options))
        return x

    monkeypatch.setattr(jitmx, "moe", moe)
    mlp = model.model.layers[0].mlp
    serve(model, 0, x)
    ((logits, options),) = seen
    assert torch.equal(logits, torch.nn.functional.linear(x, mlp.router.weight, mlp.router.bias))
    assert options == {"expert_map": None, "top": 2, "scoring": "softmax_topk", "x_format": "bf16"}


@pytest.mark.parametrize(
    ("said", "x_format", "few"),
    [("mxfp8", "mxfp8", "mxfp8"), ("mxfp4", "mxfp4", "mxfp4"), ("fp6", "mxfp6", "mxfp6"), ("fp8", "fp8", "bf16")],
)
def test_inputs_are_rounded_to_what_was_asked_for(
    host: Any, monkeypatch: pytest.MonkeyPatch, said: str, x_format: str, few: str
) -> None:
    monkeypatch.setenv("VLLM_MXFP4_ACTIVATION", said)
    settings.reload()
    model, seen = host.build(load=True), []
    monkeypatch.setattr(jitmx, "moe", lambda x, *rest, **options: seen.append(options["x_format"]) or x)
    monkeypatch.setattr(jitmx, "route", lambda *args, **options: None)
    serve(model, 1, hidden(2))
    serve(model, 1, hidden(60))
    assert seen == [few, x_format]
    assert {asked.x_format for asked in host.warmed if isinstance(asked, Experts)} == {x_format}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_compiles_whole_and_leaves_the_routers_product_to_the_experts(
    host: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    model, seen = host.build(load=True), []

    def moe(x: torch.Tensor, routing: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(len(x))
        return x * 2

    monkeypatch.setattr(jitmx, "moe", moe)
    monkeypatch.setattr(jitmx, "route", lambda *args, **options: None)
    mlp = model.model.layers[0].mlp
    monkeypatch.setattr(mlp.experts, "_forward_entry", torch.ops.vllm.moe_forward)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=keep)
    with vllm_world.world(), torch.inference_mode(), set_forward_context(None, model.vllm_config, num_tokens=1):
        for rows in (3, 5, 8):
            x = hidden(rows)
            assert torch.equal(compiled(x), x * 2)
    assert seen == [3, 5, 8]
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert "vllm.moe_forward.default" in called or "vllm.moe_forward" in called
    assert [name for name in called if "linear" in name or "mm" in name] == []


def test_weights_that_moved_are_served_from_where_they_are(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = host.build(load=True), []
    monkeypatch.setattr(jitmx, "moe", lambda x, routing, w13, w2, *rest, **options: seen.append((w13, w2)) or x)
    monkeypatch.setattr(jitmx, "route", lambda *args, **options: None)
    layer = model.model.layers[0].mlp.experts.routed_experts
    serve(model, 0, hidden(1))
    layer.w2_weight.data = layer.w2_weight.data.clone()
    serve(model, 0, hidden(1))
    serve(model, 0, hidden(1))
    (_, first), (_, moved), (_, again) = seen
    assert first.words.data_ptr() != moved.words.data_ptr() == layer.w2_weight.data_ptr()
    assert again is moved and moved.scale_range == first.scale_range
