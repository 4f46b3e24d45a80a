"""`attention.prefill`: right on every target, legal wherever the heuristic chooses it, and not asked for few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch
from jitmx.arch import Arch
from jitmx.dispatch.call import call
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.attention import append, decode, prefill, wgmma
from jitmx.kernels.attention.cases import case
from jitmx.kernels.attention.drawn import Asked
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.kernels.attention.reference import attend, visible
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict
from strategies import ARCHES, examples

TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
# The knobs that shape the code, each value with others in turn; between them all branches of the template.
KNOBS: tuple[dict[str, Any], ...] = (
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "rows": 128, "tiles": 2},
    {"sinks": "sinks_bf16", "rope": "neox", "rotary": 64, "windowed": True, "rows": 128, "tiles": 1, "keys": 80},
    {"head_dim": 128, "group": 1, "rows": 64, "keys": 32, "windowed": True, "page_size": 32, "stages": 3},
    {"head_dim": 128, "group": 5, "dtype": "fp16", "qk": "qk_fp16", "soft_cap": True, "tiles": 2, "keys": 16},
    {"head_dim": 96, "group": 16, "cache": "e4m3", "page_size": 48, "keys": 48, "stages": 4, "sinks": "sinks_fp32"},
    {"head_dim": 256, "group": 3, "keys": 32, "rows": 32, "rope": "interleaved", "rotary": 128, "table": "table_fp32"},
    {"head_dim": 256, "group": 2, "cache": "e4m3", "keys": 16, "rows": 64, "windowed": True, "rope": "neox",
     "rotary": 256},
    {"dtype": "fp16", "group": 7, "keys": 128, "rows": 32, "windowed": True, "soft_cap": True, "sinks": "sinks_fp16"},
    {"head_dim": 96, "dtype": "fp16", "group": 4, "rope": "interleaved", "rotary": 32, "table": "table_fp16",
     "windowed": True, "keys": 96, "rows": 16},
    {"cache": "e4m3", "dtype": "fp16", "group": 12, "rows": 128, "keys": 64, "page_size": 16, "qk": "qk_fp16"},
)  # fmt: skip
PROBLEMS = st.builds(
    AttentionProblem,
    batch=st.integers(1, 300),
    queries=st.integers(1, 20_000),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    group=st.integers(1, 16),
    window=st.sampled_from([0, 1, 127, 128, 512, 4096]),
    soft_cap=st.booleans(),
    append=st.just(False),
)


def variant(target: str, **knobs: Any) -> Variant:
    return prefill.PREFILL.variant(arch.parse(target), **knobs)


def suited(target: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs as a target takes them: sm_80 converts no E4M3, and has no dependent launch."""
    item = arch.parse(target)
    cache = knobs.get("cache", "same") if "cvt_e4m3" in item.features else "same"
    return {**knobs, "cache": cache, "pdl": "pdl" in item.features}


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())))
def test_it_is_right_on_every_target(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    assert not simulated(variant(target, **suited(target, knobs))).untouched


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_heuristic_chooses_keeps_its_contract(target: str) -> None:
    """No spills, HMMA, copies of 16 bytes and ldmatrix."""
    item = arch.parse(target)
    gpt_oss: dict[str, Any] = {"queries": 4096, "append": False, "sinks": "sinks_bf16", "rope": "neox"}
    problems = [AttentionProblem(window=window, **gpt_oss) for window in (0, 128)]
    problems += [AttentionProblem(queries=4096, append=False, head_dim=wide, group=4) for wide in (96, 128, 256)]
    if "cvt_e4m3" in item.features:
        problems.append(AttentionProblem(cache="e4m3", **gpt_oss))
    chosen = [choose("attention", problem, item).variant for problem in problems]
    assert {one.spec for one in chosen} == {prefill.PREFILL} | ({wgmma.WGMMA} if item.major == 9 else set())
    keep_contracts(chosen)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(40))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 200))
def test_the_heuristic_and_candidates_are_legal_and_decode_has_what_it_can_take(
    target: Arch, problem: AttentionProblem, multiprocessors: int
) -> None:
    chosen = choose("attention", problem, target, multiprocessors=multiprocessors).variant
    few = problem.queries * problem.group <= 16
    assert chosen.spec is decode.DECODE or not few
    tried = prefill.candidates(problem, target, multiprocessors)
    assert 1 <= len(tried) <= 60
    for knobs in tried:
        one = prefill.PREFILL.variant(target, **knobs, **prefill.fixed(problem))
        assert prefill.launch(one.knobs, problem, multiprocessors).blocks * one.knobs.rows >= (
            problem.batch * problem.kv_heads * problem.queries * problem.group
        )


