"""Which layers jitmx serves in vLLM: every name is honoured, every gate holds, and each decision says why. No vLLM."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import layers
from jitmx.errors import SettingError
from jitmx.vllm.policy import Block, Decision, Facts, Layer, against_fusing, decide
from jitmx.vllm.request import Request, requested

H200 = Facts("sm_90a")
ALL = {"mxfp4_layers": "all"}


def ask(options: Any = None, **environ: str) -> Request:
    return requested(options, environ=environ)


def served(options: Any = None, facts: Facts = H200, **environ: str) -> dict[str, str]:
    """The format of each kind of layer that jitmx serves."""
    asked = ask(options, **environ)
    found = {kind: decide(Layer(kind, "lm_head" if kind == "lm_head" else f"model.{kind}"), asked, facts).format
             for kind in layers.KINDS}  # fmt: skip
    return {kind: format for kind, format in found.items() if format is not None}


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        ({}, None, {"moe": "mxfp4"}),
        ({}, {}, {"moe": "mxfp4"}),
        ({"JITMX_MXFP4_LAYERS": "moe,qkv,o,lm_head"}, None, dict.fromkeys(layers.KINDS, "mxfp4")),
        ({"JITMX_MXFP4_LAYERS": "all"}, None, dict.fromkeys(layers.KINDS, "mxfp4")),
        ({"JITMX_MXFP4_LAYERS": "none"}, None, {}),
        ({"JITMX_MXFP4_LAYERS": "qkv,o:mxfp8"}, None, {"qkv": "mxfp4", "o": "mxfp8"}),
        ({"VLLM_MXFP4_QUANTIZE_QKV": "1"}, None, {"moe": "mxfp4", "qkv": "mxfp4"}),
        ({"VLLM_MXFP4_QUANTIZE_O": "1", "VLLM_MXFP4_QUANTIZE_LM_HEAD": "auto"}, None, {"moe": "mxfp4", "o": "mxfp4"}),
        ({"JITMX_MXFP4_LAYERS": "all", "VLLM_MXFP4_QUANTIZE_LM_HEAD": "0"}, None,
         {"moe": "mxfp4", "qkv": "mxfp4", "o": "mxfp4"}),
        ({"JITMX_MXFP4_LAYERS": "o:mxfp8", "JITMX_QUANTIZE_O": "1"}, None, {"o": "mxfp8"}),
        # What additional_config says decides alone.
        ({"JITMX_MXFP4_LAYERS": "all"}, {"mxfp4_layers": "moe"}, {"moe": "mxfp4"}),
        ({"VLLM_MXFP4_QUANTIZE_QKV": "1"}, {"mxfp4_layers": "none"}, {}),
        ({"JITMX_MXFP4_LAYERS": "none"}, {"mxfp4_layers": ["moe", "o:mxfp8"]}, {"moe": "mxfp4", "o": "mxfp8"}),
        ({"VLLM_MXFP4_MOE_KERNEL": "marlin"}, {"moe_kernel": "auto"}, {"moe": "mxfp4"}),
        ({"VLLM_MXFP4_MOE_KERNEL": "marlin"}, None, {}),
        ({"VLLM_MXFP4_MOE_KERNEL": "triton"}, ALL, {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}),
        ({"VLLM_MXFP4_MOE_KERNEL": "gemm"}, None, {"moe": "mxfp4"}),
        ({"VLLM_MXFP4_MOE_KERNEL": "gemv"}, None, {"moe": "mxfp4"}),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_served(environ: dict[str, str], options: Any, wanted: dict[str, str]) -> None:
    assert served(options, **environ) == wanted


@pytest.mark.parametrize(
    ("change", "left", "said"),
    [
        ({"target": None, "no_target": "no card"}, (), "no card"),
        ({"lora": True}, ("moe",), "LoRA"),
        ({"lora": True, "lora_experts": True}, (), "LoRA"),
        ({"tied": True}, ("moe", "qkv", "o"), "embeddings"),
        ({"batch_invariant": True}, (), "VLLM_BATCH_INVARIANT"),
        ({"ubatches": True}, (), "two streams"),
        ({"backend": "triton"}, ("qkv", "o", "lm_head"), "moe_backend asks for vLLM's triton"),
        ({"against_moe": "of the shape"}, ("qkv", "o", "lm_head"), "of the shape"),
    ],
)
def test_each_gate_keeps_its_layers_with_vllm_and_says_why(
    change: dict[str, Any], left: tuple[str, ...], said: str
) -> None:
    facts = dataclasses.replace(H200, **change)
    assert tuple(served(ALL, facts)) == left
    for kind in set(layers.KINDS) - set(left):
        decision = decide(Layer(kind, "lm_head"), ask(ALL), facts)
        assert decision.format is None and said in decision.reason


def test_only_the_models_own_untied_head_is_quantized() -> None:
    asked = ask(ALL)
    assert decide(Layer("lm_head", "lm_head"), asked, H200) == Decision("mxfp4", "by additional_config's mxfp4_layers")
    for layer in (
        Layer("lm_head", "lm_head", tied=True), Layer("lm_head", "lm_head", draft=True),
        Layer("lm_head", "eagle_head.lm_head"), Layer("lm_head", "model.mtp.head"),
    ):  # fmt: skip
        assert decide(layer, asked, H200).format is None


@pytest.mark.parametrize("kind", layers.KINDS)
def test_a_draft_models_layers_stay_with_vllm(kind: str) -> None:
    assert decide(Layer(kind, "lm_head", draft=True), ask(ALL), H200) == Decision(None, "it is of a draft model")


@pytest.mark.parametrize("kind", layers.DRAFT_KINDS)
def test_layers_of_a_draft_are_served_as_draft_layers_says(kind: str) -> None:
    layer, options = Layer(kind, f"model.{kind}", draft=True), {"draft_layers": f"{kind}:mxfp8"}
    assert decide(layer, ask(options), H200) == Decision("mxfp8", "by additional_config's draft_layers")
    asked = ask(ALL, JITMX_DRAFT_LAYERS="all")
    assert decide(layer, asked, H200) == Decision("mxfp4", "by JITMX_DRAFT_LAYERS")
    assert decide(layer, asked, dataclasses.replace(H200, lora=True)).format == "mxfp4"  # adapters are the target's
    for change, said in (
        ({"offloaded": True}, "offloads weights"), ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"target": None, "no_target": "no card"}, "no card"),
    ):  # fmt: skip
        decision = decide(layer, asked, dataclasses.replace(H200, **change))
        assert decision.format is None and said in decision.reason
    tied = decide(dataclasses.replace(layer, tied=True), asked, H200)
    assert tied.format is None and "embeddings" in tied.reason
    other = next(one for one in layers.DRAFT_KINDS if one != kind)
    assert "not among the draft model's layers" in decide(layer, ask({"draft_layers": other}), H200).reason


@pytest.mark.parametrize(
    ("environ", "options", "reason"),
    [
        ({}, None, "by default"),
        ({"JITMX_MXFP4_LAYERS": "moe"}, None, "by JITMX_MXFP4_LAYERS"),
        ({}, {"mxfp4_layers": "moe"}, "by additional_config's mxfp4_layers"),
    ],
)
def test_a_decision_names_what_asked_for_it(environ: dict[str, str], options: Any, reason: str) -> None:
    assert decide(Layer("moe"), ask(options, **environ), H200) == Decision("mxfp4", reason)


def test_a_switch_is_named_where_it_decided() -> None:
    asked = ask(VLLM_MXFP4_QUANTIZE_QKV="1", JITMX_MXFP4_LAYERS="moe,o", JITMX_QUANTIZE_O="0")
    assert decide(Layer("qkv"), asked, H200).reason == "by VLLM_MXFP4_QUANTIZE_QKV=1"
    assert decide(Layer("o"), asked, H200).reason == "not among the layers asked for (JITMX_QUANTIZE_O=0)"


@pytest.mark.parametrize("flag", ["fuse_norm", "all_scales", "greedy_sampler"])
@pytest.mark.parametrize("value", [0, 1, False, True, "0", "1"], ids=repr)
def test_a_flag_is_a_number_a_bool_or_a_text(flag: str, value: Any) -> None:
    assert getattr(ask({flag: value}), flag) is bool(int(value))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "moe",
            "jitmx is 'moe', and must be an object with keys of mxfp4_layers, moe_kernel, moe_activation, linear_a",
        ),
        ({"layers": "moe"}, "jitmx has no 'layers'; did you mean mxfp4_layers?"),
        ({"qqq": 1}, "jitmx has no 'qqq'; it has mxfp4_layers, moe_kernel, moe_activation, linear_activation"),
        ({"mxfp4_layers": 3}, "jitmx.mxfp4_layers is 3, and must be a text"),
        ({"mxfp4_layers": "moe,qvk"}, "('qvk' is none of moe, qkv, o, lm_head, all; did you mean qkv?)"),
        ({"mxfp4_layers": "moe:mxfp8"}, "(moe takes mxfp4, not 'mxfp8')"),
        ({"moe_kernel": "cutlass"}, "jitmx.moe_kernel='cutlass' is not auto, gemm, gemv, marlin or triton"),
        ({"moe_activation": "int8"}, "jitmx.moe_activation='int8' is not bf16, mxfp8, mxfp4, fp6 or fp8"),
        ({"fuse_norm": "auto"}, "jitmx.fuse_norm='auto' is not 0 or 1"),
        ({"fuse_norm": 2}, "jitmx.fuse_norm=2 is not 0 or 1"),
        ({"all_scales": "full"}, "jitmx.all_scales='full' is not 0 or 1"),
        ({"greedy_sampler": "auto"}, "jitmx.greedy_sampler='auto' is not 0 or 1"),
        ({"draft_layers": "moe"}, "('moe' is none of qkv, o, gate_up, down, fc, lm_head, all)"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_the_rule(options: Any, said: str) -> None:
    with pytest.raises(SettingError) as error:
        ask(options)
    assert said in str(error.value)


_WHOLE = Block({"moe": "mxfp4", "qkv": "mxfp4", "o": "mxfp8"}, router=True, ranks=1, n=5120, hidden=2880)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"served": {"moe": "mxfp4", "o": "mxfp4"}}, "vLLM serves qkv"),
        ({"served": {}}, "vLLM serves moe and qkv and o"),
        ({"ranks": 2}, "products are added up over 2 ranks before the residual is"),
        ({"router": False}, "vLLM makes the router's product, or looks at what it chooses"),
        ({"other": "its RMSNorm is another"}, "its RMSNorm is another"),
    ],
)
def test_norms_go_into_the_products_of_a_block_unless_something_stands_against_it(
    change: dict[str, Any], said: str
) -> None:
    found = dataclasses.replace(_WHOLE, **change)
    assert against_fusing(found, ask(ALL), lambda format: "") == said
    assert against_fusing(found, ask(ALL), lambda format: f"no kernel for {format}") == (said or "no kernel for mxfp4")


def test_fusing_can_be_asked_not_to_be_by_text_or_truth() -> None:
    assert ask({"fuse_norm": True}).fuse_norm and ask(ALL).fuse_norm
    for options, environ, name in (
        ({"fuse_norm": False}, {}, "additional_config's fuse_norm"),
        (None, {"JITMX_FUSE_NORM": "0"}, "JITMX_FUSE_NORM"),
        ({"fuse_norm": "0"}, {"JITMX_FUSE_NORM": "1"}, "additional_config's fuse_norm"),
    ):
        against = against_fusing(_WHOLE, ask(options, **environ), lambda format: "")
        assert against == f"{name} asks for norms in launches of their own"


@pytest.mark.parametrize(
    ("options", "environ", "wanted"),
    [
        (None, {}, False), ({"all_scales": True}, {}, True), ({"all_scales": "1"}, {}, True),
        (None, {"JITMX_ALL_SCALES": "1"}, True), ({"all_scales": False}, {"JITMX_ALL_SCALES": "1"}, False),
    ],
)  # fmt: skip
def test_kernels_for_all_scales_are_taken_for_every_layer_where_they_are_asked_for(
    options: Any, environ: dict[str, str], wanted: bool
) -> None:
    asked = ask({**ALL, **(options or {})}, **environ)
    served = [decide(Layer(kind, kind), asked, H200) for kind in ("moe", "qkv", "o", "lm_head")]
    assert [decision.all_scales for decision in served] == [wanted] * 4 and all(one.format for one in served)


@pytest.mark.parametrize("activation", ["mxfp8", "mxfp4", "fp6", "fp8"])
def test_the_rounding_of_the_experts_inputs_is_said(activation: str) -> None:
    decision = decide(Layer("moe"), ask(VLLM_MXFP4_ACTIVATION=activation), H200)
    which = "inputs of many rows an expert" if activation == "fp8" else "inputs"
    assert decision == Decision("mxfp4", f"by default; {which} rounded to {activation} by VLLM_MXFP4_ACTIVATION")
    assert ask({"moe_activation": activation}, VLLM_MXFP4_ACTIVATION="bf16").moe_activation == activation
    assert "rounded" not in decide(Layer("qkv"), ask(ALL, VLLM_MXFP4_ACTIVATION=activation), H200).reason


_FORMATS = st.fixed_dictionaries({}, optional={kind: st.sampled_from(layers.FORMATS[kind]) for kind in layers.KINDS})
_FACTS = st.builds(
    Facts, target=st.sampled_from(["sm_90a", None]), lora=st.booleans(), lora_experts=st.booleans(), tied=st.booleans(),
    backend=st.sampled_from(["auto", "marlin"]), batch_invariant=st.booleans(), ubatches=st.booleans(),
)  # fmt: skip


@given(_FORMATS, _FACTS, st.sampled_from(layers.KINDS), st.booleans(), st.booleans())
def test_jitmx_takes_no_more_than_was_asked_for_and_always_says_why(
    formats: dict[str, str], facts: Facts, kind: str, draft: bool, tied: bool
) -> None:
    text = ",".join(f"{name}:{format}" for name, format in formats.items()) or "none"
    decision = decide(Layer(kind, "lm_head", draft=draft, tied=tied), ask({"mxfp4_layers": text}), facts)
    assert decision.format in (None, formats.get(kind))
    if decision.format is None:
        assert decision.reason
    else:
        assert facts.target is not None and not draft and not (facts.lora and kind != "moe")


def test_the_policy_and_the_entry_point_import_neither_vllm_nor_torch() -> None:
    code = "import sys, jitmx.vllm, jitmx.vllm.policy; print(sorted({'vllm', 'torch', 'cupy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("target", ["sm_90a", "sm_89", "sm_121a"])
def test_inputs_in_e4m3_are_served_on_every_target(target: str) -> None:
    asked = ask(JITMX_MOE_ACTIVATION="fp8", JITMX_LINEAR_ACTIVATION="fp8", JITMX_MXFP4_LAYERS="moe,qkv")
    for kind, name in (("moe", "moe_activation"), ("qkv", "linear_activation")):
        decision = decide(Layer(kind), asked, dataclasses.replace(H200, target=target))
        assert decision.format == "mxfp4" and f"rounded to fp8 by JITMX_{name.upper()}" in decision.reason
    assert (asked.x_format, asked.activation) == ("fp8", "fp8")
