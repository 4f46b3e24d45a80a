"""The argument struct of `moe.grouped`, `moe.scaled` and `moe.combine`, and cases made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.arguments import X_FORMATS as FORMATS
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.arguments import GATE, PAIR_GATE, Routing, end_sides, random_weight, residual_of
from jitmx.kernels.moe.hidden import arrange, hidden_bytes, restore, rounded
from jitmx.kernels.moe.layout import ALPHA, LIMIT, Floats, activate
from jitmx.kernels.moe.problem import UNGATED, MoeProblem
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case, deviation, judged, pair_l2, places, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = Arguments(
    "GroupedArguments",
    reads("x", "[rows, k]; of the second product h [pairs, k], by expert; of combine parts [pairs, n]"),
    reads("weight", "packed words by expert: [n, k]"),
    reads("scales", "packed"),
    reads("bias", "[experts, n]; of combine the residual [rows, n]"),
    reads("pairs", "[pairs]: row * top + slot, by expert", "int"),
    reads("schedule", "[tiles, 4]: expert or -1, first of pairs, rows, number among its expert's tiles", "int"),
    reads("weights", "[pairs], by row and slot", "float"),
    reads("ids", "[pairs], by row and slot: any that is not in 0 … experts - 1 is skipped", "int"),
    reads("map", "[map_size], from ids to local experts, or null", "int"),
    writes("y", "of the first product h [pairs, n / 2], by expert; else [pairs, n] by row and slot, or [rows, n]"),
    number("alpha", "float", "of swiglu_oai"),
    number("limit", "float", "of swiglu_oai"),
    number("rows", "int"),
    number("top", "int", "experts a row"),
    number("experts", "int", "local ones"),
    number("map_size", "int"),
    number("n", "int"),
    number("k", "int"),
    number("tiles", "int", "of the schedule, at most"),
)
ATOMIC_GATE = 0.01  # relative L2: y is rounded to bf16 after each expert


def lists(local: npt.NDArray[np.int32], experts: int, tile: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Pairs by expert and the schedule, as `jitmx.group_by_expert` makes them of local experts."""
    flat = local.ravel()
    valid = (flat >= 0) & (flat < experts)
    order = np.argsort(np.where(valid, flat, experts), kind="stable")
    pairs = np.where(np.arange(len(flat)) < valid.sum(), order, -1).astype(np.int32)
    schedule = np.zeros((capacity(local.shape[0], local.shape[1], experts, tile), 4), np.int32)
    schedule[:, 0] = -1
    at = first = 0
    for expert, rows in enumerate(np.bincount(flat[valid], minlength=experts)):
        for place, begin in enumerate(range(0, rows, tile)):
            schedule[at] = expert, first + begin, min(tile, rows - begin), place
            at += 1
        first += rows
    return pairs, schedule


