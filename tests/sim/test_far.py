"""Far memory: allocations of many GB of which only pieces hold bytes, and launches of some blocks of a giant grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from assembly import launch
from jitmx import arch, kernels
from jitmx.errors import SimulationError
from jitmx.kernels.moe import far as moe_far
from jitmx.kernels.moe import stream
from jitmx.kernels.moe.arguments import Routing, make_case
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma import KERNEL as EXPERTS
from jitmx.registry.case import Buffer, Case
from jitmx.registry.spec import Variant
from jitmx.sim.memory import Memory
from jitmx.sim.proof import proof
from jitmx.sim.tensormap import TensorMap

Passes = Callable[[Variant, Case], None]

GIB = 1 << 30
AT = np.array([0, 5 * GIB, 6 * GIB + 64])

# A thread copies its word from q0 + d0 to q1 + d1.
COPY = """
mov.u32 r0, %tid.x; mul.wide.u32 d2, r0, 4;
add.s64 d0, q0, q2; add.s64 d0, d0, d2; ld.global.u32 r1, [d0];
add.s64 d1, q1, q3; add.s64 d1, d1, d2; st.global.u32 [d1], r1;
"""


def pieces(seed: int = 0) -> npt.NDArray[np.uint32]:
    """32 words for each of three places."""
    return np.random.default_rng(seed).integers(0, 1 << 32, (3, 32), np.uint32)


def test_pieces_are_where_they_were_put_and_cost_no_more_than_they_hold() -> None:
    memory, data = Memory(), pieces()
    address = memory.upload_far(data, AT, 7 * GIB, "x")
    assert memory.data.nbytes < 1 << 20
    assert np.array_equal(memory.download(address, np.uint32, data.shape, AT), data)


def test_a_kernel_copies_from_one_far_piece_to_another() -> None:
    memory, data = Memory(), pieces()
    x = memory.upload_far(data, AT, 7 * GIB, "x")
    y = memory.allocate_far(9 * GIB, np.array([8 * GIB]), 128, "y")
    launch(COPY, [x, y, 5 * GIB, 8 * GIB], memory)
    assert np.array_equal(memory.download(y, np.uint32, (1, 32), np.array([8 * GIB])), data[1:2])


def test_near_memory_grows_behind_far_pieces_without_moving_anything() -> None:
    memory, data = Memory(), pieces()
    x = memory.upload_far(data, AT, 7 * GIB, "x")
    near = memory.upload(np.arange(1 << 18, dtype=np.uint32), "near", writable=True)
    more = memory.upload_far(data + 1, AT, 7 * GIB, "more", writable=True)
    launch(COPY, [near, more, 4096, 5 * GIB], memory)
    assert np.array_equal(memory.download(x, np.uint32, data.shape, AT), data)
    assert np.array_equal(memory.download(near, np.uint32, (1 << 18,)), np.arange(1 << 18))
    assert np.array_equal(memory.download(more, np.uint32, (3, 32), AT)[1], np.arange(1024, 1056))


def test_what_lies_near_the_places_of_far_bytes_is_out_of_bounds() -> None:
    """Bytes of far pieces lie behind near ones in the arrays; no near address reaches them."""
    memory = Memory()
    x = memory.upload_far(pieces(), AT, 7 * GIB, "x")
    y = memory.allocate(128, "y")
    with pytest.raises(SimulationError, match="reads 4 bytes of global memory outside of it"):
        launch(COPY, [memory.base, y, memory.extent, 0], memory)
    assert x > memory.base + memory.extent


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (4 * GIB, r"outside of it, at 0x[0-9a-f]+ \(4294967296 bytes from the start of x of 7516192768 bytes"),
        (5 * GIB + 128, r"5368709248 bytes from the start of x"),
        (5 * GIB - 4, r"5368709116 bytes from the start of x"),
        (5 * GIB & 0xFFFFFFFF, r"1073741824 bytes from the start of x"),
        (-(4 * GIB), r"outside of it"),
        (5 * GIB + 2, r"which is misaligned"),
    ],
)
def test_what_no_piece_holds_is_an_error_that_names_the_true_place(offset: int, said: str) -> None:
    memory = Memory()
    x, y = memory.upload_far(pieces(), AT, 7 * GIB, "x"), memory.allocate(128, "y")
    with pytest.raises(SimulationError, match=said):
        launch(COPY, [x, y, offset % (1 << 64), 0], memory)


def test_one_lane_past_a_piece_is_found() -> None:
    memory = Memory()
    x, y = memory.upload_far(pieces(), AT, 7 * GIB, "x"), memory.allocate(128, "y")
    with pytest.raises(SimulationError, match=r"thread 31: reads 4 bytes .*\(5368709248 bytes from the start of x"):
        launch(COPY, [x, y, 5 * GIB + 4, 0], memory)


def test_inputs_are_read_only_and_outputs_start_uninitialised() -> None:
    memory = Memory()
    x = memory.upload_far(pieces(), AT, 7 * GIB, "x")
    y = memory.allocate_far(7 * GIB, AT, 128, "y")
    with pytest.raises(SimulationError, match="writes 4 bytes of read-only global memory at 0x7f0400000000"):
        launch(COPY, [x, x, 5 * GIB, 0], memory)
    with pytest.raises(SimulationError, match="of which byte 0 is uninitialised"):
        launch(COPY, [y, y, 0, 5 * GIB], memory)
    with pytest.raises(SimulationError, match=r"384 of 384 bytes at 0x[0-9a-f]+ .* were never written"):
        memory.download(y, np.uint32, (3, 32), AT)


def test_pieces_of_one_line_keep_the_bytes_between_them_out_of_bounds() -> None:
    memory = Memory()
    at = 5 * GIB + np.arange(4) * 24
    x = memory.upload_far(np.arange(16, dtype=np.uint32).reshape(4, 4), at, 6 * GIB, "x")
    body = "add.s64 d0, q0, q1; ld.global.u32 r1, [d0];"
    launch(body, [x, 5 * GIB + 24], memory)
    with pytest.raises(SimulationError, match="out of bounds"):
        launch(body, [x, 5 * GIB + 16], memory)


def test_generic_addresses_reach_far_and_shared_memory_in_one_access() -> None:
    memory, data = Memory(), pieces()
    x = memory.upload_far(data, AT, 7 * GIB, "x")
    y = memory.allocate_far(7 * GIB, AT, 128, "y")
    body = """
    mov.u32 r0, %tid.x; mul.wide.u32 d2, r0, 4;
    add.s64 d0, q0, q2; add.s64 d0, d0, d2;
    mov.u64 d3, tile; cvta.shared.u64 d3, d3; add.s64 d3, d3, d2;
    st.u32 [d3], r0; bar.warp.sync -1;
    and.b32 r2, r0, 1; setp.eq.u32 p0, r2, 0; selp.b64 d4, d0, d3, p0; ld.u32 r1, [d4];
    add.s64 d1, q1, q2; add.s64 d1, d1, d2; st.u32 [d1], r1;
    """
    launch(body, [x, y, 5 * GIB], memory, declare=".shared .align 16 .b8 tile[128];")
    found = memory.download(y, np.uint32, (1, 32), AT[1:2])[0]
    assert np.array_equal(found[::2], data[1, ::2]) and np.array_equal(found[1::2], np.arange(1, 32, 2))


def test_two_threads_that_write_one_far_word_race() -> None:
    memory = Memory()
    y = memory.allocate_far(9 * GIB, np.array([8 * GIB]), 128, "y")
    body = "mov.u32 r0, %tid.x; add.s64 d0, q0, q1; st.global.u32 [d0], r0;"
    with pytest.raises(SimulationError, match=f"writes global memory at {y + 8 * GIB:#x}, which thread 1 has written"):
        launch(body, [y, 8 * GIB], memory, block=2)


def test_a_block_that_reads_what_another_has_written_far_away_races_and_is_named_by_its_place_in_the_grid() -> None:
    memory = Memory()
    at = np.array([8 * GIB, 8 * GIB + 4096])
    y = memory.allocate_far(9 * GIB, at, 4, "y")
    body = """
    mov.u32 r0, %ctaid.x; setp.eq.u32 p0, r0, 700000; add.s64 d0, q0, q1;
    @p0 st.global.u32 [d0], r0;
    @!p0 ld.global.u32 r1, [d0];
    """
    with pytest.raises(
        SimulationError, match=r"block 700001, thread 0: reads .* which thread 0 of block 700000 has wri"
    ):
        launch(body, [y, 8 * GIB], memory, block=1, grid=1 << 20, blocks=[700000, 700001], resident_blocks=1)


def test_atomics_add_up_in_far_memory() -> None:
    memory = Memory()
    at = np.array([8 * GIB])
    y = memory.upload_far(np.zeros((1, 1), np.uint32), at, 9 * GIB, "y", writable=True)
    launch("add.s64 d0, q0, q1; red.global.add.u32 [d0], 1;", [y, 8 * GIB], memory, block=64, grid=2)
    assert memory.download(y, np.uint32, (1, 1), at)[0, 0] == 128


def test_a_dependent_launch_must_wait_for_far_memory_as_well() -> None:
    memory = Memory()
    y = memory.allocate_far(9 * GIB, np.array([8 * GIB]), 128, "y")
    body = "{wait} mov.u32 r0, %tid.x; mul.wide.u32 d2, r0, 4; add.s64 d0, q0, q1; add.s64 d0, d0, d2; {store}"
    store = "st.global.u32 [d0], r0;"
    launch(
        body.format(wait="griddepcontrol.wait;", store=store), [y, 8 * GIB], memory, programmatic=True
    )  # fmt: skip
    with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait"):
        launch(body.format(wait="", store=store), [y, 8 * GIB], memory, programmatic=True)


BULK = """
mov.u32 r0, tile; mov.u32 r1, bars;
mbarrier.init.shared::cta.b64 [r1], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [r1], 128;
{copy}
$wait: mbarrier.try_wait.parity.shared::cta.b64 p0, [r1], 0; @!p0 bra $wait;
ld.shared.u32 r2, [r0]; st.global.u32 [q1], r2;
fence.proxy.async; add.s64 d1, q1, q3;
cp.async.bulk.global.shared::cta.bulk_group [d1], [r0], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
TILE = ".shared .align 128 .b8 tile[128]; .shared .align 8 .b8 bars[8];"
PLAIN = "add.s64 d0, q0, q2; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0], [d0], 128, [r1];"


