"""`linear.tile`: right on every target and shape as simulated, within the chip's limits, with legal heuristics."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts, some
from jitmx import arch, formats, kernels
from jitmx.arch import Arch
from jitmx.dispatch.choose import choose
from jitmx.errors import KnobError, SimulationError
from jitmx.kernels.linear import tile as tiles
from jitmx.kernels.linear.arguments import EPSILON, make_case
from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.linear.mxfp8 import MXFP8_NORMAL_SCALES, pack_mxfp8
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.tile import KERNEL, SPEC, TileKnobs, launch, shared_bytes, stage_bytes
from jitmx.kernels.linear.tile_cost import Shape, microseconds, places
from jitmx.registry.case import Buffer, Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.verify import Verdict, run
from jitmx.toolchain import nvrtc
from strategies import ARCHES, examples, variants

PROBLEMS = st.builds(
    LinearProblem,
    m=st.integers(1, 20_000),
    n=st.integers(1, 300_000),
    k=st.integers(1, 2048).map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from(["bf16", "fp16"]),
    bias=st.booleans(),
    residual=st.sampled_from(RESIDUALS),
    encoding=st.sampled_from(["rotated", "nibble"]),
    scale_range=st.sampled_from(["normal", "full"]),
    weight=st.sampled_from(["mxfp4", "mxfp8"]),
)

# Knobs away from their defaults that change the code most, small enough to simulate quickly.
SAMPLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one warp, two slices": {
        "tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1, "stages": 3, "split_k": 2, "bias": True,
    },
    "mxfp8 with residual": {
        "tile_n": 32, "tile_m": 16, "warps_n": 2, "warps_m": 1, "stages": 3, "weight": "mxfp8", "residual": True,
        "fetch": "late",
    },
    "pair, two slices": {
        "tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1, "stages": 3, "split_k": 2, "bias": True,
        "residual": "pair",
    },
    "pair in fp16 beside mxfp8": {
        "tile_n": 32, "tile_m": 16, "warps_n": 2, "warps_m": 1, "stages": 3, "weight": "mxfp8", "dtype": "fp16",
        "residual": "pair",
    },
    "fp16 nibbles of any scale, three slices": {
        "tile_n": 16, "tile_m": 8, "tile_k": 128, "warps_n": 1, "warps_m": 1, "stages": 4, "split_k": 3,
        "dtype": "fp16", "encoding": "nibble", "scale_range": "full", "bias": True, "residual": True,
    },
    "mxfp8 in fp16, warps that are no power of two": {
        "tile_n": 96, "tile_m": 48, "tile_k": 128, "warps_n": 3, "warps_m": 2, "stages": 3, "weight": "mxfp8",
        "dtype": "fp16",
    },
    "mxfp8 of any scale": {
        "tile_n": 64, "tile_m": 24, "warps_n": 2, "warps_m": 1, "stages": 3, "weight": "mxfp8", "scale_range": "full",
    },
    "scales in halves": {"tile_n": 64, "tile_m": 16, "warps_n": 2, "warps_m": 1, "stages": 3, "scales": "halves"},
    "nibbles and scales in halves, k128": {
        "tile_n": 32, "tile_m": 24, "tile_k": 128, "warps_n": 1, "warps_m": 1, "stages": 3, "scales": "halves",
        "encoding": "nibble", "footprint": 60,
    },
    "five warps, k256": {"tile_n": 160, "tile_m": 8, "tile_k": 256, "warps_n": 5, "warps_m": 1, "stages": 3},
}  # fmt: skip


HOPPER: dict[str, dict[str, Any]] = {
    "cluster of two": {
        "tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1, "stages": 3, "split_k": 2, "exchange": "cluster",
        "bias": True,
    },
    "cluster of three, columns that it does not divide": {
        "tile_n": 64, "tile_m": 64, "warps_n": 2, "warps_m": 2, "stages": 3, "split_k": 3, "exchange": "cluster",
        "residual": True, "scales": "halves",
    },
    "cluster of four, some without a column": {
        "tile_n": 32, "tile_m": 8, "tile_k": 128, "warps_n": 2, "warps_m": 1, "stages": 3, "split_k": 4,
        "exchange": "cluster", "dtype": "fp16", "scale_range": "full", "footprint": 30,
    },
}  # fmt: skip


def variant(target: str, **knobs: Any) -> Variant:
    chip = arch.parse(target)
    return SPEC.variant(chip, **{"pdl": "pdl" in chip.features, **knobs})


@pytest.mark.nightly(by_day="each value")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("sample", SAMPLE)
def test_it_passes_its_cases_and_they_reach_its_code(
    sample: str, target: str, simulated: Callable[[Variant], Verdict]
) -> None:
    simulated(variant(target, **SAMPLE[sample]))


@pytest.mark.parametrize("sample", HOPPER)
def test_what_only_hopper_takes_passes_its_cases(sample: str, simulated: Callable[[Variant], Verdict]) -> None:
    simulated(variant("sm_90a", **HOPPER[sample]))


@settings(max_examples=examples(6))
@given(picked=variants(SPEC).filter(lambda v: v.knobs.tile_n * v.knobs.tile_m <= 4096 and v.knobs.split_k <= 4))
def test_any_legal_variant_computes_what_it_should(picked: Variant) -> None:
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    for case in KERNEL.cases(picked):
        error, _ = run(case, picked, ptx)
        assert error <= case.gate, case.name


@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_tile_of_y_is_made_once_whatever_the_order(group: int) -> None:
    """Bytes of Y that nobody writes, and two blocks that write the same, are faults of the simulator."""
    picked = variant("sm_121a", tile_n=16, tile_m=8, warps_n=1, warps_m=1, stages=3, group=group)
    ptx = nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch))
    for rows, n in ((37, 40), (8, 100), (41, 16)):
        case = make_case(picked, launch(picked.knobs, LinearProblem(rows, n, 64), 1), rows, n, 64, seed=rows)
        assert case.launch.blocks == -(-rows // 8) * -(-n // 16)
        error, _ = run(case, picked, ptx)
        assert error <= case.gate


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("scale_range", ["normal", "full"])
def test_every_e4m3_code_is_decoded_exactly(dtype: str, scale_range: str) -> None:
    """X is the identity, so that Y shows the weights; what is NaN in a block makes its rows NaN."""
    item, stored = formats.get("mxfp8"), {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[dtype]
    picked = variant(
        "sm_120a", tile_n=16, tile_m=32, warps_n=1, warps_m=1, stages=3, weight="mxfp8", dtype=dtype,
        scale_range=scale_range,
    )  # fmt: skip
    codes = np.stack([np.roll(np.arange(256), 37 * row) for row in range(16)]).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x38
    low, high = MXFP8_NORMAL_SCALES if dtype == "bf16" else (118, 130)
    scales = np.linspace(low, high, 16 * 8).astype(np.uint8).reshape(16, 8)
    wanted = formats.dequantize(codes, scales, item)
    words, packed = pack_mxfp8(codes, scales)
    found: list[np.ndarray] = []

    def check(outputs: Any) -> float:
        found.append(outputs[0])
        return 0.0

    case = Case(
        name="identity", launch=launch(picked.knobs, LinearProblem(256, 16, 256), 1),
        values={
            "x": Buffer(np.eye(256).astype(stored)),
            "weight": Buffer(words, constant=True), "scales": Buffer(packed, constant=True),
            "y": Buffer(np.empty((256, 16), stored), output=True),
            "epsilon": EPSILON, "rows": 256, "n": 16, "k": 256,
        },
        check=check, gate=0.0,
    )  # fmt: skip
    run(case, picked, nvrtc.compile_ptx(render(picked), nvrtc.options(picked.arch)))
    np.testing.assert_array_equal(found[0].T.astype(np.float64), wanted.astype(stored).astype(np.float64))


@settings(max_examples=examples(50))
@given(n=st.integers(1, 40), blocks=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_mxfp8_codes_lie_where_the_drawing_says(n: int, blocks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 0x7F, (n, 32 * blocks)).astype(np.uint8)
    scales = generator.integers(0, 256, (n, blocks)).astype(np.uint8)
    words, packed = pack_mxfp8(codes, scales)
    for row, k in ((0, 0), (n - 1, 32 * blocks - 1), (n // 2, 5), (n - 1, 16 * blocks)):
        half, g = divmod(row % 16, 8)
        block, inner = divmod(k % 64, 32)
        t, byte = divmod(inner, 8)
        word = int(words[row // 16, k // 64, block, 4 * g + t, 2 * half + byte // 4])
        assert word >> {0: 8, 1: 24, 2: 0, 3: 16}[byte % 4] & 0xFF == codes[row, k]
        assert int(packed[row // 16, k // 64, g]) >> 8 * (2 * half + block) & 0xFF == scales[row, k // 32]


def test_a_nan_code_gives_its_block_a_nan_scale_and_no_other() -> None:
    codes = np.full((16, 64), 0x38, np.uint8)
    codes[3, 40] = 0xFF
    _, packed = pack_mxfp8(codes, np.full((16, 2), 127, np.uint8))
    scales = packed.view(np.uint8).reshape(8, 2, 2)  # g, half, block
    assert scales[3, 0, 1] == 255 and (scales == 255).sum() == 1


@pytest.mark.nightly(by_day=("sm_80", "sm_90a", "sm_121a"))
@pytest.mark.parametrize("target", ARCHES, ids=str)
@settings(max_examples=examples(15))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 256))
@example(problem=LinearProblem(20_000, 300_000, 65_536), multiprocessors=1)
@example(problem=LinearProblem(1, 1, 32, weight="mxfp8"), multiprocessors=256)
def test_the_heuristic_and_the_candidates_are_legal_and_serve_the_problem(
    target: Arch, problem: LinearProblem, multiprocessors: int
) -> None:
    fixed = KERNEL.fixed(problem)
    found = KERNEL.candidates(problem, target, multiprocessors)
    assert found[0] == KERNEL.heuristic(problem, target, multiprocessors)
    assert 1 <= len(found) <= 60 and len({tuple(knobs.items()) for knobs in found}) == len(found)
    for knobs in found:
        assert not knobs.keys() & fixed.keys()
        picked = SPEC.variant(target, **fixed, **knobs)
        KERNEL.check(problem, picked)
        geometry = launch(picked.knobs, problem, multiprocessors)
        assert geometry.blocks * picked.knobs.tile_n * picked.knobs.tile_m >= problem.m * problem.n


@pytest.mark.parametrize("m", [8, 16])
def test_a_footprint_among_the_candidates_admits_an_even_spread_of_one_launch_or_two_and_no_more(m: int) -> None:
    chip, seen = arch.parse("sm_90a"), 0
    for n, k in ((5120, 2880), (2880, 4096)):
        problem = LinearProblem.on(chip, m=m, n=n, k=k)
        for tuned in KERNEL.candidates(problem, chip, 132):
            knobs = TileKnobs(**tuned)
            if knobs.footprint:
                geometry = launch(knobs, LinearProblem(m, n, k), 132)
                even = -(-geometry.blocks // 132)
                assert (228 * 1024) // (geometry.shared_bytes + 1024) in (even, 2 * even)
                seen += 1
    assert seen


@pytest.mark.parametrize("m", [16, 64])
def test_the_first_candidates_keep_their_contract(m: int, nightly: bool) -> None:
    """What tuning meets first does not spill, whatever was added to it since."""
    chip = arch.parse("sm_90a")
    problem = LinearProblem.on(chip, m=m, n=5120, k=2880)
    candidates = KERNEL.candidates(problem, chip, 132)[:12]
    first = (SPEC.variant(chip, **KERNEL.fixed(problem), **knobs) for knobs in candidates)
    keep_contracts(some(first, nightly))


def test_what_only_clusters_can_do_is_refused_elsewhere() -> None:
    with pytest.raises(KnobError, match="needs sm_90 or sm_100; on sm_121a use exchange='memory'"):
        variant("sm_121a", split_k=2, exchange="cluster")


def test_the_model_asks_more_time_for_more_work_and_less_on_a_faster_chip() -> None:
    shape = Shape(2, 16, 8, 256, 128, 64, 3, 1, 25_088, 1)
    hopper, spark = arch.parse("sm_90"), arch.parse("sm_121")
    times = [microseconds(shape, m, 5120, 2880, hopper, 132) for m in (128, 1024, 8192)]
    assert times[0] < times[1] < times[2] / 4
    assert microseconds(shape, 8192, 5120, 2880, spark, 48) > times[2]
    # No launch reads its weights faster than DRAM yields them.
    assert microseconds(shape, 1, 201_088, 2880, spark, 48) > 201_088 * 2880 * 17 / 32 / 240e3


@given(split_k=st.integers(2, 8), resident=st.integers(1, 4), multiprocessors=st.integers(1, 200))
def test_clusters_find_no_more_places_than_blocks_do_and_are_whole(
    split_k: int, resident: int, multiprocessors: int
) -> None:
    alone = Shape(2, 8, 4, 128, 64, 128, 4, split_k, 25_088, resident)
    together = dataclasses.replace(alone, clustered=True)
    assert places(alone, multiprocessors) == multiprocessors * resident
    assert places(together, multiprocessors) % split_k == 0
    assert places(together, multiprocessors) <= max(split_k, places(alone, multiprocessors))


def test_the_model_asks_two_rounds_of_clusters_that_do_not_fit_one() -> None:
    """20 clusters of 6: 16 multiprocessors hold two with a block each, and all find room with two."""
    chip = arch.parse("sm_90")
    one = Shape(2, 8, 8, 256, 64, 128, 3, 6, 50_176, 1, clustered=True)
    assert places(one, 132) < 120 <= places(dataclasses.replace(one, resident=2), 132)
    assert microseconds(one, 64, 5120, 2880, chip, 132) > microseconds(
        dataclasses.replace(one, resident=2), 64, 5120, 2880, chip, 132
    )
    # Measured on the card: of 33 clusters of 4, one found no place.
    assert places(dataclasses.replace(one, split_k=4), 132) >= 4 * 32


def test_candidates_of_few_rows_hold_clusters_and_those_of_many_none() -> None:
    chip = arch.parse("sm_90a")
    for m, wanted in ((16, 20), (64, 20), (512, 0)):
        found = KERNEL.candidates(LinearProblem.on(chip, m=m, n=5120, k=2880), chip, 132)
        assert sum(knobs.get("exchange") == "cluster" for knobs in found) == wanted


def test_a_call_for_a_tile_gets_it() -> None:
    asked = ((64, 128, None, None), (128, 256, 64, 3), (16, 160, 128, 5), (128, 128, 64, 4), (8, 144, 64, 3))
    for m, n, k, stages in asked:
        knobs = KERNEL.tile(m, n, k, stages)  # type: ignore[misc]
        picked = variant("sm_90", **knobs).knobs
        assert (picked.tile_m, picked.tile_n) == (m, n)
        assert (picked.tile_k, picked.stages) == (k or 64, stages or 4)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tile_n": 80, "warps_n": 4}, "tile_n=80 is not a multiple of 16 for each of warps_n=4; .* value is 64"),
        ({"tile_m": 24, "warps_m": 2}, "tile_m=24 is not a multiple of 8 for each of warps_m=2; .* value is 32"),
        ({"tile_n": 256, "warps_m": 1}, "256 sums a thread .* are over 128, .* use more warps or a smaller tile"),
        ({"blocks_per_sm": 8}, "blocks_per_sm=8 of 256 threads is over 1536 .* nearest legal value is 6"),
        ({"weight": "mxfp8", "encoding": "nibble"}, "'nibble' is of mxfp4 weights; .* leave it at 'rotated'"),
        ({"exchange": "cluster"}, "takes 2 to 8 blocks a tile, not split_k=1; use exchange='memory'"),
        ({"scales": "halves", "dtype": "fp16"}, "dtype='fp16' .*; use scales='bytes'"),
        ({"footprint": 50}, r"footprint=50 selects nothing: a block takes \d+ B anyway; leave it at 0"),
        ({"stages": 2}, "stages=2 is below its limit; the nearest legal value is 3"),
        ({"stages": 8, "tile_k": 128}, r"needs \d+ B of shared memory; .* the nearest legal value is stages=5"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_rule_and_a_remedy(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=said):
        variant("sm_90", **knobs)


def test_dependent_launch_is_refused_where_the_chip_has_none() -> None:
    with pytest.raises(KnobError, match=r"pdl=True needs sm_90 or newer; .*; use pdl=False"):
        variant("sm_89", pdl=True)


def test_problems_that_it_cannot_serve_are_refused_with_what_it_can() -> None:
    with pytest.raises(KnobError, match=r"linear\.tile does not take argmax=True, only argmax=False"):
        KERNEL.fixed(LinearProblem(argmax=True))
    with pytest.raises(KnobError, match="split_k=3 is over the 2 stages of k=96; the nearest legal value is 2"):
        KERNEL.check(LinearProblem(k=96), variant("sm_90", split_k=3))
    with pytest.raises(KnobError, match="a grid has at most 2\\^31 - 1; use larger tiles"):
        KERNEL.check(LinearProblem(m=2_000_000, n=300_000), variant("sm_90", tile_n=16, tile_m=8, warps_n=1, warps_m=1))


@pytest.mark.parametrize(
    ("problem", "knobs", "said"),
    [
        (LinearProblem(128, 16, 1 << 24), {"tile_m": 128}, None),
        (LinearProblem(128, 16, (1 << 24) + 32), {"tile_m": 128}, "tile_m=128 with k=16777248: .* use tile_m=127 or"),
        (LinearProblem(64, 16, (1 << 24) + 32), {"tile_m": 128}, None),
        (LinearProblem(1, 256, 1 << 25), {"tile_n": 256}, None),
        (LinearProblem(1, 256, (1 << 25) + 32), {"tile_n": 256}, "tile_n=256 with k=33554464: .* use tile_n=240 or"),
        (LinearProblem(1, 240, (1 << 25) + 32), {"tile_n": 256}, None),
        (LinearProblem(1, 256, 1 << 24, weight="mxfp8"), {"tile_n": 256, "weight": "mxfp8"}, None),
        (LinearProblem(1, 256, 1 << 25, weight="mxfp8"), {"tile_n": 256, "weight": "mxfp8"}, "use tile_n=128 or less"),
    ],
    ids=str,
)
def test_tiles_of_rows_beyond_32_bits_of_offsets_are_refused(
    problem: LinearProblem, knobs: dict[str, Any], said: str | None
) -> None:
    picked = variant("sm_90", **{"tile_m": 64, "tile_n": 64, "warps_n": 2, "warps_m": 2, **knobs})
    if said is None:
        KERNEL.check(problem, picked)
    else:
        with pytest.raises(KnobError, match=said):
            KERNEL.check(problem, picked)


ROWS = """
#include "jitmx/pipeline/stage_copy.cuh"
#include "jitmx/ptx/address.cuh"
using namespace jitmx;
extern "C" __global__ void rows(const void* x, u32 pitch, int last, u32* out) {
  __shared__ __align__(16) u8 stage[128 * 128];
  StageCopy<256, 128, 128> copy(static_cast<const u8*>(x) + last, pitch, 128, 128);
  copy.start([&](int row, int byte) { return shared_address(stage) + row * 128 + byte; });
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * 32; i += 256) out[i] = reinterpret_cast<u32*>(stage)[i];
}
"""


def test_128_rows_of_a_tile_of_x_are_found_as_far_apart_as_it_takes() -> None:
    """The ends of rows that are as long as `require_reach` lets them be; of 1.1 % more the last one's is not found."""
    ptx = nvrtc.compile_ptx(ROWS, nvrtc.options(arch.parse("sm_90a")))
    data = np.random.default_rng(0).integers(0, 1 << 32, (128, 32), np.uint32)

    def found(pitch: int) -> npt.NDArray[Any]:
        memory = Memory()
        x = memory.upload_far(data, np.arange(1, 129) * pitch - 128, 128 * pitch, "x")
        out = memory.allocate(data.nbytes, "out")
        arguments = struct.pack("=QIiQ", x, pitch, pitch - 128, out)
        simulate(ptx, (1, 1, 1), (256, 1, 1), arguments, memory)
        return memory.download(out, np.uint32, data.shape)

    assert np.array_equal(found(1 << 25), data)
    with pytest.raises(SimulationError, match="outside of it"):
        found((1 << 25) * 1011 // 1000 // 64 * 64)


@pytest.mark.parametrize(("weight", "most"), [("mxfp4", (1 << 28) - 64), ("mxfp8", (1 << 27) - 64)])
def test_rows_of_2_to_the_31_bytes_of_packed_tiles_are_refused_and_heuristics_serve_all_below(
    weight: str, most: int
) -> None:
    with pytest.raises(KnobError, match=f"k={most + 32} passes; use k={most} or less"):
        KERNEL.fixed(LinearProblem(k=most + 32, weight=weight))
    chip = arch.parse("sm_90")
    for k in (1 << 24, 3 << 24, 1 << 26, most):
        for m, n in ((1, 16), (9, 300), (128, 4096), (1 << 15, 32)):
            problem = LinearProblem(m, n, k, weight=weight)
            tuned = KERNEL.heuristic(problem, chip, 132)
            KERNEL.check(problem, SPEC.variant(chip, **tuned, **KERNEL.fixed(problem)))


@settings(max_examples=examples(40))
@given(picked=variants(SPEC))
def test_shared_memory_is_what_the_template_lays_out(picked: Variant) -> None:
    knobs: TileKnobs = picked.knobs
    claim(
        picked, f"kStageBytes == {stage_bytes(knobs)}", f"kStages == {knobs.stages}",
        f"kThreads == {tiles.threads(knobs)}",
    )  # fmt: skip
    assert shared_bytes(knobs) >= knobs.stages * stage_bytes(knobs)
    assert shared_bytes(knobs) >= (knobs.tile_m - 1) * (knobs.tile_n * 2 + 16) + knobs.tile_n * 2


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), split_k=st.integers(2, 16))
def test_scratch_holds_a_counter_a_tile_and_every_part(m: int, n: int, split_k: int) -> None:
    knobs = dataclasses.replace(variant("sm_90").knobs, split_k=split_k)
    geometry = launch(knobs, LinearProblem(m, n, 4096), 132)
    count = geometry.blocks // split_k
    assert count == -(-m // 128) * -(-n // 128)
    assert geometry.workspace == -(-count // 4) * 16 + geometry.blocks * 128 * 128 * 4
    assert launch(dataclasses.replace(knobs, split_k=1), LinearProblem(m, n, 4096), 132).workspace == 0


def modelled(target: str, **fields: Any) -> Variant:
    """What the cost model chooses for a problem."""
    chip = arch.parse(target)
    problem = LinearProblem.on(chip, **fields)
    return SPEC.variant(chip, **KERNEL.fixed(problem), **KERNEL.heuristic(problem, chip, chip.multiprocessors))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_the_machine_code_of_heuristics_keeps_its_contract(target: str, nightly: bool) -> None:
    kinds: list[dict[str, Any]] = [{}, {"weight": "mxfp8", "bias": True}]
    swept = [modelled(target, m=m, **kind) for m in (1, 16, 64, 512, 8192) for kind in kinds]
    keep_contracts(some(swept, nightly))


@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_100a"])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_parts_of_many_slices_keep_the_contract_on_targets_without_a_table(target: str, n: int, k: int) -> None:
    keep_contracts(modelled(target, m=m, n=n, k=k, bias=True) for m in (64, 128, 256))


@pytest.mark.parametrize(
    ("target", "m", "n", "k", "weight", "residual"),
    [
        ("sm_80", 129, 28672, 8192, "mxfp4", True), ("sm_80", 129, 28672, 8192, "mxfp8", True),
        ("sm_86", 1024, 4096, 14336, "mxfp4", True), ("sm_86", 80, 2880, 4096, "mxfp8", "pair"),
        ("sm_89", 128, 6144, 4096, "mxfp4", True), ("sm_89", 97, 4096, 14336, "mxfp8", True),
        ("sm_90a", 49, 8192, 28672, "mxfp8", True),
    ],
)  # fmt: skip
def test_three_or_four_parts_beside_a_residual_keep_the_contract(
    target: str, m: int, n: int, k: int, weight: str, residual: bool | str
) -> None:
    keep_contracts([modelled(target, m=m, n=n, k=k, weight=weight, residual=residual, bias=residual is True)])


@pytest.mark.parametrize("target", ["sm_120a", "sm_121a"])
def test_products_in_fp16_keep_their_contracts_where_a_table_is_for_bf16(target: str, nightly: bool) -> None:
    here = arch.parse(target)
    problems = [
        LinearProblem.on(here, m=m, n=n, k=k, dtype="fp16", bias=True)
        for m in (96, 200, 512, 1024) for n, k in ((5120, 2880), (2880, 4096))
    ]  # fmt: skip
    keep_contracts(some((choose("linear", problem, here).variant for problem in problems), nightly))


def test_the_family_knows_it() -> None:
    family = kernels.family("linear")
    assert family.spec("tile") is SPEC
    assert family.kernel("tile").max_rows is None
