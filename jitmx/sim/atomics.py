"""Atomic operations and reductions on memory.

Lanes of one instruction act in the order of their numbers, or the other way round, by turns: a card promises neither,
and who is first at one word need not be first at the next, nor at the same one in the next launch. What they tell whom
is for jitmx.sim.releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import arithmetic, order, rounding
from jitmx.sim.access import groups
from jitmx.sim.memory import Space
from jitmx.sim.ptx import SIZES, Instruction, Sink, Vector
from jitmx.sim.translate import Handler, Translator
from jitmx.sim.warps import chosen

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]

_HINTS = {"noftz", "L2::cache_hint"}


def _float(kind: str, name: str, space: str) -> Any:
    element = {"f16x2": "f16", "bf16x2": "bf16"}.get(kind, kind)
    word = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}[element]

    def run(old: Array, new: Array) -> Array:
        x, y = (rounding.widen(np.ascontiguousarray(v).view(word), element) for v in (old, new))
        flushing = name == "add" and element == "f32" and space == "global"  # there, and not in shared memory
        if flushing:
            x, y = arithmetic.flush(x, element), arithmetic.flush(y, element)
        if name == "add":
            if element == "f64":
                return np.asarray(rounding.canonical(x + y)).view("u8")
            out = rounding.add(x, y, element, "rn")
            if flushing:
                out = np.ascontiguousarray(arithmetic.flush(rounding.widen(out, element), element)).view("u4")
        else:
            least = rounding.minimum(x, y, nan=False, largest=name == "max")
            out = rounding.narrow(least.astype("f8"), element, "rn")
        return np.asarray(out).view(old.dtype)

    return run


def operation(name: str, kind: str, space: str) -> Any:
    """A function of what lies in memory and the operands, on unsigned words, or None where there is no such."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64"):
        return _float(kind, name, space) if name in ("add", "min", "max") else None
    view = kind[0].replace("s", "i").replace("b", "u") + str(SIZES[kind])
    plain: dict[str, Any] = {
        "add": lambda old, new: old + new,
        "min": lambda old, new: np.minimum(old.view(view), new.view(view)).view(old.dtype),
        "max": lambda old, new: np.maximum(old.view(view), new.view(view)).view(old.dtype),
        "and": lambda old, new: old & new,
        "or": lambda old, new: old | new,
        "xor": lambda old, new: old ^ new,
        "exch": lambda old, new: new,
        "inc": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
        "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
        "cas": lambda old, compare, new: np.where(old == compare, new, old),
    }
    return plain.get(name)


def apply(
    m: Machine, name: str, address: Array, offset: int, mask: Array | None, operation: Any, values: list[Array],
    count: int, line: int, how: str, kind: str, replaces: bool,
) -> Array:  # fmt: skip
    """What memory held, unsigned [active lanes, count]; `values` holds `count` words for each operand."""
    m.events += 1
    lanes = m.active(mask)
    columns = np.stack([chosen(value, lanes) for value in values], 1)
    address = chosen(address, lanes)
    old = np.empty((len(lanes), count), columns.dtype)
    for space, inner, some, which in groups(m, name, address, offset, lanes):
        shift = 0 if name == "generic" else offset
        old[which] = _apply(m, space, inner, shift, some, operation, columns[which], count, line, how, kind, replaces)
    return old


def _apply(
    m: Machine, space: Space, address: Array, offset: int, lanes: Array, operation: Any, columns: Array,
    count: int, line: int, how: str, kind: str, replaces: bool,
) -> Array:  # fmt: skip
    m.atomics += 1
    turn = slice(None, None, 1 if m.atomics % 2 else -1)
    address, lanes, columns = address[turn], lanes[turn], columns[turn]
    size = columns.dtype.itemsize
    total = size * count
    where = space.locate(m, address, offset, lanes, total, line, "updates")
    space.check_writable(m, where, lanes, total, line)
    space.check_initialised(m, where, lanes, total, line)
    if space.races is not None:
        space.races.write(m, space, where, lanes, total, line, how, atomic=kind, replaces=replaces)
    index = where >> (total.bit_length() - 1)
    rows = space.rows(size, count)
    space.keep(index, total)
    space.mark_written(index, total)
    old = np.empty((len(lanes), count), columns.dtype)
    operands = columns.shape[1] // count
    left = np.arange(len(lanes))
    while left.size:
        # One lane of each word at a time, the first that is left.
        _, first = np.unique(index[left], return_index=True)
        now = left[np.sort(first)]
        old[now] = rows[index[now]]
        parts = [columns[now, i * count : (i + 1) * count] for i in range(operands)]
        rows[index[now]] = operation(old[now], *parts)
        left = np.delete(left, first)
    return old[turn]


def _atomic(t: Translator, ins: Instruction) -> None:
    space, count, name, kind = "generic", 1, "", ""
    for part in ins.opcode[1:]:
        head = part.partition("::")[0]
        if head in ("global", "shared"):
            space = "cluster" if part == "shared::cluster" else head
        elif part in SIZES:
            kind = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part in order.PARTS or part in _HINTS:
            continue
        elif not name:
            name = part
        else:
            raise t.error(f".{part} is not known")
    if why := order.refused(ins.opcode[0], ins.opcode):
        raise t.error(why)
    combine = operation(name, kind, space) if kind else None
    if combine is None:
        raise t.error(f"the operation .{name} of .{kind} is not known")
    result = ins.operands[0] if ins.opcode[0] == "atom" else Sink()
    target, *sources = ins.operands[1:] if ins.opcode[0] == "atom" else ins.operands
    sources = sources[: 2 if name == "cas" else 1]
    dtype = f"u{SIZES[kind]}"
    address, offset = t.address(target)
    items = [item for source in sources for item in (source.items if isinstance(source, Vector) else (source,))]
    values = ", ".join(t.word(item, kind, dtype) for item in items)
    if ins.opcode[0] == "atom":
        t.emit(f"m.poll(m.active({t.mask}))")  # a reduction tells its lanes nothing that they could wait for
    t.emit(
        f"v = {t.const(apply)}(m, {space!r}, {address}, {offset}, {t.mask}, {t.const(combine)}, [{values}], "
        f"{count}, {t.line}, {order.spelled(ins.opcode, 'relaxed')!r}, {ins.opcode[0]!r}, {name == 'exch'})"
    )
    for i, item in enumerate(result.items if isinstance(result, Vector) else (result,)):
        t.scatter(item, f"v[:, {i}]", dtype)


HANDLERS: dict[str, Handler] = {"atom": _atomic, "red": _atomic}
