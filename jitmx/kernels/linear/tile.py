"""`linear.tile`: any number of rows of X on every target; m16n8k16 tensor cores, X in a ring in shared memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel, spread
from jitmx.kernels.linear import far
from jitmx.kernels.linear.arguments import ARGUMENTS, make_case
from jitmx.kernels.linear.knobs import BIAS, DTYPE, RESIDUAL, SCALE_RANGE
from jitmx.kernels.linear.layout import CODE_BYTES, ENCODINGS, TILE_BYTES, TILE_K, TILE_ROWS
from jitmx.kernels.linear.limits import (
    REACH,
    has_clusters,
    most_blocks,
    registers_left,
    require_columns,
    require_grid,
    require_plain,
    require_reach,
    require_registers,
    require_resident,
    require_slices,
)
from jitmx.kernels.linear.mxfp8 import MXFP8_TILE_BYTES
from jitmx.kernels.linear.problem import WEIGHTS, LinearProblem
from jitmx.kernels.linear.tile_cost import Shape, microseconds
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

MAX_SUMS = 128  # registers of accumulators a thread: as many again are left for fragments and addresses
COLUMN = 8  # tokens of an MMA


class Tiled(Protocol):
    """Knobs with a tile that warps share, of whatever kernel multiplies this way."""

    @property
    def tile_n(self) -> int: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def warps_n(self) -> int: ...
    @property
    def warps_m(self) -> int: ...


@dataclass(frozen=True)
class TileKnobs(Knobs):
    """Compile-time choices of `linear.tile`."""

    dtype: str = DTYPE
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    weight: str = knob("mxfp4", choices=WEIGHTS, doc="format of the weight")
    encoding: str = knob("rotated", choices=ENCODINGS, doc="order of the bits in a packed word; rotated with mxfp8")
    scale_range: str = SCALE_RANGE
    tile_n: int = knob(128, choices=tuple(range(16, 257, 16)), doc="rows of W a block")
    tile_m: int = knob(128, choices=tuple(range(8, 129, 8)), doc="rows of X a block")
    tile_k: int = knob(64, choices=(64, 128, 256), doc="columns of X and W a stage")
    warps_n: int = knob(4, low=1, high=8, doc="warps that share tile_n")
    warps_m: int = knob(2, low=1, high=4, doc="warps that share tile_m")
    stages: int = knob(4, low=3, high=8, doc="stages of the ring")
    fetch: str = knob(
        "early", choices=("early", "late"), doc="start the copies of a stage before a stage's last block, or after it"
    )
    split_k: int = knob(1, low=1, high=16, doc="blocks that share a tile, each with a slice of k")
    exchange: str = knob(
        "memory", choices=("memory", "cluster"), doc="how they bring parts together: in device memory, or as a cluster"
    )
    scales: str = knob("bytes", choices=("bytes", "halves"), doc="mxfp4 in bf16: a scale is a register's, or a half's")
    group: int = knob(8, choices=(1, 2, 4, 8, 16, 32), doc="tiles of tokens that take turns at a tile of weights")
    blocks_per_sm: int = knob(1, low=1, high=8, doc="blocks that must fit a multiprocessor: caps registers")
    footprint: int = knob(
        0, low=0, high=227, doc="KiB of shared memory that a block takes at least: fewer share a multiprocessor"
    )
    pdl: bool = PDL


def stage_bytes(knobs: TileKnobs) -> int:
    """Shared memory of one stage of the ring."""
    packed = MXFP8_TILE_BYTES if knobs.weight == "mxfp8" else TILE_BYTES
    return knobs.tile_m * knobs.tile_k * 2 + knobs.tile_n // TILE_ROWS * (knobs.tile_k // TILE_K) * packed


def shared_bytes(knobs: TileKnobs) -> int:
    """Dynamic shared memory of a launch: the ring, in whose place parts of a cluster and the tile of Y go out."""
    return max(needed_bytes(knobs), knobs.footprint * 1024)


def needed_bytes(knobs: TileKnobs) -> int:
    """The same without the footprint."""
    parts = knobs.tile_n * knobs.tile_m * 4 if knobs.exchange == "cluster" else 0
    return max(knobs.stages * stage_bytes(knobs), parts + knobs.tile_m * (knobs.tile_n * 2 + 16))


def threads(knobs: Tiled) -> int:
    """Threads a block."""
    return knobs.warps_n * knobs.warps_m * 32


def _check(knobs: TileKnobs, arch: Arch) -> None:
    for tile, warps, unit in (("tile_n", "warps_n", TILE_ROWS), ("tile_m", "warps_m", COLUMN)):
        size, count = getattr(knobs, tile), getattr(knobs, warps)
        if size % (count * unit):
            nearest = max(1, round(size / (count * unit))) * count * unit
            raise KnobError(
                f"{tile}={size} is not a multiple of {unit} for each of {warps}={count}",
                f"the nearest legal value is {nearest}",
            )
    require_sums(knobs)
    require_resident(knobs.blocks_per_sm, threads(knobs))
    if knobs.exchange == "cluster":
        if not has_clusters(arch):
            raise KnobError("exchange='cluster' needs sm_90 or sm_100", f"on {arch} use exchange='memory'")
        if not 2 <= knobs.split_k <= 8:
            raise KnobError(
                f"exchange='cluster' takes 2 to 8 blocks a tile, not split_k={knobs.split_k}", "use exchange='memory'"
            )
    if knobs.scales == "halves" and (knobs.weight, knobs.dtype, knobs.scale_range) != ("mxfp4", "bf16", "normal"):
        raise KnobError(
            f"scales='halves' with weight={knobs.weight!r}, dtype={knobs.dtype!r} and "
            f"scale_range={knobs.scale_range!r}: it is for mxfp4 weights with normal scales in "
            "bf16",
            "use scales='bytes'",
        )
    if knobs.footprint and knobs.footprint * 1024 <= needed_bytes(knobs):
        raise KnobError(
            f"footprint={knobs.footprint} selects nothing: a block takes {needed_bytes(knobs)} B anyway",
            "leave it at 0",
        )
    if knobs.weight == "mxfp8" and knobs.encoding != "rotated":
        raise KnobError(f"encoding={knobs.encoding!r} is of mxfp4 weights", "with weight='mxfp8' leave it at 'rotated'")
    require_registers(knobs.warps_n * knobs.warps_m, knobs.blocks_per_sm, _least_registers(knobs))


def sums_per_thread(knobs: Tiled) -> int:
    """Accumulators of a thread, in registers."""
    return knobs.tile_n * knobs.tile_m // threads(knobs)


def require_sums(knobs: Tiled) -> None:
    """Raise KnobError where a thread's accumulators leave too few registers for the rest."""
    sums = sums_per_thread(knobs)
    if sums > MAX_SUMS:
        raise KnobError(
            f"{sums} sums a thread (tile_n * tile_m / threads) are over {MAX_SUMS}, which leave registers for the rest",
            "use more warps or a smaller tile",
        )


