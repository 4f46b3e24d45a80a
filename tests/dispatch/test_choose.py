"""Choosing: who may decide, in which order, and that the answer says who did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jitmx import arch, kernels, settings
from jitmx.arch import Arch
from jitmx.dispatch.choose import Choice, call_variants, choose, default_variants, explain
from jitmx.errors import KnobError, TacticError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.quantize import QuantizeProblem
from strategies import ARCHES

SM_90, SM_121 = arch.parse("sm_90"), arch.parse("sm_121")
QKV = LinearProblem(1, 5120, 2880)
ODD = LinearProblem(1, 5121, 2880)  # a shape that no table has
SOURCES = ("argument", "environment", "user table", "shipped table", "heuristic")

# `stages` that each source gives in turn; the shipped table and the heuristic have their own ideas.
ROW = {"when": {"m": [1, 1], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"stages": 4, "chunk": 2}, "us": 1.25}


def environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("JITMX_LINEAR_KNOBS", text)
    settings.reload()


def decided(choice: Choice) -> str:
    """The source that decided, of which there must be exactly one and which the text must name."""
    assert tuple(source.name for source in choice.sources) == SOURCES
    (name,) = [source.name for source in choice.sources if source.decided]
    assert choice.decided_by.name == name
    assert choice.to_dict()["decided_by"]["source"] == name
    lines = choice.lines()
    assert f"decided by  {name}: {choice.decided_by.detail}" in lines
    assert sum(line.startswith("  -> ") for line in lines) == 1
    assert any(line.startswith(f"  -> {name}") for line in lines)
    return name


@pytest.mark.parametrize("present", range(2**4))
def test_of_the_sources_that_say_something_the_first_by_authority_decides(
    present: int, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    said = {name for bit, name in enumerate(SOURCES[:4]) if present >> bit & 1}
    # Chunks are small enough to leave room for the stages.
    knobs = {"stages": 2, "chunk": 2} if "argument" in said else None
    if "environment" in said:
        environment(monkeypatch, "stages=3,chunk=2")
    if "user table" in said:
        write("sm_90a", ROW, {**ROW, "when": {"n": 5121}})
    problem = QKV if "shipped table" in said else ODD
    choice = choose("linear", problem, SM_90, knobs=knobs)
    first = next(name for name in SOURCES if name in said | {"heuristic"})
    assert decided(choice) == first
    if first in SOURCES[:3]:
        assert choice.variant.knobs.stages == {"argument": 2, "environment": 3, "user table": 4}[first]
    else:
        source = next(source for source in choice.sources if source.name == first)
        assert source.knobs is not None
        assert {name: getattr(choice.variant.knobs, name) for name in source.knobs} == source.knobs


def test_each_source_says_what_it_would_have_given(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], tactics_folder: Path
) -> None:
    details = {source.name: source.detail for source in choose("linear", ODD, SM_90).sources}
    assert details["argument"] == "knobs of the call: none"
    assert details["environment"] == "JITMX_LINEAR_KNOBS: none"
    assert details["user table"] == f"none for sm_90a under {tactics_folder}"
    assert details["shipped table"].startswith("no row fits (measured on NVIDIA H200, ")
    assert details["heuristic"] == "computed from shape and target, not measured"
    assert next(s.detail for s in choose("linear", ODD, arch.parse("sm_80")).sources if s.name == "shipped table") == (
        "none for sm_80"
    )
    environment(monkeypatch, "stages=3, chunk=2")
    write("sm_120a", ROW)
    choice = choose("linear", QKV, arch.parse("sm_120"), knobs={"unroll": 1})
    found = {source.name: (source.detail, source.knobs) for source in choice.sources}
    assert found["argument"] == ("knobs of the call", {"unroll": 1})
    assert found["environment"] == ("JITMX_LINEAR_KNOBS=stages=3,chunk=2", {"stages": 3, "chunk": 2})
    assert found["user table"] == ("measured on a card, 2026-01-02, 1.25 us", ROW["knobs"])
    assert "heuristic, not measured" in found["shipped table"][0] and found["shipped table"][1]
    assert choice.to_dict()["sources"][1]["knobs"] == {"stages": 3, "chunk": 2}


def test_what_an_override_leaves_open_comes_from_the_source_below_it(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    write("sm_90a", {**ROW, "knobs": {"stages": 4, "chunk": 2, "warps": 4, "split_k": 4}})
    environment(monkeypatch, "stages=3,unroll=1")
    knobs = choose("linear", QKV, SM_90, knobs={"unroll": 2}).variant.knobs
    assert (knobs.unroll, knobs.stages, knobs.chunk, knobs.warps, knobs.split_k) == (2, 3, 2, 4, 4)


def test_the_first_row_that_fits_decides(write: Callable[..., Path]) -> None:
    rows = [{**ROW, "when": when, "knobs": {"stages": stages, "chunk": 1}} for when, stages in (
        ({"m": [2, 3]}, 1), ({"m": [1, 8], "n": 64}, 2), ({"m": [1, 8], "dtype": "fp16"}, 3), ({}, 4),
    )]  # fmt: skip
    write("sm_90a", *rows)

    def stages(**shape: Any) -> int:
        return int(choose("linear", LinearProblem(**{"n": 64, "k": 4096, **shape}), SM_90).variant.knobs.stages)

    assert [stages(m=m) for m in (1, 2, 3, 4)] == [2, 1, 1, 2]
    assert stages(n=65, dtype="fp16") == 3
    assert stages(n=65) == 4


@pytest.mark.parametrize(
    ("knobs", "name", "wanted", "fixed"),
    [
        ({"m": 8}, "m", 8, 1),
        ({"dtype": "fp16"}, "dtype", "'fp16'", "'bf16'"),
        ({"bias": True}, "bias", True, False),
        ({"encoding": "nibble"}, "encoding", "'nibble'", "'swizzle'"),
        ({"scale_range": "full"}, "scale_range", "'full'", "'normal'"),
    ],
)
def test_what_the_call_itself_fixes_cannot_be_overridden(
    knobs: dict[str, Any], name: str, wanted: Any, fixed: Any, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    said = f"{name}={wanted} cannot be overridden: the call itself fixes {name}={fixed}"
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, SM_90, knobs=knobs)
    assert str(error.value) == said
    environment(monkeypatch, ",".join(f"{key}={value}" for key, value in knobs.items()))
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, SM_90)
    assert str(error.value) == said
    monkeypatch.delenv("JITMX_LINEAR_KNOBS")
    settings.reload()
    path = write("sm_90a", {**ROW, "knobs": knobs})
    with pytest.raises(TacticError) as in_table:
        choose("linear", QKV, SM_90)
    assert str(in_table.value).startswith(f"{path}: the row for ") and str(in_table.value).endswith(said)


def test_an_override_may_repeat_what_the_call_fixes() -> None:
    assert decided(choose("linear", QKV, SM_90, knobs={"m": 1, "dtype": "bf16"})) == "argument"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages=99", "JITMX_LINEAR_KNOBS=stages=99: GemvKnobs.stages=99 is above its limit; the nearest legal "),
        ("tile=4", "JITMX_LINEAR_KNOBS=tile=4: GemvKnobs has no knob 'tile'; its knobs: m, dtype"),
        ("pdl=perhaps", "JITMX_LINEAR_KNOBS=pdl=perhaps: GemvKnobs.pdl='perhaps' is not 0 or 1"),
    ],
)
def test_an_illegal_override_is_refused_with_the_variable_and_the_rule(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, text)
    with pytest.raises(KnobError) as error:
        choose("linear", QKV, SM_90)
    assert str(error.value).startswith(said)


def test_an_override_that_does_not_serve_the_shape_is_refused() -> None:
    with pytest.raises(KnobError, match="split_k=8 is over the 2 tiles of k=96"):
        choose("linear", LinearProblem(1, 64, 96), SM_90, knobs={"warps": 8, "split_k": 8})
    with pytest.raises(KnobError, match=r"needs .* B of shared memory; a block on sm_121a has at most 101376 B"):
        choose("linear", LinearProblem(8, 5120, 65_536, encoding="nibble"), SM_121, knobs={"stage_x": True})


def test_an_unknown_knob_of_a_call_is_answered_with_the_knobs_there_are() -> None:
    with pytest.raises(KnobError, match=r"linear.gemv has no knob 'tile'; its knobs: m, dtype, "):
        choose("linear", QKV, SM_90, knobs={"tile": 1})


@pytest.mark.parametrize(
    ("op", "shape", "said"),
    [
        ("lineer", {}, "'lineer' is not a kernel family; families: "),
        ("linear", {"rows": 4}, "linear problems have no 'rows'; they have m, n, k, "),
        ("linear", {"dtype": "fp64"}, "LinearProblem.dtype='fp64' is not one of bf16, fp16"),
        ("quantize", {"format": "mxfp5"}, "QuantizeProblem.format='mxfp5' is not one of mxfp4, "),
        ("quantize", {"direction": "up"}, "QuantizeProblem.direction='up' is not one of quantize, dequantize"),
        ("quantize", {"direction": "dequantize", "scale_rule": "up"}, "QuantizeProblem.scale_rule='up' is not one of "),
        ("linear", {"k": 2881}, "LinearProblem.k=2881 is not a multiple of 32, "),
    ],
)
def test_a_question_about_what_there_is_not_is_answered_with_what_there_is(
    op: str, shape: dict[str, Any], said: str
) -> None:
    with pytest.raises(KnobError) as error:
        explain(op, SM_121, **shape)
    assert str(error.value).startswith(said)


def test_explain_on_sm_121_says_that_nothing_was_measured() -> None:
    for m in range(1, 9):
        in_table = explain("linear", SM_121, m=m, n=5120, k=2880)
        assert decided(in_table) == "shipped table"
        assert "heuristic, not measured" in in_table.decided_by.detail
    elsewhere = explain("linear", SM_121, m=1, n=777, k=2880)
    assert decided(elsewhere) == "heuristic"
    assert "not measured" in elsewhere.decided_by.detail


def test_explain_on_sm_90_names_card_date_and_time() -> None:
    choice = explain("linear", SM_90, m=1, n=5120, k=2880)
    assert decided(choice) == "shipped table"
    assert choice.decided_by.detail.startswith("measured on NVIDIA H200, 20")
    assert choice.decided_by.detail.endswith(" us")


def test_a_problem_explained_without_an_encoding_is_that_of_a_weight_packed_there() -> None:
    assert explain("linear", SM_121, n=5120, k=2880).variant.knobs.encoding == "nibble"
    assert explain("linear", SM_90, n=5120, k=2880).variant.knobs.encoding == "swizzle"


@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_fields_that_a_question_leaves_out_are_those_of_the_first_typical_call(target: Arch) -> None:
    for name, family in kernels.families().items():
        first = family.typical(target)[0]
        assert explain(name, target).problem == first
        assert call_variants(name, target) == (choose(name, first, target).variant,)


def test_the_first_typical_call_decides_even_where_the_fields_have_other_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = LinearProblem(4, 64, 96, "fp16", True, "nibble", "full")
    family = dataclasses.replace(kernels.family("linear"), typical=lambda _arch: (first, QKV))
    monkeypatch.setattr(kernels, "families", lambda: {"linear": family})
    assert explain("linear", SM_90).problem == first
    assert explain("linear", SM_90, m=2).problem == dataclasses.replace(first, m=2)


@pytest.mark.parametrize(
    ("m", "passes"), [(1, [1]), (8, [8]), (9, [8, 1]), (16, [8]), (19, [8, 4]), (23, [8, 8])]
)  # fmt: skip
def test_the_variants_of_a_call_are_those_of_its_full_passes_and_of_the_rows_left(m: int, passes: list[int]) -> None:
    assert [variant.knobs.m for variant in call_variants("linear", SM_90, m=m)] == passes


@given(
    target=st.sampled_from(ARCHES), m=st.integers(1, 8), n=st.integers(1, 300_000), k=st.integers(1, 2048),
    count=st.none() | st.integers(1, 200),
)  # fmt: skip
@hypothesis_settings(max_examples=200)
def test_every_shape_has_a_choice_that_keeps_what_the_call_fixes(
    target: Arch, m: int, n: int, k: int, count: int | None
) -> None:
    problem = LinearProblem.on(target, m=m, n=n, k=32 * k)
    choice = choose("linear", problem, target, multiprocessors=count)
    assert choice.multiprocessors == (count or target.multiprocessors)
    assert choice.variant.arch is target
    knobs, fixed = choice.variant.knobs.as_dict(), kernels.family("linear").fixed(problem, choice.variant.spec.name)
    assert {name: knobs[name] for name in fixed} == fixed
    assert decided(choice) in ("shipped table", "heuristic")


@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_warm_up_compiles_what_the_calls_of_gpt_oss_take(target: Arch) -> None:
    warmed = default_variants("linear", target)
    assert len({variant.identity for variant in warmed}) == len(warmed)
    dense = [(n, k, bias) for n, k in ((5120, 2880), (2880, 4096)) for bias in (False, True)]
    for n, k, bias in (*dense, (201088, 2880, False)):
        for m in range(1, 9):
            problem = LinearProblem.on(target, m=m, n=n, k=k, bias=bias)
            assert choose("linear", problem, target).variant in warmed


@pytest.mark.parametrize("target", ARCHES, ids=str)
@pytest.mark.parametrize("count", [None, 48, 132])
def test_warm_up_compiles_what_every_typical_problem_takes(target: Arch, count: int | None) -> None:
    for name, family in kernels.families().items():
        warmed = default_variants(name, target, multiprocessors=count)
        taken = [choose(name, problem, target, multiprocessors=count).variant for problem in family.typical(target)]
        assert taken and all(variant in warmed for variant in taken)
        assert all(variant in taken for variant in warmed)


def test_warm_up_compiles_quantization_to_every_format_and_back() -> None:
    warmed = default_variants("quantize", SM_121)
    for format_ in ("mxfp4", "mxfp6e2m3", "mxfp6e3m2", "mxfp8"):
        for dtype in ("bf16", "fp16", "fp32"):
            for direction in ("quantize", "dequantize"):
                assert choose("quantize", QuantizeProblem(direction, format_, dtype), SM_121).variant in warmed
