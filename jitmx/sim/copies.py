"""The `cp` instructions: `cp.async`, bulk copies, bulk tensor copies, their groups and waits.

Copies go from global to shared memory of any blocks of the cluster, from the block's own shared to global memory, and
from there to shared memory of another block. Reductions are not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.access import space_of
from jitmx.sim.inflight import Copies
from jitmx.sim.mbarrier import shared_address
from jitmx.sim.ptx import Address, Instruction, Operand, Register
from jitmx.sim.tensormap import BYTES, TensorMap
from jitmx.sim.warps import chosen, immediate, items

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]


def _each(m: Machine, mask: Array | None, *columns: Array) -> list[tuple[int, ...]]:
    """Active lanes, each with its values as integers; 32-bit values are signed."""
    lanes = m.active(mask)
    spread = [chosen(column, lanes).tolist() for column in columns]
    return list(zip(lanes.tolist(), *spread, strict=True))


def _start(m: Machine, mask: Array | None, target: Array, source: Array, size: int, wanted: Array, line: int) -> None:
    lanes = m.active(mask)
    target, source, wanted = (chosen(column, lanes) for column in (target, source, wanted))
    Copies.of(m).start(lanes, target, source, size, wanted, line)


def _groups(m: Machine, mask: Array | None, verb: str, *how: Any) -> None:
    getattr(Copies.of(m), verb)(m.active(mask), *how)


def _arrive(m: Machine, mask: Array | None, address: Array, increments: bool, line: int) -> None:
    lanes = m.active(mask)
    Copies.of(m).arrive(lanes, chosen(address, lanes), increments, line)


def _bulk_load(
    m: Machine, mask: Any, target: Array, source: Array, size: Array, barrier: Array, ranks: Array, line: int
) -> None:
    lanes = m.active(mask)
    given = [chosen(x, lanes).astype(np.int64) for x in (target, source, size, barrier, ranks)]
    Copies.of(m).load(lanes, given[0], given[1], given[2], given[3], given[4], line)


def _bulk_each(m: Machine, mask: Any, verb: str, line: int, *columns: Array) -> None:
    for values in _each(m, mask, *columns):
        getattr(Copies.of(m), verb)(*values, line)


def _box_load(
    m: Machine, mask: Any, target: Array, box: Array, at: tuple[Array, ...], barrier: Array, ranks: Array, line: int
) -> None:
    for lane, start, address, mbarrier, goals, *first in _each(m, mask, target, box, barrier, ranks, *at):
        found = _fitting(m, lane, address, first, line, written=False)
        Copies.of(m).load_box(lane, start, found, tuple(first), mbarrier, goals, line)


def _box_store(m: Machine, mask: Any, source: Array, box: Array, at: tuple[Array, ...], line: int) -> None:
    for lane, start, address, *first in _each(m, mask, source, box, *at):
        found = _fitting(m, lane, address, first, line, written=True)
        Copies.of(m).store_box(lane, start, found, tuple(first), line)


def _fitting(m: Machine, lane: int, address: int, coordinates: list[int], line: int, *, written: bool) -> TensorMap:
    """The tensor map at an address, which takes a copy at these coordinates."""
    chunks = np.uint64(address) + np.arange(0, BYTES, 16, dtype=np.uint64)
    space, inner = space_of(m, "generic", chunks)
    raw = space.load(m, inner, 0, np.full(len(inner), lane), 8, 2, line)
    try:
        found = TensorMap.decode(raw.tobytes())
    except SimulationError as error:
        m.fault(line, lane, str(error))
    if len(found.box) != len(coordinates):
        m.fault(line, lane, f"{len(coordinates)} coordinates for a tensor map of {len(found.box)} dimensions")
    try:
        found.require_start(tuple(coordinates), written=written)
    except SimulationError as error:
        m.fault(line, lane, str(error))
    return found


_HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}


def _address(t: Translator, operand: Operand) -> str:
    return shared_address(t, operand, generic=False)


def _plain(t: Translator, parts: tuple[str, ...], given: tuple[Operand, ...]) -> None:
    """cp.async.ca and .cg."""
    if parts[2] == "mbarrier":
        generic = not any(part.startswith("shared") for part in parts)
        address = shared_address(t, given[0], generic=generic)
        t.emit(f"{t.const(_arrive)}(m, {t.mask}, {address}, {'noinc' not in parts}, {t.line})")
        return
    spaces = [part.partition("::")[0] for part in parts[3:] if part not in _HINTS]
    size = immediate(t, given[2])
    if spaces != ["shared", "global"] or size not in ((16,) if parts[2] == "cg" else (4, 8, 16)):
        raise t.error("it is not known")
    extra = given[3:-1] if "L2::cache_hint" in parts else given[3:]
    wanted = t.scalar(size, "u4")
    if extra and isinstance(extra[0], Register) and t.entry.registers.get(extra[0].name) == "pred":
        wanted = f"where({t.read(extra[0], 'b1')}, {t.scalar(0, 'u4')}, {wanted})"
    elif extra:
        wanted = t.read(extra[0], "u4")
    target, source = _address(t, given[0]), _address(t, given[1])
    t.emit(f"{t.const(_start)}(m, {t.mask}, {target}, {source}, {size}, {wanted}, {t.line})")


def _bulk(t: Translator, parts: tuple[str, ...], given: tuple[Operand, ...]) -> None:
    """cp.async.bulk and cp.async.bulk.tensor."""
    names = [part for part in parts if part not in _HINTS]
    tensor = names[:1] == ["tensor"]
    if tensor:
        names = [part for part in names[1:] if part not in ("tile", "1d", "2d", "3d", "4d", "5d")]
    where = f"m, {t.mask}"
    if names[:1] == ["prefetch"]:
        if not tensor:
            source, size = _address(t, given[0]), t.read(given[1], "u4")
            t.emit(f"{t.const(_bulk_each)}({where}, 'ask', {t.line}, {source}, {size})")
        return
    many = "multicast::cluster" in names and names[:1] == ["shared::cluster"]
    names = [name for name in names if not many or name != "multicast::cluster"]
    last = 2 if tensor else 3  # the operand that is the mbarrier
    if names[:1] in (["shared::cluster"], ["shared::cta"]) and names[1:] == ["global", "mbarrier::complete_tx::bytes"]:
        target, barrier = _address(t, given[0]), _address(t, given[last])
        ranks = f"{t.read(given[last + 1], 'u2')}.astype('i4')" if many else t.scalar(-1, "i4")
        if tensor:
            box, at = _box(t, given[1])
            t.emit(f"{t.const(_box_load)}({where}, {target}, {box}, {at}, {barrier}, {ranks}, {t.line})")
        else:
            source, size = _address(t, given[1]), t.read(given[2], "u4")
            t.emit(f"{t.const(_bulk_load)}({where}, {target}, {source}, {size}, {barrier}, {ranks}, {t.line})")
    elif names == ["shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"] and not tensor and not many:
        target, source, barrier = (_address(t, given[k]) for k in (0, 1, 3))
        size = t.read(given[2], "u4")
        t.emit(f"{t.const(_bulk_each)}({where}, 'pass_on', {t.line}, {target}, {source}, {size}, {barrier})")
    elif names == ["global", "shared::cta", "bulk_group"]:
        if tensor:
            box, at = _box(t, given[0])
            t.emit(f"{t.const(_box_store)}({where}, {_address(t, given[1])}, {box}, {at}, {t.line})")
        else:
            size = t.read(given[2], "u4")
            target, source = _address(t, given[0]), _address(t, given[1])
            t.emit(f"{t.const(_bulk_each)}({where}, 'store', {t.line}, {target}, {source}, {size})")
    else:
        raise t.error("it is not known")


def _box(t: Translator, operand: Operand) -> tuple[str, str]:
    """Expressions of a tensor map's address and of the tuple of coordinates."""
    if not isinstance(operand, Address) or not operand.coordinates:
        raise t.error(f"{operand} has no coordinates")
    coordinates = [item for operand in operand.coordinates for item in items(operand)]
    listed = ", ".join(t.read(item, "i4") for item in coordinates)
    return _address(t, operand), f"({listed},)"


def _cp(t: Translator, ins: Instruction) -> None:
    parts, given = ins.opcode, ins.operands
    if parts[1] != "async":
        raise t.error("it is not known")
    bulk = parts[2] == "bulk"
    verb = parts[3] if bulk else parts[2]
    if verb == "commit_group":
        t.emit(f"{t.const(_groups)}(m, {t.mask}, {'commit_bulk' if bulk else 'commit'!r})")
    elif verb == "wait_all":
        t.emit(f"{t.const(_groups)}(m, {t.mask}, 'wait', None)")
    elif verb == "wait_group":
        count = immediate(t, given[0])
        how = f"'wait_bulk', {count}, {'read' in parts}" if bulk else f"'wait', {count}"
        t.emit(f"{t.const(_groups)}(m, {t.mask}, {how})")
    elif bulk:
        _bulk(t, parts[3:], given)
    elif verb in ("ca", "cg", "mbarrier"):
        _plain(t, parts, given)
    else:
        raise t.error("it is not known")


HANDLERS: dict[str, Handler] = {"cp": _cp}
