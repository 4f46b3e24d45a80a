"""`linear`: the heuristic is legal for every shape, and what Python says of a launch is what the template does."""

from __future__ import annotations

import dataclasses
import keyword
import re
from types import CodeType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts
from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.errors import CompileError, KnobError
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.gemv import SPEC as GEMV
from jitmx.kernels.linear.gemv import launch
from jitmx.kernels.linear.gemv import shared_bytes as gemv_shared_bytes
from jitmx.kernels.linear.layout import TILE_BYTES, packed_tiles, preferred_encoding
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from strategies import ARCHES, examples, variants

FAMILY = kernels.family("linear")
BLOCKS = st.integers(1, 2048)  # of 32 values: k up to 65536
PROBLEMS = st.builds(
    LinearProblem,
    m=st.integers(1, 8),
    n=st.integers(1, 300_000),
    k=BLOCKS.map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.booleans(),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
)
GEMV_VARIANTS = variants(GEMV)


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=3 * settings.default.max_examples)
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 256))
@example(problem=LinearProblem(8, 300_000, 65_536), multiprocessors=1)
@example(problem=LinearProblem(8, 1, 65_536), multiprocessors=256)
@example(problem=LinearProblem(1, 1, 32), multiprocessors=256)
def test_the_heuristic_is_legal_and_serves_the_problem(
    target: Arch, problem: LinearProblem, multiprocessors: int
) -> None:
    for count in (target.multiprocessors, multiprocessors):
        knobs, fixed = FAMILY.tuned(problem, target, count, "gemv"), FAMILY.fixed(problem, "gemv")
        assert not knobs.keys() & fixed.keys()
        variant = GEMV.variant(target, **knobs, **fixed)
        FAMILY.check(problem, variant)
        assert variant.knobs.m >= problem.m
        assert launch(variant.knobs, problem, count).blocks >= 1


@given(n=st.integers(1, 300_000), k=st.integers(1, 65_536))
def test_packed_tiles_hold_every_element_and_are_not_one_too_many(n: int, k: int) -> None:
    rows, tiles = packed_tiles(n, k)
    assert (rows - 1) * 16 < n <= rows * 16
    assert (tiles - 1) * 64 < k <= tiles * 64


def test_a_gpt_oss_weight_takes_seventeen_bytes_for_thirty_two_values() -> None:
    rows, tiles = packed_tiles(5120, 2880)
    assert rows * tiles * TILE_BYTES == 5120 * 2880 * 17 // 32


@pytest.mark.parametrize(
    ("m", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8), (9, 8), (4096, 8)]
)
def test_a_problem_takes_the_smallest_kernel_that_holds_its_rows(m: int, rows: int) -> None:
    assert FAMILY.fixed(LinearProblem(m), "gemv")["m"] == rows


