"""Launches: what they refuse, what they report, and what one leaves to the next."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import kernel, launch
from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory


def test_lines_that_no_thread_came_to_are_not_covered() -> None:
    body = "mov.u32 r0, %tid.x;\nsetp.lt.u32 p0, r0, {limit};\n@p0 bra $skip;\nadd.u32 r1, r0, 1;\n$skip:"
    none = launch(body.replace("{limit}", "32"), [], Memory())
    some = launch(body.replace("{limit}", "31"), [], Memory())
    assert len(none.lines - none.covered) == 1 and none.coverage == 0.8
    assert some.coverage == 1.0 and (none | some).coverage == 1.0
    assert none.thread_instructions == 4 * 32 and some.thread_instructions == 4 * 32 + 1


def test_a_second_launch_may_read_what_the_first_wrote_in_every_way() -> None:
    memory = Memory()
    out = memory.allocate(4)
    launch("mov.u32 r0, 3; st.global.u32 [q0], r0;", [out], memory, block=1)
    launch("ld.global.nc.u32 r0, [q0];", [out], memory, block=1)


def test_more_blocks_than_are_resident_run_in_waves() -> None:
    memory = Memory()
    out = memory.allocate(100 * 4)
    body = "mov.u32 r0, %ctaid.x; mul.wide.u32 d0, r0, 4; add.s64 d0, d0, q0; st.global.u32 [d0], r0;"
    launch(body, [out], memory, grid=100, block=1, resident_blocks=7)
    assert memory.download(out, "u4", (100,)).tolist() == list(range(100))


def test_a_kernel_is_told_its_dynamic_shared_memory_without_what_the_system_keeps() -> None:
    memory = Memory()
    out = memory.allocate(4)
    launch("mov.u32 r0, %dynamic_smem_size; st.global.u32 [q0], r0;", [out], memory, block=1, shared_bytes=4096)
    assert memory.download(out, "u4", (1,)).tolist() == [4096]


def test_geometry_and_arguments_must_fit_the_kernel() -> None:
    source = kernel("", 2)
    with pytest.raises(SimulationError, match="a block of 2048 threads"):
        simulate(source, (1, 1, 1), (2048, 1, 1), bytes(16), Memory())
    with pytest.raises(SimulationError, match="k takes 16 bytes of parameters; 8 bytes of arguments were given"):
        simulate(source, (1, 1, 1), (32, 1, 1), bytes(8), Memory())
    with pytest.raises(SimulationError, match="'other' is no kernel of this PTX; its kernels: k"):
        simulate(source, (1, 1, 1), (32, 1, 1), bytes(16), Memory(), entry="other")
    bounded = source.replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1)
    with pytest.raises(SimulationError, match="a block of 96 threads; the kernel allows 64"):
        simulate(bounded, (1, 1, 1), (96, 1, 1), bytes(16), Memory())


def test_parameters_lie_as_in_a_struct() -> None:
    source = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 first, .param .align 8 .b8 second[24], .param .u16 third)
{ .reg .b32 a, b; .reg .b64 c; .reg .b16 e;
ld.param.u32 a, [first]; ld.param.u32 b, [second+16]; ld.param.u64 c, [second]; ld.param.u16 e, [third];
st.global.u32 [c], a; st.global.u32 [c+4], b; st.global.u16 [c+8], e; ret; }"""
    memory = Memory()
    out = memory.allocate(10)
    arguments = b"".join(
        [(7).to_bytes(8, "little"), out.to_bytes(8, "little"), bytes(8), (9).to_bytes(8, "little"), b"\x05\0"]
    )
    simulate(source, (1, 1, 1), (1, 1, 1), arguments, memory)
    assert memory.download(out, "u2", (5,)).tolist() == [7, 0, 9, 0, 5]


def test_scopes_have_registers_and_labels_of_their_own() -> None:
    loop = """{
    .reg .pred done; .reg .b32 r1;
    mov.u32 r1, 0;
    again:
    add.u32 r1, r1, 1; add.u32 r0, r0, 1;
    setp.eq.u32 done, r1, 3;
    @!done bra again;
    }"""
    memory = Memory()
    out = memory.allocate(8)
    launch(
        f"mov.u32 r0, 0; mov.u32 r1, 50;\n{loop}\n{loop}\nst.global.v2.u32 [q0], {{r0, r1}};", [out], memory, block=1
    )
    assert memory.download(out, "u4", (2,)).tolist() == [6, 50]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bra $nowhere;", r"bra: label .*nowhere.* is not known"),
        ("add.u32 r0, r0;", r"add\.u32 with 2 operands is not known"),
        ("add.u32 nothing, r0, r0;", "nothing.* cannot be written"),
        ("setp.eq.u32 r0, r0, r0;", "cannot take a result of b1"),
        ("add.u32 h0, h0, h0;", "narrower than 32 bits"),
        ("mov.u32 r0, #;", "no token starts at '#;"),
        ("mov.u32 r0, %nonsense;", "special register %nonsense is not known"),
        ("call.uni f, ();", r"call\.uni: function f has no body in this PTX"),
    ],
)
def test_text_that_is_not_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        launch(text, [], Memory())


def test_a_reader_of_any_warp_is_remembered() -> None:
    """32 warps read a word, and only the first meets the writer."""
    body = """mov.u32 r0, %tid.x; setp.eq.u32 p0, r0, 0; @p0 st.shared.u32 [tile], r0; bar.sync 0;
    ld.shared.u32 r1, [tile]; setp.ge.u32 p1, r0, 64; @p1 bra $end; bar.sync 1, 64;
    setp.eq.u32 p2, r0, 40; @p2 st.shared.u32 [tile], r0; $end:"""
    with pytest.raises(SimulationError, match=r"thread 40: writes shared memory .* has read"):
        launch(body, [], Memory(), block=1024, declare=".shared .align 4 .b8 tile[4];")


@pytest.mark.parametrize(("late", "found"), [(0, 7), (1, 0)])
def test_the_first_block_if_it_is_late_finds_nothing_old_and_any_other_may(late: int, found: int) -> None:
    memory = Memory()
    word, out = memory.upload(np.zeros(1, np.uint32), writable=True), memory.allocate(4)
    body = f"""mov.u32 r0, %ctaid.x; setp.eq.u32 p0, r0, {late};
    @p0 bra $late;
    mov.u32 r1, 7; st.relaxed.gpu.global.u32 [q0], r1; bra $end;
    $late: ld.relaxed.gpu.global.u32 r1, [q0]; st.global.u32 [q1], r1;
    $end:"""
    launch(body, [word, out], memory, grid=2, block=1, slow=late)
    assert memory.download(out, "u4", (1,)).tolist() == [found]
