"""Who serves attention of a model that vLLM builds: by environment, by additional_config, by vLLM's own option."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

vllm_world = pytest.importorskip("vllm_world")

import vllm.plugins
from vllm.compilation.backends import set_model_tag
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.models import gpt_oss
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import jitmx.vllm
from jitmx import arch, settings
from jitmx.serving.attention import Attention
from jitmx.vllm import block, facts, hooks, policy
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionImpl, JitmxAttentionMetadataBuilder
from jitmx.vllm.request import requested

CUSTOM = AttentionBackendEnum.CUSTOM
WIDE: dict[str, Any] = {"hf_overrides": {"head_dim": 64}}
ON: dict[str, Any] = {"additional_config": {"jitmx": {"attention": "on"}}}
H200 = policy.Facts("sm_90a")


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})


def build(host: Any, **options: Any) -> Any:
    return host.build(**(WIDE | options))


def served(model: Any) -> list[bool]:
    """For each layer, whether its attention is jitmx's."""
    return [type(layer.attn.attn.impl) is JitmxAttentionImpl for layer in model.model.layers]


def said(host: Any) -> list[tuple[str, str]]:
    """What the log has of attention."""
    return [(level, message) for level, message in host.said if "attention" in message]


def test_the_plugin_registers_the_backend_by_its_entry_point(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry._ATTN_OVERRIDES.clear()
    point = metadata.EntryPoint("jitmx", "jitmx.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert CUSTOM.get_class() is JitmxAttentionBackend
    jitmx.vllm.register()
    assert CUSTOM.get_path() == facts.ATTENTION


def test_another_plugins_backend_stays(host: Any) -> None:
    registry._ATTN_OVERRIDES.clear()
    register_backend(CUSTOM, "another.plugin.Backend")
    jitmx.vllm.register()
    assert CUSTOM.get_path() == "another.plugin.Backend"


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        ({}, None, False),
        ({}, {"attention": "auto"}, False),
        ({}, {"attention": "on"}, True),
        ({}, {"attention": True}, True),
        ({"JITMX_ATTENTION": "on"}, None, True),
        ({"JITMX_ATTENTION": "auto"}, None, False),
        ({"VLLM_ATTENTION_SINKS": "true"}, None, True),
        ({"VLLM_USE_ATTENTION_SINKS": "true"}, None, True),
        ({"VLLM_ATTENTION_SINKS": "false"}, None, False),
        ({"VLLM_USE_ATTENTION_SINKS": "auto"}, None, False),
        ({"JITMX_ATTENTION": "off", "VLLM_ATTENTION_SINKS": "true"}, None, False),
        ({"JITMX_ATTENTION": "on"}, {"attention": "off"}, False),
        ({"JITMX_ATTENTION": "off"}, {"attention": True}, True),
    ],
)
def test_attention_is_jitmxs_where_it_is_asked_for(
    host: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], options: Any, wanted: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.reload()
    more = {} if options is None else {"additional_config": {"jitmx": options}}
    assert served(build(host, **more)) == [wanted] * 2
    where = "additional_config's attention" if options else next(iter(environ), "")
    lines = [f"jitmx serves {kind} in bfloat16 on sm_90a (by {where})"
             for kind in ("attention within a window", "attention")]  # fmt: skip
    assert said(host) == [("INFO", line) for line in lines if wanted]


BESIDE = {"mxfp4_layers": "moe,qkv,o"}


def test_beside_experts_qkv_and_o_it_is_the_default(host: Any) -> None:
    assert served(build(host, additional_config={"jitmx": BESIDE})) == [True] * 2
    assert ("INFO", "jitmx serves attention in bfloat16 on sm_90a (by default)") in host.said
    for other in (BESIDE | {"attention": "off"}, {"mxfp4_layers": "moe,qkv"}):
        assert served(build(host, additional_config={"jitmx": other})) == [False] * 2, other
    assert not requested(BESIDE | {"moe_kernel": "marlin"}, environ={}).serves_attention()
    assert not requested(BESIDE, environ={}).serves_attention(lora=True)


