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
from jitmx.kernels.moe.arguments import GATE, Routing
from jitmx.kernels.moe.layout import activate, pack_experts
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import COUNTERS, Lists, arguments
from jitmx.kernels.moe.wgmma_arguments import restore as restore_bf16
from jitmx.kernels.moe.wgmma_arguments import rows_bytes as bf16_bytes
from jitmx.registry.arguments import reads, writes
from jitmx.registry.case import Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = arguments(
    "Fp8ExpertArguments",
    "of gather_fp8 [rows, k] in bf16; of the product lines of E4M3",
    "of gather_fp8 lines of E4M3; of the product ExpertRows",
    (reads("bases", "[experts, n]: the least scale byte of each row, and from bit 8 on its passes", "unsigned short"),),
    (writes("x_scales", "[pairs], by expert: what gather_fp8 divided rows of x by; read by the product", "float"),),
)
MAPPED = ARGUMENTS.with_maps(codes_map="weight", scales_map="scales")  # for the product, which copies W by tensor maps


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
        x[7, ::3] = -ml_dtypes.finfo(x.dtype).max
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
        "largest magnitude": bool((np.abs(mine) == float(ml_dtypes.finfo(x.dtype).max)).any()),
    }
    counters = COUNTERS + len(by_expert.schedule) * variant.knobs.tile_counters
    return by_expert.gathering(launch, problem, x, outputs, wrong, sides, counters)


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
    """The first product of `variant` on random inputs, with its rows in float64; pairs of no expert come last.

    Of several rows one has a NaN, which must come to all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    rows, top = routing.ids.shape
    n, k = problem.sizes("up")
    by_expert = Lists.of(variant, problem, routing)
    offsets, count = by_expert.offsets, len(by_expert.there)
    alpha, limit = edges.parameters(seed)
    codes, x_scales = fp8_rows.quantize_rows(edges.loud(generator.standard_normal((count, k)), seed))
    if count > 1:
        x_scales[count // 2] = np.nan
    weights = edges.router_weights(rows, top, seed, generator)
    values, packed, scales = random_weight(knobs, problem.experts, n, k, generator, hot=True)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    seen = fp8_rows.decode(codes) * x_scales[:, None]
    out, size = by_expert.multiplied(seen, values, bias if knobs.bias else None)
    bound = summed(size, k) + fp8_sums.lost(size, k)
    sides = weight_sides(knobs, packed, scales) | edges.activation_sides(out, knobs.activation, alpha, limit)
    sides |= {"row with a NaN": bool(np.isnan(out).all(axis=1).any())}
    bound = edges.activation_bound(out, bound, knobs.activation, alpha, limit)
    wanted = activate(out, knobs.activation, alpha, limit)
    y = np.empty((bf16_bytes(count, n // 2) // LINE_BYTES, LINE_BYTES // 2), ml_dtypes.bfloat16)

    def error(found: Any) -> float:
        found = restore_bf16(found, offsets, n // 2)
        return judged(relative_l2(found, wanted), deviation(found, wanted, bound, 0.5), GATE)

    inputs = {
        "x": Buffer(fp8_rows.arrange(codes, offsets)), "x_scales": Buffer(x_scales),
        "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
        "bases": Buffer(packed[2], constant=True),
        **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
    }  # fmt: skip
    given = {"weights": weights, "alpha": alpha, "limit": limit}
    return by_expert.multiplying(launch, problem, inputs, y, given, error, GATE, sides, generator)


def weight_sides(knobs: Any, packed: Any, scales: Any) -> dict[str, bool]:
    """Those of a weight: rows on the edges of a pass over k, and of several passes."""
    passes = packed[2] >> 8
    sides = {
        "scales eleven binades apart": bool((np.ptp(scales[:, 0].astype(int), axis=-1) == BINADES - 1).any()),
        "block of zeros under a scale of another pass": scales.shape[-1] > 1,
    }
    if knobs.rows == "wide":
        sides |= {f"row of {number} passes": bool((passes == number).any()) for number in (2, 3)}
    return sides
