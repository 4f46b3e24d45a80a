"""Who serves each layer of a gpt-oss model that vLLM builds: by environment, by additional_config, by every gate."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

vllm_world = pytest.importorskip("vllm_world")

from vllm.compilation.backends import set_model_tag
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoeBackend

from jitmx import settings
from jitmx.errors import SettingError
from jitmx.ops import custom
from jitmx.vllm import compiled, facts, quantization
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.moe import JitmxMoEMethod

JITMX = {"moe": JitmxMoEMethod, "qkv": JitmxLinearMethod, "o": JitmxLinearMethod, "lm_head": JitmxLinearMethod}


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM was told to take of its own kernels for the experts; it has none for this machine."""
    asked: list[str] = []

    def select(config: Any, activation_key: Any = None) -> Any:
        asked.append(config.moe_backend)
        return Mxfp4MoeBackend.NONE, None

    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", select)
    monkeypatch.setattr(GptOssMxfp4MoEMethod, "is_monolithic", False)
    return asked


def methods(model: Any) -> dict[str, Any]:
    """The method of a layer of each kind."""
    block = model.model.layers[1]
    return {
        "moe": block.mlp.experts.routed_experts.quant_method, "qkv": block.attn.qkv_proj.quant_method,
        "o": block.attn.o_proj.quant_method, "lm_head": model.lm_head.quant_method,
    }  # fmt: skip


def served(model: Any) -> dict[str, str]:
    """The format of each kind of layer that has jitmx's method."""
    found = {kind: method for kind, method in methods(model).items() if type(method) is JITMX[kind]}
    return {kind: getattr(method, "format", "mxfp4") for kind, method in found.items()}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, {"moe": "mxfp4"}),
        ({"JITMX_MXFP4_LAYERS": "moe,qkv,o,lm_head"}, dict.fromkeys(JITMX, "mxfp4")),
        ({"JITMX_MXFP4_LAYERS": "all"}, dict.fromkeys(JITMX, "mxfp4")),
        ({"JITMX_MXFP4_LAYERS": "moe,o:mxfp8"}, {"moe": "mxfp4", "o": "mxfp8"}),
        ({"VLLM_MXFP4_QUANTIZE_QKV": "1"}, {"moe": "mxfp4", "qkv": "mxfp4"}),
        ({"VLLM_MXFP4_QUANTIZE_O": "1"}, {"moe": "mxfp4", "o": "mxfp4"}),
        ({"VLLM_MXFP4_QUANTIZE_LM_HEAD": "1"}, {"moe": "mxfp4", "lm_head": "mxfp4"}),
        ({"VLLM_MXFP4_MOE_KERNEL": "gemv", "VLLM_MXFP4_ACTIVATION": "bf16"}, {"moe": "mxfp4"}),
    ],
)
def test_the_environment_chooses(
    host: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], wanted: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.reload()
    assert served(host.build()) == wanted
    whole = wanted == dict.fromkeys(JITMX, "mxfp4")
    lines = [(level, message) for level, message in host.said if " serves attention" not in message]
    assert [level for level, _ in lines] == ["INFO"] * (len(wanted) + whole)
    said = {message for _, message in lines if " adds the residual " not in message}
    assert {message.split(" in ")[0] for message in said} == {f"jitmx serves {kind}" for kind in wanted}


def test_additional_config_comes_before_the_environment(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITMX_MXFP4_LAYERS", "moe,o")
    settings.reload()
    model = host.build(additional_config={"jitmx": {"mxfp4_layers": "moe,qkv:mxfp8,lm_head"}})
    assert served(model) == {"moe": "mxfp4", "qkv": "mxfp8", "lm_head": "mxfp4"}
    assert ("INFO", "jitmx serves qkv in mxfp8 on sm_90a (by additional_config's mxfp4_layers)") in host.said


@pytest.mark.parametrize("kernel", ["marlin", "triton"])
def test_a_stock_kernel_by_name_hands_the_experts_back_to_vllm(
    host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str], kernel: str
) -> None:
    monkeypatch.setenv("VLLM_MXFP4_MOE_KERNEL", kernel)
    settings.reload()
    model = host.build()
    assert type(methods(model)["moe"]) is GptOssMxfp4MoEMethod and stock == [kernel, kernel]
    reason = f"VLLM_MXFP4_MOE_KERNEL asks for vLLM's {kernel}"
    assert host.said == [("WARNING", f"vLLM serves moe, jitmx is disabled for it: {reason}")]
    assert not model.model.layers[0].mlp.router.taken


