"""`linear.scaled`: X rounded to an MX format in the kernel, times MXFP4 weights, by block-scaled MMA or its twin.

Where E4M3 with a scale a row is asked for (`activation=fp8`) and `linear.wgmma_fp8` is not there, this is E4M3 with a
scale a block of 32, the least power of two that holds the block: no value is rounded more coarsely, at the same rate.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import far
from jitmx.kernels.linear.arguments import ARGUMENTS, make_case
from jitmx.kernels.linear.knobs import BIAS, DTYPE
from jitmx.kernels.linear.layout import ENCODINGS, TILE_K, TILE_ROWS
from jitmx.kernels.linear.limits import MOST_THREADS, require_grid, require_plain, require_resident, require_slices
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

ACTIVATIONS = ("mxfp8", "mxfp6", "mxfp4")
TILES_N, TILES_M = (64, 128, 256), (8, 16, 32, 64, 128)
CHUNK = 2  # tiles of 64 k that X is quantized by at a time
MOST_WARPS = 8
MOST_SPLIT = 16
MOST_BLOCKS = 8  # of a multiprocessor
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
TUNED = ("atom", "tile_n", "tile_m", "warps_n", "warps_m", "split_k", "blocks_per_sm", "pdl")

# Of the cost model: clocks from DRAM to registers, clock rate, and an L2 that holds what is read again (GB10: 24 MB).
LATENCY, CLOCK_MHZ, L2_BYTES = 1500, 2400, 24 << 20

# tile_n, tile_m, warps_n, warps_m: what heuristic and tuning choose from, the usual split into warps first.
GEOMETRIES = (
    (64, 8, 4, 1), (64, 16, 4, 1), (64, 32, 4, 1), (64, 64, 4, 2), (64, 64, 4, 1),
    (128, 8, 8, 1), (128, 16, 8, 1), (128, 32, 8, 1), (128, 32, 4, 1), (128, 64, 8, 1), (128, 64, 4, 2),
    (128, 128, 4, 2),
    (256, 8, 8, 1), (256, 16, 8, 1), (256, 32, 8, 1), (256, 64, 8, 1),
)  # fmt: skip


class Geometry(ABC):
    """Threads and registers of knobs with a tile over warps, of whatever kernel multiplies this way."""

    tile_n: int
    tile_m: int
    warps_n: int
    warps_m: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.warps_n * self.warps_m * 32

    @property
    @abstractmethod
    def registers(self) -> int:
        """Registers a thread with which the compiler spills nothing."""

    @property
    def register_limit(self) -> int:
        """Registers that a thread may use for blocks_per_sm blocks to fit."""
        warps = -(-self.threads // 32 * self.blocks_per_sm // 4)  # on each of the four register files
        return min(255, 512 // warps // 8 * 8)


@dataclass(frozen=True)
class ScaledKnobs(Geometry, Knobs):
    """Compile-time choices of `linear.scaled`. Every scale byte of the weight is served, 0 and NaN included."""

    scale_range: ClassVar[str] = "full"

    dtype: str = DTYPE
    bias: bool = BIAS
    residual: bool = knob(False, doc="add [rows, n] values")
    encoding: str = knob("nibble", choices=ENCODINGS, doc="order of the bits in a packed word")
    activation: str = knob("mxfp8", choices=ACTIVATIONS, doc="format that X is rounded to: E4M3, E2M3 or E2M1")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the scales of X take their exponent")
    atom: str = knob(
        "twin", choices=("twin", "e4m3", "mxf8f6f4", "mxf4"),
        doc="the product: block-scaled MMA of sm_12x (mxf4 for mxfp4, else mxf8f6f4), or MMA whose sums are scaled, in "
        "E4M3 (of mxfp8, from sm_89 on) or bf16",
    )  # fmt: skip
    tile_n: int = knob(64, choices=TILES_N, doc="features (rows of W) a block")
    tile_m: int = knob(8, choices=TILES_M, doc="tokens (rows of X) a block")
    warps_n: int = knob(4, choices=(4, 8), doc="warps side by side along the features")
    warps_m: int = knob(1, choices=(1, 2), doc="warps side by side along the tokens")
    split_k: int = knob(1, low=1, high=MOST_SPLIT, doc="blocks that share an output tile, each with a slice of k")
    blocks_per_sm: int = knob(1, low=1, high=MOST_BLOCKS, doc="blocks that must fit a multiprocessor: caps registers")
    pdl: bool = PDL

    @property
    def registers(self) -> int:
        """Registers a thread with which the compiler spills nothing: sums, X on its way, W, and the rest."""
        sums = self.tile_n * self.tile_m // self.threads
        vectors = -(-self.tile_m * CHUNK * TILE_K // 8 // self.threads)
        fragment = 4 if self.activation == "mxfp4" else 8
        rows = self.tile_n // TILE_ROWS // self.warps_n
        rest = 120 + 8 * max(0, vectors - 4) if self.atom in ("twin", "e4m3") else 42
        return sums + 9 * vectors + rows * (4 * CHUNK + 1 + fragment) + rest


def stage_bytes(activation: str, tile_m: int) -> int:
    """Shared memory of the codes and scales of a chunk of so many tokens."""
    code_bits = 4 if activation == "mxfp4" else 8
    return tile_m * (CHUNK * TILE_K // formats.BLOCK) * (formats.BLOCK * code_bits // 8 + 1)


def shared_bytes(knobs: ScaledKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    return 2 * stage_bytes(knobs.activation, knobs.tile_m) + (16 if knobs.split_k > 1 else 0)


def chunks(k: int) -> int:
    """Chunks of a row of X."""
    return -(-k // (CHUNK * TILE_K))


def atoms(activation: str, arch: Arch) -> tuple[str, ...]:
    """What multiplies a format of X on a target, the best guess first."""
    eight = activation in ("mxfp8", "fp8") and "cvt_e4m3" in arch.features
    if "mma_block_scale" in arch.features:
        return ("mxf4" if activation == "mxfp4" else "mxf8f6f4", "twin", *(("e4m3",) if eight else ()))
    # sm_89 has FP8 MMA and is short of issue; on others what was measured is the twin.
    return (("e4m3", "twin") if (arch.major, arch.minor) == (8, 9) else ("twin", "e4m3")) if eight else ("twin",)


def atom(activation: str, arch: Arch) -> str:
    """The one that heuristics take."""
    return atoms(activation, arch)[0]


def most_blocks(knobs: Any) -> int:
    """Blocks with a Geometry that fit the registers of a multiprocessor; 0 where not one does."""
    fitting = (b for b in range(1, MOST_BLOCKS + 1) if b * knobs.threads <= MOST_THREADS)
    return max(
        (b for b in fitting if knobs.registers <= dataclasses.replace(knobs, blocks_per_sm=b).register_limit), default=0
    )


def _check(knobs: ScaledKnobs, arch: Arch) -> None:
    check_atom(knobs.atom, "activation", knobs.activation, arch)
    check_geometry(knobs)


def check_atom(asked: str, name: str, value: str, arch: Arch) -> None:
    """Raise KnobError where an atom does not multiply the format that the knob `name` has, on this target."""
    if asked not in (able := atoms(value, arch)):
        raise KnobError(f"atom={asked!r} is not what multiplies {name}={value!r} on {arch}", f"use atom={able[0]!r}")


def check_geometry(knobs: Geometry) -> None:
    """Raise KnobError where a tile does not divide among its warps, or does not fit their registers."""
    for tile, size, warps, unit in (
        ("tile_n", knobs.tile_n, knobs.warps_n, TILE_ROWS), ("tile_m", knobs.tile_m, knobs.warps_m, 8)
    ):  # fmt: skip
        if size % (warps * unit):
            raise KnobError(
                f"warps_{tile[-1]}={warps} warps of {unit} do not divide {tile}={size}",
                f"the nearest legal value is warps_{tile[-1]}={size // unit}",
            )
    if knobs.tile_n > 32 * knobs.warps_n:
        raise KnobError(
            f"warps_n={knobs.warps_n} warps hold at most 32 features each, not tile_n={knobs.tile_n}",
            f"the nearest legal value is warps_n={knobs.tile_n // 32}",
        )
    if knobs.threads > 32 * MOST_WARPS:
        raise KnobError(
            f"warps_n={knobs.warps_n} by warps_m={knobs.warps_m} is over {MOST_WARPS} warps a block",
            f"the nearest legal value is warps_n={MOST_WARPS // knobs.warps_m}",
        )
    require_resident(knobs.blocks_per_sm, knobs.threads)
    if knobs.registers > knobs.register_limit:
        most = most_blocks(knobs)
        remedy = f"the nearest legal value is blocks_per_sm={most}" if most else "use more warps or a smaller tile"
        raise KnobError(
            f"tile_n={knobs.tile_n} by tile_m={knobs.tile_m} over {knobs.threads} threads takes {knobs.registers} "
            f"registers each, over the {knobs.register_limit} of blocks_per_sm={knobs.blocks_per_sm}",
            remedy,
        )


def contract(knobs: Geometry, atom: str, *more: str) -> Contract:
    """What the machine code of a product by an atom must be; `more` are instructions that it must have besides."""
    require = {
        "twin": r"\bHMMA\.16816\.F32\.BF16",
        "e4m3": r"\bQMMA\.16832\.F32\.E4M3\.E4M3",
        "mxf8f6f4": r"\bQMMA\.SF\.16832",
        "mxf4": r"\bOMMA\.SF\.16864",
    }
    return Contract(
        max_registers=knobs.register_limit,
        require=(require[atom], r"\bLDS\.(64|128)\b", r"\bLDG\.E\..*128", *more),
        forbid=() if atom == "twin" else (r"\bHMMA",),
    )


SPEC = KernelSpec(
    family="linear",
    name="scaled",
    knobs=ScaledKnobs,
    contract=lambda knobs, arch: contract(knobs, knobs.atom),
    check=_check,
    shared_bytes=shared_bytes,
    threads=lambda knobs: knobs.threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: ScaledKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """A block for each output tile and slice of k."""
    tiles = -(-problem.n // knobs.tile_n) * -(-problem.m // knobs.tile_m)
    workspace = 0
    if knobs.split_k > 1:
        counters = -(-tiles // 32) * 128
        workspace = counters + tiles * knobs.split_k * knobs.tile_n * knobs.tile_m * 4
    return Launch(tiles * knobs.split_k, shared_bytes(knobs), workspace=workspace)


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """What weight and tensors bring with them."""
    if problem.activation == "none":
        raise KnobError("linear.scaled does not take activation='none', only mxfp8, mxfp6 or mxfp4")
    require_plain("scaled", problem, "activation", "residual")
    if problem.residual == "pair":
        raise KnobError("linear.scaled does not take residual='pair', only residual=True or residual=False")
    finer = {"activation": "mxfp8", "scale_rule": "ceil"} if problem.activation == "fp8" else {}
    return problem.pick("dtype", "bias", "residual", "encoding", "activation", "scale_rule") | finer


def _geometries(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[tuple[float, ScaledKnobs]]:
    """Knobs for every geometry and split that fits, with the model's microseconds, fastest first."""
    base = _fixed(problem) | {"atom": atom(problem.activation, arch), "pdl": "pdl" in arch.features}
    found = []
    for tile_n, tile_m, warps_n, warps_m in GEOMETRIES:
        knobs = ScaledKnobs(**base, tile_n=tile_n, tile_m=tile_m, warps_n=warps_n, warps_m=warps_m)
        blocks = most_blocks(knobs)
        if not blocks:
            continue
        knobs = dataclasses.replace(knobs, blocks_per_sm=blocks)
        for split in SPLITS:
            if split <= chunks(problem.k):
                choice = dataclasses.replace(knobs, split_k=split)
                found.append((microseconds(choice, problem, arch, multiprocessors), choice))
    return sorted(found, key=lambda item: item[0])


