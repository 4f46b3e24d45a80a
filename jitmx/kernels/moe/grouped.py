"""`moe.grouped`: any number of rows on every target; one of the two products, for each expert on the rows it was given.

Rows come in tiles of at most `tile_m` of one expert, from the schedule of `jitmx.group_by_expert`. How many there will
be is not known on the host: the grid is for as many as there can be, and blocks without a tile end at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.far import LONG
from jitmx.kernels.linear.knobs import ENCODING, SCALE_RANGE
from jitmx.kernels.linear.layout import CODE_BYTES, TILE_BYTES, TILE_K, TILE_ROWS
from jitmx.kernels.linear.limits import require_columns, require_grid, require_reach, require_resident
from jitmx.kernels.linear.tile import COLUMN, require_sums, threads
from jitmx.kernels.linear.tile_cost import Shape, microseconds
from jitmx.kernels.moe import far, tiles
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.grouped_arguments import ARGUMENTS, product_case
from jitmx.kernels.moe.limits import require_of_product, require_usual
from jitmx.kernels.moe.problem import ACTIVATIONS, MAX_ROWS, REDUCTIONS, UNGATED, WEIGHT_ON, MoeProblem
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

TILES_M = (8, 16, 32, 64, 128)
NEAR = 1.05  # times the shortest: what models cannot tell apart
ADDRESSED = 1 << 32  # bytes that offsets of rows reach


@dataclass(frozen=True)
class GroupedKnobs(Knobs):
    """Compile-time choices of `moe.grouped`."""

    product: str = knob("up", choices=("up", "down"), doc="h = act(W13 x + b13), or its parts w (W2 h + b2)")
    activation: str = knob("swiglu_oai", choices=ACTIVATIONS + UNGATED, doc="what makes h of gate and up, or of up")
    bias: bool = knob(True, doc="the product has a bias")
    weight_on: str = knob("output", choices=WEIGHT_ON, doc="whether the router's weight multiplies W2 h + b2 or W13 x")
    reduction: str = knob("ordered", choices=REDUCTIONS, doc="parts of y by pair for moe.combine, or atomics on y")
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    tile_n: int = knob(128, choices=(32, 64, 96, 128, 192, 256), doc="rows of W a block")
    tile_m: int = knob(64, choices=TILES_M, doc="rows of a tile of the schedule, at most")
    warps_n: int = knob(4, low=1, high=8, doc="warps that share tile_n")
    warps_m: int = knob(1, low=1, high=4, doc="warps that share tile_m")
    stages: int = knob(4, low=3, high=8, doc="stages of the ring")
    group: int = knob(8, choices=(1, 2, 4, 8, 16, 32), doc="tiles of rows that take turns at a tile of weights")
    blocks_per_sm: int = knob(1, low=1, high=4, doc="blocks that must fit a multiprocessor: caps registers")
    pdl: bool = PDL


def stage_bytes(knobs: GroupedKnobs) -> int:
    """Shared memory of one stage of the ring."""
    return knobs.tile_m * TILE_K * 2 + knobs.tile_n // TILE_ROWS * TILE_BYTES


def shared_bytes(knobs: GroupedKnobs) -> int:
    """Dynamic shared memory of a launch: the ring, in whose place the results and what their rows are go out."""
    return max(knobs.stages * stage_bytes(knobs), rows_bytes(knobs))


def rows_bytes(knobs: Any) -> int:
    """Shared memory of the rows that a block makes, with what they are (class TileRows of moe/tile_rows.cuh)."""
    features = knobs.tile_n // (2 if knobs.product == "up" and knobs.activation in ACTIVATIONS else 1)
    return int(knobs.tile_m * (features * 2 + 16 + 8))


def _check(knobs: GroupedKnobs, arch: Arch) -> None:
    for tile, warps, unit in (("tile_n", "warps_n", TILE_ROWS), ("tile_m", "warps_m", COLUMN)):
        size, count = getattr(knobs, tile), getattr(knobs, warps)
        if size % (count * unit):
            legal = [fewer for fewer in range(1, 9) if size % (fewer * unit) == 0]
            raise KnobError(
                f"{tile}={size} is not a multiple of {unit} for each of {warps}={count}",
                f"the nearest legal {warps} is {min(legal, key=lambda value: abs(value - count))}",
            )
    check_product(knobs, arch)
    require_sums(knobs)
    if threads(knobs) < knobs.tile_m:
        raise KnobError(
            f"{threads(knobs)} threads are fewer than tile_m={knobs.tile_m} rows, each of which one looks up",
            "use more warps or a smaller tile",
        )
    require_resident(knobs.blocks_per_sm, threads(knobs))


def check_product(knobs: Any, arch: Arch) -> None:
    """Raise KnobError where a knob is of the other product, or the target has no such atomics."""
    require_of_product(knobs, "activation", "up", ACTIVATIONS[0])
    require_of_product(knobs, "reduction", "down", REDUCTIONS[0])
    if knobs.reduction == "atomic" and arch.major < 9:
        raise KnobError("reduction='atomic' needs sm_90 or newer", f"on {arch} use reduction='ordered'")


def atomics(knobs: Any) -> tuple[str, ...]:
    """What machine code must have that adds to y: eight values an instruction."""
    return (r"\bREDG\.E\.ADD\.BF16x8\b",) if knobs.reduction == "atomic" else ()


SPEC = KernelSpec(
    family="moe",
    name="grouped",
    knobs=GroupedKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (threads(knobs) * knobs.blocks_per_sm)),
        require=(r"HMMA\.16816\.F32\.BF16", r"\bLDS\.128\b", r"\bLDGSTS\.E\..*128", *atomics(knobs)),
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: ARGUMENTS,
)


def blocks(knobs: Any, problem: MoeProblem) -> int:
    """A block for each tile of features of each tile that the schedule can have."""
    tiles = capacity(problem.m, problem.top, problem.experts, knobs.tile_m)
    return int(tiles * -(-problem.sizes(knobs.product)[0] // knobs.tile_n))


def launch(knobs: GroupedKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a tile, and the ring of each."""
    return Launch(blocks(knobs, problem), shared_bytes(knobs))


