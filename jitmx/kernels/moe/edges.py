"""Edges of the arithmetic of `moe`, values that stand on them, and how far an element of a result may be off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.layout import NORMAL_SCALES
from jitmx.kernels.moe.layout import ALPHA, LIMIT, Floats, activate
from jitmx.kernels.moe.problem import UNGATED
from jitmx.registry.case import Array, places, summed

if TYPE_CHECKING:
    from jitmx.kernels.moe.arguments import Routing

OTHERS = 0.75, 1.25  # an alpha and a limit that are not gpt-oss's: random gates and ups are on both sides of it
_OVERFLOW = 88.0  # e^x is past fp32 from here on
HOT = 4  # every so many features gates and ups are large


def parameters(seed: int) -> tuple[float, float]:
    """Alpha and limit of a case, the usual ones or others."""
    return OTHERS if seed % 2 else (ALPHA, LIMIT)


def loud(x: Array, seed: int) -> Array:
    """X with every second row eight times as large."""
    factors = np.where((np.arange(len(x)) + seed // 2) % 2 == 0, 8.0, 1.0)
    return np.asarray((x.astype(np.float64) * factors[:, None]).astype(x.dtype))


def router_weights(rows: int, top: int, seed: int, generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """Random weights; among several a zero, a negative one and a large one."""
    weights = generator.uniform(0.1, 1.0, rows * top)
    if rows * top > 2:
        kinds = (np.arange(rows * top) + seed) % 7
        weights = np.select([kinds == 1, kinds == 3, kinds == 5], [0, -weights, 16 * weights], weights)
    return weights.reshape(rows, top).astype(np.float32)


def cancelled(parts: list[Array], whole: Array) -> float:
    """How much larger parts are than their sum, by which an error of their rounding counts more; at least 1."""
    size = float(np.linalg.norm([np.linalg.norm(np.nan_to_num(part)) for part in parts])) if parts else 0.0
    return max(1.0, size / max(float(np.linalg.norm(np.nan_to_num(whole))), 1e-30))


def weight_sides(weights: Array, there: Array) -> dict[str, bool]:
    """Edges of a row's weight, where there is an expert."""
    return {
        "weight 0": bool((weights[there] == 0).any()),
        "weight below 0": bool((weights[there] < 0).any()),
        "weight above 1": bool((weights[there] > 1).any()),
    }


def strangers(ids: npt.NDArray[np.int32], known: int) -> npt.NDArray[np.int32]:
    """Ids with the lower halves of known ones in place of every second one that is not in 0 … known - 1."""
    found = ids.copy()
    others = np.flatnonzero((ids < 0) | (ids >= known))[1::2]
    upper = np.resize(np.array([1, -1, 0x7FFF, -0x8000], np.int32), len(others))
    found.flat[others] = upper * 65536 + np.arange(len(others)) % known
    return found


def routing_sides(routing: Routing, experts: int) -> dict[str, bool]:
    """Edges of ids: what is no expert's, by itself or by the map; experts of no row; rows that do not count."""
    ids, local, given = routing.ids, routing.local, routing.map
    valid = (local >= 0) & (local < experts)
    last = experts if given is None else len(given)
    mapped = np.zeros(0, np.int32) if given is None else given[ids[(ids >= 0) & (ids < last)]]
    rows = len(ids)
    uncounted = np.zeros(0, bool) if routing.count is None else all_rows(routing, experts)[routing.count :].any(axis=-1)
    sides = {
        "map to no expert": bool((mapped < 0).any()),
        "row past the count": bool(uncounted.any()),
    }
    if routing.logits is not None:
        logits, top = np.sort(-routing.logits.astype(np.float64)), ids.shape[1]  # a NaN last
        sides |= {
            "logits tie for the last place": bool(
                logits.shape[1] > top and (logits[:, top - 1] == logits[:, top]).any()
            ),
            "NaN among logits": bool(np.isnan(logits).any()),
        }
    else:
        sides |= {
            "negative id": bool((ids < 0).any()),
            "id past the experts": given is None and bool((ids >= last).any()),
            "id past the map": given is not None and bool((ids >= last).any()),
            "map past the experts": bool((mapped >= experts).any()),
            "row of no expert": bool((~valid.any(axis=1)).any()),
            "expert of no row": bool(valid.any() and len(np.unique(local[valid])) < experts),
        }
        if rows > 1:
            sides["expert of all rows"] = bool((valid & (local == local.max())).any(axis=1).all())
    return sides


