"""Launches one after another: what one leaves behind, and what may be at work together."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assembly import kernel, launch
from jitmx import arch, kernels
from jitmx.errors import SimulationError
from jitmx.registry.arguments import Arguments, reads, writes
from jitmx.registry.case import Buffer, Case, chains, mismatches
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.verify import run_chain

WAIT = "griddepcontrol.wait;\n"
RELEASE = "griddepcontrol.launch_dependents;\n"
THREAD = "mov.u32 r0, %tid.x; setp.ne.u32 p0, r0, 0;\n"  # p0: not thread 0


def dependent(
    body: str, *, early: bool = False, constant: bool = False, writable: bool = True, times: int = 1, grid: int = 1,
    block: int = 64, then: str = "", ahead: bool = False,
) -> int:  # fmt: skip
    """What programmatic launches of a kernel, and then of another, leave in a word that starts as 0."""
    memory = Memory()
    word = memory.upload(
        np.zeros(64, "u4"), "word", writable=writable, early=early, constant=constant, ahead=ahead
    )  # fmt: skip
    for text in [body] * times + [then] * bool(then):
        launch(THREAD + text, [word], memory, grid=grid, block=block, programmatic=True)
    return int(memory.download(word, "u4", (1,))[0])


# What the launch before may still write

READS = "ld.global.u32 r1, [q0];\n"


def test_an_input_is_read_behind_the_wait() -> None:
    dependent(WAIT + READS, writable=False)
    dependent(READS + WAIT, writable=False, constant=True)
    dependent("setp.gt.u32 p1, r0, 31;\n@p1 griddepcontrol.wait;\nbar.sync 0;\n" + READS, writable=False)


def test_what_the_launch_before_may_write_is_not_read_through_nc() -> None:
    body = WAIT + READS.replace("global", "global.nc")
    with pytest.raises(SimulationError, match=r"reads 4 bytes .*word.* through \.nc, but the previous kernel may have"):
        dependent(body, writable=False)
    dependent(body, writable=False, constant=True)
    dependent(body, writable=False, early=True)


@pytest.mark.parametrize("body", [READS + WAIT, "setp.gt.u32 p1, r0, 31;\n@p1 griddepcontrol.wait;\n" + READS])
def test_an_input_is_not_read_before_the_wait(body: str) -> None:
    with pytest.raises(SimulationError, match=r"reads 4 bytes .*word.* before griddepcontrol\.wait"):
        dependent(body, writable=False)


@pytest.mark.parametrize(
    "copy",
    [
        "cp.async.ca.shared.global [tile], [q0], 4;\ncp.async.wait_all;\n",
        "@!p0 mbarrier.init.shared.b64 [bar], 1;\nfence.proxy.async;\n"
        "@!p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;\n"
        "@!p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [q0], 16, [bar];\n"
        "there:\nmbarrier.try_wait.parity.shared.b64 p1, [bar], 0;\n@!p1 bra there;\n",
    ],
)
def test_a_copy_reads_behind_the_wait_as_well(copy: str) -> None:
    def run(body: str, *, constant: bool = False) -> None:
        memory = Memory()
        data = memory.upload(np.zeros(64, "u4"), "x", constant=constant)
        declare = ".shared .align 16 .b8 tile[64];\n.shared .align 8 .b64 bar;"
        launch(THREAD + body, [data], memory, block=1, declare=declare, programmatic=True)

    run(WAIT + copy)
    run(copy + WAIT, constant=True)
    with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait"):
        run(copy + WAIT)


def test_every_block_waits() -> None:
    dependent("@!p0 griddepcontrol.wait;\n", grid=2)  # one of its threads
    with pytest.raises(SimulationError, match=r"block 0: ends without griddepcontrol\.wait"):
        dependent("", grid=2)
    with pytest.raises(SimulationError, match=r"block 1: ends without griddepcontrol\.wait"):
        dependent("mov.u32 r2, %ctaid.x; setp.eq.u32 p1, r2, 0;\n@p1 griddepcontrol.wait;\n", grid=2)


# What a launch uses before it waits, and the launches before

COUNT = "@!p0 red.global.add.u32 [q0], 1;\n"
PEEK = "@!p0 ld.relaxed.gpu.global.u32 r2, [q0];\n"


def test_what_is_used_early_must_have_happened_before_the_launch_could_begin() -> None:
    assert dependent(COUNT + "bar.sync 0;\n" + RELEASE + WAIT, early=True, times=3) == 3
    with pytest.raises(SimulationError) as caught:
        dependent(COUNT + RELEASE + WAIT, early=True, times=2)
    text = str(caught.value)
    assert re.search(r"thread 0: writes global memory .* before griddepcontrol\.wait, which thread 0 of block 0", text)
    assert re.search(r"of launch 1 writes at PTX line \d+ with nothing that orders it before", text)


def test_of_one_thread_that_releases_what_it_did_before_counts() -> None:
    alone = "@!p0 griddepcontrol.launch_dependents;\n"
    assert dependent(COUNT + alone + WAIT, early=True, times=3) == 3
    with pytest.raises(SimulationError, match="of launch 1"):
        dependent(alone + COUNT + WAIT, early=True, times=2)


def test_a_block_that_releases_nothing_ends_before_the_next_launch_begins() -> None:
    assert dependent(COUNT + WAIT, early=True, times=3) == 3


def test_a_barrier_behind_the_release_is_too_late() -> None:
    with pytest.raises(SimulationError, match="of launch 1"):
        dependent(RELEASE + "bar.sync 0;\n" + COUNT + WAIT, early=True, times=2)


def test_a_read_meets_what_is_written_and_not_what_is_read() -> None:
    assert dependent(RELEASE + PEEK + WAIT, early=True, times=3) == 0
    with pytest.raises(SimulationError, match=r"reads global memory .* of launch 1 writes"):
        dependent(RELEASE + WAIT + COUNT, early=True, then=PEEK + WAIT)
    with pytest.raises(SimulationError, match=r"writes global memory .* of launch 1 reads"):
        dependent(RELEASE + PEEK + WAIT, early=True, then=COUNT + WAIT)


def test_behind_its_own_wait_a_launch_may_meet_what_it_likes() -> None:
    assert dependent(RELEASE + WAIT + COUNT, early=True, times=3) == 3


def test_the_launch_before_the_last_counts_unless_the_last_released_behind_its_wait() -> None:
    def run(middle: str) -> None:
        memory = Memory()
        word = memory.upload(np.zeros(4, "u4"), "word", writable=True, early=True)
        for text in (RELEASE + WAIT + COUNT, middle, PEEK + WAIT):
            launch(THREAD + text, [word], memory, block=64, programmatic=True)

    run(WAIT + RELEASE)
    run(WAIT)
    run("setp.gt.u32 p1, r0, 31;\n@p1 griddepcontrol.wait;\nbar.sync 0;\n@!p0 griddepcontrol.launch_dependents;\n")
    with pytest.raises(SimulationError, match="of launch 1 writes"):
        run(RELEASE + WAIT)
    with pytest.raises(SimulationError, match="of launch 1 writes"):
        run("@!p0 griddepcontrol.wait;\n@p0 griddepcontrol.launch_dependents;\n")  # whichever thread comes first


def test_one_block_that_releases_behind_its_wait_is_enough() -> None:
    first = "mov.u32 r2, %ctaid.x; setp.eq.u32 p1, r2, 0;\n@p1 griddepcontrol.launch_dependents;\n" + WAIT
    rest = "@!p1 griddepcontrol.launch_dependents;\n"
    dependent(first + rest, ahead=True, grid=2)
    with pytest.raises(
        SimulationError, match=r"launch_dependents does not come after griddepcontrol\.wait .* uses word"
    ):
        dependent(RELEASE + WAIT, ahead=True, grid=2)
    dependent(WAIT, ahead=True)


def test_a_plain_launch_waits_for_all_before_it() -> None:
    memory = Memory()
    word = memory.upload(np.zeros(4, "u4"), "word", writable=True, early=True)
    launch(THREAD + RELEASE + WAIT + COUNT, [word], memory, block=64, programmatic=True)
    launch(THREAD + COUNT, [word], memory, block=64)
    assert int(memory.download(word, "u4", (1,))[0]) == 2


def test_launches_that_take_turns_with_two_words_do_not_meet() -> None:
    """The word of a turn is cleared by the next launch, behind its wait; only the launch behind that uses it early."""
    turn = (
        "ld.global.u32 r3, [q1]; xor.b32 r4, r3, 1; mul.wide.u32 d0, r3, 4; mul.wide.u32 d1, r4, 4;\n"
        "add.s64 d0, q0, d0; add.s64 d1, q0, d1;\n"
    )
    good = "@!p0 red.global.add.u32 [d0], 1;\n{}" + WAIT + "@!p0 st.global.u32 [d1], 0;\n"

    def run(body: str) -> None:
        memory = Memory()
        words = memory.upload(np.zeros(2, "u4"), "words", writable=True, early=True)
        for number in range(4):
            which = memory.upload(np.array([number % 2], "u4"), constant=True)
            launch(THREAD + turn + body, [words, which], memory, block=64, programmatic=True)

    # Nothing but the end of a block lets the next launch begin.
    run(good.format(""))
    with pytest.raises(SimulationError, match="of launch 1 writes"):  # the word that the next one counts in
        run(good.format(RELEASE))


# What a launch leaves behind

FIELDS = Arguments("Fields", reads("x", "[1]"), writes("y", "[1]"), writes("workspace", "a counter"))
SPEC = kernels.family("quantize").spec("quantize")
# y = x + 1 from the last of two blocks to count, which is found by the counter.
LAST = (
    "griddepcontrol.wait;\nld.global.u32 r1, [q0];\n@p0 bra $end;\natom.acq_rel.gpu.global.inc.u32 r2, [q2], {};\n"
    "setp.ne.u32 p1, r2, 1;\n@p1 bra $end;\nadd.u32 r1, r1, 1;\nst.global.u32 [q1], r1;\n{}$end:\n"
)


def counted(x: int, *, launch: Launch | None = None, again: int | None = None) -> Case:
    launch = launch or Launch(2, workspace=4)
    return Case(
        f"x={x}", launch,
        {
            "x": Buffer(np.array([x], "u4")), "y": Buffer(np.zeros(1, "u4"), output=True),
            **({"workspace": Buffer(np.zeros(launch.workspace, "u1"), scratch=True)} if launch.workspace else {}),
        },
        lambda found: mismatches(found[0], np.array([x + 1])), 0.0,
        again=None if again is None else lambda: counted(again, launch=launch),
    )  # fmt: skip


def variant() -> Variant:
    """One that launches `LAST`: with these arguments, of 64 threads."""
    spec: KernelSpec = replace(SPEC, entry="k", arguments=lambda _: FIELDS, threads=lambda _: 64)
    return Variant(spec, SPEC.variant(arch.parse("sm_90a")).knobs, arch.parse("sm_90a"))


def errors(body: str, chain: Sequence[Case]) -> list[tuple[str, float]]:
    return [(name, error) for name, error, _ in run_chain(chain, variant(), kernel(THREAD + body, 3))]


def test_a_chain_launches_a_case_twice_then_others_then_itself() -> None:
    alone, plain = counted(1), counted(5, launch=Launch(1))
    assert list(chains([alone])) == [(alone, alone)]
    assert list(chains([plain, plain])) == [(plain,), (plain,)]
    other, elsewhere = counted(2), counted(3, launch=Launch(2, workspace=8))
    assert list(chains([alone, elsewhere, other])) == [(alone, alone, other, alone), (elsewhere, elsewhere)]
    on_other_inputs = next(chains([counted(1, again=7)]))
    assert [case.name for case in on_other_inputs] == ["x=1", "x=1", "x=7"]


def test_numbers_that_no_call_changes_decide_who_shares_a_workspace() -> None:
    one, other = (
        replace(counted(1), values=counted(1).values | {"rows": rows}, fixed=("rows",)) for rows in (1, 2)
    )  # fmt: skip
    assert len(list(chains([one, other]))) == 2
    assert len(list(chains([replace(one, fixed=()), replace(other, fixed=())]))) == 1


def test_a_case_whose_kernel_never_ends_fails_within_seconds() -> None:
    with pytest.raises(SimulationError, match=r"block 0, thread 0: still runs after 60000 steps of its blocks"):
        errors("griddepcontrol.wait;\n$again: bra $again;", [counted(1)])


def test_a_counter_that_wraps_serves_every_launch() -> None:
    found = errors(LAST.format(1, ""), [counted(1), counted(1), counted(2), counted(1)])
    assert [error for _, error in found] == [0] * 4
    assert found[2][0] == "launch 3 of 4, x=2"


def test_a_counter_that_does_not_is_found_by_the_second_launch() -> None:
    body = LAST.format(1000, "")
    assert errors(body, [counted(1)]) == [("x=1", 0.0)]
    with pytest.raises(SimulationError, match=r"^launch 2 of 2, x=1: 4 of 4 bytes .*\(0 bytes .* y .* never written"):
        errors(body, [counted(1), counted(1)])


def test_a_flag_that_stays_is_found_by_a_launch_on_other_inputs() -> None:
    """A flag that stays is taken for that of this launch: y is that of an earlier x."""
    body = (
        "griddepcontrol.wait;\nld.global.u32 r1, [q0]; mov.u32 r5, %ctaid.x; setp.eq.u32 p1, r5, 0;\n"
        "add.u32 r1, r1, 1;\n@p0 bra $end;\n@p1 bra $post;\n$poll:\nld.relaxed.gpu.global.u32 r2, [q2];\n"
        "setp.eq.u32 p2, r2, 0;\n@p2 bra $poll;\nst.global.u32 [q1], r2;\n{}bra $end;\n"
        "$post:\nst.relaxed.gpu.global.u32 [q2], r1;\n$end:\n"
    )
    chain = [replace(counted(x), resident=2) for x in (1, 1, 2)]
    cleared = body.format("mov.u32 r6, 0;\nst.relaxed.gpu.global.u32 [q2], r6;\n")
    assert [error for _, error in errors(cleared, chain)] == [0, 0, 0]
    left = errors(body.format("").replace("setp.eq.u32 p1, r5, 0", "setp.eq.u32 p1, r5, 1"), chain)
    assert [error for _, error in left] == [0, 0, 1]


def test_a_fault_of_a_later_launch_names_it() -> None:
    with pytest.raises(
        SimulationError, match=r"^launch 2 of 2, x=2: k, PTX line \d+, block 0, thread 0: writes 4 bytes"
    ):
        errors("griddepcontrol.wait;\n@!p0 ld.global.u32 r1, [q0];\n@p0 bra $end;\nsetp.eq.u32 p1, r1, 2;\n"
               "@p1 st.global.u32 [q0], r1;\n@!p1 add.u32 r1, r1, 1;\nst.global.u32 [q1], r1;\n$end:\n",
               [counted(1, launch=Launch(1)), counted(2, launch=Launch(1))])  # fmt: skip


def test_outputs_of_each_launch_are_fresh_and_those_of_earlier_ones_gone() -> None:
    memory = Memory()
    first = memory.upload(np.zeros(4, "u4"), "y", writable=True)
    memory.free(first)
    with pytest.raises(SimulationError, match="out of bounds"):
        launch("ld.global.u32 r1, [q0];", [first], memory, block=1)


def test_arguments_of_a_sequence_are_packed_as_those_of_one_launch() -> None:
    memory = Memory()
    x, y = memory.upload(np.array([4], "u4"), "x"), memory.allocate(4, "y")
    workspace = memory.upload(np.zeros(1, "u4"), "workspace", writable=True)
    text, given = kernel(THREAD + LAST.format(1, ""), 3), struct.pack("3Q", x, y, workspace)
    for _ in range(2):
        more: dict[str, Any] = {"programmatic": True}
        simulate(text, (2, 1, 1), (64, 1, 1), given, memory, **more)
    assert int(memory.download(y, "u4", (1,))[0]) == 5


# What was there before

POLL = (
    "$poll:\nld.acquire.gpu.global.u32 r2, [q2];\nsetp.eq.u32 p2, r2, 0;\n@p2 bra $poll;\n"
    "ld.global.u32 r3, [q1+4];\nst.global.u32 [q1], r3;\n"
)
POST = "st.global.u32 [q1+4], r1;\nmembar.gl;\nred.release.gpu.global.add.u32 [q2], 1;\n"


def handed(clear: str, *, first: int) -> None:
    """Two launches in which one block posts a value, and the other waits for it; `first` is the block that posts."""
    fields = {"x": Buffer(np.array([4], "u4")), "y": Buffer(np.zeros(2, "u4"), output=True)}
    body = (
        "griddepcontrol.wait;\n@p0 bra $end;\nld.global.u32 r1, [q0]; mov.u32 r5, %ctaid.x;\n"
        f"setp.eq.u32 p1, r5, {first};\n@p1 bra $post;\n{POLL}{clear}bra $end;\n$post:\n{POST}$end:\n"
    )
    case = Case(
        "x", Launch(2, workspace=4), {**fields, "workspace": Buffer(np.zeros(4, "u1"), scratch=True)},
        lambda found: mismatches(found[0], np.array([4, 4])), 0.0, resident=2,
    )  # fmt: skip
    assert [error for _, error in errors(body, [case, case])] == [0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_a_flag_that_an_earlier_launch_left_lets_a_lane_pass_whichever_block_runs_first(first: int) -> None:
    handed("mov.u32 r6, 0;\nst.relaxed.gpu.global.u32 [q2], r6;\n", first=first)
    with pytest.raises(SimulationError, match=r"^launch 2 of 2.*(nothing between them|uninitialised)"):
        handed("", first=first)


def test_a_lane_that_knows_of_a_write_finds_it() -> None:
    memory = Memory()
    flag = memory.upload(np.zeros(1, "u4"), "flag", writable=True)
    out = memory.allocate(4, "out")
    body = "@!p0 red.relaxed.gpu.global.add.u32 [q0], 1;\nbar.sync 0;\n@p0 bra $end;\n"
    body += "ld.relaxed.gpu.global.u32 r1, [q0];\n"
    launch(THREAD + body + "st.global.u32 [q1], r1;\n$end:\n", [flag, out], memory, block=64)
    assert int(memory.download(out, "u4", (1,))[0]) == 1


def test_results_do_not_depend_on_which_block_is_late() -> None:
    """The one that counts last stores its number."""
    case = replace(counted(1), check=lambda found: 0.0)
    assert errors(LAST.format(1, ""), [case, case])
    with pytest.raises(SimulationError, match="its results depend on which block is late"):
        errors(LAST.format(1, "").replace("add.u32 r1, r1, 1", "mov.u32 r1, %ctaid.x"), [case, case])
