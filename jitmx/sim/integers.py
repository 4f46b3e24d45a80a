"""Integer and bit operations as functions on arrays of unsigned words; signed ones take and give the signed view."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the product, in the operands' type."""
    bits = a.dtype.itemsize * 8
    kind = a.dtype.kind
    if bits < 64:
        wide = np.multiply(a, b, dtype=f"{kind}{bits // 4}")
        return np.asarray((wide >> wide.dtype.type(bits)).astype(a.dtype))
    x, y = a.view("u8"), b.view("u8")
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if kind == "i":
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    result: Array = high.view(a.dtype)
    return result


def divide(a: Array, b: Array) -> Array:
    """Quotient towards zero; all ones where the divisor is zero, as hardware has it."""
    ones = a.dtype.type(-1) if a.dtype.kind == "i" else a.dtype.type(np.iinfo(a.dtype).max)
    if a.dtype.kind == "u":
        return np.where(b == 0, ones, a // np.where(b == 0, b.dtype.type(1), b))
    unsigned = f"u{a.dtype.itemsize}"
    x, y = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    magnitude = (x // np.where(y == 0, y.dtype.type(1), y)).view(a.dtype)
    return np.where(b == 0, ones, np.where((a < 0) != (b < 0), -magnitude, magnitude))


def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; the dividend where the divisor is zero."""
    return np.where(b == 0, a, a - divide(a, b) * b)


def population(a: Array) -> Array:
    """Bits set, uint32."""
    return np.bitwise_count(a).astype("u4")


def leading_zeros(a: Array) -> Array:
    """Zeros above the highest bit set, uint32."""
    bits = a.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < bits:
            a = a | a >> a.dtype.type(shift)
    return (bits - np.bitwise_count(a)).astype("u4")


def find_bit(a: Array, shift_amount: bool) -> Array:
    """bfind: position of the highest bit that differs from the sign; as a shift from the top on demand."""
    bits = a.dtype.itemsize * 8
    unsigned = a if a.dtype.kind == "u" else np.where(a < 0, ~a, a).view(f"u{a.dtype.itemsize}")
    zeros = leading_zeros(unsigned)
    found = zeros if shift_amount else np.uint32(bits - 1) - zeros
    return np.where(unsigned == 0, np.uint32(0xFFFFFFFF), found)


def reverse(a: Array) -> Array:
    """Bits in reverse order."""
    bits = a.dtype.itemsize * 8
    shift, kind = 1, a.dtype.type
    while shift < bits:
        mask = kind(sum(((1 << shift) - 1) << i for i in range(0, bits, 2 * shift)))
        a = (a >> kind(shift)) & mask | (a & mask) << kind(shift)
        shift *= 2
    return a


def _whole_or_low(value: Array, bits: int) -> Array:
    """Position or length of a field: PTX takes its low 8 bits; the card's 64-bit forms take all of it, as this does."""
    return value & 0xFF if bits == 32 else np.minimum(value, np.uint32(0xFF))


def extract(a: Array, position: Array, length: Array) -> Array:
    """bfe: a field of `length` bits from `position` on, sign-extended where `a` is signed."""
    bits = a.dtype.itemsize * 8
    start, size = _whole_or_low(position, bits).astype("i8"), _whole_or_low(length, bits).astype("i8")
    word = a.view(f"u{a.dtype.itemsize}")
    kind = word.dtype.type
    field = word >> start.astype(word.dtype)
    mask = np.where(size >= bits, kind((1 << bits) - 1), (kind(1) << size.astype(word.dtype)) - kind(1))
    out = field & mask
    if a.dtype.kind == "i":
        top = np.minimum(start + size - 1, bits - 1)
        sign = (word >> top.astype(word.dtype)) & kind(1)
        # Bits past the word's end are copies of its sign, and so are those past the field.
        valid = np.minimum(size, np.maximum(bits - start, 0))
        above = np.where(valid >= bits, kind(0), ~((kind(1) << valid.astype(word.dtype)) - kind(1)))
        out = np.where(size == 0, kind(0), np.where(sign == 1, out | above, out))
        return np.asarray(out.view(a.dtype))
    return np.asarray(out)


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: `b` with its field of `length` bits at `position` replaced by the low bits of `a`."""
    bits = b.dtype.itemsize * 8
    start, size = _whole_or_low(position, bits).astype(b.dtype), _whole_or_low(length, bits).astype("i8")
    kind = b.dtype.type
    field = np.where(size >= bits, kind((1 << bits) - 1), (kind(1) << size.astype(b.dtype)) - kind(1))
    mask = field << start
    return np.asarray(b & ~mask | a << start & mask)


def find_nth(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the position of the nth bit set from `base` on; ~0 where there is none."""
    shape = np.broadcast_shapes(mask.shape, base.shape, offset.shape)
    words, bases, counts = (np.broadcast_to(x, shape).ravel() for x in (mask, base, offset.view("i4")))
    out = np.full(words.shape, 0xFFFFFFFF, np.uint32)
    for i, (word, start, count) in enumerate(zip(words.tolist(), bases.tolist(), counts.tolist(), strict=True)):
        if count == 0:
            hits = [start] if start < 32 and word >> start & 1 else []
        elif count > 0:
            hits = [p for p in range(start, 32) if word >> p & 1][count - 1 : count]
        else:
            hits = [p for p in range(min(start, 31), -1, -1) if word >> p & 1][-count - 1 : -count]
        if hits:
            out[i] = hits[0]
    return out.reshape(shape)


def logic(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: the function of three bits that `table` tells."""
    known = _LOGIC.get(table)
    if known is not None:
        return np.asarray(known(a, b, c))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


_LOGIC: dict[int, Any] = {
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xEA: lambda a, b, c: a & b | c,
    0xF8: lambda a, b, c: a | b & c,
    0xCA: lambda a, b, c: a & b | ~a & c,
    0x6A: lambda a, b, c: a & b ^ c,
    0xE8: lambda a, b, c: a & b | a & c | b & c,
}


def permute(mode: str, a: Array, b: Array, selector: Array) -> Array:
    """prmt: four bytes picked out of the eight of a and b; quick where all lanes have one selector."""
    if not mode:
        first = int(selector.flat[0])
        if not np.count_nonzero(selector != np.uint32(first)):
            return permuter(first)(a, b)
    lanes = np.broadcast_shapes(a.shape, b.shape, selector.shape)
    both = np.empty((*lanes, 2), np.uint32)
    both[..., 0], both[..., 1] = a, b
    pool = both.view(np.uint8).reshape(-1, 8)
    picks = np.broadcast_to(selector, lanes).reshape(-1)
    rows = np.arange(len(pool))
    out = np.empty((len(pool), 4), np.uint8)
    for i in range(4):
        if mode:
            out[:, i] = pool[rows, _PERMUTE[mode]((picks & 3).astype(np.int64), i)]
            continue
        control = picks >> np.uint32(4 * i)
        byte = pool[rows, control & np.uint32(7)]
        out[:, i] = np.where(control & np.uint32(8), np.where(byte & 0x80, 0xFF, 0), byte)
    return out.view(np.uint32).reshape(lanes)


@functools.lru_cache(maxsize=1024)
def permuter(selector: int) -> Callable[[Array, Array], Array]:
    """permute where every lane has the same selector: bytes that stay side by side move together."""
    plan: list[tuple[int, int, int, int]] = []  # word, mask, left shift, right shift
    signs: list[tuple[int, int, int]] = []  # word, bit, byte of the result
    merged: dict[tuple[int, int], int] = {}
    for i in range(4):
        control = selector >> 4 * i & 15
        word, byte = control >> 2 & 1, control & 3
        if control & 8:
            signs.append((word, 8 * byte + 7, i))
        else:
            merged[word, i - byte] = merged.get((word, i - byte), 0) | 0xFF << 8 * byte
    for (word, move), mask in merged.items():
        plan.append((word, mask, max(8 * move, 0), max(-8 * move, 0)))

    def run(a: Array, b: Array) -> Array:
        out: Any = None
        for word, mask, left, right in plan:
            part: Any = (a, b)[word]
            if mask != 0xFFFFFFFF:
                part = part & np.uint32(mask)
            if left or right:
                part = part << np.uint32(left) if left else part >> np.uint32(right)
            out = part if out is None else out | part
        for word, bit, byte in signs:
            part = ((a, b)[word] >> np.uint32(bit) & np.uint32(1)) * np.uint32(0xFF << 8 * byte)
            out = part if out is None else out | part
        return np.asarray(out)

    return run


_PERMUTE: dict[str, Any] = {
    "f4e": lambda c, i: (c + i) % 8,
    "b4e": lambda c, i: (c - i) % 8,
    "rc8": lambda c, i: c,
    "ecl": lambda c, i: np.maximum(c, i),
    "ecr": lambda c, i: np.minimum(c, i),
    "rc16": lambda c, i: (c & 1) * 2 + i % 2,
}


def funnel(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    """shf: 32 bits of the 64 of high:low, shifted."""
    n = np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)
    wide = high.astype(np.uint64) << np.uint64(32) | low
    if left:
        return (wide << n.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
    return (wide >> n.astype(np.uint64)).astype(np.uint32)


def dot4(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool) -> Array:
    """dp4a: c plus the sum of four products of bytes, modulo 2^32."""
    total = c.astype(np.int64)
    for i in range(4):
        total = total + _field(a, 8 * i, 8, signed_a) * _field(b, 8 * i, 8, signed_b)
    return total.astype(np.uint32)


def dot2(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool, high: bool) -> Array:
    """dp2a: c plus the sum of two products of half-words of a with bytes of b's lower or upper half."""
    total = c.astype(np.int64)
    for i in range(2):
        total = total + _field(a, 16 * i, 16, signed_a) * _field(b, 16 * high + 8 * i, 8, signed_b)
    return total.astype(np.uint32)


def _field(a: Array, shift: int, bits: int, signed: bool) -> Array:
    word = (a >> np.uint32(shift) & np.uint32((1 << bits) - 1)).astype(np.int64)
    return np.where(word >> (bits - 1) & 1, word - (1 << bits), word) if signed else word


def absolute_difference(a: Array, b: Array, c: Array) -> Array:
    """sad: c + |a - b|."""
    return c + np.where(a > b, a - b, b - a)


def saturating(a: Array, b: Array, subtract: bool) -> Array:
    """add.sat and sub.sat of s32."""
    wide = a.astype(np.int64) - b if subtract else a.astype(np.int64) + b
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)
