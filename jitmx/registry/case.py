"""Checks of a variant: a small launch with known inputs, and what its outputs must be.

Cases are how a kernel is run where there is no card, and what evidence rests on. They are small and ragged, and between
them reach every branch of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.registry.arguments import Arguments, Number
from jitmx.registry.launch import Launch
from jitmx.registry.tensor_map import Encode

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Buffer:
    """An array in device memory.

    Attributes:
        data: what it holds at launch; for an output, only shape and dtype count, and its bytes start uninitialised.
        output: whether the kernel writes it. What is neither output nor scratch may not be written.
        scratch: memory with these bytes that the kernel reads and writes; nobody looks at it, unless an output.
        early: whether it is written although the previous kernel may be at work, which does not use it.
    """

    data: Array
    output: bool = False
    scratch: bool = False
    early: bool = False


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: what is ragged about it.
        launch: its geometry.
        values: of the arguments by field: a number, or the buffer whose address it is; a field that is not among them
            is 0.
        check: from the outputs, in the order of the fields, to their error.
        gate: largest error that passes.
        resident: blocks that must run side by side, or None: as many as the simulator likes.
    """

    name: str
    launch: Launch
    values: Mapping[str, Buffer | Number]
    check: Callable[[Sequence[Array]], float]
    gate: float
    resident: int | None = None

    def buffers(self, arguments: Arguments) -> dict[str, Buffer]:
        """Its buffers by field, in the order of the fields."""
        given = {name: self.values.get(name) for name in arguments.fields}
        return {name: item for name, item in given.items() if isinstance(item, Buffer)}

    def pack(self, arguments: Arguments, addresses: Mapping[str, int], encode: Encode) -> bytes:
        """The argument struct.

        Args:
            addresses: of the buffers, by field.
            encode: makes a tensor map at an address.
        """
        numbers = {name: item for name, item in self.values.items() if not isinstance(item, Buffer)}
        return arguments.pack({**numbers, **addresses}, self.launch.maps, encode)


def relative_l2(found: Array, wanted: Array) -> float:
    """||found - wanted|| / ||wanted|| in float64; infinite where one is NaN and the other is not."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return float("inf")
    found, wanted = np.nan_to_num(found), np.nan_to_num(wanted)
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / scale if scale else float(np.linalg.norm(found))


def pair_l2(found: Array, wanted: Array) -> float:
    """`relative_l2` of the sum of a pair [2, ...]; infinite where the second tensor is not what rounding loses."""
    kept, lost = found.astype(np.float64)
    if (np.abs(lost) > np.abs(kept) * 2.0**-8).any():
        return float("inf")
    return relative_l2(kept + lost, wanted)


def mismatches(found: Array, wanted: Array) -> float:
    """Share of elements that differ, for outputs that must be exact."""
    return float(np.mean(found != wanted)) if found.size else 0.0
