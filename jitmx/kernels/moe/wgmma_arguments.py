"""The argument struct of `moe.gather` and `moe.wgmma`, and cases made of it."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides, random_weight
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.moe.layout import ALPHA, LIMIT, activate
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = Arguments(
    "ExpertArguments",
    reads("x", "of gather [rows, k]; of the products ExpertRows"),
    reads("weight", "packed words by expert: [n, k]"),
    reads("scales", "packed"),
    reads("bias", "[experts, n]"),
    reads("pairs", "[pairs]: row * top + slot, by expert", "int"),
    reads("offsets", "[experts + 1]: where each expert's pairs start", "int"),
    reads("schedule", "[tiles, 4]: expert or -1, first of pairs, rows, number among its expert's tiles", "int"),
    reads("weights", "[pairs], by row and slot", "float"),
    writes("y", "of gather and of the first product ExpertRows; of the second [pairs, n], by row and slot"),
    writes("counters", "[2]: items that blocks have taken, of either product; gather clears them", "unsigned int"),
    number("alpha", "float", "of swiglu_oai"),
    number("limit", "float", "of swiglu_oai"),
    number("top", "int", "experts a row"),
    number("n", "int"),
    number("k", "int"),
    number("tiles", "int", "of the schedule, at most"),
)
TILES_M = (64, 128, 192, 256)  # rows of a tile of the schedule, at most
WIDEST = 192  # of those, what heuristics take: narrower tiles have loops of their own
LINE_BYTES = 128  # 64 k of a row
COUNTERS = 2  # of 4 bytes

Offsets = npt.NDArray[np.int32]


def rows_bytes(pairs: int, k: int) -> int:
    """Bytes of the activations of so many pairs as the products read them."""
    return pairs * -(-k // TILE_K) * LINE_BYTES


def arrange(rows: Array, offsets: Offsets) -> Array:
    """Activations [pairs, k] in bf16 as the products read them: lines of 64 k, [pairs of all experts * steps, 64].

    An expert's rows lie together, step by step; pairs of k in a block of 32 are in the order of packed weights, and
    vectors of a line are swizzled from the expert's first row on.
    """
    steps = -(-rows.shape[1] // TILE_K)
    padded = np.zeros((len(rows), steps * TILE_K), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    # [pairs, steps, blocks of 32, vectors, pairs of k, 2]: vectors and the pairs in them change places.
    words = padded.reshape(len(rows), steps, 2, 4, 4, 2).swapaxes(3, 4).reshape(len(rows), steps, 8, 8)
    found = []
    for first, end in itertools.pairwise(offsets):
        mine = np.empty_like(words[first:end])
        for row in range(end - first):
            mine[row][:, np.arange(8) ^ row % 8] = words[first + row]
        found.append(mine.swapaxes(0, 1).reshape(-1, TILE_K))
    return np.concatenate(found)


def restore(lines: Array, offsets: Offsets, k: int) -> Array:
    """What `arrange` was given, [pairs, k]."""
    shape = int(offsets[-1]), -(-k // TILE_K) * TILE_K
    places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    rows = np.empty(places.shape, lines.dtype)
    rows.ravel()[arrange(places, offsets).ravel()] = lines.ravel()
    return rows[:, :k]


def offsets_of(local: npt.NDArray[np.int32], experts: int) -> Offsets:
    """Where each expert's pairs start, [experts + 1]."""
    valid = local[(local >= 0) & (local < experts)]
    return np.concatenate([[0], np.cumsum(np.bincount(valid, minlength=experts))]).astype(np.int32)


def gather_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """The rows of a random x by expert, bit for bit, and counters that are zero."""
    generator = np.random.default_rng(seed)
    rows, top = routing.ids.shape
    pairs, schedule = lists(routing.local, problem.experts, variant.knobs.tile_m)
    offsets = offsets_of(routing.local, problem.experts)
    x = generator.standard_normal((rows, problem.hidden)).astype(ml_dtypes.bfloat16)
    wanted = arrange(x[pairs[: offsets[-1]] // top], offsets).view(np.uint16)

    def check(outputs: Any) -> float:
        lines, counters = outputs
        return mismatches(lines, wanted) + mismatches(counters, np.zeros_like(counters))

    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} k={problem.hidden} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x), "pairs": Buffer(pairs), "offsets": Buffer(offsets), "schedule": Buffer(schedule),
            "y": Buffer(np.empty(wanted.shape, np.uint16), output=True),
            "counters": Buffer(np.empty(COUNTERS, np.uint32), output=True),
            "alpha": ALPHA, "limit": LIMIT, "top": top, "k": problem.hidden, "tiles": len(schedule),
        },
        check=check,
        gate=0.0,
        sides={
            "expert of no row": bool((np.diff(offsets) == 0).any()),
            "row of no expert": bool((routing.local < 0).all(axis=1).any()),
        },
    )  # fmt: skip


