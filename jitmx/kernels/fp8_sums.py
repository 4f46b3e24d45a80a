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
# Where few terms are most of a sum, each of 32 others still loses up to what the largest decides: together 3.3 of that,
# one standard deviation, a group of k.
_FEW = 6


def lost(
    magnitudes: npt.NDArray[Any], terms: int, norms: npt.NDArray[Any] | float = 0.0
) -> npt.NDArray[np.float64]:  # fmt: skip
    """How far a sum of so many terms may be off for that, where theirs together are of this magnitude.

    Args:
        norms: roots of the sums of squares of the terms, where few of them may be most of it.
    """
    return np.asarray(CUT * (magnitudes * min(terms / K, _MOST) + _FEW * np.sqrt(terms / K) * norms))
