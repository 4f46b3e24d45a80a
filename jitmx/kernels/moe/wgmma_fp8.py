"""`moe.wgmma_fp8`: the first product as of `moe.wgmma`, with x in E4M3 and a scale a row, for activations without a
bound; `moe.fused_fp8` has those that give h one.

SiLU gives none: a block has some features of a row, and knows its largest magnitude only when all blocks are done.
Scales of a block's own features would be taken into the sums of the second product every few k, which costs what E4M3
saves; a bound by norms of x and W lies some 2^9 above what a row has, and takes small values out of E4M3's range. So h
stays in bf16, and `moe.wgmma` reads it.

W becomes E4M3 as it is decoded (jitmx.kernels.fp8_rows): exact, since the scales of a row's blocks differ by at
most eleven binades in a pass over k. Rows whose scales differ more take further passes, and all of their item does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.fp8_rows import LINE_K, ROW_RANGES
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import tiles, wgmma
from jitmx.kernels.moe.fp8_arguments import MAPPED, product_case
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import UNBOUNDED, MoeProblem
from jitmx.kernels.moe.wgmma_arguments import LINE_BYTES, TILE_M, TILE_N
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

ROWS: Any = knob("narrow", choices=ROW_RANGES, doc="rows of W: all of one pass over k, or some of more")
GRAIN: Any = knob(16, choices=(8, 16, 32, 64), doc="rows by which the widths of tiles differ")
STAGES: Any = knob(5, low=2, high=16, doc="stages of W and activations that a block keeps in shared memory")
DEPTH: Any = knob(2, choices=(2, 4), doc="steps of 64 k of a stage")
TURN = 4  # steps of 64 k that a loop of the template has: whole stages


@dataclass(frozen=True)
class WgmmaFp8Knobs(Knobs):
    """Compile-time choices of `moe.wgmma_fp8`."""

    product: str = knob("up", choices=("up",), doc="h = act(W13 x + b13)")
    activation: str = knob(UNBOUNDED[0], choices=UNBOUNDED, doc="what makes h of gate and up")
    bias: bool = knob(True, doc="the product has a bias")
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    rows: str = ROWS
    tile_m: int = TILE_M
    grain: int = GRAIN
    tile_n: int = TILE_N
    stages: int = STAGES
    depth: int = DEPTH
    pdl: bool = PDL


def shared_bytes(knobs: WgmmaFp8Knobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    item = 32 + (2 * knobs.tile_n if knobs.bias else 0) + 4 * knobs.tile_m + knobs.tile_n
    item += 4 if knobs.rows == "wide" else 0
    return wgmma.frame_bytes(knobs, LINE_BYTES // 2, 64 + 16, item)


def _check(knobs: WgmmaFp8Knobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.wgmma_fp8 needs the instructions of sm_90a, which {arch} lacks", "use x_format='mxfp8'")
    wgmma.check_tile(knobs, others=56)


SPEC = KernelSpec(
    family="moe",
    name="wgmma_fp8",
    knobs=WgmmaFp8Knobs,
    contract=lambda knobs, arch: wgmma.contract(knobs, r"QGMMA\.64xNx32\.F32\.E4M3\.E4M3"),
    check=_check,
    shared_bytes=shared_bytes,
    threads=wgmma.threads,
    arguments=lambda knobs: MAPPED,
)


def launch(knobs: WgmmaFp8Knobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """As of moe.wgmma."""
    blocks = wgmma.blocks(knobs, problem, multiprocessors)
    return Launch(blocks, shared_bytes(knobs), maps=wgmma.maps(knobs, problem, "up"))


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    require_usual("wgmma_fp8", problem, "x_format")
    if problem.x_format != "fp8":
        raise KnobError(f"moe.wgmma_fp8 does not take x_format={problem.x_format!r}, only fp8", "use moe.wgmma")
    if problem.h_format == "fp8":
        raise KnobError(
            f"moe.wgmma_fp8 leaves h in bf16, which activation={problem.activation!r} bounds", "use moe.fused_fp8"
        )
    if problem.product not in ("layer", "up"):
        raise KnobError(
            f"moe.wgmma_fp8 makes the first product, and not product={problem.product}",
            "use moe.wgmma for the second, which reads h in bf16",
        )
    require_normal_scales("moe.wgmma_fp8", problem.scale_range, "x_format='mxfp8'")
    return {"rows": problem.row_range, **problem.pick("activation", "bias", "encoding", "scale_range")}


# By rows of a tile: rows by which widths differ, stages, and steps of 64 k of a stage.
STAGED = {32: (8, 4, 4), 48: (8, 4, 4), 64: (8, 4, 4), 128: (16, 3, 4), 192: (16, 5, 2), 320: (32, 4, 2)}


def tile(problem: MoeProblem, multiprocessors: int) -> tuple[int, int]:
    """Rows of x and rows of W a block, as of moe.wgmma from 64 rows of x on."""
    m = max(wgmma.tile_m(problem), 64)
    return m, wgmma.in_few_turns(problem, m, 192, (256,), multiprocessors)


def staged(tile_m: int, tile_n: int) -> dict[str, Any]:
    """Knobs of a tile, with as many stages as fit."""
    grain, stages, depth = STAGED[tile_m]
    stages -= tile_n >= 256
    return {"tile_m": tile_m, "grain": grain, "tile_n": tile_n, "stages": stages, "depth": depth, "pdl": True}


# Tiles, widths and stages that are tried, as `wgmma.shaped` takes them.
SHAPES = (
    (192, 192, 32, 5, 2), (192, 192, 64, 5, 2), (192, 192, 16, 2, 4), (128, 192, 16, 6, 2), (128, 192, 32, 3, 4),
    (64, 192, 16, 3, 4), (64, 192, 16, 8, 2), (64, 256, 16, 3, 4), (64, 320, 8, 3, 4), (64, 128, 16, 5, 4),
    (128, 128, 16, 4, 4), (320, 128, 32, 4, 2), (320, 128, 16, 4, 2), (320, 128, 32, 2, 4),
)  # fmt: skip


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Wider and narrower tiles, finer and coarser widths, deeper stages; best guess first."""
    return wgmma.shaped(staged(*tile(problem, multiprocessors)), SHAPES)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 128, "stages": 2, "rows": "wide", "bias": False},
    {"tile_m": 64, "tile_n": 128, "stages": 2, "depth": 4, "pdl": False},
    {"tile_m": 320, "grain": 32, "tile_n": 128, "stages": 4, "encoding": "nibble"},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=lambda problem, arch, multiprocessors: staged(*tile(problem, multiprocessors)),
    few_answers=True,
    cases=lambda variant: wgmma.cases(variant, launch, TURN, product_case, "fp8", LINE_K, TILE_K),
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC, STAGED),
    asked=tiles.first_product,
    rarer=_RARER,
)
