"""A translated kernel bound to lanes: arrays for its registers, and its basic blocks once they have run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.program import Program

Array = npt.NDArray[Any]
_NUMPY = (
    "copyto", "add", "subtract", "multiply", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "negative", "equal",
    "not_equal", "less", "less_equal", "greater", "greater_equal", "left_shift", "right_shift", "minimum", "maximum",
    "where", "logical_and", "absolute",
)  # fmt: skip


@dataclass
class Bound:
    """Registers over some number of lanes, and the functions of basic blocks that work on them."""

    names: dict[str, Any]
    full: list[Any]
    whole: list[Any]
    masked: list[Any]
    registers: dict[str, Array] = field(default_factory=dict)
    views: int = 0  # of the program's, how many have names
    objects: int = 0

    @classmethod
    def of(cls, program: Program) -> Bound:
        """Those of a program, none of which is named yet."""
        names = {name: getattr(np, name) for name in _NUMPY} | {"np": np, "count": np.count_nonzero}
        full, whole, masked = ([None] * len(program.blocks) for _ in range(3))
        return cls(names, full, whole, masked)
