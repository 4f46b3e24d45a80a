"""Blocks whose norms and residual go into their products: whole models by simulated kernels, against transformers."""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from torch.library import opcheck
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import gpt_oss

import jitmx
from jitmx import arch, settings
from jitmx.kernels.linear.arguments import NO_PREFETCH
from jitmx.ops.linear import operand
from jitmx.ops.routing.plan import Routing
from jitmx.serving import products, rounded_inputs
from jitmx.serving.experts import Experts
from jitmx.serving.linear import Linear
from jitmx.vllm import block, facts, hooks
from vllm_world import error, reference

Checkpoint = tuple[Path, dict[str, torch.Tensor]]
ALL = {"mxfp4_layers": "moe,qkv,o"}
TOKENS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 3])


class Causal(torch.nn.Module):
    """Attention of one prompt with sinks, in float32, in the place of vLLM's."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.sinks, self.head, self.scaling = attn.sinks.data.float(), attn.head_dim, attn.scaling

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All tokens are of one prompt, in their order."""
        q, k, v = (t.float().unflatten(-1, (-1, self.head)).transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        later = torch.ones(2 * q.shape[1:2]).triu(1).bool()
        scores = (q @ k.transpose(1, 2) * self.scaling).masked_fill(later, -torch.inf)
        sinks = self.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (shares @ v).transpose(0, 1).flatten(1).bfloat16()


def build(host: Any, **options: Any) -> Any:
    """A model with its weights, whose attention needs no kernel of vLLM's."""
    model = host.build(load=True, **{"additional_config": {"jitmx": ALL}} | options)
    for layer in model.model.layers:
        layer.attn.attn = Causal(layer.attn)
        layer.attn.rotary_emb._forward_method = layer.attn.rotary_emb.forward_native
    return model


def run(model: Any, tokens: torch.Tensor) -> Any:
    """What the model makes of a prompt, before its head."""
    with vllm_world.world(), torch.no_grad(), set_forward_context(None, model.vllm_config, num_tokens=len(tokens)):
        return model.model(tokens, torch.arange(len(tokens)), None)


def launches(card: simulated_card.Card) -> list[str]:
    """Kernels since the last look, each with what is fused with it."""
    extras = {"norm": True, "normalized": True, "residual": True, "pair": "pair"}
    found = ["+".join([kernel, *(
        name for name, value in extras.items()
        if getattr(variant.knobs, "residual" if name == "pair" else name, False) is value
    )]) for kernel, variant in zip(card.kernels, card.launched, strict=True)]  # fmt: skip
    card.launched.clear()
    return found


ONE_TOKEN = ["linear.stream+norm", "linear.stream+pair", "routing.route+norm+normalized", "moe.token+pair"]
# Norms are launches of their own.
BLOCK = ["norm.rms", "linear.stream", "linear.stream+pair", "norm.rms", "routing.route", "moe.stream+pair"]


def test_a_prompt_of_few_tokens_takes_four_launches_a_block_or_six_and_comes_out_as_stock_blocks_make_it(
    host: Any, checkpoint: Checkpoint
) -> None:
    errors, prompts = {}, TOKENS.view(3, 3)
    for fuse in (True, False):
        with simulated_card.on_cpu("sm_90a") as card:
            model = build(host, additional_config={"jitmx": {**ALL, "fuse_norm": fuse}})
            for tokens, block_ in ((prompts[0][:1], ONE_TOKEN), (prompts[0], BLOCK)):
                launches(card)
                run(model, tokens)
                stock = [name.partition("+")[0] for name in block_ if name != "norm.rms"]  # vLLM normalises there
                assert launches(card) == (block_ if fuse else stock) * 2
            found = torch.stack([run(model, prompt) for prompt in prompts])
            errors[fuse] = error(found, reference(checkpoint, prompts).last_hidden_state)
    # Both round products and norms, stock blocks the stream as well.
    assert errors[True] < 0.8 * errors[False] and errors[False] < 0.03
    assert ("INFO", "jitmx normalises and adds the residual within the products of a block on sm_90a") in host.said
    off = "additional_config's fuse_norm asks for norms in launches of their own"
    assert ("WARNING", f"vLLM normalises and adds the residual in launches of its own: {off}") in host.said


def test_experts_of_many_rows_take_them_in_e4m3_and_those_of_few_as_they_are(
    host: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rounded_inputs.FP8_ROWS_AN_EXPERT, True, 1.5)  # three tokens of two of four experts have 1.8
    prompt = TOKENS[:3]
    experts = ["routing.sort", "moe.gather_fp8", "moe.fused_fp8", "moe.combine+pair"]
    with simulated_card.on_cpu("sm_90a") as card:
        model = build(host, additional_config={"jitmx": {**ALL, "moe_activation": "fp8"}})
        launches(card)
        run(model, prompt[:1])
        assert launches(card) == ONE_TOKEN * 2
        found = run(model, prompt)
        assert launches(card) == [*BLOCK[:5], *experts] * 2
        assert error(found, reference(checkpoint, prompt[None]).last_hidden_state[0]) < 0.1
        method = model.model.layers[0].mlp.experts.routed_experts.quant_method
        assert {weight.encoding for weight in method._packed} == {"nibble"}


def test_dense_products_of_many_tokens_take_rows_in_e4m3_that_their_norm_makes(
    host: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_inputs, "FP8_ROWS", 3)
    prompt = TOKENS[:3]
    dense = ["norm.rows+norm", "linear.wgmma_fp8", "norm.rows", "linear.wgmma_fp8+pair"]
    with simulated_card.on_cpu("sm_90a") as card:
        model = build(host, additional_config={"jitmx": {**ALL, "linear_activation": "fp8"}})
        launches(card)
        run(model, prompt[:1])
        assert launches(card) == ONE_TOKEN * 2
        found = run(model, prompt)
        assert launches(card) == [*dense, *BLOCK[3:]] * 2
        assert error(found, reference(checkpoint, prompt[None]).last_hidden_state[0]) < 0.1
    assert any("inputs of many tokens rounded to fp8 by additional_config's linear_activation" in text
               for _, text in host.said)  # fmt: skip


@pytest.mark.parametrize("fuse", [True, False])
def test_qkv_is_told_where_the_weight_of_o_lies(host: Any, monkeypatch: pytest.MonkeyPatch, fuse: bool) -> None:
    told: list[Any] = []
    run_product = products.product.run

    def noted(*arguments: Any, **more: Any) -> torch.Tensor:
        told.append(more.get("prefetch", NO_PREFETCH))
        return run_product(*arguments, **more)

    monkeypatch.setattr(products.product, "run", noted)
    with simulated_card.on_cpu("sm_90a"):
        model = build(host, additional_config={"jitmx": {**ALL, "fuse_norm": fuse}})
        run(model, TOKENS[:1])
        layers = [block.attn.o_proj for block in model.model.layers]
    ahead = [operand.prefetch(o.weight_packed, o.weight_scale) for o in layers]
    assert told == [prefetch for each in ahead for prefetch in (each, NO_PREFETCH)]


@pytest.mark.parametrize("fused", [True, False])
def test_a_product_with_a_residual_is_told_of_the_weight_to_prefetch_too(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = jitmx.pack_weight((torch.zeros(32, 32, dtype=torch.uint8), torch.full((32, 2), 127, dtype=torch.uint8)))
    told: list[Any] = []

    def noted(x: torch.Tensor, *rest: Any, prefetch: Any = NO_PREFETCH) -> torch.Tensor:
        told.append(prefetch)
        return x.new_zeros(2, 1, 32) if len(rest) > 7 else x.new_zeros(1, 32)

    monkeypatch.setattr(products.product, "run", noted)
    monkeypatch.setattr(products, "_fused", lambda *asked: fusion_of(norm=False, residual=fused))
    x, layout, later = torch.zeros(1, 64).bfloat16(), operand.layout(weight), (weight.words, weight.scales)
    y = products.run_linear(
        x, *later, 32, 64, layout, None, torch.zeros(1, 32).bfloat16(), None, None, 0.0, False, "none", *later
    )
    assert told == [operand.prefetch(*later)] and y.shape == (2, 1, 32)


def test_states_between_blocks_are_those_that_a_draft_model_is_trained_on(host: Any, checkpoint: Checkpoint) -> None:
    with simulated_card.on_cpu("sm_90a"):
        model = build(host)
        model.model.aux_hidden_state_layers = (0, 1, 2)
        last, states = run(model, TOKENS[:3])
        wanted = reference(checkpoint, TOKENS[None, :3])
    assert len(states) == 3
    for state, (index, hidden) in zip(states, enumerate(wanted.hidden_states), strict=True):
        if index < 2:  # transformers gives the last one normalised
            assert state.dtype == torch.bfloat16 and error(state, hidden[0]) < 0.02
    norm = model.model.norm
    weight = norm.weight.detach().float()
    normalised = torch.nn.functional.rms_norm(states[2].float(), (64,), weight, norm.variance_epsilon)
    assert error(last, normalised.double()) < 0.01


def test_a_rank_of_a_pipeline_takes_and_leaves_what_stock_blocks_do(host: Any) -> None:
    x, positions = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.arange(3)
    with simulated_card.on_cpu("sm_90a") as card:
        first, second = build(host).model.layers
        assert (first.jitmx_joins, second.jitmx_joins) == (True, False)
        launches(card)
        with vllm_world.world(), torch.no_grad():
            y, lost = first(x, positions, None)
            assert launches(card) == BLOCK
            assert lost.any() and bool((lost.abs() <= y.abs() * 2.0**-8).all())
            wanted = second(y, positions, lost)
            # Behind another rank, or a block of vLLM's, the stream may be split in any way.
            second.jitmx_joins = True
            half = y * 0.5
            for pair in ((y, lost), (half, (y - half).float().add(lost.float()).bfloat16())):
                found = second(pair[0], positions, pair[1])
                assert error(sum(t.double() for t in found), sum(t.double() for t in wanted)) < 0.004
            assert error(sum(t.double() for t in second(y, positions, lost)), sum(t.double() for t in wanted)) == 0


def test_many_tokens_are_normalised_once_and_take_the_kernels_that_they_would_alone(
    host: Any, checkpoint: Checkpoint
) -> None:
    tokens = TOKENS.repeat(8)[:70]
    with simulated_card.on_cpu("sm_90a") as card:
        model = build(host)
        launches(card)
        found = run(model, tokens)
        seen = launches(card)
        wanted = reference(checkpoint, tokens[None]).last_hidden_state[0]
    qkv, o, *experts = (name for name in seen[: len(seen) // 2] if name != "norm.rms")
    assert seen == ["norm.rms", qkv, o, "norm.rms", *experts] * 2
    assert qkv.startswith("linear.") and "norm" not in " ".join((qkv, o, *experts))
    assert [name for name in seen if "pair" in name] == [o, "moe.combine+pair"] * 2
    assert experts[0] == "routing.route" and experts[-1] == "moe.combine+pair"
    assert error(found, wanted) < 0.03


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.nightly), "inductor"])
def test_blocks_compile_whole_for_any_number_of_tokens(
    host: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    # What the operators do is told elsewhere; here, that code is traced around them once.
    calls: list[tuple[int, int]] = []

    def run_product(x: torch.Tensor, weight: Any, *rest: Any, prefetch: Any = None) -> torch.Tensor:
        return x.new_ones((*((2,) if len(rest) > 6 else ()), *x.shape[:-1], weight.n))

    monkeypatch.setattr(products.product, "run", run_product)
    monkeypatch.setattr(products, "_fused", lambda *asked: fusion_of(norm=True, residual=True))
    monkeypatch.setattr(products.linear_kernels, "NORMED_ROWS", 8)
    monkeypatch.setattr(products.routing_calls, "run_route", lambda x, *rest, **more: Routing(x, x, *[None] * 4, x))
    monkeypatch.setattr(products.moe, "run", lambda x, *rest: calls.append((len(x), rest[-1].dim())) or rest[-1] * 2)
    with simulated_card.on_cpu("sm_90a"):
        first, last = build(host).model.layers
    monkeypatch.setattr(products.card, "arch", lambda device: arch.parse("sm_90a"))

    def both(x: torch.Tensor, positions: torch.Tensor) -> Any:
        return last(*shuffled(first(x, positions, None), positions))

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=keep)
    with vllm_world.world(), torch.inference_mode():
        for rows in (3, 5, 8):
            y, lost = compiled(torch.randn(rows, 64).bfloat16(), torch.arange(rows))
            assert torch.equal(y, torch.full((rows, 64), 2.0)) and torch.equal(y, lost)
    assert calls == [(rows, 3) for rows in (3, 5, 8) for _ in range(2)]
    assert len(graphs) <= 2  # vLLM's rotary embedding changes the dtype of its table when it is first used
    called = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
    ours = [name.removeprefix("jitmx.").removesuffix(".default") for name in called if "jitmx" in name]
    assert ours == ["vllm_linear", "vllm_linear", "vllm_experts"] * 2
    assert [name for name in called if "rms_norm" in name] == []


def shuffled(pair: tuple[Any, Any], positions: torch.Tensor) -> tuple[Any, Any, Any]:
    """What a block returns, as the next takes it."""
    return pair[0], positions, pair[1]


def fusion_of(**extras: bool) -> Any:
    return SimpleNamespace(**{"activation": "none", "swiglu": False} | extras)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"additional_config": {"jitmx": {**ALL, "fuse_norm": "0"}}}, "additional_config's fuse_norm asks for norms"),
        ({"additional_config": {"jitmx": {"mxfp4_layers": "moe,qkv:mxfp8,o"}}}, "row of QKV in mxfp8 on sm_90a has no"),
    ],
)
def test_blocks_that_cannot_be_fused_stay_vllms_with_the_reason(host: Any, options: dict[str, Any], said: str) -> None:
    model = host.build(**{"additional_config": {"jitmx": ALL}} | options)
    assert [layer.jitmx_fused for layer in model.model.layers] == [False, False]
    lines = [line for line in host.said if "launches of its own" in line[1]]
    assert len(lines) == 1 and lines[0][0] == "WARNING" and said in lines[0][1]


