"""The argument struct of `moe.gather_fp8` and `moe.wgmma_fp8`, and cases made of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jitmx import formats
from jitmx.kernels import fp8_rows, fp8_sums
from jitmx.kernels.fp8_rows import BINADES, LINE_BYTES
from jitmx.kernels.linear.layout import NORMAL_SCALES
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides
from jitmx.kernels.moe.layout import activate, pack_experts
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import Lists, arguments
from jitmx.kernels.moe.wgmma_arguments import restore as restore_bf16
from jitmx.kernels.moe.wgmma_arguments import rows_bytes as bf16_bytes
from jitmx.registry.arguments import reads, writes
from jitmx.registry.case import Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = arguments(
    "Fp8ExpertArguments",
    "of gather_fp8 [rows, k] in bf16; of the products lines of E4M3",
    "of gather_fp8 lines of E4M3; of the first product these or, as the activation is, ExpertRows; of the second "
    "[pairs, n], by row and slot",
    (reads("bases", "[experts, n]: the least scale byte of each row, and from bit 8 on its passes", "unsigned short"),),
    (
        writes(
            "x_scales", "[pairs], by expert: what gather_fp8 divided rows of x by; read by the first product", "float"
        ),
    ),
)
MAPPED = ARGUMENTS.with_maps(codes_map="weight", scales_map="scales")  # for the products, which copy W by tensor maps
ROUNDED_GATE = 0.006  # relative L2 against the same inputs rounded alike


def gather_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """The rows of a random x by expert, bit for bit, their scales, and counters that are zero."""
    generator = np.random.default_rng(seed)
    rows, top = routing.ids.shape
    by_expert = Lists.of(variant, problem, routing)
    x = generator.standard_normal((rows, problem.hidden)) * np.exp2(generator.integers(-9, 9, (rows, 1)))
    x = x.astype(ml_dtypes.bfloat16)
    if rows > 12:  # largest magnitudes at 1.75 times a power of two, above it, and 0; a NaN, an infinity, a subnormal
        x[:4] *= 0.25 / np.abs(x[:4].astype(np.float32)).max(axis=1, keepdims=True).astype(ml_dtypes.bfloat16)
        x[0, -1], x[1, 0], x[2, 1], x[3], x[4, -1], x[5, 0], x[6] = 1.75, 1.7578125, -1.5, 0, np.nan, -np.inf, 2.0**-130
    mine = x[by_expert.there // top].astype(np.float64)
    with np.errstate(invalid="ignore"):
        codes, scales = fp8_rows.quantize_rows(mine)
        fraction = np.frexp(np.abs(mine).max(axis=1))[0]
    wanted = fp8_rows.arrange(codes, by_expert.offsets)

    def wrong(found: Any) -> float:
        differ = ~((found[0] == scales) | np.isnan(found[0]) & np.isnan(scales))
        return float(differ.mean()) + mismatches(found[1], wanted)

    outputs = {
        "x_scales": Buffer(np.empty(len(mine), np.float32), output=True),
        "y": Buffer(np.empty(wanted.shape, np.uint8), output=True),
    }
    sides = {
        "row with a NaN or an infinity": bool(np.isnan(scales).any()),
        "row of zeros": bool((mine == 0).all(axis=1).any()),
        "magnitude of 1.75 times a power of two": bool((fraction == 0.875).any()),
        "magnitude of more": bool((fraction > 0.875).any()),
        "scale at its least": bool((scales == 2.0**-126).any()),
    }
    return by_expert.gathering(launch, problem, x, outputs, wrong, sides)


def random_weight(knobs: Any, experts: int, n: int, k: int, generator: np.random.Generator, hot: bool) -> Any:
    """Values of a random weight of each expert; its packed words, scales and words of its rows; and its plain scales.

    The first rows are on the edges of a pass; the last are zero but for a block whose scale is at an end of the range.
    """
    codes = generator.integers(0, 16, (experts, n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 2 - round(np.log2(k) / 2)
    scales = generator.integers(centre - 2, centre + 2, (experts, n, k // 32)).astype(np.uint8)
    if hot:
        scales[:, np.arange(n) // 2 % edges.HOT == 1] += 4
    blocks = k // 32
    fp8_rows.spread_scales(codes, scales, knobs.rows == "wide")
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
    up, activation = knobs.product == "up", knobs.activation
    rows, top = routing.ids.shape
    n, k = problem.sizes(knobs.product)
    by_expert = Lists.of(variant, problem, routing)
    offsets, count = by_expert.offsets, len(by_expert.there)
    alpha, limit = edges.parameters(seed)
    multiplier = fp8_rows.hidden_multiplier(alpha, limit) if knobs.h_in_e4m3 else 1.0
    coded = up and knobs.h_in_e4m3
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
    out, size = by_expert.multiplied(seen, values, bias if knobs.bias else None)
    bound = summed(size, k) + fp8_sums.lost(size, k)
    passes = packed[2] >> 8
    sides = {
        "row with a NaN": bool(np.isnan(out).all(axis=1).any()),
        "scales eleven binades apart": bool((np.ptp(scales[:, 0].astype(int), axis=-1) == BINADES - 1).any()),
        "block of zeros under a scale of another pass": k > 32,
    }
    if knobs.rows == "wide":
        sides |= {f"row of {number} passes": bool((passes == number).any()) for number in (2, 3)}
    if up:
        sides |= edges.activation_sides(out, activation, alpha, limit)
        bound = edges.activation_bound(out, bound, activation, alpha, limit) * multiplier
        wanted = activate(out, activation, alpha, limit) * multiplier
        size_of, element = (fp8_rows.rows_bytes, np.uint8) if coded else (bf16_bytes, ml_dtypes.bfloat16)
        line = LINE_BYTES // np.dtype(element).itemsize
        y = np.empty((size_of(count, n // 2) // LINE_BYTES, line), element)
    else:
        sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, scales, out)
        wanted, bound = by_expert.weighted(out, weights), by_expert.weighted(bound, np.abs(weights))
        y = np.empty(wanted.shape, ml_dtypes.bfloat16)
    usual = np.setdiff1d(np.arange(wanted.shape[1]), () if up else edges.end_rows(n, knobs))
    gate = ROUNDED_GATE if coded else GATE

    def error(found: Any) -> float:
        if up and not coded:
            found = restore_bf16(found, offsets, n // 2)
        elif up:
            found = fp8_rows.restore(found, offsets, n // 2).view(ml_dtypes.float8_e4m3fn)
        # A value nearer the middle of two codes than its sum is exact may go to either, a code of 3 bits further: each
        # is judged by itself, and how many do so says nothing.
        off = 0.0 if coded else relative_l2(found[:, usual], wanted[:, usual])
        return judged(off, deviation(found, wanted, bound, 0.5), gate)

    inputs = {
        "x": Buffer(fp8_rows.arrange(codes, offsets)),
        "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
        "bases": Buffer(packed[2], constant=True),
        **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
        **({"x_scales": Buffer(x_scales)} if up else {}),
    }  # fmt: skip
    given = {"weights": weights, "alpha": alpha, "limit": limit}
    return by_expert.multiplying(launch, problem, inputs, y, given, error, gate, sides, generator)
