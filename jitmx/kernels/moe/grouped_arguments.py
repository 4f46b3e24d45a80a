"""The argument struct of `moe.grouped`, `moe.scaled` and `moe.combine`, and cases made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.kernels.moe.arguments import GATE, PAIR_GATE, Routing, random_weight, residual_of, stream_of
from jitmx.kernels.moe.hidden import arrange, hidden_bytes, restore, rounded
from jitmx.kernels.moe.layout import ALPHA, LIMIT, Floats, activate
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, pair_l2, relative_l2
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
    x = generator.standard_normal((rows if up else rows * top, k)).astype(ml_dtypes.bfloat16)
    weights = generator.uniform(0.1, 1.0, (rows, top)).astype(np.float32)
    values, packed = random_weight(knobs, problem.experts, n, k, generator, nan=knobs.scale_range == "full" and not up)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    x_format, rule = getattr(knobs, "x_format", "bf16"), getattr(knobs, "scale_rule", "floor")
    seen = rounded(x.astype(np.float64), x_format, rule)

    parts = np.zeros((int((pairs >= 0).sum()), n))  # in the order of pairs
    for expert, first, count, _ in schedule[schedule[:, 0] >= 0]:
        listed = pairs[first : first + count]
        out = seen[listed // top if up else slice(first, first + count)] @ values[expert].T
        weight = weights.ravel()[listed, None].astype(np.float64)
        out = out * weight if up and knobs.weight_on == "input" else out
        out = out + bias[expert].astype(np.float64) if knobs.bias else out
        out = out * weight if not up and knobs.weight_on == "output" else out
        parts[first : first + count] = out
    wanted = activate(parts, knobs.activation) if up else _by_row(parts, pairs, rows, top, knobs.reduction)
    quantized = up and x_format != "bf16"
    if quantized:
        shape = replace(problem, m=rows, top=top, x_format=x_format)
        y = Buffer(np.full(hidden_bytes(shape), 255, np.uint8), output=True, scratch=True)
        wanted = rounded(wanted.astype(ml_dtypes.bfloat16).astype(np.float64), x_format, rule)
    else:
        atomic = knobs.reduction == "atomic"
        y = Buffer(np.zeros(wanted.shape, ml_dtypes.bfloat16), output=True, scratch=atomic)

    def check(outputs: Any) -> float:
        if quantized:
            return relative_l2(restore(outputs[0], rows * top, wanted.shape[1], x_format)[: len(wanted)], wanted)
        return relative_l2(outputs[0], wanted)

    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x if up or x_format == "bf16" else arrange(x.astype(np.float64), x_format, rule)),
            "weight": Buffer(packed[0]), "scales": Buffer(packed[1]), **({"bias": Buffer(bias)} if knobs.bias else {}),
            "pairs": Buffer(pairs), "schedule": Buffer(schedule), "weights": Buffer(weights), "y": y,
            "alpha": ALPHA, "limit": LIMIT, "rows": rows, "top": top, "experts": problem.experts, "n": n, "k": k,
            "tiles": len(schedule),
        },
        check=check,
        gate=ATOMIC_GATE if knobs.reduction == "atomic" else GATE,
    )  # fmt: skip


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
    """The sums of random parts; where there is no expert, the part is NaN."""
    generator = np.random.default_rng(seed)
    rows, top = routing.ids.shape
    local = routing.local
    there = (local >= 0) & (local < problem.experts)
    parts = generator.standard_normal((rows, top, problem.hidden)).astype(ml_dtypes.bfloat16)
    residual = residual_of(variant.knobs, rows, problem.hidden, generator)
    wanted = np.where(there[..., None], parts.astype(np.float64), 0.0).sum(1) + stream_of(residual)
    parts[~there] = np.nan
    pair = variant.knobs.residual == "pair"

    def check(outputs: Any) -> float:
        return (pair_l2 if pair else relative_l2)(outputs[0], wanted)

    return Case(
        name=f"rows={rows} top={top} hidden={problem.hidden} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(parts), "ids": Buffer(routing.ids), "y": Buffer(np.empty_like(residual), output=True),
            **({"bias": Buffer(residual)} if variant.knobs.residual else {}),
            **({} if routing.map is None else {"map": Buffer(routing.map), "map_size": len(routing.map)}),
            "alpha": ALPHA, "limit": LIMIT, "rows": rows, "top": top, "experts": problem.experts, "n": problem.hidden,
        },
        check=check,
        gate=PAIR_GATE if pair else GATE,
    )  # fmt: skip
