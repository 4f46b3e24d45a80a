"""Registers that a kernel reads before it sets them."""

from __future__ import annotations

import numpy as np
import pytest

from assembly import evaluate, launch
from jitmx.errors import SimulationError
from jitmx.sim.memory import Memory


def test_a_register_that_nothing_sets_is_named() -> None:
    with pytest.raises(
        SimulationError, match=r"k, PTX line 14, block 0, thread 0: reads register r1, which nothing has set"
    ):
        launch("add.u32 r0, r1, 1;", [], Memory())


def test_only_the_threads_that_skipped_the_assignment_are_at_fault() -> None:
    a = np.arange(64, dtype="u4")
    body = "setp.lt.u32 p0, a, 40; {guard} mov.u32 r1, 5; $skip: setp.lt.u32 p1, a, {limit};"
    body += "mov.u32 z, 0; @p1 add.u32 z, r1, 1;"
    for guard in ("@p0", "@!p0 bra $skip;"):
        text = body.replace("{guard}", guard)
        assert evaluate(text.replace("{limit}", "40"), a).tolist() == [6] * 40 + [0] * 24
        with pytest.raises(SimulationError, match="thread 40: reads register r1, which nothing has set"):
            evaluate(text.replace("{limit}", "41"), a)


def test_copies_of_unset_registers_are_followed_to_their_use() -> None:
    a = np.arange(32, dtype="u4")
    assert evaluate("mov.u32 r2, r1; mov.u32 r3, r2; mov.u32 r3, a; add.u32 z, r3, 1;", a).tolist() == (a + 1).tolist()
    with pytest.raises(SimulationError, match="reads register r3, which nothing has set"):
        evaluate("mov.u32 r2, r1; mov.u32 r3, r2; add.u32 z, r3, 1;", a)


def test_a_loop_sets_what_its_next_round_reads() -> None:
    a = np.arange(32, dtype="u4")
    body = """mov.u32 r0, 0;
    $loop: setp.eq.u32 p0, r0, 0; @p0 bra $first; add.u32 r1, r1, a; bra $next;
    $first: mov.u32 r1, a;
    $next: add.u32 r0, r0, 1; setp.lt.u32 p1, r0, 3; @p1 bra $loop; mov.u32 z, r1; """
    assert evaluate(body, a).tolist() == (3 * a).tolist()


def test_prmt_may_take_bytes_that_nobody_looks_at_from_a_register_that_nothing_sets() -> None:
    """As compilers do before dp2a.lo, which reads half of what it is given."""
    a = np.arange(32, dtype="u4")
    low = "prmt.b32 r2, a, r1, 0x5410; dp2a.lo.u32.u32 z, 65537, r2, 0;"  # r1 is the upper half of r2
    assert evaluate(low, a).tolist() == a.tolist()
    assert evaluate(low.replace(".lo", ".hi"), a).tolist() == [2 * 0xA5] * 32  # which looks like no value
    with pytest.raises(SimulationError, match="reads register r1, which nothing has set"):
        evaluate(low + "add.u32 z, z, r1;", a)
    with pytest.raises(SimulationError, match="reads register r1, which nothing has set"):
        evaluate("setp.gt.u32 p0, a, 40; @p0 mov.u32 r1, 1;" + low, a)