def test_a_target_whose_kernels_have_no_norm_keeps_stock_blocks(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "target", lambda: (arch.parse("sm_121"), ""))
    assert not any(layer.jitmx_fused for layer in host.build(additional_config={"jitmx": ALL}).model.layers)
    assert any("one row of QKV in mxfp4 on sm_121a has no RMSNorm in it" in line for _, line in host.said)


def test_blocks_of_which_vllm_serves_a_part_are_vllms_and_nothing_more_is_said(host: Any) -> None:
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj"]}
    assert not any(layer.jitmx_fused for layer in host.build(**lora, additional_config={"jitmx": ALL}).model.layers)
    assert sum("LoRA is on" in line for _, line in host.said) == 2
    model = host.build(additional_config={"jitmx": {"mxfp4_layers": "moe,qkv"}})
    assert not any(layer.jitmx_fused for layer in model.model.layers)
    assert all("launches of its own" not in line for _, line in host.said)
    assert model.vllm_config.additional_config["jitmx_serves"]["block"] == ""
    fused = host.build(additional_config={"jitmx": ALL}).vllm_config
    assert fused.additional_config["jitmx_serves"]["block"] == "fused"


def test_a_router_that_vllm_looks_at_keeps_stock_blocks(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    assert not any(layer.jitmx_fused for layer in host.build(additional_config={"jitmx": ALL}).model.layers)
    assert any("vLLM makes the router's product, or looks at what it chooses" in line for _, line in host.said)


def test_code_of_vllms_block_that_has_changed_is_left_to_it(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.changed() == ()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x

    monkeypatch.setattr(gpt_oss.MLPBlock, "forward", forward)
    block.changed.cache_clear()
    try:
        model = host.build(additional_config={"jitmx": ALL})
    finally:
        block.changed.cache_clear()
    assert not any(layer.jitmx_fused for layer in model.model.layers)
    assert any("another than jitmx knows (MLPBlock.forward)" in line for _, line in host.said)


def test_a_digest_is_of_the_text_without_comments_and_spaces_on_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons take an f-string apart into other tokens each."""

    def forward(self: Any, x: str) -> str:
        # Why.
        return f"{x}.#attn"  # What.

    monkeypatch.setattr(gpt_oss.MLPBlock, "forward", forward)
    text = 'defforward(self:Any,x:str)->str:returnf"{x}.#attn"'
    assert hooks.digest(gpt_oss.MLPBlock.forward) == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_a_block_of_another_plugin_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(gpt_oss.TransformerBlock):  # type: ignore[misc]
        pass

    monkeypatch.setattr(gpt_oss.GptOssModel, "block_cls", Other)
    assert {type(layer) for layer in host.build(additional_config={"jitmx": ALL}).model.layers} == {Other}


def test_every_kernel_of_fused_blocks_is_asked_for_before_serving(host: Any, checkpoint: Checkpoint) -> None:
    with simulated_card.on_cpu("sm_90a") as card:
        model = build(host)
        launches(card)
        for rows in (1, 3, 8, 20, 40, 64, 70):
            run(model, TOKENS.repeat(8)[:rows])
        seen = {variant.name for variant in card.launched}
    wanted = [replace(asked, arch="sm_90a") for asked in host.warmed]
    extras = {kind: {(asked.norm, asked.residual) for asked in wanted if isinstance(asked, kind)}
              for kind in (Linear, Experts)}  # fmt: skip
    assert extras == {Linear: {(True, False), (False, "pair")}, Experts: {(True, "pair")}}
    assert "norm.rms.block128" in seen
    four = [variant for asked in wanted for m in range(1, 80) for variant in asked.launches(m, arch.parse("sm_90"), 4)]
    assert seen - {variant.name for variant in four} == set()


def test_the_operators_are_what_torch_asks_of_operators(host: Any) -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    with simulated_card.on_cpu("sm_90a") as card:
        layer = build(host).model.layers[0]
        launches(card)
        qkv, norm = layer.attn.qkv_proj, layer.input_layernorm.weight.data
        weight = (qkv.weight_packed, qkv.weight_scale, *qkv.jitmx_packed, qkv.bias)
        for later in ((), weight[:2]):
            opcheck(torch.ops.jitmx.vllm_linear.default, (x, *weight, None, None, norm, 1e-5, False, "none", *later))
        o, attended = layer.attn.o_proj, torch.randn(1, 128).bfloat16()
        weight = (o.weight_packed, o.weight_scale, *o.jitmx_packed, o.bias)
        for lost in (None, x * 0.001):
            opcheck(torch.ops.jitmx.vllm_linear.default, (attended, *weight, x, lost, None, 0.0, False, "none"))
        opcheck(torch.ops.jitmx.vllm_pair.default, (x, x * 0.1))
        experts, gate = layer.mlp.experts.routed_experts, layer.mlp.router
        opcheck(
            torch.ops.jitmx.vllm_experts.default,
            (torch.stack([x, x * 0.001]), norm, 1e-5, gate.weight, gate.bias, experts.w13_weight,
             experts.w13_weight_scale, experts.w2_weight, experts.w2_weight_scale, *experts.jitmx_packed,
             experts.w13_bias, experts.w2_bias, 2, "softmax_topk", "bf16"),
        )  # fmt: skip
        assert {"linear.stream+norm", "linear.stream+pair", "moe.token+pair"} <= set(launches(card))


def test_what_is_fused_is_asked_once_a_shape_and_again_once_settings_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str, bool]] = []
    choose = products.linear_kernels.fused

    def noted(problem: Any, *rest: Any) -> Any:
        asked.append((problem.m, problem.dtype, problem.norm))
        return choose(problem, *rest)

    monkeypatch.setattr(products.linear_kernels, "fused", noted)
    products._of.cache_clear()
    settings.reload()
    codes, scales = torch.zeros(48, 48, dtype=torch.uint8), torch.full((48, 3), 127, dtype=torch.uint8)
    with simulated_card.on_cpu("sm_90a"):
        packed = [jitmx.pack_weight((codes, scales)) for _ in range(2)]
        own, other = (operand.find(weight.words, weight.scales, 48, 96, operand.layout(weight)) for weight in packed)
        x = torch.zeros(1, 96).bfloat16()
        normed = True, False, True, False, "none"
        first = products._fused(own, x, *normed)
        assert first.norm and products._fused(own, x, *normed) is first
        assert products._fused(other, x, *normed) is first  # weights of a shape share what was chosen
        assert asked == [(1, "bf16", True)]
        assert not products._fused(own, x, True, False, False, False, "none").norm
        assert products._fused(own, x.half(), *normed).dtype == "fp16"
        assert products._fused(own, x.repeat(3, 1), *normed).m == 3
        assert asked[1:] == [(1, "bf16", False), (1, "fp16", True), (3, "bf16", True)]
        settings.choose("linear_knobs", (("kernel", "tile"),), "a test")  # a kernel that has no RMSNorm in it
        assert not products._fused(own, x, *normed).norm and asked[4:] == [(1, "bf16", True)]
    settings.reload()
