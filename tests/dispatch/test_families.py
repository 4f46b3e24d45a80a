"""Choosing among all kernels of all families: every problem is served, and warm-up compiles what calls take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jitmx import arch, kernels, settings
from jitmx.arch import Arch
from jitmx.dispatch.call import call_variants, explain
from jitmx.dispatch.choice import Choice
from jitmx.dispatch.choose import choose, companions, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.moe import KERNELS, MoeProblem
from jitmx.kernels.quantize import QuantizeProblem
from strategies import ARCHES

SM_90, SM_121 = arch.parse("sm_90"), arch.parse("sm_121")


def decided(choice: Choice) -> str:
    """The source that decided, of which there must be exactly one."""
    (name,) = [source.name for source in choice.sources if source.decided]
    assert choice.decided_by.name == name
    return name


def test_explain_on_sm_121_says_that_nothing_was_measured() -> None:
    dense = explain("linear", SM_121, m=1, n=5120, k=2880).choice
    assert decided(dense) == "heuristic" and "not measured" in dense.decided_by.detail
    experts = explain("moe", SM_121, m=1).choice
    assert decided(experts) == "heuristic" and "not measured" in experts.decided_by.detail
    experts = explain("moe", SM_121, m=1, x_format="mxfp8").choice
    assert decided(experts) == "shipped table" and "heuristic, not measured" in experts.decided_by.detail


BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OP_BUCKETS = {"linear": BUCKETS, "moe": (*BUCKETS, 65536)}


@pytest.mark.parametrize("op", ["linear", "moe"])
@given(m=st.integers(1, 20000), target=st.sampled_from(ARCHES), hidden=st.integers(4, 128))
@hypothesis_settings(max_examples=60)
def test_the_heuristic_takes_for_any_rows_what_it_takes_for_the_next_larger_usual_count(
    op: str, m: int, target: Arch, hidden: int
) -> None:
    """So that a server compiles as many variants as there are usual counts, and not as there are batches. Above them
    all, what the largest takes."""
    buckets = OP_BUCKETS[op]
    shape = {"n": 1000, "k": 32 * hidden} if op == "linear" else {"hidden": 32 * hidden, "intermediate": 1024}
    family = kernels.family(op)
    problem = family.problem.on(target, m=m, **shape)
    usual = dataclasses.replace(problem, m=next((count for count in buckets if count >= m), buckets[-1]))
    one, other = choose(op, problem, target), choose(op, usual, target)
    assert decided(one) == decided(other) == "heuristic"
    kernel = one.variant.spec.name
    assume(kernel == other.variant.spec.name)  # which is chosen goes by the rows themselves
    assume(not family.kernel(kernel).few_answers)
    fixed = family.fixed(problem, kernel)
    assert {**other.variant.knobs.as_dict(), **fixed} == one.variant.knobs.as_dict()


@pytest.mark.parametrize("name", [name for name, one in KERNELS.items() if one.few_answers])
def test_a_heuristic_that_no_bucket_stands_for_has_few_answers(name: str) -> None:
    shapes, x_format = ((128, 4, 2880), (8, 2, 4096), (256, 8, 7168), (32, 4, 2880)), "fp8" if "fp8" in name else "bf16"
    for experts, top, hidden in shapes:
        problems = (MoeProblem(m, experts, top, hidden, product="up", x_format=x_format) for m in range(1, 20000, 37))
        assert len({str(KERNELS[name].heuristic(one, SM_90, 132)) for one in problems}) <= 7


@pytest.mark.parametrize("op", [name for name, family in kernels.families().items() if family.tuning is not None])
@pytest.mark.parametrize("target", [SM_90, SM_121], ids=str)
def test_what_tuning_tries_opens_with_one_of_each_kernel(op: str, target: Arch) -> None:
    family = kernels.family(op)
    for problem in family.typical(target):
        offered = [name for name, _ in family.offered(problem, target, target.multiprocessors)]
        count = len(set(offered))
        assert count and len(set(offered[:count])) == count


def test_what_a_bucket_takes_and_the_rows_asked_for_do_not_is_chosen_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(problem: LinearProblem, arch: Arch, count: int) -> dict[str, Any]:
        return {"stages": 2 if problem.m == 5 else 99}

    linear = kernels.family("linear")
    gemv, *others = sorted(linear.kernels, key=lambda kernel: kernel.spec.name != "gemv")
    family = dataclasses.replace(
        linear,
        kernels=(dataclasses.replace(gemv, heuristic=tuned), *others),
        heuristic=lambda *asked: ("gemv", tuned(*asked)),
    )
    monkeypatch.setattr(kernels, "families", lambda: {"linear": family})
    assert choose("linear", LinearProblem(5, 1000, 2880), SM_90).variant.knobs.stages == 2


def test_explain_on_sm_90_names_card_date_and_time() -> None:
    choice = explain("linear", SM_90, m=1, n=5120, k=2880).choice
    assert decided(choice) == "shipped table"
    assert choice.decided_by.detail.startswith("measured on NVIDIA H200, 20")
    assert ", code " in choice.decided_by.detail  # which it was, or that nobody noted it
    assert choice.decided_by.detail.endswith(" us")


def test_a_problem_explained_without_an_encoding_is_that_of_a_weight_packed_there() -> None:
    assert explain("linear", SM_121, n=5120, k=2880).choice.variant.knobs.encoding == "nibble"
    assert explain("linear", SM_90, n=5120, k=2880).choice.variant.knobs.encoding == "rotated"


@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_fields_that_a_question_leaves_out_are_those_of_the_first_typical_call(target: Arch) -> None:
    for name, family in kernels.families().items():
        first = family.typical(target)[0]
        assert explain(name, target).problem == first
        assert call_variants(name, target) == (choose(name, first, target).variant,)


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


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
def test_warm_up_compiles_what_the_calls_of_gpt_oss_take(target: Arch) -> None:
    warmed = default_variants("linear", target)
    assert len({variant.identity for variant in warmed}) == len(warmed)
    dense = [(n, k, bias) for n, k in ((5120, 2880), (2880, 4096)) for bias in (False, True)]
    for n, k, bias in (*dense, (201088, 2880, False)):
        for m in range(1, 9):
            problem = LinearProblem.on(target, m=m, n=n, k=k, bias=bias)
            assert choose("linear", problem, target).variant in warmed


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ARCHES, ids=str)
@pytest.mark.parametrize("count", [None, 48, 132])
def test_warm_up_compiles_what_every_typical_problem_takes(target: Arch, count: int | None) -> None:
    for name, family in kernels.families().items():
        warmed = default_variants(name, target, multiprocessors=count)
        first = [choose(name, problem, target, multiprocessors=count) for problem in family.typical(target)]
        taken = [choice.variant for one in first for choice in (one, *companions(one))]
        assert taken and all(variant in warmed for variant in taken)
        assert all(variant in taken for variant in warmed)


def test_warm_up_compiles_quantization_to_every_format_and_back() -> None:
    warmed = default_variants("quantize", SM_121)
    for format_ in ("mxfp4", "mxfp6e2m3", "mxfp6e3m2", "mxfp8"):
        for dtype in ("bf16", "fp16", "fp32"):
            for direction in ("quantize", "dequantize"):
                assert choose("quantize", QuantizeProblem(direction, format_, dtype), SM_121).variant in warmed


def test_a_second_choice_of_a_family_looks_at_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    # A start of an engine chooses for thousands of calls, and looking takes longer than choosing where disks are slow.
    choose("linear", LinearProblem(1, 5120, 2880), SM_121)

    def look(path: Any, **_: Any) -> None:
        raise AssertionError(f"{path} is looked at")

    with monkeypatch.context() as patch:
        patch.setattr("os.stat", look)
        choice = choose("linear", LinearProblem(4, 5120, 2880), SM_121)
    assert choice.variant.knobs.m == 4


def told(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Sets JITMX_LINEAR_TILE or JITMX_LINEAR_KNOBS."""
    for name, text in variables.items():
        monkeypatch.setenv(f"JITMX_LINEAR_{name}", text)
    settings.reload()


