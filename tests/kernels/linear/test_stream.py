"""`linear.stream`: right on every target as simulated, within the chip's limits, with legal heuristics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import keep_contracts, some
from jitmx import arch
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.errors import KnobError, SimulationError
from jitmx.kernels.linear import GPT_OSS
from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.layout import pack
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.stream import KERNEL, MAX_ROWS, SPEC, launch, shared_bytes
from jitmx.kernels.linear.stream_knobs import misfit
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples, variants

TARGETS = ("sm_80", "sm_90a", "sm_120a", "sm_121a")
PROBLEMS = st.builds(
    LinearProblem,
    m=st.integers(1, 100),
    n=st.integers(1, 300_000),
    k=st.integers(1, 2048).map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.booleans(),
    residual=st.booleans(),
    norm=st.booleans(),
    argmax=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
)

# Knobs away from their defaults that change the code most, small enough to simulate quickly.
SAMPLE: dict[str, dict[str, Any]] = {
    "one row, folded": {"warps": 4, "split_k": 2},
    "four rows, columns split": {"m": 4, "scaling": "post", "warps": 4, "split_k": 2, "predecode": 1, "bias": True},
    "fp16 nibbles of any scale": {
        "m": 2, "dtype": "fp16", "scaling": "bare", "encoding": "nibble", "scale_range": "full", "warps": 6,
        "split_k": 3, "residual": True,
    },
    "two columns of MMA, two rows of tiles": {"m": 16, "tile_rows": 2, "warps": 2, "split_k": 2, "unroll": 1},
    "eight rows of any scale": {"m": 8, "scaling": "post", "scale_range": "full", "warps": 4, "late": True},
    "streamed": {"m": 2, "scaling": "post", "share": False, "warps": 2, "chunk": 3, "bias": True, "residual": True},
    "pair": {"m": 4, "scaling": "post", "warps": 4, "split_k": 2, "bias": True, "residual": "pair"},
    "pair, streamed, with a norm": {
        "m": 2, "dtype": "fp16", "scaling": "post", "share": False, "warps": 2, "chunk": 2, "norm": True, "bias": True,
        "residual": "pair",
    },
    "streamed, two rows of tiles": {
        "m": 32, "share": False, "warps": 2, "chunk": 2, "stages": 3, "tile_rows": 2, "unroll": 1,
    },
    "norm": {"m": 2, "scaling": "post", "warps": 4, "split_k": 2, "predecode": 1, "norm": True, "bias": True},
    "norm, streamed": {
        "m": 8, "dtype": "fp16", "scaling": "post", "share": False, "warps": 3, "chunk": 2, "norm": True,
        "residual": True,
    },
    "argmax": {"m": 16, "warps": 3, "split_k": 1, "unroll": 1, "argmax": True, "bias": True},
    "argmax, streamed": {
        "m": 4, "scaling": "post", "share": False, "warps": 2, "chunk": 3, "argmax": True, "scale_range": "full",
    },
    "scales in halves": {"m": 16, "scaling": "halves", "warps": 4, "split_k": 2, "bias": True},
    "nibbles and scales in halves, streamed": {
        "m": 8, "scaling": "halves", "encoding": "nibble", "share": False, "warps": 2, "chunk": 2, "tile_rows": 2,
    },
    "streamed in whole rows, two at once": {
        "m": 16, "scaling": "halves", "share": False, "whole": True, "warps": 2, "chunk": 2, "tile_rows": 2,
        "bias": True,
    },
    "streamed in whole rows, with norm and argmax": {
        "m": 2, "scaling": "post", "share": False, "whole": True, "warps": 3, "chunk": 3, "stages": 3, "unroll": 3,
        "norm": True, "argmax": True, "scale_range": "full",
    },
    "slices through rings": {"m": 4, "scaling": "post", "warps": 6, "split_k": 3, "resident": False, "chunk": 2},
    "slices through rings, two rows of tiles": {
        "m": 2, "scaling": "post", "warps": 4, "split_k": 2, "tile_rows": 2, "resident": False, "chunk": 3, "stages": 3,
        "predecode": 1, "bias": True, "norm": True,
    },
    "norm and argmax": {"warps": 4, "split_k": 2, "tile_rows": 2, "norm": True, "argmax": True},
    "norm and argmax, streamed": {
        "m": 16, "share": False, "warps": 2, "chunk": 2, "unroll": 1, "norm": True, "argmax": True,
    },
}  # fmt: skip
HOPPER: dict[str, dict[str, Any]] = {
    "bare bf16 in clusters": {
        "scaling": "bare", "cluster": 2, "warps": 8, "predecode": 1, "unroll": 1, "blocks_per_sm": 2,
    },
    "bare bf16 of any scale": {"m": 4, "scaling": "bare", "scale_range": "full", "encoding": "nibble", "warps": 4},
    "four to a cluster, fp16": {"m": 8, "dtype": "fp16", "scaling": "post", "cluster": 4, "warps": 4, "split_k": 2},
    "eight to a cluster": {"m": 16, "cluster": 8, "warps": 2, "split_k": 1, "late": True, "residual": True},
    "norm and bias in clusters": {"m": 8, "cluster": 2, "warps": 8, "split_k": 2, "norm": True, "bias": True},
    "residual and bias, two rows of tiles": {
        "m": 16, "tile_rows": 2, "warps": 4, "split_k": 2, "residual": True, "bias": True,
    },
    "norm in clusters": {"scaling": "bare", "cluster": 2, "warps": 8, "unroll": 1, "norm": True, "residual": True},
    "norm and argmax in clusters": {"m": 8, "cluster": 4, "warps": 4, "split_k": 2, "norm": True, "argmax": True},
    "argmax in clusters": {"m": 2, "scaling": "bare", "cluster": 2, "warps": 4, "unroll": 1, "argmax": True},
    "sums of blocks": {"m": 16, "scaling": "halves", "cluster": 2, "warps": 8, "split_k": 4, "sums": "block"},
    "sums of blocks, more rows of tiles than warps": {
        "m": 2, "scaling": "bare", "cluster": 4, "warps": 4, "split_k": 2, "sums": "block", "unroll": 1, "bias": True,
    },
    "sums of blocks, two rows of tiles, with norm and argmax": {
        "m": 4, "cluster": 2, "warps": 6, "split_k": 3, "sums": "block", "tile_rows": 2, "norm": True, "argmax": True,
    },
    "slices through rings in clusters": {
        "scaling": "bare", "cluster": 2, "warps": 12, "split_k": 4, "resident": False, "unroll": 1, "predecode": 1,
        "blocks_per_sm": 2, "residual": "pair",
    },
    "slices through rings in clusters, with norm and argmax": {
        "m": 4, "scaling": "bare", "cluster": 4, "warps": 6, "split_k": 2, "resident": False, "chunk": 1, "stages": 5,
        "norm": True, "argmax": True,
    },
    "two rows of tiles ahead of X": {"m": 8, "scaling": "bare", "cluster": 2, "warps": 4, "split_k": 2, "ahead": 2},
    "two rows of tiles ahead of X, late": {"m": 16, "warps": 4, "split_k": 2, "ahead": 2, "late": True},
    "bare bf16, streamed": {"m": 8, "scaling": "bare", "share": False, "warps": 4, "chunk": 2},
    "bare bf16, streamed in whole rows": {
        "m": 4, "scaling": "bare", "share": False, "whole": True, "warps": 4, "chunk": 4, "unroll": 2,
        "residual": "pair",
    },
}  # fmt: skip


def variant(target: str, **knobs: Any) -> Variant:
    """On targets that lack bulk copies or dependent launch, without them."""
    chip = arch.parse(target)
    modern = "tma" in chip.features
    fitted = {"late": False} if not modern else {}
    return SPEC.variant(chip, **{"pdl": modern, "copy": "bulk" if modern else "async", **knobs, **fitted})


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sample", SAMPLE)
def test_it_passes_its_cases_and_they_reach_its_code(
    sample: str, target: str, simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(variant(target, **SAMPLE[sample]))


@pytest.mark.parametrize("sample", HOPPER)
def test_what_only_hopper_takes_passes_its_cases(sample: str, simulated: Callable[[Variant], Verdict]) -> None:
    simulated(variant("sm_90a", **HOPPER[sample]))


@pytest.mark.parametrize("sample", [*SAMPLE, *HOPPER])
def test_its_cases_are_of_shapes_that_it_serves(sample: str) -> None:
    """A row of tiles that is no multiple of what `whole` brings at once is not read at all."""
    picked = variant("sm_90a", **{**SAMPLE, **HOPPER}[sample])
    for case in KERNEL.cases(picked):
        rows, n, k = (int(case.values[name]) for name in ("rows", "n", "k"))  # type: ignore[arg-type]
        assert misfit(LinearProblem(rows, n, k), picked.knobs, picked.arch, 1 << 30) is None, case.name


def test_bulk_and_async_copies_agree_where_there_are_both(simulated: Callable[[Variant], Verdict]) -> None:
    for way in (
        {"share": True},
        {"resident": False, "split_k": 2},
        {"share": False, "chunk": 2},
        {"share": False, "chunk": 2, "whole": True},
    ):
        simulated(variant("sm_90a", copy="async", m=4, scaling="bare", warps=4, **way))


@settings(max_examples=examples(8))
@given(picked=variants(SPEC).filter(lambda v: v.knobs.m * v.knobs.warps <= 64 and v.knobs.cluster <= 4))
def test_any_legal_variant_computes_what_it_should(picked: Variant) -> None:
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    for case in KERNEL.cases(picked):
        error, _ = run(case, picked, ptx)
        assert error <= case.gate, case.name


@pytest.mark.parametrize(
    "knobs",
    [
        SAMPLE["one row, folded"],
        SAMPLE["streamed"],
        SAMPLE["streamed in whole rows, two at once"],
        HOPPER["bare bf16 in clusters"],
        SAMPLE["norm and argmax"],
        SAMPLE["norm and argmax, streamed"],
        HOPPER["norm in clusters"],
        SAMPLE["slices through rings, two rows of tiles"] | {"warps": 12, "split_k": 1},
    ],
)
def test_no_byte_of_shared_memory_is_asked_for_in_vain(knobs: dict[str, Any]) -> None:
    """All of it is used, but for the 64 bytes that pad a row of X: with 80 less, some access is outside."""
    picked = variant("sm_90a", **knobs)
    rows, n, k = picked.knobs.m, 129, 64 * 8 * picked.knobs.cluster
    whole = launch(picked.knobs, LinearProblem(rows, n, k), 4)
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    assert run(make_case(picked, whole, rows, n, k, 0), picked, ptx)[0] <= 0.005
    short = dataclasses.replace(whole, shared_bytes=whole.shared_bytes - 80)
    with pytest.raises(SimulationError, match="shared memory"):
        run(make_case(picked, short, rows, n, k, 0), picked, ptx)


@pytest.mark.parametrize("way", [{}, {"cluster": 2}, {"share": False}, {"resident": False, "warps": 4}], ids=str)
def test_argmax_takes_the_lowest_of_equal_values_and_no_nan_and_leaves_its_workspace_zero(way: dict[str, Any]) -> None:
    """Rows of W that yield the same are in several tiles, warps and blocks; one row of X is all NaN."""
    n, k = 150, 128
    split = {} if "share" in way else {"split_k": 2}
    picked = variant("sm_90a", m=4, scaling="post", argmax=True, bias=True, **{"warps": 2, **split, **way})
    codes = np.zeros((n, k), np.uint8)
    codes[[90, 37, 141, 38]] = 7  # the code of 6
    bias = np.zeros(n, ml_dtypes.bfloat16)
    bias[[0, 38, 149]] = np.nan
    words, scales = pack(codes, np.full((n, k // 32), 127, np.uint8), picked.knobs.encoding)
    x = np.stack([np.ones(k), -np.ones(k), np.full(k, np.nan), np.zeros(k)]).astype(ml_dtypes.bfloat16)
    geometry, memory = launch(picked.knobs, LinearProblem(len(x), n, k), 8), Memory()
    inputs = {"x": x, "weight": words, "scales": scales, "bias": bias}
    values = {name: memory.upload(array, name) for name, array in inputs.items()}
    values |= {"rows": len(x), "n": n, "k": k}
    workspace = memory.upload(np.zeros(geometry.workspace, np.uint8), writable=True)
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    for _ in range(2):
        y = memory.allocate(8 * len(x))
        arguments = picked.arguments.pack({**values, "y": y, "workspace": workspace}, geometry.maps, encode)
        simulate(
            ptx, (geometry.blocks, 1, 1), (picked.threads, 1, 1), arguments, memory,
            entry=picked.spec.entry, shared_bytes=geometry.shared_bytes, cluster=geometry.cluster,
        )  # fmt: skip
        assert memory.download(y, np.int64, (len(x),)).tolist() == [37, 1, 0, 1]
        assert not memory.download(workspace, np.uint8, (geometry.workspace,)).any()


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(100))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 256))
@example(problem=LinearProblem(1, 1, 32), multiprocessors=256)
@example(problem=LinearProblem(32, 300_000, 65_536), multiprocessors=1)
def test_the_heuristic_is_legal_and_serves_the_problem_or_says_that_x_does_not_fit(
    target: Arch, problem: LinearProblem, multiprocessors: int
) -> None:
    fixed = KERNEL.fixed(problem)
    assert fixed["m"] >= min(problem.m, MAX_ROWS)
    try:
        tuned = KERNEL.heuristic(problem, target, multiprocessors)
    except KnobError as error:
        assert "do not fit" in str(error)
        x = fixed["m"] * problem.k * 2
        assert x + 544 > target.shared_bytes // 2  # 8 rows of MMA may stand for fewer of X, at 5 and more
        return
    assert not tuned.keys() & fixed.keys()
    picked = SPEC.variant(target, **fixed, **tuned)
    KERNEL.check(problem, picked)
    geometry = launch(picked.knobs, problem, multiprocessors)
    assert 1 <= geometry.blocks <= max(multiprocessors, picked.knobs.cluster)
    assert geometry.blocks % geometry.cluster == 0
    assert geometry.shared_bytes <= target.shared_bytes


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_candidates_are_legal_and_open_with_what_the_heuristic_picks(m: int, target: str) -> None:
    chip = arch.parse(target)
    for n, k, _ in GPT_OSS:
        problem = LinearProblem.on(chip, m=m, n=n, k=k)
        try:
            tuned = KERNEL.heuristic(problem, chip, chip.multiprocessors)
        except KnobError:
            assert KERNEL.candidates(problem, chip, chip.multiprocessors) == []
            continue
        found = KERNEL.candidates(problem, chip, chip.multiprocessors)
        assert found[0] == tuned and 1 < len(found) <= 80
        for knobs in found:
            KERNEL.check(problem, SPEC.variant(chip, **KERNEL.fixed(problem), **knobs))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 2880, 4096), (16, 2880, 4096), (16, 201_088, 2880)])
def test_the_first_candidates_keep_their_contract(m: int, n: int, k: int, nightly: bool) -> None:
    """What tuning meets first does not spill, whatever was added to it since."""
    chip = arch.parse("sm_90a")
    problem = LinearProblem.on(chip, m=m, n=n, k=k)
    candidates = KERNEL.candidates(problem, chip, chip.multiprocessors)[:12]
    first = (SPEC.variant(chip, **KERNEL.fixed(problem), **knobs) for knobs in candidates)
    keep_contracts(some(first, nightly))


def picked(chip: Arch, problem: LinearProblem) -> Variant:
    """What the heuristic picks."""
    tuned = KERNEL.heuristic(problem, chip, chip.multiprocessors)
    return SPEC.variant(chip, **KERNEL.fixed(problem), **tuned)


@pytest.mark.parametrize(("target", "rows"), [("sm_80", [4]), ("sm_90a", [1, 2, 8, 32]), ("sm_121a", [2])])
def test_the_machine_code_of_what_the_heuristic_picks_keeps_its_contract(target: str, rows: list[int]) -> None:
    chip = arch.parse(target)
    keep_contracts(
        picked(chip, LinearProblem.on(chip, m=m, n=n, k=k, bias=biases[-1])) for m in rows for n, k, biases in GPT_OSS
    )


def test_weights_that_do_not_fit_twice_are_streamed_in_slices_and_all_multiprocessors_have_as_many_rows() -> None:
    chip = arch.parse("sm_90a")
    few, wide, qkv = (
        KERNEL.heuristic(LinearProblem.on(chip, n=n, k=k), chip, 132)
        for n, k in ((2880, 17280), (34560, 2880), (5120, 5760))
    )
    assert few["resident"] is False and few["cluster"] == 2 and few["split_k"] * 3 == few["warps"] == 12
    assert qkv["resident"] is False and (qkv["chunk"], qkv["stages"]) == (3, 2)
    # Behind it launches begin early; behind a head, none: a warp has one of 2000 rows of tiles then, or none.
    assert wide["share"] is False and (wide["warps"], wide["chunk"]) == (12, 9)
    head = KERNEL.heuristic(LinearProblem.on(chip, n=32000, k=2880, argmax=True), chip, 132)
    assert head["share"] is False and (head["warps"], head["chunk"]) == (16, 3)
    fits = KERNEL.heuristic(LinearProblem.on(chip, n=5120, k=2880), chip, 132)
    assert fits.get("resident", True) and fits.get("share", True)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [32000, 34560, 201088])
def test_two_blocks_with_rings_of_whole_rows_do_not_fit_a_multiprocessor(n: int, rows: int) -> None:
    """Blocks of a launch that begins early would meet where those before them end first."""
    target = arch.parse("sm_90a")
    problem = LinearProblem(rows, n, 2880, norm=rows == 1, argmax=n > 30000)
    variant = SPEC.variant(target, **KERNEL.fixed(problem), **KERNEL.heuristic(problem, target, 132))
    assert not variant.knobs.share
    assert 2 * launch(variant.knobs, problem, 132).shared_bytes > target.shared_bytes


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_nor_do_two_blocks_of_the_head_by_the_shipped_table(rows: int) -> None:
    target = arch.parse("sm_90a")
    found = choose.choose("linear", LinearProblem(rows, 201088, 2880), target, multiprocessors=132)
    assert found.variant.spec is SPEC and not found.variant.knobs.share
    assert 2 * launch(found.variant.knobs, found.problem, 132).shared_bytes > target.shared_bytes


@pytest.mark.parametrize(("target", "rows"), [("sm_90a", [1, 4, 32]), ("sm_121a", [1])])
def test_so_does_that_with_norm_and_argmax(target: str, rows: list[int]) -> None:
    chip = arch.parse(target)
    added = LinearProblem.on(chip, n=5120, k=2880, bias=True, norm=True, residual=True)
    largest = LinearProblem.on(chip, n=201_088, k=2880, norm=True, argmax=True)
    keep_contracts(picked(chip, dataclasses.replace(problem, m=m)) for m in rows for problem in (added, largest))


@pytest.mark.parametrize(
    ("target", "knobs", "said"),
    [
        ("sm_90a", {"warps": 6, "split_k": 4}, "split_k=4 does not divide warps=6; the nearest that does is 3"),
        ("sm_90a", {"warps": 20, "blocks_per_sm": 3}, "the nearest legal value is 2"),
        ("sm_90a", {"dtype": "fp16", "scaling": "fold"}, "use scaling='post'"),
        ("sm_90a", {"scale_range": "full", "scaling": "fold"}, "use scaling='post'"),
        ("sm_121a", {"scaling": "bare"}, "as seen on sm_90a; on sm_121a use scaling='post'"),
        ("sm_121a", {"cluster": 2}, "needs sm_90 or sm_100; on sm_121a use cluster=1"),
        ("sm_90a", {"cluster": 2, "share": False}, "which share=0 rules out; use cluster=1"),
        ("sm_90a", {"dtype": "fp16", "scaling": "halves"}, "scaling='halves' with dtype='fp16'"),
        ("sm_90a", {"sums": "block"}, "sums='block' selects nothing with cluster=1, split_k=4"),
        ("sm_90a", {"sums": "block", "cluster": 2, "split_k": 1}, "leave it at 'warp'"),
        ("sm_90a", {"sums": "block", "cluster": 2, "resident": False}, "selects nothing with resident=0"),
        ("sm_90a", {"resident": False, "ahead": 2}, "ahead=2 selects nothing with resident=0; leave it at 0"),
        ("sm_90a", {"share": False, "resident": False}, "resident=False selects nothing with share=0"),
        ("sm_90a", {"stages": 4}, "stages=4 selects nothing with resident=1; leave it at 2"),
        ("sm_90a", {"resident": False, "chunk": 1, "predecode": 2}, "use predecode=1"),
        ("sm_90a", {"whole": True}, "whole=True selects nothing with share=1; leave it at False"),
        ("sm_90a", {"copy": "async", "ahead": 2}, "ahead=2 selects nothing with copy='async'; leave it at 0"),
        ("sm_90a", {"ahead": 2, "predecode": 1}, "use predecode=0 or ahead=0"),
        ("sm_80", {"copy": "bulk", "pdl": False}, "on sm_80 use copy='async'"),
        ("sm_80", {"copy": "async", "pdl": True}, "use pdl=False"),
        (
            "sm_90a",
            {"argmax": True, "residual": "pair"},
            "residual='pair' leaves Y as a pair, and argmax=True leaves none; use residual=True",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(target: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError) as error:
        SPEC.variant(arch.parse(target), **knobs)
    assert said in str(error.value)


def test_more_rows_of_tiles_than_warps_have_rings_for_are_refused() -> None:
    picked = variant("sm_90a", warps=4, split_k=2, resident=False)
    KERNEL.check(LinearProblem(n=132 * 32, k=4096), picked)
    with pytest.raises(KnobError, match="with n=4225 a block has 3; use resident=1, fewer split_k or more warps"):
        KERNEL.check(LinearProblem(n=132 * 32 + 1, k=4096), picked)


def test_more_blocks_than_tiles_of_k_are_refused_with_the_nearest_that_serve() -> None:
    with pytest.raises(KnobError, match="cluster=8 is over the 2 tiles of k=96; the nearest legal value is 2"):
        KERNEL.check(LinearProblem(n=640, k=96), variant("sm_90a", cluster=8))


def test_slices_of_k_too_short_for_the_sums_of_a_block_are_refused_with_what_they_take() -> None:
    picked = variant("sm_90a", m=16, cluster=2, sums="block")
    with pytest.raises(KnobError, match="takes 16 tiles of k; k=960 has 15; use sums='warp'"):
        KERNEL.check(LinearProblem(16, 640, 960), picked)
    KERNEL.check(LinearProblem(16, 640, 1024), picked)


def test_rows_that_are_no_multiple_of_the_chunk_are_not_taken_whole_and_a_chunk_that_divides_is_named() -> None:
    picked = variant("sm_90a", share=False, whole=True, chunk=4)
    with pytest.raises(KnobError, match="k=2880 has 45; use chunk=3 or whole=0"):
        KERNEL.check(LinearProblem(1, 5120, 2880), picked)


@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_rings_are_offered_in_whole_rows_just_where_the_chunk_divides_them(m: int) -> None:
    chip = arch.parse("sm_90a")
    problem = LinearProblem.on(chip, m=m, n=201_088, k=2880)
    found = [knobs for knobs in KERNEL.candidates(problem, chip, 132) if not knobs.get("share", True)]
    assert {knobs["whole"] for knobs in found} == {True, False}
    assert all(knobs["whole"] == (45 % knobs["chunk"] == 0) for knobs in found)


def test_weights_that_do_not_fit_are_refused_with_both_numbers_and_a_remedy() -> None:
    picked, problem = variant("sm_121a"), LinearProblem(1, 201_088, 2880)
    need = shared_bytes(picked.knobs, problem.n, problem.k, 48)
    with pytest.raises(KnobError, match=rf"needs {need} B of shared memory; .* at most 101376 B; set share=0"):
        KERNEL.check(problem, picked)


@pytest.mark.parametrize("field", [{"activation": "mxfp8"}, {"weight": "mxfp8"}])
def test_what_it_lacks_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(KnobError, match=f"linear.stream does not take {next(iter(field))}"):
        KERNEL.fixed(LinearProblem(**field))
