"""Instructions that change no value: fences, prefetches, cache policies, register counts, programmatic launch.

Launches run one after the other, so `griddepcontrol.wait` finds everything of the launch before it done. Where a launch
is a programmatic one, all that is not constant counts as in use by the previous kernel until then (jitmx.sim.memory),
and what the launch after it may meet is noted at `griddepcontrol.launch_dependents` (jitmx.sim.sequence).
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import order
from jitmx.sim.inflight import Copies
from jitmx.sim.ptx import Address, Instruction
from jitmx.sim.warps import immediate

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

Array = npt.NDArray[Any]

_PROXIES = {
    "proxy", "alias", "async", "async::generic", "generic", "tensormap", "tensormap::generic", "mbarrier_init",
    "global", "shared::cta", "shared::cluster", "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
}  # fmt: skip
_INITIALISED = {"mbarrier_init", "release", "cluster"}
_CACHES = {
    "global", "local", "param", "const", "tensormap", "L1", "L2", "L1::evict_last", "L2::evict_last",
    "L2::evict_normal",
}  # fmt: skip


# What createpolicy makes; nobody but the cache looks at its bits.
_POLICY = 0x706F_6C69_6379_0001


def check_policy(t: Translator, ins: Instruction) -> None:
    """Emit what holds the last operand of an instruction with L2::cache_hint to be a policy."""
    t.emit(f"{t.const(_governed)}(m, {t.mask}, {t.read(ins.operands[-1], 'u8')}, {t.line})")


def _governed(m: Machine, mask: Any, policy: Array, line: int) -> None:
    lanes = m.active(mask)
    wrong = np.broadcast_to(policy, m.lanes)[lanes] != _POLICY
    if wrong.any():
        m.fault(line, int(lanes[wrong.argmax()]), "its cache policy is none that createpolicy made")


def _fenced(m: Machine, mask: Any, how: str, line: int) -> None:
    m.races.fence(m.active(mask), order.parse(how), line)


def _proxied(m: Machine, mask: Any, spaces: tuple[str, ...]) -> None:
    lanes = m.active(mask)
    m.races.fence_mbarriers(lanes)
    if spaces:
        Copies.of(m).proxy.fence(lanes, spaces)


def _known(t: Translator, ins: Instruction, known: Set[str]) -> None:
    unknown = [part for part in ins.opcode[1:] if part not in known]
    if unknown:
        raise t.error(f".{unknown[0]} is not known")


def _fence(t: Translator, ins: Instruction) -> None:
    """fence and membar: one orders memory, or a proxy, or makes mbarriers known."""
    _known(t, ins, order.PARTS | _PROXIES)
    named = set(ins.opcode[1:])
    if "mbarrier_init" in named and named != _INITIALISED:
        raise t.error("PTX has fence.mbarrier_init with .release.cluster alone")
    if not {"proxy", "mbarrier_init"} & named:
        if ins.opcode[0] == "membar" and (len(named) != 1 or not named & {"cta", "gl", "sys"}):
            raise t.error("PTX has membar.cta, .gl and .sys")
        if ins.opcode[0] == "fence" and (why := order.refused("fence", named)):
            raise t.error(why)
        t.emit(f"{t.const(_fenced)}(m, {t.mask}, {order.spelled(ins.opcode, 'sc', 'sys')!r}, {t.line})")
        return
    if not {"async", "mbarrier_init"} & set(ins.opcode):
        return
    named = {part.partition("::")[0] for part in ins.opcode[1:]} & {"shared", "global"}
    proxied = tuple(sorted(named or {"shared", "global"})) if {"proxy", "async"} <= set(ins.opcode) else ()
    t.emit(f"{t.const(_proxied)}(m, {t.mask}, {proxied})")


def _prefetch(t: Translator, ins: Instruction) -> None:
    """Prefetches may name any address: hardware drops those that it cannot follow."""
    _known(t, ins, _CACHES)
    if not isinstance(ins.operands[0], Address):
        raise t.error(f"{ins.operands[0]} is no address")


def _griddepcontrol(t: Translator, ins: Instruction) -> None:
    _known(t, ins, {"launch_dependents", "wait"})
    if "wait" in ins.opcode:
        t.emit(f"if m.memory.late: m.memory.sequence.wait(m, m.active({t.mask}))")
    else:
        t.emit(f"if m.memory.late: m.memory.sequence.release(m, m.active({t.mask}), {t.line})")


class Registers:
    """The registers of blocks whose warps hand them over: what all have in the end must have been there at launch.

    As many are there as launch bounds of one block a multiprocessor leave each thread, by 8 and 248 at most.
    """

    def __init__(self, m: Machine) -> None:
        self.m = m
        launched = min(65536 // m.width // 8 * 8, 248)
        self.held = np.full((m.lanes // m.width, m.width // 32), launched)  # of each thread, by block and warp
        self.there = launched * m.width
        self.last = 0, 0  # lane and line

    @classmethod
    def set(cls, m: Machine, mask: Array | None, count: int, line: int) -> None:
        """Warps ask for so many registers a thread, or give back what they have above."""
        if "registers" not in m.units:
            m.units["registers"] = cls(m)
        unit = m.units["registers"]
        lanes = m.active(mask)
        unit.held[lanes // m.width, lanes % m.width // 32] = count
        unit.last = int(lanes[0]), line

    def end(self) -> None:
        """Every lane is done."""
        asked = int(self.held.sum(1).max()) * 32
        if asked > self.there:
            lane, line = self.last
            self.m.fault(line, lane, f"waits for ever: warps of its block ask for {asked} registers of {self.there}")


def _setmaxnreg(t: Translator, ins: Instruction) -> None:
    _known(t, ins, {"inc", "dec", "sync", "aligned", "u32"})
    count = immediate(t, ins.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise t.error(f"{count} registers; it must be a multiple of 8 from 24 to 256")
    t.emit(f"{t.const(Registers.set)}(m, {t.mask}, {count}, {t.line})")


HANDLERS: dict[str, Handler] = {
    "fence": _fence,
    "membar": _fence,
    "prefetch": _prefetch,
    "prefetchu": _prefetch,
    "applypriority": _prefetch,
    "createpolicy": lambda t, ins: t.write(ins.operands[0], t.scalar(_POLICY, "u8"), "u8"),
    "griddepcontrol": _griddepcontrol,
    "setmaxnreg": _setmaxnreg,
}