def test_bulk_copies_go_from_and_to_far_memory() -> None:
    memory, data = Memory(), pieces()
    x = memory.upload_far(data, AT, 7 * GIB, "x")
    y = memory.allocate_far(9 * GIB, np.array([0, 8 * GIB]), 128, "y")
    launch(BULK.format(copy=PLAIN), [x, y, 5 * GIB, 8 * GIB], memory, declare=TILE, block=1)
    assert np.array_equal(memory.download(y, np.uint32, (1, 32), np.array([8 * GIB])), data[1:2])
    with pytest.raises(SimulationError, match=r"reads 16 bytes .*\(5368709248 bytes from the start of x"):
        launch(BULK.format(copy=PLAIN), [x, y, 5 * GIB + 16, 8 * GIB], memory, declare=TILE, block=1)
    with pytest.raises(SimulationError, match=r"copies to 16 bytes .* from the start of y"):
        launch(BULK.format(copy=PLAIN), [x, y, 5 * GIB, 7 * GIB], memory, declare=TILE, block=1)


def test_tensor_copies_find_rows_beyond_2_to_the_32_bytes() -> None:
    memory, rows, row = Memory(), 1 << 26, 128
    at = (rows - 2 + np.arange(2)) * row
    data = np.random.default_rng(1).integers(0, 256, (2, row), np.uint8)
    x = memory.upload_far(data, at, rows * row, "x")
    y = memory.allocate_far(9 * GIB, np.array([0, 8 * GIB]), 128, "y")
    shown = memory.upload(np.frombuffer(TensorMap(x, 1, (row, rows), (row,), (row, 1)).encode(), np.uint8), "map")
    copy = (
        "cvt.u32.u64 r5, q2; mov.u32 r4, 0; cp.async.bulk.tensor.2d.shared::cluster.global.tile."
        "mbarrier::complete_tx::bytes [r0], [q0, {r4, r5}], [r1];"
    )
    body = BULK.replace("{copy}", copy)
    launch(body, [shown, y, rows - 1, 8 * GIB], memory, declare=TILE, block=1)
    assert np.array_equal(memory.download(y, np.uint8, (1, row), np.array([8 * GIB])), data[1:])
    with pytest.raises(SimulationError, match="from the start of x"):
        launch(body, [shown, y, rows - 3, 8 * GIB], memory, declare=TILE, block=1)


