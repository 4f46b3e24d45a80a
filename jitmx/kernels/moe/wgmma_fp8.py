"""`moe.wgmma_fp8`: as `moe.wgmma`, with x and h in E4M3 and a scale a row, at the rate of E4M3's products.

W becomes E4M3 as it is decoded (jitmx.kernels.moe.fp8_rows): exact, since the scales of a row's blocks differ by at
most eleven binades in a pass over k. Rows whose scales differ more take further passes, and all of their item does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import far, tiles, wgmma
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.fp8_arguments import ARGUMENTS, product_case
from jitmx.kernels.moe.fp8_rows import LINE_K, ROW_RANGES
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import LINE_BYTES, TILES_M, WIDEST
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

BOUNDED = ("swiglu_oai",)  # activations whose h has a bound
_SLOT_BYTES = 640
_CHUNK = 32  # rows of y that a warpgroup stores at once
_ITEMS = 3


@dataclass(frozen=True)
class WgmmaFp8Knobs(Knobs):
    """Compile-time choices of `moe.wgmma_fp8`."""

    product: str = knob("up", choices=("up", "down"), doc="h = act(W13 x + b13), or its parts w (W2 h + b2)")
    bias: bool = knob(True, doc="the product has a bias")
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    rows: str = knob("narrow", choices=ROW_RANGES, doc="rows of W: all of one pass over k, or some of more")
    tile_m: int = knob(WIDEST, choices=TILES_M, doc="rows of a tile of the schedule, at most")
    grain: int = knob(32, choices=(16, 32, 64), doc="rows by which the widths of tiles differ")
    tile_n: int = knob(192, choices=(128, 192, 256), doc="rows of W a block, 64 for each warpgroup that multiplies")
    stages: int = knob(6, low=2, high=16, doc="steps of 128 k of activations that a block keeps in shared memory")
    ring: int = knob(4, choices=(2, 4, 6, 8), doc="steps of 64 k of W that a warp keeps in flight")
    pdl: bool = PDL


def shared_bytes(knobs: WgmmaFp8Knobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    up, groups = knobs.product == "up", knobs.tile_n // 64
    size = knobs.stages * knobs.tile_m * LINE_BYTES
    size += groups * (4 * knobs.ring * _SLOT_BYTES + _CHUNK * ((32 if up else 128) + 16))
    item = 32 + (4 * knobs.tile_n if knobs.bias else 0) + (4 if up else 8) * knobs.tile_m + knobs.tile_n
    item += 4 if knobs.rows == "wide" else 0
    size += _ITEMS * (-(-item // 8) * 8 + 16) + 16 * knobs.stages
    return -(-size // 1024) * 1024


def _check(knobs: WgmmaFp8Knobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.wgmma_fp8 needs the instructions of sm_90a, which {arch} lacks", "use x_format='mxfp8'")
    # Sums, two decoded fragments, tables of two rows, and what addresses and decoding take.
    need, have = knobs.tile_m // 2 + 16 + 40, wgmma.multiplying_registers(_geometry(knobs))
    if need > have:
        legal = max(tile for tile in TILES_M if tile // 2 + 56 <= have)
        raise KnobError(
            f"tile_m={knobs.tile_m} with tile_n={knobs.tile_n} takes about {need} registers a thread of {have}",
            f"the nearest legal value is tile_m={legal}",
        )


def _geometry(knobs: WgmmaFp8Knobs) -> wgmma.WgmmaKnobs:
    """The knobs of `moe.wgmma` with as many warpgroups."""
    return wgmma.WgmmaKnobs(tile_n=knobs.tile_n)


def _widths(knobs: WgmmaFp8Knobs) -> range:
    return range(knobs.grain, knobs.tile_m + 1, knobs.grain)


def _contract(knobs: WgmmaFp8Knobs, arch: Arch) -> Contract:
    registers = wgmma.launch_registers(_geometry(knobs))
    return Contract(
        min_registers=registers,
        max_registers=registers,
        require=(
            *(rf"QGMMA\.64x{width}x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc\[UR\d+\], R\d+$" for width in _widths(knobs)),
            r"\bUBLKCP\b",
            r"\bLDGSTS\.E\..*128",
        ),
        # An empty group: products are complete before the next decode.
        forbid=(r"\b[HQ]GMMA\S* RZ,",),
    )


SPEC = KernelSpec(
    family="moe",
    name="wgmma_fp8",
    knobs=WgmmaFp8Knobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=lambda knobs: wgmma.threads(_geometry(knobs)),
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: WgmmaFp8Knobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, or one for each item that there can be at most."""
    same = wgmma.WgmmaKnobs(product=knobs.product, tile_m=knobs.tile_m, tile_n=knobs.tile_n)
    return Launch(wgmma.launch(same, problem, multiprocessors).blocks, shared_bytes(knobs))


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    require_usual("wgmma_fp8", problem, "x_format")
    if problem.x_format != "fp8":
        raise KnobError(f"moe.wgmma_fp8 does not take x_format={problem.x_format!r}, only fp8", "use moe.wgmma")
    if problem.activation not in BOUNDED:
        raise KnobError(
            f"moe.wgmma_fp8 does not take activation={problem.activation!r}, only {' or '.join(BOUNDED)}: one scale is "
            "that of every row of h, which the activation bounds",
            "use x_format='mxfp8'",
        )
    product = wgmma.product_of(problem)
    require_normal_scales("moe.wgmma_fp8", problem.scale_range, "x_format='mxfp8'")
    return {"product": product, "rows": problem.row_range, **problem.pick("bias", "encoding", "scale_range")}


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """As of moe.wgmma, whose tiles are as wide in registers and in shared memory."""
    return wgmma.KERNEL.heuristic(problem, arch, multiprocessors)


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Wider and narrower tiles, finer and coarser widths, deeper rings; best guess first."""
    return wgmma.KERNEL.candidates(problem, arch, multiprocessors)


def _cases(variant: Variant) -> Iterator[Case]:
    """Every width, a row more than a tile, experts without rows, ids of none; whole rings, more, and half a stage."""
    knobs, generator = variant.knobs, np.random.default_rng(5)
    up = knobs.product == "up"
    widths = [width - 3 * (index % 3) for index, width in enumerate(_widths(knobs))]
    counts = [*widths, 0, knobs.tile_m + 1]
    many = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = np.append(many, [-1] * (2 - len(many) % 2)).reshape(-1, 2).astype(np.int32)
    some = 64 if up else 32
    lone = np.zeros((1, 1), np.int32)
    for seed, (routed, experts, n, k, multiprocessors) in enumerate(
        (
            (lone, 1, knobs.tile_n + some, knobs.ring * TILE_K, 1),
            (ids, len(counts), some, 32, 2),
            (ids, len(counts), knobs.tile_n + 64, (3 * knobs.ring - 1) * TILE_K - 32, 2),
        )
    ):
        hidden, intermediate = (k, n // 2) if up else (n, k)
        problem = MoeProblem(
            len(routed), experts, routed.shape[1], hidden, intermediate, product=knobs.product, x_format="fp8"
        )
        yield product_case(variant, launch(knobs, problem, multiprocessors), problem, Routing(routed), seed)
    yield from far.far_rows(variant, launch, product_case, LINE_K)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2, "rows": "wide", "bias": False},
    {"product": "down", "tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2, "encoding": "nibble", "rows": "wide"},
    {"product": "down", "tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2, "bias": False, "pdl": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC),
    asked=tiles.first_product,
    rarer=_RARER,
)
