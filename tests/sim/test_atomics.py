"""Atomics: every operation, many lanes on one word, and what they return."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from assembly import launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda x, y: (x + y) % (1 << 32),
    "min.s32": min,
    "max.s32": max,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "xor.b32": lambda x, y: x ^ y,
    "exch.b32": lambda x, y: y,
    "inc.u32": lambda x, y: 0 if x >= y else x + 1,
    "dec.u32": lambda x, y: y if x == 0 or x > y else x - 1,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_take_turns_on_a_word(name: str, space: str) -> None:
    """Lane i works on word i % 4 with operand 3 i + 1; each sees what the one before it left."""
    memory = Memory()
    words = memory.upload(np.full(4, 7, "u4"), writable=True)
    out = memory.allocate(64 * 4)
    address = "d2" if space == "global" else "r5"
    body = f"""mov.u32 r0, %tid.x; and.b32 r1, r0, 3; mul.wide.u32 d1, r1, 4; add.s64 d2, q0, d1;
    shl.b32 r5, r1, 2; mov.u32 r6, tile; add.u32 r5, r5, r6; setp.lt.u32 p0, r0, 4; mov.u32 r7, 7;
    @p0 st.shared.u32 [r5], r7; bar.sync 0;
    mad.lo.u32 r2, r0, 3, 1; atom.{space}.{name} r3, [{address}], r2;
    mul.wide.u32 d3, r0, 4; add.s64 d3, q1, d3; st.global.u32 [d3], r3;"""
    launch(body, [words, out], memory, block=64, declare=".shared .align 4 .b8 tile[16];")
    state, seen = [7] * 4, []
    for i in range(64):
        seen.append(state[i % 4])
        state[i % 4] = OPERATIONS[name](state[i % 4], 3 * i + 1)
    assert memory.download(out, "u4", (64,)).tolist() == seen
    if space == "global":
        assert memory.download(words, "u4", (4,)).tolist() == state


def test_compare_and_swap_lets_one_lane_win() -> None:
    memory = Memory()
    lock = memory.upload(np.zeros(1, "u4"), writable=True)
    out = memory.allocate(96 * 4)
    body = """mov.u32 r0, %tid.x; add.u32 r1, r0, 1; atom.global.cas.b32 r2, [q0], 0, r1;
    mul.wide.u32 d0, r0, 4; add.s64 d0, d0, q1; st.global.u32 [d0], r2;"""
    launch(body, [lock, out], memory, block=96)
    assert memory.download(out, "u4", (96,)).tolist() == [0] + [1] * 95


@pytest.mark.parametrize(("kind", "dtype"), [("f32", "f4"), ("f64", "f8")])
def test_floats_are_added_one_by_one(kind: str, dtype: str) -> None:
    memory = Memory()
    total = memory.upload(np.zeros(1, dtype), writable=True)
    terms = np.random.default_rng(2).standard_normal(64).astype(dtype)
    data = memory.upload(terms)
    register, size = ("r1", 4) if kind == "f32" else ("d1", 8)
    body = f"""mov.u32 r0, %tid.x; mul.wide.u32 d0, r0, {size}; add.s64 d0, d0, q1; ld.global.{kind} {register}, [d0];
    red.global.add.{kind} [q0], {register};"""
    launch(body, [total, data], memory, block=64)
    want = np.zeros((), dtype)
    for term in terms:
        want = want + term
    assert memory.download(total, dtype, (1,))[0] == want


def test_packed_and_vector_reductions() -> None:
    memory = Memory()
    pair = memory.upload(np.array([1.5, -2.0], "f2"), writable=True)
    quad = memory.upload(np.arange(4, dtype="f4"), writable=True)
    body = """mov.u32 r0, 0x3C003C00; red.global.add.noftz.f16x2 [q0], r0;
    mov.b32 r1, 0f3F800000; mov.b32 r2, 0f40000000;
    red.global.add.v4.f32 [q1], {r1, r2, r1, r2};"""
    launch(body, [pair, quad], memory, block=2)
    assert memory.download(pair, "f2", (2,)).tolist() == [3.5, 0.0]
    assert memory.download(quad, "f4", (4,)).tolist() == [2.0, 5.0, 4.0, 7.0]


def test_atomics_are_checked_like_any_access() -> None:
    memory = Memory()
    fresh, fixed = memory.allocate(4, "fresh"), memory.upload(np.zeros(1, "u4"), "fixed")
    with pytest.raises(SimulationError, match="byte 0 is uninitialised"):
        launch("red.global.add.u32 [q0], 1;", [fresh], memory)
    with pytest.raises(SimulationError, match="writes 4 bytes of read-only global memory"):
        launch("red.global.add.u32 [q0], 1;", [fixed], memory)
    with pytest.raises(SimulationError, match=r"updates 4 bytes .* which is misaligned"):
        launch("red.global.add.u32 [q0+2], 1;", [fixed], memory)
    with pytest.raises(SimulationError, match=r"the operation \.add of \.b32 is not known|\.frob"):
        launch("red.global.frob.u32 [q0], 1;", [fixed], memory)


def test_the_last_block_sees_what_all_others_wrote() -> None:
    """Partial sums, a fence, a counter: the block that counts last adds them up. Blocks run in two waves."""
    memory = Memory()
    partial = memory.allocate(8 * 4)
    counter = memory.upload(np.zeros(1, "u4"), writable=True)
    out = memory.allocate(4)
    body = """mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x; setp.ne.u32 p0, r0, 0;
    mul.wide.u32 d0, r1, 4; add.s64 d0, d0, q0; add.u32 r2, r1, 10;
    @!p0 st.global.u32 [d0], r2;
    {fence}
    bar.sync 0;
    @p0 bra $end;
    atom.global.add.u32 r3, [q1], 1; setp.ne.u32 p1, r3, 7; @p1 bra $end;
    membar.gl; mov.u32 r4, 0; mov.u32 r5, 0; mov.u64 d1, q0;
    $sum: ld.global.u32 r6, [d1]; add.u32 r4, r4, r6; add.s64 d1, d1, 4; add.u32 r5, r5, 1;
    setp.lt.u32 p2, r5, 8; @p2 bra $sum; st.global.u32 [q2], r4;
    $end:"""
    launch(body.replace("{fence}", "membar.gl;"), [partial, counter, out], memory, grid=8, block=64, resident_blocks=4)
    assert memory.download(out, "u4", (1,))[0] == sum(range(10, 18))
    memory = Memory()
    addresses = [memory.allocate(32), memory.upload(np.zeros(1, "u4"), writable=True), memory.allocate(4)]
    with pytest.raises(SimulationError, match=r"reads global memory .* thread 0 of block \d has written"):
        launch(body.replace("{fence}", ""), addresses, memory, grid=8, block=64, resident_blocks=4)