def test_a_backend_that_the_user_chose_stays_and_the_log_tells_without_a_warning(host: Any) -> None:
    model = build(host, attention_config={"backend": "CPU_ATTN"}, additional_config={"jitmx": BESIDE})
    assert served(model) == [False] * 2
    told = [line for line in host.said if "vLLM serves attention" in line[1]]
    assert [level for level, _ in told] == ["INFO"] * 2
    assert all("attention_config asks for CPU_ATTN" in message for _, message in told)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hf_overrides": {"head_dim": 32}}, "head_dim=32 is none of 64, 96, 128, 256"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is none of auto, fp8, fp8_e4m3 and bfloat16"),
        ({"block_size": 24}, "--block-size 24 is no multiple of 16"),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, "attention_config asks for FLASH_ATTN"),
        ({"attention_config": {"use_non_causal": True}}, "use_non_causal"),
    ],
)  # fmt: skip
def test_what_it_does_not_serve_stays_with_vllm_and_the_log_says_why(
    host: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    # vLLM's own backend for this machine takes all of these, or is not asked.
    monkeypatch.setattr(selector, "_cached_get_attn_backend", lambda **_: AttentionBackendEnum.CPU_ATTN.get_class())
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", lambda *_, **__: None)
    model = build(host, **(ON | options))
    assert served(model) == [False] * 2
    lines = said(host)
    assert [level for level, _ in lines] == ["WARNING"] * 2 and all(reason in message for _, message in lines)


def test_a_backend_for_a_kind_of_layers_decides_for_these(host: Any) -> None:
    model = build(host, attention_config={"backend_per_kind": {"sliding_window": "CPU_ATTN"}}, **ON)
    assert served(model) == [False, True]
    assert [level for level, _ in said(host)] == ["WARNING", "INFO"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": None, "no_target": "no card"}, "no card"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"ubatches": True}, "two streams"),
    ],
)
def test_gates_of_every_layer_hold_for_attention(change: dict[str, Any], reason: str) -> None:
    asked = requested({"attention": "on"}, environ={})
    found = policy.decide_attention(
        policy.Attention(64, 8, 64), asked, dataclasses.replace(H200, **change), lambda: "never asked"
    )
    assert found.format is None and reason in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 17, "kv_heads": 1}, "17 query heads are no multiple of 1 KV heads by 1 to 16"),
        ({"heads": 9, "kv_heads": 2}, "9 query heads"),
        ({"dtype": "float32"}, "float32 is neither bfloat16 nor float16"),
        ({"cache": "float16"}, "--kv-cache-dtype float16 is none of"),
        ({"draft": True}, "it is of a draft model"),
        ({"other": "ranks share"}, "ranks share"),
        ({"backend": "another plugin's backend, a.B"}, "attention_config asks for another plugin's backend, a.B"),
    ],
)
def test_each_rule_of_a_layer_names_the_value(change: dict[str, Any], reason: str) -> None:
    asked = requested({"attention": "on"}, environ={})
    layer = dataclasses.replace(policy.Attention(64, 8, 64), **change)
    found = policy.decide_attention(layer, asked, H200, lambda: "")
    assert found.format is None and reason in found.reason
    assert policy.decide_attention(policy.Attention(64, 8, 64), asked, H200, lambda: "").format == "bfloat16"
    assert policy.decide_attention(policy.Attention(64, 8, 64, cache="fp8"), asked, H200, lambda: "").format == "e4m3"
    assert policy.decide_attention(policy.Attention(64, 8, 64), asked, H200, lambda: "no").format is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel_config.decode_context_parallel_size": 2}, "decode context parallel"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "prefill context parallel"),
        ({"attention_config.use_non_causal": True}, "not causal"),
        ({"model_config.is_mm_prefix_lm": True}, "tokens of an image"),
        ({"model_config.rswa_window": 3}, "R-SWA"),
    ],
)
def test_what_an_engine_asks_for_and_jitmx_has_not_is_said(change: dict[str, Any], reason: str) -> None:
    usual = {
        "parallel_config": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        "attention_config": {"use_non_causal": False},
        "model_config": {"is_mm_prefix_lm": False, "rswa_window": None},
    }
    config = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in usual.items()})
    assert facts.against_attention(config) == ""
    for name, value in change.items():
        part, field = name.split(".")
        setattr(getattr(config, part), field, value)
    assert reason in facts.against_attention(config)


def test_an_architecture_that_no_kernel_serves_leaves_it_to_vllm(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "target", lambda: (arch.parse("sm_80"), ""))
    assert served(build(host, **ON)) == [True] * 2  # one that has kernels, but none for E4M3
    host.said.clear()
    monkeypatch.setattr(selector, "_cached_get_attn_backend", lambda **_: AttentionBackendEnum.CPU_ATTN.get_class())
    assert served(build(host, kv_cache_dtype="fp8", **ON)) == [False] * 2
    assert all("no kernel serves it on sm_80: cache=e4m3 needs sm_89" in message for _, message in said(host))


def test_a_draft_models_attention_stays_with_vllm(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda *_, **__: (mxfp4.Mxfp4MoeBackend.NONE, None))
    monkeypatch.setattr(mxfp4.GptOssMxfp4MoEMethod, "is_monolithic", False)
    with set_model_tag("eagle_head"):
        assert served(build(host, **ON)) == [False] * 2
    assert said(host) == [
        ("INFO", "vLLM serves the draft model's own attention; jitmx serves layers of the target model only")
    ]


def test_other_code_of_vllms_leaves_it_to_vllm(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "changed", lambda: ("OAIAttention._build_attention",))
    assert served(build(host, **ON)) == [False] * 2
    assert all("vLLM's code that builds it has changed" in message for _, message in said(host))


