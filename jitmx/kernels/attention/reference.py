"""Attention, rotary embedding and the cache in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}
E4M3_MAX = 448.0


def rotate(x: Array, positions: Array, table: Array, style: str) -> Array:
    """Rotary embedding of x [tokens, heads, head_dim] in float32, by two products as kernels sum them.

    Args:
        positions: [tokens].
        table: [positions, rotary]: cosines, then sines.
        style: "neox" (of two halves) or "interleaved" (of neighbours).
    """
    rotary = table.shape[1]
    cos, sin = np.split(table.astype(np.float64)[positions][:, None], 2, axis=-1)
    out = x.astype(np.float64)
    first, second = (slice(rotary // 2), slice(rotary // 2, rotary)) if style == "neox" else (
        slice(0, rotary, 2), slice(1, rotary, 2)
    )  # fmt: skip
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = (a * cos).astype(np.float32) - b * sin
    out[..., second] = (b * cos).astype(np.float32) + a * sin
    return out.astype(np.float32)


def to_e4m3(x: Array, scale: Array | float) -> Array:
    """x / scale as E4M3, saturated; the division is in float32, as kernels do it."""
    scaled = (x.astype(np.float32) / np.asarray(scale, np.float32)).astype(np.float32)
    return np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


@dataclass
class Attended:
    """What attention of one request gives.

    Attributes:
        out: [queries, heads, head_dim] in float64.
        weights: the largest weight of any key for each query and head.
        seen: how many keys each query sees.
    """

    out: Array
    weights: Array = field(default_factory=lambda: np.zeros(0))
    seen: Array = field(default_factory=lambda: np.zeros(0))


def visible(
    queries: int, length: int, window: int = 0, mask: Array | None = None, positions: Array | None = None
) -> Array:
    """Which keys each of the last `queries` tokens of a request attends to, [queries, length].

    Args:
        window: tokens that a token attends to, itself included; 0: all.
        mask: [queries, queries] among the new tokens, in the place of causal order.
        positions: [queries], of new tokens; by default in their order.
    """
    old = length - queries
    at = np.arange(old, length) if positions is None else positions
    keys = np.concatenate([np.arange(old), at])
    allowed = np.ones((queries, length), bool)
    allowed[:, old:] = np.tril(np.ones((queries, queries), bool)) if mask is None else mask
    if window:
        allowed &= at[:, None] - keys[None] < window
    return allowed


def attend(
    q: Array, k: Array, v: Array, scale: float, allowed: Array, sinks: Array | None = None, soft_cap: float = 0.0
) -> Attended:
    """Softmax attention in float64: scale, soft cap, mask, sink, in this order.

    Args:
        q: [queries, heads, head_dim].
        k: [length, kv_heads, head_dim].
        v: [length, kv_heads, head_dim].
        allowed: [queries, length]; a query that sees nothing becomes 0.
        sinks: [heads], a logit each that takes its share of the sum and gives nothing.
    """
    group = q.shape[1] // k.shape[1]
    wide = [np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v)]
    logits = np.einsum("qhd,khd->qhk", q.astype(np.float64), wide[0]) * scale
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(allowed[:, None], logits, -np.inf)
    most = logits.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        most = np.maximum(most, sinks.astype(np.float64))
    most = np.where(np.isneginf(most), 0.0, most)
    shares = np.exp(logits - most[..., None])
    total = shares.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64) - most)
    shares = shares / np.where(total == 0, 1.0, total)[..., None]
    out = np.einsum("qhk,khd->qhd", shares, wide[1])
    return Attended(out, shares.max(axis=-1, initial=0.0), allowed.sum(axis=-1))
