"""mma against float64 products, with the fragment tables of the PTX ISA written out here, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.mma import Product, rounded, settled
from jitmx.sim.mma import product as parsed

Array = npt.NDArray[Any]
Place = Callable[[int, int], tuple[int, int]]

TYPES: dict[str, tuple[int, Any]] = {
    "f16": (16, np.float16),
    "bf16": (16, ml_dtypes.bfloat16),
    "e4m3": (8, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, ml_dtypes.float8_e5m2),
    "e3m2": (8, ml_dtypes.float6_e3m2fn),
    "e2m3": (8, ml_dtypes.float6_e2m3fn),
    "s8": (8, np.int8),
    "u8": (8, np.uint8),
}


def product(parts: tuple[str, ...]) -> Callable[..., Array]:
    """The product that an opcode names, as a function of registers [warps, 32, registers]."""
    found: Product = parsed(parts)

    def run(a: Array, b: Array, c: Array, *scaling: Any) -> Array:
        a, b, c = (np.ascontiguousarray(words.transpose(2, 0, 1)).reshape(words.shape[2], -1) for words in (a, b, c))
        scaling = tuple(x.reshape(1, -1) if isinstance(x, np.ndarray) else x for x in scaling)
        words = settled(found.add(found.products(a, b, *scaling)[0], c), found.d)
        return words.reshape(len(words), -1, 32).transpose(1, 2, 0)

    return run


def a_place(shape: str) -> Place:
    """Row and column of element i of lane l in A, as the PTX ISA's listings give them."""

    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if shape == "m16n8k8 16":
            return group + (8 if i >= 2 else 0), thread * 2 + (i & 1)
        if shape == "m16n8k16 16":
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)
        if shape == "m16n8k16 8":
            return group + (8 if i >= 4 else 0), thread * 4 + (i & 3)
        if shape == "m16n8k32 8":
            row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
            return row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)
        if shape == "m16n8k64 4":
            row = group if 0 <= i < 8 or 16 <= i < 24 else group + 8
            return row, thread * 8 + (i & 7) + (32 if i >= 16 else 0)
        assert shape == "m16n8k8 32"
        row = group if i in (0, 2) else group + 8
        return row, thread if i < 2 else thread + 4

    return place


def b_place(shape: str) -> Place:
    """Row and column of element i of lane l in B."""

    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if shape == "m16n8k8 16":
            return thread * 2 + i, group
        if shape == "m16n8k16 16":
            return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group
        if shape == "m16n8k16 8":
            return thread * 4 + i, group
        if shape == "m16n8k32 8":
            return thread * 4 + (i & 3) + (16 if i >= 4 else 0), group
        if shape == "m16n8k64 4":
            return thread * 8 + (i & 7) + (32 if i >= 8 else 0), group
        assert shape == "m16n8k8 32"
        return thread + (4 if i else 0), group

    return place