@pytest.mark.parametrize(("fuse", "lora"), [(True, False), (False, False), (True, True)])
def test_rotary_embedding_is_the_launchs_where_norms_are_the_products(host: Any, fuse: bool, lora: bool) -> None:
    more = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj"]} if lora else {}
    options = {"mxfp4_layers": "all", "attention": True, "fuse_norm": fuse}
    model = build(host, additional_config={"jitmx": options}, **more)
    fused = fuse and not lora
    for layer in model.model.layers:
        assert layer.jitmx_rotates is layer.jitmx_fused is fused
        assert (layer.attn.attn.impl.rope is layer.attn.rotary_emb) is fused
    begun = [one for one in host.begun if isinstance(one, Attention)]
    assert [(one.problem.window, one.problem.rope) for one in begun] == [
        (window, "neox" if fused else "no_rope") for window in (128, 0)
    ]
    assert model.vllm_config.additional_config["jitmx_serves"]["rope"] == ("attention" if fused else "")
    assert model.vllm_config.additional_config["jitmx_serves"]["attention"] == "bfloat16"


def test_a_rotary_embedding_of_another_kind_stays_with_vllm(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(gpt_oss.get_rope.__globals__["YaRNScalingRotaryEmbedding"]):  # type: ignore[misc, name-defined]
        def forward_cuda(self, *given: Any) -> Any:
            raise NotImplementedError

    get_rope = gpt_oss.get_rope

    def other(*args: Any, **kwargs: Any) -> Any:
        made = get_rope(*args, **kwargs)
        made.__class__ = Other
        return made

    monkeypatch.setattr(gpt_oss, "get_rope", other)
    try:
        model = build(host, additional_config={"jitmx": {"mxfp4_layers": "all", "attention": True}})
        assert [layer.jitmx_rotates for layer in model.model.layers] == [False] * 2 and served(model) == [True] * 2
    finally:
        made.__class__ = Other.__base__ if (made := model.model.layers[0].attn.rotary_emb) else None


def chosen(host: Any, config: Any = None, **asked: Any) -> list[str]:
    """What vLLM's selector is told to stand against --attention-backend CUSTOM on an H200."""
    usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "has_sink": True,
             "has_sliding_window": True}  # fmt: skip
    config = config or host.config(**WIDE)
    with set_current_vllm_config(config):
        given = selector.AttentionSelectorConfig(**usual | asked)._asdict()
        found: list[str] = CUSTOM.get_class().validate_configuration(device_capability=DeviceCapability(9, 0), **given)
        return found


def test_nothing_stands_against_the_backend_that_the_user_names_where_kernels_have_it_all(host: Any) -> None:
    assert chosen(host) == []
    for asked in ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bfloat16"}, {"block_size": 64}, {"head_size": 128}):
        assert chosen(host, **asked) == []


@pytest.mark.parametrize("asked", [{}, {"additional_config": {"jitmx": {"attention": "off"}}}])
def test_a_user_who_names_custom_has_jitmx_for_every_layer(
    host: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    # What vLLM's platform for CUDA does with a backend by name; it cannot be imported without a driver.
    def select(backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        found = backend.get_class()
        given = attn_selector_config._asdict()
        assert found.validate_configuration(device_capability=DeviceCapability(9, 0), **given) == []
        return str(backend.get_path())

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", select)
    assert served(build(host, attention_config={"backend": "CUSTOM"}, **asked)) == [True] * 2
    kinds = ("attention within a window", "attention")
    assert said(host) == [
        ("INFO", f"jitmx serves {kind} in bfloat16 on sm_90a (by attention_config's CUSTOM)") for kind in kinds
    ]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 80}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "--kv-cache-dtype float16 is none of"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
    ],
)
def test_vllms_selector_refuses_what_no_kernel_has(host: Any, asked: dict[str, Any], reason: str) -> None:
    assert any(reason in found for found in chosen(host, **asked))


def test_vllms_selector_refuses_two_halves_of_a_batch_at_a_time_and_another_vllm(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = host.config(**WIDE)
    config.parallel_config.enable_dbo = True
    assert ["two halves of a batch" in found for found in chosen(host, config)] == [True]
    monkeypatch.setattr(facts, "target", lambda: (None, "no target runs on 7.0"))
    assert chosen(host) == ["no target runs on 7.0"]
    monkeypatch.setattr(hooks, "hold", lambda: False)
    assert chosen(host) == ["incompatible vLLM internals, which the log names"]


def test_graphs_of_any_batch_may_be_captured_and_draft_loops_as_well() -> None:
    builder = JitmxAttentionMetadataBuilder
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
    assert builder.supports_draft_decode_metadata_update and builder.supports_update_block_table
    assert JitmxAttentionBackend.forward_includes_kv_cache_update