def test_the_last_tiles_come_first_and_every_row_is_some_blocks() -> None:
    """As row_tile.cuh deals them: of each request all tiles once, its last in its first block."""
    knobs = variant("sm_90a", rows=64).knobs
    problem = AttentionProblem(batch=2, kv_heads=3, queries=40, group=8)
    blocks = prefill.launch(knobs, problem, 132).blocks
    assert blocks == 2 * 3 * 5
    for queries in (1, 8, 9, 40):
        tiles = -(-queries * 8 // 64)
        firsts = [tiles - 1 - block // 6 for block in range(blocks) if block % 6 == 0]
        assert [first for first in firsts if first >= 0] == list(range(tiles))[::-1]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"qk": "qk_fp16"}, "qk=qk_fp16 sums q k in fp16, .* use qk=qk_fp32, or dtype=fp16"),
        ({"rows": 16, "tiles": 2}, "rows=16 are fewer than those of a warp of tiles=2; use tiles=1"),
        ({"head_dim": 256, "tiles": 2}, "head_dim=256 and keys=64 take 442 registers a thread, over 255; lower keys"),
        ({"head_dim": 256, "keys": 64, "stages": 4}, "needs 294912 B of shared memory; .* value is stages=3"),
        ({"page_size": 8}, "page_size=8 is below its limit; the nearest legal value is 16"),
        ({"group": 17}, "group=17 is above its limit; the nearest legal value is 16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        variant("sm_90a", **knobs)


def test_tokens_with_masks_of_their_own_are_refused() -> None:
    with pytest.raises(KnobError, match=r"mask=64: attention\.prefill is causal; use attention\.decode"):
        prefill.fixed(AttentionProblem(mask=64, queries=200))
    with pytest.raises(KnobError, match="the kernel makes step=attend, not step=append"):
        prefill.fixed(AttentionProblem(step="append"))


def test_what_prefill_leaves_to_another_launch_is_one_that_is_served_and_warmed_up() -> None:
    target, problem = arch.parse("sm_90"), AttentionProblem(queries=2048)
    first, other = call("attention", problem, target).launches
    assert (first.choice.variant.spec, other.choice.variant.spec) == (wgmma.WGMMA, append.APPEND)
    alone = call("attention", replace(problem, append=False), target)
    assert [one.choice.variant.spec for one in alone.launches] == [wgmma.WGMMA]
    warmed = {one.spec for one in default_variants("attention", target)}
    assert warmed == {decode.DECODE, wgmma.WGMMA, append.APPEND}


def test_cases_leave_requests_of_fewer_tokens_and_read_no_page_below_a_window() -> None:
    knobs = variant("sm_90a", windowed=True).knobs
    asked = Asked("few and many", ((300, 1), (300, 4)), 1, window=20, least_queries=2)
    one = case(knobs, asked, 0, lambda problem: prefill.launch(knobs, problem, 1))
    values: dict[str, Any] = dict(one.values)
    assert (values["out"].data[0] == 3.0).all() and (values["out"].data[1:] == 0.0).all()
    assert values["block_table"].data[1, 0] > 1 << 29 and values["least_queries"] == 2


@given(length=st.integers(1, 12), window=st.integers(0, 5), seed=st.integers(0, 9))
def test_the_reference_is_that_of_a_key_more_whose_logit_is_the_sink(length: int, window: int, seed: int) -> None:
    """Another formula: the sink as a key of its own, with a value of zero."""
    generator = np.random.default_rng(seed)
    q, k, v = (generator.standard_normal((length, 1, 4)) for _ in "qkv")
    seen = visible(length, length, window)
    logits = np.where(seen, np.einsum("qhd,khd->qk", q, k) * 0.5, -np.inf)
    logits = np.concatenate([logits, np.full((length, 1), 0.7)], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted = (weights / weights.sum(axis=1, keepdims=True))[:, :-1] @ v[:, 0]
    found = attend(q, k, v, 0.5, seen, np.array([0.7])).out
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-12, atol=1e-14)
