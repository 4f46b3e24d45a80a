"""Instructions that go together do what they would do one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assembly import kernel, launch
from jitmx.errors import SimulationError
from jitmx.sim import translate
from jitmx.sim.launch import translate as program_of
from jitmx.sim.memory import Memory
from strategies import examples

Array = npt.NDArray[Any]
TILE = ".shared .align 16 .b8 tile[1024];"
# Thread i has the 16 bytes at 16 · i of the tile.
BEGIN = """
mov.u32 r40, %tid.x; shl.b32 r41, r40, 4; mov.u32 r42, tile; add.u32 r41, r41, r42; mul.wide.u32 d0, r40, 64;
add.s64 d0, d0, q0; ld.global.v4.u32 {r0, r1, r2, r3}, [d0]; ld.global.v4.u32 {r4, r5, r6, r7}, [d0+16];
st.shared.v4.u32 [r41], {r4, r5, r6, r7}; setp.lt.u32 p1, r40, 32; @p1 bra $some; bra $end;
$some:
"""
END = """
st.global.v4.u32 [d0+32], {r0, r1, r2, r3}; st.global.v4.u32 [d0+48], {r4, r5, r6, r7};
$end:
"""

registers = st.integers(0, 7).map(lambda i: f"r{i}")
instructions = st.one_of(
    st.builds("fma.rn.bf16x2 {}, {}, {}, {};".format, registers, registers, registers, registers),
    st.builds("fma.rn.f32 {}, {}, {}, {};".format, registers, registers, registers, registers),
    st.builds("cvt.rn.bf16x2.f32 {}, {}, {};".format, registers, registers, registers),
    st.builds("add.u32 {}, {}, {};".format, registers, registers, registers),
    st.builds("mov.u32 {}, {};".format, registers, st.one_of(registers, st.integers(0, 9).map(str))),
    st.builds("ld.shared.u32 {}, [r41+{}];".format, registers, st.sampled_from((0, 4, 8, 12))),
    st.builds("st.shared.u32 [r41+{}], {};".format, st.sampled_from((0, 4, 8, 12)), registers),
    st.builds("ld.global.u32 {}, [d0+{}];".format, registers, st.sampled_from((0, 16, 28))),
    st.builds("shfl.sync.bfly.b32 {}, {}, 1, 31, -1;".format, registers, registers),
    st.builds("@p2 fma.rn.f32 {}, {}, {}, {};".format, registers, registers, registers, registers),
    st.builds("setp.lt.u32 p2, {}, {};".format, registers, registers),
    st.builds(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{0}}}, {{{1}}}, {{{2}}}, {{{3}}};".format,
        st.sampled_from(("r0, r1, r2, r3", "r4, r5, r6, r7")),
        st.sampled_from(("r0, r1, r2, r3", "r4, r5, r6, r7", "r2, r3, r4, r5")),
        st.sampled_from(("r0, r1", "r6, r7")),
        st.sampled_from(("r0, r1, r2, r3", "r4, r5, r6, r7")),
    ),
)


def outcome(body: str, threads: int) -> Array:
    program_of.cache_clear()
    memory = Memory()
    rng = np.random.default_rng(7)
    held = memory.upload(rng.integers(0, 1 << 32, (threads, 16), dtype=np.uint32), writable=True)
    launch(BEGIN + body + END, [held], memory, block=threads, declare=TILE)
    return memory.download(held, np.uint32, (threads, 16))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(listed=st.lists(instructions, min_size=2, max_size=24), threads=st.sampled_from((32, 64)))
def test_batches_change_no_result(listed: list[str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "setp.eq.u32 p2, r40, 3;\n" + "\n".join(listed)
    together = outcome(body, threads)
    with monkeypatch.context() as patch:
        patch.setattr(translate, "batches", lambda body, accesses, watched: [[i] for i in range(len(body))])
        np.testing.assert_array_equal(together, outcome(body, threads))


LOADS = """
mov.u32 r40, %tid.x; shl.b32 r41, r40, 2; mov.u32 r42, tile; add.u32 r41, r41, r42; st.shared.u32 [r41], r40;
xor.b32 r43, r41, 128;
ld.shared.u32 r1, [r41];
ld.shared.u32 r2, [{place}];
ld.shared.u32 r3, [r41];
"""


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("r41+2", "reads 4 bytes of shared memory at .* misaligned"),
        ("r41+4096", "reads 4 bytes of shared memory outside of it"),
        ("r41+512", "reads 4 bytes of shared memory at .* uninitialised"),
        ("r43", "reads shared memory at .*, which thread 32 has written"),
    ],
)
def test_a_fault_of_one_load_of_several_names_its_line(place: str, text: str) -> None:
    body = LOADS.format(place=place)
    source = kernel(body, 0, declare=TILE).splitlines()
    line = next(number for number, found in enumerate(source, 1) if f"r2, [{place}]" in found)
    with pytest.raises(SimulationError, match=f"PTX line {line}, block 0, thread 0: {text}"):
        launch(body, [], Memory(), block=64, declare=TILE)


def test_loads_stay_between_the_stores_and_barriers_that_they_lie_between() -> None:
    body = """
    mov.u32 r40, %tid.x; shl.b32 r41, r40, 2; mov.u32 r42, tile; add.u32 r41, r41, r42; xor.b32 r43, r41, 128;
    st.shared.u32 [r41], r40; bar.sync 0; ld.shared.u32 r1, [r43]; bar.sync 0; st.shared.u32 [r41], 7;
    bar.warp.sync -1; ld.shared.u32 r2, [r41]; add.u32 r1, r1, r2; mul.wide.u32 d0, r40, 4; add.s64 d0, d0, q0;
    st.global.u32 [d0], r1;
    """
    memory = Memory()
    out = memory.allocate(256)
    launch(body, [out], memory, block=64, declare=".shared .align 256 .b8 tile[256];")
    np.testing.assert_array_equal(memory.download(out, np.uint32, (64,)), (np.arange(64) ^ 32) + 7)
