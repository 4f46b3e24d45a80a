"""Where matrices lie in shared memory: swizzles, and the matrix descriptors of `wgmma`.

A swizzle of span s (32, 64 or 128 bytes) permutes the 16-byte chunks of each row of s bytes: address bits 4… are XORed
with bits 7… (one, two or three of them), so the pattern repeats every 8·s bytes from an address aligned to that.

Descriptor bits: 0–13 start address, 16–29 leading-dimension byte offset (LBO), 32–45 stride-dimension byte offset
(SBO), all without their four low bits; 49–51 base offset; 62–63 swizzle (0 none, 1 128 B, 2 64 B, 3 32 B). Layouts, in
rows of M or N and 16-byte chunks:

    K-major, no swizzle     8 rows of 16 bytes are contiguous; LBO to the next 16 bytes of K, SBO to the next 8 rows
    K-major, swizzle s      8 rows of s bytes are contiguous; SBO to the next 8 rows; LBO unused
    MN-major, no swizzle    8 values of k, 16 bytes of M each; SBO to the next 16 bytes of M, LBO to the next 8 of K
    MN-major, swizzle s     8 values of k, s bytes of M each; LBO to the next s bytes of M, SBO to the next 8 of K
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError

Addresses = npt.NDArray[np.int64]
SPANS = (0, 32, 64, 128)


def swizzled(addresses: Addresses, span: int, atom: int = 16) -> Addresses:
    """Shared addresses after a swizzle of `span` bytes that keeps `atom` bytes together; span 0 changes nothing."""
    if span == 0:
        return addresses
    rows: Addresses = (addresses >> 7) & (span // atom - 1)
    return addresses ^ (rows * atom)


@dataclass(frozen=True)
class Descriptor:
    """A `wgmma` matrix descriptor, decoded. Offsets and the address are in bytes; `span` is the swizzle."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def decode(cls, word: int) -> Descriptor:
        """The descriptor in a 64-bit register.

        Raises:
            SimulationError: a base offset other than 0, which means a swizzle pattern that starts off its boundary.
        """
        if word >> 49 & 7:
            raise SimulationError(
                f"matrix descriptor {word:#018x}: base offset {word >> 49 & 7} is not simulated, only 0"
            )
        start, leading, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, (0, 128, 64, 32)[word >> 62 & 3])

    def encode(self) -> int:
        """The 64-bit word."""
        span = {0: 0, 128: 1, 64: 2, 32: 3}[self.span]
        return self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | span << 62

    def addresses(self, extent: int, depth: int, size: int, *, mn_major: bool = False) -> Addresses:
        """Shared byte addresses [extent, depth] of the elements of a matrix, `extent` along M or N and `depth` along K.

        Args:
            size: bytes of an element.
            mn_major: elements along M or N are contiguous instead of elements along K.
        """
        row, k = np.ogrid[:extent, :depth]
        if not mn_major:
            byte = k * size
            if self.span == 0:
                offsets = row % 8 * 16 + row // 8 * self.stride + byte // 16 * self.leading + byte % 16
            else:
                offsets = row % 8 * self.span + row // 8 * self.stride + byte
        elif self.span == 0:
            byte = row * size
            offsets = byte % 16 + byte // 16 * self.stride + k % 8 * 16 + k // 8 * self.leading
        else:
            byte = row * size
            offsets = byte % self.span + byte // self.span * self.leading + k % 8 * self.span + k // 8 * self.stride
        # Hardware swizzles absolute addresses, so a start address may lie inside a row of the pattern.
        return swizzled((self.start + offsets).astype(np.int64), self.span)
