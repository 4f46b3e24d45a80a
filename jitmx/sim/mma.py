"""Warp-wide matrix products: `mma` with fragments in registers, block scales included.

A warp computes D[16, 8] = A[16, K] · B[K, 8] + C[16, 8]. Lane l = 4g + t (g = l / 4, t = l % 4) holds, with
e = 32 / bits elements in a register:

    A  register r        row g + 8·(r % 2)     columns 4e·(r / 2) + e·t … + e-1
    B  register r        rows 4e·r + e·t … + e-1      column g
    C  32-bit register r row g + 8·(r / 2)     column 2t + r % 2
    C  f16x2 register r  row g + 8·r           columns 2t, 2t + 1

The shapes with half as many registers (m16n8k8 of 16-bit types, m16n8k16 of 8-bit types) hold the first half of K.

Products and sums are float64 and rounded once to the type of D. Hardware keeps fewer bits of the sum, in an order that
PTX leaves open, so its results differ within the accumulation-order bound; integer results are identical.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.floats import decode, round_to_f16
from jitmx.sim.ptx import Instruction, Operand
from jitmx.sim.rounding import canonical
from jitmx.sim.warps import emit_planes, emit_warps, immediate, items, plan, planes, write_planes

if TYPE_CHECKING:
    from jitmx.sim.translate import Handler, Translator

Words = npt.NDArray[np.uint32]
Matrix = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Registers = tuple[Operand, ...]

# Width of an element in its register. Under kind::mxf8f6f4 and kind::f8f6f4 the narrow types sit in bytes.
BITS = {
    **dict.fromkeys(("f16", "bf16"), 16),
    "tf32": 32,
    **dict.fromkeys(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4"), 4),
}
PACKED_FP4 = "e2m1 packed"
_PADDING = {"e2m1": 0xC3, "e3m2": 0xC0, "e2m3": 0xC0}  # of their bytes
SCALE_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
KINDS = {"kind::mxf8f6f4": ("ue8m0",), "kind::mxf4": ("ue8m0",), "kind::mxf4nvf4": ("ue8m0", "ue4m3")}
_AT_ONCE = 2048  # lanes of as many products as stay in cache
_FLOATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", PACKED_FP4)


def bits_of(kind: str) -> int:
    """Bits that an element of type `kind` takes in its register."""
    return 4 if kind == PACKED_FP4 else BITS[kind]


def elements(words: Words, bits: int) -> npt.NDArray[np.unsignedinteger]:
    """Elements of 32-bit registers, low bits first: the last axis grows by 32 / bits."""
    words = np.ascontiguousarray(words, np.uint32)
    if bits == 4:
        halves = words.view(np.uint8)
        return np.stack((halves & 15, halves >> 4), axis=-1).reshape(*words.shape[:-1], -1)
    return words.view({32: np.uint32, 16: np.uint16, 8: np.uint8}[bits])


def plain(codes: npt.NDArray[np.unsignedinteger], kind: str) -> npt.NDArray[Any]:
    """Values of codes of type `kind`, as float32 or integers.

    e2m1 in a byte takes bits 5…2, as block-scaled products expect; e3m2 and e2m3 take bits 5…0.

    Raises:
        SimulationError: other bits of the byte are set, of which the PTX ISA does not say that they are ignored.
    """
    if kind in _PADDING and (codes & codes.dtype.type(_PADDING[kind])).any():
        raise SimulationError(f"bits that pad .{kind} in its byte are not zero")
    if kind in _FLOATS:
        name = "e2m1" if kind == PACKED_FP4 else kind
        return decode(codes >> codes.dtype.type(2) if kind == "e2m1" else codes, name)
    if kind in ("s8", "s4"):
        shift = 8 - bits_of(kind)
        return (codes << shift).astype(np.int8) >> shift
    return codes


def values(codes: npt.NDArray[np.unsignedinteger], kind: str) -> Matrix:
    """The same as float64."""
    return plain(codes, kind).astype(np.float64)


def left(words: Words, kind: str) -> Matrix:
    """A of each warp [n, 16, K] from registers [..., registers, lanes]: products one after the other, warps in each."""
    per, (registers, lanes) = 32 // bits_of(kind), words.shape[-2:]
    found = plain(elements(words, bits_of(kind)), kind).reshape(-1, registers // 2, 2, lanes // 32, 8, 4, per)
    return found.transpose(0, 3, 2, 4, 1, 5, 6).astype(np.float64, "C").reshape(-1, 16, registers // 2 * 4 * per)


def right(words: Words, kind: str) -> Matrix:
    """B of each warp [n, K, 8], as for `left`."""
    per, (registers, lanes) = 32 // bits_of(kind), words.shape[-2:]
    found = plain(elements(words, bits_of(kind)), kind).reshape(-1, registers, lanes // 32, 8, 4, per)
    return found.transpose(0, 2, 1, 4, 5, 3).astype(np.float64, "C").reshape(-1, registers * 4 * per, 8)


def held(matrices: Matrix, warps: int) -> Matrix:
    """Elements [products, elements, lanes] that lanes hold of matrices [products · warps, 16, columns] like C."""
    columns = matrices.shape[-1]
    split = matrices.reshape(-1, warps, 2, 8, columns // 8, 4, 2)
    return np.ascontiguousarray(split.transpose(0, 4, 2, 6, 1, 3, 5)).reshape(-1, columns // 2, 32 * warps)


def sums(words: Words, kind: str) -> npt.NDArray[Any]:
    """Elements [elements, lanes] of C in registers [registers, lanes] of f32, s32 or f16x2."""
    if kind == "f16":
        halves = decode(elements(words, 16), "f16").reshape(*words.shape, 2)
        return np.moveaxis(halves, -1, 1).reshape(-1, words.shape[1])
    return words.view(np.float32 if kind == "f32" else np.int32)


def rounded(result: Matrix, kind: str, *, saturate: bool = False) -> Words:
    """Registers of D from elements [elements, lanes], rounded once to f32, f16 or s32 (which wraps unless `saturate`).

    A NaN may be any; `settled` makes it the canonical one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "f32":
            return result.astype(np.float32).view(np.uint32)
        if kind == "f16":
            halves = np.moveaxis(round_to_f16(result).reshape(-1, 2, result.shape[1]), 1, -1)
            return np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    whole = result.astype(np.int64)
    if saturate:
        whole = np.clip(whole, -(2**31), 2**31 - 1)
    return whole.astype(np.uint32)