def test_blocks_of_a_grid_run_alone_and_see_its_whole_size() -> None:
    memory = Memory()
    out = memory.allocate(8, "out")
    body = """
    mov.u32 r0, %ctaid.x; mov.u32 r1, %nctaid.x; sub.u32 r2, r1, r0;
    sub.u32 r3, 2, r2; mul.wide.u32 d0, r3, 4; add.s64 d0, q0, d0; st.global.u32 [d0], r0;
    """
    last = (1 << 31) - 3
    report = launch(body, [out], memory, grid=last + 2, block=1, blocks=[last, last + 1])
    assert memory.download(out, np.uint32, (2,)).tolist() == [last, last + 1]
    assert report.thread_instructions < 64


@pytest.mark.parametrize(
    ("blocks", "cluster", "said"),
    [
        ([], 1, "must be some of it"),
        ([8], 1, "must be some of it"),
        ([-1], 1, "must be some of it"),
        ([3, 3], 1, "must be some of it"),
        ([1, 2], 2, "no whole clusters of 2"),
        ([2], 2, "no whole clusters of 2"),
        ([3, 2], 2, "no whole clusters of 2"),
    ],
)
def test_blocks_that_cannot_run_are_refused(blocks: list[int], cluster: int, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        launch("mov.u32 r0, 0;", [], Memory(), grid=8, cluster=cluster, blocks=blocks)


@pytest.mark.parametrize(("size", "at"), [(GIB, np.array([GIB - 4])), (GIB, np.array([-8])), (1 << 40, np.array([0]))])
def test_a_far_allocation_holds_its_pieces_or_is_refused(size: int, at: npt.NDArray[np.int64]) -> None:
    with pytest.raises(SimulationError, match="no far allocation"):
        Memory().allocate_far(size, at, 8, "x")


def test_a_buffer_has_an_offset_for_each_piece() -> None:
    item = Buffer(np.zeros((2, 3, 4), np.float32))
    assert item.nbytes == 96 and item.spread([0, 4096], 5 * GIB).nbytes == 5 * GIB
    assert item.spread(4096, 5 * GIB).at is not None
    with pytest.raises(ValueError, match=r"offsets \(3,\) of pieces"):
        item.spread([0, 1, 2], 5 * GIB)


def variant(family: str, name: str, target: str = "sm_121a", **knobs: Any) -> Any:
    """A kernel by name."""
    return kernels.family(family).spec(name).variant(arch.parse(target), **knobs)


def test_a_proof_names_the_blocks_that_run_and_where_pieces_lie() -> None:
    one = variant("bandwidth", "read")
    case = next(case for case in kernels.family("bandwidth").cases(one) if case.sparse)
    data = case.values["data"]
    assert isinstance(data, Buffer) and data.at is not None
    others = [
        dataclasses.replace(case, blocks=None),
        dataclasses.replace(case, values={**case.values, "data": data.spread(data.at - 16, data.size)}),
        dataclasses.replace(case, values={**case.values, "data": data.spread(data.at, data.size + 16)}),
    ]
    found = {proof(one, "ptx", [each]) for each in (case, *others)}
    assert len(found) == len(others) + 1


# Kernels without far cases, and why there are none.
NEAR = {
    "routing.sort": "one block or cluster goes through all ids",
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly if name == "moe" else ()) for name in kernels.families()]
)
def test_every_kernel_has_a_case_with_far_tensors(family: str) -> None:
    for spec in kernels.family(family).specs:
        target = (
            "sm_90a"
            if spec.name
            in ("stream", "slice", "splitk", "wgmma", "token", "gather", "gather_fp8", "wgmma_fp8", "fused_fp8")
            else "sm_121a"
        )
        fitting = {"routing.route": {"depth": 2}, "attention.decode": {"stages": 2}}
        one = spec.variant(arch.parse(target), **fitting.get(f"{family}.{spec.name}", {}))
        sizes = [
            item.nbytes
            for case in kernels.family(family).cases(one)
            for item in case.values.values()
            if isinstance(item, Buffer)
        ]
        assert (max(sizes) > 1 << 32) != (f"{family}.{spec.name}" in NEAR), spec.name


@pytest.mark.parametrize("product", ["up", "down"])
def test_an_expert_may_have_2_to_the_25_rows(product: str, passes: Passes) -> None:
    """A step of its rows, of 128 bytes each, is then 2^32 bytes."""
    assert moe_far.ONE_EXPERT * 2 > 1 << 25
    one = variant("moe", "wgmma", "sm_90a", product=product, tile_m=64, tile_n=128, stages=2, depth=2)
    case = next(case for case in EXPERTS.cases(one) if case.name.endswith("of one expert"))
    passes(one, case)


def test_biases_of_the_last_experts_of_a_layer_may_be_2_to_the_32_values_away(passes: Passes) -> None:
    """`moe.stream` has a row of h as wide as this takes in shared memory, beside rings that are short."""
    one = variant("moe", "stream", "sm_90a", columns=1, warps=16, chunk=2)
    problem = MoeProblem(1, 2, 1, 32, 65568)
    small = make_case(one, stream.launch(one.knobs, problem, 2), problem, Routing(np.array([[1]], np.int32)), 9)
    case = moe_far.far_experts(small)
    bias = case.values["b13"]
    assert isinstance(bias, Buffer) and bias.size > 1 << 33
    passes(one, case)
