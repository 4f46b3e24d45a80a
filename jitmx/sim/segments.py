"""Segments of far allocations: buffers of many GB of which only some pieces hold bytes.

A segment is a run of addresses, on both sides rounded to whole lines, whose bytes lie together in the arrays of global
memory, behind those of all other allocations. Addresses are offsets from the base of the memory here, and places count
from the first byte of the first segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LINE = 256  # bytes to which segments are rounded, so that addresses and places are aligned alike


class Segments:
    """All segments of a memory, by rising address."""

    def __init__(self) -> None:
        self.size = 0  # bytes of all of them
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._places = np.zeros(0, np.int64)

    def add(self, first: Array, size: int) -> None:
        """Segments that hold `size` bytes from each of these addresses on, all above those there are."""
        first = np.unique(first)
        starts, ends = first // LINE * LINE, -(-(first + size) // LINE) * LINE
        apart = np.append(True, starts[1:] > ends[:-1])
        starts, ends = starts[apart], np.append(ends[:-1][apart[1:]], ends[-1])
        lengths = ends - starts
        self._starts, self._ends = np.append(self._starts, starts), np.append(self._ends, ends)
        self._places = np.append(self._places, self.size + lengths.cumsum() - lengths)
        self.size += int(lengths.sum())

    def find(self, address: Array, size: int) -> tuple[Array, Array]:
        """Places of `size` bytes at each address, and which of them are within a segment; other places mean nothing."""
        address = address.view(np.int64)  # what is beyond 2^63 comes before all segments
        at = np.maximum(self._starts.searchsorted(address, "right") - 1, 0)
        start = self._starts.take(at)
        inside = (address >= start) & (address <= self._ends.take(at) - size)
        return address - start + self._places.take(at), inside

    def address_of(self, place: int | Array) -> Array:
        """The addresses of bytes of the arrays."""
        at = self._places.searchsorted(place, "right") - 1
        return np.asarray(self._starts[at] + place - self._places[at])

    def between(self, first: int, end: int) -> list[slice]:
        """Places of the segments from one address up to another."""
        at = ((self._starts >= first // LINE * LINE) & (self._starts < end)).nonzero()[0]
        lengths = self._ends[at] - self._starts[at]
        return [slice(a, a + n) for a, n in zip(self._places[at].tolist(), lengths.tolist(), strict=True)]
