"""Lane maps of the warp-wide matrix moves: ldmatrix, stmatrix, movmatrix.

A matrix is read or written in rows of 16 bytes; lane `rows · matrix + row` gives the address of each. With lane
l = 4g + t, register r of a lane holds

    m8n8 .b16            matrix r: row g, elements 2t and 2t + 1
    m8n8 .b16 .trans     matrix r: elements g of rows 2t and 2t + 1
    m8n16 .b8x16.…       matrix r: row g, elements 4t … 4t + 3, widened to bytes
    m16n16 .trans        matrix r / 2: elements g + 8·(r % 2) of rows 4t … 4t + 3, each a byte
    m16n8 .b8 .trans     (stmatrix) matrix r: bytes g of rows 2t and 2t + 1, then bytes g + 8 of both

Sources narrower than a byte take 16 bytes a row too: `b4x16_p64` packs 16 four-bit elements into the first 8 bytes,
`b6x16_p32` 16 six-bit elements into the first 12, low bits first; each lands in the low bits of its byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.memory import SHARED_WINDOW
from jitmx.sim.ptx import Instruction
from jitmx.sim.warps import chosen, emit_fragment, emit_warps, items, plan, write_fragment

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Words = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.uint8]
Index = npt.NDArray[np.intp]
ROW_BYTES = 16


@dataclass(frozen=True)
class Move:
    """One ldmatrix or stmatrix.

    Attributes:
        shape: m8n8, m8n16, m16n16 (loads) or m16n8 (stores).
        matrices: 1, 2 or 4.
        transposed: .trans.
        source: "b16", "b8", "b6x16_p32" or "b4x16_p64".
    """

    shape: str
    matrices: int
    transposed: bool
    source: str

    @property
    def rows(self) -> int:
        """Rows of 16 bytes in memory to a matrix."""
        return 16 if self.shape == "m16n16" else 8

    @property
    def addressing(self) -> int:
        """How many lanes, from lane 0, give addresses: row i of matrix j is lane j · rows + i."""
        return self.rows * self.matrices

    @property
    def registers(self) -> int:
        """32-bit registers that a lane gives or takes."""
        return self.matrices * (2 if self.shape == "m16n16" else 1)

    def load(self, rows: Rows) -> Words:
        """Registers [warps, 32, registers] from the rows that the lanes address: uint8 [warps, addressing, 16]."""
        content = widened(rows, self.source).reshape(len(rows), -1)
        picked = content[:, _bytes(self)]
        return np.ascontiguousarray(picked).view(np.uint32)[..., 0]

    def store(self, words: Words) -> Rows:
        """Rows uint8 [warps, addressing, 16] from registers [warps, 32, registers]."""
        content = np.ascontiguousarray(words, np.uint32).view(np.uint8).reshape(len(words), 32, self.registers, 4)
        rows = np.empty((len(words), self.addressing * ROW_BYTES), np.uint8)
        rows[:, _bytes(self)] = content
        return rows.reshape(len(words), self.addressing, ROW_BYTES)


@cache
def _bytes(move: Move) -> Index:
    """Index, in the bytes of all rows in order, of each byte of each register: [32, registers, 4]."""
    lane, register, byte = np.ogrid[:32, : move.registers, :4]
    g, t = lane // 4, lane % 4
    if move.shape == "m16n16":
        matrix, row, column = register // 2, 4 * t + byte, g + 8 * (register % 2)
    elif move.shape == "m16n8":
        matrix, row, column = register, 2 * t + byte % 2, g + 8 * (byte // 2)
    elif move.transposed:
        matrix, row, column = register, 2 * t + byte // 2, 2 * g + byte % 2
    else:
        matrix, row, column = register, g, 4 * t + byte
    return np.asarray((matrix * move.rows + row) * ROW_BYTES + column + 0 * byte)


def widened(rows: Rows, source: str) -> Rows:
    """Rows of 16 bytes, one element of a narrow source to a byte."""
    if source == "b4x16_p64":
        packed = rows[..., :8]
        nibbles: Rows = np.empty((*packed.shape, 2), np.uint8)
        nibbles[..., 0], nibbles[..., 1] = packed & 15, packed >> 4
        return np.asarray(nibbles.reshape(rows.shape))
    if source == "b6x16_p32":
        # Three bytes hold four elements.
        triples = rows[..., :12].reshape(*rows.shape[:-1], 4, 3).astype(np.uint32)
        packed = triples[..., 0] | triples[..., 1] << np.uint32(8) | triples[..., 2] << np.uint32(16)
        elements = packed[..., None] >> np.array([0, 6, 12, 18], np.uint32) & np.uint32(63)
        return np.asarray(elements.astype(np.uint8).reshape(rows.shape))
    return rows


def move(parts: tuple[str, ...]) -> Move:
    """What `ldmatrix` or `stmatrix` with these parts moves.

    Raises:
        SimulationError: a shape, count or format that is not known.
    """
    name, transposed = ".".join(parts), "trans" in parts
    shape = next((part for part in parts if part in ("m8n8", "m8n16", "m16n16", "m16n8")), "")
    count = next((part for part in parts if part in ("x1", "x2", "x4")), "")
    source = parts[-1]
    known = {parts[0], "sync", "aligned", shape, count, "trans", "shared", "shared::cta", "b8x16", source}
    legal: Any = {
        ("ldmatrix", "m8n8"): (("b16",), (False, True)),
        ("ldmatrix", "m8n16"): (("b4x16_p64", "b6x16_p32"), (False,)),
        ("ldmatrix", "m16n16"): (("b8", "b4x16_p64", "b6x16_p32"), (True,)),
        ("stmatrix", "m8n8"): (("b16",), (False, True)),
        ("stmatrix", "m16n8"): (("b8",), (True,)),
    }
    sources, orders = legal.get((parts[0], shape), ((), ()))
    narrow = source.startswith(("b4x16", "b6x16"))
    if set(parts) - known or not count or source not in sources or transposed not in orders:
        raise SimulationError(f"{name} is not known")
    if narrow != ("b8x16" in parts) or (shape == "m16n16" and count == "x4"):
        raise SimulationError(f"{name} is not known")
    return Move(shape, int(count[1]), transposed, source)


def transpose(words: Words) -> Words:
    """movmatrix.sync.aligned.m8n8.trans.b16: the 8 × 8 matrix in registers [warps, 32], transposed."""
    plain, across = Move("m8n8", 1, False, "b16"), Move("m8n8", 1, True, "b16")
    return across.load(plain.store(words[..., None]))[..., 0]


def _rows(m: Machine, lanes: Index | None, wanted: Move, address: Index) -> tuple[Any, Any]:
    """Those of active lanes that address rows, in order, and their addresses."""
    lanes = m.lane_ids if lanes is None else lanes
    lanes = lanes[lanes % 32 < wanted.addressing]
    return lanes, chosen(address, lanes)


def _load(m: Machine, lanes: Any, wanted: Move, address: Any, offset: int, line: int) -> Words:
    lanes, rows = _rows(m, lanes, wanted, address)
    content = m.shared.load(m, rows, offset, lanes, 8, 2, line).view(np.uint8)
    return wanted.load(content.reshape(-1, wanted.addressing, ROW_BYTES))


def _store(m: Machine, lanes: Any, wanted: Move, address: Any, offset: int, words: Words, line: int) -> None:
    lanes, rows = _rows(m, lanes, wanted, address)
    content = wanted.store(words)
    m.shared.store(m, rows, offset, lanes, content.reshape(-1, ROW_BYTES).view(np.uint64), line)


def _shared_address(t: Translator, ins: Instruction, at: int) -> tuple[str, int]:
    address, offset = t.address(ins.operands[at])
    generic = not any(part.startswith("shared") for part in ins.opcode)
    return address, offset - SHARED_WINDOW if generic else offset


def _ldmatrix(t: Translator, ins: Instruction) -> None:
    wanted = plan(t, move, ins)
    if len(items(ins.operands[0])) != wanted.registers:
        raise t.error(f"{len(items(ins.operands[0]))} registers; it takes {wanted.registers}")
    address, offset = _shared_address(t, ins, 1)
    emit_warps(t)
    call = f"{t.const(_load)}(m, w, {t.const(wanted)}, {address}, {offset}, {t.line})"
    write_fragment(t, ins.operands[0], call)


def _stmatrix(t: Translator, ins: Instruction) -> None:
    wanted = plan(t, move, ins)
    if len(items(ins.operands[1])) != wanted.registers:
        raise t.error(f"{len(items(ins.operands[1]))} registers; it takes {wanted.registers}")
    address, offset = _shared_address(t, ins, 0)
    emit_warps(t)
    words = emit_fragment(t, ins.operands[1])
    t.emit(f"{t.const(_store)}(m, w, {t.const(wanted)}, {address}, {offset}, {words}, {t.line})")


def _movmatrix(t: Translator, ins: Instruction) -> None:
    if ins.name != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise t.error("it is not known")
    emit_warps(t)
    write_fragment(t, ins.operands[0], f"{t.const(transpose)}({emit_fragment(t, ins.operands[1])}[..., 0])")


HANDLERS: dict[str, Handler] = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix}
