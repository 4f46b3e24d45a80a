"""Products of a warpgroup: `wgmma`, with A in registers or shared memory and B in shared memory.

Four consecutive warps compute D[64, N] = A[64, K] · B[K, N] + D; K is 32 bytes deep. Warp w holds rows 16w … 16w + 15,
each laid out as for `mma`: register r of D is row g + 8·(r / 2 % 2), column 8·(r / 4) + 2t + r % 2.

The product is computed when the instruction is issued. `wgmma.fence`, `commit_group` and `wait_group` therefore have no
effect on values: a kernel that reads its accumulators before waiting for them is not caught.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.mma import BITS, Matrix, Words, accumulator, matrix, registers, values
from jitmx.sim.swizzle import Addresses, Descriptor

_PAIRS = {
    "f16": ("f16",),
    "bf16": ("bf16",),
    "tf32": ("tf32",),
    "e4m3": ("e4m3", "e5m2"),
    "e5m2": ("e4m3", "e5m2"),
    "s8": ("s8", "u8"),
    "u8": ("s8", "u8"),
}


@dataclass(frozen=True)
class Wgmma:
    """One `wgmma.mma_async`: D is 64 × n, K is k deep; `d`, `a` and `b` are its types."""

    n: int
    k: int
    d: str
    a: str
    b: str
    saturate: bool

    @property
    def d_registers(self) -> int:
        """32-bit registers of D that a thread holds."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def a_addresses(self, descriptor: Descriptor, *, mn_major: bool = False) -> Addresses:
        """Shared byte addresses [64, k] of A."""
        return descriptor.addresses(64, self.k, BITS[self.a] // 8, mn_major=mn_major)

    def b_addresses(self, descriptor: Descriptor, *, mn_major: bool = False) -> Addresses:
        """Shared byte addresses [n, k] of B, column by column."""
        return descriptor.addresses(self.n, self.k, BITS[self.b] // 8, mn_major=mn_major)

    def a_fragment(self, words: Words) -> Matrix:
        """A [groups, 64, k] from registers [groups, 128, 4]."""
        return matrix(words.reshape(-1, 32, words.shape[-1]), "a", self.a).reshape(len(words), 64, self.k)

    def a_values(self, codes: npt.NDArray[np.unsignedinteger]) -> Matrix:
        """A from the codes [groups, 64, k] at its addresses."""
        return values(codes, self.a)

    def b_values(self, codes: npt.NDArray[np.unsignedinteger]) -> Matrix:
        """B [groups, k, n] from the codes [groups, n, k] at its addresses."""
        return values(codes, self.b).swapaxes(-1, -2)

    def __call__(self, a: Matrix, b: Matrix, d: Words, keep: npt.NDArray[np.bool_], signs: tuple[int, int] = (1, 1)) -> Words:
        """D from A [groups, 64, k], B [groups, k, n] and the registers of D [groups, 128, d_registers].

        Args:
            keep: [groups]; scale-d: whether the old D is added.
            signs: imm-scale-a and imm-scale-b, 1 or -1.
        """
        groups = len(d)
        with np.errstate(over="ignore", invalid="ignore"):
            result = (signs[0] * signs[1]) * (a @ b)
            old = accumulator(d.reshape(groups * 4, 32, -1), self.d, self.n).reshape(groups, 64, self.n)
            result = np.where(keep[:, None, None], result + old, result)
        return registers(result.reshape(groups * 4, 16, self.n), self.d, saturate=self.saturate).reshape(groups, 128, -1)


def wgmma(parts: tuple[str, ...]) -> Wgmma:
    """The product that `wgmma.mma_async` with these parts names.

    Raises:
        SimulationError: a shape, type or modifier that is not known.
    """
    d, a, b = parts[-3:]
    shape = next((part for part in parts if part.startswith("m64n")), "m64n0k0")
    n, k = (int(item) for item in shape.removeprefix("m64n").split("k"))
    known = {"wgmma", "mma_async", "sync", "aligned", shape, "satfinite", d, a, b}
    kind = "s32" if a in ("s8", "u8") else d
    fits = b in _PAIRS.get(a, ()) and d in (("s32",) if kind == "s32" else ("f32", "f16")) and k * BITS[a] == 256
    if not fits or set(parts) - known or n % 8 or not 8 <= n <= 256 or (d == "f16" and a in ("bf16", "tf32")):
        raise SimulationError(f"{'.'.join(parts)} is not known")
    return Wgmma(n, k, d, a, b, "satfinite" in parts)


Codes = npt.NDArray[Any]
