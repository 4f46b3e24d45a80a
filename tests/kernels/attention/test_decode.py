"""`attention.decode`: its cases pass thread for thread and reach its code, and knobs that cannot be are refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keep_contracts
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose, default_variants
from jitmx.errors import KnobError, SimulationError
from jitmx.kernels.attention.decode import DECODE, most_queries, rows_for
from jitmx.kernels.attention.problem import CACHES, DTYPES, HEAD_DIMS, ROPES, SINKS, AttentionProblem
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples

FAMILY = kernels.family("attention")
TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
SMALL = {"warps": 2, "keys": 16, "stages": 2, "group": 4}
CLUSTER, GRID = {"reduction": "cluster", "parts": 2}, {"reduction": "global"}


def decode(target: str, **knobs: Any) -> Variant:
    chip = arch.parse(target)
    if knobs.get("rope", "no_rope") != "no_rope":
        knobs = {"rotary": knobs.get("head_dim", 64), **knobs}
    return DECODE.variant(chip, **{**SMALL, "pdl": "pdl" in chip.features, **knobs})


# Knobs that shape the code, each value with others in turn; between them all branches of the template.
EVERYWHERE: dict[str, dict[str, Any]] = {
    "as gpt-oss": {"group": 8, "sinks": "sinks_bf16", "rope": "neox"},
    "as gpt-oss with a window": {"group": 8, "sinks": "sinks_bf16", "rope": "neox", "windowed": True, "keys": 32},
    "shared by the grid": {**GRID, "sinks": "sinks_fp32", "windowed": True, "blocks_per_sm": 2},
    "fp16, capped, sums in fp16": {"dtype": "fp16", "qk": "qk_fp16", "soft_cap": True, "sinks": "sinks_fp16"},
    "the cache has all": {"append": False, "windowed": True, "rope": "interleaved", "table": "table_fp32"},
    "a head of 128": {
        "head_dim": 128,
        "group": 5,
        "rope": "neox",
        "rotary": 32,
        "page_size": 32,
        "table": "table_fp16",
    },
    "query heads of a KV head in two blocks": {"group": 8, "rows": 32, "group_split": 2, "rope": "neox", "mask": 32},
}
SOMEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "a head of 96": ("sm_121a", {"head_dim": 96, "group": 1, "rope": "interleaved", "rotary": 24, "page_size": 48}),
    "a head of 96, E4M3": ("sm_90a", {"head_dim": 96, "cache": "e4m3", "group": 1, "rows": 32, "warps": 2, **GRID}),
    "a head of 256": ("sm_90a", {"head_dim": 256, "group": 16, "rope": "neox", "rotary": 128, "warps": 1}),
    "a head of 256, E4M3": (
        "sm_120a",
        {"head_dim": 256, "cache": "e4m3", "group": 4, "warps": 1, "soft_cap": True, "windowed": True},
    ),
    "query heads in four blocks": (
        "sm_90a",
        {"rows": 128, "group": 8, "group_split": 4, "cache": "e4m3", "rope": "interleaved", **CLUSTER},
    ),
    "two rows of 16": ("sm_80", {"rows": 32, "group": 5, "windowed": True, "keys": 32, **GRID}),
    "32 rows of a head of 128": ("sm_121a", {"rows": 32, "group": 8, "head_dim": 128, "stages": 3}),
    "128 rows in a cluster, E4M3": (
        "sm_121a", {"rows": 128, "group": 16, "warps": 8, "cache": "e4m3", "keys": 32, **CLUSTER}
    ),
    "32 rows of a head of 256": ("sm_90a", {"rows": 32, "group": 8, "head_dim": 256, "rope": "neox", **GRID}),
    "64 rows": ("sm_90a", {"rows": 64, "group": 16, "warps": 4, "sinks": "sinks_fp16"}),
    "a tree": ("sm_121a", {"mask": 32, "group": 1, "rope": "neox", "windowed": True}),
    "a tree in a grid, positions": ("sm_90a", {"mask": 64, "group": 1, "rows": 32, **GRID}),
    "a tree of 64": ("sm_90a", {"mask": 64, "group": 1, "rows": 64, "warps": 8}),
    "E4M3 of bf16": (
        "sm_121a", {"cache": "e4m3", "sinks": "sinks_bf16", "rope": "neox", "group": 1, "rows": 32, "warps": 2}
    ),
    "E4M3 of fp16": (
        "sm_90a",
        {"cache": "e4m3", "dtype": "fp16", "qk": "qk_fp16", "mask": 32, "group": 1, "rows": 32, "warps": 2, **CLUSTER},
    ),
    "E4M3, all in the cache": ("sm_121a", {"cache": "e4m3", "append": False, **GRID}),
    "a cluster of two": ("sm_90a", {**CLUSTER, "windowed": True, "sinks": "sinks_bf16"}),
    "a cluster of four": ("sm_121a", {"reduction": "cluster", "parts": 4, "rope": "interleaved", "group": 5}),
    "a cluster of eight, all in the cache": (
        "sm_90a", {"reduction": "cluster", "parts": 8, "append": False, "warps": 1, "group": 16}
    ),
    "a cluster without dependent launches": ("sm_90a", {**CLUSTER, "pdl": False, "group": 1}),
    "a grid without dependent launches": ("sm_121a", {**GRID, "pdl": False, "group": 16}),
    "one stage": ("sm_90a", {"stages": 1, "keys": 64, "rope": "neox", "mask": 32, "sinks": "sinks_bf16", **CLUSTER}),
    "one stage, E4M3": ("sm_90a", {"stages": 1, "keys": 64, "cache": "e4m3", "rope": "neox", "windowed": True}),
    "a cluster of eight, rings of two": (
        "sm_90a",
        {"rows": 32, "group": 8, "group_split": 2, "warps": 8, "mask": 32, "rope": "neox", "sinks": "sinks_bf16",
         "reduction": "cluster", "parts": 8},
    ),
    "two tiles a warp, a tree": (
        "sm_90a",
        {"rows": 32, "group": 8, "row_tiles": 2, "keys": 32, "stages": 1, "mask": 32, "rope": "neox",
         "sinks": "sinks_bf16", "windowed": True, **CLUSTER},
    ),
    "two tiles a warp, teams of two, E4M3": (
        "sm_121a", {"rows": 64, "group": 8, "row_tiles": 2, "stages": 2, "cache": "e4m3", "rope": "interleaved"}
    ),
    "two tiles a warp, sums in fp16": (
        "sm_80",
        {"rows": 32, "group": 5, "row_tiles": 2, "dtype": "fp16", "qk": "qk_fp16", "soft_cap": True, "append": False},
    ),
    "first keys beside q": (
        "sm_90a",
        {"ahead": True, "group": 8, "keys": 32, "rope": "neox", "sinks": "sinks_bf16", "windowed": True,
         **CLUSTER},
    ),
    "first keys beside q, a team of two, a tree": (
        "sm_121a", {"ahead": True, "rows": 32, "group": 8, "mask": 32, "rope": "neox", "stages": 3}
    ),
    "first keys beside q, E4M3, one stage": (
        "sm_90a", {"ahead": True, "cache": "e4m3", "stages": 1, "keys": 64, "rope": "neox", "group": 8}
    ),
    "first keys beside q, E4M3, all in the cache": (
        "sm_121a", {"ahead": True, "cache": "e4m3", "append": False, "soft_cap": True}
    ),
    "one warp, many stages": ("sm_90a", {"warps": 1, "stages": 8, "keys": 64, "rope": "neox"}),
    "three warps": ("sm_121a", {"warps": 3, "stages": 3, **GRID}),
    "eight warps": ("sm_90a", {"warps": 8, "windowed": True, "append": False}),
    "large pages": ("sm_90a", {"page_size": 128, "windowed": True, **GRID}),
}  # fmt: skip


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_variant_passes_its_cases_on_every_target(
    name: str, target: str, simulated: Callable[[Variant], Verdict]
) -> None:
    verdict = simulated(decode(target, **EVERYWHERE[name]))
    assert verdict.error <= (1e-2 if "sums in fp16" in name else 4e-3)


@pytest.mark.parametrize("name", SOMEWHERE)
def test_a_variant_passes_its_cases_and_they_reach_its_code(name: str, simulated: Callable[[Variant], Verdict]) -> None:
    target, knobs = SOMEWHERE[name]
    assert simulated(decode(target, **knobs)).error <= 1e-2


@pytest.mark.parametrize("name", ["as gpt-oss with a window", "a tree", "a cluster of two"])
def test_cases_stand_on_both_sides_of_every_edge(name: str) -> None:
    target, knobs = SOMEWHERE.get(name, ("sm_90a", EVERYWHERE.get(name, {})))
    variant = decode(target, **knobs)
    sides: dict[str, bool] = {}
    for case in FAMILY.cases(variant):
        for side, there in case.sides.items():
            sides[side] = sides.get(side, False) or there
    assert sides and all(sides.values()), [side for side, there in sides.items() if not there]


PROBLEMS = st.builds(
    AttentionProblem,
    batch=st.integers(1, 512),
    context=st.integers(1, 1 << 20),
    queries=st.integers(1, 16),
    kv_heads=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    cache=st.sampled_from(CACHES),
    head_dim=st.sampled_from(HEAD_DIMS),
    group=st.integers(1, 16),
    page_size=st.sampled_from([16, 32, 48, 256]),
    sinks=st.sampled_from(SINKS),
    soft_cap=st.booleans(),
    window=st.sampled_from([0, 1, 128, 512, 4096]),
    rope=st.sampled_from(ROPES),
    append=st.booleans(),
)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(100))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 192))
def test_the_heuristic_is_legal_and_its_launch_fits_the_target(
    target: Arch, problem: AttentionProblem, multiprocessors: int
) -> None:
    if "decode" not in FAMILY.serving(problem, target) or (
        problem.cache == "e4m3" and "cvt_e4m3" not in target.features
    ):
        return
    try:
        chosen = choose("attention", problem, target, multiprocessors=multiprocessors, knobs={"kernel": "decode"})
    except KnobError as error:
        assert "of shared memory" in str(error) and rows_for(problem) * problem.head_dim >= 64 * 256
        return
    variant = chosen.variant
    geometry = FAMILY.launch(variant, problem, multiprocessors)
    assert geometry.shared_bytes <= target.shared_bytes
    assert geometry.blocks % geometry.cluster == 0 and geometry.blocks >= problem.batch * problem.kv_heads
    assert most_queries(variant.knobs) >= problem.queries


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"window": 128}, (3, 2, 6)),
        ({"window": 128, "cache": "e4m3"}, (2, 4, 6)),
        ({"window": 128, "head_dim": 128}, (4, 2, 4)),
        ({"window": 512}, (4, 2, 4)),
        ({"window": 0}, (4, 2, 4)),
        ({"window": 128, "batch": 1}, (8, 1, 1)),
    ],
)
def test_blocks_are_small_where_many_requests_have_a_short_window_that_binds(
    fields: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    problem = AttentionProblem(**{"batch": 64, "context": 300, "queries": 1, **fields})
    knobs = choose("attention", problem, arch.parse("sm_90a")).variant.knobs
    assert (knobs.warps, knobs.stages, knobs.blocks_per_sm) == shape


@pytest.mark.parametrize("target", ["sm_80", "sm_121a"])
@pytest.mark.parametrize("batch", [1, 4])
def test_blocks_share_the_rows_of_a_tree_that_none_holds_alone(batch: int, target: str) -> None:
    problem = AttentionProblem.on(arch.parse(target), batch=batch, queries=16, mask=32, head_dim=256, group=8)
    knobs = choose("attention", problem, arch.parse(target)).variant.knobs
    assert knobs.group_split > 1 and most_queries(knobs) == 16


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_the_most_rows_of_the_widest_heads_fit_a_block(multiprocessors: int) -> None:
    problem = AttentionProblem(context=16, queries=16, kv_heads=1, group=8, head_dim=256)
    assert rows_for(problem) * problem.head_dim == 128 * 256
    choose("attention", problem, arch.parse("sm_90a"), multiprocessors=multiprocessors, knobs={"kernel": "decode"})


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_what_warm_up_compiles_keeps_its_contracts(target: str) -> None:
    found = [one for one in default_variants("attention", arch.parse(target)) if one.spec is DECODE]
    assert found
    keep_contracts(found)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: decode("sm_90a", qk="qk_fp16"), "qk=qk_fp16 sums q k in fp16, .*use qk=qk_fp32, or dtype=fp16"),
        (lambda: decode("sm_90a", page_size=40), "page_size=40 is not a multiple of 16; the nearest legal value is 48"),
        (lambda: decode("sm_90a", page_size=8), "page_size=8 is below its limit; the nearest legal value is 16"),
        (lambda: decode("sm_90a", rotary=32), "rope=no_rope with rotary=32; use rotary=0 with no_rope"),
        (lambda: decode("sm_90a", rope="neox", rotary=0), "rope=neox with rotary=0; use .*rotary > 0"),
        (lambda: decode("sm_90a", rope="neox", rotary=24), "rotary=24 is not a multiple of 16 up to .*value is 16"),
        (lambda: decode("sm_90a", rope="interleaved", rotary=20), "rotary=20 is not a multiple of 8 .*value is 16"),
        (lambda: decode("sm_90a", rope="neox", rotary=128), "rotary=128 is not .*up to head_dim=64; .*value is 64"),
        (lambda: decode("sm_90a", mask=32, append=False), "mask is for new tokens, and append=False has none; use app"),
        (lambda: decode("sm_80", cache="e4m3"), "cache=e4m3 needs sm_89 or newer; sm_80 converts no E4M3"),
        (lambda: decode("sm_80", pdl=True), "pdl=True needs sm_90 or newer"),
        (lambda: decode("sm_80", **CLUSTER), "reduction=cluster needs clusters; sm_80 has none; use reduction=global"),
        (lambda: decode("sm_90a", reduction="cluster"), "parts=1 with reduction=cluster; use parts > 1 with cluster"),
        (lambda: decode("sm_90a", parts=4), "parts=4 with reduction=none; use .*parts=1 else"),
        (lambda: decode("sm_90a", rows=64), "warps=2 are not whole teams: 64 rows take 4 warps .*multiple of 4"),
        (lambda: decode("sm_90a", group_split=2), "group_split=2 of group=4 and rows=16 leaves no .*lower group_split"),
        (lambda: decode("sm_90a", row_tiles=2), "rows=16 leaves no whole 32 rows.*lower group_split or row_tiles"),
        (lambda: decode("sm_90a", rows=32, row_tiles=2, head_dim=128), "row_tiles=2 of head_dim=128.*use row_tiles=1"),
        (lambda: decode("sm_90a", rows=128, group_split=8), "group_split=8 of group=4 and rows=128 leaves no whole"),
        (lambda: decode("sm_90a", keys=64, cache="e4m3", head_dim=256), "registers a thread, over 255; lower keys"),
        (lambda: decode("sm_90a", rows=32, stages=1), "stages=1 of a team of 2 warps: it fills .*use stages=2"),
        (lambda: decode("sm_90a", group=17), "group=17 is above its limit; the nearest legal value is 16"),
        (lambda: decode("sm_90a", head_dim=80), "head_dim=80 is not one of 64, 96, 128, 256; the nearest is"),
        (lambda: decode("sm_121a", warps=16, stages=8, keys=64), "needs .* B of shared memory; a block on sm_121a has"),
        (lambda: rows_for(AttentionProblem(queries=17, group=8)), "takes 128 rows, and 17 new .* are 136"),
        (lambda: rows_for(AttentionProblem(queries=16, group=16, mask=32)), "are 256; give 8 new tokens of a request"),
        (lambda: rows_for(AttentionProblem(queries=33, group=1, mask=32)), "mask=32 bits are fewer .*mask=64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_rule_and_the_remedy(make: Callable[[], object], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        make()


@pytest.mark.parametrize(
    ("queries", "group", "rows"), [(1, 8, 16), (2, 8, 16), (3, 8, 32), (8, 8, 64), (1, 16, 16), (8, 16, 128)]
)
def test_rows_are_the_fewest_that_hold_all_new_tokens(queries: int, group: int, rows: int) -> None:
    assert rows_for(AttentionProblem(queries=queries, group=group)) == rows


# What `jitmx.attention(early=True)` reads before the launches in front of it have ended, as its docstring has it.
EARLY = {
    "block_table", "seq_lens", "query_start", "slots", "positions", "mask", "k_scale", "v_scale", "sinks", "rope",
    "k_cache", "v_cache",
}  # fmt: skip


def test_what_is_read_before_the_wait_is_what_the_operator_says() -> None:
    """Each buffer in turn as if a launch that may still be at work wrote it."""
    knobs = {"cache": "e4m3", "sinks": "sinks_fp32", "mask": 32, "windowed": True, "rope": "neox", "rows": 32}
    variant = decode("sm_90a", **knobs)
    ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
    asked = [case for case in FAMILY.cases(variant) if case.name.startswith("explicit")]
    plain = [case for case in FAMILY.cases(variant) if case.name == "pages far apart"]  # whose slots the table gives
    found = set()
    for case in (*asked, *plain):
        for name, item in case.buffers(variant.arguments).items():
            if item.constant or item.early:
                late = dataclasses.replace(item, constant=False, early=False)
                with contextlib.suppress(SimulationError):
                    run(dataclasses.replace(case, values={**case.values, name: late}), variant, ptx)
                    continue
                found.add(name)
    assert found == EARLY
