"""Loads, stores and address conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim import order
from jitmx.sim.lanes import span
from jitmx.sim.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Space
from jitmx.sim.program import dtype_of
from jitmx.sim.ptx import SIZES, Immediate, Instruction, Operand, Sink, Vector, operands
from jitmx.sim.translate import Handler, Translator

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}
# Hints that change nothing.
_CACHE = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "unified",
    "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
    "L2::evict_last", "L2::evict_normal", "L2::evict_first",
    "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B",
}  # fmt: skip


def parts(t: Translator, ins: Instruction) -> tuple[str, str, int, str]:
    """Space, type, vector length and order (jitmx.sim.order) of a load or store.

    The space is "generic" where none is named, and "cluster" for shared::cluster.
    """
    space, kind, count = "generic", "", 1
    for part in ins.opcode[1:]:
        head = part.partition("::")[0]
        if head in WINDOWS:
            space = "cluster" if part == "shared::cluster" else head
        elif part in SIZES:
            kind = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part not in _CACHE and part not in order.PARTS:
            raise t.error(f".{part} is not known")
    if not kind:
        raise t.error("it names no type")
    if why := order.refused("ld" if ins.opcode[0] == "ldu" else ins.opcode[0], ins.opcode):
        raise t.error(why)
    return space, kind, count, "nc" if "nc" in ins.opcode else order.spelled(ins.opcode)


def space_of(m: Machine, name: str, address: Array) -> tuple[Space, Array]:
    """The space that addresses name and the addresses within it; generic ones of one access lie in one space."""
    if name == "shared":
        return m.shared, address
    if name == "cluster":
        return m.reach, address
    if name in ("global", "const"):
        return m.memory, address
    if name == "local":
        return m.local, address
    if name == "param":
        return m.param, address
    space = m.space(int(address.flat[0]))
    for window, candidate in ((SHARED_WINDOW, m.reach), (LOCAL_WINDOW, m.local), (PARAM_WINDOW, m.param)):
        if space is candidate:
            return space, address - np.uint64(window)
    return space, address


def groups(m: Machine, name: str, address: Array, offset: int, lanes: Array) -> list[tuple[Space, Array, Array, Any]]:
    """Generic addresses by the space they lie in: space, addresses, lanes, and which lanes these are."""
    if name != "generic":
        space, address = space_of(m, name, address)
        return [(space, address, lanes, slice(None))]
    address = np.broadcast_to(address + np.uint64(offset % (1 << 64)), lanes.shape)
    high = address >> np.uint64(32)
    values = np.unique(high)
    if len(values) == 1 or (values >= 0x7F00).all():
        space, inner = space_of(m, name, address)
        return [(space, inner, lanes, slice(None))]
    out = []
    for value in values:
        which = np.flatnonzero(high == value)
        space, inner = space_of(m, name, address[which])
        out.append((space, inner, lanes[which], which))
    return out


def load(
    m: Machine, name: str, address: Array, offset: int, mask: Array | None, size: int, count: int, line: int, how: str
) -> Array:
    """Unsigned [count, active lanes]."""
    lanes = m.active(mask)
    if mask is not None and address.ndim:
        address = address.take(lanes)
    if order.parse(how).scope:
        m.poll(lanes)
    if name == "shared":
        return _planes(m.shared.load(m, address, offset, lanes, size, count, line, how))
    if name == "global":
        return _planes(m.memory.load(m, address, offset, lanes, size, count, line, how))
    parts = groups(m, name, address, offset, lanes)
    if name == "generic":
        offset = 0
    if len(parts) == 1:
        space, inner, lanes, _ = parts[0]
        return _planes(space.load(m, inner, offset, lanes, size, count, line, how))
    out = np.empty((count, len(lanes)), f"u{size}")
    for space, inner, some, which in parts:
        out[:, which] = space.load(m, inner, 0, some, size, count, line, how).T
    return out


def _planes(rows: Array) -> Array:
    return np.ascontiguousarray(rows.T)


def load_all(
    m: Machine, name: str, mask: Array | None, size: int, count: int, how: str,
    places: tuple[tuple[Array, int, int], ...],
) -> Array:  # fmt: skip
    """What several instructions load, by the address, offset and line of each: unsigned [count, loads, lanes].

    Addresses may have 32 bits.
    """
    lanes, space = m.active(mask), m.shared if name == "shared" else m.memory
    found = [
        np.full(len(lanes), address) if not address.ndim else address if mask is None else address.take(lanes)
        for address, *_ in places
    ]
    addresses = np.concatenate(found).reshape(len(places), -1).astype("u8", copy=False)
    offsets = [offset % (1 << 64) for _, offset, _ in places]
    if any(offsets):
        addresses = addresses + np.array(offsets, "u8")[:, None]
    every, lines = np.concatenate([lanes] * len(places)), tuple(line for *_, line in places)
    try:
        rows = space.load(m, addresses.reshape(-1), 0, every, size, count, lines, how)
    except SimulationError:
        for address, offset, line in places:
            load(m, name, address.astype("u8"), offset, mask, size, count, line, how)  # tells which of them it is
        raise
    return _planes(rows).reshape(count, len(places), len(lanes))


def store(
    m: Machine, name: str, address: Array, offset: int, mask: Array | None, values: list[Array], line: int, how: str
) -> None:
    """Write one value, or as many as `values`, for each active lane."""
    m.events += 1
    lanes = m.active(mask)
    columns = np.empty((len(lanes), len(values)), values[0].dtype)
    for i, value in enumerate(values):
        columns[:, i] = value if mask is None or value.ndim == 0 else value.take(lanes)
    if mask is not None and address.ndim:
        address = address.take(lanes)
    if name == "shared":
        m.shared.store(m, address, offset, lanes, columns, line, how)
        return
    if name == "global":
        m.memory.store(m, address, offset, lanes, columns, line, how)
        return
    for space, inner, some, which in groups(m, name, address, offset, lanes):
        space.store(m, inner, 0 if name == "generic" else offset, some, columns[which], line, how)


def _elements(operand: Operand, count: int, t: Translator) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise t.error(f"{len(items)} registers for {count} elements")
    return items


def _ld(t: Translator, ins: Instruction) -> None:
    destination, source = operands(ins, 2, 3)[:2]
    space, kind, count, how = parts(t, ins)
    space = {"const": "global"}.get(space, space)
    size, dtype = SIZES[kind], dtype_of(kind)
    address, offset = t.address(source)
    t.together(_emit_loads, (space, size, count, how), (address, offset), _elements(destination, count, t), dtype)


_WIDENED = ".astype('u8')"  # as an Emitter reads an address of 32 bits


def _emit_loads(t: Translator, batch: list[Any]) -> None:
    space, size, count, how = batch[0][0]
    if len(batch) == 1:
        address, offset = batch[0][1]
        t.emit(f"v = {t.const(load)}(m, {space!r}, {address}, {offset}, {t.mask}, {size}, {count}, {t.line}, {how!r})")
    else:
        places = []
        for i, (_, place, *_) in enumerate(batch):
            t.resume(i)
            places.append(f"({place[0].removesuffix(_WIDENED)}, {place[1]}, {t.line})")
        t.emit(f"v = {t.const(load_all)}(m, {space!r}, {t.mask}, {size}, {count}, {how!r}, ({', '.join(places)}))")
    if t.mask != "None":
        t.emit(f"w = {t.const(span)}(m.active({t.mask}))")
    for i, (_, _, elements, dtype) in enumerate(batch):
        t.resume(i)
        for j, item in enumerate(elements):
            if not isinstance(item, Sink):
                plane = f"v[{j}]" if len(batch) == 1 else f"v[{j}, {i}]"
                # Floats travel as bits, so that no NaN is altered.
                kind = f"u{size}" if dtype[0] == "f" else dtype
                t.scatter(item, plane + (f".view('{dtype}')" if dtype[0] == "i" else ""), kind, "w")


def _st(t: Translator, ins: Instruction) -> None:
    destination, source = operands(ins, 2, 3)[:2]
    space, kind, count, how = parts(t, ins)
    size = SIZES[kind]
    address, offset = t.address(destination)
    values = ", ".join(_bits(t, item, size, kind) for item in _elements(source, count, t))
    t.emit(f"{t.const(store)}(m, {space!r}, {address}, {offset}, {t.mask}, [{values}], {t.line}, {how!r})")


def _bits(t: Translator, item: Operand, size: int, kind: str) -> str:
    if isinstance(item, Immediate) and kind[0] == "f" and item.kind == "f64" and size == 4:
        return f"{t.read(item, 'f4')}.view('u4')"
    return t.read(item, f"u{size}")


def _cvta(t: Translator, ins: Instruction) -> None:
    destination, source = operands(ins, 2)
    width = "u" + str(SIZES[ins.opcode[-1]])
    to = ins.opcode[1] == "to"
    space = ins.opcode[2 if to else 1].partition("::")[0]
    if space not in WINDOWS:
        raise t.error(f".{space} is not known")
    value = t.read(source, width)
    window = t.scalar(WINDOWS[space], width)
    if WINDOWS[space] == 0:
        t.write(destination, value, width)
    else:
        t.ufunc(destination, width, "subtract" if to else "add", value, window)


def _isspacep(t: Translator, ins: Instruction) -> None:
    destination, source = operands(ins, 2)
    space = ins.opcode[1].partition("::")[0]
    value = f"({t.read(source, 'u8')} >> {t.scalar(32, 'u8')})"
    if space in ("shared", "local", "param"):
        t.write(destination, f"{value} == {t.scalar(WINDOWS[space] >> 32, 'u8')}", "b1")
    elif space in ("global", "const"):
        t.write(destination, f"{value} >= {t.scalar(0x7F00, 'u8')}", "b1")
    else:
        raise t.error(f".{space} is not known")


HANDLERS: dict[str, Handler] = {"ld": _ld, "ldu": _ld, "st": _st, "cvta": _cvta, "isspacep": _isspacep}