def test_weights_are_packed_as_nibbles_where_block_scaled_mma_takes_them() -> None:
    assert {target.name for target in ARCHES if preferred_encoding(target) == "nibble"} == {
        "sm_120a", "sm_120f", "sm_121a"
    }  # fmt: skip
    assert LinearProblem.on(arch.parse("sm_121")).encoding == "nibble"
    assert LinearProblem.on(arch.parse("sm_121"), encoding="rotated").encoding == "rotated"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"m": 0}, "m=0 is below its limit; the nearest legal value is 1"),
        ({"n": -5}, "n=-5 is below its limit; the nearest legal value is 1"),
        ({"k": 0}, "k=0 is below its limit; the nearest legal value is 32"),
        ({"k": 2881}, "k=2881 is not a multiple of 32, the values that share a scale; the nearest legal value is 2880"),
        ({"k": 2911}, "k=2911 is not a multiple of 32, the values that share a scale; the nearest legal value is 2912"),
        ({"dtype": "fp32"}, "dtype='fp32' is not one of bf16, fp16"),
        ({"encoding": "plain"}, "encoding='plain' is not one of rotated, nibble"),
        ({"scale_range": "wide"}, "scale_range='wide' is not one of normal, full"),
        ({"bias": 1}, "bias=1 is not true or false"),
        ({"m": True}, "m=True is not a whole number"),
    ],
)
def test_a_problem_that_there_is_not_is_refused_with_the_rule_and_the_nearest_that_is(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(KnobError) as error:
        LinearProblem.on(arch.parse("sm_121"), **fields)
    assert str(error.value) == f"linear.{said}"


def test_more_slices_than_tiles_are_refused_with_the_number_of_tiles() -> None:
    with pytest.raises(KnobError, match=r"split_k=8 is over the 2 tiles of k=96; the nearest legal value is 2"):
        FAMILY.check(LinearProblem(n=64, k=96), GEMV.variant(arch.parse("sm_90"), split_k=8, warps=8))


def test_a_row_of_x_that_does_not_fit_shared_memory_is_refused_with_both_numbers_and_a_remedy() -> None:
    problem = LinearProblem(m=8, n=5120, k=65_536, encoding="nibble")
    variant = GEMV.variant(arch.parse("sm_121"), m=8, chunk=1)
    need = gemv_shared_bytes(variant.knobs, problem.k)
    with pytest.raises(KnobError, match=rf"needs {need} B of shared memory; .* at most 101376 B.*set stage_x=0"):
        FAMILY.check(problem, variant)
    with pytest.raises(KnobError, match="not even stages=1 fits"):
        FAMILY.check(problem, variant)
    FAMILY.check(problem, GEMV.variant(arch.parse("sm_121"), m=8, chunk=1, stage_x=False))


def test_more_stages_than_fit_beside_x_are_refused_with_the_most_that_do() -> None:
    problem = LinearProblem(m=1, n=5120, k=16_384, encoding="nibble")
    knobs = {"chunk": 1, "warps": 8, "split_k": 8}

    def check(stages: int) -> None:
        FAMILY.check(problem, GEMV.variant(arch.parse("sm_121"), stages=stages, **knobs))

    with pytest.raises(KnobError, match=r"the nearest legal value is stages=(\d+); or lower") as error:
        check(16)
    most = int(re.search(r"stages=(\d+);", str(error.value))[1])
    check(most)
    with pytest.raises(KnobError):
        check(most + 1)


class Arithmetic(dict[str, int]):
    """The integers that the template computes, by its own expressions, so that no copy of them can go stale.

    `arithmetic["row_end"]` is what the rendered source initialises `row_end` with, given blockIdx, gridDim, threadIdx,
    n and k.
    """

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.code: dict[str, CodeType] = {}
        plain = re.sub(r"\(long long\)|\bargs\.|\.x\b", "", render(variant))
        declarations = re.findall(r"^\s*(?:const |constexpr )?int (\w+ = [^;]*);", plain, re.MULTILINE)
        for name, text in re.findall(r"(\w+) = ((?:[^,()]|\((?:[^()]|\([^()]*\))*\))*)", ",".join(declarations)):
            if not keyword.iskeyword(name):
                # None of these numbers is negative, so that both languages round alike.
                self.code.setdefault(name, compile(text.replace("/", "//"), name, "eval"))

    def at(self, **known: int) -> Arithmetic:
        """The same for another thread, launch or shape."""
        self.clear()
        self.update(known)
        return self

    def __missing__(self, name: str) -> int:
        value: int = eval(self.code[name], {"__builtins__": {"int": int}}, self)
        self[name] = value
        return value


@settings(max_examples=examples(40))
@given(variant=GEMV_VARIANTS, n=st.integers(1, 300_000), multiprocessors=st.integers(1, 64))
def test_every_row_of_tiles_belongs_to_exactly_one_worker(variant: Variant, n: int, multiprocessors: int) -> None:
    arithmetic, knobs = Arithmetic(variant), variant.knobs
    blocks = launch(knobs, LinearProblem(n=n, k=64), multiprocessors).blocks
    assert 1 <= blocks <= multiprocessors * knobs.blocks_per_sm
    next_row = 0
    for block in range(blocks):
        for group in range(knobs.warps // knobs.split_k):
            owned = set()
            for thread in (group * knobs.split_k * 32, (group + 1) * knobs.split_k * 32 - 1):
                arithmetic.at(blockIdx=block, gridDim=blocks, threadIdx=thread, n=n)
                assert arithmetic["group"] == group
                owned.add((arithmetic["row"], arithmetic["row_end"]))
            ((row, row_end),) = owned
            assert row == next_row <= row_end
            next_row = row_end
    assert next_row == packed_tiles(n, 64)[0]


@given(n=st.integers(1, 300_000), multiprocessors=st.integers(1, 256), variant=GEMV_VARIANTS)
def test_no_block_is_without_a_row_and_none_is_missing_from_the_first_wave(
    n: int, multiprocessors: int, variant: Variant
) -> None:
    knobs = variant.knobs
    rows, _ = packed_tiles(n, 64)
    per_block = knobs.warps // knobs.split_k
    blocks = launch(knobs, LinearProblem(n=n, k=64), multiprocessors).blocks
    assert (blocks - 1) * per_block < rows
    assert blocks == multiprocessors * knobs.blocks_per_sm or blocks * per_block >= rows


@given(variant=GEMV_VARIANTS, blocks=BLOCKS)
def test_every_tile_of_k_belongs_to_exactly_one_slice_and_no_slice_is_empty(variant: Variant, blocks: int) -> None:
    arithmetic, knobs = Arithmetic(variant), variant.knobs
    _, tiles = packed_tiles(1, 32 * blocks)
    next_tile = 0
    for warp in range(knobs.split_k):
        arithmetic.at(threadIdx=32 * warp, k=32 * blocks)
        assert arithmetic["tiles_k"] == tiles
        assert arithmetic["first"] == next_tile
        assert arithmetic["length"] > 0 or knobs.split_k > tiles
        next_tile += arithmetic["length"]
    assert next_tile == tiles


@settings(max_examples=examples(50))
@given(variant=GEMV_VARIANTS)
def test_shared_memory_before_x_is_what_struct_shared_takes(variant: Variant) -> None:
    unstaged = dataclasses.replace(variant.knobs, stage_x=False)
    size = gemv_shared_bytes(unstaged, 64)
    claim(variant, f"__builtin_offsetof(Shared, x) == {size}")
    assert {gemv_shared_bytes(unstaged, k) for k in (32, 2880, 65_536)} == {size}


@pytest.mark.parametrize("copy", ["bulk", "async"])
@pytest.mark.parametrize(("warps", "split_k"), [(1, 1), (5, 5), (9, 3), (15, 5), (12, 4), (16, 1)])
@pytest.mark.parametrize("m", [1, 8])
def test_shared_memory_is_right_where_barriers_and_sums_leave_odd_ends(
    copy: str, warps: int, split_k: int, m: int
) -> None:
    knobs: dict[str, Any] = {"m": m, "copy": copy, "warps": warps, "split_k": split_k, "blocks_per_sm": 1}
    variant = GEMV.variant(arch.parse("sm_90"), **knobs, chunk=1, stages=3, stage_x=False)
    claim(variant, f"__builtin_offsetof(Shared, x) == {gemv_shared_bytes(variant.knobs, 64)}")


def test_a_wrong_size_of_shared_memory_is_found_out() -> None:
    variant = GEMV.variant(arch.parse("sm_121"))
    size = gemv_shared_bytes(dataclasses.replace(variant.knobs, stage_x=False), 64)
    with pytest.raises(CompileError, match="the claim"):
        claim(variant, f"__builtin_offsetof(Shared, x) == {size + 16}")


@given(variant=GEMV_VARIANTS, blocks=BLOCKS)
def test_rows_of_x_end_where_shared_memory_does_and_do_not_overlap(variant: Variant, blocks: int) -> None:
    knobs, k = variant.knobs, 32 * blocks
    before = gemv_shared_bytes(dataclasses.replace(knobs, stage_x=False), k)
    staged = dataclasses.replace(variant, knobs=dataclasses.replace(knobs, chunk=1, stages=1, stage_x=True))
    arithmetic = Arithmetic(staged)
    room = gemv_shared_bytes(dataclasses.replace(knobs, stage_x=True), k) - before
    holders = knobs.warps if knobs.split_k > 1 else 1  # each warp keeps its slice, or the block keeps all
    for warp in range(holders):
        arithmetic.at(threadIdx=32 * warp, k=k)
        assert arithmetic["count"] <= arithmetic["pitch"]
        assert holders * knobs.m * arithmetic["pitch"] * 16 == room


# For each engine and way to copy, knobs away from their defaults that change the instructions most.
SAMPLE: dict[tuple[str, str], dict[str, Any]] = {
    ("mma", "bulk"): {"m": 4, "encoding": "rotated", "bias": True, "chunk": 4, "stages": 3},
    ("mma", "async"): {"m": 8, "dtype": "fp16", "scale_range": "full", "chunk": 3, "stages": 2},
    ("fma", "bulk"): {"m": 2, "dtype": "fp16", "encoding": "nibble", "warps": 4, "split_k": 1, "stages": 2},
    ("fma", "async"): {"m": 1, "encoding": "nibble", "scale_range": "full", "stage_x": False, "unroll": 1},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_121a"])
def test_the_machine_code_keeps_its_contract(target: str) -> None:
    chip = arch.parse(target)
    asked = []
    for (engine, copy), knobs in SAMPLE.items():
        knobs = knobs | {"engine": engine, "copy": copy, "pdl": "pdl" in chip.features}
        if copy == "async" or "tma" in chip.features:
            asked.append(GEMV.variant(chip, **knobs))
            continue
        with pytest.raises(KnobError, match=f"on {chip} use copy='async'"):
            GEMV.variant(chip, **knobs)
    keep_contracts(asked)
