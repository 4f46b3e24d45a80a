"""Cases in which an H200 (driver 580.159, 2026-11-21) and the simulator once differed; the values are the card's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from assembly import launch
from gpu.comparison import beyond_one_place
from jitmx.sim.memory import Memory


def words(body: str, *values: int, result: str = "d9") -> int:
    """The 64-bit `result` that `body` makes of `values`, given in d1, d2 and d3."""
    memory = Memory()
    source = memory.upload(np.array([*values, 0, 0, 0][:3], "u8"))
    out = memory.allocate(8)
    loads = " ".join(f"ld.global.u64 d{i + 1}, [q0+{8 * i}];" for i in range(3))
    low = "cvt.u32.u64 r1, d1; cvt.u32.u64 r2, d2; cvt.u32.u64 r3, d3;"
    launch(f"{loads} {low} {body} st.global.u64 [q1], {result};", [source, out], memory, block=1)
    return int(memory.download(out, "u8", (1,))[0])


def test_a_64_bit_field_takes_the_whole_of_position_and_length() -> None:
    assert words("bfe.u64 d9, d1, r2, r3;", 0x998CBC075736FE8C, 0x11, 0x100) == 0x00004CC65E03AB9B
    assert words("bfe.s64 d9, d1, r2, r3;", 0x998CBC075736FE8C, 0x11, 0x100) == 0xFFFFCCC65E03AB9B
    body = "shr.u32 r4, r3, 5; bfi.b64 d9, d1, d3, r2, r4;"
    assert words(body, 0xA14F1C56C16C55C4, 0x8000, 0x151) == 0x151


def test_a_32_bit_field_takes_the_low_byte_of_its_length() -> None:
    assert words("bfe.u32 r9, r1, r2, r3; cvt.u64.u32 d9, r9;", 0x5736FE8C, 0x11, 0x100) == 0


def test_slct_with_ftz_takes_a_negative_subnormal_for_zero() -> None:
    body = "slct.ftz.b32.f32 r9, r1, r2, r3; cvt.u64.u32 d9, r9;"
    assert words(body, 0x43B178C0, 0xC0ADE9F3, 0x80000003) == 0x43B178C0
    assert words(body.replace(".ftz", ""), 0x43B178C0, 0xC0ADE9F3, 0x80000003) == 0xC0ADE9F3


@pytest.mark.parametrize("rounding", ["rn", "rm"])
def test_mul_with_ftz_flushes_what_is_tiny_before_it_is_rounded(rounding: str) -> None:
    body = f"mul.{rounding}.ftz.f32 r9, r1, r2; cvt.u64.u32 d9, r9;"
    assert words(body, 0xBF7FFFFF, 0x00800000) == 0x80000000
    assert words(body.replace(".ftz", ""), 0xBF7FFFFF, 0x00800000) == 0x80800000


def test_div_and_half_precision_flush_so_too() -> None:
    assert words("div.rp.ftz.f32 r9, r1, r2; cvt.u64.u32 d9, r9;", 0x80800000, 0xBF800001) == 0
    assert words("mul.rn.ftz.f16x2 r9, r1, r2; cvt.u64.u32 d9, r9;", 0x2187BBFF, 0x55530400) == 0x3B5B8000
    body = "fma.rn.ftz.f16x2 r9, r1, r2, r3; cvt.u64.u32 d9, r9;"
    assert words(body, 0x5612095C, 0x9ECB0951, 0xFC008400) == 0xFC008000


def test_testp_takes_zeros_for_normal_numbers() -> None:
    body = "testp.normal.f32 p0, r1; selp.u64 d9, 1, 0, p0;"
    assert [words(body, bits) for bits in (0x80000000, 0, 0x007FFFFF, 0x00800000)] == [1, 1, 0, 1]


def test_additions_to_global_memory_flush_subnormals_and_those_to_shared_memory_do_not() -> None:
    for space, wanted in (("global", 0), ("shared", 0x007FFFFC)):
        memory = Memory()
        word, out = memory.upload(np.array([0x80000003], "u4"), writable=True), memory.allocate(4)
        target = "[q0]" if space == "global" else "[tile]"
        body = f"""mov.u32 r1, 0x007fffff; mov.u32 r2, 0x80000003; st.shared.u32 [tile], r2;
        red.{space}.add.f32 {target}, r1; ld.{space}.u32 r3, {target}; st.global.u32 [q1], r3;"""
        launch(body, [word, out], memory, block=1, declare=".shared .align 4 .b8 tile[4];")
        assert int(memory.download(out, "u4", (1,))[0]) == wanted


def test_a_wanted_nan_is_like_another_and_no_other_value() -> None:
    """A weight's scale may be NaN, and then the card and the simulator agree where both have one."""
    wanted = np.array([1.0, np.nan, 2.0], ml_dtypes.bfloat16)
    assert beyond_one_place(wanted, wanted) == 0
    assert beyond_one_place(np.array([1 + 2**-7, np.nan, 2.0], ml_dtypes.bfloat16), wanted) == 0
    assert 0.1 < beyond_one_place(np.array([1.5, np.nan, 2.0], ml_dtypes.bfloat16), wanted) < 0.5
    for other in ([1.0, 2.0, 2.0], [np.nan, np.nan, 2.0]):
        assert beyond_one_place(np.array(other, ml_dtypes.bfloat16), wanted) == np.inf