def product_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """One product of `variant` on random inputs, with its rows in float64; pairs of no expert come last.

    Of several rows one has a NaN, which must come to all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    up = knobs.product == "up"
    rows, top = routing.ids.shape
    n, k = (2 * problem.intermediate, problem.hidden) if up else (problem.hidden, problem.intermediate)
    pairs, schedule = lists(routing.local, problem.experts, knobs.tile_m)
    offsets = offsets_of(routing.local, problem.experts)
    count = int(offsets[-1])
    alpha, limit = edges.parameters(seed)
    x = generator.standard_normal((count, k)).astype(ml_dtypes.bfloat16)
    if up:
        x = edges.loud(x, seed)
    if count > 1:
        x[count // 2, 0] = np.nan
    weights = edges.router_weights(rows, top, seed, generator)
    values, packed = random_weight(knobs, problem.experts, n, k, generator, hot=up, ends=not up)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    if not up:
        bias[:, edges.end_rows(n, knobs)] = 0

    out, size = np.zeros((count, n)), np.zeros((count, n))
    for expert, (first, end) in enumerate(itertools.pairwise(offsets)):
        mine = x[first:end].astype(np.float64)
        out[first:end], size[first:end] = mine @ values[expert].T, np.abs(mine) @ np.abs(values[expert]).T
        if knobs.bias:
            out[first:end] += bias[expert].astype(np.float64)
            size[first:end] += np.abs(bias[expert].astype(np.float64))
    bound = summed(size, k)
    sides = {"row with a NaN": bool(np.isnan(out).all(axis=1).any())}
    sides["expert of no row"] = bool((np.diff(offsets) == 0).any())
    if up:
        sides |= edges.activation_sides(out, knobs.activation, alpha, limit)
        bound = edges.activation_bound(out, bound, knobs.activation, alpha, limit)
        wanted = activate(out, knobs.activation, alpha, limit)
        y = np.empty((rows_bytes(count, n // 2) // LINE_BYTES, TILE_K), ml_dtypes.bfloat16)
    else:
        sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, packed[2], out)
        factors = weights.ravel()[pairs[:count], None].astype(np.float64)
        wanted, limits = np.empty((count, n)), np.empty((count, n))
        wanted[pairs[:count]], limits[pairs[:count]] = out * factors, bound * np.abs(factors)
        bound = limits
        y = np.empty(wanted.shape, ml_dtypes.bfloat16)

    usual = np.setdiff1d(np.arange(wanted.shape[1]), () if up else edges.end_rows(n, knobs))

    # Of kernels before the first product, which lets the second begin behind its own wait. Neither product may touch
    # the counter of the other.
    listed = {"pairs": pairs, "offsets": offsets, "schedule": schedule, "weights": weights}
    own, others = (0, 1) if up else (1, 0)
    counters = np.zeros(COUNTERS, np.uint32)
    counters[others] = generator.integers(1, 1 << 20)

    def check(outputs: Any) -> float:
        found, left = outputs
        if left[others] != counters[others] or not left[own]:
            return float("inf")
        found = restore(found, offsets, n // 2) if up else found
        return judged(relative_l2(found[:, usual], wanted[:, usual]), deviation(found, wanted, bound), GATE)

    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(arrange(x, offsets)),
            "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
            **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
            **{name: Buffer(array, early=not up, ahead=up) for name, array in listed.items()},
            "y": Buffer(y, output=True),
            "counters": Buffer(counters, output=True, scratch=True, early=not up, ahead=up),
            "alpha": alpha, "limit": limit, "top": top, "n": n, "k": k, "tiles": len(schedule),
        },
        check=check,
        gate=GATE,
        sides=sides,
    )  # fmt: skip
