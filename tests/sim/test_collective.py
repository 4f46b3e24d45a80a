"""shfl, vote, match, redux and elect against the definitions of the ISA, lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from assembly import evaluate

Array = npt.NDArray[Any]

VALUES = np.random.default_rng(5).integers(0, 1 << 32, 64, dtype=np.uint64).astype("u4")


def source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that shfl reads, and its predicate; after the pseudo-code of the ISA."""
    bound, segment = c & 31, c >> 8 & 31
    highest = lane & segment | bound & ~segment
    lowest = lane & segment
    j, inside = {
        "up": (lane - b, lane - b >= highest),
        "down": (lane + b, lane + b <= highest),
        "bfly": (lane ^ b, lane ^ b <= highest),
        "idx": (lowest | b & ~segment & 31, (lowest | b & ~segment & 31) <= highest),
    }[mode]
    return (j, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles_stay_within_their_segment(mode: str, width: int) -> None:
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 3, width // 2, width - 1):
        body = f"shfl.sync.{mode}.b32 z|p0, a, {b}, {c}, -1; @!p0 xor.b32 z, z, 1;"
        got = evaluate(body, VALUES)
        for i, z in enumerate(got.tolist()):
            j, inside = source(mode, i % 32, b, c)
            assert z == int(VALUES[i // 32 * 32 + j]) ^ (not inside), (i, b)


def test_each_lane_may_name_its_own_source() -> None:
    picks = np.random.default_rng(6).integers(0, 32, 64).astype("u4")
    got = evaluate("shfl.sync.idx.b32 z, a, b, 31, -1;", VALUES, picks)
    np.testing.assert_array_equal(got, VALUES[np.arange(64) // 32 * 32 + picks])


def test_votes_count_the_lanes_of_their_warp() -> None:
    a = np.r_[np.ones(32), np.arange(32) % 3 == 0].astype("u4")
    ballot = evaluate("setp.ne.u32 p0, a, 0; vote.sync.ballot.b32 z, p0, -1;", a)
    bits = sum(1 << i for i in range(0, 32, 3))
    assert ballot.tolist() == [0xFFFFFFFF] * 32 + [bits] * 32
    for mode, want in (("all", [1, 0]), ("any", [1, 1]), ("uni", [1, 0])):
        got = evaluate(f"setp.ne.u32 p0, a, 0; vote.sync.{mode}.pred p1, p0, -1; selp.u32 z, 1, 0, p1;", a)
        assert got.tolist() == np.repeat(want, 32).tolist()


def test_a_vote_of_some_lanes_leaves_the_others_out() -> None:
    a = np.arange(32, dtype="u4")
    body = """mov.u32 z, 0; setp.ge.u32 p0, a, 12; @p0 bra $end; setp.ne.u32 p1, a, 3;
    vote.sync.ballot.b32 z, p1, 0xFFF; activemask.b32 r0; xor.b32 z, z, r0;
    $end:"""
    assert evaluate(body, a).tolist() == [0x008] * 12 + [0] * 20


def test_matches_find_equal_values() -> None:
    a = np.r_[np.arange(32) % 5, np.full(32, 9)].astype("u4")
    got = evaluate("match.any.sync.b32 z, a, -1;", a).tolist()
    same = [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)]
    assert got == same + [0xFFFFFFFF] * 32
    got = evaluate("match.all.sync.b32 z|p0, a, -1; @p0 add.u32 z, z, 1;", a).tolist()
    assert got == [0] * 64  # no match, then a full mask plus one


@pytest.mark.parametrize("name", ["add", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("members", [0xFFFFFFFF, 0x0000FFFF])
def test_reductions_over_the_lanes_that_take_part(name: str, members: int) -> None:
    lanes = members.bit_count()
    kinds = ("u32", "s32") if name in ("add", "min", "max") else ("b32",)
    for kind in kinds:
        body = f"""mov.u32 z, 0; mov.u32 r1, %laneid; setp.ge.u32 p0, r1, {lanes}; @p0 bra $end;
        redux.sync.{name}.{kind} z, a, {members}; $end:"""
        got = evaluate(body, VALUES).reshape(2, 32)
        rows = VALUES.reshape(2, 32)[:, :lanes].view("i4" if kind == "s32" else "u4")
        function = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(name) or getattr(np, f"bitwise_{name}")
        want = function.reduce(rows, 1, rows.dtype).view("u4")
        np.testing.assert_array_equal(got[:, :lanes], np.repeat(want[:, None], lanes, 1))
        assert not got[:, lanes:].any()


def test_float_reductions_step_over_nan() -> None:
    a = np.random.default_rng(1).standard_normal(64).astype("f4")
    a[5] = np.nan
    body = "redux.sync.{name}.f32 z, a, -1;"
    words = a.view("u4")
    low = evaluate(body.replace("{name}", "min"), words, result="f4")
    assert low.tolist() == np.repeat([np.nanmin(a[:32]), a[32:].min()], 32).tolist()
    high = evaluate(body.replace("{name}", "max.abs.NaN"), words)
    assert high.tolist() == [0x7FFFFFFF] * 32 + [int(np.abs(a[32:]).max().view("u4"))] * 32


def test_one_lane_of_each_warp_is_elected() -> None:
    a = np.zeros(64, "u4")
    got = evaluate("elect.sync r1|p0, -1; selp.u32 z, 100, 0, p0; add.u32 z, z, r1;", a)
    assert got.tolist() == ([100] + [0] * 31) * 2
