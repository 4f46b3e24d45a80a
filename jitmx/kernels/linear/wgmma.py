"""`linear.wgmma`: many rows of X on sm_90a; weights decoded in registers as one operand of wgmma, fp32 accumulation.

X is copied as it lies in memory, by a tensor map, and lanes take what its order of k wants out of the packed words of
their quads. Or all blocks first bring X into the order of the words, in the workspace, and wait for one another as they
read it: where weights are many and rows of X few, the simpler decoding is worth that.

Tiles of 128 rows of W may leave 64 rows. With `schedule=hybrid` blocks split the k steps of these remaining rows among
them (stream-K), so that the whole tiles match the number of multiprocessors. With `schedule=stream_k` all tiles are
split this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import warpgroups
from jitmx.kernels.linear.arguments import ARGUMENTS, MAPPED, make_case
from jitmx.kernels.linear.knobs import BF16, BIAS, ENCODING, NORMAL_SCALE_RANGE, RESIDUAL
from jitmx.kernels.linear.layout import TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.warpgroups import GROUP_ROWS, tiles
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

MAX_ROWS = 8192  # bounds the workspace, which may hold X and eight counters for each tile of rows
_COUNTER_BYTES = 8192
_FLAG_BYTES, _MOST_BLOCKS = 16384, 256  # of stream-K blocks: a word for each of up to 16 warps
SCHEDULES = ("tiles", "hybrid", "stream_k")
ORDERS = ("weights_first", "x_first")

# Weights of this many packed bytes stay in the L2 beside the rows of X that blocks share.
_L2_BYTES = 24 << 20


@dataclass(frozen=True)
class WgmmaKnobs(Knobs):
    """Compile-time choices of `linear.wgmma`."""

    dtype: str = BF16
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    groups: int = knob(3, choices=(2, 3, 4), doc="warpgroups that multiply, 64 rows of W each")
    tile_m: int = knob(128, choices=tuple(range(32, 257, 16)), doc="rows of X that a block takes at once")
    stages: int = knob(6, low=2, high=16, doc="steps of 64 k of X that a block keeps in shared memory")
    ring: int = knob(4, low=2, high=9, doc="steps of 64 k of W that a warp keeps in flight")
    x: str = knob("tensor", choices=("tensor", "image"), doc="X copied as it lies, or once brought into the order of W")
    split_k: int = knob(1, choices=(1, 2), doc="blocks, a cluster, that share a tile, each with a slice of k")
    schedule: str = knob(
        "tiles", choices=SCHEDULES, doc="whole tiles a block, whole tiles and stream-K for remaining rows, or stream-K"
    )
    buffers: int = knob(2, choices=(2, 3), doc="decoded fragments; products of all but one are under way")
    order: str = knob("weights_first", choices=ORDERS, doc="which operand neighbouring blocks differ in")
    pdl: bool = PDL


def threads(knobs: warpgroups.Tiled) -> int:
    """Threads a block: a warpgroup more than multiply, which moves X."""
    return (knobs.groups + 1) * 128


def launch_registers(knobs: warpgroups.Tiled) -> int:
    """Registers a thread at launch; warpgroups that multiply then take some from the one that moves X."""
    return 65536 // threads(knobs) // 8 * 8


def multiplying_registers(knobs: WgmmaKnobs) -> int:
    """Registers a thread of the warpgroups that multiply, as the template sets them."""
    producer = 32 if knobs.x == "tensor" and knobs.schedule != "hybrid" else 48
    return (launch_registers(knobs) * (knobs.groups + 1) - producer) // knobs.groups // 8 * 8


def shared_bytes(knobs: WgmmaKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    size = knobs.stages * knobs.tile_m * 128 + knobs.groups * (4 * knobs.ring * 640 + 64 * 144)
    if knobs.schedule == "hybrid":
        size += knobs.tile_m * 256 + 24
    elif knobs.split_k > 1:
        size += knobs.groups * (knobs.tile_m // knobs.split_k * 256 + 16)
    size += 16 * knobs.stages + 8 + 8 * (knobs.x == "image")
    return -(-size // 1024) * 1024


def _check(knobs: WgmmaKnobs, arch: Arch) -> None:
    warpgroups.require_wgmma("wgmma", arch)
    # Sums, decoded fragments, and what addresses, decoding and the other block of a cluster take.
    need = knobs.tile_m // 2 + 8 * knobs.buffers + (40 if knobs.x == "tensor" else 32) + 8 * knobs.split_k
    have = multiplying_registers(knobs)
    if need > have:
        legal = (knobs.tile_m - 2 * (need - have)) // 16 * 16
        raise KnobError(
            f"tile_m={knobs.tile_m} with groups={knobs.groups} and buffers={knobs.buffers} takes "
            f"about {need} registers a thread of {have}",
            f"the nearest legal value is tile_m={legal}",
        )
    if knobs.schedule == "stream_k" and (knobs.x == "image" or knobs.split_k > 1):
        raise KnobError(
            f"schedule='stream_k' with x={knobs.x!r} and split_k={knobs.split_k}: stream-K blocks read "
            "X as it is, and form no clusters",
            "the nearest legal value is schedule='tiles'",
        )
    if knobs.schedule == "hybrid" and (knobs.x == "image" or knobs.groups != 2 or knobs.split_k != 2):
        raise KnobError(
            f"schedule='hybrid' with x={knobs.x!r}, groups={knobs.groups} and split_k={knobs.split_k}: "
            "pairs of blocks share the rows of W that tiles of 128 rows leave, and read X as it is",
            "the nearest legal value is schedule='tiles'",
        )
    if knobs.buffers == 3 and knobs.ring != 3:
        raise KnobError(
            f"ring={knobs.ring} with buffers=3: fragments go round a turn of the loop evenly, and "
            "in longer turns the compiler lets no products overlap",
            "the nearest legal value is ring=3",
        )


def _contract(knobs: WgmmaKnobs, arch: Arch) -> Contract:
    return Contract(
        min_registers=launch_registers(knobs),
        max_registers=launch_registers(knobs),
        require=(
            # Products in pairs: the compiler, where it sees a hazard, ends every one of them with a group of its own.
            rf"HGMMA\.64x{knobs.tile_m}x16\.F32\.BF16 R\d+, R\d+, gdesc\[UR\d+\], R\d+$",
            r"\bUTMALDG\b" if knobs.x == "tensor" else r"\bUBLKCP\b",
            r"\bLDGSTS\.E\..*128",
        ),
    )


SPEC = KernelSpec(
    family="linear",
    name="wgmma",
    knobs=WgmmaKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: MAPPED if knobs.x == "tensor" else ARGUMENTS,
)


def workspace_bytes(knobs: WgmmaKnobs, m: int, k: int) -> int:
    """Room for counters, the same for every shape, and X padded to whole tiles."""
    return _COUNTER_BYTES + -(-m // knobs.tile_m) * packed_tiles(1, k)[1] * knobs.tile_m * 128


def launch(knobs: WgmmaKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """A block or cluster for each tile, or as many as the multiprocessors hold where there are more."""
    m, n, k = problem.m, problem.n, problem.k
    maps = {"x_map": warpgroups.x_map(m, k, knobs.tile_m // (2 if knobs.schedule == "hybrid" else 1))}
    if knobs.schedule == "stream_k":
        blocks = max(1, min(multiprocessors, _MOST_BLOCKS, tiles(knobs, m, n) * packed_tiles(1, k)[1]))
        workspace = _FLAG_BYTES + blocks * knobs.groups * 64 * knobs.tile_m * 4
        return Launch(blocks, shared_bytes(knobs), workspace=workspace, maps=maps)
    if knobs.schedule == "hybrid":
        units, tokens = -(-n // GROUP_ROWS), -(-m // knobs.tile_m)
        items = tokens * (units // 2 + units % 2 * 2 * packed_tiles(1, k)[1])
        blocks = max(1, min(items, multiprocessors // knobs.split_k)) * knobs.split_k
        workspace = _FLAG_BYTES + max(2 * tokens, blocks) * GROUP_ROWS * knobs.tile_m * 2
        return Launch(blocks, shared_bytes(knobs), knobs.split_k, workspace if units % 2 else 0, maps)
    blocks = max(1, min(tiles(knobs, m, n), multiprocessors // knobs.split_k)) * knobs.split_k
    if knobs.x == "image":
        return Launch(blocks, shared_bytes(knobs), knobs.split_k, workspace_bytes(knobs, m, k))
    return Launch(blocks, shared_bytes(knobs), knobs.split_k, maps=maps)


_fixed = partial(warpgroups.fixed, "wgmma")

# Warpgroups, rows of X a tile, and blocks that share one: what is worth trying.
_SHAPES = (
    (2, 256, 1), (2, 208, 1), (2, 192, 1), (2, 176, 1), (2, 160, 1), (2, 128, 1), (2, 112, 1), (2, 96, 1), (2, 64, 1),
    (3, 192, 1), (3, 128, 1), (3, 96, 1), (3, 64, 1), (4, 64, 1), (4, 48, 1), (4, 32, 1),
    (2, 64, 2), (2, 96, 2), (2, 128, 2), (2, 176, 2), (3, 64, 2), (3, 96, 2), (3, 128, 2),
)  # fmt: skip
_MOST_STAGES = 8
_IMAGE_ROWS = 128  # to which bringing X into another order pays, where weights are many
_MOST_CANDIDATES = 60

# Cycles of an H200's scheduler, at 1.87 GHz: what a warp decodes in a step of 64 k, and products of a row of X.
_DECODING = {"tensor": 162, "image": 150}
_PRODUCTS, _CYCLES_US = 2.2, 1870


def _step_us(groups: int, tile_m: int, x: str) -> float:
    """What a step of 64 k takes: a warp's decoding hides behind products of many rows only."""
    return groups * max(_DECODING[x] + tile_m, _PRODUCTS * tile_m) / _CYCLES_US


