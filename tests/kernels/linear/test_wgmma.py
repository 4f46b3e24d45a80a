"""`linear.wgmma`: heuristics are legal for every shape, the template agrees with Python, and its cases pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts import claim, keep_contracts, some
from jitmx import arch
from jitmx.build import Built
from jitmx.errors import KnobError
from jitmx.kernels.linear import wgmma
from jitmx.kernels.linear.layout import packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.warpgroups import tiles
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import TensorMap, encode
from jitmx.sim.verify import Verdict
from jitmx.toolchain import nvrtc
from strategies import assert_legal_and_serving, examples, linear_problems

LOOPS = (
    {},
    {"split_k": 2, "stages": 4, "bias": True},
    {"groups": 4, "tile_m": 64, "x": "image"},
    {"groups": 2, "tile_m": 256, "stages": 5, "schedule": "stream_k"},
    {"groups": 2, "tile_m": 176, "buffers": 3, "ring": 3},
    {"groups": 2, "tile_m": 176, "split_k": 2, "ring": 5, "schedule": "hybrid"},
)
SCHEDULES = ({}, {"split_k": 2}, {"schedule": "stream_k"}, {"schedule": "hybrid", "groups": 2, "split_k": 2})
HOPPER = arch.parse("sm_90")
SHARED = 232_448
PROBLEMS = linear_problems(wgmma.MAX_ROWS)


def variant(**knobs: Any) -> Variant:
    return wgmma.SPEC.variant(HOPPER, **knobs)


@settings(max_examples=examples(300))
@given(problem=PROBLEMS, multiprocessors=st.integers(1, 200))
@example(problem=LinearProblem(1, 1, 32), multiprocessors=132)
@example(problem=LinearProblem(1, 1, 32), multiprocessors=1)
@example(problem=LinearProblem(8192, 201_088, 2880), multiprocessors=132)
def test_the_heuristic_and_all_candidates_are_legal_and_serve_the_problem(
    problem: LinearProblem, multiprocessors: int
) -> None:
    assert_legal_and_serving(wgmma.KERNEL, problem, HOPPER, multiprocessors)


@given(problem=PROBLEMS, multiprocessors=st.integers(2, 200), schedule=st.sampled_from(SCHEDULES))
def test_blocks_of_a_launch_fit_the_device_at_once_and_none_is_without_work(
    problem: LinearProblem, multiprocessors: int, schedule: dict[str, Any]
) -> None:
    knobs = variant(**schedule, stages=4).knobs
    launch = wgmma.launch(knobs, problem, multiprocessors)
    assert launch.blocks <= multiprocessors
    assert launch.cluster == knobs.split_k and launch.blocks % launch.cluster == 0
    items, steps = tiles(knobs, problem.m, problem.n), packed_tiles(1, problem.k)[1]
    if knobs.schedule == "stream_k":
        items *= steps
    elif knobs.schedule == "hybrid":
        whole, left = divmod(-(-problem.n // 64), 2)
        items = -(-problem.m // knobs.tile_m) * (whole + 2 * left * steps)
    assert launch.blocks // launch.cluster <= items


@given(m=st.integers(1, wgmma.MAX_ROWS), k=st.integers(1, 512), tile_m=st.sampled_from([48, 128, 192]))
def test_the_workspace_of_an_image_holds_the_counters_and_x_padded_to_whole_tiles(m: int, k: int, tile_m: int) -> None:
    """Counters take the same room for every shape, so that what one launch leaves of X is no counter of another."""
    knobs, tokens = variant(tile_m=tile_m, x="image").knobs, -(-m // tile_m)
    image = tokens * tile_m * packed_tiles(1, 32 * k)[1] * 128
    counters = wgmma.workspace_bytes(knobs, m, 32 * k) - image
    assert counters == wgmma.workspace_bytes(knobs, 1, 32) - tile_m * 128
    assert 4 * (1 + 8 * tokens) <= counters


@given(problem=PROBLEMS, multiprocessors=st.integers(2, 200), schedule=st.sampled_from(SCHEDULES))
def test_boxes_of_the_tensor_map_fill_a_stage_and_the_driver_takes_them(
    problem: LinearProblem, multiprocessors: int, schedule: dict[str, Any]
) -> None:
    """`sim.tensormap` keeps the driver's rules."""
    knobs = variant(**{"tile_m": 256, "groups": 2, "stages": 3, **schedule}).knobs
    shown = wgmma.launch(knobs, problem, multiprocessors).maps["x_map"]
    assert shown.sizes == (problem.k, problem.m)
    box = TensorMap.decode(encode(shown, 4096))
    assert box.box_bytes * (2 if knobs.schedule == "hybrid" else 1) == knobs.tile_m * 128


