"""`moe.wgmma`: many rows an expert on sm_90a; one of the two products, weights decoded in registers for wgmma.

A tile of the schedule has at most `tile_m` rows; the kernel shares out an expert's rows evenly among its tiles, and has
a loop for each width that is a multiple of `grain`. The first product reads what `moe.gather` laid out, and lays out
what the second reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import far, tiles
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.knobs import ACTIVATION
from jitmx.kernels.moe.limits import require_of_product, require_usual
from jitmx.kernels.moe.problem import ACTIVATIONS, MoeProblem
from jitmx.kernels.moe.wgmma_arguments import (
    DEPTH,
    GRAIN,
    LINE_BYTES,
    MAPPED,
    STAGED,
    STAGES,
    TILE_M,
    TILE_N,
    TILES_M,
    TILES_N,
    WIDEST,
    product_case,
)
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob
from jitmx.registry.tensor_map import TensorMap

# Rows of an expert, on average, from which decoding a weight once for all of them takes less: than moe.grouped (on an
# H200 968 us with 1.6 of DeepSeek-V3's where that takes 1108), and than one launch for a layer (372 us with 2.3 of
# gpt-oss-120b's where that takes 389, 193 with as many of Mixtral's and 209; but with 1.6 of gpt-oss-120b's 288 and
# 259).
LEAST_ROWS, MANY_ROWS = 1.5, 2.2
# Up to how many rows an expert, on average, tiles of so many rows hold those of nearly every one.
_TILES = ((18, 32), (40, 48), (56, 64), (112, 128))
# Rows of W a block: of how many rows of x at most, and what a row takes beside others. Decoding waits less with more
# warps, and X comes once for more rows.
_USUAL = {320: (48, 0.97), 256: (64, 1.0), 192: (WIDEST, 1.08)}
_CLEARLY = 0.85  # times what another tile takes
_SPARE_REGISTERS = 32
_TILE_BYTES = 512 + 32  # of a packed tile, with its scales
_CHUNK = 32  # rows of y that a warpgroup stores at once
_ITEMS = 3


@dataclass(frozen=True)
class WgmmaKnobs(Knobs):
    """Compile-time choices of `moe.wgmma`."""

    product: str = knob("up", choices=("up", "down"), doc="h = act(W13 x + b13), or its parts w (W2 h + b2)")
    activation: str = ACTIVATION
    bias: bool = knob(True, doc="the product has a bias")
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    tile_m: int = TILE_M
    grain: int = GRAIN
    tile_n: int = TILE_N
    stages: int = STAGES
    depth: int = DEPTH
    pdl: bool = PDL


class Tiled(Protocol):
    """Knobs that make a tile of features by rows."""

    @property
    def tile_m(self) -> int: ...
    @property
    def grain(self) -> int: ...
    @property
    def tile_n(self) -> int: ...


class OfProduct(Tiled, Protocol):
    """Those of a kernel of one product."""

    @property
    def product(self) -> str: ...


class Staged(Tiled, Protocol):
    """Those of a kernel whose stages have weights too."""

    @property
    def stages(self) -> int: ...
    @property
    def depth(self) -> int: ...


def _groups(knobs: Tiled) -> int:
    return knobs.tile_n // 64


def threads(knobs: Tiled) -> int:
    """Threads a block: a warpgroup more than multiply, which finds items and moves activations."""
    return (_groups(knobs) + 1) * 128


def launch_registers(knobs: Tiled) -> int:
    """Registers a thread at launch; warpgroups that multiply then take most of those of the other."""
    return 65536 // threads(knobs) // 8 * 8


def multiplying_registers(knobs: Tiled) -> int:
    """Registers a thread of the warpgroups that multiply, as the template sets them."""
    groups = _groups(knobs)
    return (launch_registers(knobs) * (groups + 1) - _SPARE_REGISTERS) // groups // 8 * 8


def shared_bytes(knobs: WgmmaKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    down = knobs.product == "down"
    item = 32 + (2 * knobs.tile_n if knobs.bias else 0) + (8 * knobs.tile_m if down else 0)
    return frame_bytes(knobs, LINE_BYTES, (128 if down else 64) + 16, item)


def frame_bytes(knobs: Staged, step_bytes: int, pitch: int, item: int) -> int:
    """Shared memory of stages, of rows of y on their way, `pitch` bytes each, and of items of so many bytes.

    Args:
        step_bytes: of a row of activations in a step.
    """
    size = knobs.stages * knobs.depth * (knobs.tile_m * step_bytes + knobs.tile_n // TILE_ROWS * _TILE_BYTES)
    size += _groups(knobs) * _CHUNK * pitch + _ITEMS * (-(-item // 8) * 8 + 16) + 16 * knobs.stages
    return -(-size // 1024) * 1024


def turn(knobs: Staged) -> int:
    """Steps of 64 k that a loop of the template has: whole stages, which divide the 45 steps of gpt-oss."""
    return 4 if knobs.depth != 3 else 9 if knobs.tile_m <= 64 else 3


def _check(knobs: WgmmaKnobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.wgmma needs the instructions of sm_90a, which {arch} lacks", "use moe.grouped")
    require_of_product(knobs, "activation", "up", ACTIVATIONS[0])
    check_tile(knobs)


def check_tile(knobs: Tiled, others: int = 58) -> None:
    """Raise KnobError where a tile takes more registers than there are, or its widths do not come to all of it.

    Args:
        others: registers beside sums: operands of the products under way and of the next, and what decoding takes. With
            two fewer ptxas still compiles without spills, but waits for every product.
    """
    if knobs.tile_m % knobs.grain:
        legal = math.gcd(knobs.tile_m, knobs.grain)
        raise KnobError(
            f"grain={knobs.grain} does not divide tile_m={knobs.tile_m}", f"the nearest legal value is grain={legal}"
        )
    need, have = knobs.tile_m // 2 + others, multiplying_registers(knobs)
    if need > have:
        legal = max(tile for tile in TILES_M if tile // 2 + others <= have)
        raise KnobError(
            f"tile_m={knobs.tile_m} with tile_n={knobs.tile_n} takes about {need} registers a thread of {have}",
            f"the nearest legal value is tile_m={legal}",
        )


def contract(knobs: Tiled, product: str) -> Contract:
    """What the machine code of a kernel must be whose products are `product`, by the columns N and without operands."""
    registers = launch_registers(knobs)
    return Contract(
        min_registers=registers,
        max_registers=registers,
        require=(
            *(rf"{product.replace('N', str(count))} R\d+, R\d+, gdesc\[UR\d+\], R\d+$" for count in _columns(knobs)),
            r"\bUBLKCP\b",
            r"\bUTMALDG\.3D\b",
        ),
        # An empty group, which a wait for all but one then leaves alone: products are complete before the next decode.
        forbid=(r"\b[HQ]GMMA\S* RZ,",),
    )


def widths(knobs: Tiled) -> range:
    """Rows of tiles, for each of which there is a loop."""
    return range(knobs.grain, knobs.tile_m + 1, knobs.grain)


def _columns(knobs: Tiled) -> set[int]:
    """Of the products of these loops: one, or where tiles have more than 256 rows one of each half that has some."""
    half = knobs.tile_m if knobs.tile_m <= 256 else knobs.tile_m // 2
    return {part for width in widths(knobs) for part in (min(width, half), width - half) if part > 0}


SPEC = KernelSpec(
    family="moe",
    name="wgmma",
    knobs=WgmmaKnobs,
    contract=lambda knobs, arch: contract(knobs, r"HGMMA\.64xNx16\.F32\.BF16"),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: MAPPED,
)


def launch(knobs: WgmmaKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, or one for each item that there can be at most; tensor maps of W and its scales."""
    found = maps(knobs, problem, knobs.product)
    return Launch(blocks(knobs, problem, multiprocessors), shared_bytes(knobs), maps=found)


