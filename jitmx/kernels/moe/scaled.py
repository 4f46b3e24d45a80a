"""`moe.scaled`: as `moe.grouped`, with activations in an MX format, by block-scaled MMA of sm_12x or its twin.

The first product gathers rows of x in bf16 and rounds them on the way in; it rounds h on its way out, and leaves codes
in the order in which the second product's MMA take them (jitmx.kernels.moe.hidden). Each of the second product's blocks
reads all of h: for hidden=2880 and 128 rows of W a block that is 23 times. With its one write, a value of h moves 24.8
bytes in mxfp8 and 12.8 in mxfp4, where rounding it when it is read would move 48, and would round it 23 times.

No product is split along k. For few rows that would fill multiprocessors which have no block; narrower tiles of W do
the same and need no second pass: one row to four experts of gpt-oss takes 180 blocks of 128 rows of W13 and 92 of W2,
or 360 and 180 of 64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import scaled as dense
from jitmx.kernels.linear.layout import ENCODINGS, TILE_BYTES, TILE_K, TILE_ROWS
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.moe import grouped, tiles
from jitmx.kernels.moe.grouped_arguments import ARGUMENTS
from jitmx.kernels.moe.limits import require_of_product, require_usual
from jitmx.kernels.moe.problem import ACTIVATIONS, MX_FORMATS, REDUCTIONS, UNGATED, WEIGHT_ON, MoeProblem
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

TILES_N, TILES_M = dense.TILES_N, dense.TILES_M
STAGES = 4  # of the ring of the second product
MOST_CANDIDATES = 48
TUNED = ("atom", "tile_n", "tile_m", "warps_n", "warps_m", "stages", "group", "blocks_per_sm", "pdl")


@dataclass(frozen=True)
class ScaledKnobs(dense.Geometry, Knobs):
    """Compile-time choices of `moe.scaled`. Every scale byte of the weight is served, 0 and NaN included."""

    scale_range: ClassVar[str] = "full"

    product: str = knob("up", choices=("up", "down"), doc="h = act(W13 Q(x) + b13), or its parts w (W2 Q(h) + b2)")
    activation: str = knob("swiglu_oai", choices=ACTIVATIONS + UNGATED, doc="what makes h of gate and up, or of up")
    bias: bool = knob(True, doc="the product has a bias")
    weight_on: str = knob("output", choices=WEIGHT_ON, doc="whether the router's weight multiplies W2 h + b2 or W13 x")
    reduction: str = knob("ordered", choices=REDUCTIONS, doc="parts of y by pair for moe.combine, or atomics on y")
    encoding: str = knob("nibble", choices=ENCODINGS, doc="order of the bits in a packed word")
    x_format: str = knob("mxfp8", choices=MX_FORMATS, doc="format that x and h are rounded to: E4M3, E2M3 or E2M1")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the scales of x and h take their exponent")
    atom: str = knob(
        "twin", choices=("twin", "e4m3", "mxf8f6f4", "mxf4"),
        doc="the product: block-scaled MMA of sm_12x (mxf4 for mxfp4, else mxf8f6f4), or MMA whose sums are scaled, in "
        "E4M3 (of mxfp8, from sm_89 on) or bf16",
    )  # fmt: skip
    tile_n: int = knob(128, choices=TILES_N, doc="rows of W a block")
    tile_m: int = knob(16, choices=TILES_M, doc="rows of a tile of the schedule, at most")
    warps_n: int = knob(8, choices=(4, 8), doc="warps that share tile_n")
    warps_m: int = knob(1, choices=(1, 2), doc="warps that share tile_m")
    stages: int = knob(STAGES, low=2, high=8, doc="chunks of h in shared memory, in the second product")
    group: int = knob(8, choices=(1, 2, 4, 8, 16, 32), doc="tiles of rows that take turns at a tile of weights")
    blocks_per_sm: int = knob(1, low=1, high=dense.MOST_BLOCKS, doc="blocks that must fit a multiprocessor")
    pdl: bool = PDL

    @property
    def registers(self) -> int:
        """Registers a thread with which the compiler spills nothing, from those of linear.scaled.

        Beside it there are the next chunk of W and where rows start; h takes none on its way. Codes of eight bits are
        read for all columns at once: that is what compiling every geometry showed.
        """
        rows, columns = self.tile_n // TILE_ROWS // self.warps_n, self.tile_m // 8 // self.warps_m
        vectors = -(-self.tile_m * dense.CHUNK * TILE_K // 8 // self.threads)
        more = vectors if self.product == "up" else -9 * vectors
        if self.product == "down" and self.atom == "mxf8f6f4":
            more += (4 * columns if columns >= 8 else 0) + (4 if self.threads == 128 else 0)
        return _dense(self).registers + rows * (4 * dense.CHUNK + 1) + more


def _dense(knobs: ScaledKnobs) -> dense.ScaledKnobs:
    """The same product of one weight, which has a model of registers and time."""
    return dense.ScaledKnobs(
        activation=knobs.x_format, atom=knobs.atom, tile_n=knobs.tile_n, tile_m=knobs.tile_m, warps_n=knobs.warps_n,
        warps_m=knobs.warps_m, blocks_per_sm=knobs.blocks_per_sm, pdl=knobs.pdl,
    )  # fmt: skip


def shared_bytes(knobs: ScaledKnobs) -> int:
    """Dynamic shared memory of a launch, as union Shared of the template lays it out."""
    stages = 2 if knobs.product == "up" else knobs.stages
    return max(stages * dense.stage_bytes(knobs.x_format, knobs.tile_m), grouped.rows_bytes(knobs))


def _check(knobs: ScaledKnobs, arch: Arch) -> None:
    grouped.check_product(knobs, arch)
    require_of_product(knobs, "scale_rule", "up", formats.SCALE_RULES[0])
    require_of_product(knobs, "stages", "down", STAGES)
    dense.check_atom(knobs.atom, "x_format", knobs.x_format, arch)
    dense.check_geometry(knobs)


def _contract(knobs: ScaledKnobs, arch: Arch) -> Contract:
    ring = () if knobs.product == "up" else (r"\bLDGSTS\.E\..*128",)
    return dense.contract(knobs, knobs.atom, *ring, *grouped.atomics(knobs))


SPEC = KernelSpec(
    family="moe",
    name="scaled",
    knobs=ScaledKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=lambda knobs: knobs.threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: ScaledKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block for each tile of features of each tile that the schedule can have."""
    return Launch(grouped.blocks(knobs, problem), shared_bytes(knobs))


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    require_usual("scaled", problem, "activation", "x_format", "weight_on", "reduction")
    fixed = grouped.fixed_product(problem)
    if problem.x_format not in MX_FORMATS:
        raise KnobError(f"moe.scaled does not take x_format={problem.x_format!r}, only mxfp8, mxfp6 or mxfp4")
    rule = problem.scale_rule if fixed["product"] == "up" else formats.SCALE_RULES[0]
    return fixed | {"x_format": problem.x_format, "scale_rule": rule}


