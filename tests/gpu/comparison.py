"""How far outputs of a card and of the simulator may lie apart."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def beyond_one_place(found: Array, wanted: Array) -> float:
    """Relative L2 difference, after one unit in the last place is allowed to each element.

    A NaN or an infinity, which some cases want, is like another; infinite where one of them is and the other is not.
    """
    x, y = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(x[finite]).all():
        return float("inf")
    x, y = x[finite], y[finite]
    _, exponent = np.frexp(np.maximum(np.abs(x), np.abs(y)))
    place = np.ldexp(float(ml_dtypes.finfo(found.dtype).eps), exponent - 1)
    excess = np.maximum(np.abs(x - y) - place, 0)
    return float(np.linalg.norm(excess)) / max(float(np.linalg.norm(y)), 1e-30)
