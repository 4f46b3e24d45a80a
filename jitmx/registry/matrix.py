"""What a kernel's tensor map says: a matrix in device memory, and the boxes of it that one copy takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BYTES = 128  # of a tensor map
ALIGNMENT = 64  # of one in a kernel's arguments


@dataclass(frozen=True)
class MatrixMap:
    """A row-major matrix of 16-bit values without gaps, copied in boxes of 64 columns with the 128-byte swizzle.

    Attributes:
        rows: of the matrix.
        columns: of the matrix, a multiple of 8.
        box_rows: rows of a box, at most 256.
    """

    rows: int
    columns: int
    box_rows: int

    item_bytes = 2
    box_columns = 64
    swizzle_bytes = 128


Encode = Callable[[MatrixMap, int], bytes]  # makes the tensor map of a matrix at an address


def room(size: int) -> int:
    """Bytes of a struct of `size` that begins with a tensor map or lies behind one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def with_map(struct: bytes, matrix: MatrixMap | None, address: int, encode: Encode) -> bytes:
    """A kernel's arguments: the struct, behind the tensor map of the matrix at the address if there is one."""
    return struct if matrix is None else encode(matrix, address) + struct.ljust(room(len(struct)), b"\0")
