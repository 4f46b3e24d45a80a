"""What releases tell whom: orders, scopes, fences and chains of atomics; and what a race's message says is missing."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim import order
from jitmx.sim.memory import Memory

# Thread 0 of block 0 writes 7 and then the flag; thread 0 of another block polls the flag and reads.
PASS = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; setp.ne.u32 p0, r0, 0; @p0 bra $end;
setp.ne.u32 p1, r1, 0; @p1 bra $read;
mov.u32 r2, 7; st.global.u32 [q0], r2; {before} {write} bra $end;
$read: setp.ne.u32 p2, r1, {reader}; @p2 bra $end;
$poll: {poll} setp.eq.u32 p3, r3, 0; @p3 bra $poll; {after}
ld.global.u32 r4, [q0]; st.global.u32 [q2], r4;
$end:"""
WRITE, POLL = "st.{}.global.u32 [q1], 1;", "ld.{}.global.u32 r3, [q1];"


def handed(
    write: str, poll: str, *, before: str = "", after: str = "", reader: int = 2, cluster: int = 2, body: str = PASS
) -> int:
    """What the reader found; blocks 0 and 1 are a cluster, 2 and 3 another."""
    memory = Memory()
    data, flag, out = memory.allocate(4), memory.upload(np.zeros(1, "u4"), writable=True), memory.allocate(4)
    text = body.format(before=before, write=write, poll=poll, after=after, reader=reader)
    launch(text, [data, flag, out], memory, grid=4, block=32, cluster=cluster)
    return int(memory.download(out, "u4", (1,))[0])


@pytest.mark.parametrize(
    ("write", "poll"),
    [
        (WRITE.format("release.gpu"), POLL.format("acquire.gpu")),
        (WRITE.format("release.sys"), POLL.format("acquire.gpu")),
        ("red.release.gpu.global.add.u32 [q1], 1;", POLL.format("acquire.gpu")),
        ("atom.acq_rel.gpu.global.add.u32 r5, [q1], 1;", "atom.acquire.gpu.global.or.b32 r3, [q1], 0;"),
    ],
)
def test_a_release_tells_who_acquires_of_all_that_came_before(write: str, poll: str) -> None:
    assert handed(write, poll) == 7


# Four warps of block 0 write a word each and then count; thread 0 of block 1 waits for so many and reads the last word.
COUNT = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; and.b32 r5, r0, 31; setp.ne.u32 p0, r5, 0; @p0 bra $end;
setp.ne.u32 p1, r1, 0; @p1 bra $read;
shr.u32 r6, r0, 3; cvt.u64.u32 d3, r6; add.u64 d4, q0, d3; mov.u32 r2, 7; st.global.u32 [d4], r2;
{count} bra $end;
$read: setp.ne.u32 p2, r0, 0; @p2 bra $end;
$poll: ld.acquire.gpu.global.u32 r3, [q1]; setp.lt.u32 p3, r3, {wanted}; @p3 bra $poll;
ld.global.u32 r4, [q0+12]; st.global.u32 [q2], r4;
$end:"""


@pytest.mark.parametrize(
    "count", ["red.release.gpu.global.add.u32 [q1], 1;", "atom.release.gpu.global.add.u32 r3, [q1], 1;"]
)
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_who_waits_for_a_warp_too_few_goes_on_without_one(count: str, wanted: int) -> None:
    """Though all of them come to the instruction at once."""

    def found() -> int:
        memory = Memory()
        data, counter = memory.allocate(16), memory.upload(np.zeros(1, "u4"), writable=True)
        out = memory.allocate(4)
        text = COUNT.format(count=count, wanted=wanted)
        launch(text, [data, counter, out], memory, grid=2, block=128)
        return int(memory.download(out, "u4", (1,))[0])

    if wanted == 4:
        assert found() == 7
        return
    with pytest.raises(SimulationError, match=r"nothing between them|is uninitialised"):
        found()


# Block 0 has a lock and lets it go; the others take it by atom.cas and let it go, one after another.
LOCK = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; setp.ne.u32 p0, r0, 0; @p0 bra $end;
setp.eq.u32 p1, r1, 0; @p1 bra $go;
$poll: atom.acquire.gpu.global.cas.b32 r3, [q1], 0, 1; setp.ne.u32 p3, r3, 0; @p3 bra $poll;
$go: mov.u32 r5, 0;
$work: add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 5; @p2 bra $work;
ld.global.u32 r4, [q0]; add.u32 r4, r4, 1; st.global.u32 [q0], r4;
red.release.gpu.global.add.u32 [q1], 4294967295;
$end:"""


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_who_polls_by_atomics_does_not_keep_the_holder_of_a_lock_from_going_on(blocks: int) -> None:
    memory = Memory()
    count, lock = (memory.upload(np.full(1, value, "u4"), writable=True) for value in (0, 1))
    launch(LOCK, [count, lock], memory, grid=blocks, block=32)
    assert int(memory.download(count, "u4", (1,))[0]) == blocks


