"""Tensor maps: what a bulk tensor copy reads or writes, and where.

The layout of a CUtensorMap is NVIDIA's own. A launch in the simulator puts `TensorMap.encode()` where the kernel
expects the 128 bytes of one, and the kernel passes its address on as it would on hardware.

Dimensions count from the innermost, as in `cuTensorMapEncodeTiled`. A box lies in shared memory row after row without
gaps, its 16-byte chunks permuted by the swizzle. What lies outside the tensor is read as zeros and not written; but
whole are the 16 bytes in which a row ends, as an H200 writes them, in the gap behind a row too. Where a
box may start is `require_start`'s: hardware ends a copy from elsewhere with CUDA_ERROR_ILLEGAL_INSTRUCTION, which costs
the process its context.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.registry import tensor_map
from jitmx.sim.swizzle import SPANS, Addresses, swizzled

BYTES = tensor_map.BYTES
_MAGIC = b"jitmxmap"
_FORMAT = struct.Struct("<8sQBBxxI5Q4Q5H")


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map.

    Attributes:
        address: of the tensor in global memory.
        item: bytes of an element: 1, 2, 4 or 8.
        sizes: elements along each dimension, one to five.
        strides: bytes between neighbours along each dimension but the first.
        box: elements of a box along each dimension.
        span: swizzle in bytes: 0, 32, 64 or 128.

    Raises:
        SimulationError: what cuTensorMapEncodeTiled refuses, or is not simulated.
    """

    address: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    span: int = 0

    def __post_init__(self) -> None:
        row = self.box[0] * self.item
        rules = {
            f"address {self.address:#x} must be a multiple of 16": self.address % 16 == 0,
            f"element size {self.item} must be 1, 2, 4 or 8": self.item in (1, 2, 4, 8),
            f"rank {len(self.sizes)} must be 1 to 5": 1 <= len(self.sizes) <= 5,
            "sizes, box and strides must fit each other": len(self.sizes) == len(self.box) == len(self.strides) + 1,
            f"sizes {self.sizes} must be 1 to 2^32": all(1 <= size <= 1 << 32 for size in self.sizes),
            f"box {self.box} must be 1 to 256 along each dimension": all(1 <= size <= 256 for size in self.box),
            f"strides {self.strides} must be multiples of 16 below 2^40": all(
                s % 16 == 0 and 0 <= s < 1 << 40 for s in self.strides
            ),
            f"a box row of {row} bytes must be a multiple of 16": row % 16 == 0,
            f"swizzle {self.span} must be 0, 32, 64 or 128": self.span in SPANS,
            f"a box row of {row} bytes must not exceed the swizzle of {self.span}": not self.span or row <= self.span,
            f"a box row of {row} bytes is narrower than the swizzle of {self.span}, which is not simulated": (
                not self.span or row >= self.span
            ),
        }
        for rule, kept in rules.items():
            if not kept:
                raise SimulationError(f"tensor map: {rule}")

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory, which is also what it reports to an mbarrier."""
        return int(np.prod(self.box)) * self.item

    def encode(self) -> bytes:
        """The 128 bytes that a kernel takes."""
        pad = 5 - len(self.sizes)
        sizes, strides, box = (*self.sizes, *[0] * pad), (*self.strides, *[0] * pad), (*self.box, *[0] * pad)
        packed = _FORMAT.pack(_MAGIC, self.address, self.item, len(self.sizes), self.span, *sizes, *strides, *box)
        return packed.ljust(BYTES, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """The map in 128 bytes.

        Raises:
            SimulationError: bytes that `encode` has not made.
        """
        magic, address, item, rank, span, *rest = _FORMAT.unpack(raw[: _FORMAT.size])
        if magic != _MAGIC:
            raise SimulationError("the tensor map's address holds no tensor map of the simulator")
        return cls(address, item, tuple(rest[:rank]), tuple(rest[5 : 4 + rank]), tuple(rest[9 : 9 + rank]), span)

    def require_start(self, coordinates: tuple[int, ...], *, written: bool) -> None:
        """A copy may start there: on 16 bytes, and not before the tensor where the box is written to it.

        Args:
            coordinates: of the box's first element, signed, innermost first.

        Raises:
            SimulationError: it may not.
        """
        listed = ", ".join(map(str, coordinates))
        if coordinates[0] * self.item % 16:
            raise SimulationError(
                f"a tensor copy at coordinates ({listed}), whose first is {coordinates[0] * self.item} bytes into a "
                "row; it must be a multiple of 16 bytes"
            )
        if written and min(coordinates) < 0:
            raise SimulationError(
                f"a tensor copy to coordinates ({listed}); a box that is written may end outside the tensor, and not "
                "start at a negative one"
            )

    def chunks(self, start: int) -> Addresses:
        """Shared address of each 16 bytes of a box at `start`, in the box's own order."""
        plain: Addresses = start + 16 * np.arange(self.box_bytes // 16)
        return swizzled(plain, self.span)

    def elements(
        self, coordinates: tuple[int, ...], *, written: bool = False
    ) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """Global address of each element of the box at `coordinates`, in the box's own order, and which exist.

        Args:
            coordinates: of the box's first element, signed, innermost first.
            written: which are written instead: also those that share 16 bytes with the end of a row.
        """
        address = np.full((1,) * len(self.box), self.address, np.int64)
        inside = np.ones_like(address, np.bool_)
        for axis, (first, size, extent, stride) in enumerate(
            zip(coordinates, self.box, self.sizes, (self.item, *self.strides), strict=True)
        ):
            # Axes of the arrays run from the outermost, so that the innermost varies fastest.
            shape = [1] * len(self.box)
            shape[len(self.box) - 1 - axis] = size
            index = (first + np.arange(size)).reshape(shape)
            address = address + index * stride
            if written and axis == 0:
                extent = -(-extent * self.item // 16) * 16 // self.item
            inside = inside & (index >= 0) & (index < extent)
        return address.reshape(-1), inside.reshape(-1)


def encode(shown: tensor_map.TensorMap, address: int) -> bytes:
    """The simulator's tensor map of what a launch shows at an address."""
    return TensorMap(address, shown.item_bytes, shown.sizes, shown.strides, shown.box, shown.swizzle).encode()