def maps(knobs: Staged, problem: MoeProblem, product: str) -> dict[str, TensorMap]:
    """Tensor maps of W and its scales: a copy has a stage's steps of all of a block's rows of tiles."""
    n, k = problem.sizes(product)
    steps, row_tiles, tiles = -(-k // TILE_K), problem.experts * -(-n // TILE_ROWS), knobs.tile_n // TILE_ROWS
    return {
        name: TensorMap("bf16", (size // 2, steps, row_tiles), (size // 2, knobs.depth, tiles))
        for name, size in (("codes_map", 512), ("scales_map", 32))
    }


def blocks(knobs: OfProduct, problem: MoeProblem, multiprocessors: int) -> int:
    """Of a launch."""
    tiles = capacity(problem.m, problem.top, problem.experts, knobs.tile_m)
    items = tiles * -(-problem.sizes(knobs.product)[0] // knobs.tile_n)
    return max(1, min(items, multiprocessors))


def product_of(problem: MoeProblem) -> str:
    """The product that answers a problem: of a whole layer the first."""
    if problem.product in ("up", "down"):
        return problem.product
    if problem.product == "layer":
        return "up"
    raise KnobError(
        f"moe.wgmma makes one product, and not product={problem.product}", "use product='up' or product='down'"
    )


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    product = product_of(problem)
    # Of x in E4M3 h may still be in bf16, which the second product reads.
    require_usual("wgmma", problem, *(("x_format",) if product == "down" and problem.h_format == "bf16" else ()))
    require_normal_scales("moe.wgmma", problem.scale_range, "moe.grouped")
    activation = problem.activation if product == "up" else ACTIVATIONS[0]
    return {"product": product, "activation": activation, **problem.pick("bias", "encoding", "scale_range")}


def serves_best(problem: MoeProblem, arch: Arch, in_one_launch: bool) -> bool:
    """Whether products by wgmma are the choice: enough rows an expert, where they run at all.

    Args:
        in_one_launch: whether a kernel could make the layer in one launch.
    """
    least = MANY_ROWS if in_one_launch else LEAST_ROWS
    return runs_on(arch) and problem.rows_an_expert >= least and problem.scale_range == "normal"


def tile_m(problem: MoeProblem) -> int:
    """Rows of x a tile, at most."""
    return next((rows for most, rows in _TILES if problem.rows_an_expert < most), WIDEST)


def tile_n(problem: MoeProblem, multiprocessors: int) -> int:
    """Rows of W a block: those that decode a layer soonest, with what fills their last blocks up."""
    m = tile_m(problem)
    fitting = [rows for rows, (most, _) in _USUAL.items() if m <= most]
    usual = min(fitting, key=lambda rows: _decoded(problem, rows) * _USUAL[rows][1])
    return in_few_turns(problem, m, usual, fitting, multiprocessors)


def _decoded(problem: MoeProblem, tile_n: int) -> int:
    """Weights of an expert that blocks of so many rows of W decode."""
    sizes = (problem.sizes(product) for product in ("up", "down"))
    return sum(-(-n // tile_n) * tile_n * k for n, k in sizes)


def in_few_turns(problem: MoeProblem, tile_m: int, usual: int, others: Iterable[int], multiprocessors: int) -> int:
    """Rows of W a block: the usual, or of few rows an expert as many as take clearly less, where few experts leave
    multiprocessors idle in the last turn."""
    if tile_m > 64:
        return usual
    turns = {rows: _rows_in_turn(problem, tile_m, rows, multiprocessors) for rows in {usual, *others, TILES_N[0]}}
    best = min(turns, key=lambda rows: (turns[rows], -rows))
    return best if turns[best] < _CLEARLY * turns[usual] else usual


def _rows_in_turn(problem: MoeProblem, tile_m: int, tile_n: int, multiprocessors: int) -> int:
    """Rows of W that a multiprocessor decodes, one item after another, where rows are spread evenly."""
    n = problem.sizes(product_of(problem))[0]
    items = math.ceil(problem.experts_hit) * math.ceil(problem.rows_an_expert / tile_m) * -(-n // tile_n)
    return -(-items // multiprocessors) * tile_n


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Tiles by rows an expert, with narrower loops for fewer rows."""
    rows, m = tile_n(problem, multiprocessors), tile_m(problem)
    grain, stages, depth = STAGED[m]
    stages += rows == 128
    return {"tile_m": m, "grain": grain, "tile_n": rows, "stages": stages, "depth": depth, "pdl": True}


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Wider and narrower tiles, finer and coarser widths, deeper stages; best guess first."""
    shapes = (
        (192, 192, 16, 3, 2), (192, 192, 32, 3, 2), (192, 192, 32, 2, 3), (192, 192, 16, 6, 1), (192, 192, 64, 6, 1),
        (128, 192, 16, 9, 1), (128, 192, 16, 4, 2), (128, 192, 16, 3, 3), (128, 192, 32, 3, 3), (32, 320, 8, 3, 4),
        (48, 320, 8, 3, 4), (32, 256, 8, 3, 4), (48, 256, 8, 3, 4), (64, 256, 8, 3, 4), (64, 192, 16, 3, 4),
        (64, 192, 16, 4, 3), (64, 128, 16, 4, 4), (128, 128, 16, 3, 3),
    )  # fmt: skip
    return shaped(_heuristic(problem, arch, multiprocessors), shapes)


def shaped(base: dict[str, Any], shapes: Iterable[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Knobs, and the same with other tiles, widths and stages."""
    names = ("tile_m", "tile_n", "grain", "stages", "depth")
    others = (base | dict(zip(names, shape, strict=True)) for shape in shapes)
    return [base, *(knobs for knobs in others if knobs != base)]


def cases(
    variant: Variant, launch: Any, turn: int, case: Any = product_case, x_format: str = "bf16", line: int = TILE_K,
    h_line: int | None = None,
) -> Iterator[Case]:  # fmt: skip
    """Every width, a row more than a tile, experts without rows, ids of none; whole rings, more, and half a step.

    Args:
        turn: steps of 64 k by which loops go round.
    """
    knobs, generator = variant.knobs, np.random.default_rng(5)
    up = knobs.product == "up"
    counts = [*(width - 3 * (index % 3) for index, width in enumerate(widths(knobs))), 0, knobs.tile_m + 1]
    many = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = np.append(many, [-1] * (2 - len(many) % 2)).reshape(-1, 2).astype(np.int32)
    some = 64 if up else 32
    lone = np.zeros((1, 1), np.int32)
    for seed, (routed, experts, n, k, multiprocessors) in enumerate(
        (
            (lone, 1, knobs.tile_n + some, turn * TILE_K, 1),
            (ids, len(counts), knobs.tile_n + some, 32, 2),  # more items than are known at once
            (ids, len(counts), knobs.tile_n + 64, (3 * turn - 1) * TILE_K - 32, 2),
        )
    ):
        hidden, intermediate = (k, n // 2) if up else (n, k)
        problem = MoeProblem(
            len(routed), experts, routed.shape[1], hidden, intermediate, product=knobs.product, x_format=x_format
        )
        yield case(variant, launch(knobs, problem, multiprocessors), problem, Routing(routed), seed)
    yield from far.far_rows(variant, launch, case, line, h_line)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "grain": 8, "tile_n": 256, "stages": 3, "depth": 4},
    {"tile_m": 48, "grain": 8, "tile_n": 320, "stages": 3, "depth": 4, "activation": "silu", "bias": False},
    {"tile_m": 64, "tile_n": 128, "stages": 2, "depth": 2, "activation": "silu", "bias": False},
    {"product": "down", "tile_m": 64, "tile_n": 128, "stages": 2, "encoding": "nibble", "bias": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    few_answers=True,
    cases=lambda variant: cases(variant, launch, turn(variant.knobs)),
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC, STAGED),
    asked=tiles.first_product,
    rarer=_RARER,
)