def _filled(knobs: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """With as many stages as shared memory has room for."""
    for stages in range(_MOST_STAGES, 2, -1):
        if shared_bytes(WgmmaKnobs(**knobs, stages=stages)) <= arch.shared_bytes:
            return knobs | {"stages": stages}
    return knobs | {"stages": 2}


def _ranked(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs by rising time that whole waves of their tiles take."""
    rows, steps = packed_tiles(problem.n, problem.k)
    many = rows * steps * TILE_BYTES > _L2_BYTES
    m, units = min(problem.m, MAX_ROWS), -(-problem.n // GROUP_ROWS)
    x = "image" if many and m <= _IMAGE_ROWS else "tensor"

    def microseconds(form: tuple[tuple[int, int, int], str]) -> float:
        (groups, tile_m, split), schedule = form
        tokens, places = -(-m // tile_m), max(1, multiprocessors // split)
        waves = -(-((units + (schedule == "tiles") * (groups - 1)) // groups * tokens) // places)
        spent = waves * (-(-steps // split) * _step_us(groups, tile_m, x) + 1.2 * split)
        if schedule == "hybrid":
            each = -(-2 * tokens * steps // (places * split))
            spent += 1.6 + each * _step_us(1, tile_m // 2, x)
        return spent

    forms = [(shape, "tiles") for shape in _SHAPES]
    if units % 2:
        forms += [(shape, "hybrid") for shape in _SHAPES if shape[0] == shape[2] == 2 and x == "tensor"]
    legal = [form for form in forms if form[0][2] <= min(steps, multiprocessors)]
    return [
        _filled(arch=arch, knobs={
            "groups": groups, "tile_m": tile_m, "ring": 4, "split_k": split, "schedule": schedule, "buffers": 2, "x": x,
            "order": ORDERS[many], "pdl": True,
        })
        for (groups, tile_m, split), schedule in sorted(legal, key=microseconds)
    ]  # fmt: skip


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """The tile shapes, best guesses first, each also with stream-K, more fragments, and X brought another way."""
    found: list[dict[str, Any]] = []
    for knobs in _ranked(problem, arch, multiprocessors):
        other = {"x": "tensor" if knobs["x"] == "image" else "image"}
        for more in ({}, {"buffers": 3, "ring": 3}, {"schedule": "stream_k", "x": "tensor"}, other):
            candidate = _filled({name: value for name, value in (knobs | more).items() if name != "stages"}, arch)
            if SPEC.legal(arch, **candidate) and candidate not in found:
                found.append(candidate)
    return found[:_MOST_CANDIDATES]


def _cases(variant: Variant) -> Iterator[Case]:
    """Two short rows, a lone value; tiles ragged and whole, whole and broken groups of steps; several
    tiles a block; stages that go round.
    """
    knobs = variant.knobs
    features, split, ring, rest = knobs.groups * 64, knobs.split_k, knobs.ring, knobs.schedule == "hybrid"
    around = max(2, -(-knobs.stages // ring)) * ring + 1  # steps
    # Of four tiles' steps as many do not go into so many blocks, where those share them.
    blocks = 2 * split if knobs.schedule != "stream_k" else 5 if (ring + 1) % 5 else 3
    shapes = [
        (2, 4, split * TILE_K - 32, 132),
        (knobs.tile_m + 3, features + 24, split * (ring + 1) * TILE_K, blocks),
        (knobs.tile_m, 2 * features - 7 + 64 * rest, split * around * TILE_K - 32, 8 if rest else 132),
        (2 * knobs.tile_m + 1, 3 * TILE_ROWS + features * rest, split * (ring - 1) * TILE_K, split),
        (1, 1, split * TILE_K, 132),
    ]
    if knobs.tile_m == 32:  # of so few rows it takes more steps until a warp arranges several units
        shapes.append((65, 40, split * 3 * ring * TILE_K, split))
        if knobs.x == "image":  # tiles of X that a block has seen are bits of two words, and those beyond are not kept
            shapes.append((66 * knobs.tile_m, 64, TILE_K, 2))
    if rest:
        shapes += [
            (2 * knobs.tile_m + 3, 2 * features + 24, split * 2 * ring * TILE_K, split),
            (3, features - 7, split * TILE_K, split),
        ]
    for seed, (rows, n, k, multiprocessors) in enumerate(shapes):
        yield make_case(variant, launch(knobs, LinearProblem(rows, n, k), multiprocessors), rows, n, k, seed)
    # Blocks that share steps, remaining rows or the image of X wait for all others, and with few of them one would go
    # through as many tiles as there are; their Y is stored by the same code.
    if knobs.schedule == "tiles" and knobs.x == "tensor":
        yield from warpgroups.far_cases(variant, launch, MAX_ROWS, 1 << 20)


_RARER: tuple[dict[str, Any], ...] = (
    {"bias": True, "residual": True, "groups": 2, "tile_m": 48, "stages": 2, "ring": 2},
    {"residual": "pair", "groups": 2, "tile_m": 32, "stages": 3, "ring": 3, "split_k": 2, "buffers": 3,
     "encoding": "nibble"},
    {"groups": 2, "tile_m": 32, "stages": 2, "ring": 2, "x": "image"},
    {"groups": 2, "tile_m": 48, "stages": 2, "ring": 2, "schedule": "stream_k", "pdl": False},
    {"bias": True, "residual": True, "groups": 2, "tile_m": 32, "stages": 2, "ring": 2, "split_k": 2,
     "schedule": "hybrid"},
    {"residual": "pair", "groups": 2, "tile_m": 32, "stages": 2, "ring": 2, "split_k": 2, "schedule": "hybrid"},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=lambda problem, arch, multiprocessors: _ranked(problem, arch, multiprocessors)[0],
    cases=_cases,
    check=warpgroups.check_problem,
    candidates=_candidates,
    runs_on=warpgroups.runs_on,
    tile=lambda m, n, k, stages: warpgroups.tile("wgmma", m, n, k) | {"stages": stages or 6},
    rarer=_RARER,
)
