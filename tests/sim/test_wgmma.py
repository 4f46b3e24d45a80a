"""wgmma and its descriptors against float64, with matrices laid out in shared memory by tables written here."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.swizzle import Descriptor, swizzled
from jitmx.sim.wgmma import Wgmma, wgmma

Array = npt.NDArray[Any]


def instruction(shape: str, d: str, a: str, b: str) -> Wgmma:
    return wgmma(("wgmma", "mma_async", "sync", "aligned", shape, d, a, b))


# The 128-byte pattern as the PTX ISA prints it: row r of the table, position p holds chunk TABLE[r][p].
SWIZZLE_128 = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 0, 3, 2, 5, 4, 7, 6],
    [2, 3, 0, 1, 6, 7, 4, 5],
    [3, 2, 1, 0, 7, 6, 5, 4],
    [4, 5, 6, 7, 0, 1, 2, 3],
    [5, 4, 7, 6, 1, 0, 3, 2],
    [6, 7, 4, 5, 2, 3, 0, 1],
    [7, 6, 5, 4, 3, 2, 1, 0],
]
TABLES = {128: SWIZZLE_128, 64: SWIZZLE_128[:4], 32: SWIZZLE_128[:2]}


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzles_follow_the_printed_tables(span: int) -> None:
    """Each row of a table is 128 bytes of shared memory; narrower patterns repeat within it."""
    rows = len(TABLES[span])
    for line in range(16):
        for position in range(8):
            chunk = TABLES[span][line % rows][position]
            assert swizzled(np.array([line * 128 + chunk * 16 + 5]), span)[0] == line * 128 + position * 16 + 5


def test_wider_atoms_stay_together() -> None:
    # 128-byte pattern, 32-byte atoms: the second line is 2 3 0 1 6 7 4 5.
    line = np.arange(8) * 16 + 128
    assert ((swizzled(line, 128, 32) - 128) // 16).tolist() == [2, 3, 0, 1, 6, 7, 4, 5]
    assert ((swizzled(line, 128, 64) - 128) // 16).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_a_descriptor_decodes_its_fields() -> None:
    # Start 0x2400, LBO 256, SBO 1024, 128-byte swizzle.
    word = 0x240 | 0x10 << 16 | 0x40 << 32 | 1 << 62
    assert Descriptor.decode(word) == Descriptor(0x2400, 256, 1024, 128)
    assert Descriptor(0x2400, 256, 1024, 128).encode() == word
    assert Descriptor.decode(3 << 62).span == 32
    assert Descriptor.decode(2 << 62).span == 64
    with pytest.raises(SimulationError, match="base offset 3"):
        Descriptor.decode(3 << 49)


def test_canonical_layouts_of_the_isa_give_their_exact_layouts() -> None:
    """The worked examples of the PTX ISA, before their swizzle, as (shape):(stride) in elements."""
    # K-major, no swizzle, tf32: ((8,2),(4,4)):((4,32),(1,64)), LBO 64 elements, SBO 32.
    got = Descriptor(0, 64 * 4, 32 * 4, 0).addresses(16, 16, 4) // 4
    m, k = np.ogrid[:16, :16]
    np.testing.assert_array_equal(got, m % 8 * 4 + m // 8 * 32 + k % 4 + k // 4 * 64)
    # MN-major, no swizzle, bf16: ((8,1,2),(8,2)):((1,8,64),(8,128)), LBO 128, SBO 64.
    got = Descriptor(0, 128 * 2, 64 * 2, 0).addresses(16, 16, 2, mn_major=True) // 2
    np.testing.assert_array_equal(got, m % 8 + m // 8 * 64 + k % 8 * 8 + k // 8 * 128)
    # MN-major, 32-byte swizzle, bf16: ((8,2,2),(8,2)):((1,8,128),(16,256)), LBO 128, SBO 256.
    m, k = np.ogrid[:32, :16]
    plain = m % 8 + m // 8 % 2 * 8 + m // 16 * 128 + k % 8 * 16 + k // 8 * 256
    got = Descriptor(0, 128 * 2, 256 * 2, 32).addresses(32, 16, 2, mn_major=True) // 2
    np.testing.assert_array_equal(got, swizzled(plain * 2, 32) // 2)
    # K-major, 32-byte swizzle, tf32, first 8 of K: ((8,2),(4,2)):((8,64),(1,4)), SBO 64.
    m, k = np.ogrid[:16, :8]
    plain = m % 8 * 8 + m // 8 * 64 + k
    got = Descriptor(0, 0, 64 * 4, 32).addresses(16, 8, 4) // 4
    np.testing.assert_array_equal(got, swizzled(plain * 4, 32) // 4)


def test_a_start_address_may_lie_inside_a_swizzled_row() -> None:
    """Stepping K by 32 bytes in rows of 128: the second step of row 1 starts at chunk 2, which lies at position 3."""
    first = Descriptor(1024, 0, 1024, 128).addresses(8, 16, 2)
    second = Descriptor(1024 + 32, 0, 1024, 128).addresses(8, 16, 2)
    assert first[1, 0] == 1024 + 128 + 16
    assert second[1, 0] == 1024 + 128 + 3 * 16
    assert not set(first.ravel()) & set(second.ravel())


DTYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "tf32": np.float32,
}


def random(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Array:
    if kind in ("s8", "u8"):
        info = np.iinfo(DTYPES[kind])
        return rng.integers(info.min, info.max + 1, shape).astype(DTYPES[kind])
    values = rng.integers(-64, 65, shape) / 16 if kind == "tf32" else np.clip(rng.normal(0, 2, shape), -9, 9)
    return np.asarray(values).astype(DTYPES[kind])


def lay_out(values: Array, span: int, shared: Array, start: int, mn_major: bool) -> Descriptor:
    """Put a matrix [rows of M or N, K] into shared memory tile by tile, as a kernel would, and describe it."""
    rows, depth = values.shape
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(rows, depth, values.itemsize)
    size = values.itemsize
    width = span or 16
    # Tiles of 8 lines of `width` bytes; lines run along K, or along M or N.
    along, across = (rows, depth) if mn_major else (depth, rows)
    tiles_along, tiles_across = along * size // width, across // 8
    tile = 8 * width
    step_along, step_across = (tile, tile * tiles_along) if span or mn_major else (tile * tiles_across, tile)
    for i in range(across):
        for j in range(along):
            element = raw[j, i] if mn_major else raw[i, j]
            for byte in range(size):
                at = j * size + byte
                address = start + i // 8 * step_across + at // width * step_along + i % 8 * width + at % width
                if span:
                    line, position = address // 128, address // 16 % 8
                    chunk = TABLES[span][line % len(TABLES[span])].index(position)
                    address = address // 128 * 128 + chunk * 16 + address % 16
                shared[address] = element[byte]
    if mn_major:
        leading, stride = (step_along, step_across) if span else (step_across, step_along)
    else:
        leading, stride = (0, step_across) if span else (step_along, step_across)
    return Descriptor(start, leading, stride, span)


def take(shared: Array, addresses: Array, size: int) -> Array:
    return shared[addresses[..., None] + np.arange(size)].view(f"u{size}")[..., 0]


def d_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of thread `lane` of the warpgroup in D."""
    warp, lane = lane // 32, lane % 32
    return 16 * warp + lane // 4 + (8 if i & 2 else 0), 8 * (i // 4) + 2 * (lane % 4) + (i & 1)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("a", "b"), [("f16", "f16"), ("bf16", "bf16"), ("e4m3", "e5m2"), ("s8", "u8"), ("tf32", "tf32")]
)
def test_k_major_operands_in_shared_memory_give_the_product(a: str, b: str, span: int) -> None:
    check_product(a, b, span, False, False)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_major", "b_major"), [(True, True), (True, False), (False, True)])