def product_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """One product of `variant` on random inputs, with its rows in float64; pairs of no expert come last."""
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    up = knobs.product == "up"
    rows, top = routing.ids.shape
    n, k = problem.sizes(knobs.product)
    pairs, schedule = lists(routing.local, problem.experts, knobs.tile_m)
    alpha, limit = edges.parameters(seed)
    x = generator.standard_normal((rows if up else rows * top, k)).astype(ml_dtypes.bfloat16)
    if up:
        x = edges.loud(x, seed)
    if rows > 3:
        x[2, k // 2] = np.nan
    x_format, rule = getattr(knobs, "x_format", "bf16"), getattr(knobs, "scale_rule", "floor")
    faint = 0
    if x_format != "bf16" and k > formats.BLOCK:
        faint = 130 - formats.get(FORMATS[x_format]).emax  # below one: the largest have scale byte 0, or are near it
        second = x[:, formats.BLOCK : 2 * formats.BLOCK]
        second[:] = (second.astype(np.float64) * 2.0**-faint).astype(x.dtype)
        if not up:  # where rows are alike
            second[1::2] *= x.dtype.type(8)
    if rows > 4 and x_format != "bf16":
        x[4, k // 2 + 5] = -np.inf  # which makes a NaN of its block's scale
    weights = edges.router_weights(rows, top, seed, generator)
    nan = knobs.scale_range == "full" and not up
    values, packed = random_weight(knobs, problem.experts, n, k, generator, nan=nan, hot=up, ends=not up, faint=faint)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    if not up:
        bias[:, edges.end_rows(n, knobs)] = 0
    elif problem.experts > 3 and knobs.activation not in UNGATED:  # of a gate, and of an up, alone
        bias[3, [0, n - 1]] = np.nan
    seen = rounded(x.astype(np.float64), x_format, rule)

    parts = np.zeros((int((pairs >= 0).sum()), n))  # in the order of pairs
    sizes = np.zeros_like(parts)  # of what they are sums of
    for expert, first, count, _ in schedule[schedule[:, 0] >= 0]:
        listed = pairs[first : first + count]
        mine = seen[listed // top if up else slice(first, first + count)]
        out, size = mine @ values[expert].T, np.abs(mine) @ np.abs(values[expert]).T
        weight = weights.ravel()[listed, None].astype(np.float64)
        if up and knobs.weight_on == "input":
            out, size = out * weight, size * np.abs(weight)
        if knobs.bias:
            out, size = out + bias[expert].astype(np.float64), size + np.abs(bias[expert].astype(np.float64))
        if not up and knobs.weight_on == "output":
            out, size = out * weight, size * np.abs(weight)
        parts[first : first + count], sizes[first : first + count] = out, size
    bound = summed(sizes, k)
    local = (routing.local >= 0) & (routing.local < problem.experts)
    sides = {
        "row with a NaN": bool(np.isnan(parts).all(axis=1).any()),
        **({"row with an infinity": bool(np.isinf(x).any())} if x_format != "bf16" else {}),
        **(_scale_sides(x, x_format, rule) if x_format != "bf16" else {}),
        "expert of no row": bool(np.setdiff1d(np.arange(problem.experts), routing.local).size),
        "row of no expert": bool((~local.any(axis=1)).any()),
    }
    if up:
        if knobs.bias and knobs.activation not in UNGATED:
            lone = np.isnan(parts[:, 0::2]) != np.isnan(parts[:, 1::2])
            sides["gate or up alone is NaN"] = bool(lone.any())
        sides |= edges.activation_sides(parts, knobs.activation, alpha, limit)
        wanted = activate(parts, knobs.activation, alpha, limit)
        bound = edges.activation_bound(parts, bound, knobs.activation, alpha, limit)
    else:
        wanted = _by_row(parts, pairs, rows, top, knobs.reduction)
        bound = _by_row(bound, pairs, rows, top, knobs.reduction)
        if knobs.reduction == "atomic":  # rounded each time that a part is added
            bound = bound + top * places(_by_row(np.abs(parts), pairs, rows, top, "atomic"), ml_dtypes.bfloat16)
        sides |= end_sides(knobs, packed[2], parts)
    if knobs.weight_on == ("input" if up else "output"):
        sides |= edges.weight_sides(weights, local)
    quantized = up and x_format != "bf16"
    if quantized:
        shape = replace(problem, m=rows, top=top, x_format=x_format)
        y = Buffer(np.full(hidden_bytes(shape), 255, np.uint8), output=True, scratch=True)
        near = [wanted + shift * np.sign(wanted) * bound for shift in (0, 1, -1)]
        wanted, *others = (rounded(h.astype(ml_dtypes.bfloat16).astype(np.float64), x_format, rule) for h in near)
        bound = np.maximum(*(np.abs(other - wanted) for other in others))
    else:
        atomic = knobs.reduction == "atomic"
        y = Buffer(np.zeros(wanted.shape, ml_dtypes.bfloat16), output=True, scratch=atomic)

    gate = ATOMIC_GATE if knobs.reduction == "atomic" else GATE
    units = 1.0 if quantized or knobs.reduction == "atomic" else 0.5

    usual = np.setdiff1d(np.arange(wanted.shape[1]), () if up else edges.end_rows(n, knobs))

    def check(outputs: Any) -> float:
        found = outputs[0]
        if quantized:
            found = restore(found, rows * top, wanted.shape[1], x_format)[: len(wanted)]
        return judged(relative_l2(found[:, usual], wanted[:, usual]), deviation(found, wanted, bound, units), gate)

    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x if up or x_format == "bf16" else arrange(x.astype(np.float64), x_format, rule)),
            "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
            **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
            # Of kernels before the first product, which lets the second begin behind its own wait.
            "pairs": Buffer(pairs, early=not up, ahead=up), "schedule": Buffer(schedule, early=not up, ahead=up),
            "weights": Buffer(weights, early=not up, ahead=up), "y": y,
            "alpha": alpha, "limit": limit, "rows": rows, "top": top, "experts": problem.experts, "n": n, "k": k,
            "tiles": len(schedule),
        },
        check=check,
        gate=gate,
        sides=sides,
    )  # fmt: skip