def all_rows(routing: Routing, experts: int) -> Array:
    """Which ids have an expert, whatever rows count."""
    ids = routing.ids
    if routing.map is not None:
        known = (ids >= 0) & (ids < len(routing.map))
        ids = np.where(known, routing.map[np.where(known, ids, 0)], -1)
    return np.asarray((ids >= 0) & (ids < experts))


def activation_sides(rows: Floats, activation: str, alpha: float, limit: float) -> dict[str, bool]:
    """Edges of what makes h of gates and ups [..., 2 i], or of ups [..., i]."""
    if activation == "plain":
        return {}
    if activation == "relu2":
        return {"up below 0": bool((rows < 0).any()), "up above 0": bool((rows > 0).any())}
    gate, up = rows[..., 0::2], rows[..., 1::2]
    if activation == "silu":
        return {"gate above 0": bool((gate > 0).any()), "gate whose power overflows": bool((gate < -_OVERFLOW).any())}
    usual = (alpha, limit) == (ALPHA, LIMIT)
    found = {"gate whose power overflows": bool((alpha * gate < -_OVERFLOW).any())}
    for name, mine in (("the usual", usual), ("another", not usual)):
        found |= {
            f"gate above {name} limit": mine and bool((gate > limit).any()),
            f"gate within {name} limit": mine and bool((np.abs(gate) < limit).any()),
            f"gate below -{name} limit": mine and bool((gate < -limit).any()),
            f"up above {name} limit": mine and bool((up > limit).any()),
            f"up below -{name} limit": mine and bool((up < -limit).any()),
        }
    return found


def activation_bound(rows: Floats, error: Floats, activation: str, alpha: float, limit: float) -> Floats:
    """How far h may be off where gates and ups may be by `error`; of the power and the quotient a few units."""
    h = activate(rows, activation, alpha, limit)
    found: Floats = np.zeros_like(h)
    signs: tuple[Any, ...] = (1, -1)
    if activation not in UNGATED:
        signs = tuple(np.tile(pair, rows.shape[-1] // 2) for pair in ((1, 1), (1, -1), (-1, 1), (-1, -1)))
    for sign in signs:
        found = np.maximum(found, np.abs(activate(rows + sign * error, activation, alpha, limit) - h))
    return found + 2.0**-18 * np.abs(h) + 2.0**-110  # past 2^126 a power makes zero


def layer_bound(
    x: Floats,
    local: Array,
    weights: Floats,
    w13: Floats,
    w2: Floats,
    biases: tuple[Floats | None, Floats | None],
    made: tuple[str, float, float],
) -> tuple[Floats, dict[str, bool]]:
    """How far each y [rows, hidden] of a layer may be off, and the edges that its gates and ups stand on.

    h is rounded to bf16, times the row's weight or not: of these many roundings six standard deviations count.

    Args:
        made: activation, alpha and limit.
    """
    (b13, b2), (activation, alpha, limit) = biases, made
    off, spread, magnitude = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    seen: list[Floats] = []
    for row, slot in np.argwhere((local >= 0) & (local < len(w13))):
        expert, weight = local[row, slot], weights[row, slot]
        parts, size = w13[expert] @ x[row], np.abs(w13[expert]) @ np.abs(x[row])
        if b13 is not None:
            parts, size = parts + b13[expert], size + np.abs(b13[expert])
        seen.append(parts)
        h = activate(parts, activation, alpha, limit)
        lost = activation_bound(parts, summed(size, x.shape[1]), activation, alpha, limit)
        unit = np.maximum(places(weight * h, ml_dtypes.bfloat16), abs(weight) * places(h, ml_dtypes.bfloat16))
        across = np.abs(w2[expert])
        off[row] += across @ (abs(weight) * lost)
        spread[row] += 3 * (across**2 @ unit**2)
        magnitude[row] += abs(weight) * (across @ np.abs(h) + (0 if b2 is None else np.abs(b2[expert])))
    sides = activation_sides(np.array(seen).reshape(-1, w13.shape[1]), activation, alpha, limit)
    return off + np.sqrt(spread) + summed(magnitude, w2.shape[2] * local.shape[1]), sides


def scale_ends(scale_range: str, nan: bool = True) -> tuple[int, ...]:
    """Scale bytes at the ends of a range; 2^127 would be the end of every sum, and is left to `linear`."""
    if scale_range == "normal":
        return NORMAL_SCALES
    return (0, 1, formats.SCALE_NAN) if nan else (0, 1)


def end_rows(n: int, knobs: Any) -> tuple[int, ...]:
    """Rows of W that have nothing but a block with a scale at an end, for each of `scale_ends` but NaN."""
    return tuple(range(n // 2 + 3, n // 2 + 3 + len(scale_ends(knobs.scale_range, nan=False))))