def test_mn_major_operands_in_shared_memory_give_the_product(span: int, a_major: bool, b_major: bool) -> None:
    check_product("bf16", "bf16", span, a_major, b_major)


def check_product(a: str, b: str, span: int, a_major: bool, b_major: bool) -> None:
    rng = np.random.default_rng(span)
    size = np.dtype(DTYPES[a]).itemsize
    k, n = 32 // size, 128
    # Rows of the swizzle hold more of K than one instruction takes: the matrices are as deep as one row.
    deep_a = k if a_major else max(k, span // size)
    deep_b = k if b_major else max(k, span // size)
    left, right = random(rng, a, (64, deep_a)), random(rng, b, (n, deep_b))
    shared = np.zeros(1 << 16, np.uint8)
    a_word = lay_out(left, span, shared, 1024, a_major)
    b_word = lay_out(right, span, shared, 1 << 15, b_major)
    d = "s32" if a == "s8" else "f32"
    run = instruction(f"m64n{n}k{k}", d, a, b)
    a_values = run.a_values(take(shared, a_word.addresses(64, run.k, size, mn_major=a_major), size))
    b_values = run.b_values(take(shared, b_word.addresses(n, run.k, size, mn_major=b_major), size))
    old = rng.normal(0, 1, (64, n)).astype(np.float32) if d == "f32" else rng.integers(-9, 9, (64, n)).astype(np.int32)
    words = np.zeros((n // 2, 128), np.uint32)
    for lane in range(128):
        for i in range(n // 2):
            words[i, lane] = old[d_place(lane, i)].view(np.uint32)
    exact = left[:, :k].astype(np.float64) @ right[:, :k].astype(np.float64).T
    for keep, signs in ((True, (1, 1)), (False, (1, 1)), (True, (-1, 1))):
        got = run(a_values[None], b_values[None], words, np.array([keep]), signs)
        wanted = (exact * signs[0] + (old if keep else 0)).astype(old.dtype)
        for lane in range(0, 128, 7):
            for i in range(n // 2):
                assert got[i, lane] == wanted[d_place(lane, i)].view(np.uint32)


def test_a_fragment_in_registers_is_that_of_four_mma_warps() -> None:
    rng = np.random.default_rng(9)
    a = random(rng, "f16", (64, 16))
    words = np.zeros((4, 128), np.uint32)
    for lane in range(128):
        for i in range(8):
            row = 16 * (lane // 32) + lane % 32 // 4 + (8 if i in (2, 3, 6, 7) else 0)
            column = 2 * (lane % 4) + (i & 1) + (8 if i >= 4 else 0)
            words[i // 2, lane] |= a[row, column].view(np.uint16).astype(np.uint32) << 16 * (i & 1)
    run = instruction("m64n8k16", "f32", "f16", "f16")
    np.testing.assert_array_equal(run.a_fragment(words)[0], a.astype(np.float64))


def test_f16_accumulators_pack_two_columns() -> None:
    rng = np.random.default_rng(10)
    a, b = rng.normal(0, 1, (1, 64, 16)), rng.normal(0, 1, (1, 16, 16))
    run = instruction("m64n16k16", "f16", "f16", "f16")
    got = run(a, b, np.zeros((4, 128), np.uint32), np.array([False]))
    wanted = (a @ b)[0].astype(np.float16)
    for lane in range(128):
        for i in range(8):
            half = (got[i // 2, lane] >> np.uint32(16 * (i & 1))).astype(np.uint16).view(np.float16)
            assert half == wanted[d_place(lane, i)]


@pytest.mark.parametrize(
    "name",
    [
        "m64n12k16.f32.f16.f16",
        "m64n8k8.f32.f16.f16",
        "m64n8k16.f32.f16.bf16",
        "m64n264k16.f32.f16.f16",
        "m64n8k32.f32.s8.s8",
    ],
)
def test_an_unknown_product_is_named(name: str) -> None:
    with pytest.raises(SimulationError, match="wgmma"):
        wgmma(("wgmma", "mma_async", "sync", "aligned", *name.split(".")))
