"""Stores and reductions to shared memory that report to an mbarrier: `st.async` and `red.async`.

Their writes belong to a column of the mbarrier in the race check, so that only a wait there orders what follows after
them. Reductions of several threads on one word do not race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.atomics import operation
from jitmx.sim.inflight import Copies
from jitmx.sim.mbarrier import shared_address
from jitmx.sim.ptx import SIZES, Instruction, Operand, operands
from jitmx.sim.warps import chosen, items

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

_REPORTS = "mbarrier::complete_tx::bytes"


def _spread(m: Machine, lanes: Array, *values: Array) -> list[Array]:
    return [chosen(value, lanes) for value in values]


def _store(m: Machine, mask: Array | None, address: Array, barrier: Array, values: list[Array], line: int) -> None:
    copies, lanes = Copies.of(m), m.active(mask)
    content = np.stack(_spread(m, lanes, *values), 1).view(np.uint8).reshape(len(lanes), -1)
    target, told = _spread(m, lanes, address, barrier)
    copies.complete(lanes, target.astype(np.int64), content, told.astype(np.int64), told.astype(np.int64), line)


def _reduce(
    m: Machine, mask: Array | None, address: Array, barrier: Array, value: Array, apply: Any, line: int
) -> None:
    copies, lanes = Copies.of(m), m.active(mask)
    columns = zip(lanes.tolist(), *_spread(m, lanes, address, barrier, value), strict=True)
    for lane, to, told, new in columns:
        column = copies.column(lane, "mbarrier", int(told))
        copies.reduce(lane, to, np.array([new]), apply, int(told), column, line)


def _parts(t: Translator, ins: Instruction, known: set[str]) -> tuple[str, str, str]:
    """Expressions of both addresses, and the type."""
    kind = ins.opcode[-1]
    known |= {ins.opcode[0], "async", "shared::cluster", _REPORTS, kind}
    unknown = [part for part in ins.opcode if part not in known]
    if unknown or kind not in SIZES or SIZES[kind] not in (4, 8) or _REPORTS not in ins.opcode:
        raise t.error(f".{unknown[0]} is not known" if unknown else "this form is not known")
    target, _, barrier = operands(ins, 3)
    generic = "shared::cluster" not in ins.opcode
    address, told = (shared_address(t, operand, generic=generic) for operand in (target, barrier))
    return address, told, kind


def _word(t: Translator, operand: Operand, kind: str) -> str:
    bits = f"u{SIZES[kind]}"
    return f"{t.read(operand, 'f' + bits[1])}.view({bits!r})" if kind[0] == "f" else t.read(operand, bits)


def _st_async(t: Translator, ins: Instruction) -> None:
    address, barrier, kind = _parts(t, ins, {"weak", "v2", "v4"})
    listed = items(ins.operands[1])
    count = next((int(part[1:]) for part in ins.opcode if part in ("v2", "v4")), 1)
    if len(listed) != count or count * SIZES[kind] > 16:
        raise t.error(f"{len(listed)} registers for {count} elements of .{kind}")
    values = ", ".join(_word(t, item, kind) for item in listed)
    t.emit(f"{t.const(_store)}(m, {t.mask}, {address}, {barrier}, [{values}], {t.line})")


def _red_async(t: Translator, ins: Instruction) -> None:
    name = next((part for part in ins.opcode[1:] if part in _REDUCTIONS), "")
    address, barrier, kind = _parts(t, ins, {"relaxed", "cluster", name})
    if kind not in _REDUCTIONS.get(name, ()):
        raise t.error(f"the operation .{name} of .{kind} is not known")
    apply = t.const(operation(name, kind, "shared"))
    t.emit(
        f"{t.const(_reduce)}(m, {t.mask}, {address}, {barrier}, {_word(t, ins.operands[1], kind)}, {apply}, {t.line})"
    )


_REDUCTIONS = {
    "inc": ("u32",), "dec": ("u32",), "min": ("u32", "s32"), "max": ("u32", "s32"), "add": ("u32", "s32", "u64"),
    "and": ("b32",), "or": ("b32",), "xor": ("b32",),
}  # fmt: skip
HANDLERS: dict[str, Handler] = {"st.async": _st_async, "red.async": _red_async}
