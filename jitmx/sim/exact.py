"""float64 results rounded towards zero, minus or plus infinity, exact by rational numbers, one element at a time.

The result to nearest is compared with the exact one, and moved by one place where it lies on the wrong side of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.rounding import canonical, fma64

Array = npt.NDArray[Any]


def directed(name: str, rounding: str, *operands: Array) -> Array:
    """Bits of add, sub, mul, div, fma, sqrt or rcp of float64 arrays, rounded as .rz, .rm or .rp says."""
    if name == "rcp":
        name, operands = "div", (np.ones_like(operands[0]), *operands)
    near = np.asarray(canonical(_NEAREST[name](*operands)))
    values = [np.broadcast_to(operand, near.shape).ravel().tolist() for operand in operands]
    moved = [_move(name, rounding, result, row) for result, *row in zip(near.ravel().tolist(), *values, strict=True)]
    return np.asarray(canonical(np.array(moved).reshape(near.shape))).view("u8")


def _move(name: str, rounding: str, near: float, row: list[float]) -> float:
    if math.isnan(near) or not all(map(math.isfinite, row)) or (name == "div" and row[-1] == 0):
        return near
    if near == 0 and rounding == "rm" and _cancels(name, row):
        return -0.0  # what cancels is -0 towards minus infinity
    excess = 1 if near == math.inf else -1 if near == -math.inf else _excess(name, Fraction(near), row)
    if rounding == "rz":
        rounding = "rm" if near > 0 or (near == 0 and excess < 0) else "rp"
        if near == 0:
            return near  # nearer to zero there is nothing
    if rounding == "rm" and excess > 0:
        return math.nextafter(near, -math.inf)
    if rounding == "rp" and excess < 0:
        return math.nextafter(near, math.inf)
    return near


def _excess(name: str, near: Fraction, row: list[float]) -> int:
    """Sign of `near` minus the exact result."""
    values = [Fraction(value) for value in row]
    if name == "sqrt":
        return _sign(near * near - values[0])
    return _sign(near - _EXACT[name](*values))


def _cancels(name: str, row: list[float]) -> bool:
    """Whether an exact zero is the sum of opposites, not both +0."""
    if name not in ("add", "sub", "fma"):
        return False
    *first, last = row
    left = first[0] * first[1] if name == "fma" else first[0]
    right = -last if name == "sub" else last
    if _EXACT[name](*map(Fraction, row)) != 0:
        return False
    return not (left == 0 and right == 0 and math.copysign(1, left) == math.copysign(1, right) == 1)


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)


_NEAREST: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "fma": fma64,
}  # fmt: skip
_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
