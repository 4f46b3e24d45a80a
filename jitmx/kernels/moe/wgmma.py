"""`moe.wgmma`: many rows an expert on sm_90a; one of the two products, weights decoded in registers for wgmma.

A tile of the schedule has at most `tile_m` rows; the kernel shares out an expert's rows evenly among its tiles, and has
a loop for each width that is a multiple of `grain`. The first product reads what `moe.gather` laid out, and lays out
what the second reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import far, tiles
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.knobs import ACTIVATION
from jitmx.kernels.moe.limits import require_of_product, require_usual
from jitmx.kernels.moe.problem import ACTIVATIONS, MoeProblem
from jitmx.kernels.moe.wgmma_arguments import ARGUMENTS, LINE_BYTES, TILES_M, WIDEST, product_case
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

# Rows of an expert, on average, from which decoding a weight once for all of them takes less than the other kernel's
# products: on an H200 634 and 644 us with 8 rows, 795 and 685 with 16. Up to the second, tiles of 64 rows are quicker.
MANY_ROWS, _FEW_ROWS = 12, 48
_STAGES_FEW = {192: 10, 256: 8, 128: 10}  # by rows of W a block, of such tiles
_CLEARLY = 0.85  # times what another tile takes
_SPARE_REGISTERS = 32
_SLOT_BYTES = 640
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
    tile_m: int = knob(WIDEST, choices=TILES_M, doc="rows of a tile of the schedule, at most")
    grain: int = knob(32, choices=(16, 32, 64), doc="rows by which the widths of tiles differ")
    tile_n: int = knob(192, choices=(128, 192, 256), doc="rows of W a block, 64 for each warpgroup that multiplies")
    stages: int = knob(6, low=2, high=16, doc="steps of 64 k of activations that a block keeps in shared memory")
    ring: int = knob(4, low=2, high=9, doc="steps of 64 k of W that a warp keeps in flight")
    pdl: bool = PDL


class Tiled(Protocol):
    """Knobs that make a tile of features by rows."""

    @property
    def product(self) -> str: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def grain(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def ring(self) -> int: ...


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
    pitch = (64 if knobs.product == "up" else 128) + 16
    size = knobs.stages * knobs.tile_m * LINE_BYTES
    size += _groups(knobs) * (4 * knobs.ring * _SLOT_BYTES + _CHUNK * pitch)
    item = 32 + (4 * knobs.tile_n if knobs.bias else 0) + (8 * knobs.tile_m if knobs.product == "down" else 0)
    size += _ITEMS * (-(-item // 8) * 8 + 16) + 16 * knobs.stages
    return -(-size // 1024) * 1024


def _check(knobs: WgmmaKnobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.wgmma needs the instructions of sm_90a, which {arch} lacks", "use moe.grouped")
    require_of_product(knobs, "activation", "up", ACTIVATIONS[0])
    check_registers(knobs)


def check_registers(knobs: Tiled) -> None:
    """Raise KnobError where a tile takes more than there are: sums, two decoded fragments, and what decoding takes."""
    need, have = knobs.tile_m // 2 + 16 + 40, multiplying_registers(knobs)
    if need > have:
        legal = max(tile for tile in TILES_M if tile // 2 + 56 <= have)
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
            *(rf"{product.replace('N', str(width))} R\d+, R\d+, gdesc\[UR\d+\], R\d+$" for width in widths(knobs)),
            r"\bUBLKCP\b",
            r"\bLDGSTS\.E\..*128",
        ),
        # An empty group, which a wait for all but one then leaves alone: products are complete before the next decode.
        forbid=(r"\b[HQ]GMMA\S* RZ,",),
    )


def widths(knobs: Tiled) -> range:
    """Rows of tiles, for each of which there is a loop."""
    return range(knobs.grain, knobs.tile_m + 1, knobs.grain)


SPEC = KernelSpec(
    family="moe",
    name="wgmma",
    knobs=WgmmaKnobs,
    contract=lambda knobs, arch: contract(knobs, r"HGMMA\.64xNx16\.F32\.BF16"),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: WgmmaKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, or one for each item that there can be at most."""
    return Launch(blocks(knobs, problem, multiprocessors), shared_bytes(knobs))


