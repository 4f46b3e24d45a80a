"""Tensor maps: how a launch shows an array in device memory to a kernel's tensor copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jitmx.errors import InputError

BYTES = 128  # of a tensor map
ALIGNMENT = 64  # of one among a kernel's arguments
MAX_RANK = 5

ITEM_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "u8": 1}
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map but for its address, as `cuTensorMapEncodeTiled` takes it: dimensions from the innermost.

    What lies outside the tensor is read as zeros, and not written.

    Attributes:
        dtype: of the elements: "bf16", "fp16", "e4m3" or "u8".
        sizes: elements along each of one to five dimensions.
        box: elements that one copy takes along each, at most 256.
        strides: bytes between neighbours along each dimension but the innermost; by default there are no gaps.
        swizzle: span in bytes of the swizzle of a box in shared memory, or 0.
        promotion: bytes that a miss brings to the L2, or 0: what is asked for.

    Raises:
        InputError: what the driver would refuse, by value and rule.
    """

    dtype: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...] = ()
    swizzle: int = 0
    promotion: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"a tensor map of {self.dtype!r}; its elements must be {', '.join(ITEM_BYTES)}")
        if not self.strides:
            pitches = (self.item_bytes * math.prod(self.sizes[:rank]) for rank in range(1, len(self.sizes)))
            object.__setattr__(self, "strides", tuple(pitches))
        row = self.box[0] * self.item_bytes if self.box else 0
        rules = {
            f"rank {len(self.sizes)} must be 1 to {MAX_RANK}": 1 <= len(self.sizes) <= MAX_RANK,
            f"sizes {self.sizes}, box {self.box} and strides {self.strides} must fit one another": (
                len(self.sizes) == len(self.box) == len(self.strides) + 1
            ),
            f"sizes {self.sizes} must be 1 to 2^32": all(1 <= size <= 1 << 32 for size in self.sizes),
            f"box {self.box} must be 1 to 256 along each dimension": all(1 <= size <= 256 for size in self.box),
            f"strides {self.strides} must be multiples of 16 below 2^40": all(
                stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in self.strides
            ),
            f"a box row of {row} bytes must be a multiple of 16": row % 16 == 0,
            f"swizzle {self.swizzle} must be {', '.join(map(str, SWIZZLES))}": self.swizzle in SWIZZLES,
            f"a box row of {row} bytes must not exceed the swizzle of {self.swizzle}": (
                not self.swizzle or row <= self.swizzle
            ),
            f"promotion {self.promotion} must be {', '.join(map(str, PROMOTIONS))}": self.promotion in PROMOTIONS,
        }
        for rule, kept in rules.items():
            if not kept:
                raise InputError(f"tensor map: {rule}")

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]


Encode = Callable[[TensorMap, int], bytes]  # makes the tensor map of what lies at an address
