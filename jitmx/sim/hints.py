"""Instructions that change no value: fences, prefetches, cache policies, register counts, programmatic launch.

Launches run one after the other, so `griddepcontrol.wait` finds everything of the launch before it done. Where a launch
is a programmatic one, what it may write counts as in use by the previous kernel until then (jitmx.sim.memory).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitmx.sim.inflight import Copies
from jitmx.sim.ptx import Address, Instruction
from jitmx.sim.warps import immediate

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.translate import Handler, Translator

_SCOPES = {"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl"}
_PROXIES = {
    "proxy", "alias", "async", "async::generic", "generic", "tensormap", "tensormap::generic", "mbarrier_init",
    "global", "shared::cta", "shared::cluster", "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
}  # fmt: skip
_CACHES = {
    "global", "local", "param", "const", "tensormap", "L1", "L2", "L1::evict_last", "L2::evict_last",
    "L2::evict_normal",
}  # fmt: skip


def _fenced(m: Machine, mask: Any, proxied: tuple[str, ...]) -> None:
    lanes = m.active(mask)
    m.races.fence(lanes)
    if proxied:
        Copies.of(m).proxy.fence(lanes, proxied)


def _known(t: Translator, ins: Instruction, known: set[str]) -> None:
    unknown = [part for part in ins.opcode[1:] if part not in known]
    if unknown:
        raise t.error(f".{unknown[0]} is not known")


def _fence(t: Translator, ins: Instruction) -> None:
    """fence and membar: what a thread did before may travel with its next atomic write."""
    _known(t, ins, _SCOPES | _PROXIES)
    named = {part.partition("::")[0] for part in ins.opcode[1:]} & {"shared", "global"}
    proxied = tuple(sorted(named or {"shared", "global"})) if {"proxy", "async"} <= set(ins.opcode) else ()
    t.emit(f"{t.const(_fenced)}(m, {t.mask}, {proxied})")


def _prefetch(t: Translator, ins: Instruction) -> None:
    """Prefetches may name any address: hardware drops those that it cannot follow."""
    _known(t, ins, _CACHES)
    if not isinstance(ins.operands[0], Address):
        raise t.error(f"{ins.operands[0]} is no address")


def _createpolicy(t: Translator, ins: Instruction) -> None:
    """A cache policy, whose bits nobody but the cache looks at."""
    t.write(ins.operands[0], t.scalar(0, "u8"), "u8")


def _griddepcontrol(t: Translator, ins: Instruction) -> None:
    _known(t, ins, {"launch_dependents", "wait"})
    if "wait" in ins.opcode:
        t.emit(f"if m.memory.late: m.races.wait_previous(m.active({t.mask}))")


def _setmaxnreg(t: Translator, ins: Instruction) -> None:
    _known(t, ins, {"inc", "dec", "sync", "aligned", "u32"})
    count = immediate(t, ins.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise t.error(f"{count} registers; it must be a multiple of 8 from 24 to 256")


HANDLERS: dict[str, Handler] = {
    "fence": _fence,
    "membar": _fence,
    "prefetch": _prefetch,
    "prefetchu": _prefetch,
    "applypriority": _prefetch,
    "createpolicy": _createpolicy,
    "griddepcontrol": _griddepcontrol,
    "setmaxnreg": _setmaxnreg,
}
