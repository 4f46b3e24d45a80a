"""Products of a warpgroup: `wgmma`, with A in registers or shared memory and B in shared memory.

Four consecutive warps compute D[64, N] = A[64, K] · B[K, N] + D; K is 32 bytes deep. Warp w holds rows 16w … 16w + 15,
each laid out as for `mma`: register r of D is row g + 8·(r / 2 % 2), column 8·(r / 4) + 2t + r % 2.

The product is computed when the instruction is issued. Its registers count as under way until `wgmma.wait_group`
(jitmx.sim.flight), and shared memory as being read: to write there before is a race.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim import flight
from jitmx.sim.mma import BITS, Matrix, Words, held, left, rounded, settled, sums, values
from jitmx.sim.products import Products
from jitmx.sim.ptx import Instruction, Register, Vector
from jitmx.sim.swizzle import Descriptor
from jitmx.sim.warps import chosen, emit_planes, emit_warps, immediate, items, plan, whole_warps, write_planes

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

_PAIRS = {
    "f16": ("f16",),
    "bf16": ("bf16",),
    "tf32": ("tf32",),
    "e4m3": ("e4m3", "e5m2"),
    "e5m2": ("e4m3", "e5m2"),
    "s8": ("s8", "u8"),
    "u8": ("s8", "u8"),
}


@dataclass(frozen=True)
class Wgmma:
    """One `wgmma.mma_async`: D is 64 × n, K is k deep; `d`, `a` and `b` are its types."""

    n: int
    k: int
    d: str
    a: str
    b: str
    saturate: bool

    @property
    def d_registers(self) -> int:
        """32-bit registers of D that a thread holds."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def a_fragment(self, words: Words) -> Matrix:
        """A [groups, 64, k] from registers [4, lanes]."""
        return left(words, self.a).reshape(-1, 64, self.k)

    def a_values(self, codes: npt.NDArray[np.unsignedinteger]) -> Matrix:
        """A from the codes [groups, 64, k] at its addresses."""
        return values(codes, self.a)

    def b_values(self, codes: npt.NDArray[np.unsignedinteger]) -> Matrix:
        """B [groups, k, n] from the codes [groups, n, k] at its addresses."""
        return values(codes, self.b).swapaxes(-1, -2)

    def __call__(
        self, a: Matrix, b: Matrix, d: Words, keep: npt.NDArray[np.bool_], signs: tuple[int, int] = (1, 1)
    ) -> Words:
        """D from A [groups, 64, k], B [groups, k, n] and the registers of D [d_registers, lanes].

        Args:
            keep: [groups]; scale-d: whether the old D is added.
            signs: imm-scale-a and imm-scale-b, 1 or -1.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            product = a @ b
            if signs[0] * signs[1] < 0:
                product = -product
            result = held(product.reshape(-1, 16, self.n), d.shape[1] // 32)[0]
            if keep.all():
                result += sums(d, self.d)
            elif keep.any():
                result = np.where(np.repeat(keep, 128), result + sums(d, self.d), result)
        return settled(rounded(result, self.d, saturate=self.saturate), self.d)


def wgmma(parts: tuple[str, ...]) -> Wgmma:
    """The product that `wgmma.mma_async` with these parts names.

    Raises:
        SimulationError: a shape, type or modifier that is not known.
    """
    d, a, b = parts[-3:]
    shape = next((part for part in parts if part.startswith("m64n")), "m64n0k0")
    n, k = (int(item) for item in shape.removeprefix("m64n").split("k"))
    known = {"wgmma", "mma_async", "sync", "aligned", shape, "satfinite", d, a, b}
    kind = "s32" if a in ("s8", "u8") else d
    fits = b in _PAIRS.get(a, ()) and d in (("s32",) if kind == "s32" else ("f32", "f16")) and k * BITS[a] == 256
    if not fits or set(parts) - known or n % 8 or not 8 <= n <= 256 or (d == "f16" and a in ("bf16", "tf32")):
        raise SimulationError(f"{'.'.join(parts)} is not known")
    return Wgmma(n, k, d, a, b, "satfinite" in parts)


@lru_cache(maxsize=4096)
def _chunks(word: int, extent: int, depth: int, size: int, mn_major: bool) -> tuple[Any, Any]:
    """The 16-byte chunks of shared memory that hold the matrix of a descriptor, and where in them its elements lie."""
    addresses = Descriptor.decode(word).addresses(extent, depth, size, mn_major=mn_major)
    chunks, inverse = np.unique(addresses >> 4, return_inverse=True)
    elements = inverse.reshape(addresses.shape) * (16 // size) + (addresses & 15) // size
    return (chunks << 4).astype(np.uint64), elements


def _fetch(m: Machine, firsts: Any, words: list[int], extent: int, wanted: Wgmma, mn_major: bool, line: int) -> Any:
    """Codes [groups, extent, k] of the matrices that descriptors of warpgroups tell, by the first lane of each."""
    size, places = BITS[wanted.a] // 8, []
    for lane, word in zip(firsts.tolist(), words, strict=True):
        try:
            places.append(_chunks(word, extent, wanted.k, size, mn_major))
        except SimulationError as error:
            m.fault(line, lane, str(error))
    chunks = np.concatenate([chunks for chunks, _ in places])
    lanes = np.repeat(firsts, [len(chunks) for chunks, _ in places])
    content = m.shared.load(m, chunks, 0, lanes, 8, 2, line).reshape(-1).view(f"u{size}")
    Products.of(m).read(firsts, lanes, chunks, line)
    out, start = np.empty((len(places), extent, wanted.k), content.dtype), 0
    for i, (found, elements) in enumerate(places):
        end = start + len(found) * 16 // size
        content[start:end].take(elements, out=out[i])
        start = end
    return out


def _run(
    m: Machine,
    lanes: Any,
    wanted: Wgmma,
    d: Words,
    a: Any,
    b: Any,
    keep: Any,
    signs: tuple[int, int],
    majors: tuple[bool, bool],
    line: int,
) -> Words:
    """Registers of D in the lanes; `a` is a fragment or, with one dimension at most, descriptors."""
    lanes = m.lane_ids if lanes is None else lanes
    firsts = lanes[lanes % m.width % 128 == 0]
    if len(lanes) != 128 * len(firsts) or (lanes.reshape(-1, 128) != firsts[:, None] + _GROUP).any():
        m.fault(line, int(lanes[0]), "wgmma without all four warps of its warpgroup")

    def one(values: Any) -> Any:
        """The value that all threads of each warpgroup have."""
        found = chosen(np.asarray(values), lanes).reshape(-1, 128)
        differs = (found != found[:, :1]).any(1)
        if differs.any():
            m.fault(
                line, int(firsts[differs.argmax()]), "wgmma whose descriptors or scale-d differ within the warpgroup"
            )
        return found[:, 0]

    words, kept = one(b).tolist(), one(keep)
    if np.ndim(a) < 2:
        rows = wanted.a_values(_fetch(m, firsts, one(a).tolist(), 64, wanted, majors[0], line))
    else:
        rows = wanted.a_fragment(a)
    columns = wanted.b_values(_fetch(m, firsts, words, wanted.n, wanted, majors[1], line))
    return wanted(rows, columns, d, kept, signs)


_GROUP = np.arange(128)


def _mma_async(t: Translator, ins: Instruction) -> None:
    wanted = plan(t, wgmma, ins)
    d, a, b, keep, *rest = ins.operands
    numbers = [immediate(t, operand) for operand in rest]
    from_registers = isinstance(a, Vector)
    transposable = BITS[wanted.a] == 16
    expected = 0 if wanted.d == "s32" else 2 + ((1 if from_registers else 2) if transposable else 0)
    if len(numbers) != expected or len(items(d)) != wanted.d_registers or (from_registers and len(items(a)) != 4):
        raise t.error(
            f"{len(items(d))} registers of D and {len(numbers)} numbers; it takes {wanted.d_registers} and {expected}"
        )
    signs = numbers[:2] or [1, 1]
    majors = numbers[2:] or [0]
    if any(sign not in (1, -1) for sign in signs) or any(major not in (0, 1) for major in majors):
        raise t.error(f"numbers {numbers}; scales are 1 or -1, transpositions 0 or 1")
    emit_warps(t)
    first = emit_planes(t, items(a)) if from_registers else t.read(a, "u8")
    scale = t.read(keep, "b1") if isinstance(keep, Register) else t.scalar(immediate(t, keep), "b1")
    flags = (False if from_registers else bool(majors[0]), bool(majors[-1]))
    call = f"{t.const(_run)}(m, w, {t.const(wanted)}, {emit_planes(t, items(d))}, {first}, {t.read(b, 'u8')}, {scale}"
    write_planes(t, items(d), f"{call}, {tuple(signs)}, {flags}, {t.line})")
    accumulators, held = flight.operands_of(ins)
    t.emit(f"{t.const(flight.START)}(m, {t.mask}, {t.const(accumulators)}, {t.const(held)}, {t.line})")


def _groups(m: Machine, mask: Any, verb: str, line: int, *how: int) -> None:
    getattr(Products.of(m), verb)(whole_warps(m, mask, line, "wgmma"), *how)


def _wgmma(t: Translator, ins: Instruction) -> None:
    verb, rest = ins.opcode[1], ins.opcode[2:]
    if verb == "mma_async":
        _mma_async(t, ins)
    elif rest != ("sync", "aligned") or verb not in ("fence", "commit_group", "wait_group"):
        raise t.error("it is not known")
    elif verb == "fence":
        emit_warps(t)
        t.emit(f"{t.const(flight.FENCE)}(m, {t.mask})")
    elif verb == "commit_group":
        t.emit(f"{t.const(_groups)}(m, {t.mask}, 'commit', {t.line})")
        t.emit(f"{t.const(flight.COMMIT)}(m, {t.mask})")
    else:
        count = immediate(t, ins.operands[0])
        t.emit(f"{t.const(_groups)}(m, {t.mask}, 'wait', {t.line}, {count})")
        t.emit(f"{t.const(flight.WAIT)}(m, {t.mask}, {count})")


HANDLERS: dict[str, Handler] = {"wgmma": _wgmma}
