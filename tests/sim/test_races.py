"""Races are found and named; what a barrier, a warp's barrier or a flag orders is none."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory

TILE = ".shared .align 16 .b8 tile[4096];"
HERE = "mov.u32 r0, %tid.x; shl.b32 r1, r0, 2; mov.u32 r2, tile; add.u32 r3, r2, r1;\n"
# The word of the thread `distance` further on, in a ring of `threads`.
NEXT = "add.u32 r4, r0, {distance}; rem.u32 r4, r4, {threads}; shl.b32 r4, r4, 2; add.u32 r5, r2, r4;\n"


def exchange(order: str, *, threads: int = 64, distance: int = 1, grid: int = 1) -> None:
    body = HERE + NEXT.format(distance=distance, threads=threads)
    body += f"st.shared.u32 [r3], r0;\n{order}\nld.shared.u32 r6, [r5];"
    launch(body, [], Memory(), declare=TILE, block=threads, grid=grid)


def test_a_missing_barrier_names_both_threads_and_both_lines() -> None:
    with pytest.raises(SimulationError) as caught:
        exchange("")
    text = str(caught.value)
    assert "k, PTX line 18, block 0, thread 0: reads shared memory at 0x404" in text
    assert "which thread 1 has written at PTX line 16" in text


def test_a_barrier_orders_the_block() -> None:
    exchange("bar.sync 0;", distance=40, grid=3)


def test_a_barrier_of_the_warp_orders_its_warp_only() -> None:
    exchange("bar.warp.sync -1;", threads=32)
    with pytest.raises(SimulationError, match=r"thread 31: reads .* which thread 32 has written"):
        exchange("bar.warp.sync -1;", threads=64)


def test_a_shuffle_is_no_barrier() -> None:
    with pytest.raises(SimulationError, match=r"thread 0: reads .* which thread 1 has written"):
        exchange("shfl.sync.idx.b32 r9, r0, 0, 31, -1;", threads=32)


def test_a_named_barrier_orders_those_who_come_to_it() -> None:
    body = (
        HERE
        + NEXT.format(distance=1, threads=64)
        + ("setp.ge.u32 p0, r0, 64; @p0 bra $end; st.shared.u32 [r3], r0;\nbar.sync 3, 64;\nld.shared.u32 r6, [r5];\n")
    )
    launch(body + "$end:", [], Memory(), declare=TILE, block=128)
    # The other two warps meet at a barrier of their own, which orders nothing for these.
    late = (
        HERE
        + """setp.lt.u32 p0, r0, 64; @p0 bra $first;
    bar.sync 2, 64; ld.shared.u32 r6, [tile]; bra $end;
    $first: setp.eq.u32 p1, r0, 0; @p1 st.shared.u32 [tile], r0; bar.sync 1, 64;
    $end:"""
    )
    with pytest.raises(
        SimulationError, match=r"thread 0: writes .*which thread \d+ has read|reads .*which thread 0 has written|uninit"
    ):
        launch(late, [], Memory(), declare=TILE, block=128)


def test_readers_must_be_done_before_the_word_is_written_again() -> None:
    body = (
        HERE
        + NEXT.format(distance=33, threads=64)
        + ("st.shared.u32 [r3], r0; bar.sync 0;\nld.shared.u32 r6, [r5];\n{order}\nst.shared.u32 [r3], r6;")
    )
    launch(body.replace("{order}", "bar.sync 0;"), [], Memory(), declare=TILE, block=64)
    with pytest.raises(SimulationError, match=r"writes shared memory at .* which thread \d+ has read at PTX line 17"):
        launch(body.replace("{order}", ""), [], Memory(), declare=TILE, block=64)


ALL, OTHER, WRITER = (f"{guard}ld.shared.u32 r6, [tile];\n" for guard in ("", "@p1 ", "@p0 "))


@pytest.mark.parametrize(
    ("readers", "writer", "other"),
    [
        (ALL, 3, 31),
        (ALL, 31, 30),
        (ALL + WRITER, 3, 31),
        (ALL + WRITER + WRITER, 31, 30),
        (OTHER, 3, 9),
        (OTHER + WRITER, 3, 9),
        (WRITER + OTHER + WRITER + "@p0 ld.shared.u8 r6, [tile];\n", 3, 9),
    ],
)
def test_a_writer_that_has_read_the_word_itself_hides_no_other_reader_of_its_warp(
    readers: str, writer: int, other: int
) -> None:
    body = f"{HERE} setp.eq.u32 p0, r0, {writer}; setp.eq.u32 p1, r0, 9; @p1 st.shared.u32 [tile], r0; bar.sync 0;\n"
    write = "@p0 st.shared.u32 [tile], r0;"
    launch(body + readers + "bar.warp.sync -1;" + write, [], Memory(), declare=TILE, block=32)
    with pytest.raises(SimulationError, match=rf"thread {writer}: writes .* which thread {other} has read"):
        launch(body + readers + write, [], Memory(), declare=TILE, block=32)


def test_the_only_reader_of_a_word_may_write_it() -> None:
    launch(HERE + "st.shared.u32 [r3], r0;\nld.shared.u32 r6, [r3];\nld.shared.u32 r6, [r3];\nst.shared.u32 [r3], r6;",
           [], Memory(), declare=TILE, block=64)  # fmt: skip


@pytest.mark.parametrize("arriving", ["setp.eq.u32 p2, r0, 0;", "elect.sync _|p2, -1;"])
def test_an_arrival_speaks_for_its_warp_behind_the_warp_s_barrier_and_else_for_its_thread(arriving: str) -> None:
    """One warp stores, one of its lanes arrives at an mbarrier, and the other warp waits and reads."""
    body = (
        HERE
        + """setp.ne.u32 p1, r0, 0; @p1 bra $made; mbarrier.init.shared.b64 [full], 1;
    $made: bar.sync 0; setp.ge.u32 p0, r0, 32; @p0 bra $reader;
    st.shared.u32 [r3], r0;
    {order}
    {arriving} @!p2 bra $end; mbarrier.arrive.shared.b64 _, [full]; bra $end;
    $reader: mbarrier.try_wait.parity.shared.b64 p3, [full], 0; @!p3 bra $reader;
    ld.shared.u32 r6, [r3 + -128];
    $end:"""
    )
    declare = TILE + ".shared .align 8 .b64 full;"
    ordered = body.replace("{arriving}", arriving)
    launch(ordered.replace("{order}", "bar.warp.sync -1;"), [], Memory(), declare=declare, block=64)
    with pytest.raises(SimulationError, match=r"thread 33: reads shared memory at .*, which thread 1 has written"):
        launch(ordered.replace("{order}", ""), [], Memory(), declare=declare, block=64)


def test_two_threads_that_write_one_word_race() -> None:
    with pytest.raises(
        SimulationError, match=r"thread \d+: writes shared memory at 0x400, which thread \d+ has written"
    ):
        launch("mov.u32 r0, %tid.x; st.shared.u32 [tile], r0;", [], Memory(), declare=TILE, block=2)


def test_neighbouring_bytes_are_no_race() -> None:
    memory = Memory()
    out = memory.allocate(64)
    body = "mov.u32 r0, %tid.x; cvt.u64.u32 d0, r0; add.s64 d0, d0, q0; st.global.u8 [d0], r0;"
    launch(body, [out], memory, block=64)
    assert memory.download(out, "u1", (64,)).tolist() == list(range(64))


def test_two_blocks_that_write_one_word_race_whether_or_not_they_are_resident_together() -> None:
    for resident in (1, 2):
        memory = Memory()
        out = memory.allocate(4)
        with pytest.raises(
            SimulationError, match=r"block (\d), thread 0: writes global .* thread 0 of block (?!\1)\d has written"
        ):
            launch("mov.u32 r0, 1;\nst.global.u32 [q0], r0;", [out], memory, grid=2, block=1, resident_blocks=resident)


def test_atomics_do_not_race_with_each_other_but_with_plain_access() -> None:
    memory = Memory()
    out = memory.upload(np.zeros(1, "u4"), writable=True)
    launch("red.global.add.u32 [q0], 1;", [out], memory, grid=4, block=96)
    assert memory.download(out, "u4", (1,))[0] == 384
    with pytest.raises(SimulationError, match=r"race|which thread"):
        launch(
            "mov.u32 r0, %tid.x; setp.eq.u32 p0, r0, 0; @p0 red.global.add.u32 [q0], 1;\n@!p0 ld.global.u32 r1, [q0];",
            [out],
            memory,
            block=2,
        )


FLAG = """mov.u32 r0, %ctaid.x; setp.eq.u32 p0, r0, 1; @p0 bra $wait;
mov.u32 r1, 77; st.global.u32 [q0], r1;
{fence}
atom.global.exch.b32 r2, [q1], 1; bra $end;
$wait: ld.acquire.gpu.global.u32 r3, [q1]; setp.eq.u32 p1, r3, 0; @p1 bra $wait;
ld.global.u32 r4, [q0]; st.global.u32 [q2], r4;
$end:"""


def test_a_flag_after_a_fence_orders_two_blocks_and_one_without_does_not() -> None:
    for fence in ("fence.acq_rel.gpu;", "membar.gl;"):
        memory = Memory()
        addresses = [memory.allocate(4), memory.upload(np.zeros(1, "u4"), writable=True), memory.allocate(4)]
        launch(FLAG.replace("{fence}", fence), addresses, memory, grid=2, block=1)
        assert memory.download(addresses[2], "u4", (1,))[0] == 77
    memory = Memory()
    addresses = [memory.allocate(4), memory.upload(np.zeros(1, "u4"), writable=True), memory.allocate(4)]
    with pytest.raises(SimulationError, match=r"block 1, thread 0: reads global .* thread 0 of block 0 has written"):
        launch(FLAG.replace("{fence}", ""), addresses, memory, grid=2, block=1)


def test_a_block_that_waits_for_an_earlier_program_counter_is_not_starved() -> None:
    """The waiting block stands at lower instructions than the one it waits for."""
    body = """mov.u32 r0, %ctaid.x; setp.ne.u32 p0, r0, 0; @p0 bra $set;
    $wait: ld.volatile.global.u32 r3, [q1]; setp.eq.u32 p1, r3, 0; @p1 bra $wait; bra $end;
    $set: mov.u32 r2, 1; st.volatile.global.u32 [q1], r2;
    $end:"""
    memory = Memory()
    flag = memory.upload(np.zeros(1, "u4"), writable=True)
    launch(body, [0, flag], memory, grid=2, block=32)
