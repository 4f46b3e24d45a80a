"""Every access is checked, and the message says who did what where."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory

OFFSET = "mov.u32 r0, %tid.x; mul.wide.u32 d0, r0, 4; add.s64 d1, q0, d0;"
SHARED = ".shared .align 16 .b8 tile[1024];"


def test_a_read_past_the_end_names_kernel_line_block_thread_address_and_allocation() -> None:
    memory = Memory()
    data = memory.upload(np.zeros(100, "u4"), "x")
    body = OFFSET + "mov.u32 r1, %ctaid.x;\nmul.wide.u32 d2, r1, 256; add.s64 d1, d1, d2;\nld.global.u32 r2, [d1];"
    with pytest.raises(SimulationError) as caught:
        launch(body, [data], memory, grid=2, block=64)
    text = str(caught.value)
    assert text.startswith("k, PTX line 16, block 1, thread 36: reads 4 bytes of global memory out of bounds")
    assert f"{data + 400:#x}" in text and "400 bytes from the start of x of 400 bytes" in text


def test_a_wild_address_is_out_of_bounds() -> None:
    for address in (0, 1 << 63, 0x7F00_0000_0000 - 4):
        with pytest.raises(
            SimulationError, match=f"thread 0: reads 4 bytes of global memory outside of it, at {address:#x}"
        ):
            launch("ld.global.u32 r0, [q0];", [address], Memory(), block=1)


def test_a_misaligned_vector_load_is_an_error() -> None:
    memory = Memory()
    data = memory.upload(np.zeros(64, "u4"))
    with pytest.raises(
        SimulationError, match=rf"thread 1: reads 16 bytes of global memory at {data + 4:#x}, which is misaligned"
    ):
        launch(OFFSET + "ld.global.v4.u32 {r1, r2, r3, r4}, [d1];", [data], memory, block=2)


def test_an_uninitialised_output_cannot_be_read_until_it_is_written() -> None:
    memory = Memory()
    out = memory.allocate(128, "y")
    with pytest.raises(SimulationError, match=r"thread 0: reads 4 bytes .* of which byte 0 is uninitialised"):
        launch(OFFSET + "ld.global.u32 r1, [d1];", [out], memory)
    launch(OFFSET + "st.global.u16 [d1], r0;", [out], memory)
    with pytest.raises(SimulationError, match="of which byte 2 is uninitialised"):
        launch(OFFSET + "ld.global.u32 r1, [d1];", [out], memory)
    with pytest.raises(SimulationError, match=r"64 of 128 bytes at .* were never written, the first at byte 2"):
        memory.download(out, "u4", (32,))
    launch(OFFSET + "st.global.u32 [d1], r0; ld.global.u32 r1, [d1];", [out], memory)
    assert memory.download(out, "u4", (32,)).tolist() == list(range(32))


def test_inputs_are_read_only() -> None:
    memory = Memory()
    data = memory.upload(np.zeros(32, "u4"), "weights")
    with pytest.raises(SimulationError, match="thread 0: writes 4 bytes of read-only global memory"):
        launch(OFFSET + "st.global.u32 [d1], r0;", [data], memory)


def test_data_that_the_launch_wrote_cannot_be_read_through_the_read_only_path() -> None:
    memory = Memory()
    data = memory.upload(np.zeros(32, "u4"), writable=True)
    with pytest.raises(SimulationError, match=r"through \.nc, but this launch has written them"):
        launch(OFFSET + "st.global.u32 [d1], r0;\nld.global.nc.u32 r1, [d1];", [data], memory)


def test_shared_memory_ends_where_the_launch_says_and_starts_uninitialised() -> None:
    declare = ".extern .shared .align 16 .b8 tile[];"
    body = "mov.u32 r0, %tid.x; shl.b32 r1, r0, 2; mov.u32 r2, tile; add.u32 r1, r1, r2;\n"
    launch(body + "st.shared.u32 [r1], r0; ld.shared.u32 r3, [r1];", [], Memory(), declare=declare, shared_bytes=128)
    with pytest.raises(SimulationError, match="thread 25: writes 4 bytes of shared memory out"):
        launch(body + "st.shared.u32 [r1], r0;", [], Memory(), declare=declare, shared_bytes=100)
    with pytest.raises(SimulationError, match="byte 0 is uninitialised"):
        launch(body + "ld.shared.u32 r0, [r1];", [], Memory(), declare=declare, shared_bytes=128)


def test_blocks_do_not_share_their_shared_memory() -> None:
    memory = Memory()
    out = memory.allocate(4 * 4)
    body = """mov.u32 r0, %ctaid.x; st.shared.u32 [tile], r0; ld.shared.u32 r1, [tile];
    mul.wide.u32 d0, r0, 4; add.s64 d0, d0, q0; st.global.u32 [d0], r1;"""
    launch(body, [out], memory, declare=SHARED, grid=4, block=1)
    assert memory.download(out, "u4", (4,)).tolist() == [0, 1, 2, 3]


def test_generic_addresses_reach_every_space() -> None:
    memory = Memory()
    out = memory.allocate(64 * 4)
    body = """.local .align 8 .b8 own[16];
    mov.u32 r0, %tid.x; mov.u64 d0, tile; cvta.shared.u64 d1, d0; mov.u64 d2, own; cvta.local.u64 d3, d2;
    mul.wide.u32 d4, r0, 4; add.s64 d1, d1, d4;
    and.b32 r1, r0, 1; setp.eq.u32 p0, r1, 0; selp.b64 d5, d1, d3, p0;
    add.u32 r2, r0, 100; st.u32 [d5], r2; ld.u32 r3, [d5];
    isspacep.shared p1, d5; @p1 add.u32 r3, r3, 1000;
    add.s64 d6, q0, d4; st.u32 [d6], r3;"""
    launch(body, [out], memory, declare=SHARED, block=64)
    assert memory.download(out, "u4", (64,)).tolist() == [100 + i + 1000 * (i % 2 == 0) for i in range(64)]


def test_constants_and_initialised_variables_hold_their_tables() -> None:
    memory = Memory()
    out = memory.allocate(4 * 8)
    declare = ".const .align 4 .u32 table[4] = {1, 2, 0xFFFFFFFF, -4};\n"
    declare += ".global .align 4 .f32 bias[4] = {0f3F800000, 0f40000000};"
    body = """mov.u32 r0, %tid.x; mul.wide.u32 d0, r0, 4; mov.u64 d1, table; add.s64 d1, d1, d0; ld.const.u32 r1, [d1];
    mov.u64 d2, bias; add.s64 d2, d2, d0; ld.global.u32 r2, [d2];
    add.s64 d3, q0, d0; st.global.u32 [d3], r1; st.global.u32 [d3+16], r2;"""
    launch(body, [out], memory, declare=declare, block=4)
    assert memory.download(out, "u4", (8,)).tolist() == [1, 2, 0xFFFFFFFF, 0xFFFFFFFC, 0x3F800000, 0x40000000, 0, 0]


def test_narrow_loads_extend_into_wide_registers() -> None:
    memory = Memory()
    data = memory.upload(np.array([0x80, 0xFF], "u1"))
    out = memory.allocate(16)
    body = """ld.global.s8 r0, [q0]; ld.global.u8 r1, [q0]; ld.global.s16 d0, [q0];
    st.global.v2.u32 [q1], {r0, r1}; st.global.u64 [q1+8], d0;"""
    launch(body, [data, out], memory, block=1)
    assert memory.download(out, "u4", (2,)).tolist() == [0xFFFFFF80, 0x80]
    assert memory.download(out, "i8", (2,))[1] == np.int16(np.uint16(0xFF80).view("i2"))


def test_an_address_before_a_variable_is_understood_and_out_of_bounds() -> None:
    """NVRTC writes it with both signs."""
    with pytest.raises(SimulationError, match="writes 4 bytes of shared memory out"):
        launch("mov.u32 r0, 7;\nst.shared.u32 [tile+-16], r0;", [], Memory(), block=1, declare=SHARED)


def test_what_lies_between_variables_of_shared_memory_is_nobodys() -> None:
    declare = "\n".join(f".shared .align {align} .b8 {name}[64];" for name, align in (("one", 4), ("two", 64)))
    declare += "\n.extern .shared .align 128 .b8 rest[];"
    for name, size in (("one", 64), ("two", 64), ("rest", 128)):
        body = f"mov.u32 r0, {name};\nst.shared.u32 [r0+{{}}], r0;"
        for at in (0, size - 4):
            launch(body.format(at), [], Memory(), block=1, declare=declare, shared_bytes=128)
        for at in (-4, -64, size, size + 60):
            with pytest.raises(SimulationError, match="writes 4 bytes of shared memory out"):
                launch(body.format(at), [], Memory(), block=1, declare=declare, shared_bytes=128)


def test_what_lies_between_variables_does_not_count_as_shared_memory() -> None:
    memory = Memory()
    out = memory.allocate(4)
    declare = "".join(f".shared .align 4 .b8 {name}[64];\n" for name in ("one", "two"))
    body = "mov.u32 r1, one; mov.u32 r2, two;\nmov.u32 r0, %total_smem_size; st.global.u32 [q0], r0;"
    sizes = []
    for more in (0, 4096):
        launch(body, [out], memory, block=1, declare=declare, shared_bytes=more)
        sizes.append(int(memory.download(out, "u4", (1,))[0]))
    assert sizes[0] % 1024 == 128 and sizes[1] == sizes[0] + 4096
