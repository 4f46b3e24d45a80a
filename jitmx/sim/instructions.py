"""Every instruction that the simulator knows, and which of them span a warp."""

from __future__ import annotations

import importlib

from jitmx.errors import SimulationError
from jitmx.sim.ptx import Immediate, Instruction, Operand
from jitmx.sim.translate import Handler

_MODULES = (
    "access", "alu", "moves", "arithmetic", "collective", "atomics", "convert", "mma", "wgmma", "matrix", "copies",
    "mbarrier", "hints", "clusters", "remote", "inline",
)  # fmt: skip
ALL = Immediate(-1)


def handlers() -> dict[str, Handler]:
    """Handlers by the first part of an opcode, from every semantic module."""
    out: dict[str, Handler] = {}
    for name in _MODULES:
        try:
            module = importlib.import_module(f"jitmx.sim.{name}")
        except ModuleNotFoundError:
            continue
        for key, handler in getattr(module, "HANDLERS", {}).items():
            if key in out:
                raise SimulationError(f"two handlers for {key}")
            out[key] = handler
    return out


def members(ins: Instruction) -> tuple[Operand, int] | None:
    """The operand that holds the mask of lanes an instruction waits for, and the lanes it spans; None where none."""
    first = ins.opcode[0]
    if first in ("shfl", "vote", "match", "redux", "elect") and "sync" in ins.opcode:
        return ins.operands[-1], 32
    if first in ("bar", "barrier") and ins.opcode[1:2] == ("warp",):
        return ins.operands[0], 32
    if first == "wgmma":
        return ALL, 128
    if ins.opcode[:2] == ("barrier", "cluster") and "aligned" in ins.opcode:
        return ALL, 32
    if first in ("mma", "ldmatrix", "stmatrix", "movmatrix", "setmaxnreg"):
        return ALL, 32
    return None