def settled(words: Words, kind: str) -> Words:
    """Registers of D with every NaN the canonical one."""
    return canonical(words.view(np.float32)).view(np.uint32) if kind == "f32" else words


def scale_lanes(thread_a: int, thread_b: int) -> tuple[Index, Index]:
    """Lanes whose scale registers serve the 16 rows of A and the 8 columns of B."""
    row, column = np.arange(16), np.arange(8)
    return 4 * (row % 8) + 2 * thread_a + row // 8, 4 * column + thread_b


def scales(words: Words, lanes: Index, byte: int, vectors: int, kind: str) -> Matrix:
    """Scale factors [warps, len(lanes), vectors] from registers of whole warps, starting at byte `byte`."""
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 32, 4)
    return decode(codes[:, lanes, byte : byte + vectors], kind).astype(np.float64)


@dataclass(frozen=True)
class Product:
    """One `mma` instruction.

    Attributes:
        m, n, k: shape; m is 16 and n is 8.
        d, a, b, c: types; `PACKED_FP4` for e2m1 under kind::mxf4.
        a_registers, b_registers, c_registers: 32-bit registers a lane gives to each operand.
        vectors: scale factors along K (scale_vec), 0 without block scaling.
        scale: type of the scale factors.
        saturate: .satfinite of integer products.
    """

    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    c: str
    vectors: int
    scale: str
    saturate: bool

    @property
    def a_registers(self) -> int:
        return self.m * self.k * bits_of(self.a) // 1024

    @property
    def b_registers(self) -> int:
        return self.n * self.k * bits_of(self.b) // 1024

    @property
    def c_registers(self) -> int:
        return 2 if self.c == "f16" else 4

    def products(
        self,
        a: Words,
        b: Words,
        scale_a: Words | None = None,
        scale_b: Words | None = None,
        selectors: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> Matrix:
        """A · B of `count` products at once.

        Args:
            a, b: uint32 [count · registers, lanes] of whole warps.
            scale_a, scale_b: uint32 [count, lanes], with block scaling.
            selectors: byte-id-a, thread-id-a, byte-id-b, thread-id-b.

        Returns:
            [count, elements that a lane holds, lanes].
        """
        lanes = a.shape[-1]
        count, few = a.shape[0] // self.a_registers, max(_AT_ONCE // lanes, 1)
        if count > few:
            pieces = [slice(first, first + few) for first in range(0, count, few)]

            def cut(words: Any, piece: slice) -> Any:
                return None if words is None else words.reshape(count, -1, lanes)[piece].reshape(-1, lanes)

            parts = ([cut(x, piece) for x in (a, b, scale_a, scale_b)] for piece in pieces)
            return np.concatenate([self.products(w, x, y, z, selectors) for w, x, y, z in parts])
        one = left(a.reshape(-1, self.a_registers, lanes), self.a)
        other = right(b.reshape(-1, self.b_registers, lanes), self.b)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.vectors and scale_a is not None and scale_b is not None:
                byte_a, thread_a, byte_b, thread_b = selectors
                rows, columns = scale_lanes(thread_a, thread_b)
                block = self.k // self.vectors
                one *= np.repeat(scales(scale_a, rows, byte_a, self.vectors, self.scale), block, axis=2)
                along = np.repeat(scales(scale_b, columns, byte_b, self.vectors, self.scale), block, axis=2)
                other *= along.swapaxes(1, 2)
            return held(one @ other, lanes // 32)

    def add(self, products: Matrix, c: Words) -> Words:
        """D [registers, lanes], but for NaNs, from one of the products and C [registers, lanes]."""
        return rounded(products + sums(c, self.c), self.d, saturate=self.saturate)


def product(parts: tuple[str, ...]) -> Product:
    """The product that `mma` with these parts names.

    Raises:
        SimulationError: a shape, type or modifier that is not known.
    """
    name = ".".join(parts)
    shape = next((part for part in parts if part.startswith("m") and part[1:2].isdigit()), "")
    kind = next((part for part in parts if part.startswith("kind::")), "")
    vector = next((part for part in parts if part.startswith("scale_vec::")), "")
    scaled = "block_scale" in parts
    tail = parts[-5:] if scaled else parts[-4:]
    d, a, b, c = tail[:4]
    known = {"mma", "sync", "aligned", shape, "row", "col", "satfinite", kind, vector, "block_scale", *tail}
    unknown = [part for part in parts if part not in known]
    k = int(shape.rpartition("k")[2] or 0) if shape.startswith("m16n8k") else 0
    if unknown or not k or ".row.col." not in name or ("satfinite" in parts and d != "s32"):
        raise SimulationError(f"{name} is not known")
    vectors, scale = 0, ""
    if scaled:
        scale = tail[4]
        vectors = SCALE_VECTORS.get(vector, {"kind::mxf8f6f4": 1, "kind::mxf4": 2}.get(kind, 0))
        if scale not in KINDS.get(kind, ()) or not vectors or (kind == "kind::mxf8f6f4") != (vectors == 1):
            raise SimulationError(f"{name} is not known")
    elif kind not in ("", "kind::f8f6f4"):
        raise SimulationError(f"{name} is not known")
    if kind in ("kind::mxf4", "kind::mxf4nvf4"):
        a, b = (PACKED_FP4 if item == "e2m1" else item for item in (a, b))
    if any(item not in BITS and item != PACKED_FP4 for item in (a, b)) or d != c or d not in ("f32", "f16", "s32"):
        raise SimulationError(f"{name} is not known")
    result = Product(16, 8, k, d, a, b, c, vectors, scale, "satfinite" in parts)
    if result.k % (128 // bits_of(a)) or result.k > 256 // bits_of(a) or bits_of(a) != bits_of(b):
        raise SimulationError(f"{name} is not known: its shape does not fit its types")
    return result


def selector_limits(vectors: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Legal values of byte-id-a, thread-id-a, byte-id-b and thread-id-b."""
    byte = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[vectors]
    return byte, (0, 1), byte, (0, 1, 2, 3)


def _mma(t: Translator, ins: Instruction) -> None:
    wanted = plan(t, product, ins)
    d, a, b, c, *scaling = ins.operands
    counts = [len(items(operand)) for operand in (d, a, b, c)]
    expected = [2 if wanted.d == "f16" else 4, wanted.a_registers, wanted.b_registers, wanted.c_registers]
    if counts != expected or len(scaling) != (4 if wanted.vectors else 0):
        raise t.error(f"operands of {counts} registers and {len(scaling)} more; it takes {expected}")
    selectors = None
    if wanted.vectors:
        scale_a, select_a, scale_b, select_b = scaling
        scaling, selectors = [scale_a, scale_b], _selectors(t, select_a, select_b, wanted.vectors)
    factors = [[t.read(item, "u4") for item in items(operand)] for operand in (a, b, *scaling)]
    t.together(_emit, wanted, items(d), items(c), factors, selectors)


def _emit(t: Translator, batch: list[tuple[Product, Registers, Registers, list[list[str]], Any]]) -> None:
    """Products of a batch as one, and then the sums, each of which may be what the next one adds to."""
    emit_warps(t)
    wanted, *_, selectors = batch[0]
    columns = zip(*(factors for *_, factors, _ in batch), strict=True)
    listed = [f"{t.const(planes)}(m, w, {', '.join(itertools.chain(*column))})" for column in columns]
    t.emit(f"p = {t.const(wanted.products)}({', '.join(listed)}{f', selectors={selectors}' if selectors else ''})")
    handed: dict[int, int] = {}  # what takes the sum of which other, whose registers it then writes itself
    for i, (_, d, c, *_) in enumerate(batch):
        t.resume(i)
        before = f"s{handed[i]}" if i in handed else emit_planes(t, c)
        t.emit(f"s{i} = {t.const(wanted.add)}(p[{i}], {before})")
        users = (j for j in range(i + 1, len(batch)) if not set(d).isdisjoint(batch[j][1] + batch[j][2]))
        user = next(users, None)
        if user is not None and batch[user][1] == batch[user][2] == d:
            handed[user] = i
        else:
            write_planes(t, d, f"{t.const(settled)}(s{i}, {wanted.d!r})")


def _selectors(t: Translator, select_a: Operand, select_b: Operand, vectors: int) -> tuple[int, ...]:
    chosen = tuple(immediate(t, item) for operand in (select_a, select_b) for item in items(operand))
    limits = selector_limits(vectors)
    if len(chosen) != 4 or any(value not in limit for value, limit in zip(chosen, limits, strict=True)):
        raise t.error(f"selectors {chosen}; legal values are {limits}")
    return chosen


HANDLERS: dict[str, Handler] = {"mma": _mma}
