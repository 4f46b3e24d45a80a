"""Checks of a variant: a small launch with known inputs, and what its outputs must be.

Cases are how a kernel is run where there is no card, and what evidence rests on. They are small and ragged, and between
them reach every branch of the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.registry.matrix import Encode, MatrixMap, with_map

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
        grid: blocks.
        shared_bytes: dynamic shared memory a block, bytes.
        layout: `struct` format of the argument struct, native alignment ("@PPii").
        arguments: its fields: buffers become addresses.
        check: from the outputs, in the order of the arguments, to their error.
        gate: largest error that passes.
        cluster: blocks a cluster.
        matrix: what a tensor map before the argument struct says of the first argument, where the kernel has one.
        resident: blocks that must run side by side, or None: as many as the simulator likes.
    """

    name: str
    grid: int
    shared_bytes: int
    layout: str
    arguments: Sequence[Buffer | int | float]
    check: Callable[[Sequence[Array]], float]
    gate: float
    cluster: int = 1
    matrix: MatrixMap | None = None
    resident: int | None = None

    def pack(self, addresses: Sequence[int], encode: Encode) -> bytes:
        """The argument struct, with the addresses of the buffers in their order.

        Args:
            encode: makes the tensor map of a matrix at an address.
        """
        remaining = iter(addresses)
        fields = [next(remaining) if isinstance(item, Buffer) else item for item in self.arguments]
        return with_map(struct.pack(self.layout, *fields), self.matrix, int(fields[0]), encode)


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
