"""Asynchronous copies and mbarriers: their states, tensor maps, and small kernels that use them rightly or not."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.mbarrier import LIMIT, Mbarrier
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import TensorMap

Array = npt.NDArray[Any]


# The state machine


def test_a_phase_ends_with_its_last_arrival() -> None:
    barrier = Mbarrier(2)
    first, done = barrier.arrive()
    assert not done
    assert not barrier.passed(first)
    assert not barrier.passed_parity(0)
    assert barrier.passed_parity(1)
    assert barrier.arrive()[1]
    assert barrier.passed(first)
    assert barrier.passed_parity(0)
    assert (barrier.phase, barrier.pending) == (1, 2)


def test_a_phase_waits_for_its_bytes_in_whatever_order_they_are_told() -> None:
    barrier = Mbarrier(1)
    assert not barrier.expect(-96)  # the copy comes first
    assert not barrier.arrive(expect=128)[1]
    assert not barrier.passed_parity(0)
    assert barrier.expect(-32)
    assert (barrier.phase, barrier.transactions) == (1, 0)
    assert not barrier.arrive(expect=16)[1]
    assert barrier.expect(-16)
    assert barrier.passed_parity(1)


def test_dropped_arrivals_are_not_expected_again() -> None:
    barrier = Mbarrier(3)
    barrier.arrive(drop=True)
    assert barrier.arrive(2)[1]
    assert barrier.pending == 2


def test_what_the_isa_leaves_undefined_is_an_error() -> None:
    with pytest.raises(SimulationError, match="for 0 arrivals"):
        Mbarrier(0)
    barrier = Mbarrier(2)
    with pytest.raises(SimulationError, match="3 arrivals"):
        barrier.arrive(3)
    with pytest.raises(SimulationError, match="transaction count"):
        barrier.expect(LIMIT + 1)
    old, _ = Mbarrier(1).arrive()
    barrier.phase = 2
    with pytest.raises(SimulationError, match="phase 0"):
        barrier.passed(old)


# Tensor maps


def test_a_tensor_map_survives_its_encoding() -> None:
    box = TensorMap(4096, 2, (100, 50, 7), (256, 256 * 50), (64, 8, 2), 128)
    assert TensorMap.decode(box.encode()) == box
    assert len(box.encode()) == 128
    with pytest.raises(SimulationError, match="holds no tensor map"):
        TensorMap.decode(bytes(128))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"box": (65, 8)}, "multiple of 16"),
        ({"span": 64}, "must not exceed the swizzle"),
        ({"span": 128, "box": (32, 8)}, "narrower than the swizzle"),
        ({"strides": (200,)}, "strides"),
        ({"address": 4100}, "address"),
        ({"box": (8, 257)}, "1 to 256"),
        ({"sizes": (100,)}, "fit each other"),
    ],
)
def test_a_tensor_map_keeps_the_rules_of_the_driver(fields: dict[str, Any], rule: str) -> None:
    good = {"address": 4096, "item": 2, "sizes": (100, 50), "strides": (256,), "box": (64, 8), "span": 0}
    with pytest.raises(SimulationError, match=rule):
        TensorMap(**{**good, **fields})


def test_boxes_address_their_elements_innermost_first() -> None:
    box = TensorMap(0, 4, (10, 6, 3), (64, 384), (4, 2, 2))
    addresses, inside = box.elements((8, 5, 1))
    wanted = [(x, y, z) for z in (1, 2) for y in (5, 6) for x in (8, 9, 10, 11)]
    assert addresses.tolist() == [4 * x + 64 * y + 384 * z for x, y, z in wanted]
    assert inside.tolist() == [x < 10 and y < 6 and z < 3 for x, y, z in wanted]
    assert not box.elements((-4, 0, 0))[1].any()


@pytest.mark.parametrize(
    ("item", "start", "written", "refused"),
    [
        (2, (8, 0, 0), True, None),
        (2, (-8, -3, -1), False, None),
        (2, (96, 60, 9), False, None),
        (1, (8, 0, 0), False, "8 bytes into a row; it must be a multiple of 16"),
        (4, (5, 0, 0), True, "20 bytes into a row; it must be a multiple of 16"),
        (8, (-3, 0, 0), False, "-24 bytes into a row"),
        (2, (-8, 0, 0), True, "not start at a negative one"),
        (2, (8, 0, -1), True, "not start at a negative one"),
    ],
)
def test_a_tensor_copy_starts_where_hardware_lets_it(
    item: int, start: tuple[int, ...], written: bool, refused: str | None
) -> None:
    box = TensorMap(4096, item, (100, 50, 7), (1024, 1024 * 50), (16 // item, 8, 2))
    if refused is None:
        box.require_start(start, written=written)
    else:
        with pytest.raises(SimulationError, match=refused):
            box.require_start(start, written=written)


# Kernels

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, parameters: str = "", shared: int = 4096) -> str:
    listed = ", ".join(f".param .u64 {name}" for name in parameters.split())
    loads = "".join(
        f"ld.param.u64 %{name}, [{name}];\ncvta.to.global.u64 %{name}, %{name};\n" for name in parameters.split()
    )
    return (
        f"{HEAD}.visible .entry k({listed})\n{{\n.reg .pred %p<8>;\n.reg .b32 %r<16>;\n.reg .b64 %x<16>;\n"
        + "".join(f".reg .b64 %{name};\n" for name in parameters.split())
        + f".shared .align 1024 .b8 s[{shared}];\n.shared .align 8 .b8 b[64];\n{loads}{body}\nret;\n}}\n"
    )


def launch(source: str, threads: int, *arguments: int, memory: Memory) -> None:
    simulate(source, (1, 1, 1), (threads, 1, 1), struct.pack(f"<{len(arguments)}Q", *arguments), memory)


START = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, s;
mov.u32 %r3, b;
setp.ne.u32 %p1, %r1, 0;
"""
INIT = """
@%p1 bra ready;
mbarrier.init.shared::cta.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
ready:
bar.sync 0;
"""
WAIT = """
wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra wait;
"""
AGAIN = WAIT.replace("wait:", "second:").replace("bra wait", "bra second").replace("[%r3], 0", "[%r3], 1")
BULK = """
@%p1 bra issued;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%in], 256, [%r3];
issued:
"""
OUT = """
shl.b32 %r4, %r1, 2;
add.u32 %r5, %r2, %r4;
ld.shared.u32 %r6, [%r5];
cvt.u64.u32 %x1, %r4;
add.u64 %x2, %out, %x1;
st.global.u32 [%x2], %r6;
"""


