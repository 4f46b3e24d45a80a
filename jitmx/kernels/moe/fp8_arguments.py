"""The argument struct of `moe.gather_fp8` and `moe.wgmma_fp8`, and cases made of it."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

from jitmx import formats
from jitmx.kernels.linear.layout import NORMAL_SCALES
from jitmx.kernels.moe import edges, fp8_rows
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides
from jitmx.kernels.moe.fp8_rows import BINADES, LINE_BYTES
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.moe.layout import ALPHA, LIMIT, activate, pack_experts
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import COUNTERS, offsets_of
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = Arguments(
    "Fp8ExpertArguments",
    reads("x", "of gather_fp8 [rows, k] in bf16; of the products lines of E4M3"),
    reads("weight", "packed words by expert: [n, k]"),
    reads("scales", "packed"),
    reads("bases", "[experts, n]: the least scale byte of each row, and from bit 8 on its passes", "unsigned short"),
    reads("bias", "[experts, n]"),
    reads("pairs", "[pairs]: row * top + slot, by expert", "int"),
    reads("offsets", "[experts + 1]: where each expert's pairs start", "int"),
    reads("schedule", "[tiles, 4]: expert or -1, first of pairs, rows, number among its expert's tiles", "int"),
    reads("weights", "[pairs], by row and slot", "float"),
    writes("x_scales", "[pairs], by expert: what gather_fp8 divided rows of x by; read by the first product", "float"),
    writes("y", "of gather_fp8 and of the first product lines of E4M3; of the second [pairs, n], by row and slot"),
    writes("counters", "[2]: items that blocks have taken, of either product; gather_fp8 clears them", "unsigned int"),
    number("alpha", "float", "of swiglu_oai"),
    number("limit", "float", "of swiglu_oai"),
    number("top", "int", "experts a row"),
    number("n", "int"),
    number("k", "int"),
    number("tiles", "int", "of the schedule, at most"),
)
ACTIVATION = "swiglu_oai"  # which bounds h
ROUNDED_GATE = 0.006  # relative L2 against the same inputs rounded alike


def gather_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """The rows of a random x by expert, bit for bit, their scales, and counters that are zero."""
    generator = np.random.default_rng(seed)
    rows, top = routing.ids.shape
    pairs, schedule = lists(routing.local, problem.experts, variant.knobs.tile_m)
    offsets = offsets_of(routing.local, problem.experts)
    x = generator.standard_normal((rows, problem.hidden)) * np.exp2(generator.integers(-9, 9, (rows, 1)))
    x = x.astype(ml_dtypes.bfloat16)
    if rows > 12:  # largest magnitudes at 1.75 times a power of two, above it, and 0; a NaN, an infinity, a subnormal
        x[:4] *= 0.25 / np.abs(x[:4].astype(np.float32)).max(axis=1, keepdims=True).astype(ml_dtypes.bfloat16)
        x[0, -1], x[1, 0], x[2, 1], x[3], x[4, -1], x[5, 0], x[6] = 1.75, 1.7578125, -1.5, 0, np.nan, -np.inf, 2.0**-130
    mine = x[pairs[: offsets[-1]] // top].astype(np.float64)
    with np.errstate(invalid="ignore"):
        codes, wanted_scales = fp8_rows.quantize_rows(mine)
    wanted = fp8_rows.arrange(codes, offsets)

    def check(outputs: Any) -> float:
        scales, lines, counters = outputs
        differ = np.concatenate([mismatched(scales, wanted_scales)])
        return mismatches(lines, wanted) + float(differ.mean()) + mismatches(counters, np.zeros_like(counters))

    def mismatched(found: Any, right: Any) -> Any:
        return ~((found == right) | np.isnan(found) & np.isnan(right))

    with np.errstate(invalid="ignore"):
        fraction = np.frexp(np.abs(mine).max(axis=1))[0]
    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} k={problem.hidden} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x), "pairs": Buffer(pairs), "offsets": Buffer(offsets), "schedule": Buffer(schedule),
            "x_scales": Buffer(np.empty(len(mine), np.float32), output=True),
            "y": Buffer(np.empty(wanted.shape, np.uint8), output=True),
            "counters": Buffer(np.empty(COUNTERS, np.uint32), output=True),
            "alpha": ALPHA, "limit": LIMIT, "top": top, "k": problem.hidden, "tiles": len(schedule),
        },
        check=check,
        gate=0.0,
        sides={
            "expert of no row": bool((np.diff(offsets) == 0).any()),
            "row of no expert": bool((routing.local < 0).all(axis=1).any()),
            "row with a NaN or an infinity": bool(np.isnan(wanted_scales).any()),
            "row of zeros": bool((mine == 0).all(axis=1).any()),
            "magnitude of 1.75 times a power of two": bool((fraction == 0.875).any()),
            "magnitude of more": bool((fraction > 0.875).any()),
            "scale at its least": bool((wanted_scales == 2.0**-126).any()),
        },
    )  # fmt: skip


def random_weight(knobs: Any, experts: int, n: int, k: int, generator: np.random.Generator, hot: bool) -> Any:
    """Values of a random weight of each expert; its packed words, scales and words of its rows; and its plain scales.

    Scales of some rows are as far apart as one pass takes, and of wide ones of `rows` further: two passes, and three.
    A block of zeros may have any scale. The last rows are zero but for a block whose scale is at an end of the range.
    """
    codes = generator.integers(0, 16, (experts, n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 2 - round(np.log2(k) / 2)
    scales = generator.integers(centre - 2, centre + 2, (experts, n, k // 32)).astype(np.uint8)
    if hot:
        scales[:, np.arange(n) // 2 % edges.HOT == 1] += 4
    blocks = k // 32
    spans = (BINADES - 1, BINADES, 2 * BINADES + 5) if knobs.rows == "wide" else (BINADES - 1,)
    for row, apart in enumerate(spans):
        if blocks > 1:
            scales[:, row, 0] = scales[:, row].max(axis=-1) - apart
            scales[:, row, 0 if row else 1 :] = np.maximum(scales[:, row, 0 if row else 1 :], scales[:, row, :1])
    if blocks > 1:
        codes[:, 5, :32], scales[:, 5, 0] = 8 * (np.arange(32) % 2), formats.SCALE_ONE + 60  # zeros of either sign
    if not hot:
        for byte, row in zip(NORMAL_SCALES, edges.end_rows(n, knobs), strict=True):
            block = int(generator.integers(0, blocks))
            codes[:, row, : 32 * block] = codes[:, row, 32 * block + 32 :] = 0
            scales[:, row, block] = byte
    values = formats.dequantize(codes, scales, formats.get("mxfp4"))
    return values, (*pack_experts(codes, scales, knobs.encoding), fp8_rows.row_words(codes, scales)), scales


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
    multiplier = fp8_rows.hidden_multiplier(alpha, limit)
    x = generator.standard_normal((count, k))
    if up:
        x = edges.loud(x, seed)
    codes, x_scales = fp8_rows.quantize_rows(x)
    if count > 1:
        x_scales[count // 2] = np.nan
        if not up:
            codes[count // 2, 0] = 0x7F
    seen = fp8_rows.decode(codes) * (x_scales[:, None] if up else 1 / multiplier)
    weights = edges.router_weights(rows, top, seed, generator)
    values, packed, scales = random_weight(knobs, problem.experts, n, k, generator, hot=up)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    if not up:
        bias[:, edges.end_rows(n, knobs)] = 0

    out, size = np.zeros((count, n)), np.zeros((count, n))
    for expert, (first, end) in enumerate(itertools.pairwise(offsets)):
        mine = seen[first:end]
        out[first:end], size[first:end] = mine @ values[expert].T, np.abs(mine) @ np.abs(values[expert]).T
        if knobs.bias:
            out[first:end] += bias[expert].astype(np.float64)
            size[first:end] += np.abs(bias[expert].astype(np.float64))
    bound = summed(size, k)
    passes = packed[2] >> 8
    sides = {
        "row with a NaN": bool(np.isnan(out).all(axis=1).any()),
        "expert of no row": bool((np.diff(offsets) == 0).any()),
        "scales eleven binades apart": bool((np.ptp(scales[:, 0].astype(int), axis=-1) == BINADES - 1).any()),
        "block of zeros under a scale of another pass": k > 32,
    }
    if knobs.rows == "wide":
        sides |= {f"row of {number} passes": bool((passes == number).any()) for number in (2, 3)}
    if up:
        sides |= edges.activation_sides(out, ACTIVATION, alpha, limit)
        bound = edges.activation_bound(out, bound, ACTIVATION, alpha, limit) * multiplier
        wanted = activate(out, ACTIVATION, alpha, limit) * multiplier
        y = np.empty((fp8_rows.rows_bytes(count, n // 2) // LINE_BYTES, LINE_BYTES), np.uint8)
    else:
        sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, scales, out)
        factors = weights.ravel()[pairs[:count], None].astype(np.float64)
        wanted, limits = np.empty((count, n)), np.empty((count, n))
        wanted[pairs[:count]], limits[pairs[:count]] = out * factors, bound * np.abs(factors)
        bound = limits
        y = np.empty(wanted.shape, ml_dtypes.bfloat16)

    usual = np.setdiff1d(np.arange(wanted.shape[1]), () if up else edges.end_rows(n, knobs))
    gate = ROUNDED_GATE if up else GATE
    listed = {"pairs": pairs, "offsets": offsets, "schedule": schedule, "weights": weights}
    own, others = (0, 1) if up else (1, 0)
    counters = np.zeros(COUNTERS, np.uint32)
    counters[others] = generator.integers(1, 1 << 20)

    def check(outputs: Any) -> float:
        found, left = outputs
        if left[others] != counters[others] or not left[own]:
            return float("inf")
        right = wanted
        if up:
            found = fp8_rows.restore(found, offsets, n // 2).view(ml_dtypes.float8_e4m3fn)
            right = wanted.astype(ml_dtypes.float8_e4m3fn)
        # A value near the middle of two codes may go to either.
        error = relative_l2(found[:, usual].astype(np.float64), right[:, usual].astype(np.float64))
        return judged(error, deviation(found, wanted, bound, 0.5 if up else 1.0), gate)

    return Case(
        name=f"rows={rows} top={top} experts={problem.experts} n={n} k={k} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(fp8_rows.arrange(codes, offsets)),
            "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
            "bases": Buffer(packed[2], constant=True),
            **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
            **({"x_scales": Buffer(x_scales)} if up else {}),
            **{name: Buffer(array, early=not up, ahead=up) for name, array in listed.items()},
            "y": Buffer(y, output=True),
            "counters": Buffer(counters, output=True, scratch=True, early=not up, ahead=up),
            "alpha": alpha, "limit": limit, "top": top, "n": n, "k": k, "tiles": len(schedule),
        },
        check=check,
        gate=gate,
        sides=sides,
    )  # fmt: skip