def test_a_backend_that_vllm_was_told_to_take_is_left_to_it(host: Any, stock: list[str]) -> None:
    model = host.build(kernel_config={"moe_backend": "marlin"})
    assert type(methods(model)["moe"]) is GptOssMxfp4MoEMethod and stock == ["marlin", "marlin"]
    assert "moe_backend asks for vLLM's marlin" in host.said[0][1]


def test_layers_none_is_vllm_as_it_was_and_silent(host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str]) -> None:
    monkeypatch.setenv("JITMX_MXFP4_LAYERS", "none")
    settings.reload()
    assert served(host.build()) == {} and host.said == []


def test_without_a_device_of_jitmxs_vllm_serves_everything(
    host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str]
) -> None:
    monkeypatch.setattr(facts, "target", lambda: (None, "no target of jitmx runs on compute capability 7.0"))
    assert served(host.build(additional_config={"jitmx": {"mxfp4_layers": "all"}})) == {}
    assert all("compute capability 7.0" in message for _, message in host.said)
    assert [level for level, _ in host.said].count("WARNING") == 4  # attention was not asked for by name


def test_with_lora_on_the_experts_vllm_serves_them_and_the_rest_stays_in_bf16(host: Any, stock: list[str]) -> None:
    model = host.build(enable_lora=True, max_lora_rank=8, additional_config={"jitmx": {"mxfp4_layers": "all"}})
    assert served(model) == {} and len(host.said) == 4
    assert all("LoRA is on" in message for _, message in host.said)


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (["o_proj", "experts"], True), (["model.layers.1.mlp.experts"], True), (["experts.w1"], True),
        (["model.layers.1.attn.o_proj", "router"], False),
    ],
)  # fmt: skip
def test_adapters_for_experts_of_any_layer_keep_the_experts_with_vllm(
    host: Any, stock: list[str], targets: list[str], adapted: bool
) -> None:
    model = host.build(enable_lora=True, max_lora_rank=8, lora_target_modules=targets)
    assert served(model) == ({} if adapted else {"moe": "mxfp4"})
    assert any("LoRA is on for the experts" in message for _, message in host.said) == adapted


def test_with_lora_elsewhere_jitmx_serves_the_experts_that_vllm_chose(host: Any) -> None:
    model = host.build(
        enable_lora=True, max_lora_rank=8, lora_target_modules=["o_proj"],
        additional_config={"jitmx": {"mxfp4_layers": "all"}},
    )  # fmt: skip
    assert served(model) == {"moe": "mxfp4"}
    method = methods(model)["moe"]
    assert not method.is_monolithic and method.gate is None and not model.model.layers[0].mlp.router.taken


def test_batch_invariance_is_left_to_vllm(host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str]) -> None:
    config = host.config()
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    assert facts.read(config).batch_invariant
    with set_current_vllm_config(config):
        assert quantization.decide(quantization.Layer("moe")).format is None


@pytest.mark.parametrize(("tag", "prefix"), [("eagle_head", "lm_head"), ("draft_model", "draft_model.lm_head")])
def test_a_drafts_head_stays_in_bf16(host: Any, tag: str, prefix: str) -> None:
    config = host.config(additional_config={"jitmx": {"mxfp4_layers": "all"}})
    with set_current_vllm_config(config):
        assert quantization.decide_lm_head("lm_head", False).format == "mxfp4"
        assert quantization.decide_lm_head("lm_head", True).format is None
        with set_model_tag(tag):
            assert quantization.decide_lm_head(prefix, False).format is None