# Warps 0 and 1 of block 0 write a word and then a flag each; thread 0 of block 1 waits for some flags and reads both.
FLAGS = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; and.b32 r5, r0, 31; setp.ne.u32 p0, r5, 0; @p0 bra $end;
setp.ne.u32 p1, r1, 0; @p1 bra $read;
shr.u32 r6, r0, 3; cvt.u64.u32 d3, r6; add.u64 d4, q0, d3; mov.u32 r2, 7; st.global.u32 [d4], r2;
add.u64 d5, q1, d3; mov.u32 r7, 1; st.release.gpu.global.u32 [d5], r7; bra $end;
$read: setp.ne.u32 p2, r0, 0; @p2 bra $end;
{polls}
ld.global.u32 r4, [q0]; ld.global.u32 r5, [q0+4]; add.u32 r4, r4, r5; st.global.u32 [q2], r4;
$end:"""


@pytest.mark.parametrize("flags", [(0,), (1,), (0, 1), (1, 0)])
def test_who_waits_for_one_flag_of_two_goes_on_without_the_other(flags: tuple[int, ...]) -> None:
    polls = "\n".join(
        f"$poll{i}: ld.acquire.gpu.global.u32 r3, [q1+{4 * i}]; setp.eq.u32 p3, r3, 0; @p3 bra $poll{i};" for i in flags
    )
    memory = Memory()
    data, flag = memory.allocate(8), memory.upload(np.zeros(2, "u4"), writable=True)
    out = memory.allocate(4)
    if len(flags) == 2:
        launch(FLAGS.format(polls=polls), [data, flag, out], memory, grid=2, block=64)
        assert int(memory.download(out, "u4", (1,))[0]) == 14
        return
    with pytest.raises(SimulationError, match="nothing between them"):
        launch(FLAGS.format(polls=polls), [data, flag, out], memory, grid=2, block=64)


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu"])
@pytest.mark.parametrize("reader", [1, 2])
def test_scopes_of_both_sides_must_include_the_other(scope: str, reader: int) -> None:
    enough = scope == "gpu" or (scope == "cluster" and reader == 1)
    for write, poll in ((f"release.{scope}", "acquire.gpu"), ("release.gpu", f"acquire.{scope}")):
        if enough:
            assert handed(WRITE.format(write), POLL.format(poll), reader=reader) == 7
        else:
            with pytest.raises(SimulationError, match=r"its scope does not include|nothing between them"):
                handed(WRITE.format(write), POLL.format(poll), reader=reader)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(SimulationError, match=r"PTX line \d+ does not release, and follows no fence"):
        handed(WRITE.format("relaxed.gpu"), POLL.format("acquire.gpu"))
    with pytest.raises(SimulationError, match=r"PTX line \d+ has released, and neither acquires nor is followed by a"):
        handed(WRITE.format("release.gpu"), POLL.format("relaxed.gpu"))
    with pytest.raises(SimulationError, match=r"acquired at PTX line \d+ in scope \.cta, which is not enough"):
        handed(WRITE.format("release.gpu"), POLL.format("relaxed.gpu"), after="fence.acq_rel.cta;")


@pytest.mark.parametrize(
    ("before", "after", "enough"),
    [
        ("fence.acq_rel.gpu;", "fence.acq_rel.gpu;", True),
        ("membar.gl;", "membar.gl;", True),
        ("fence.sc.sys;", "fence.acq_rel.gpu;", True),
        ("fence.acq_rel.gpu;", "", False),
        ("", "fence.acq_rel.gpu;", False),
        ("membar.cta;", "membar.gl;", False),
        ("fence.proxy.async;", "fence.acq_rel.gpu;", False),
        ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.gpu;", False),
    ],
)
def test_fences_make_releases_and_acquires_of_relaxed_operations(before: str, after: str, enough: bool) -> None:
    write, poll = WRITE.format("relaxed.gpu"), POLL.format("relaxed.gpu")
    if enough:
        assert handed(write, poll, before=before, after=after) == 7
        return
    with pytest.raises(SimulationError, match="nothing between them"):
        handed(write, poll, before=before, after=after)


def test_a_fence_speaks_for_what_came_before_it_alone() -> None:
    late = PASS.replace("st.global.u32 [q0], r2; {before}", "{before} st.global.u32 [q0], r2;")
    with pytest.raises(SimulationError, match="nothing between them"):
        handed(WRITE.format("relaxed.gpu"), POLL.format("acquire.gpu"), before="fence.acq_rel.gpu;", body=late)
    assert handed(WRITE.format("release.gpu"), POLL.format("acquire.gpu"), before="fence.acq_rel.gpu;", body=late) == 7


# Block 1 counts as well, before the reader looks for a count of 2.
ALSO = "bra $end;\n$count: ld.relaxed.gpu.global.u32 r6, [q1]; setp.eq.u32 p5, r6, 0; @p5 bra $count;\n{also}\n$end:"
CHAIN = (
    PASS.replace("$read:", "$read: setp.eq.u32 p4, r1, 1; @p4 bra $count;")
    .replace("$end:", ALSO)
    .replace("setp.eq.u32 p3, r3, 0;", "setp.lt.u32 p3, r3, 2;")
)


@pytest.mark.parametrize(
    ("also", "enough"),
    [
        ("red.relaxed.gpu.global.add.u32 [q1], 1;", True),
        ("atom.relaxed.gpu.global.exch.b32 r7, [q1], 2;", True),
        ("red.relaxed.cluster.global.add.u32 [q1], 1;", False),
    ],
)
def test_atomics_hand_on_what_was_released(also: str, enough: bool) -> None:
    body = CHAIN.replace("{also}", also)
    write, poll, after = (
        "red.release.gpu.global.add.u32 [q1], 1;",
        POLL.format("relaxed.gpu"),
        POLL.format("acquire.gpu"),
    )
    if enough:
        assert handed(write, poll, after=after, body=body) == 7
        return
    with pytest.raises(SimulationError, match=r"nothing between them|its scope does not include"):
        handed(write, poll, after=after, body=body)


# All blocks raise a maximum and count; who counts last takes the maximum away.
TAKE = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; setp.ne.u32 p0, r0, 0; @p0 bra $end;
red.relaxed.gpu.global.max.u32 [q0], r1;
atom.{order}.gpu.global.add.u32 r3, [q1], 1; setp.ne.u32 p1, r3, 3; @p1 bra $end;
{take}
st.global.u32 [q2], r4;
$end:"""