def _scale_sides(x: Array, x_format: str, rule: str) -> dict[str, bool]:
    """Whether blocks of x have the least scale, and others the next one."""
    blocks = x.astype(np.float64).reshape(len(x), -1, formats.BLOCK)
    with np.errstate(invalid="ignore"):
        scales = formats.block_scales(blocks, formats.get(FORMATS[x_format]), rule)
    return {"block of scale byte 0": bool((scales == 0).any()), "block of scale byte 1": bool((scales == 1).any())}


def _by_row(parts: Floats, pairs: npt.NDArray[np.int32], rows: int, top: int, reduction: str) -> Floats:
    """Parts where a product leaves them: [pairs, n] in the order of rows and slots, or added up, [rows, n]."""
    listed = pairs[: len(parts)]
    if reduction == "atomic":
        y = np.zeros((rows, parts.shape[1]))
        np.add.at(y, listed // top, parts)
        return y
    y = np.zeros_like(parts)
    y[listed] = parts
    return y


def combine_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """The sums of random parts, bit for bit, for their order is given; where there is no expert, the part is NaN."""
    generator = np.random.default_rng(seed)
    rows, top = routing.ids.shape
    local = routing.local
    there = (local >= 0) & (local < problem.experts)
    parts = generator.standard_normal((rows, top, problem.hidden)).astype(ml_dtypes.bfloat16)
    # In every third column large values of either sign, so that each place of a vector has them: what is added before
    # them is lost, and what is added after they have gone is not.
    uneven = generator.choice([2.0**26, -(2.0**26), 3, 5, -7, 11], (rows, top, problem.hidden))
    parts[..., ::3] = uneven[..., ::3].astype(ml_dtypes.bfloat16)
    residual = residual_of(variant.knobs, rows, problem.hidden, generator)
    pair = variant.knobs.residual == "pair"
    carried = [] if not variant.knobs.residual else [*residual] if pair else [residual]

    def added(order: Iterable[int]) -> npt.NDArray[np.float32]:
        total = np.zeros((rows, problem.hidden), np.float32)
        for slot in order:
            total += np.where(there[:, slot, None], parts[:, slot], 0).astype(np.float32)
        for item in carried:
            total += item.astype(np.float32)
        return total

    total = added(range(top))
    wanted = total.astype(ml_dtypes.bfloat16)
    if pair:
        wanted = np.stack([wanted, (total - wanted.astype(np.float32)).astype(ml_dtypes.bfloat16)])
    sides = edges.routing_sides(routing, problem.experts)
    for side in ("row past the count", "expert of no row", "expert of all rows"):  # which it knows nothing of
        sides.pop(side, None)
    if top > 2:
        sides["order of slots shows"] = bool((added(reversed(range(top))).astype(wanted.dtype) != total).any())
    parts[~there] = np.nan
    known = problem.experts if routing.map is None else len(routing.map)
    gate = PAIR_GATE if pair else GATE

    def check(outputs: Any) -> float:
        found = outputs[0]
        exact = np.array_equal(found.view(np.uint16), wanted.view(np.uint16))
        error = (pair_l2 if pair else relative_l2)(found, total.astype(np.float64))
        return judged(error, 0.0 if exact else np.inf, gate)

    return Case(
        name=f"rows={rows} top={top} hidden={problem.hidden} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(parts), "ids": Buffer(edges.strangers(routing.ids, known)),
            "y": Buffer(np.empty_like(residual), output=True),
            **({"bias": Buffer(residual)} if variant.knobs.residual else {}),
            **({} if routing.map is None else {"map": Buffer(routing.map, constant=True)}),
            "map_size": 0 if routing.map is None else len(routing.map),
            "alpha": ALPHA, "limit": LIMIT, "rows": rows, "top": top, "experts": problem.experts, "n": problem.hidden,
        },
        check=check,
        gate=gate,
        sides=sides,
    )  # fmt: skip