@given(problem=PROBLEMS, multiprocessors=st.integers(2, 200), tile_m=st.sampled_from([32, 176, 208]))
def test_what_is_left_of_w_has_room_for_its_sums_and_counters(
    problem: LinearProblem, multiprocessors: int, tile_m: int
) -> None:
    """Units of work are at most one a block, or one for each half of a tile of rows of X where blocks are fewer."""
    knobs = variant(groups=2, tile_m=tile_m, split_k=2, schedule="hybrid", stages=3).knobs
    launch = wgmma.launch(knobs, problem, multiprocessors)
    halves, left = 2 * -(-problem.m // tile_m), -(-problem.n // 64) % 2
    units = halves * min(packed_tiles(1, problem.k)[1], max(1, launch.blocks // halves))
    assert 4 * 4 * halves <= 16_384
    assert launch.workspace >= left * (16_384 + units * 64 * tile_m // 2 * 4)
    assert (launch.workspace > 0) == bool(left)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "fp16"}, "does not take dtype='fp16', only 'bf16'; linear.tile takes both"),
        ({"scale_range": "full"}, "does not take scale_range='full', only 'normal'"),
        ({"norm": True}, "does not take norm=True, only norm=False"),
        ({"argmax": True}, "does not take argmax=True"),
        ({"activation": "mxfp8"}, "does not take activation='mxfp8', only activation='none'"),
        ({"weight": "mxfp8"}, "does not take weight='mxfp8', only weight='mxfp4'"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_what_it_does(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        wgmma.KERNEL.fixed(LinearProblem(64, **fields))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"groups": 4, "tile_m": 128},
            "takes about 128 registers a thread of 112; the nearest legal value is tile_m=96",
        ),
        ({"groups": 3, "tile_m": 192, "buffers": 3, "ring": 3}, "the nearest legal value is tile_m=176"),
        ({"buffers": 3, "ring": 4}, "the nearest legal value is ring=3"),
        ({"schedule": "stream_k", "split_k": 2}, "form no clusters; the nearest legal value is schedule='tiles'"),
        ({"schedule": "stream_k", "x": "image"}, "stream-K blocks read X as it is, and form no clusters; the nearest"),
        ({"schedule": "hybrid"}, "groups=3 and split_k=1: pairs of blocks share the rows of W that tiles of 128"),
        (
            {"schedule": "hybrid", "groups": 2, "split_k": 2, "x": "image"},
            "read X as it is; the nearest legal value is",
        ),
        ({"stages": 16, "tile_m": 192}, "the nearest legal value is stages="),
        ({"stages": 1}, "stages=1 is below its limit; the nearest legal value is 2"),
        ({"tile_m": 100}, "tile_m=100 is not one of"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_nearest_that_do(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError, match=re.escape(said)):
        variant(**knobs)


@pytest.mark.parametrize("knobs", [{"groups": 4, "tile_m": 96}, {"tile_m": 176, "buffers": 3, "ring": 3}])
def test_what_refusals_name_as_nearest_is_legal(knobs: dict[str, Any]) -> None:
    assert variant(**knobs).spec.shared_bytes(variant(**knobs).knobs) <= SHARED


def test_targets_without_wgmma_are_refused_with_what_to_use() -> None:
    with pytest.raises(KnobError, match=r"needs the instructions of sm_90a, which sm_121a lacks; use linear.tile"):
        wgmma.SPEC.variant(arch.parse("sm_121"))


def test_more_slices_than_steps_are_refused() -> None:
    with pytest.raises(KnobError, match=r"split_k=2 is over the 1 steps of k=64; the nearest legal value is 1"):
        wgmma.KERNEL.check(LinearProblem(64, 64, 64), variant(split_k=2, stages=4))


def test_a_tile_override_takes_rows_of_x_and_of_w_and_refuses_other_steps() -> None:
    assert wgmma.KERNEL.tile is not None
    assert wgmma.KERNEL.tile(128, 192, None, 4) == {"tile_m": 128, "groups": 3, "stages": 4}
    with pytest.raises(KnobError, match="takes steps of 64 k, not 128"):
        wgmma.KERNEL.tile(128, 192, 128, None)
    with pytest.raises(KnobError, match="takes tiles of 128, 192 or 256 rows of W, not 100; the nearest is 128"):
        wgmma.KERNEL.tile(128, 100, 64, None)


@pytest.mark.parametrize(
    "knobs",
    [
        {"x": "image"},
        {"split_k": 2, "stages": 3},
        {"groups": 2, "tile_m": 80, "ring": 5},
        {"groups": 2, "tile_m": 80, "ring": 5, "schedule": "hybrid", "split_k": 2},
    ],
    ids=str,
)
def test_shared_memory_and_registers_are_what_the_template_lays_out(knobs: dict[str, Any]) -> None:
    """The compiler evaluates the template's own struct."""
    one = variant(**knobs)
    registers = wgmma.multiplying_registers(one.knobs)
    assert registers % 8 == 0 and f"setmaxnreg_inc<{registers}>" in render(one)
    claim(one, f"sizeof(Shared) == {wgmma.shared_bytes(one.knobs)}")


def test_machine_code_keeps_its_contract(nightly: bool) -> None:
    """No spills, products in pairs, tensor copies."""
    sampled: list[dict[str, Any]] = [
        {},
        {"groups": 2, "tile_m": 256, "stages": 5, "bias": True},
        {"tile_m": 192},
        {"groups": 4, "tile_m": 64, "ring": 8},
        {"buffers": 3, "ring": 3, "pdl": False},
        {"split_k": 2, "stages": 4, "residual": True, "encoding": "nibble"},
        {"groups": 4, "tile_m": 64, "ring": 8, "x": "image"},
        {"split_k": 2, "stages": 4, "x": "image", "bias": True},
        {"groups": 2, "tile_m": 256, "stages": 5, "schedule": "stream_k"},
        {"groups": 2, "tile_m": 176, "split_k": 2, "ring": 5, "schedule": "hybrid", "bias": True, "residual": "pair"},
    ]
    keep_contracts(some((variant(**knobs) for knobs in sampled), nightly))


@pytest.mark.parametrize(
    "knobs",
    [
        {"groups": 2, "tile_m": 48, "ring": 2, "stages": 2},
        {"groups": 2, "tile_m": 64, "ring": 3, "buffers": 3, "stages": 3, "bias": True, "residual": True},
        {"tile_m": 80, "order": "x_first", "encoding": "nibble", "pdl": False, "residual": True},
        {"groups": 4, "tile_m": 64, "ring": 8},
        {"groups": 2, "tile_m": 64, "ring": 2, "stages": 2, "split_k": 2, "bias": True},
        {"groups": 2, "tile_m": 80, "split_k": 2, "order": "x_first", "residual": True},
        {"groups": 2, "tile_m": 80, "stages": 3, "bias": True, "residual": "pair"},
        {"groups": 2, "tile_m": 48, "ring": 2, "stages": 2, "schedule": "stream_k", "bias": True},
        {"tile_m": 80, "stages": 3, "schedule": "stream_k", "order": "x_first", "encoding": "nibble", "residual": True},
        {"groups": 2, "tile_m": 48, "ring": 2, "stages": 2, "split_k": 2, "schedule": "hybrid"},
        {"groups": 2, "tile_m": 80, "stages": 3, "schedule": "hybrid", "split_k": 2, "bias": True, "residual": "pair"},
        {"groups": 2, "tile_m": 64, "split_k": 2, "schedule": "hybrid", "order": "x_first", "encoding": "nibble"},
        {"groups": 2, "tile_m": 32, "ring": 2, "stages": 2, "x": "image"},
        {"tile_m": 80, "order": "x_first", "encoding": "nibble", "pdl": False, "residual": True, "x": "image"},
        {"groups": 2, "tile_m": 96, "split_k": 2, "order": "x_first", "bias": True, "x": "image"},
    ],
    ids=str,
)
def test_cases_pass_in_the_simulator(knobs: dict[str, Any], simulated: Callable[[Variant], Verdict]) -> None:
    simulated(variant(**knobs))


@pytest.mark.parametrize(
    ("knobs", "counters"),
    [
        pytest.param({"x": "image"}, 8192, marks=pytest.mark.nightly),
        ({"x": "image", "split_k": 2}, 8192),
        pytest.param({"schedule": "stream_k"}, 16384, marks=pytest.mark.nightly),
        ({"schedule": "hybrid", "split_k": 2}, 16384),
    ],
    ids=str,
)
def test_a_launch_leaves_its_counters_zero_and_the_next_may_use_its_workspace(
    knobs: dict[str, Any], counters: int
) -> None:
    """Three launches of two shapes over one workspace, large enough for both."""
    one = variant(groups=2, tile_m=64, ring=2, stages=2, **knobs)
    ptx = nvrtc.compile_ptx(render(one), nvrtc.options(HOPPER))
    cases = list(wgmma.KERNEL.cases(one))
    memory = Memory()
    size = max(case.launch.workspace for case in cases)
    workspace = memory.upload(np.zeros(size, np.uint8), "workspace", writable=True)
    for case in (cases[1], cases[3], cases[1]):
        buffers = case.buffers(one.arguments)
        inputs = {name: item.data for name, item in buffers.items() if not item.output and not item.scratch}
        addresses = {name: memory.upload(data, name) for name, data in inputs.items()}
        result = buffers["y"].data
        addresses |= {"workspace": workspace, "y": memory.allocate(result.nbytes, "y")}
        simulate(
            ptx, (case.launch.blocks, 1, 1), (one.threads, 1, 1), case.pack(one.arguments, addresses, encode), memory,
            entry=one.spec.entry, shared_bytes=case.launch.shared_bytes, cluster=case.launch.cluster,
        )  # fmt: skip
        assert case.check([memory.download(addresses["y"], result.dtype, result.shape)]) <= case.gate
        assert not memory.download(workspace, np.uint32, (counters // 4,)).any()


def the_loop_over_k_addresses_products_by_uniform_registers(built: Built, lines: list[str]) -> None:
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    loop = lines[products[4] : products[12]]
    assert not [line for line in loop if "R2UR" in line], built.variant.knobs


def test_the_loop_over_k_addresses_products_by_uniform_registers_alone() -> None:
    """Where the compiler takes the loop for divergent it moves every descriptor across, and products lose a tenth."""
    keep_contracts((variant(**knobs) for knobs in LOOPS), the_loop_over_k_addresses_products_by_uniform_registers)
