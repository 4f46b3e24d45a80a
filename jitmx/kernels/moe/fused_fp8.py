"""`moe.fused_fp8`: as `moe.fused`, both products in one launch, with x and h in E4M3 and a scale a row.

One scale serves all rows of h, for which the activation has to bound it; with others there are two launches, the first
by `moe.wgmma_fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import fp8_rows, fp8_sums
from jitmx.kernels.fp8_rows import LINE_K
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import edges, fused, tiles, wgmma, wgmma_fp8
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides
from jitmx.kernels.moe.fp8_arguments import random_weight, weight_sides
from jitmx.kernels.moe.knobs import BIASES
from jitmx.kernels.moe.layout import activate
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import BOUNDED, MoeProblem
from jitmx.kernels.moe.wgmma_arguments import LINE_BYTES, TILE_M, TILE_N, Lists
from jitmx.registry.arguments import reads
from jitmx.registry.case import Buffer, Case, deviation, judged, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

# Rows of an expert, on average, from which a tile of 320 takes less than two of 192, which decode weights twice: with
# 256 of gpt-oss-120b's 1745 us for 1895 on an H200, but with 384, two tiles either way, 2822 for 2625.
_MORE_ROWS = range(176, 321)

ARGUMENTS = fused.arguments(
    "FusedFp8Arguments",
    "lines of E4M3",
    (
        reads("w13_bases", "[experts, 2 intermediate]: the least scale byte of each row, and from bit 8 on its passes",
              "unsigned short"),
        reads("w2_bases", "[experts, hidden]: likewise", "unsigned short"),
        reads("x_scales", "[pairs], by expert: what moe.gather_fp8 divided rows of x by", "float"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FusedFp8Knobs(Knobs):
    """Compile-time choices of `moe.fused_fp8`: as of `moe.wgmma_fp8`, for both products."""

    activation: str = knob(BOUNDED[0], choices=BOUNDED, doc="what makes h of gate and up, and bounds it")
    bias: bool = BIASES
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    rows: str = wgmma_fp8.ROWS
    tile_m: int = TILE_M
    grain: int = wgmma_fp8.GRAIN
    tile_n: int = TILE_N
    stages: int = wgmma_fp8.STAGES
    depth: int = wgmma_fp8.DEPTH
    pdl: bool = PDL


def shared_bytes(knobs: FusedFp8Knobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    item = fused.item_bytes(knobs) + knobs.tile_n + (4 if knobs.rows == "wide" else 0)
    return wgmma.frame_bytes(knobs, LINE_BYTES // 2, 128 + 16, item)


def _check(knobs: FusedFp8Knobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.fused_fp8 needs the instructions of sm_90a, which {arch} lacks", "use x_format='mxfp8'")
    wgmma.check_tile(knobs, others=56)


SPEC = KernelSpec(
    family="moe",
    name="fused_fp8",
    knobs=FusedFp8Knobs,
    contract=lambda knobs, arch: wgmma.contract(knobs, r"QGMMA\.64xNx32\.F32\.E4M3\.E4M3"),
    check=_check,
    shared_bytes=shared_bytes,
    threads=wgmma.threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: FusedFp8Knobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """As of moe.fused."""
    return fused.launch_of(knobs, problem, multiprocessors, shared_bytes(knobs))


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    if problem.product not in ("layer", "both"):
        raise KnobError(
            f"moe.fused_fp8 makes both products, and not product={problem.product}", "use product='both' or 'layer'"
        )
    require_usual("fused_fp8", problem, "x_format")
    if problem.x_format != "fp8":
        raise KnobError(f"moe.fused_fp8 does not take x_format={problem.x_format!r}, only fp8", "use moe.fused")
    if problem.h_format != "fp8":
        raise KnobError(
            f"moe.fused_fp8 has h in E4M3, for which activation={problem.activation!r} gives no bound",
            "use moe.wgmma_fp8",
        )
    require_normal_scales("moe.fused_fp8", problem.scale_range, "x_format='mxfp8'")
    return {"rows": problem.row_range, **problem.pick("activation", "bias", "encoding", "scale_range")}


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Tiles as of moe.fused where they hold fewer than 64 rows, the largest where more hold all rows of an expert, and
    otherwise those of moe.wgmma_fp8."""
    first, m = replace(problem, product="up"), wgmma.tile_m(problem)
    if m < 64:
        return wgmma_fp8.staged(m, wgmma.tile_n(first, multiprocessors))
    large = int(problem.rows_an_expert) in _MORE_ROWS
    return wgmma_fp8.staged(*((320, 128) if large else wgmma_fp8.tile(first, multiprocessors)))


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Those of moe.wgmma_fp8, and tiles of fewer rows."""
    shapes = ((32, 320, 8, 3, 4), (48, 320, 8, 3, 4), (64, 192, 8, 4, 4), *wgmma_fp8.SHAPES)
    return wgmma.shaped(_heuristic(problem, arch, multiprocessors), shapes)


def case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """Both products on random inputs, with their rows in float64; pairs of no expert come last.

    h is compared for itself; y with what h as it was stored makes. Of several rows one has a NaN, which must come to
    all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    rows, top = routing.ids.shape
    by_expert = Lists.of(variant, problem, routing)
    offsets, count = by_expert.offsets, len(by_expert.there)
    alpha, limit = edges.parameters(seed)
    multiplier = fp8_rows.hidden_multiplier(alpha, limit)
    codes, x_scales = fp8_rows.quantize_rows(edges.loud(generator.standard_normal((count, hidden)), seed))
    if count > 1:
        x_scales[count // 2] = np.nan
    weights = edges.router_weights(rows, top, seed, generator)
    w13, packed13, scales13 = random_weight(knobs, experts, 2 * inner, hidden, generator, hot=True)
    w2, packed2, scales2 = random_weight(knobs, experts, hidden, inner, generator, hot=False)
    b13 = generator.standard_normal((experts, 2 * inner)).astype(ml_dtypes.bfloat16)
    b2 = generator.standard_normal((experts, hidden)).astype(ml_dtypes.bfloat16)
    ends = edges.end_rows(hidden, knobs)
    b2[:, ends] = 0
    usual = np.setdiff1d(np.arange(hidden), ends)

    parts, size = by_expert.multiplied(fp8_rows.decode(codes) * x_scales[:, None], w13, b13 if knobs.bias else None)
    h = activate(parts, knobs.activation, alpha, limit) * multiplier
    off = summed(size, hidden) + fp8_sums.lost(size, hidden)
    off = edges.activation_bound(parts, off, knobs.activation, alpha, limit) * multiplier

    def products(h: fp8_rows.Floats) -> tuple[Any, Any]:
        out, size = by_expert.multiplied(h / multiplier, w2, b2 if knobs.bias else None)
        norms = np.sqrt(by_expert.multiplied((h / multiplier) ** 2, w2**2, None)[0])  # few of h are large
        return out, summed(size, inner) + fp8_sums.lost(size, inner, norms)

    def error(stored: Any, found: Any) -> float:
        coded = fp8_rows.restore(stored, offsets, inner).view(ml_dtypes.float8_e4m3fn)
        out, bound = products(coded.astype(np.float64))
        wanted, bound = by_expert.weighted(out, weights), by_expert.weighted(bound, np.abs(weights))
        worst = max(deviation(coded, h, off, 0.5), deviation(found, wanted, bound, 0.5))
        return judged(relative_l2(found[:, usual], wanted[:, usual]), worst, GATE)

    out, _ = products(h)
    sides = edges.activation_sides(parts, knobs.activation, alpha, limit)
    sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, scales2, out)
    for packed, scales in ((packed13, scales13), (packed2, scales2)):
        sides |= {name: there or sides.get(name, False) for name, there in weight_sides(knobs, packed, scales).items()}
    named = zip(("", "_scales", "_bases"), packed13, packed2, strict=True)
    constant = {f"w{name}{field}": one for field, *both in named for name, one in zip((13, 2), both, strict=True)}
    constant |= {"b13": b13, "b2": b2} if knobs.bias else {}
    return fused.case_of(
        by_expert, launch, problem, seed,
        inputs={"x": Buffer(fp8_rows.arrange(codes, offsets)), "x_scales": Buffer(x_scales),
                **{name: Buffer(array, constant=True) for name, array in constant.items()}},
        h=np.empty((fp8_rows.rows_bytes(count, inner) // LINE_BYTES, LINE_BYTES), np.uint8),
        weights=weights, tile_n=knobs.tile_n, error=error, gate=GATE, out=out,
        sides=sides,
    )  # fmt: skip


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 128, "stages": 2, "rows": "wide", "bias": False},
    {"tile_m": 64, "tile_n": 128, "stages": 2, "depth": 4, "encoding": "nibble", "pdl": False},
    {"tile_m": 320, "grain": 32, "tile_n": 128, "stages": 4, "encoding": "nibble"},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    few_answers=True,
    cases=lambda variant: fused.cases_of(variant, launch, wgmma_fp8.TURN, case, LINE_K),
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC, wgmma_fp8.STAGED),
    asked=fused.asked,
    rarer=_RARER,
)
