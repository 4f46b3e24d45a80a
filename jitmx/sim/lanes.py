"""What generated code calls on arrays over lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def side_by_side(m: Any, mask: Array | None, function: Any, count: int, *columns: Any) -> Array:
    """`function` of the active lanes of `count` instructions at once: a row of results each, over all lanes.

    A column is the argument that all have, or the tuple of what each has.
    """
    lanes = slice(None) if mask is None else span(mask.nonzero()[0])
    width = m.lanes if mask is None else int(np.count_nonzero(mask))
    given = []
    for column in columns:
        if not isinstance(column, tuple):
            if column.ndim == 0:
                given.append(column)
                continue
            column = (column,) * count
        rows = [item[lanes] if item.ndim else np.full(width, item) for item in column]
        given.append(np.concatenate(rows))
    got = np.broadcast_to(function(*given), (count * width,)).reshape(count, width)
    if mask is None:
        return got
    out = (np.zeros if got.dtype.kind == "b" else np.empty)((count, m.lanes), got.dtype)
    out[:, lanes] = got
    return out


def whole(m: Any, value: Array, dtype: np.dtype[Any]) -> Array:
    """An array over all lanes of a machine."""
    value = np.asarray(value)
    if value.ndim == 0:
        return np.full(m.lanes, value.astype(dtype))
    return value.astype(dtype, copy=False)


def span(lanes: Array) -> Array | slice:
    """An index for lanes in order: a slice, which is cheaper, where they lie side by side."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first + 1 == len(lanes) else lanes


def among(mask: Array, function: Any, *arguments: Array) -> Array:
    """`function` of the lanes of a mask; the others hold garbage."""
    lanes = span(mask.nonzero()[0])
    got = np.asarray(function(*[item[lanes] if item.ndim else item for item in arguments]))
    if got.ndim == 0:
        return got
    out = (np.zeros if got.dtype.kind == "b" else np.empty)(len(mask), got.dtype)
    out[lanes] = got
    return out