def product_of(problem: MoeProblem) -> str:
    """The product that answers a problem: of a whole layer the first."""
    if problem.product not in ("layer", "up", "down"):
        said = f"moe.grouped makes one product, and not product={problem.product}"
        raise KnobError(said, "use product='up' or product='down'")
    return "down" if problem.product == "down" else "up"


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    require_usual("grouped", problem, "activation", "weight_on", "reduction")
    return fixed_product(problem) | {"scale_range": problem.scale_range}


def fixed_product(problem: MoeProblem) -> dict[str, Any]:
    """Knobs that say which product it is, of which weights."""
    product = product_of(problem)
    return {
        "product": product, "activation": problem.activation if product == "up" else ACTIVATIONS[0],
        "reduction": problem.reduction if product == "down" else REDUCTIONS[0], "weight_on": problem.weight_on,
        "bias": problem.bias, "encoding": problem.encoding,
    }  # fmt: skip


def _block(tile_m: int, arch: Arch, full: bool) -> dict[str, Any]:
    """128 rows of W for a tile of rows: 64 sums a thread at most, 32 where sums of a scale's own come beside them."""
    warps_n, warps_m = {8: (4, 1), 16: (4, 1), 32: (4, 1), 64: (4, 2 if full else 1), 128: (4, 2)}[tile_m]
    tile_n = 64 if full and tile_m == 128 else 128
    return {
        "tile_n": tile_n, "tile_m": tile_m, "warps_n": warps_n, "warps_m": warps_m,
        "stages": 6 if tile_m < 64 else 4, "pdl": "pdl" in arch.features,
    }  # fmt: skip


def spread(problem: MoeProblem, tile_m: int) -> tuple[float, int]:
    """Experts that have rows, where all are as likely, and tiles that their rows fill, spread evenly."""
    busy = problem.experts_hit
    return busy, math.ceil(busy * math.ceil(problem.rows_an_expert / tile_m))


def _cost(problem: MoeProblem, tile_m: int, arch: Arch, multiprocessors: int) -> float:
    """Microseconds that linear.tile's model gives both products, of rows spread evenly and filled up to whole tiles."""
    knobs = _block(tile_m, arch, problem.scale_range == "full")
    busy, tiles = spread(problem, tile_m)
    total = 0.0
    for product in ("up", "down"):
        n, k = problem.sizes(product)
        plain = GroupedKnobs(product=product, **knobs)
        warps = plain.warps_n * plain.warps_m
        shape = Shape(
            plain.tile_n // TILE_ROWS // plain.warps_n, tile_m // COLUMN // plain.warps_m, warps, plain.tile_n, tile_m,
            TILE_K, plain.stages, 1, stage_bytes(plain), 2 if warps == 4 else 1,
        )  # fmt: skip
        once = busy * n * k * (TILE_BYTES / (TILE_ROWS * TILE_K)) / arch.memory_gbps / 1e3
        total += max(microseconds(shape, tiles * tile_m, n, k, arch, multiprocessors), once)
    return total


def tile_rows(problem: MoeProblem, arch: Arch, multiprocessors: int) -> int:
    """Rows of a tile of the schedule, which both products share.

    64 or 128, whichever the model holds for faster, and where MMA are quick beside memory also fewer. Of few rows, an
    expert has one or two: their tiles may be the smallest.
    """
    if problem.m <= MAX_ROWS:
        return fullest({tile_m: _cost(problem, tile_m, arch, multiprocessors) for tile_m in TILES_M}, problem)
    tiles = TILES_M[3:] if arch.major >= 12 else TILES_M[1:]
    return min(tiles, key=lambda tile_m: (_cost(problem, tile_m, arch, multiprocessors), tile_m))


