"""Kernels of attention that are known ahead of calls: whatever requests a call has, its kernels are among them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx import arch as arches
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.models import GPT_OSS_120B
from jitmx.ops.attention.checks import rounded_up
from jitmx.registry.spec import Variant
from jitmx.serving.attention import Attention, lacking, launches, problems
from jitmx.serving.model import of_model
from jitmx.serving.needed import Needed, variants
from strategies import examples

TARGETS = ("sm_90", "sm_121")


@functools.cache
def layers(
    target: str, ranks: int = 1, requests: int = 1024, context: int = 131072, tokens: int = 16384
) -> list[Needed]:
    """The attention of gpt-oss-120b: within a window, and without."""
    most = AttentionProblem(batch=requests, context=context)
    found = of_model(GPT_OSS_120B, arches.parse(target), {}, tokens=tokens, ranks=ranks, attention=most)
    assert all(isinstance(layer, Attention) for layer in found) and len(found) == 2
    return found


def names(found: tuple[Variant, ...]) -> set[str]:
    return {variant.name for variant in found}


@settings(max_examples=examples(150), deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    ranks=st.sampled_from([1, 2]),
    full=st.booleans(),
    batch=st.integers(1, 1024),
    context=st.integers(0, 17).map(lambda bits: 1 << bits) | st.integers(1, 131072),
    queries=st.integers(1, 64) | st.integers(6, 14).map(lambda bits: 1 << bits),
)
def test_the_kernels_of_any_call_are_known(
    target: str, ranks: int, full: bool, batch: int, context: int, queries: int
) -> None:
    if batch + queries - 1 > 16384:
        return
    layer, arch = layers(target, ranks)[full], arches.parse(target)
    assert isinstance(layer, Attention)
    call = replace(layer.problem, batch=batch, context=context, queries=queries)
    made = tuple(launches(call, arch, arch.multiprocessors))
    assert names(made) <= names(variants(layer))


@settings(max_examples=examples(30), deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    window=st.sampled_from([1, 4, 15, 16, 17, 60, 64, 1000, 1024]) | st.integers(1, 8192),
    most=st.sampled_from([1, 16, 1024, 131072]),
    batch=st.integers(1, 64),
    context=st.integers(1, 131072),
    queries=st.integers(1, 20) | st.integers(6, 12).map(lambda bits: 1 << bits),
)
def test_the_kernels_of_a_layer_are_known_whatever_its_window_and_the_longest_request(
    target: str, window: int, most: int, batch: int, context: int, queries: int
) -> None:
    arch = arches.parse(target)
    layer = layers(target, requests=64, context=most, tokens=4096)[0]
    assert isinstance(layer, Attention) and layer.problem.window
    layer = replace(layer, problem=replace(layer.problem, window=window))
    seen = min(rounded_up(min(context, most)), rounded_up(window + queries))  # as the operator has it
    call = replace(layer.problem, batch=batch, context=seen, queries=queries)
    assert names(tuple(launches(call, arch, arch.multiprocessors))) <= names(variants(layer))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("target", ["sm_90", *(pytest.param(other, marks=pytest.mark.nightly) for other in TARGETS)])
@pytest.mark.parametrize("most", [{"requests": 256, "context": 16384}, {"requests": 1024, "tokens": 2048}])
def test_requests_between_two_of_the_same_kernels_have_no_others(target: str, full: bool, most: dict[str, int]) -> None:
    layer, arch = layers(target, **most)[full], arches.parse(target)
    assert isinstance(layer, Attention)
    each = (launches(call, arch, arch.multiprocessors) for call in problems(layer.problem, layer.rows))
    assert names(variants(layer)) == {variant.name for made in each for variant in made}


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "less", [{"requests": 200}, {"context": 10000}, {"tokens": 3000}, {"requests": 8, "tokens": 64}]
)
def test_an_engine_of_fewer_asks_for_none_that_one_of_more_has_not(target: str, less: dict[str, int]) -> None:
    for few, many in zip(layers(target, **less), layers(target), strict=True):
        assert names(variants(few)) <= names(variants(many))


def test_long_prompts_of_several_requests_are_written_attended_to_and_leave_short_ones_to_decode() -> None:
    arch = arches.parse("sm_90")
    for batch, wanted in ((1, ["append", "wgmma"]), (3, ["append", "wgmma", "decode"])):
        call = AttentionProblem(batch=batch, queries=256)
        made = list(launches(call, arch, arch.multiprocessors))
        assert [variant.spec.name for variant in made] == wanted
    assert made[-1].knobs.as_dict()["append"] is False


def test_what_a_target_lacks_is_said() -> None:
    assert lacking(AttentionProblem(), arches.parse("sm_90")) == ""
    said = lacking(AttentionProblem(cache="e4m3"), arches.parse("sm_80"))
    assert said.startswith("no kernel serves it on sm_80: cache=e4m3 needs sm_89")