@pytest.mark.parametrize("take", ["atom.relaxed.gpu.global.exch.b32 r4, [q0], 0;", "ld.global.u32 r4, [q0];"])
@pytest.mark.parametrize("kind", ["acq_rel", "relaxed", "release", "acquire"])
@pytest.mark.parametrize("resident", [1, 4])
def test_every_atomic_on_a_word_must_be_known_to_who_takes_its_value_away(take: str, kind: str, resident: int) -> None:
    memory = Memory()
    zeros = [memory.upload(np.zeros(1, "u4"), writable=True) for _ in range(2)]
    out = memory.allocate(4)
    text = TAKE.format(order=kind, take=take)
    if kind == "acq_rel":
        launch(text, [*zeros, out], memory, grid=4, resident_blocks=resident)
        assert memory.download(out, "u4", (1,))[0] == 3
        return
    with pytest.raises(SimulationError, match=r"(replaces|reads) global memory .* thread 0 of block \d has written"):
        launch(text, [*zeros, out], memory, grid=4, resident_blocks=resident)


def test_who_has_read_a_word_may_replace_it() -> None:
    """A value that carries its own readiness: posted, polled for, taken away."""
    body = PASS.replace("{after}", "st.relaxed.gpu.global.u32 [q1], 0; mov.u32 r4, r3; bra $out;").replace(
        "ld.global.u32 r4, [q0]; ", "$out: "
    )
    assert handed(WRITE.format("relaxed.gpu"), POLL.format("relaxed.gpu"), body=body) == 1
    with pytest.raises(SimulationError, match="replaces global memory"):
        handed(WRITE.format("relaxed.gpu"), "mov.u32 r3, 1; bar.warp.sync -1;", body=body, reader=2)


