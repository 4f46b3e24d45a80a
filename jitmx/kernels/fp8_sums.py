"""What sums of E4M3 products lose in tensor cores that keep fewer bits of them than fp32 has.

A product of a warpgroup adds 32 terms of k to a sum at a time. Hopper aligns all of them to the largest, keeps 13 bits
behind its first and cuts off the rest (`tests/short_sums.py` is that rule, by which the bound below is held).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

K = 32  # terms that are added at a time
CUT = 2.0**-13  # of the largest, what is cut off of each
_MOST = 4  # cuts together, of terms of both signs that are alike in size: 2.6 of 16384


def lost(magnitudes: npt.NDArray[Any], terms: int) -> npt.NDArray[np.float64]:
    """How far a sum of so many terms may be off for that, where theirs together are of this magnitude."""
    return np.asarray(magnitudes * (CUT * min(terms / K, _MOST)))