def blocks(knobs: Tiled, problem: MoeProblem, multiprocessors: int) -> int:
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


def serves_best(problem: MoeProblem, arch: Arch) -> bool:
    """Whether this kernel is the choice for a product: many rows an expert, where it runs at all."""
    return runs_on(arch) and problem.rows_an_expert >= MANY_ROWS and problem.scale_range == "normal"


def _rows_in_turn(problem: MoeProblem, tile_m: int, tile_n: int, multiprocessors: int) -> int:
    """Rows of W that a multiprocessor decodes, one item after another, where rows are spread evenly."""
    n = problem.sizes(product_of(problem))[0]
    items = math.ceil(problem.experts_hit) * math.ceil(problem.rows_an_expert / tile_m) * -(-n // tile_n)
    return -(-items // multiprocessors) * tile_n


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """192 rows of W, which divide both products of gpt-oss, by at most as many of x: what registers hold.

    Few experts may leave multiprocessors idle in the last turn: then by as many rows of W as take clearly less.
    """
    if problem.rows_an_expert < _FEW_ROWS:
        few = {"tile_m": 64, "grain": 16, "ring": 4, "pdl": True}
        turns = {tile_n: _rows_in_turn(problem, 64, tile_n, multiprocessors) for tile_n in _STAGES_FEW}
        best = min(turns, key=lambda tile_n: (turns[tile_n], -tile_n))
        tile_n = best if turns[best] < _CLEARLY * turns[192] else 192
        return few | {"tile_n": tile_n, "stages": _STAGES_FEW[tile_n]}
    return {"tile_m": WIDEST, "grain": 32, "tile_n": 192, "stages": 6, "ring": 4, "pdl": True}


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Wider and narrower tiles, finer and coarser widths, deeper rings; best guess first."""
    base = _heuristic(problem, arch, multiprocessors)
    others: tuple[dict[str, int], ...] = (
        {"grain": 16}, {"grain": 64}, {"ring": 8, "stages": 5}, {"stages": 4}, {"tile_m": 128, "stages": 8},
        {"tile_n": 128}, {"tile_n": 128, "tile_m": 256, "stages": 5}, {"tile_n": 256, "tile_m": 64, "stages": 8},
        {"tile_n": 128, "tile_m": 256, "stages": 5, "grain": 16},
    )  # fmt: skip
    return [base, *(base | other for other in others)]


def cases(
    variant: Variant, launch: Any, case: Any = product_case, x_format: str = "bf16", line: int = TILE_K,
    h_line: int | None = None,
) -> Iterator[Case]:  # fmt: skip
    """Every width, a row more than a tile, experts without rows, ids of none; whole rings, more, and half a step."""
    knobs, generator = variant.knobs, np.random.default_rng(5)
    up = knobs.product == "up"
    counts = [*(width - 3 * (index % 3) for index, width in enumerate(widths(knobs))), 0, knobs.tile_m + 1]
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
        sizes = (k, n // 2) if up else (n, k)
        problem = MoeProblem(len(routed), experts, routed.shape[1], *sizes, product=knobs.product, x_format=x_format)
        yield case(variant, launch(knobs, problem, multiprocessors), problem, Routing(routed), seed)
    yield from far.far_rows(variant, launch, case, line, h_line)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2, "activation": "silu", "bias": False},
    {"product": "down", "tile_m": 64, "tile_n": 128, "stages": 2, "ring": 2, "encoding": "nibble", "bias": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=lambda variant: cases(variant, launch),
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC),
    asked=tiles.first_product,
    rarer=_RARER,
)