def _blocks(problem: MoeProblem, product: str, arch: Arch) -> Iterator[ScaledKnobs]:
    """Knobs of every geometry that fits."""
    fixed = _fixed(dataclasses.replace(problem, product=product))
    best: dict[str, Any] = {"atom": dense.atom(problem.x_format, arch), "pdl": "pdl" in arch.features}
    for tile_n, tile_m, warps_n, warps_m in dense.GEOMETRIES:
        knobs = ScaledKnobs(**fixed, **best, tile_n=tile_n, tile_m=tile_m, warps_n=warps_n, warps_m=warps_m)
        fitting = min(dense.most_blocks(knobs), arch.shared_bytes // shared_bytes(knobs))
        if fitting and knobs.threads >= tile_m:
            yield dataclasses.replace(knobs, blocks_per_sm=fitting)


def _microseconds(knobs: ScaledKnobs, problem: MoeProblem, arch: Arch, multiprocessors: int) -> float:
    """What the model of linear.scaled gives the product, of rows spread evenly and filled up to whole tiles."""
    n, k = problem.sizes(knobs.product)
    busy, tiles = grouped.spread(problem, knobs.tile_m)
    one = LinearProblem(tiles * knobs.tile_m, n, k, encoding=knobs.encoding, activation=knobs.x_format)
    once = busy * n * k * (TILE_BYTES / (TILE_ROWS * TILE_K)) / arch.memory_gbps / 1e3
    return max(dense.microseconds(_dense(knobs), one, arch, multiprocessors), once)


def _by_time(problem: MoeProblem, product: str, arch: Arch, multiprocessors: int) -> list[tuple[float, ScaledKnobs]]:
    """Knobs of a product with the model's microseconds, fastest first."""
    timed = ((_microseconds(knobs, problem, arch, multiprocessors), knobs) for knobs in _blocks(problem, product, arch))
    return sorted(timed, key=lambda item: item[0])


def tile_rows(problem: MoeProblem, arch: Arch, multiprocessors: int) -> int:
    """Rows of a tile of the schedule, which both products share."""
    best: dict[int, list[float]] = {}
    for product in ("up", "down"):
        fastest: dict[int, float] = {}
        for time, knobs in _by_time(problem, product, arch, multiprocessors):
            fastest.setdefault(knobs.tile_m, time)
        for tile_m, time in fastest.items():
            best.setdefault(tile_m, []).append(time)
    return grouped.fullest({tile_m: sum(times) for tile_m, times in best.items() if len(times) == 2}, problem)


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """What the model finds fastest: it rests on published rates, not on measurements of a card."""
    tile_m = tile_rows(problem, arch, multiprocessors)
    timed = _by_time(problem, grouped.product_of(problem), arch, multiprocessors)
    return next(knobs for _, knobs in timed if knobs.tile_m == tile_m).pick(*TUNED)


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """The geometries that the model likes best, in orders of blocks and depths of the ring, best guess first."""
    product = grouped.product_of(problem)
    found = [_heuristic(problem, arch, multiprocessors)]
    for _, knobs in _by_time(problem, product, arch, multiprocessors):
        for stages in (3, STAGES, 6) if product == "down" else (STAGES,):
            for group in (4, 8, 16):
                choice = dataclasses.replace(knobs, stages=stages, group=group)
                if shared_bytes(choice) <= arch.shared_bytes and (tuned := choice.pick(*TUNED)) not in found:
                    found.append(tuned)
    return found[:MOST_CANDIDATES]


def _cases(variant: Variant) -> Iterator[Case]:
    """One row of one block; a full tile, a ragged one, experts without rows, ids of none, a ring that goes round."""
    deep = (variant.knobs.stages + 1) * dense.CHUNK * TILE_K - formats.BLOCK
    whole = dense.CHUNK * TILE_K
    return grouped.scheduled_cases(variant, launch, variant.knobs.tile_n + 32, deep, lambda n: n, whole)  # h: chunks


_RARER: tuple[dict[str, Any], ...] = (
    {"encoding": "rotated", "activation": "silu", "scale_rule": "ceil", "tile_n": 64, "warps_n": 4, "bias": False},
    {"activation": "relu2", "weight_on": "input", "x_format": "mxfp4", "scale_rule": "even", "tile_n": 64,
     "warps_n": 4},
    {"activation": "plain", "x_format": "mxfp6", "tile_n": 64, "warps_n": 4, "pdl": False},
    {"x_format": "mxfp8", "atom": "e4m3", "tile_n": 64, "warps_n": 4},
    {"product": "down", "x_format": "mxfp8", "weight_on": "input", "reduction": "atomic", "tile_n": 64, "warps_n": 4,
     "bias": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=grouped.check_reach,
    candidates=_candidates,
    # A chunk is 128 k, whatever the tile.
    tile=lambda m, n, k, stages: (
        dense.tile_named("moe.scaled", m, n, k, stages, None) | {"blocks_per_sm": 1, "stages": stages or STAGES}
    ),
    asked=tiles.first_product,
    rarer=_RARER,
)