def buffers(words: int = 64) -> tuple[Memory, Array, int, int]:
    memory = Memory()
    data = np.random.default_rng(1).integers(0, 1 << 32, words, dtype=np.uint32)
    return memory, data, memory.upload(data, "in"), memory.allocate(4 * words, "out")


def test_a_bulk_copy_arrives_for_those_who_wait() -> None:
    memory, data, source, target = buffers()
    launch(kernel(START + INIT + BULK + WAIT + OUT, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (64,)), data)


def test_a_thread_that_does_not_wait_for_a_bulk_copy_races_with_it_even_past_a_barrier() -> None:
    for between in ("", "bar.sync 0;\n"):
        memory, _, source, target = buffers()
        with pytest.raises(SimulationError, match="asynchronous operation has written"):
            launch(kernel(START + INIT + BULK + between + OUT, "in out"), 64, source, target, memory=memory)


def test_one_thread_may_wait_for_all_before_a_barrier() -> None:
    memory, data, source, target = buffers()
    wait = f"@%p1 bra waited;\n{WAIT}waited:\nbar.sync 0;\n"
    launch(kernel(START + INIT + BULK + wait + OUT, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (64,)), data)


def test_a_wait_for_more_bytes_than_come_is_an_error_and_not_a_hang() -> None:
    memory, _, source, target = buffers()
    short = BULK.replace("[%in], 256", "[%in], 240")
    with pytest.raises(SimulationError, match="polls for ever"):
        launch(kernel(START + INIT + short + WAIT + OUT, "in out"), 64, source, target, memory=memory)


def test_who_arrives_more_often_than_is_awaited_is_an_error_though_nothing_shows_it_yet() -> None:
    memory, _, source, target = buffers()
    more = "@%p1 bra arrived;\nmbarrier.arrive.shared::cta.b64 _, [%r3];\narrived:\n"
    two = INIT.replace("[%r3], 1", "[%r3], 2")
    launch(kernel(START + two + more + BULK + WAIT + OUT, "in out"), 64, source, target, memory=memory)
    with pytest.raises(SimulationError, match=r"ends within a phase, which lacks 1 of 2 arrivals"):
        launch(
            kernel(START + two + more + BULK + WAIT + more.replace("arrived", "again") + OUT, "in out"),
            64, source, target, memory=memory,
        )  # fmt: skip


