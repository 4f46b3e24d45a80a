"""Barriers of a block, warps that part and meet, and threads that wait for ever."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory

OUT = "mul.wide.u32 d0, r0, 4; add.s64 d0, d0, q0; st.global.u32 [d0], r9;"


def result(body: str, *, block: int = 64) -> list[int]:
    memory = Memory()
    out = memory.allocate(4 * block)
    launch("mov.u32 r0, %tid.x;\n" + body + OUT, [out], memory, block=block)
    values: list[int] = memory.download(out, "u4", (block,)).tolist()
    return values


def test_a_barrier_that_some_threads_never_reach_tells_who_waits_and_who_ended() -> None:
    with pytest.raises(SimulationError) as caught:
        launch("mov.u32 r0, %tid.x; setp.ge.u32 p0, r0, 40; @p0 ret;\nbar.sync 0;", [], Memory(), block=64, grid=2)
    text = str(caught.value)
    assert "no thread can go on" in text
    assert "threads 0-39 of block 0 wait at PTX line 15 at barrier 0, which lacks 24 of 64 threads" in text
    assert "threads 40-63 of block 0 have ended" in text


def test_threads_at_different_barriers_wait_for_ever() -> None:
    body = "mov.u32 r0, %tid.x; setp.ge.u32 p0, r0, 32; @p0 bra $b; bar.sync 1; bra $e; $b: bar.sync 2; $e:"
    with pytest.raises(SimulationError, match=r"threads 0-31 of block 0 wait .* barrier 1.*threads 32-63 .* barrier 2"):
        launch(body, [], Memory(), block=64)


def test_a_barrier_in_two_places_is_one_barrier() -> None:
    body = "setp.ge.u32 p0, r0, 32; @p0 bra $b; bar.sync 1; mov.u32 r9, 1; bra $e; $b: bar.sync 1; mov.u32 r9, 2; $e:"
    assert result(body) == [1] * 32 + [2] * 32


# Two warps meet, then the two others; what lies between them is left open.
_HANDED = """setp.ge.u32 p0, r0, 64; @p0 bra $b; bar.sync 1, 64; {tell} bra $e;
$b: {hear} bar.sync {number}, 64; $e: mov.u32 r9, 1;"""


def test_threads_that_meet_at_a_number_of_others_know_that_those_are_past_it() -> None:
    calm = (
        {"number": 2, "tell": "", "hear": ""},
        {"number": 1, "tell": "bar.sync 0;", "hear": "bar.sync 0;"},
        # Who tells is another than who waited first.
        {"number": 1, "tell": "setp.lt.u32 p1, r0, 32; @p1 bra $e; bar.sync 3, 96;", "hear": "bar.sync 3, 96;"},
    )
    for said in calm:
        assert result(_HANDED.format(**said), block=128) == [1] * 128
    with pytest.raises(
        SimulationError, match="comes to barrier 1, at which thread 0 and others have met at PTX line 1"
    ):
        result(_HANDED.format(number=1, tell="", hear=""), block=128)
    with pytest.raises(SimulationError, match="comes to barrier 0, at which thread 0 and others have met"):
        result(
            _HANDED.replace("bar.sync 1", "bar.sync 0").format(number=2, tell="bar.sync 0;", hear="bar.sync 0;"),
            block=128,
        )


def test_producers_arrive_and_consumers_wait() -> None:
    body = """mov.u32 r9, 5; setp.ge.u32 p0, r0, 32; @p0 bra $consume;
    st.shared.u32 [word], r9; bar.arrive 4, 64; bra $end;
    $consume: bar.sync 4, 64; ld.shared.u32 r9, [word]; add.u32 r9, r9, 1;
    $end:"""
    memory = Memory()
    out = memory.allocate(4 * 64)
    text = "mov.u32 r0, %tid.x;\n" + body.replace("st.shared", "setp.eq.u32 p1, r0, 0; @p1 st.shared") + OUT
    launch(text, [out], memory, block=64, declare=".shared .align 4 .u32 word;")
    assert memory.download(out, "u4", (64,)).tolist() == [5] * 32 + [6] * 32


def test_reductions_of_a_barrier() -> None:
    votes = "setp.lt.u32 p0, r0, 5;"
    assert result(votes + "bar.red.popc.u32 r9, 0, p0;") == [5] * 64
    for how, value in (("and", 0), ("or", 1)):
        assert result(votes + f"bar.red.{how}.pred p1, 0, p0; selp.u32 r9, 1, 0, p1;") == [value] * 64
    assert result(votes + "bar.red.popc.u32 r9, 0, !p0;") == [59] * 64


def test_a_count_that_is_no_multiple_of_a_warp_is_an_error() -> None:
    with pytest.raises(SimulationError, match="a barrier for 40 threads"):
        launch("bar.sync 1, 40;", [], Memory(), block=64)


@pytest.mark.parametrize("number", [16, -1])
def test_a_block_has_sixteen_barriers(number: int) -> None:
    with pytest.raises(SimulationError, match=rf"barrier {number % 2**32}; a block has barriers 0 to 15"):
        launch(f"bar.sync {number};", [], Memory(), block=64)


def test_threads_that_part_meet_again() -> None:
    body = """mov.u32 r9, 0; and.b32 r1, r0, 7;
    $loop: setp.ge.u32 p0, r9, r1; @p0 bra $out; add.u32 r9, r9, 1; bra $loop;
    $out: shfl.sync.bfly.b32 r2, r9, 1, 31, -1; add.u32 r9, r9, r2;"""
    assert result(body) == [i % 8 + (i ^ 1) % 8 for i in range(64)]


def test_a_shuffle_that_lanes_never_reach_is_an_error() -> None:
    body = "setp.eq.u32 p0, r0, 3; mov.u32 r9, 0; @p0 bra $wait; shfl.sync.bfly.b32 r9, r0, 1, 31, -1; bra $end;"
    body += "$wait: bar.sync 1, 32; $end:"
    with pytest.raises(
        SimulationError, match=r"threads 0-2, 4-31 of block 0 wait at PTX line \d+ \(shfl\.sync\.bfly\.b32\)"
    ):
        result(body, block=32)


def test_a_shuffle_from_a_lane_that_is_not_named_is_an_error() -> None:
    body = "mov.u32 r9, 0; setp.ge.u32 p0, r0, 16; @p0 bra $end; shfl.sync.idx.b32 r9, r0, 20, 31, 0xFFFF; $end:"
    with pytest.raises(SimulationError, match="thread 0: shfl reads lane 20, which does not take part"):
        result(body, block=32)
    own = "mov.u32 r9, 0; shfl.sync.idx.b32 r9, r0, 0, 31, 0xFFFF;"
    with pytest.raises(SimulationError, match="lane mask 0x0000ffff, in which lane 16 is not"):
        result(own, block=32)


def test_half_a_warp_may_shuffle_by_itself() -> None:
    body = "mov.u32 r9, 7; setp.ge.u32 p0, r0, 16; @p0 bra $end; shfl.sync.bfly.b32 r9, r0, 1, 31, 0xFFFF; $end:"
    assert result(body, block=32) == [i ^ 1 for i in range(16)] + [7] * 16


def test_an_endless_loop_stops_at_a_bound() -> None:
    with pytest.raises(SimulationError, match=r"PTX line \d+, block 0, thread 0: still runs after 10000 steps"):
        launch("$loop: bra $loop;", [], Memory(), block=32, max_steps=10_000)


def test_polling_what_nobody_will_write_is_an_error() -> None:
    memory = Memory()
    flag = memory.upload(np.zeros(1, "u4"), writable=True)
    body = "$w: ld.acquire.gpu.global.u32 r1, [q0]; setp.eq.u32 p0, r1, 0; @p0 bra $w;"
    with pytest.raises(SimulationError, match="polls for ever: no thread makes progress"):
        launch(body, [flag], memory, block=32)


def test_trap_is_an_error_of_its_thread() -> None:
    with pytest.raises(SimulationError, match=r"thread 9: trap"):
        launch("mov.u32 r0, %tid.x; setp.eq.u32 p0, r0, 9; @p0 trap;", [], Memory())


def test_blocks_of_three_dimensions() -> None:
    memory = Memory()
    out = memory.allocate(4 * 2 * 3 * 4 * 5)
    body = """mov.u32 r1, %tid.x; mov.u32 r2, %tid.y; mov.u32 r3, %tid.z; mov.u32 r4, %ctaid.y; mov.u32 r5, %ntid.x;
    mad.lo.u32 r6, r3, 3, r2; mad.lo.u32 r6, r6, 2, r1; mad.lo.u32 r6, r4, 24, r6;
    mul.wide.u32 d0, r6, 4; add.s64 d0, d0, q0;
    mul.lo.u32 r7, r4, 1000; mad.lo.u32 r7, r3, 100, r7; mad.lo.u32 r7, r2, 10, r7;
    add.u32 r7, r7, r1; st.global.u32 [d0], r7;"""
    launch(body, [out], memory, grid=(1, 5, 1), block=(2, 3, 4))
    want = [1000 * b + 100 * z + 10 * y + x for b in range(5) for z in range(4) for y in range(3) for x in range(2)]
    assert memory.download(out, "u4", (120,)).tolist() == want
    with pytest.raises(SimulationError, match=r"block \(0, 2, 0\), thread \(1, 0, 0\): trap"):
        trap = "mov.u32 r1, %tid.x; mov.u32 r2, %ctaid.y; add.u32 r1, r1, r2; setp.eq.u32 p0, r1, 3; @p0 trap;"
        launch(trap, [0], Memory(), grid=(1, 3, 1), block=(2, 3, 4))
