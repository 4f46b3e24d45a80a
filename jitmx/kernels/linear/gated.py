"""Products whose rows of W are 8 gates and their 8 ups by turns, half a tile each: their reference and its edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.layout import TILE_ROWS

Floats = npt.NDArray[np.float64]

HALF = TILE_ROWS // 2


def whole_rows(knobs: Any, n: int) -> int:
    """n output features, or with `swiglu` the next number of them that is whole rows of tiles."""
    return -(-n // TILE_ROWS) * TILE_ROWS if knobs.swiglu else n


def features(rows: Sequence[int]) -> list[int]:
    """Which features of Y are made of these rows of W."""
    return [row // TILE_ROWS * HALF + row % HALF for row in rows]


def gates_and_ups(sums: Floats) -> tuple[Floats, Floats]:
    """Columns [..., n] of a product, n a multiple of 16, as gates and ups [..., n / 2]."""
    parts = sums.reshape(*sums.shape[:-1], -1, 2, HALF)
    gate, up = (parts[..., half, :].reshape(*sums.shape[:-1], -1) for half in (0, 1))
    return gate, up


def silu(gate: Floats) -> Floats:
    """gate * sigmoid(gate)."""
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)))


def _slope(gate: Floats) -> Floats:
    """The steepest that SiLU is up to a gate: 1.1, but far below zero, where it falls ever less."""
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
        return np.where(gate < -4, np.abs(sigmoid * (1 + gate * (1 - sigmoid))), 1.1)


def reference(sums: Floats, bound: Floats) -> tuple[Floats, Floats]:
    """up * silu(gate) of a product, and how far it may be off where the product may be off by `bound`.

    The exponential is off by its argument's rounding, and overflows where a gate is below -88.
    """
    (gate, up), (gate_off, up_off) = gates_and_ups(sums), gates_and_ups(bound)
    with np.errstate(invalid="ignore", over="ignore"):
        h = up * silu(gate)
        off = _slope(gate + gate_off) * gate_off * (np.abs(up) + up_off) + np.abs(silu(gate)) * up_off
        off = off + np.abs(h) * (2.0**-19 + np.abs(gate) * 2.0**-22) + np.where(gate < -80, np.abs(up) * 2.0**-110, 0)
        # Of a subnormal quotient a part may be lost.
        return h, off + 2.0**-126 * (1 + np.abs(up))


def reach(sums: Floats) -> float:
    """What a row of X is to be multiplied by, so that the power of some gates is beyond fp32, and that of others 0."""
    gate = gates_and_ups(sums)[0]
    least = max(min(gate.max(), -gate.min()), 1)
    return float(2.0 ** np.ceil(np.log2(100 / least)))


def sides(sums: Floats, far: bool) -> dict[str, bool]:
    """Edges of SiLU: the gate's sign, and where gates reach so `far`, where its power is beyond fp32 or nothing."""
    gate = gates_and_ups(sums)[0]
    found = {"gate below zero": bool((gate < -0.1).any()), "gate above zero": bool((gate > 0.1).any())}
    ends = {"gate far below zero": bool((gate < -90).any()), "gate far above zero": bool((gate > 90).any())}
    return found | ends if far else found
