"""Integer instructions against Python's integers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from assembly import evaluate
from jitmx.errors import SimulationError

Array = npt.NDArray[Any]

EDGES = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
]
WIDE = [*EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0]


def words(bits: int, count: int, seed: int) -> Array:
    """Edge cases crossed, then random words."""
    random = (
        np.random.default_rng(seed).integers(0, 1 << bits, count, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (np.random.default_rng(seed).integers(0, 1 << 63, count, dtype=np.uint64) * 2 + np.uint64(seed % 2))
    )
    return random.astype(f"u{bits // 8}")


def pairs(bits: int) -> tuple[Array, Array]:
    edges = [x % (1 << bits) for x in (WIDE if bits == 64 else EDGES)]
    first = np.repeat(np.array(edges, f"u{bits // 8}"), len(edges))
    second = np.tile(np.array(edges, f"u{bits // 8}"), len(edges))
    return np.r_[first, words(bits, 300, 1)], np.r_[second, words(bits, 300, 2)]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if y else -1


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda x, y: x - quotient(x, y) * y if y else x,
}


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_is_that_of_integers_modulo_their_width(name: str, sign: str, bits: int) -> None:
    a, b = pairs(bits)
    got = evaluate(f"{name}.{sign}{bits} z, a, b;", a, b, result=f"u{bits // 8}")
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        p, q = (signed(x, bits), signed(y, bits)) if sign == "s" else (x, y)
        assert z == OPERATIONS[name](p, q) % (1 << bits), (x, y)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_the_upper_half_of_a_product(sign: str, bits: int) -> None:
    a, b = pairs(bits)
    got = evaluate(f"mul.hi.{sign}{bits} z, a, b;", a, b, result=f"u{bits // 8}")
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        p, q = (signed(x, bits), signed(y, bits)) if sign == "s" else (x, y)
        assert z == (p * q >> bits) % (1 << bits)


@pytest.mark.parametrize(("kind", "bits"), [("u16", 16), ("s16", 16), ("u32", 32), ("s32", 32)])
def test_wide_products_and_sums(kind: str, bits: int) -> None:
    a, b = pairs(bits)
    c = words(2 * bits, len(a), 5)
    got = evaluate(f"mad.wide.{kind} z, a, b, c;", a, b, c, result=f"u{bits // 4}")
    for x, y, w, z in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        p, q = (signed(x, bits), signed(y, bits)) if kind[0] == "s" else (x, y)
        assert z == (p * q + w) % (1 << 2 * bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("name", ["shl.b", "shr.u", "shr.s", "shr.b"])
def test_shifts_past_the_width_leave_zeros_or_signs(name: str, bits: int) -> None:
    a, _ = pairs(bits)
    b = np.resize(np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0xFFFFFFFF], "u4"), len(a))
    got = evaluate(f"{name}{bits} z, a, b;", a, b, result=f"u{bits // 8}")
    for x, n, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        value = signed(x, bits) if name == "shr.s" else x
        n = min(n, 64)
        assert z == (value << n if name == "shl.b" else value >> n) % (1 << bits), (x, n)


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xEA, 0xF8, 0xCA, 0x6A, 0xE8, 0x1B, 0x00, 0xFF, 0x35])
def test_lop3_is_its_table(table: int) -> None:
    a, b, c = words(32, 64, 1), words(32, 64, 2), words(32, 64, 3)
    got = evaluate(f"lop3.b32 z, a, b, c, {table};", a, b, c)
    for x, y, w, z in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert z == sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | w >> i & 1) & 1) << i for i in range(32))


def test_prmt_picks_bytes_and_spreads_their_signs() -> None:
    a, b, c = words(32, 500, 1), words(32, 500, 2), words(32, 500, 3)
    got = evaluate("prmt.b32 z, a, b, c;", a, b, c)
    fixed = evaluate("prmt.b32 z, a, b, 0xB4C1;", a, b)
    for x, y, selectors, results in ((a, b, c, got), (a, b, np.full_like(a, 0xB4C1), fixed)):
        for p, q, s, z in zip(x.tolist(), y.tolist(), selectors.tolist(), results.tolist(), strict=True):
            pool = (p | q << 32).to_bytes(8, "little")
            want = []
            for i in range(4):
                control = s >> 4 * i & 15
                byte = pool[control & 7]
                want.append((255 if byte & 128 else 0) if control & 8 else byte)
            assert z == int.from_bytes(bytes(want), "little")


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        ("f4e", [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        ("b4e", [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        ("rc8", [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecl", [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecr", [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        ("rc16", [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ],
)
def test_prmt_modes_follow_the_table_of_the_isa(mode: str, table: list[list[int]]) -> None:
    a, b = np.full(4, 0x33221100, "u4"), np.full(4, 0x77665544, "u4")
    got = evaluate(f"prmt.b32.{mode} z, a, b, c;", a, b, np.arange(4, dtype="u4"))
    for row, z in zip(table, got.tolist(), strict=True):
        assert [z >> 8 * i & 15 for i in (3, 2, 1, 0)] == row if mode != "b4e" else True
        if mode == "b4e":
            assert [z >> 8 * i & 15 for i in (3, 2, 1, 0)] == row


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe_extends_with_the_sign_of_signed_fields(kind: str) -> None:
    bits = int(kind[1:])
    a, _ = pairs(bits)
    b, c = words(32, len(a), 7) % 70, words(32, len(a), 8) % 70
    got = evaluate(f"bfe.{kind} z, a, b, c;", a, b.astype("u4"), c.astype("u4"), result=f"u{bits // 8}")
    for x, position, length, z in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        # The pseudo-code of the ISA.
        top = bits - 1
        sign = 0 if kind[0] == "u" or length == 0 else x >> min(position + length - 1, top) & 1
        want = 0
        for i in range(bits):
            bit = x >> position + i & 1 if i < length and position + i <= top else sign
            want |= bit << i
        assert z == want, (x, position, length)


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi_replaces_a_field_within_the_word(bits: int) -> None:
    a, b = pairs(bits)
    c, e = (words(32, len(a), 7) % 70).astype("u4"), (words(32, len(a), 8) % 70).astype("u4")
    got = evaluate(f"bfi.b{bits} z, a, b, c, e;", a, b, c, e, result=f"u{bits // 8}")
    for x, y, position, length, z in zip(a.tolist(), b.tolist(), c.tolist(), e.tolist(), got.tolist(), strict=True):
        want = y
        for i in range(length):
            if position + i < bits:
                want = want & ~(1 << position + i) | (x >> i & 1) << position + i
        assert z == want, (x, y, position, length)


def test_bit_counts() -> None:
    a, _ = pairs(32)
    texts = [f"{x:032b}" for x in a.tolist()]
    assert evaluate("popc.b32 z, a;", a).tolist() == [t.count("1") for t in texts]
    assert evaluate("clz.b32 z, a;", a).tolist() == [len(t) - len(t.lstrip("0")) for t in texts]
    assert evaluate("brev.b32 z, a;", a).tolist() == [int(t[::-1], 2) for t in texts]
    assert evaluate("bfind.u32 z, a;", a).tolist() == [x.bit_length() - 1 & 0xFFFFFFFF for x in a.tolist()]
    wide, _ = pairs(64)
    assert evaluate("clz.b64 z, a;", wide).tolist() == [64 - x.bit_length() for x in wide.tolist()]
    assert evaluate("popc.b64 z, a;", wide).tolist() == [x.bit_count() for x in wide.tolist()]


@pytest.mark.parametrize("name", ["shf.l.wrap", "shf.l.clamp", "shf.r.wrap", "shf.r.clamp"])
def test_funnel_shifts(name: str) -> None:
    a, b = pairs(32)
    c = np.resize(np.array([0, 1, 31, 32, 33, 64, 0xFFFFFFFF], "u4"), len(a))
    got = evaluate(f"{name}.b32 z, a, b, c;", a, b, c)
    for x, y, n, z in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        n = n & 31 if "wrap" in name else min(n, 32)
        wide = y << 32 | x
        assert z == ((wide << n) >> 32 if ".l." in name else wide >> n) & 0xFFFFFFFF


@pytest.mark.parametrize("kinds", ["u32.u32", "s32.s32", "u32.s32", "s32.u32"])
def test_byte_dot_products(kinds: str) -> None:
    a, b = pairs(32)
    c = words(32, len(a), 4)
    first, second = (kind[0] == "s" for kind in kinds.split("."))

    def field(x: int, shift: int, bits: int, is_signed: bool) -> int:
        value = x >> shift & (1 << bits) - 1
        return signed(value, bits) if is_signed else value

    four = evaluate(f"dp4a.{kinds} z, a, b, c;", a, b, c)
    two = evaluate(f"dp2a.hi.{kinds} z, a, b, c;", a, b, c)
    for x, y, w, z4, z2 in zip(a.tolist(), b.tolist(), c.tolist(), four.tolist(), two.tolist(), strict=True):
        assert z4 == (w + sum(field(x, 8 * i, 8, first) * field(y, 8 * i, 8, second) for i in range(4))) % (1 << 32)
        assert z2 == (w + sum(field(x, 16 * i, 16, first) * field(y, 16 + 8 * i, 8, second) for i in range(2))) % (
            1 << 32
        )


@pytest.mark.parametrize("name", ["min", "max"])
def test_relu_makes_a_negative_outcome_0(name: str) -> None:
    a, b = pairs(32)
    got = evaluate(f"{name}.relu.s32 z, a, b;", a, b)
    choose = max if name == "max" else min
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        assert z == max(choose(signed(x, 32), signed(y, 32)), 0)
    with pytest.raises(SimulationError, match="relu is not known"):
        evaluate(f"{name}.relu.u32 z, a, b;", a, b)


def test_packed_halves_are_compared_apart() -> None:
    a, b = pairs(32)
    for name, sign in (("max", "u"), ("min", "u"), ("max", "s"), ("min", "s")):
        got = evaluate(f"{name}.{sign}16x2 z, a, b;", a, b)
        choose = max if name == "max" else min
        for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
            for shift in (0, 16):
                p, q = x >> shift & 0xFFFF, y >> shift & 0xFFFF
                if sign == "s":
                    p, q = signed(p, 16), signed(q, 16)
                assert z >> shift & 0xFFFF == choose(p, q) & 0xFFFF


def test_a_carry_travels_through_four_words() -> None:
    a, b = words(64, 200, 1), words(64, 200, 2)
    body = """mov.b64 {r0, r1}, a; mov.b64 {r2, r3}, b;
    add.cc.u32 r4, r0, r2; addc.u32 r5, r1, r3;
    mov.b64 z, {r4, r5};"""
    np.testing.assert_array_equal(evaluate(body, a, b, result="u8"), a + b)
    np.testing.assert_array_equal(evaluate(body.replace("add", "sub"), a, b, result="u8"), a - b)


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("how", COMPARISONS)
def test_comparisons_set_a_predicate_and_its_opposite(how: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = pairs(bits)
    body = f"""setp.{how}.{kind} p0|p1, a, b;
    selp.u32 r0, 1, 0, p0; selp.u32 r1, 2, 0, p1;
    setp.{how}.and.{kind} p2, a, b, !p1;
    @p2 add.u32 r0, r0, 4;
    add.u32 z, r0, r1;"""
    got = evaluate(body, a, b)
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        p, q = (signed(x, bits), signed(y, bits)) if kind[0] == "s" else (x, y)
        assert z == (5 if COMPARISONS[how](p, q) else 2)


def test_an_unknown_instruction_is_named_before_anything_runs() -> None:
    with pytest.raises(SimulationError, match=r"k, PTX line \d+: frobnicate\.u32"):
        evaluate("frobnicate.u32 z, a, a;", np.zeros(1, "u4"))
    with pytest.raises(SimulationError, match=r"add\.cromulent\.u32: \.cromulent is not known"):
        evaluate("add.cromulent.u32 z, a, a;", np.zeros(1, "u4"))


@pytest.mark.parametrize("bits", [32, 64])
def test_products_carry_into_the_words_above(bits: int) -> None:
    """a·b + c, with c two words, as mad.lo.cc and madc.hi.cc make it; the carry out comes last."""
    a, b, c = (words(bits, 2000, seed) for seed in (5, 6, 7))
    body = f"""mad.lo.cc.u{bits} {{x}}, a, b, c; madc.hi.cc.u{bits} {{y}}, a, b, c; addc.u{bits} {{w}}, 0, 0;"""
    names = {"x": "r1", "y": "r2", "w": "r3"} if bits == 32 else {"x": "d1", "y": "d2", "w": "d3"}
    want = [x * y + (z << bits | z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    for place, name in enumerate(names.values()):
        text = body.format(**names) + f"mov.b{bits} z, {name};"
        got = evaluate(text, a, b, c, result=f"u{bits // 8}")
        assert got.tolist() == [value >> bits * place & (1 << bits) - 1 for value in want]


def test_lop3_tells_whether_any_bit_is_set() -> None:
    a, b = words(32, 500, 8) & np.uint32(3), words(32, 500, 9) & np.uint32(3)
    for how, combine in (("or", np.logical_or), ("and", np.logical_and)):
        body = f"setp.eq.u32 p2, a, 2; lop3.{how}.b32 r1|p1, a, b, 0, 0xC0, p2; selp.u32 z, 64, 0, p1; or.b32 z, z, r1;"
        want = np.where(combine(a & b != 0, a == 2), 64, 0) | a & b
        np.testing.assert_array_equal(evaluate(body, a, b), want)
    np.testing.assert_array_equal(
        evaluate("setp.eq.u32 p2, a, 9; lop3.or.b32 _|p1, a, b, 0, 0xC0, p2; selp.u32 z, 1, 0, p1;", a, b), a & b != 0
    )


def test_set_writes_the_truth_of_its_result_type() -> None:
    a, b = words(32, 300, 10) & np.uint32(7), words(32, 300, 11) & np.uint32(7)
    for kind, true in (("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000)):
        np.testing.assert_array_equal(evaluate(f"set.lt.{kind}.u32 z, a, b;", a, b), np.where(a < b, true, 0))
    both = np.where((a < b) ^ (a == 3), 0xFFFFFFFF, 0)
    np.testing.assert_array_equal(evaluate("setp.eq.u32 p1, a, 3; set.lt.xor.u32.u32 z, a, b, p1;", a, b), both)


@pytest.mark.parametrize(("kind", "true"), [("f16x2", 0x3C00), ("bf16x2", 0x3F80), ("u32", 0xFFFF)])
def test_packed_comparisons_write_a_half_each(kind: str, true: int) -> None:
    source = "f16x2" if kind == "u32" else kind
    rng = np.random.default_rng(12)
    one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}[source]
    halves = rng.choice(np.array([0, 0x8000, one, one | 0x8000, 0x7FFF], "u2"), (2, 800))  # 0, -0, 1, -1, NaN
    a, b = halves.view("u4")
    order = {0: 0.0, 0x8000: 0.0, one: 1.0, one | 0x8000: -1.0, 0x7FFF: np.nan}
    x, y = (np.array([order[int(code)] for code in row]) for row in halves)
    for how, holds in (("lt", x < y), ("eq", x == y), ("neu", ~(x == y)), ("num", ~np.isnan(x + y))):
        got = evaluate(f"set.{how}.{kind}.{source} z, a, b;", a, b).view("u2")
        np.testing.assert_array_equal(got, np.where(holds, true, 0))
    also = evaluate(f"setp.eq.u32 p1, a, b; set.lt.and.{kind}.{source} z, a, b, p1;", a, b).view("u2")
    np.testing.assert_array_equal(also, np.where((x < y) & np.repeat(a == b, 2), true, 0))
