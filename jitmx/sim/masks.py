"""What is known of the masks of lanes that run together. A mask of a group is never written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Masks:
    """The mask of the lanes at work, None for all, and the last one that was found to be of whole warps."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.current: Array | None = None
        self._active: tuple[Array | None, Array] = None, np.zeros(0, np.intp)
        self._whole: tuple[Array | None, int] = None, 0

    def active(self, mask: Array) -> Array:
        """Lanes of a mask, in order."""
        if mask is not self.current:  # such as a predicate, which may be a register that changes
            return mask.nonzero()[0]
        if mask is not self._active[0]:
            self._active = mask, mask.nonzero()[0]
        return self._active[1]

    def whole(self, mask: Array, breadth: int) -> bool:
        """Whether the lanes of a group are all of those that they share `breadth` lanes with: warps, warpgroups."""
        if self.known(mask, breadth):
            return True
        if self.lanes % breadth:
            return False
        rows = mask.reshape(-1, breadth)
        found = not np.count_nonzero(rows != rows[:, :1])
        if found:
            self._whole = mask, breadth
        return found

    def known(self, mask: Array, breadth: int = 32) -> bool:
        """The same, as far as it was found before."""
        return mask is self._whole[0] and breadth <= self._whole[1]
