"""What a kernel promises of its machine code, and the check that it is so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """Promises that hold for every compile of a variant.

    Attributes:
        max_registers: registers a thread, at most.
        max_spill_bytes: bytes a thread may spill to local memory (0: none).
        require: regular expressions, each found in at least one SASS instruction.
        forbid: regular expressions found in none.
        min_registers: registers a thread, at least: a launch allots as many, and warps that take more (setmaxnreg) wait
            for ever where the others have too few to give.
    """

    max_registers: int = 255
    max_spill_bytes: int = 0
    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    min_registers: int = 0

    @property
    def needs_sass(self) -> bool:
        """Whether checking takes the disassembly."""
        return bool(self.require or self.forbid)

    def breaches(self, *, registers: int, spill_bytes: int, sass: Iterable[str] = ()) -> list[str]:
        """Each promise that this machine code breaks, in words; empty where all hold."""
        found = []
        if registers > self.max_registers:
            found.append(f"{registers} registers a thread, over the {self.max_registers} promised")
        if registers < self.min_registers:
            found.append(f"{registers} registers a thread, under the {self.min_registers} that warps share out")
        if spill_bytes > self.max_spill_bytes:
            found.append(f"{spill_bytes} B a thread spilled to local memory, over the {self.max_spill_bytes} promised")
        lines = list(sass)
        for pattern in self.require:
            if not any(map(re.compile(pattern).search, lines)):
                found.append(f"no instruction matches {pattern!r}")
        for pattern in self.forbid:
            hit = next(filter(re.compile(pattern).search, lines), None)
            if hit is not None:
                found.append(f"{hit.strip()!r} matches {pattern!r}, which is ruled out")
        return found
