"""Experts' weights as kernels read them, and the layer in float64.

The packed layout is that of `linear` (docs/packed-layout.md), one expert after the other. Rows of W13 come in pairs:
2 i is the gate of feature i, 2 i + 1 its up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.layout import pack
from jitmx.kernels.moe.problem import UNGATED

Floats = npt.NDArray[np.float64]
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


def pack_experts(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], encoding: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The packed layout in NumPy, as `jitmx.pack_experts` makes it on a device.

    Args:
        codes: [experts, n, k], one E2M1 code a byte.
        scales: [experts, n, k / 32].

    Returns:
        Words [experts, tile rows, tiles of k, 32, 4] and scales [experts, tile rows, tiles of k, 8].
    """
    packed = [pack(*expert, encoding) for expert in zip(codes, scales, strict=True)]
    return np.stack([words for words, _ in packed]), np.stack([scales for _, scales in packed])


def interleave(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[experts, 2 i, …] with all gate rows before all up rows, to interleaved gate and up rows."""
    gate, up = np.split(rows, 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(rows.shape)


def activate(rows: Floats, activation: str, alpha: float = ALPHA, limit: float = LIMIT) -> Floats:
    """h [..., i] from interleaved gate and up rows [..., 2 i]; without gates, from up rows [..., i]."""
    if activation in UNGATED:
        return np.maximum(rows, 0.0) ** 2 if activation == "relu2" else rows
    gate, up = rows[..., 0::2], rows[..., 1::2]
    if activation == "swiglu_oai":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1.0) * gate * _sigmoid(alpha * gate)
    return up * gate * _sigmoid(gate)


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        out: Floats = 1.0 / (1.0 + np.exp(-x))
    return out


def reference(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    w13: Floats,
    w2: Floats,
    b13: Floats | None = None,
    b2: Floats | None = None,
    *,
    activation: str = "swiglu_oai",
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> Floats:
    """y [rows, hidden] in float64 from dequantized weights: what every variant is compared with.

    Args:
        x: [rows, hidden].
        ids, weights: [rows, top]; an id outside 0 … experts - 1 is skipped.
        w13, w2: [experts, 2 i, hidden] and [experts, hidden, i].
        b13, b2: [experts, 2 i] and [experts, hidden].
    """
    y = np.zeros_like(x)
    for row, slot in np.argwhere((ids >= 0) & (ids < len(w13))):
        expert = ids[row, slot]
        rows = w13[expert] @ x[row]
        h = activate(rows if b13 is None else rows + b13[expert], activation, alpha, limit)
        out = w2[expert] @ h
        y[row] += weights[row, slot] * (out if b2 is None else out + b2[expert])
    return y