def test_a_parity_is_0_or_1() -> None:
    memory, _, source, target = buffers()
    with pytest.raises(SimulationError, match="waits for parity 2 of the mbarrier"):
        launch(
            kernel(START + INIT + BULK + WAIT.replace("], 0;", "], 2;") + OUT, "in out"),
            64, source, target, memory=memory,
        )  # fmt: skip


def test_an_mbarrier_that_is_not_fenced_for_copies_is_an_error() -> None:
    memory, _, source, target = buffers(64)
    body = START + INIT.replace("fence.mbarrier_init.release.cluster;", "") + BULK + WAIT + OUT
    with pytest.raises(SimulationError, match=r"without fence\.mbarrier_init"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


def test_an_mbarrier_that_nobody_initialised_is_named() -> None:
    memory, _, source, target = buffers()
    with pytest.raises(SimulationError, match="no mbarrier"):
        launch(kernel(START + BULK + WAIT + OUT, "in out"), 64, source, target, memory=memory)


def test_an_arrival_that_is_not_ordered_after_the_init_races_with_it() -> None:
    memory, _, source, target = buffers()
    body = START + INIT.replace("bar.sync 0;", "") + "mbarrier.arrive.shared::cta.b64 _, [%r3];\n"
    with pytest.raises(SimulationError, match=r"initialised at PTX line .* with nothing between them"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


def test_a_second_copy_into_a_buffer_that_is_still_read_races() -> None:
    """The reader of the first copy says nothing before the second is issued."""
    memory, _, source, target = buffers()
    again = BULK.replace("issued", "again")
    body = START + INIT + BULK + WAIT + OUT + again
    with pytest.raises(SimulationError, match="copies to shared memory"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)
    memory, _, source, target = buffers()
    last = again + AGAIN
    launch(
        kernel(START + INIT + BULK + WAIT + OUT + "bar.sync 0;\n" + last, "in out"), 64, source, target, memory=memory
    )


AND_ANOTHER = WAIT + "bar.sync 0;\n" + BULK.replace("issued", "again")


@pytest.mark.parametrize(
    ("after", "fault"), [(WAIT, False), ("", True), (AND_ANOTHER + AGAIN, False), (AND_ANOTHER, True)]
)
def test_every_bulk_copy_is_waited_for_before_its_block_ends(after: str, fault: bool) -> None:
    memory, _, source, target = buffers()
    with pytest.raises(SimulationError, match="nobody waits for what this") if fault else contextlib.nullcontext():
        launch(kernel(START + INIT + BULK + after, "in out"), 64, source, target, memory=memory)


def test_a_bulk_copy_out_of_bounds_is_an_error() -> None:
    memory, _, source, target = buffers(60)
    with pytest.raises(SimulationError, match="out of bounds"):
        launch(kernel(START + INIT + BULK + WAIT, "in out"), 64, source, target, memory=memory)


@pytest.mark.parametrize(("bytes", "reason"), [(16, ""), (272, "out of bounds"), (24, "multiple of 16"), (0, "of 16")])
def test_a_bulk_prefetch_is_of_memory_that_a_copy_could_take(bytes: int, reason: str) -> None:
    memory, _, source, target = buffers()
    body = START + f"cp.async.bulk.prefetch.L2.global [%in], {bytes};\n"
    with pytest.raises(SimulationError, match=reason) if reason else contextlib.nullcontext():
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


FILL = """
shl.b32 %r4, %r1, 2;
add.u32 %r5, %r2, %r4;
st.shared.u32 [%r5], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra sent;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%r2], 256;
cp.async.bulk.commit_group;
"""


def test_a_bulk_store_writes_what_shared_memory_holds() -> None:
    memory, _, source, target = buffers()
    launch(kernel(START + FILL + "cp.async.bulk.wait_group 0;\nsent:\n", "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (64,)), np.arange(64))


def test_stores_reach_a_bulk_store_only_past_a_proxy_fence() -> None:
    memory, _, source, target = buffers()
    body = START + FILL.replace("fence.proxy.async.shared::cta;", "") + "cp.async.bulk.wait_group 0;\nsent:\n"
    with pytest.raises(SimulationError, match=r"without fence\.proxy\.async"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


def test_a_thread_that_ends_before_its_bulk_store_has_read_is_an_error() -> None:
    memory, _, source, target = buffers()
    with pytest.raises(SimulationError, match=r"ends without cp\.async\.bulk\.wait_group"):
        launch(kernel(START + FILL + "sent:\n", "in out"), 64, source, target, memory=memory)


@pytest.mark.parametrize("fence", ["", *(f"fence.proxy.async{space};" for space in ("", ".global", ".shared::cta"))])
def test_stores_to_global_memory_reach_a_bulk_copy_only_past_a_proxy_fence(fence: str) -> None:
    memory, _, _, target = buffers(64)
    source = memory.allocate(256)
    store = "shl.b32 %r4, %r1, 2;\ncvt.u64.u32 %x1, %r4;\nadd.u64 %x1, %in, %x1;\nst.global.u32 [%x1], %r1;\n"
    source_text = kernel(START + store + fence + INIT + BULK + WAIT + OUT, "in out")
    if "shared" in fence or not fence:
        with pytest.raises(SimulationError, match=r"reads global memory through .* without fence\.proxy\.async"):
            launch(source_text, 64, source, target, memory=memory)
    else:
        launch(source_text, 64, source, target, memory=memory)


def test_a_source_that_is_overwritten_before_the_store_has_read_it_races() -> None:
    for wait, good in (("", False), ("cp.async.bulk.wait_group.read 0;\n", True)):
        memory, _, source, target = buffers()
        source_text = kernel(START + FILL + wait + "sent:\nbar.sync 0;\nst.shared.u32 [%r5], %r1;\n", "in out")
        if good:
            launch(source_text, 64, source, target, memory=memory)
        else:
            with pytest.raises(SimulationError, match="asynchronous operation has read"):
                launch(source_text, 64, source, target, memory=memory)


ASYNC = """
shl.b32 %r4, %r1, 4;
add.u32 %r5, %r2, %r4;
cvt.u64.u32 %x1, %r4;
add.u64 %x2, %in, %x1;
cp.async.cg.shared.global [%r5], [%x2], 16{size};
cp.async.commit_group;
"""
NEIGHBOUR = """
xor.b32 %r7, %r1, 33;
shl.b32 %r7, %r7, 4;
add.u32 %r8, %r2, %r7;
ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r8];
cvt.u64.u32 %x3, %r7;
add.u64 %x4, %out, %x3;
st.global.v4.u32 [%x4], {%r9, %r10, %r11, %r12};
"""


def test_cp_async_copies_for_the_whole_block_after_wait_and_barrier() -> None:
    memory, data, source, target = buffers(256)
    body = START + ASYNC.format(size="") + "cp.async.wait_group 0;\nbar.sync 0;\n" + NEIGHBOUR
    launch(kernel(body, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (256,)), data)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        ("bar.sync 0;\n", "under way of an asynchronous copy"),
        ("cp.async.wait_group 1;\nbar.sync 0;\n", "under way of an asynchronous copy"),
        ("cp.async.wait_group 0;\n", "has written"),
        ("bar.sync 0;\ncp.async.wait_all;\n", "has written"),
    ],
)
def test_cp_async_read_too_early_is_an_error(between: str, message: str) -> None:
    memory, _, source, target = buffers(256)
    with pytest.raises(SimulationError, match=message):
        launch(kernel(START + ASYNC.format(size="") + between + NEIGHBOUR, "in out"), 64, source, target, memory=memory)


@pytest.mark.parametrize("ordered", ["", "bar.sync 0;\n", "cp.async.wait_group 1;\nbar.sync 0;\n"])
@pytest.mark.parametrize("lane", [0, 33])
def test_what_is_written_where_a_cp_async_is_under_way_may_be_lost(ordered: str, lane: int) -> None:
    write = f"xor.b32 %r7, %r1, {lane};\nshl.b32 %r7, %r7, 4;\nadd.u32 %r8, %r2, %r7;\nst.shared.u32 [%r8+8], %r1;\n"
    body = START + ASYNC.format(size="") + ordered + write
    memory, _, source, target = buffers(256)
    waited = body.replace(write, "cp.async.wait_all;\nbar.sync 0;\n" + write)
    launch(kernel(waited, "in out"), 64, source, target, memory=memory)
    with pytest.raises(SimulationError, match=r"writes 4 bytes .* to which an asynchronous copy is still under way"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


def test_two_copies_of_one_thread_to_one_place_need_a_wait_between() -> None:
    memory, _, source, target = buffers(256)
    twice = START + ASYNC.format(size="") + "{}" + ASYNC.format(size="") + "cp.async.wait_all;\n"
    launch(kernel(twice.replace("{}", "cp.async.wait_all;\n"), "in out"), 64, source, target, memory=memory)
    with pytest.raises(SimulationError, match="to which an asynchronous copy is still under way"):
        launch(kernel(twice.replace("{}", ""), "in out"), 64, source, target, memory=memory)


def test_a_thread_that_has_copied_nothing_arrives_at_an_mbarrier_beside_copies_of_others() -> None:
    memory, data, source, target = buffers(256)
    start = INIT.replace("[%r3], 1", "[%r3], 64")
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];\n"
    halves = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra later;\n" + arrive + "bra on;\nlater:\n" + arrive + "on:\n"
    copies = "setp.lt.u32 %p1, %r1, 32;\n@!%p1 bra none;\n" + ASYNC.format(size="") + "none:\n"
    read = "setp.lt.u32 %p1, %r1, 32;\n@!%p1 bra sent;\n" + NEIGHBOUR.replace("%r1, 33", "%r1, 1") + "sent:\n"
    launch(kernel(START + start + copies + halves + WAIT + read, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (128,)), data[:128])


def test_cp_async_fills_what_the_source_lacks_with_zeros() -> None:
    memory, data, source, target = buffers(256)
    size = "and.b32 %r13, %r1, 1;\nshl.b32 %r13, %r13, 3;\n"
    body = START + size + ASYNC.format(size=", %r13") + "cp.async.wait_all;\nbar.sync 0;\n" + NEIGHBOUR
    launch(kernel(body, "in out"), 64, source, target, memory=memory)
    wanted = data.reshape(64, 4).copy()
    wanted[0::2] = 0
    wanted[:, 2:] = 0
    np.testing.assert_array_equal(memory.download(target, np.uint32, (64, 4)), wanted)


def test_cp_async_arrives_at_an_mbarrier() -> None:
    memory, data, source, target = buffers(256)
    start = INIT.replace("[%r3], 1", "[%r3], 64")
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];\n"
    body = START + start + ASYNC.format(size="") + arrive + WAIT + NEIGHBOUR
    launch(kernel(body, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (256,)), data)


def test_an_mbarrier_that_copies_arrive_at_orders_even_their_own_thread() -> None:
    memory, _, source, target = buffers(256)
    start = INIT.replace("[%r3], 1", "[%r3], 64")
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];\n"
    body = START + start + ASYNC.format(size="") + arrive + NEIGHBOUR.replace("%r1, 33", "%r1, 0")
    with pytest.raises(SimulationError, match="an asynchronous operation has written"):
        launch(kernel(body, "in out"), 64, source, target, memory=memory)


def test_arrivals_of_copies_that_are_not_counted_leave_those_of_threads() -> None:
    memory, data, source, target = buffers(256)
    start = INIT.replace("[%r3], 1", "[%r3], 64")
    both = "cp.async.mbarrier.arrive.shared::cta.b64 [%r3];\nmbarrier.arrive.shared::cta.b64 _, [%r3];\n"
    body = START + start + ASYNC.format(size="") + both + WAIT + NEIGHBOUR
    launch(kernel(body, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (256,)), data)


def test_arrivals_order_what_threads_wrote_before_them() -> None:
    """A state from arrive, waited for with test_wait: no bar.sync after the init."""
    body = (
        START
        + INIT.replace("[%r3], 1", "[%r3], 64")
        + "shl.b32 %r4, %r1, 4;\nadd.u32 %r5, %r2, %r4;\nst.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};\n"
        + "mbarrier.arrive.shared::cta.b64 %x5, [%r3];\n"
        + "again:\nmbarrier.test_wait.shared::cta.b64 %p3, [%r3], %x5;\n@!%p3 bra again;\n"
        + NEIGHBOUR
    )
    memory, _, source, target = buffers(256)
    launch(kernel(body, "in out"), 64, source, target, memory=memory)
    np.testing.assert_array_equal(memory.download(target, np.uint32, (64, 4))[:, 0], np.arange(64))


TENSOR = """
@%p1 bra issued;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {bytes};
mov.u32 %r14, {x};
mov.u32 %r15, {y};
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%map, {{%r14, %r15}}], [%r3];
issued:
"""
DUMP = """
shl.b32 %r4, %r1, 4;
mov.u32 %r6, 0;
more:
add.u32 %r5, %r2, %r4;
ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r5];
cvt.u64.u32 %x3, %r4;
add.u64 %x4, %out, %x3;
st.global.v4.u32 [%x4], {%r9, %r10, %r11, %r12};
add.u32 %r4, %r4, 1024;
setp.lt.u32 %p4, %r4, BYTES;
@%p4 bra more;
"""
CHUNKS = {0: [0] * 8, 32: [0, 1] * 4, 64: [0, 1, 2, 3] * 2, 128: list(range(8))}


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (24, 28), (-8, -3)])
def test_a_tensor_copy_lays_rows_out_in_swizzled_chunks_with_zeros_outside(span: int, x: int, y: int) -> None:
    tensor = np.random.default_rng(2).integers(0, 1 << 16, (40, 40)).astype(np.uint16)
    memory = Memory()
    width, height = (span or 128) // 2, 16
    box = TensorMap(memory.upload(tensor, "tensor"), 2, (40, 40), (80,), (width, height), span)
    where, target = memory.upload(np.frombuffer(box.encode(), np.uint8), "map"), memory.allocate(box.box_bytes, "out")
    assert memory.base % 128 == 0
    body = START + INIT + TENSOR.format(bytes=box.box_bytes, x=x, y=y) + WAIT
    body += DUMP.replace("BYTES", str(box.box_bytes)) if box.box_bytes >= 1024 else DUMP.replace("BYTES", "0")
    threads = min(64, box.box_bytes // 16)
    launch(kernel(body, "map out"), threads, where, target, memory=memory)
    padded = np.zeros((160, 160), np.uint16)
    padded[40:80, 40:80] = tensor
    wanted = padded[40 + y : 40 + y + height, 40 + x : 40 + x + width]
    got = memory.download(target, np.uint16, (box.box_bytes // 16, 8))
    for row in range(height):
        for chunk in range(width // 8):
            at = row * width // 8 + chunk
            line, position = at // 8, at % 8
            # Within a line of 128 bytes, chunk c of the pattern moves to c XOR the line's number within the pattern.
            moved = line * 8 + (position ^ (CHUNKS[span][line % 8] if span else 0))
            np.testing.assert_array_equal(got[moved], wanted[row, 8 * chunk : 8 * chunk + 8])


def stored(x: int, y: int, across: int = 40) -> tuple[Any, Any]:
    """A tensor of 6 rows of `across`, before and after a box of 4 rows of 32 was written to it at x and y."""
    memory = Memory()
    before = np.full((6, 48), 7, np.uint32)
    address = memory.upload(before, "tensor", writable=True)
    box = TensorMap(address, 4, (across, 6), (192,), (32, 4), 128)
    where = memory.upload(np.frombuffer(box.encode(), np.uint8), "map")
    body = START + (
        "shl.b32 %r4, %r1, 2;\nadd.u32 %r5, %r2, %r4;\nst.shared.u32 [%r5], %r1;\n"
        "bar.sync 0;\nfence.proxy.async;\n@%p1 bra sent;\n"
        f"mov.u32 %r14, {x};\nmov.u32 %r15, {y};\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {%r14, %r15}], [%r2];\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nsent:\n"
    )
    launch(kernel(body, "map out"), 128, where, address, memory=memory)
    return before, memory.download(address, np.uint32, (6, 48))


@pytest.mark.parametrize("across", [40, 39, 37])  # a card writes the 16 bytes in which a row ends whole
def test_a_tensor_store_writes_only_inside_the_tensor_and_to_the_end_of_16_bytes(across: int) -> None:
    before, after = stored(16, 4, across)
    wanted = before.copy()
    for row in range(2):
        for column in range(24):
            chunk = column // 4 ^ row
            wanted[4 + row, 16 + column] = row * 32 + chunk * 4 + column % 4
    np.testing.assert_array_equal(after, wanted)


@pytest.mark.parametrize(("x", "y", "said"), [(17, 4, "multiple of 16 bytes"), (16, -1, "at a negative one")])
def test_a_tensor_store_from_where_hardware_traps_is_refused(x: int, y: int, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        stored(x, y)