def fullest(times: Mapping[int, float], problem: MoeProblem) -> int:
    """Of tiles whose times a model cannot tell from the shortest, the largest up to four times an expert's rows.

    The model spreads rows evenly, which no router does.
    """
    near = [tile_m for tile_m, time in times.items() if time <= NEAR * min(times.values())]
    most = 4 * problem.rows_an_expert
    return max((tile_m for tile_m in near if tile_m <= most), default=min(near))


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """A block of 128 rows of W for the tile of rows that the cost model holds for fastest."""
    return _block(tile_rows(problem, arch, multiprocessors), arch, problem.scale_range == "full")


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Tiles of all sizes, depths of the ring and orders of the blocks, best guess first."""
    base = _heuristic(problem, arch, multiprocessors)
    found = [base]
    for tile_m in TILES_M:
        block = _block(tile_m, arch, problem.scale_range == "full")
        for stages in (3, 4, 6):
            for group in (4, 8, 16):
                knobs = block | {"stages": stages, "group": group}
                if shared_bytes(GroupedKnobs(**knobs)) <= arch.shared_bytes and knobs != base | {"group": 8}:
                    found.append(knobs)
    return found


def check_reach(problem: MoeProblem, variant: Variant) -> None:
    """Offsets of rows have 32 bits, and grids 2^31 - 1 blocks."""
    require_grid(variant, blocks(variant.knobs, problem), f"m={problem.m}")
    size = problem.m * problem.hidden * 2
    if size > ADDRESSED:
        raise KnobError(
            f"x of m={problem.m} rows is {size} B; {variant.name} reaches {ADDRESSED} B",
            f"use at most {ADDRESSED // (2 * problem.hidden)} rows a call",
        )


def _check_problem(problem: MoeProblem, variant: Variant) -> None:
    """The same, and rows within a tile too are found by 32 bits."""
    check_reach(problem, variant)
    n, k = problem.sizes(variant.knobs.product)
    require_columns(variant.name, k, CODE_BYTES)
    require_reach(variant, k, problem.m * (1 if variant.knobs.product == "up" else problem.top), n, CODE_BYTES)


def _cases(variant: Variant) -> Iterator[Case]:
    """One row; a full tile, a ragged one, experts without rows, ids of none, ragged features, and the ring."""
    knobs = variant.knobs

    def inner(features: int) -> int:
        return -(-features // 32) * 32 if knobs.activation in UNGATED else max(32, -(-features // 64) * 32)

    # Of one, the first stage is still on its way to be filled, with zeros, when its last step is done.
    few, around = (knobs.stages - 1) * TILE_K, (knobs.stages + 1) * TILE_K - 32
    return scheduled_cases(variant, launch, knobs.tile_n + 32, around, inner, few)


def scheduled_cases(
    variant: Variant, launch: Callable[[Any, Any, int], Launch], n: int, k: int, inner: Callable[[int], int],
    few: int,
) -> Iterator[Case]:  # fmt: skip
    """A row of its own to each of more experts than take turns, of whole tiles of features and k; rows of tiles that
    are full, ragged and empty; a long row; and far ones.

    Args:
        launch: geometry by knobs, problem and multiprocessors.
        n, k: output and input features of the second.
        inner: features of h that the first product has for so many of its own.
        few: input features of the first, in whole steps.
    """
    knobs = variant.knobs
    alone = np.arange(knobs.group + 2, dtype=np.int32)[:, None]
    spread = np.full((knobs.tile_m // 2 + 2, 2), 1, np.int32)
    spread[1] = 3, 0
    spread[-1] = -1, 7
    up, whole = knobs.product == "up", 2 * knobs.tile_n
    if up and knobs.activation not in UNGATED:
        whole //= 2  # gates and ups of a feature are two rows of W
    lone = np.zeros((1, 1), np.int32)
    shapes = (len(alone), whole, few, alone), (4, inner(n) if up else n, k, spread), (1, 32, LONG, lone)
    for seed, (experts, features, columns, ids) in enumerate(shapes):
        hidden, features_of_h = (columns, features) if up else (features, columns)
        problem = MoeProblem(
            len(ids), experts, ids.shape[1], hidden, features_of_h, knobs.activation, product=knobs.product
        )
        yield product_case(variant, launch(knobs, problem, 1), problem, Routing(ids), seed)
    yield from far.far_products(variant, launch)


_RARER: tuple[dict[str, Any], ...] = (
    {"activation": "silu", "bias": False, "scale_range": "full", "tile_n": 64, "tile_m": 16, "stages": 3},
    {"activation": "relu2", "weight_on": "input", "tile_n": 64, "tile_m": 16, "stages": 3, "pdl": False},
    {"activation": "plain", "bias": False, "tile_n": 64, "tile_m": 16, "stages": 3},
    {"product": "down", "weight_on": "input", "bias": False, "tile_n": 64, "tile_m": 16, "stages": 3},
    {"product": "down", "reduction": "atomic", "tile_n": 64, "tile_m": 16, "stages": 3},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    tile=tiles.maker(SPEC),
    asked=tiles.first_product,
    rarer=_RARER,
)
