"""Rules tell the kernels of one configuration from another's, over profiles with the names that profilers give."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmx import kernels
from jitmx.vllm import request
from scripts.protocol import profiles
from scripts.protocol.configurations import LAYERS, Configuration, layers
from scripts.protocol.engines import Place
from scripts.protocol.kernel_rules import FAMILIES, RULES, family, judge
from scripts.protocol.profiles import Kernel, Profile
from scripts.protocol.report import ProtocolError

DEPTH, PASSES = 36, 24
EACH = DEPTH * PASSES

# What a decode of gpt-oss-120b runs beside the kernels that rules are about, with launches.
COMMON = {
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(int)": PASSES,
}
FLASH = {
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<2, 64>>>(flash::Params)": EACH,
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int)": EACH,
    "void flash::prepare_varlen_num_blocks_kernel<4, true>(int, int, int, int const*, int*)": PASSES,
}
ROTARY = {"triton_poi_fused_add_index_select_mul_split_split_with_sizes_sub_unsqueeze_view_0": EACH}
STOCK = COMMON | FLASH | ROTARY
OUR_ATTENTION = {"jitmx_attention_decode": EACH}
_NORM = "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)"
NORMS = {_NORM: 2 * EACH + PASSES}
OUR_NORMS = {"jitmx_norm_rms": 2 * EACH, _NORM: PASSES}
ROUTER = {"nvjet_tst_64x8_64x16_4x1_v_bz_bias_TNT": EACH}
DENSE = {
    "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_bias_TNT": 2 * EACH,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, true>(cublasLt::Params)": 2 * EACH,
    "nvjet_tst_512x8_64x3_2x1_v_bz_TNT": PASSES,
}
TRITON = {
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu": EACH,
    "_p_matmul_ogs_NNT_bf16xbf16xmxfp4_64x256x64x1": EACH,
    "_topk_forward": EACH,
}
MARLIN = {
    "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l, 1125899906909960l, 2814749767106568l, 128, 1, "
    "4, 8, false, 4, 2, false>(int4 const*, int4 const*, int4*)": 2 * EACH,
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*)": EACH,
}
OUR_MOE = {"jitmx_moe_decode": EACH, "jitmx_routing_route": EACH}
OUR_DENSE = {"jitmx_linear_stream": 2 * EACH + PASSES}

PROFILES: dict[str, dict[str, int]] = {
    "stock-triton": STOCK | NORMS | ROUTER | DENSE | TRITON,
    "stock-marlin": STOCK | NORMS | ROUTER | DENSE | MARLIN,
    "jitmx-moe": STOCK | NORMS | DENSE | OUR_MOE,
    "jitmx-all": STOCK | OUR_NORMS | OUR_MOE | OUR_DENSE,
    "jitmx-all-vllm-router": STOCK | OUR_NORMS | ROUTER | OUR_MOE | OUR_DENSE,
    "jitmx-dense-marlin": STOCK | NORMS | ROUTER | MARLIN | OUR_DENSE,
    "jitmx-moe-attention": COMMON | ROTARY | OUR_ATTENTION | NORMS | DENSE | OUR_MOE,
    "jitmx-all-attention": COMMON | OUR_ATTENTION | OUR_NORMS | OUR_MOE | OUR_DENSE,
}
CONFIGURATIONS = {
    "stock-triton": Configuration(backend="triton"),
    "stock-marlin": Configuration(backend="marlin"),
    "jitmx-moe": Configuration(("moe",), attention="off"),
    "jitmx-all": Configuration(LAYERS, attention="off"),
    "jitmx-all-vllm-router": Configuration(LAYERS, attention="off"),
    "jitmx-dense-marlin": Configuration(("qkv", "o", "lm_head"), "marlin", attention="off"),
    "jitmx-moe-attention": Configuration(("moe",), attention="on"),
    "jitmx-all-attention": Configuration(LAYERS, attention="on"),
}


def breaches(name: str, configuration: Configuration) -> list[str]:
    found = judge(PROFILES[name], configuration, layers=DEPTH, passes=PASSES, phase="decode 1")
    assert found
    return [finding.words() for finding in found if not finding.passed]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_of_a_configuration_breaks_none_of_its_rules(name: str) -> None:
    assert breaches(name, CONFIGURATIONS[name]) == []


@pytest.mark.parametrize(
    ("layers_", "added", "without", "fails"),
    [
        ("all", EACH, "", True), ("all", PASSES, "", False), ("moe,qkv:mxfp8,o", EACH, "", False),
        ("moe,qkv", EACH, "", False), ("all", EACH, "linear_stream", False), ("all", EACH, "jitmx_routing", False),
    ],
)  # fmt: skip
def test_norms_that_add_beside_products_that_do_are_a_breach(
    layers_: str, added: int, without: str, fails: bool
) -> None:
    seen = {name: count for name, count in PROFILES["jitmx-all"].items() if not without or without not in name}
    found = judge(seen | {_NORM: added}, Configuration(layers(layers_), attention="off"), layers=DEPTH, passes=PASSES)
    assert any(not one.passed and one.rule.family == "adding norm" for one in found) == fails


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("asked", CONFIGURATIONS)
def test_a_profile_of_one_configuration_is_no_other_s(profile: str, asked: str) -> None:
    if CONFIGURATIONS[profile] != CONFIGURATIONS[asked]:
        assert breaches(profile, CONFIGURATIONS[asked]) != []


@pytest.mark.parametrize(
    ("name", "launches", "why"),
    [
        # One layer of two, as where a backend is chosen for those with a window, or none, and twice a layer.
        ("jitmx_attention_decode", EACH // 2, "jitmx serves every layer's attention"),
        ("jitmx_attention_decode", 0, "are one launch"),
        ("jitmx_attention_decode", 2 * EACH, "are one launch"),
        *((name, 1, "jitmx serves attention, not vLLM") for name in (
            *(name for name in FLASH if "reshape" not in name),
            "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::C<128>>>(flash::Params)",
            "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>(flash::Flash_fwd_params)",
            "kernel_unified_attention", "kernel_unified_attention_3d", "reduce_segments", "kernel_paged_attention_2d",
            "void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1>(Params)",
            "fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        )),
        *((name, 1, "jitmx's attention writes the cache") for name in (
            *(name for name in FLASH if "reshape" in name), "reshape_and_cache_kernel_flash",
        )),
        *((name, 1, "the launch of attention rotates q and k") for name in (
            *ROTARY, "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)",
        )),
    ],
)  # fmt: skip
def test_attention_that_is_not_jitmxs_alone_is_a_breach_where_it_is_to_be(name: str, launches: int, why: str) -> None:
    seen = PROFILES["jitmx-all-attention"] | {name: launches}
    asked = Configuration(LAYERS, attention="on")
    found = judge(seen, asked, layers=DEPTH, passes=PASSES, phase="decode 1")
    assert any(why in one.rule.why for one in found if not one.passed)


@pytest.mark.parametrize("asked", [Configuration(LAYERS, attention="off"), Configuration(backend="marlin")])
def test_a_kernel_of_jitmxs_attention_is_a_breach_where_vllm_serves_it(asked: Configuration) -> None:
    for name in ("decode", "append", "prefill", "wgmma"):
        found = judge({f"jitmx_attention_{name}": 1}, asked, layers=DEPTH, passes=PASSES)
        assert any(one.rule.why == "vLLM serves attention" for one in found if not one.passed)


@pytest.mark.parametrize("serves", ["layers_without_fused_norms", "a_decode_of_vllms_blocks"])
def test_rotary_embedding_before_attention_is_no_breach_in_blocks_that_keep_it(serves: str) -> None:
    fewer = serves == "layers_without_fused_norms"
    asked = Configuration(("moe",) if fewer else LAYERS, attention="on")
    seen = PROFILES["jitmx-moe-attention" if fewer else "jitmx-all-attention"] | ROTARY
    kept = {name: count for name, count in seen.items() if fewer or name != "jitmx_routing_route"}
    found = judge(kept, asked, layers=DEPTH, passes=PASSES, phase="decode 1")
    assert not any(one.rule.family == "rotary" and not one.passed for one in found)


@pytest.mark.parametrize(
    ("kernels", "phase", "fails"),
    [
        ("append,wgmma", "prefill 512", False), ("append,prefill", "prefill 8192", False),
        ("wgmma", "prefill 512", True), ("append", "prefill 512", True), ("decode", "prefill 512", True),
        ("append,decode", "prefill 512", True), ("decode", "prefill 16", False), ("append,wgmma", "decode 1", True),
        ("append,wgmma", "trace.json", False),
    ],
)  # fmt: skip
def test_a_prompt_takes_a_cache_write_and_a_kernel_for_many_tokens_and_a_decode_neither(
    kernels: str, phase: str, fails: bool
) -> None:
    seen = {f"jitmx_attention_{kernel}": DEPTH for kernel in kernels.split(",")}
    found = judge(seen, Configuration(("moe",), attention="on"), layers=DEPTH, passes=1, phase=phase)
    assert any(one.rule.family == "jitmx attention" and not one.passed for one in found) == fails


def test_who_is_to_serve_attention_by_default_is_the_plugins_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = PROFILES["jitmx-all-attention"]
    for default in (False, True):
        monkeypatch.setattr(request, "ATTENTION_BESIDE", frozenset(LAYERS) if default else frozenset(("none",)))
        asked = Configuration(LAYERS)
        found = judge(profile, asked, layers=DEPTH, passes=PASSES, phase="decode 1")
        assert all(one.passed for one in found) == asked.attends == default
        assert asked.as_dict()["attention_by"] == ("jitmx" if default else "vLLM")
        assert Configuration(LAYERS, attention="on").attends and not Configuration(LAYERS, attention="off").attends
        assert not Configuration(backend="marlin").attends


@pytest.mark.parametrize("layer", ["qkv", "o", "lm_head"])
def test_a_dense_layer_left_to_cublas_is_seen_by_the_counts(layer: str) -> None:
    fewer = OUR_DENSE["jitmx_linear_stream"] - (PASSES if layer == "lm_head" else EACH)
    left = {"nvjet_tst_64x24_64x16_4x1_v_bz_bias_TNT": PASSES if layer == "lm_head" else EACH}
    profile = STOCK | ROUTER | OUR_MOE | left | {"jitmx_linear_stream": fewer}
    failed = [f for f in judge(profile, Configuration(LAYERS), layers=DEPTH, passes=PASSES) if not f.passed]
    assert any("every dense layer" in finding.rule.why for finding in failed)


def test_every_kernel_of_jitmx_has_a_family_and_no_rule_takes_it_for_another_library_s() -> None:
    for name in kernels.families():
        for spec in kernels.family(name).specs:
            found = family(spec.entry)
            assert found is not None and found.startswith("jitmx "), spec.entry
            named = ("moe", "linear", "norm", "routing", "quantize", "attention")
            assert found == f"jitmx {name}" or name not in named, spec.entry


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("_matmul_ogs_TTN_bf16xbf16xmxfp4_128x256x64x1", "triton moe"),
        ("_p_matmul_ogs_TTN_bf16xbf16xmxfp4_128x256x64x1_swiglu", "triton moe"),
        ("void marlin::Marlin<1125899906909960l, 128, 1, 8, 8>(int4 const*)", "marlin linear"),
        ("void marlin_moe_wna16::Marlin<1l, 128>(int4 const*)", "marlin moe"),
        ("void humming<ProblemShape<0, 5760, 2880>, BlockShape<16, 128, 64>>(void const*, void*)", "humming"),
        ("void at::native::humming_like<int>(int)", None),
        ("std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>(int)", "cublas"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(int)", "cublas"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8>(P)", "cublas"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "cublas"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(cublasLt::Params)", None),
        ("void at::native::elementwise_kernel<128, 4>(int)", None),
        ("jitmx_dequantize", "jitmx quantize"),
        ("my_jitmx_linear_gemv", None),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>(float*)", None),
        ("triton_red_fused_add_embedding_rsqrt_index_select_0", "adding norm"),
        ("_compute_slot_mapping_kernel", None),
    ],
)
def test_a_kernel_is_told_by_its_name(name: str, wanted: str | None) -> None:
    assert family(name) == wanted


def test_rounded_inputs_want_their_own_kernels() -> None:
    rounded = Configuration(LAYERS, activation="mxfp8", attention="off")
    assert breaches("jitmx-all", rounded) != []
    scaled = {"jitmx_moe_scaled": EACH}
    profile = STOCK | OUR_DENSE | scaled
    assert all(f.passed for f in judge(profile, rounded, layers=DEPTH, passes=PASSES))
    assert not all(f.passed for f in judge(profile, replace(rounded, activation="bf16"), layers=DEPTH, passes=PASSES))


@pytest.mark.parametrize(
    ("kernel", "phase", "fine"),
    [
        ("jitmx_moe_stream", "decode 1", True), ("jitmx_moe_fused_fp8", "decode 1", False),
        ("jitmx_moe_wgmma_fp8", "prefill 2048", True), ("jitmx_moe_fused_fp8", "prefill 2048", True),
        ("jitmx_moe_scaled", "prefill 12000", True),
        ("jitmx_moe_wgmma", "prefill 8192", False), ("jitmx_moe_grouped", "prefill 512", True),
    ],
)  # fmt: skip
def test_inputs_in_e4m3_are_wanted_of_many_rows_and_not_of_one(kernel: str, phase: str, fine: bool) -> None:
    found = judge(
        STOCK | OUR_DENSE | {kernel: EACH}, Configuration(LAYERS, activation="fp8", attention="off"), layers=DEPTH,
        passes=PASSES, phase=phase,
    )  # fmt: skip
    assert all(one.passed for one in found if one.rule.family == "jitmx moe") == fine


def test_every_rule_names_a_family_and_bounds_it_and_some_configuration_obeys_it() -> None:
    rounded = (Configuration(LAYERS, activation=one) for one in ("mxfp8", "fp8"))
    every = [*CONFIGURATIONS.values(), *rounded, Configuration(backend="humming")]
    for rule in RULES:
        assert rule.family in FAMILIES and rule.why and (rule.least or rule.most), rule
        assert any(rule.holds_for(configuration) for configuration in every), rule


@pytest.mark.parametrize(
    ("text", "words"),
    [("moe,qvk", "'qvk' is no layer"), ("o,o:mxfp8", "twice"), ("moe:mxfp8", "'moe:mxfp8'"), (",", "names no layer")],
)
def test_layers_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        layers(text)


def test_a_configuration_s_environment_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"JITMX_LINEAR_KNOBS": "kernel=tile", "JITMX_LINEAR_TILE": "16x16", "PATH": "/bin", "VLLM_PLUGINS": "jitmx"}
    base |= {"JITMX_ATTENTION": "on", "VLLM_ATTENTION_SINKS": "1", "JITMX_ATTENTION_KNOBS": "kernel=decode"}
    found = Configuration(backend="triton").environment(base)
    assert found["PATH"] == "/bin" and "jitmx" not in found["VLLM_PLUGINS"].split(",")
    assert not {name for name in found if name.startswith(("JITMX_", "VLLM_ATTENTION"))}
    rounded = Configuration(LAYERS, activation="fp8").environment(base)
    assert (rounded["JITMX_MOE_ACTIVATION"], rounded["JITMX_LINEAR_ACTIVATION"]) == ("fp8", "fp8")


def test_attention_is_told_to_the_engine_beside_the_layers_and_a_backend_to_engines_whose_attention_is_vllms() -> None:
    chosen = {"backend": "FLASH_ATTN", "backend_per_kind": {"sliding_window": "TRITON_ATTN"}, "flash_attn_version": 3}
    place = Place(Path("model"), Path("out"), {"attention_config": chosen, "attention_backend": "FLASH_ATTN"}, 1.0)
    names = set()
    for attention in ("on", "off"):
        asked = Configuration(LAYERS, attention=attention)
        names.add(asked.name)
        options = place.engine(asked)
        wanted = {"mxfp4_layers": "moe,qkv,o,lm_head", "attention": attention}
        assert options["additional_config"] == {"jitmx": wanted}
        assert options["attention_config"] == (chosen if attention == "off" else {"flash_attn_version": 3})
        assert ("attention_backend" in options) == (attention == "off")
    assert names == {"jitmx-moe+qkv+o+lm_head-attn:on", "jitmx-moe+qkv+o+lm_head-attn:off"}
    assert place.engine(Configuration(backend="marlin"))["attention_config"] == chosen


@pytest.mark.parametrize(
    ("layers_", "attention", "words"), [((), "on", "are jitmx's"), (LAYERS, "yes", "attention 'yes' is not one of")]
)
def test_attention_that_cannot_be_is_refused(layers_: tuple[str, ...], attention: str, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        Configuration(layers_, attention=attention)


def as_trace(counts: dict[str, int]) -> dict[str, Any]:
    events: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 9, "ts": 0}]
    events += [
        {"ph": "X", "cat": "kernel", "name": name, "dur": 2.5, "ts": n} for name, c in counts.items() for n in range(c)
    ]
    return {"schemaVersion": 1, "traceEvents": events}


def test_a_trace_and_a_zipped_one_read_the_same_and_only_kernels_count(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.json", tmp_path / "a.json.gz"
    text = json.dumps(as_trace({"jitmx_moe_decode": 3, "x": 1}))
    plain.write_text(text)
    zipped.write_bytes(gzip.compress(text.encode()))
    (one,), (other,) = profiles.read(plain), profiles.read(zipped)
    assert one.kernels == other.kernels == (Kernel("jitmx_moe_decode", 3, 7.5), Kernel("x", 1, 2.5))


def test_a_profile_survives_its_report() -> None:
    profile = Profile("decode 1", (Kernel("a", 2, 3.25), Kernel("b", 1, 0.5)), 24, 36)
    assert profiles.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile


def test_the_validator_passes_a_profile_and_refuses_another_s(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(as_trace(PROFILES["jitmx-all"])))
    words = (path, "--passes", PASSES, "--model-layers", DEPTH)
    said = json.loads(run("validate_kernel_path.py", *words, "--attention", "off").stdout)
    shares = said["results"]["time_by_family"]["jitmx-moe+qkv+o+lm_head-attn:off"]["trace.json"]
    assert said["passed"] and shares["jitmx moe"] > 0 and sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert not json.loads(run("validate_kernel_path.py", *words, "--attention", "on", code=1).stdout)["passed"]
    said = json.loads(run("validate_kernel_path.py", *words, "--layers", "none", "--backend", "triton", code=1).stdout)
    assert {check["passed"] for check in said["checks"]} == {True, False}
    # Without counts a rule still tells what was seen from what was not.
    assert json.loads(run("validate_kernel_path.py", path, "--layers", "none", code=1).stdout)["passed"] is False


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema_version": 1, "level": "4", "results": {}}'])
def test_a_file_that_is_no_profile_is_a_usage_error(run: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert "profile" in run("validate_kernel_path.py", path, code=2).stderr


def test_a_trace_without_kernels_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(as_trace({})))
    assert "no kernel ran" in run("validate_kernel_path.py", path, code=2).stderr