@pytest.mark.parametrize(
    ("text", "remedy", "then", "knobs"),
    [
        ("64x64", "over the 128 of blocks_per_sm=2; give blocks_per_sm=1 in", "64x64", "blocks_per_sm=1"),
        ("128x64", "; the nearest legal tile is 64x64, with blocks_per_sm=1 in", "64x64", "blocks_per_sm=1"),
        ("128x128", "; the nearest legal tile is 64x128, with blocks_per_sm=1 in", "64x128", "blocks_per_sm=1"),
        ("64x128x128s4", "nearest it has is 64x128x128s2; give blocks_per_sm=1 in", "64x128x128s2", "blocks_per_sm=1"),
        ("40x64", "linear.scaled has no tile 40x64; the nearest legal tile is 32x64", "32x64", ""),
    ],
)
def test_a_refused_tile_is_told_what_serves_and_that_does(
    text: str, remedy: str, then: str, knobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = LinearProblem(64, 5120, 2880, activation="mxfp8")
    told(monkeypatch, TILE=text)
    with pytest.raises(KnobError) as error:
        choose("linear", problem, SM_90)
    said = str(error.value).removesuffix(" JITMX_LINEAR_KNOBS")
    assert said.startswith(f"JITMX_LINEAR_TILE={text}: ") and said.endswith(remedy)
    told(monkeypatch, TILE=then)
    if knobs:
        told(monkeypatch, KNOBS=knobs)
    served = choose("linear", problem, SM_90).variant.knobs
    assert then.startswith(f"{served.tile_m}x{served.tile_n}")


def test_a_knob_of_the_environment_is_no_remedy_in_place_of_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, TILE="64x64")
    told(monkeypatch, KNOBS="blocks_per_sm=2")
    with pytest.raises(KnobError, match=r"of blocks_per_sm=2; the nearest legal tile is 32x64$"):
        choose("linear", LinearProblem(64, 5120, 2880, activation="mxfp8"), SM_90)


def test_a_named_kernel_that_finds_no_knobs_is_refused_with_the_variable_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = LinearProblem(512, 5120, 2880, encoding="nibble")
    told(monkeypatch, KNOBS="kernel=stream")
    with pytest.raises(KnobError, match=r"^JITMX_LINEAR_KNOBS=kernel=stream: linear\.stream keeps X in shared memory"):
        choose("linear", problem, SM_121)
    told(monkeypatch, KNOBS="kernel=wgmma")
    with pytest.raises(
        KnobError, match=r"^JITMX_LINEAR_KNOBS=kernel=wgmma: .*; on sm_121a these serve it: gemv, tile$"
    ):
        choose("linear", problem, SM_121)
