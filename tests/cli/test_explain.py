"""`jitmx explain`: the kernel that a call takes, its knobs, and who decided."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from jitmx import arch, kernels
from jitmx.cli.explain import command
from jitmx.dispatch import choose

SHAPE = ("-m", "1", "-n", "5120", "-k", "2880")


def test_it_is_the_choice_that_a_call_makes(run, read) -> None:
    said = read("explain", "linear", "--arch", "sm_121", *SHAPE)
    target, problem = arch.parse("sm_121"), kernels.family("linear").problem
    chosen = choose.choose("linear", problem.on(target, m=1, n=5120, k=2880), target)
    alone = {"launched": chosen.problem.as_dict(), "times": 1, "unfused": [], "companions": [], "instead_of": {}}
    assert said == {**chosen.to_dict(), **alone}
    assert run("explain", "linear", "--arch", "sm_121", *SHAPE).stdout.splitlines() == chosen.lines()


@pytest.mark.parametrize(
    ("words", "instead", "lines"),
    [
        (("moe", "x_format=fp8", "--arch", "sm_121"), {"x_format": "fp8"}, ["x_format=fp8, mxfp8: no kernel of "]),
        (
            ("moe", "x_format=fp8", "scale_range=full", "--arch", "sm_90"), {"x_format": "fp8"},
            ["x_format=fp8, mxfp8: kernels of fp8 do not take scale_range=full, only normal"],
        ),
        (
            ("moe", "x_format=fp8", "scale_rule=even", "--arch", "sm_121"), {"x_format": "fp8", "scale_rule": "even"},
            ["x_format=fp8, mxfp8: no kernel of sm_121a takes fp8",
             "scale_rule=even, ceil: a scale of fp8 is the least that holds its values"],
        ),
        (("moe", "x_format=fp8", "scale_rule=ceil", "--arch", "sm_90"), {}, []),
        (
            ("linear", "activation=fp8", "scale_rule=even", "--arch", "sm_121"),
            {"activation": "fp8", "scale_rule": "even"},
            ["activation=fp8, mxfp8: no kernel of sm_121a takes fp8", "scale_rule=even, ceil: "],
        ),
        (
            ("linear", "activation=fp8", "dtype=fp16", "--arch", "sm_90"), {"activation": "fp8"},
            ["activation=fp8, mxfp8: linear.wgmma_fp8 does not take dtype='fp16', only 'bf16'"],
        ),
        (("linear", "activation=fp8", "swiglu=1", "--arch", "sm_90"), {}, []),
        (("linear", "activation=mxfp8", "scale_rule=even", "--arch", "sm_121"), {}, []),
    ],
)  # fmt: skip
def test_what_is_taken_in_place_of_what_was_asked_for_is_said_with_the_reason(words, instead, lines, run, read) -> None:
    assert read("explain", *words, "-m", "512")["instead_of"] == instead
    said = [line for line in run("explain", *words, "-m", "512").stdout.splitlines() if line.startswith("instead")]
    assert len(said) == len(lines)
    assert all(one.startswith(f"instead     of {line}") for one, line in zip(said, lines, strict=True))


def test_a_kernel_by_name_is_why_another_format_is_taken(read, run, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", "kernel=scaled")
    said = run("explain", "linear", "activation=fp8", "-m", "512", "--arch", "sm_90").stdout
    assert "instead     of activation=fp8, mxfp8: linear.scaled was asked for" in said


@pytest.mark.parametrize("target", ["sm_90", "sm_121"])
def test_rmsnorm_that_no_kernel_has_fused_for_so_many_rows_runs_apart(target, run, read) -> None:
    words = ("linear", "--arch", target, "-m", "65", "norm=1")
    said = read("explain", *words)
    assert said["problem"]["norm"] and not said["launched"]["norm"] and "norm" not in said["kernel"]
    assert [step["step"] for step in said["unfused"]] == ["norm"]
    assert "unfused     norm: RMSNorm of X before the product" in run("explain", *words).stdout
    assert "norm.rms" in [launch["kernel"] for launch in said["companions"]]


def test_experts_that_another_launch_chooses_from_logits_are_said_to_be_chosen_there(run, read) -> None:
    words = ("moe", "--arch", "sm_121", "-m", "2", "routing=bf16")
    said = read("explain", *words)
    assert [step["step"] for step in said["unfused"]] == ["routing"]
    assert [other["kernel"] for other in said["companions"]] == ["routing.topk"]
    assert "     routing.topk, by heuristic: " in run("explain", *words).stdout
    assert read("explain", "moe", "--arch", "sm_90", "-m", "1", "routing=bf16")["unfused"] == []


@pytest.mark.parametrize(
    ("words", "launched"),
    [
        (("batch=4", "queries=512"), ["wgmma", "append", "decode"]),
        (("batch=1", "queries=512"), ["wgmma", "append"]),
        (("batch=4", "queries=512", "append=0"), ["wgmma", "decode"]),
        (("batch=4",), ["decode"]),
    ],
)
def test_every_launch_of_a_mixed_batch_is_listed(words, launched, run, read) -> None:
    said = read("explain", "attention", "--arch", "sm_90", *words)
    kernels_of = [said["kernel"], *(other["kernel"] for other in said["companions"])]
    assert [name.split(".")[1] for name in kernels_of] == launched
    told = run("explain", "attention", "--arch", "sm_90", *words).stdout
    names = [line.split()[0] for line in told.partition("the same call also launches:")[2].splitlines() if line.strip()]
    assert [name.split(".")[1].rstrip(",") for name in names] == launched[1:]
    assert ("requests of few new tokens in the batch are left to" in told) == ("decode" in launched[1:])


def test_fields_are_read_as_their_types(read) -> None:
    words = ("n=5120", "k=2880", "m=4", "bias=1", "dtype=fp16")
    said = read("explain", "linear", "--arch", "sm_90", *words)
    assert {name: said["problem"][name] for name in ("m", "n", "k", "bias", "dtype")} == {
        "m": 4, "n": 5120, "k": 2880, "bias": True, "dtype": "fp16"
    }  # fmt: skip
    assert read("explain", "quantize", "--arch", "sm_90", "format=mxfp8")["knobs"]["format"] == "mxfp8"
    short = read("explain", "-m4", "linear", "-k", "2880", "--arch", "sm_90", "-n=5120", "dtype=fp16", "bias=1")
    assert short["problem"] == said["problem"]


def test_the_examples_of_the_help_work(run, monkeypatch) -> None:
    examples = [shlex.split(line) for line in (command.epilog or "").splitlines() if "jitmx explain " in line]
    assert len(examples) >= 5
    for words in examples:
        at = words.index("jitmx")
        with monkeypatch.context() as environment:
            for word in words[:at]:
                environment.setenv(*word.split("=", 1))
            told = run(*words[at + 1 :]).stdout
            assert any(word in told for word in ("decided", "predicted", "PREDICTED", "PARAMETER"))


def test_the_environment_overrides_and_is_named(read, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", "stages=1")
    said = read("explain", "linear", "--arch", "sm_121", *SHAPE)
    assert said["knobs"]["stages"] == 1
    assert said["decided_by"]["source"] == "environment"
    assert "JITMX_LINEAR_KNOBS=stages=1" in said["decided_by"]["detail"]


def test_a_field_that_is_zero_where_nothing_is_said_may_be_said_to_be_zero(run: Any) -> None:
    said = run("explain", "attention", "--arch", "sm_90", "window=0", "mask=0", "rotary=0", "context=256").stdout
    assert said == run("explain", "attention", "--arch", "sm_90", "context=256").stdout and "window=0" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lineer",), "is not a kernel family; families: "),
        (("linear", "rows=4"), "its fields: m, n, k"),
        (("linear", "bias=maybe"), "bias is 0 or 1"),
        (("linear", "n=0"), "n is a whole number from 1 to 2147483616"),
        (("linear", "-k", "0"), "'k=0': k is a whole number from 1 to 2147483616"),
        (("quantize", "-m", "4"), "'m=4' is no field=value of quantize"),
        (("linear", "dtype=fp64"), "fp64"),
        (("linear", "-k", "2881"), "k=2881 is not a multiple of 32"),
        (("linear", "m=1", "-m", "2"), "m is given twice, as '1' and as '2'; give it once"),
        (("linear", "bias=1", "bias=0"), "bias is given twice, as '1' and as '0'"),
        (("quantize", "direction=up"), "direction='up' is not one of quantize, dequantize"),
        (("linear", "--arch", "sm_90"), "one target at a time"),
        (("linear", "-m", "1,2"), "'m=1,2': without --cost m has one value; --cost takes several, a line each"),
        (("norm", "--cost", "-m", "4"), "'m=4' is no field of norm; its rows are given by --rows 4"),
        (("attention", "context=100", "queries=2000"), "context=100 is less than its queries=2000, and counts new"),
        (("attention", "queries=40", "mask=32"), "mask=32 bits are fewer than queries=40; use mask=64"),
        (("attention", "queries=65", "mask=32"), "fewer than queries=65; give queries=64 or fewer"),
        (("moe", "experts=2", "top=4", "routing=bf16"), "moe.top=4 of router logits is over experts=2; the nearest"),
        (("routing", "source=logits", "norm=1"), "routing.norm=True is of hidden states, and source='logits' gives"),
        (("routing", "source=ids", "normalized=1"), "routing.normalized=True is of hidden states, and source='ids'"),
        (("linear", "--cost", "--rows", "5"), "no field for rows; those of linear are m=5"),
        (("sampling", "--cost", "--rows", "5"), "no field for rows; those of sampling are rows=5"),
        (("attention", "--context", "8192"), "--model, or give the operator's field as context=8192"),
        (("moe", "--context", "8192"), "--context is of a step: name the model by --model, or leave --context out"),
    ],
)
def test_a_bad_question_is_a_usage_error_that_names_the_choices(run, arguments, said) -> None:
    assert said in run("explain", *arguments, "--arch", "sm_121", code=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (
                ("rope=interleaved", "rotary=7", *more),
                "rotary=7 is not a multiple of 8 up to head_dim=64; the nearest legal value is 8",
            )
            for more in (("--arch", "sm_121"), ("--arch", "sm_90"), ("--arch", "sm_90", "queries=2048"))
        ),
        (("cache=e4m3", "--arch", "sm_80"), "cache=e4m3 needs sm_89 or newer; sm_80 converts no E4M3; use cache=same"),
        (
            ("qk=qk_fp16", "--arch", "sm_80"),
            "qk=qk_fp16 sums q k in fp16, whose range ends at 65504; bf16 values go beyond it; use qk=qk_fp32, or "
            "dtype=fp16",
        ),
    ],
)
def test_what_every_kernel_refuses_is_said_once_and_nothing_that_was_not_asked_for(words, said, run) -> None:
    assert run("explain", "attention", *words, code=2).stderr == f"Error: {said}\n"


def test_experts_of_which_most_are_elsewhere_may_be_fewer_than_a_row_takes(read) -> None:
    assert read("explain", "moe", "--arch", "sm_121", "experts=2", "top=4")["problem"]["top"] == 4


def test_a_count_of_sms_is_also_one_of_multiprocessors(read) -> None:
    words = ("explain", "attention", "--arch", "sm_90", "batch=4", "context=8192")
    said = [read(*words, option, "24") for option in ("--sms", "--multiprocessors")]
    assert said[0] == said[1] != read(*words)


def test_variants_takes_a_family_as_other_verbs_do(run, read) -> None:
    words = ("--arch", "sm_121")
    assert read("variants", "quantize", *words) == read("variants", "--family", "quantize", *words)
    assert "'gemm' is not a kernel family" in run("variants", "gemm", *words, code=2).stderr
