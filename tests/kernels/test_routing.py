"""`routing`: what Python says of a launch is what the kernels need, and every case passes thread for thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import keep_contracts, some
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError
from jitmx.kernels.routing import cases as routing_cases
from jitmx.kernels.routing import launch
from jitmx.kernels.routing.problem import BIASES, FEW_TOKENS, SCORING, SOURCES, TILES, RoutingProblem, capacity
from jitmx.registry.spec import KernelSpec, Variant
from jitmx.sim.verify import Verdict
from strategies import ARCHES, examples, variants

FAMILY = kernels.family("routing")
PROBLEMS = st.builds(
    lambda experts, k, **fields: RoutingProblem(experts=experts, k=min(k, experts), **fields),
    m=st.integers(0, 20_000),
    experts=st.integers(1, 512),
    k=st.integers(1, 8),
    h=st.integers(1, 2048).map(lambda eights: 8 * eights),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.sampled_from(BIASES),
    norm=st.booleans(),
    scoring=st.sampled_from(SCORING),
    mapped=st.booleans(),
    tile=st.sampled_from(TILES),
)


ROUTE, MANY, TOPK, SORT = (FAMILY.spec(name) for name in ("route", "many", "topk", "sort"))


def route(target: str, **knobs: Any) -> Variant:
    return ROUTE.variant(arch.parse(target), **knobs)


def many(target: str, **knobs: Any) -> Variant:
    return MANY.variant(arch.parse(target), **knobs)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(200))
@given(problem=PROBLEMS, source=st.sampled_from(SOURCES), multiprocessors=st.integers(1, 256))
@example(problem=RoutingProblem(64, 512, 8, tile=8, norm=True, mapped=True), source="hidden", multiprocessors=132)
@example(problem=RoutingProblem(64, 512, 8, tile=8), source="logits", multiprocessors=132)
def test_the_heuristic_is_legal_and_its_launch_fits_the_target(
    target: Arch, problem: RoutingProblem, source: str, multiprocessors: int
) -> None:
    fields = problem.as_dict() | {"source": source}
    if source == "ids":
        fields["tile"] = fields["tile"] or 64
    elif fields["m"] > FEW_TOKENS:
        fields |= {"tile": 0, "mapped": False}
    asked = RoutingProblem(**fields)
    variant = choose("routing", asked, target, multiprocessors=multiprocessors).variant
    geometry = launch(variant, asked.m, asked.experts)
    assert geometry.shared_bytes <= target.shared_bytes
    assert geometry.blocks % geometry.cluster == 0


@given(data=st.data(), m=st.integers(1, 60), experts=st.integers(1, 40), tile=st.sampled_from([1, 3, 8, 64]))
def test_no_routing_needs_more_tiles_than_the_capacity_and_one_needs_as_many(
    data: st.DataObject, m: int, experts: int, tile: int
) -> None:
    k = data.draw(st.integers(1, min(8, experts)))
    ids = np.array([data.draw(st.permutations(range(experts)))[:k] for _ in range(m)], np.int32)
    found = routing_cases.lists(ids, experts, tile)
    assert found.tiles[0] <= capacity(m, k, experts, tile) <= m * k // tile + experts


def test_the_capacity_is_reached_where_experts_have_one_row_over_whole_tiles() -> None:
    ids = np.array([[0], [1], [2], [3], [0], [0], [0], [0]], np.int32)
    assert routing_cases.lists(ids, 4, 4).tiles[0] == capacity(8, 1, 4, 4) == 5


@given(data=st.data(), m=st.integers(1, 6), experts=st.integers(1, 64))
def test_the_reference_agrees_with_torch_on_ids_and_weights(data: st.DataObject, m: int, experts: int) -> None:
    k = data.draw(st.integers(1, min(8, experts)))
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((m, experts))
    values, ids = torch.from_numpy(logits).topk(k)
    for scoring, among in (("softmax_topk", values), ("softmax_all", torch.from_numpy(logits))):
        found, weights = routing_cases.choose(logits, k, scoring)
        assert (found == ids.numpy()).all()
        shares = torch.exp(values - torch.logsumexp(among, 1, keepdim=True))
        np.testing.assert_allclose(weights, shares.numpy(), rtol=1e-12)


def test_the_reference_takes_the_lower_of_equal_logits_and_nan_last() -> None:
    logits = np.array([[np.nan, 1.0, -np.inf, 1.0, 0.0, -0.0]])
    ids, weights = routing_cases.choose(logits, 6, "softmax_topk")
    assert ids.tolist() == [[1, 3, 4, 5, 2, 0]]
    assert weights[0, 4] == weights[0, 5] == 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RoutingProblem(experts=3, k=4), "k=4 is over experts=3"),
        (lambda: RoutingProblem(h=2884), "h=2884 is not a multiple of 8, .* the nearest legal value is 2888"),
        (lambda: RoutingProblem(experts=513), "experts=513 is above its limit; the nearest legal value is 512"),
        (lambda: route("sm_90a", parts=8), "parts=8 with experts=128 is a block of 64 warps, over 32; .* is 4"),
        (lambda: route("sm_90a", splits=32), "splits=32 is over the 16 blocks of a cluster; .* is 16"),
        (lambda: route("sm_90a", splits=1), "splits=1 is no cluster; use cluster=False"),
        (lambda: route("sm_90a", normalized=True), "normalized=True is what RMSNorm makes of x, .* use norm=True"),
        (lambda: route("sm_90a", mapped=True), "mapped=True is for the lists, and tile=0 makes none"),
        (lambda: route("sm_80", parts=2, pdl=False), "a cluster of 8 blocks needs sm_90 .* on sm_80 use cluster=False"),
        (lambda: route("sm_80", cluster=False), "pdl=True needs sm_90 or newer"),
        (lambda: route("sm_90a", depth=12, parts=2), "depth=12 holds 144 registers a thread, .* legal value is 7"),
        (lambda: route("sm_90a", parts=1, tokens=64, experts=512), "over the 1 MB that an mbarrier .* use tokens=32"),
        (lambda: many("sm_80", splits=2, pdl=False), "a cluster of 2 blocks needs sm_90 .* on sm_80 use splits=1"),
        (lambda: many("sm_90", tokens=32), "tokens=32 is not a multiple of 16 for each of warps_t=4; .* warps_t=2"),
        (lambda: many("sm_90", experts=512, tokens=256), "tokens=256 by 512 experts on 4 x 2 warps take 6.. registers"),
        (lambda: many("sm_90", stages=8), "the nearest legal value is stages="),
        (lambda: SORT.variant(arch.parse("sm_86"), cluster=2, pdl=False), "a cluster of 2 blocks .* use cluster=1"),
        (lambda: SORT.variant(arch.parse("sm_90"), tile=0), "tile=0 is not one of 8, 16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(make: Callable[[], object], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        make()


def test_hidden_states_in_fp32_are_refused_and_logits_in_fp32_are_not() -> None:
    target = arch.parse("sm_90")
    with pytest.raises(KnobError, match="takes hidden states in bf16 or fp16, not fp32"):
        choose("routing", RoutingProblem(dtype="fp32"), target)
    assert choose("routing", RoutingProblem(dtype="fp32", source="logits"), target).variant.spec is TOPK


def test_too_many_tokens_for_one_block_are_refused_with_both_numbers() -> None:
    problem = RoutingProblem(m=50_000, k=8, source="logits", tile=8)
    with pytest.raises(KnobError, match=r"needs \d+ B of shared memory; a block on sm_90a has at most 232448 B"):
        choose("routing", problem, arch.parse("sm_90"))


# The knobs that shape the code, each value with others in turn; between them all branches of the templates.
_ROUTE = (
    {"experts": 128, "k": 4, "bias": "bias_bf16", "tile": 64},
    {"experts": 60, "k": 4, "norm": True, "mapped": True, "tile": 16, "bias": "bias_fp32", "parts": 2, "depth": 1},
    {"experts": 256, "k": 8, "scoring": "softmax_all", "tile": 8, "parts": 1, "depth": 2},
    {"experts": 512, "k": 7, "dtype": "fp16", "bias": "bias_fp16", "parts": 1, "depth": 1, "tile": 32},
    {"experts": 32, "k": 2, "tokens": 16, "splits": 1, "depth": 2, "norm": True},
    {"experts": 300, "k": 3, "tokens": 32, "splits": 2, "parts": 1, "depth": 2, "dtype": "fp16", "norm": True},
    {"experts": 5, "k": 5, "tokens": 64, "splits": 4, "parts": 4, "depth": 1, "tile": 128, "mapped": True},
    {"experts": 72, "k": 3, "parts": 1, "norm": True, "bias": "bias_bf16", "tile": 8},
    {"experts": 48, "parts": 2, "norm": True, "normalized": True, "bias": "bias_bf16"},
    {"experts": 16, "splits": 1, "parts": 1, "norm": True, "normalized": True, "dtype": "fp16", "tokens": 16},
    {"experts": 33, "splits": 4, "parts": 8, "norm": True, "normalized": True, "tile": 16, "mapped": True},
)
TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")


def suited(target: Arch, knobs: dict[str, Any]) -> dict[str, Any]:
    cluster = "cluster" in target.features and knobs.get("splits") != 1
    return {"depth": 2, **knobs, "cluster": cluster, "pdl": "pdl" in target.features}


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", _ROUTE, ids=lambda knobs: f"{knobs['experts']}-experts")
def test_route_is_right_on_every_target(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(ROUTE.variant(arch.parse(target), **suited(arch.parse(target), knobs)))


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_partial_logits_meet_in_the_workspace_where_clusters_could_be_too(
    target: str, simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(route(target, cluster=False, splits=16, parts=2, tile=64))


@pytest.mark.parametrize("m", [1, 8, 64])
def test_all_of_a_slice_is_under_way_at_once_or_nearly_so_with_the_norm_as_well(m: int) -> None:
    for norm, rounds in ((False, 1), (True, 1 if m == 1 else 2)):
        problem = RoutingProblem(m, bias="bias_bf16", norm=norm, normalized=norm)
        knobs = choose("routing", problem, arch.parse("sm_90")).variant.knobs
        assert -(-2880 // 32 // (knobs.splits * knobs.parts * knobs.depth)) == rounds


@pytest.mark.parametrize("target", TARGETS)
def test_what_gpt_oss_takes_is_right_on_every_target(target: str, simulated: Callable[[Variant], Verdict]) -> None:
    for variant in default_variants("routing", arch.parse(target)):
        if variant.knobs.experts == 128:
            simulated(variant)


@pytest.mark.parametrize(
    ("target", "knobs"),
    [
        ("sm_80", {"experts": 60, "bias": "bias_fp32", "tokens": 32, "warps_t": 1, "warps_e": 2, "pdl": False}),
        ("sm_90a", {"experts": 300, "k": 7, "scoring": "softmax_all", "tokens": 64, "warps_e": 4, "splits": 2}),
        ("sm_90a", {"experts": 5, "k": 5, "bias": "bias_fp16", "tokens": 256, "splits": 8, "warps_e": 1, "stages": 2}),
        ("sm_120a", {"experts": 256, "k": 8, "tokens": 64, "warps_t": 2, "warps_e": 4, "stages": 2}),
    ],
    ids=lambda item: item if isinstance(item, str) else f"{item['experts']}-experts",
)
def test_many_tokens_are_routed_right(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(many(target, **knobs))


@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_for_many_tokens_keeps_its_contract(target: str) -> None:
    """No spills, ldmatrix and HMMA."""
    found = {}
    for experts in (32, 128, 512):
        problem = RoutingProblem(8192, experts=experts, bias="bias_bf16")
        found[experts] = choose("routing", problem, arch.parse(target)).variant
        assert found[experts].spec is (ROUTE if experts == 512 and target.startswith("sm_12") else MANY)
    keep_contracts(found.values())


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_121a"])
def test_calls_with_the_norm_run_on_kernels_that_keep_their_contracts(target: str, nightly: bool) -> None:
    fields: dict[str, Any] = {"k": 4, "bias": "bias_bf16", "norm": True, "normalized": True}
    problems = [
        RoutingProblem(m=m, experts=experts, **fields) for experts in (32, 128, 256) for m in (1, 64, 65, 512, 8192)
    ]
    chosen = (choose("routing", problem, arch.parse(target)).variant for problem in problems)
    keep_contracts(some(chosen, nightly, every=4))


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"m": 8192}, MANY),
        ({"m": 97}, MANY),
        ({"m": 96}, ROUTE),
        ({"m": 193, "experts": 32}, MANY),
        ({"m": 192, "experts": 32}, ROUTE),
        ({"m": 8192, "norm": True}, ROUTE),
        ({"m": 8192, "dtype": "fp16"}, ROUTE),
    ],
)
def test_many_tokens_take_tiles_in_shared_memory_where_they_can(fields: dict[str, Any], spec: KernelSpec) -> None:
    assert choose("routing", RoutingProblem(**fields), arch.parse("sm_90")).variant.spec is spec


@given(m=st.integers(193, 40_000), experts=st.integers(1, 512))
def test_tiles_of_many_tokens_are_few_bytes_for_each_multiprocessor(m: int, experts: int) -> None:
    """At gpt-oss' size and 8192 tokens: one wave of 32 clusters of four, 256 tokens each."""
    chosen = choose("routing", RoutingProblem(8192), arch.parse("sm_90")).variant
    assert (chosen.knobs.tokens, chosen.knobs.splits) == (256, 4)
    assert launch(chosen, 8192, 128).blocks == 128
    some = choose("routing", RoutingProblem(m, experts=experts, k=1), arch.parse("sm_90")).variant
    blocks = launch(some, m, experts).blocks
    assert blocks % some.knobs.splits == 0 and blocks * some.knobs.tokens // some.knobs.splits >= m


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "knobs",
    [
        {"experts": 128, "k": 4, "dtype": "bf16"},
        {"experts": 60, "k": 4, "dtype": "fp32", "tile": 8, "mapped": True, "scoring": "softmax_all", "warps": 4},
        {"experts": 300, "k": 7, "dtype": "fp16", "tile": 64, "warps": 8},
        {"experts": 7, "k": 1, "dtype": "fp32", "tile": 16, "warps": 1},
    ],
    ids=lambda knobs: f"{knobs['experts']}-experts",
)
def test_topk_is_right_on_every_target(
    target: str, knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(TOPK.variant(arch.parse(target), **knobs, pdl="pdl" in arch.parse(target).features))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mapped", [False, True])
def test_sort_is_right_on_every_target(target: str, mapped: bool, simulated: Callable[[Variant], Verdict]) -> None:
    item = arch.parse(target)
    blocks = 8 if "cluster" in item.features else 1
    pdl = "pdl" in item.features
    assert simulated(SORT.variant(item, cluster=blocks, mapped=mapped, warps=4, tile=8, pdl=pdl)).error == 0.0
    assert simulated(SORT.variant(item, experts=500, k=7, mapped=mapped, warps=8, pdl=pdl)).error == 0.0


@settings(max_examples=examples(12))
@given(variant=st.one_of(variants(ROUTE, changes=8), variants(MANY), variants(TOPK), variants(SORT)))
def test_legal_variants_name_themselves_and_have_cases(variant: Variant) -> None:
    assert variant.name.startswith("routing.")
    assert next(iter(FAMILY.cases(variant))).launch.blocks >= 1