def _least_registers(knobs: TileKnobs) -> int:
    """Registers that a thread takes at least: sums, fragments, scales of sums, what is on its way to a stage.

    With those of a lone block the compiler finds its way whatever the tile, so that no more are asked for.
    """
    rows, columns = knobs.tile_n // TILE_ROWS // knobs.warps_n, knobs.tile_m // COLUMN // knobs.warps_m
    folded = (knobs.weight, knobs.dtype, knobs.scale_range) == ("mxfp4", "bf16", "normal")
    copies = {64: 0, 128: 12, 256: 26}[knobs.tile_k]
    return min(240, 7 * sums_per_thread(knobs) // 5 + 9 * rows + 6 * columns + 38 * (not folded) + copies - 34)


def _contract(knobs: TileKnobs, arch: Arch) -> Contract:
    require = [
        r"HMMA\.16816\.F32" + (r"\.BF16" if knobs.dtype == "bf16" else ""), r"\bLDS\.128\b", r"\bLDGSTS\.E\..*128",
    ]  # fmt: skip
    return Contract(
        max_registers=min(255, 65536 // (threads(knobs) * knobs.blocks_per_sm)),
        require=tuple(require),
    )


SPEC = KernelSpec(
    family="linear",
    name="tile",
    knobs=TileKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: TileKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """A block for each slice of each tile of Y; with slices, scratch for a counter a tile and the parts in fp32."""
    tiles = -(-problem.n // knobs.tile_n) * -(-problem.m // knobs.tile_m)
    workspace = 0
    if knobs.exchange == "cluster":
        return Launch(tiles * knobs.split_k, shared_bytes(knobs), cluster=knobs.split_k)
    if knobs.split_k > 1:
        workspace = -(-tiles * 4 // 16) * 16 + tiles * knobs.split_k * knobs.tile_n * knobs.tile_m * 4
    return Launch(tiles * knobs.split_k, shared_bytes(knobs), workspace=workspace)


def _packed_bytes(problem: LinearProblem) -> int:
    """Codes of a packed tile."""
    return CODE_BYTES * (2 if problem.weight == "mxfp8" else 1)


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """What weight and tensors bring with them."""
    require_plain("tile", problem, "weight", "residual")
    require_columns("linear.tile", problem.k, _packed_bytes(problem))
    given = problem.pick("dtype", "bias", "residual", "weight", "encoding", "scale_range")
    return given if problem.weight == "mxfp4" else given | {"encoding": "rotated"}


def _check_problem(problem: LinearProblem, variant: Variant) -> None:
    """Every slice of k has a stage; for the rest any variant serves any shape, up to what a grid and offsets hold."""
    knobs = variant.knobs
    steps = -(-problem.k // knobs.tile_k)
    require_slices(knobs.split_k, steps, f"{steps} stages of k={problem.k}")
    require_grid(variant, launch(knobs, problem, 1).blocks, f"m={problem.m}, n={problem.n}")
    require_reach(variant, problem.k, problem.m, problem.n, _packed_bytes(problem))


def _cases(variant: Variant) -> Iterator[Case]:
    """Two short rows of whole steps of k; ragged rows, features and k with rows of Y that start anywhere; a whole tile
    of rows, of whole packed tiles over two tiles; a lone feature, and a lone row in the last tile.

    The second of the short rows starts in the middle of a vector. The ring goes round in every slice of k of the third,
    of which all but one are a step longer than the shortest.
    Where few enough tiles of tokens take turns at a weight, there is one more, all of it whole tiles; then a long row.
    """
    knobs = variant.knobs
    around = knobs.split_k * (knobs.stages + 1) * knobs.tile_k
    shapes: tuple[tuple[int, int, int], ...] = (
        (2, 4, knobs.split_k * knobs.tile_k),
        (2 * knobs.tile_m - 3, knobs.tile_n + 11, knobs.split_k * knobs.tile_k + 32),
        (knobs.tile_m, 2 * knobs.tile_n - TILE_ROWS, around + (knobs.split_k - 1) * knobs.tile_k - 32),
        (knobs.tile_m + 1, 1, knobs.split_k * knobs.tile_k),
    )
    if knobs.group * knobs.tile_m <= 128:
        shapes += (((knobs.group + 1) * knobs.tile_m, 2 * knobs.tile_n, knobs.split_k * knobs.tile_k),)
    shapes += ((1, 8, far.LONG),)
    for seed, (rows, n, k) in enumerate(shapes):
        yield make_case(variant, launch(knobs, LinearProblem(rows, n, k), 1), rows, n, k, seed)
    parts = knobs.split_k if knobs.exchange == "memory" else 1
    k = (knobs.split_k - 1) * knobs.tile_k + 96
    yield from far.far_tiles(variant, launch, k, parts, lambda tiles: -(-tiles * 4 // 16) * 16)


# Blocks that a heuristic weighs: rows of W, warps over them, warps over tokens. 16 or 32 rows a warp.
_BLOCKS = (
    (32, 2, 1), (64, 2, 1), (64, 4, 1), (96, 3, 1), (128, 4, 1), (128, 8, 1), (128, 4, 2), (160, 5, 2), (192, 6, 2),
    (256, 8, 1),
)  # fmt: skip
_TOKENS = (8, 16, 32, 48, 64, 96, 128)
_RESIDENT = 4  # blocks a multiprocessor, at most
_RESERVED = 1024  # bytes of shared memory that a block costs beside its own
_PARTS = 1.6  # values of all parts for each register that a thread may have: of more, compilers were seen to spill some
_UNROLLED = 0.9  # the same of three or four parts beside a residual, which compilers unroll


def _spares_memory(knobs: TileKnobs) -> bool:
    """Whether compilers were seen to keep everything in registers: more of k unrolled takes more beside the sums."""
    sums = sums_per_thread(knobs)
    if knobs.dtype == "fp16" or knobs.scale_range == "full":  # a sum of its own for each block of 32
        return sums * knobs.tile_k <= 48 * 64 and threads(knobs) <= 256
    if knobs.weight == "mxfp8":
        return sums <= 96 and threads(knobs) <= 256
    return knobs.tile_k == 64 or (sums <= 96 and threads(knobs) <= 256)


def _registers(knobs: TileKnobs) -> int:
    """Registers that a thread takes: sums, addresses of its copies, and what decoding was seen to need."""
    wide = knobs.dtype == "fp16" or knobs.scale_range == "full"
    copies = -(-stage_bytes(knobs) // (16 * threads(knobs)))
    return min(255, sums_per_thread(knobs) + copies + (132 if wide else 100 if knobs.weight == "mxfp8" else 86))


def _fitting(knobs: TileKnobs, arch: Arch) -> int:
    """Blocks that fit a multiprocessor by registers and shared memory."""
    by_registers = 65536 // (threads(knobs) * -(-_registers(knobs) // 8) * 8)
    by_memory = (arch.shared_bytes + _RESERVED) // (shared_bytes(knobs) + _RESERVED)
    return max(1, min(by_registers, by_memory))


@functools.lru_cache(maxsize=4096)
def _shapes(
    arch: Arch, fixed: tuple[tuple[str, Any], ...], clustered: bool, block: tuple[int, int, int], tile_m: int
) -> tuple[tuple[dict[str, Any], tuple[Shape, ...]], ...]:
    """Knobs that fit, each with what the cost model needs of them by rising slices of k, however short k is."""
    tile_n, warps_n, warps_m = block
    if tile_m % (COLUMN * warps_m) or tile_n * tile_m > MAX_SUMS * warps_n * warps_m * 32:
        return ()
    found = []
    for tile_k, stages in itertools.product((64, 128, 256), (3, 4, 6)):
        knobs: dict[str, Any] = {
            "tile_n": tile_n, "tile_m": tile_m, "tile_k": tile_k, "warps_n": warps_n, "warps_m": warps_m,
            "stages": stages, "pdl": "pdl" in arch.features,
        }  # fmt: skip
        plain = TileKnobs(**dict(fixed), **knobs)
        if shared_bytes(plain) > arch.shared_bytes or not _spares_memory(plain):
            continue
        resident = most_blocks(warps_n * warps_m, min(_RESIDENT, _fitting(plain, arch)), _least_registers(plain))
        sums = sums_per_thread(plain)
        crowded = sums > 96
        late = crowded and resident == 1 and threads(plain) == 256
        if late and stages == 3:  # the one copy under way would start too late
            continue
        knobs |= {"blocks_per_sm": resident, "fetch": "late" if late else "early"}
        budget = registers_left(warps_n * warps_m, resident)
        shapes = []
        for split_k in range(2 if clustered else 1, 9):
            if split_k > 1 and (crowded or sums * split_k > _PARTS * budget):
                break
            if plain.residual and split_k in (3, 4) and sums * split_k > _UNROLLED * budget:
                continue
            shapes.append(Shape(
                tile_n // TILE_ROWS // warps_n, tile_m // COLUMN // warps_m, warps_n * warps_m, tile_n, tile_m, tile_k,
                stages, split_k, stage_bytes(plain), resident, clustered,
            ))  # fmt: skip
        found.append((knobs, tuple(shapes)))
    return tuple(found)


def _weighed(
    problem: LinearProblem, arch: Arch, multiprocessors: int, exchange: str = "memory"
) -> list[tuple[float, dict[str, Any]]]:
    """Knobs by what the cost model says that they take, in microseconds; best first."""
    clustered = exchange == "cluster"
    fixed = tuple(_fixed(problem).items())
    # Rows of X, and of packed tiles, that offsets reach in a tile: fewer than tiles have where rows are very long.
    most, most_tiles = REACH // (2 * problem.k), REACH // (-(-problem.k // TILE_K) * _packed_bytes(problem))
    enough = next((tokens for tokens in _TOKENS if tokens >= min(problem.m, most)), _TOKENS[-1])
    few = [tokens for tokens in _TOKENS if enough // 2 <= tokens <= enough and min(tokens, problem.m) <= most]
    found = []
    for block, tile_m in itertools.product(_BLOCKS, few):
        if min(block[0], problem.n) > most_tiles * TILE_ROWS:
            continue
        for knobs, shapes in _shapes(arch, fixed, clustered, block, tile_m):
            steps = -(-problem.k // knobs["tile_k"])
            for shape in shapes:
                if shape.split_k > 1 and (steps // shape.split_k < 2 or problem.m > 1024):
                    break
                cost = microseconds(shape, problem.m, problem.n, problem.k, arch, multiprocessors)
                more = {"split_k": shape.split_k, **({"exchange": exchange} if clustered else {})}
                found.append((cost, knobs | more))
    return sorted(found, key=lambda pair: pair[0])


@functools.lru_cache(maxsize=1024)
def _fastest(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """What the cost model (tile_cost.py) holds for fastest."""
    return _weighed(problem, arch, multiprocessors)[0][1]


_CLOSE = 16  # of what the model holds for fastest: as many are tried with what it knows nothing of
_CLUSTERED = 20  # ways to exchange within a cluster that are tried


def _footprints(knobs: TileKnobs, problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[int]:
    """KiB that leave a multiprocessor no more blocks than an even spread of one launch needs, or of two launches.

    None where no more fit anyway.
    """
    blocks = launch(knobs, problem, multiprocessors).blocks
    even = -(-blocks // multiprocessors)
    wanted = [count for count in (even, 2 * even) if count < _fitting(knobs, arch)]
    return [((arch.shared_bytes + _RESERVED) // count - _RESERVED) // 1024 for count in wanted]


def _unmodelled(
    knobs: dict[str, Any], problem: LinearProblem, arch: Arch, multiprocessors: int
) -> Iterator[dict[str, Any]]:
    """Choices that the cost model has no term for: an even spread, scales in halves."""
    if problem.m <= 128:
        for footprint in _footprints(TileKnobs(**_fixed(problem), **knobs), problem, arch, multiprocessors):
            yield {**knobs, "footprint": footprint}
    if (problem.weight, problem.dtype, problem.scale_range) == ("mxfp4", "bf16", "normal") and problem.m <= 32:
        yield {**knobs, "scales": "halves"}


def _different(weighed: list[tuple[float, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Knobs, at most three that differ in stages and slices of k alone."""
    seen: dict[tuple[Any, ...], int] = {}
    for _, knobs in weighed:
        key = tuple(knobs[name] for name in ("tile_n", "tile_m", "tile_k", "warps_n", "warps_m"))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            yield knobs


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """60 that the cost model holds for fast, best first, the first of them with what it does not know as well.

    Of few rows every third is a cluster, for which the model is not fitted.
    """
    fixed = _fixed(problem)
    clusters: list[dict[str, Any]] = []  # legal ones: the parts of a cluster or a footprint may not fit
    if problem.m <= 128 and has_clusters(arch):
        weighed = _weighed(problem, arch, multiprocessors, "cluster")
        clusters = [knobs for knobs in _different(weighed) if SPEC.legal(arch, **fixed, **knobs)][:_CLUSTERED]
    found: list[dict[str, Any]] = []
    for place, knobs in enumerate(_different(_weighed(problem, arch, multiprocessors))):
        more = _unmodelled(knobs, problem, arch, multiprocessors) if place < _CLOSE else ()
        found += [knobs, *(other for other in more if SPEC.legal(arch, **fixed, **other))]
    return spread(found[: 60 - len(clusters)], clusters)


def _tile(m: int, n: int, k: int | None, stages: int | None) -> dict[str, Any]:
    """Warps of 32 rows where n allows it, and as few beside each other over tokens as their sums let."""
    rows = max(1, n // (2 * TILE_ROWS if n % (2 * TILE_ROWS) == 0 else TILE_ROWS))
    warps_n = max(count for count in range(1, 9) if rows % count == 0)
    warps_m = next((w for w in (1, 2, 4) if n * m <= MAX_SUMS * warps_n * w * 32), 4)
    return {
        "tile_m": m, "tile_n": n, "tile_k": k or TILE_K, "stages": stages or 4, "warps_n": warps_n, "warps_m": warps_m,
        "split_k": 1, "blocks_per_sm": 1,
    }  # fmt: skip


_RARER: tuple[dict[str, Any], ...] = (
    {"bias": True, "residual": True, "split_k": 2, "stages": 3, "tile_n": 32, "tile_m": 16, "warps_n": 2,
     "warps_m": 1, "pdl": False},
    {"residual": "pair", "bias": True, "encoding": "nibble", "tile_n": 64, "tile_m": 16, "warps_n": 2, "warps_m": 1,
     "stages": 4, "fetch": "late", "split_k": 3},
    {"bias": True, "dtype": "fp16", "scale_range": "full", "tile_n": 32, "tile_m": 16, "warps_n": 2, "warps_m": 1,
     "stages": 3},
    {"residual": True, "weight": "mxfp8", "scale_range": "full", "tile_n": 32, "tile_m": 16, "warps_n": 2,
     "warps_m": 1, "stages": 3},
    {"scales": "halves", "tile_n": 32, "tile_m": 8, "warps_n": 2, "warps_m": 1, "stages": 3, "split_k": 2,
     "footprint": 48, "group": 2},
    {"exchange": "cluster", "split_k": 2, "stages": 3, "tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1,
     "bias": True},
    {"exchange": "cluster", "split_k": 2, "stages": 3, "tile_n": 32, "tile_m": 16, "warps_n": 1, "warps_m": 1,
     "residual": "pair", "bias": True},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=lambda problem, arch, multiprocessors: dict(_fastest(problem, arch, multiprocessors)),
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    tile=_tile,
    rarer=_RARER,
)