@pytest.mark.parametrize(
    ("arrive", "wait", "enough"),
    [
        ("", "", True),
        (".release.cluster", ".acquire.cluster", True),
        (".relaxed.cluster", "", False),
        (".relaxed.cta", "", False),
        ("", ".relaxed.cta", False),
    ],
)
def test_arrivals_and_waits_at_an_mbarrier_may_be_relaxed(arrive: str, wait: str, enough: bool) -> None:
    declare = ".shared .align 8 .b8 bar[8]; .shared .align 4 .b8 tile[4];"
    body = f"""mov.u32 r0, %tid.x; setp.ne.u32 p0, r0, 0; @!p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
    @p0 bra $wait; st.shared.u32 [tile], r0; mbarrier.arrive{arrive}.shared::cta.b64 _, [bar]; bra $end;
    $wait: setp.ne.u32 p1, r0, 32; @p1 bra $end;
    $poll: mbarrier.try_wait.parity{wait}.shared::cta.b64 p2, [bar], 0; @!p2 bra $poll; ld.shared.u32 r1, [tile];
    $end:"""
    if enough:
        launch(body, [], Memory(), declare=declare, block=64)
        return
    with pytest.raises(SimulationError, match="nothing between them"):
        launch(body, [], Memory(), declare=declare, block=64)


@pytest.mark.parametrize(
    ("opcode", "found"),
    [
        ("ld.global.u32", ""),
        ("ld.volatile.global.u32", "relaxed.sys"),
        ("ld.acquire.gpu.global.u32", "acquire.gpu"),
        ("st.release.cluster.shared::cluster.u32", "release.cluster"),
    ],
)
def test_the_order_of_an_opcode(opcode: str, found: str) -> None:
    assert order.spelled(opcode.split(".")) == found
    assert order.spelled(["atom", "global", "add"], "relaxed") == "relaxed.gpu"


# A warp of block 0 fills vectors; one of block 1 polls until some of what it finds is there, and counts all of it.
VECTORS = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; mul.wide.u32 d0, r0, 16; add.u64 d1, q0, d0; mov.u32 r2, 1;
setp.ne.u32 p1, r1, 0; @p1 bra $poll;
{write} bra $end;
$poll: {poll} @p2 bra $poll;
add.u32 r8, r4, r5; add.u32 r8, r8, r6; add.u32 r8, r8, r7;
mul.wide.u32 d2, r0, 4; add.u64 d2, q1, d2; st.global.u32 [d2], r8;
$end:"""
WHOLE = "st.relaxed.gpu.global.v4.u32 [d1], {r2, r2, r2, r2};"
HALVES = "mov.u64 d3, 0x100000001; st.relaxed.gpu.global.v2.u64 [d1], {d3, d3};"
LOOK = "ld.relaxed.gpu.global.v4.u32 {r4, r5, r6, r7}, [d1];"
WIDE = "ld.relaxed.gpu.global.v2.u64 {d4, d5}, [d1]; mov.b64 {r4, r5}, d4; mov.b64 {r6, r7}, d5;"
ALL = "and.b32 r9, r4, r5; and.b32 r9, r9, r6; and.b32 r9, r9, r7; setp.eq.u32 p2, r9, 0;"


def found(write: str, poll: str) -> set[int]:
    """How many words of a vector were there for the lanes that took it as whole."""
    memory = Memory()
    vectors, out = memory.upload(np.zeros(128, "u4"), writable=True), memory.allocate(128)
    launch(VECTORS.replace("{write}", write).replace("{poll}", poll), [vectors, out], memory, grid=2)
    return set(memory.download(out, "u4", (32,)).tolist())


@pytest.mark.parametrize("element", ["r4", "r5", "r6", "r7"])
def test_elements_of_a_vector_become_visible_one_by_one(element: str) -> None:
    assert found(WHOLE, LOOK + ALL) == {4}
    assert min(found(WHOLE, f"{LOOK} setp.eq.u32 p2, {element}, 0;")) < 4


def test_elements_of_64_bits_become_visible_as_wholes_and_words_by_which_they_are_written_do_not() -> None:
    first, last = "setp.eq.u32 p2, r4, 0;", "setp.eq.u32 p2, r7, 0;"
    assert found(HALVES, WIDE + first) == found(HALVES, WIDE + last) == {2, 4}
    assert {1, 3} & found(WHOLE, WIDE + first)


def test_what_lanes_of_a_warp_store_becomes_visible_lane_by_lane() -> None:
    last = "ld.relaxed.gpu.global.u32 r10, [q0+508]; setp.eq.u32 p2, r10, 0; @p2 bra $poll;"
    assert min(found(WHOLE, last + LOOK + "setp.ne.u32 p2, r10, 1;")) < 4