def test_the_head_of_another_model_is_not_jitmxs(host: Any) -> None:
    with vllm_world.world():
        assert quantization.decide_lm_head("lm_head", False).reason == "the model is not gpt-oss in MXFP4"


def test_a_layer_that_does_not_exist_is_an_error_before_anything_is_built(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="'qvk' is none of moe, qkv, o, lm_head, all; did you mean qkv"):
        host.build(additional_config={"jitmx": {"mxfp4_layers": "qvk"}})
    monkeypatch.setenv("VLLM_MXFP4_ACTIVATION", "int8")
    with pytest.raises(SettingError, match="VLLM_MXFP4_ACTIVATION='int8' is not bf16, mxfp8, mxfp4, fp6 or fp8"):
        settings.reload()


def test_experts_of_another_form_are_left_to_vllm_with_the_reason(
    host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str]
) -> None:
    monkeypatch.setattr(facts, "against_moe", lambda layer: "the activation is relu2, not swigluoai")
    assert served(host.build()) == {}
    assert host.said[0][1] == "vLLM serves moe, jitmx is disabled for it: the activation is relu2, not swigluoai"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "sigmoid"}, "softmax"), ({"use_grouped_topk": True}, "softmax"),
        ({"e_score_correction_bias": object()}, "softmax"), ({"routed_scaling_factor": 2.0}, "softmax"),
        ({"apply_router_weight_on_input": True}, "input"),
    ],
)  # fmt: skip
def test_routing_that_jitmx_does_not_do_is_seen(host: Any, change: dict[str, Any], said: str) -> None:
    layer = host.build().model.layers[0].mlp.experts.routed_experts
    assert facts.against_moe(layer) == ""
    for name, value in change.items():
        object.__setattr__(layer, name, value)
    assert said in facts.against_moe(layer)


def test_gemm_by_name_steers_to_the_grouped_kernel(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MXFP4_MOE_KERNEL", "gemm")
    settings.reload()
    host.build()
    assert settings.current().value("moe_knobs") == (("kernel", "grouped"),)
    assert settings.origin("moe_knobs") == "VLLM_MXFP4_MOE_KERNEL"


def test_what_is_served_is_part_of_vllms_key_for_compiled_code(
    host: Any, monkeypatch: pytest.MonkeyPatch, stock: list[str]
) -> None:
    keys = set()
    for kernel, layers in (("auto", "moe"), ("marlin", "moe"), ("auto", "all"), ("auto", "moe,o:mxfp8")):
        monkeypatch.setenv("VLLM_MXFP4_MOE_KERNEL", kernel)
        monkeypatch.setenv("JITMX_MXFP4_LAYERS", layers)
        settings.reload()
        keys.add(host.build().vllm_config.compute_hash())
    assert len(keys) == 4


def test_the_schemas_of_operators_are_part_of_vllms_key_for_compiled_code(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        compiled.operators.cache_clear()
        found: str = host.build().vllm_config.compute_hash()
        return found

    first = key()
    assert key() == first
    renamed = {schema.replace("prefetch_words", "next_words") for schema in custom._schemas}
    assert renamed != custom._schemas
    with monkeypatch.context() as patched:
        patched.setattr(custom, "_schemas", renamed)
        assert key() != first
    assert key() == first


def test_each_experts_take_the_router_beside_them(host: Any) -> None:
    model = host.build()
    for layer in model.model.layers:
        method = layer.mlp.experts.routed_experts.quant_method
        assert method.is_monolithic and method.gate is layer.mlp.router and layer.mlp.router.taken
    with vllm_world.world():
        other = GateLinear(64, 4, bias=True, prefix="model.layers.0.mlp.router", return_bias=False)
    assert not other.taken


def test_simulated_routing_has_its_logits_looked_at(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    for layer in host.build().model.layers:
        method = layer.mlp.experts.routed_experts.quant_method
        assert method.is_monolithic and method.gate is None and not layer.mlp.router.taken