def microseconds(knobs: ScaledKnobs, problem: LinearProblem, arch: Arch, multiprocessors: int) -> float:
    """How long a launch takes by a model of the chip: the slowest of matrix units, issue, L2 and DRAM, with latencies.

    A chunk costs a multiprocessor the most of three, and an eighth of their sum for what does not overlap: its MMA
    (16 x 8 x 64 in 16 clocks, FP4 in 4; the twin issues instructions for 46, in E4M3 for 34), instructions at four a
    clock (60 a warp for 256 values quantized, 64 for 16 x 64 weights put in place, 16 of them for FP4), and bytes at 32
    a clock. Blocks side by side share that, but a chunk never takes less than the way to DRAM and back.
    """
    row_tiles, tokens = knobs.tile_n // TILE_ROWS, knobs.tile_m
    step = {"twin": 46, "e4m3": 34, "mxf8f6f4": 16, "mxf4": 4}[knobs.atom]
    products = CHUNK * step * row_tiles * tokens // 8
    issue = tokens * 16 * 60 // 128 + row_tiles * knobs.warps_m * (4 if knobs.atom == "mxf4" else 16) + 40
    read = (tokens * 256 + knobs.tile_n * 68 * knobs.warps_m) // 32
    if knobs.atom in ("twin", "e4m3"):
        issue += products
    chunk = max(products, issue, read) + (products + issue + read) // 8

    columns = -(-problem.m // tokens)
    tiles = -(-problem.n // knobs.tile_n) * columns
    depth = -(-chunks(problem.k) // knobs.split_k)
    rounds, rest = divmod(-(-tiles * knobs.split_k // multiprocessors), knobs.blocks_per_sm)
    clocks = sum(
        count * (2 * LATENCY + depth * max(blocks * chunk, LATENCY))
        for count, blocks in ((rounds, knobs.blocks_per_sm), (min(rest, 1), rest))
    )
    if knobs.split_k > 1:
        clocks += 2 * LATENCY + 8 * knobs.split_k * tiles * knobs.tile_n * tokens // (32 * multiprocessors)
    weight = problem.n * problem.k * 17 // 32
    passes = -(-columns // 8) if weight > L2_BYTES // 2 else 1
    dram = weight * passes + 2 * problem.m * (problem.k + problem.n)
    return max(clocks / CLOCK_MHZ, dram / (arch.memory_gbps * 1e3)) + clocks / CLOCK_MHZ / 20


def tile_named(kernel: str, m: int, n: int, k: int | None, stages: int | None, only: int | None) -> dict[str, Any]:
    """The geometry with a tile; KnobError where there is none, or not with so many k and, where `only` some, stages."""
    shapes = {(tile_m, tile_n): (warps_n, warps_m) for tile_n, tile_m, warps_n, warps_m in reversed(GEOMETRIES)}
    if (m, n) not in shapes or k not in (None, CHUNK * TILE_K) or (only and stages not in (None, only)):
        near = min(shapes, key=lambda shape: (abs(shape[0] - m), abs(shape[1] - n)))
        raise KnobError(
            f"{kernel} has no tile {m}x{n}{f'x{k}' if k else ''}{f's{stages}' if only and stages else ''}",
            f"the nearest it has is {near[0]}x{near[1]}x{CHUNK * TILE_K}{f's{only}' if only else ''}",
        )
    warps_n, warps_m = shapes[m, n]
    return {"tile_m": m, "tile_n": n, "warps_n": warps_n, "warps_m": warps_m}


def _check_problem(problem: LinearProblem, variant: Variant) -> None:
    there = chunks(problem.k)
    said = f"{there} chunks of {CHUNK * TILE_K} in k={problem.k}"
    require_slices(variant.knobs.split_k, min(there, MOST_SPLIT), said)
    require_grid(variant, launch(variant.knobs, problem, 1).blocks, f"m={problem.m}, n={problem.n}")


def _cases(variant: Variant) -> Iterator[Case]:
    """A lone feature; whole packed tiles; several tiles of features and tokens, odd n and even, that no packed tiles
    fill; slices of k of one chunk, of many, uneven; more tiles of tokens than take turns at a weight, all whole; a long
    row.
    """
    knobs = variant.knobs
    deep = CHUNK * knobs.split_k * TILE_K
    shapes = (
        (1, 1, 32),
        (knobs.tile_m, 48, 2 * deep),
        (knobs.tile_m + 3, knobs.tile_n + 25, 3 * deep + (knobs.split_k - 1) * CHUNK * TILE_K - 32),
        ((_GROUP + 1) * knobs.tile_m, 2 * knobs.tile_n - 2, 32),
        (1, 8, far.LONG),
    )
    for seed, (rows, n, k) in enumerate(shapes):
        yield make_case(variant, launch(knobs, LinearProblem(rows, n, k), 1), rows, n, k, seed)
    k = (knobs.split_k - 1) * CHUNK * TILE_K + 96
    yield from far.far_tiles(variant, launch, k, knobs.split_k, lambda tiles: -(-tiles // 32) * 128)


_GROUP = 8  # tiles of tokens that take turns, as the template has it

_RARER: tuple[dict[str, Any], ...] = (
    {"activation": "mxfp4", "encoding": "rotated", "atom": "twin", "residual": True, "pdl": False},
    {"dtype": "fp16", "bias": True, "scale_rule": "even", "split_k": 2},
    {"activation": "mxfp6", "residual": True, "scale_rule": "ceil", "split_k": 2},
    {"activation": "mxfp8", "atom": "e4m3", "bias": True, "scale_rule": "ceil"},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    # What the model finds fastest: it rests on published rates, not on measurements of a card.
    heuristic=lambda problem, arch, multiprocessors: _geometries(problem, arch, multiprocessors)[0][1].pick(*TUNED),
    cases=_cases,
    check=_check_problem,
    candidates=lambda problem, arch, multiprocessors: [
        knobs.pick(*TUNED) for _, knobs in _geometries(problem, arch, multiprocessors)[:40]
    ],
    # A chunk is 128 k in two stages, whatever the tile.
    tile=lambda m, n, k, stages: tile_named("linear.scaled", m, n, k, stages, 2),
    rarer=_RARER,
)
