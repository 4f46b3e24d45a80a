"""A translated kernel: basic blocks with their Python, and what a machine must bind to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from jitmx.sim.ptx import SIZES, Function, Module

EXIT, BLOCKED = -1, -2
SET = " is set"  # after the name of a register: its flags that tell which lanes have set it


@dataclass
class Block:
    """A basic block: instructions [first, last) of the kernel."""

    index: int
    first: int
    last: int
    lines: tuple[int, ...] = ()
    members: str = ""  # expression of the mask of lanes that a warp-wide instruction at the head waits for
    width: int = 32  # lanes that such an instruction spans
    until: int = 0  # this and the blocks below that index run as one where only whole warps come
    breadth: int = 32  # lanes that the widest of them spans
    head: str = ""  # its first instruction
    signals: bool = False  # whether it, or a run from it on, has what other warps may poll for in global memory
    counts: bool = False  # whether it ends with an atomic operation on global memory


@dataclass
class Program:
    """A translated kernel: what a machine binds to its registers and runs."""

    module: Module
    entry: Function
    blocks: list[Block]
    views: dict[str, tuple[str, str]] = field(default_factory=dict)  # name → register, dtype
    registers: dict[str, str] = field(default_factory=dict)  # register → dtype
    specials: set[str] = field(default_factory=set)
    objects: dict[str, Any] = field(default_factory=dict)
    tracked: set[str] = field(default_factory=set)  # registers that may be read before they are set
    fillers: set[str] = field(default_factory=set)  # registers that nothing sets and only prmt reads: see flow.fillers
    polled: frozenset[int] = (
        frozenset()
    )  # lines that look at memory in a short loop, until another thread has changed it
    granules: dict[str, int] = field(default_factory=dict)
    globals: dict[str, int] = field(default_factory=dict)  # addresses of module variables
    bound: dict[int, Any] = field(default_factory=dict)  # registers and functions of the last machines, by their lanes
    compiled: dict[tuple[int, str], CodeType] = field(default_factory=dict)
    emit: Callable[[int, str], str] | None = None  # the Python of a block, by its form

    def code(self, index: int, form: str) -> CodeType:
        """One form of a block, compiled when first asked for: "full", "whole" or "masked"."""
        made = self.compiled.get((index, form))
        if made is None:
            assert self.emit is not None
            made = compile(self.emit(index, form), f"<block {index} of {self.entry.name}>", "exec")
            self.compiled[index, form] = made
        return made


def dtype_of(kind: str) -> str:
    """The dtype in which PTX type `kind` computes: "s32" → "i4". Packed and 16-bit floats are bits."""
    if kind == "pred":
        return "b1"
    if kind in ("f16", "bf16"):
        return "u2"
    if kind in ("f16x2", "bf16x2", "u16x2", "s16x2"):
        return "u4"
    return {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]] + str(SIZES[kind])