def c_place(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def pack(codes: Array, place: Place, bits: int) -> Array:
    """Registers uint32 [warps, 32, n] of matrices of codes [warps, rows, columns]."""
    count = codes.shape[1] * codes.shape[2] // 32
    words = np.zeros((len(codes), 32, count * bits // 32), np.uint32)
    for lane in range(32):
        for i in range(count):
            row, column = place(lane, i)
            at = i * bits
            words[:, lane, at // 32] |= codes[:, row, column].astype(np.uint32) << np.uint32(at % 32)
    return words


def pack_c(values: Array) -> Array:
    words = np.zeros((len(values), 32, 4), np.uint32)
    for lane in range(32):
        for i in range(4):
            words[:, lane, i] = values[(slice(None), *c_place(lane, i))].view(np.uint32)
    return words


def unpack_c(words: Array, dtype: Any) -> Array:
    values = np.zeros((len(words), 16, 8), dtype)
    for lane in range(32):
        for i in range(4):
            values[(slice(None), *c_place(lane, i))] = words[:, lane, i].view(dtype)
    return values


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Codes and their values as float64; finite."""
    bits, dtype = TYPES[kind]
    if kind in ("s8", "u8"):
        values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)
    else:
        values = np.clip(rng.normal(0, 2, shape), -6, 6).astype(dtype)
    codes = values.view(np.uint16 if bits == 16 else np.uint8)
    return codes, values.astype(np.float64)


FLOAT_CASES = [
    ("m16n8k16", "f16", "f16"),
    ("m16n8k16", "bf16", "bf16"),
    ("m16n8k8", "f16", "f16"),
    ("m16n8k8", "bf16", "bf16"),
    ("m16n8k32", "e4m3", "e4m3"),
    ("m16n8k32", "e4m3", "e5m2"),
    ("m16n8k32", "e5m2", "e4m3"),
]


@pytest.mark.parametrize(("shape", "a", "b"), FLOAT_CASES)
def test_float_products_agree_with_float64(shape: str, a: str, b: str) -> None:
    rng = np.random.default_rng(1)
    k, bits = int(shape.split("k")[1]), TYPES[a][0]
    a_codes, a_values = random_codes(rng, a, (3, 16, k))
    b_codes, b_values = random_codes(rng, b, (3, k, 8))
    c = rng.normal(0, 5, (3, 16, 8)).astype(np.float32)
    mma = product(("mma", "sync", "aligned", shape, "row", "col", "f32", a, b, "f32"))
    table = f"{shape} {bits}"
    words = mma(pack(a_codes, a_place(table), bits), pack(b_codes, b_place(table), bits), pack_c(c))
    wanted = (a_values @ b_values + c).astype(np.float32)
    np.testing.assert_array_equal(unpack_c(words, np.float32), wanted)


@pytest.mark.parametrize(
    ("shape", "a", "b"), [("m16n8k32", "s8", "u8"), ("m16n8k32", "u8", "s8"), ("m16n8k16", "s8", "s8")]
)
def test_integer_products_are_exact_and_wrap_unless_saturated(shape: str, a: str, b: str) -> None:
    rng = np.random.default_rng(2)
    k = int(shape.split("k")[1])
    a_codes, a_values = random_codes(rng, a, (2, 16, k))
    b_codes, b_values = random_codes(rng, b, (2, k, 8))
    c = rng.choice(np.array([0, -5, 2**31 - 1, -(2**31)]), (2, 16, 8)).astype(np.int32)
    exact = (a_values @ b_values).astype(np.int64) + c
    operands = pack(a_codes, a_place(f"{shape} 8"), 8), pack(b_codes, b_place(f"{shape} 8"), 8), pack_c(c)
    parts = ("mma", "sync", "aligned", shape, "row", "col")
    wrapped = product((*parts, "s32", a, b, "s32"))(*operands)
    np.testing.assert_array_equal(unpack_c(wrapped, np.int32), ((exact + 2**31) % 2**32 - 2**31).astype(np.int32))
    clamped = product((*parts, "satfinite", "s32", a, b, "s32"))(*operands)
    np.testing.assert_array_equal(unpack_c(clamped, np.int32), np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32))


def test_tf32_ignores_the_low_mantissa_bits() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((2, 16, 8), (2, 8, 8)))
    c = np.zeros((2, 16, 8), np.float32)
    mma = product(("mma", "sync", "aligned", "m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"))
    place = "m16n8k8 32"
    words = mma(pack(a.view(np.uint32), a_place(place), 32), pack(b.view(np.uint32), b_place(place), 32), pack_c(c))
    cut = [(x.view(np.uint32) >> 13 << 13).view(np.float32).astype(np.float64) for x in (a, b)]
    np.testing.assert_array_equal(unpack_c(words, np.float32), (cut[0] @ cut[1]).astype(np.float32))


def test_f16_accumulators_hold_two_columns_a_register() -> None:
    rng = np.random.default_rng(4)
    a_codes, a_values = random_codes(rng, "f16", (2, 16, 16))
    b_codes, b_values = random_codes(rng, "f16", (2, 16, 8))
    c = rng.normal(0, 5, (2, 16, 8)).astype(np.float16)
    c_words = np.zeros((2, 32, 2), np.uint32)
    for lane in range(32):
        for i in range(4):
            c_words[:, lane, i // 2] |= c[(slice(None), *c_place(lane, i))].view(np.uint16).astype(np.uint32) << 16 * (
                i % 2
            )
    mma = product(("mma", "sync", "aligned", "m16n8k16", "row", "col", "f16", "f16", "f16", "f16"))
    place = "m16n8k16 16"
    words = mma(pack(a_codes, a_place(place), 16), pack(b_codes, b_place(place), 16), c_words)
    wanted = (a_values @ b_values + c).astype(np.float16)
    for lane in range(32):
        for i in range(4):
            got = (words[:, lane, i // 2] >> np.uint32(16 * (i % 2))).astype(np.uint16).view(np.float16)
            np.testing.assert_array_equal(got, wanted[(slice(None), *c_place(lane, i))])


# Block scales

ONE_AND_A_HALF, TWO, MINUS_FOUR = 0x3, 0x4, 0xE  # e2m1: s eem


def selected(words: Array, byte: int, lane: int) -> int:
    return int(words[lane]) >> 8 * byte & 0xFF


def mx8(a: str, b: str) -> Any:
    head = ("mma", "sync", "aligned", "kind::mxf8f6f4", "block_scale", "scale_vec::1X", "m16n8k32", "row", "col")
    return product((*head, "f32", a, b, "f32", "ue8m0"))


def mx4(kind: str = "kind::mxf4", vectors: str = "scale_vec::2X", scale: str = "ue8m0") -> Any:
    head = ("mma", "sync", "aligned", kind, "block_scale", vectors, "m16n8k64", "row", "col")
    return product((*head, "f32", "e2m1", "e2m1", "f32", scale))


def test_a_block_scaled_product_worked_by_hand() -> None:
    """One non-zero element on each side.

    A[3, 5] = 1.5 in e4m3 is 0x3c: lane 4·3 + 5/4 = 13, register 0, byte 5 % 4 = 1.
    B[5, 2] = -4 in e2m1 is code 0xe in bits 5…2 of its byte, 0x38: lane 4·2 + 5/4 = 9, register 0, byte 1.
    Row 3 of A takes its scale from lane 4·3 + 2·thread-a; with thread-a 1 and byte-a 2 that is byte 2 of lane 14:
    0x81, 2^2. Column 2 of B takes its from lane 4·2 + thread-b; with thread-b 3 and byte-b 1 that is byte 1 of lane 11:
    0x7c, 2^-3. D[3, 2] = 1.5·4·(-4)/8 = -3 plus C = 10: lane 4·3 + 2/2 = 13, c0 of c0, c1 for columns 2 and 3.
    """
    a, b, c = np.zeros((1, 32, 4), np.uint32), np.zeros((1, 32, 2), np.uint32), np.zeros((1, 32, 4), np.uint32)
    a[0, 13, 0], b[0, 9, 0] = 0x3C << 8, 0x38 << 8
    c[0, 13, 0] = np.float32(10).view(np.uint32)
    scale_a, scale_b = np.full((1, 32), 0x7F7F7F7F, np.uint32), np.full((1, 32), 0x7F7F7F7F, np.uint32)
    scale_a[0, 14], scale_b[0, 11] = 0x7F817F7F, 0x7F7F7C7F
    d = mx8("e4m3", "e2m1")(a, b, c, scale_a, scale_b, (2, 1, 1, 3)).view(np.float32)
    assert d[0, 13, 0] == 7.0
    assert np.count_nonzero(d) == 1
    # Other selectors read scales of 1.
    assert mx8("e4m3", "e2m1")(a, b, c, scale_a, scale_b, (0, 0, 0, 0)).view(np.float32)[0, 13, 0] == 4.0


def test_the_lower_rows_of_a_take_scales_from_the_odd_lane_of_the_pair() -> None:
    """Row 11 = 3 + 8 reads lane 4·3 + 2·thread-a + 1; A[11, 20] is register 3 (row + 8, second half of K)."""
    a, b, c = np.zeros((1, 32, 4), np.uint32), np.zeros((1, 32, 2), np.uint32), np.zeros((1, 32, 4), np.uint32)
    # A[11, 20]: lane 4·3 + (20 - 16)/4 = 13, register 3, byte 0. B[20, 0]: lane 1, register 1, byte 0. e4m3 0x38 is 1.
    a[0, 13, 3], b[0, 1, 1] = 0x38, 0x38
    scale_a, scale_b = np.full((1, 32), 0x7F7F7F7F, np.uint32), np.full((1, 32), 0x7F7F7F7F, np.uint32)
    scale_a[0, 12], scale_a[0, 13] = 0x80808080, 0x84848484
    d = mx8("e4m3", "e4m3")(a, b, c, scale_a, scale_b, (3, 0, 0, 0)).view(np.float32)
    # D[11, 0]: lane 12, register 2.
    assert d[0, 12, 2] == 32.0
    assert np.count_nonzero(d) == 1


MX_TYPES = ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]


def mx_codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Codes as they sit in bytes, and their values."""
    if kind == "e2m1":
        values = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], shape) * rng.choice([-1, 1], shape)
        return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) << 2, values
    return random_codes(rng, kind, shape)


@pytest.mark.parametrize("a", MX_TYPES)
@pytest.mark.parametrize("b", MX_TYPES)
def test_mxf8f6f4_multiplies_dequantized_ocp_blocks(a: str, b: str) -> None:
    rng = np.random.default_rng(5)
    a_codes, a_values = mx_codes(rng, a, (2, 16, 32))
    b_codes, b_values = mx_codes(rng, b, (2, 32, 8))
    c = rng.normal(0, 1, (2, 16, 8)).astype(np.float32)
    scale_a, scale_b = rng.integers(0x70707070, 0x8F8F8F8F, (2, 2, 32), dtype=np.uint32) & np.uint32(0x8F8F8F8F)
    place = "m16n8k32 8"
    operands = pack(a_codes, a_place(place), 8), pack(b_codes, b_place(place), 8), pack_c(c)
    for byte_a, thread_a, byte_b, thread_b in [(0, 0, 0, 0), (1, 1, 3, 2), (3, 0, 2, 1), (2, 1, 1, 3)]:
        words = mx8(a, b)(*operands, scale_a, scale_b, (byte_a, thread_a, byte_b, thread_b))
        for warp in range(2):
            rows = [selected(scale_a[warp], byte_a, 4 * (m % 8) + 2 * thread_a + m // 8) for m in range(16)]
            columns = [selected(scale_b[warp], byte_b, 4 * n + thread_b) for n in range(8)]
            left = a_values[warp] * 2.0 ** (np.array(rows) - 127)[:, None]
            right = b_values[warp] * 2.0 ** (np.array(columns) - 127)
            wanted = (left @ right + c[warp]).astype(np.float32)
            np.testing.assert_array_equal(unpack_c(words, np.float32)[warp], wanted)


@pytest.mark.parametrize(
    ("kind", "bit"), [("e2m1", 0), ("e2m1", 1), ("e2m1", 6), ("e2m1", 7), ("e3m2", 6), ("e2m3", 7)]
)
def test_a_bit_that_pads_a_narrow_type_in_its_byte_may_not_be_set(kind: str, bit: int) -> None:
    a, b, c = np.zeros((1, 32, 4), np.uint32), np.zeros((1, 32, 2), np.uint32), np.zeros((1, 32, 4), np.uint32)
    scales = np.full((1, 32), 0x7F7F7F7F, np.uint32)
    b[0, 9, 1] = 1 << 16 + bit
    with pytest.raises(SimulationError, match=f"bits that pad .{kind}"):
        mx8("e4m3", kind)(a, b, c, scales, scales, (0, 0, 0, 0))


def fp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    return codes, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


@pytest.mark.parametrize(("byte_a", "thread_a", "byte_b", "thread_b"), [(0, 0, 0, 0), (2, 1, 0, 3), (0, 0, 2, 1)])
def test_mxf4_takes_packed_nibbles_and_a_scale_for_each_32_of_k(
    byte_a: int, thread_a: int, byte_b: int, thread_b: int
) -> None:
    rng = np.random.default_rng(6)
    a_codes, a_values = fp4(rng, (2, 16, 64))
    b_codes, b_values = fp4(rng, (2, 64, 8))
    c = rng.normal(0, 1, (2, 16, 8)).astype(np.float32)
    scale_a, scale_b = rng.integers(0x70, 0x90, (2, 2, 32, 4)).astype(np.uint8).view(np.uint32)[..., 0]
    place = "m16n8k64 4"
    operands = pack(a_codes, a_place(place), 4), pack(b_codes, b_place(place), 4), pack_c(c)
    words = mx4()(*operands, scale_a, scale_b, (byte_a, thread_a, byte_b, thread_b))
    for warp in range(2):
        left, right = a_values[warp].copy(), b_values[warp].copy()
        for half in range(2):
            for m in range(16):
                code = selected(scale_a[warp], byte_a + half, 4 * (m % 8) + 2 * thread_a + m // 8)
                left[m, 32 * half : 32 * half + 32] *= 2.0 ** (code - 127)
            for n in range(8):
                code = selected(scale_b[warp], byte_b + half, 4 * n + thread_b)
                right[32 * half : 32 * half + 32, n] *= 2.0 ** (code - 127)
        np.testing.assert_array_equal(unpack_c(words, np.float32)[warp], (left @ right + c[warp]).astype(np.float32))


def test_nvf4_scales_each_16_of_k_by_an_unsigned_e4m3() -> None:
    rng = np.random.default_rng(7)
    a_codes, a_values = fp4(rng, (1, 16, 64))
    b_codes, b_values = fp4(rng, (1, 64, 8))
    scale_a, scale_b = rng.integers(0x20, 0x60, (2, 1, 32, 4)).astype(np.uint8).view(np.uint32)[..., 0]
    place = "m16n8k64 4"
    c = np.zeros((1, 16, 8), np.float32)
    operands = pack(a_codes, a_place(place), 4), pack(b_codes, b_place(place), 4), pack_c(c)
    words = mx4("kind::mxf4nvf4", "scale_vec::4X", "ue4m3")(*operands, scale_a, scale_b)
    left, right = a_values[0].copy(), b_values[0].copy()
    for quarter in range(4):
        k = slice(16 * quarter, 16 * quarter + 16)
        for m in range(16):
            code = np.uint8(selected(scale_a[0], quarter, 4 * (m % 8) + m // 8))
            left[m, k] *= float(code.view(ml_dtypes.float8_e4m3fn))
        for n in range(8):
            right[k, n] *= float(np.uint8(selected(scale_b[0], quarter, 4 * n)).view(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(unpack_c(words, np.float32)[0], (left @ right).astype(np.float32))


def test_a_nan_scale_poisons_its_row_only() -> None:
    a, b, c = (
        np.full((1, 32, 4), 0x38383838, np.uint32),
        np.full((1, 32, 2), 0x38383838, np.uint32),
        np.zeros((1, 32, 4), np.uint32),
    )
    scale_a, scale_b = np.full((1, 32), 0x7F, np.uint32), np.full((1, 32), 0x7F, np.uint32)
    scale_a[0, 4 * 6 + 1] = 0xFF  # row 14
    d = unpack_c(mx8("e4m3", "e4m3")(a, b, c, scale_a, scale_b), np.float32)[0]
    assert np.isnan(d[14]).all()
    assert (np.delete(d, 14, axis=0) == 32.0).all()


def test_results_round_once_to_nearest_even() -> None:
    exact = np.zeros((4, 32))
    exact[:2, 0] = [1 + 2.0**-24, 1 + 3 * 2.0**-24]
    got = rounded(exact, "f32").view(np.float32)
    assert got[:2, 0].tolist() == [1.0, 1 + 2.0**-22]


@pytest.mark.parametrize(
    "name",
    [
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32",
        "mma.sync.aligned.kind::mxf4.block_scale.scale_vec::1X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue4m3",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16x2.f32",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    ],
)
def test_an_unknown_product_is_named(name: str) -> None:
    with pytest.raises(SimulationError, match="mma"):
        product(tuple(name.split(".")))
