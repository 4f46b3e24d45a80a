"""`linear.wgmma`: many rows of X on sm_90a; weights decoded in registers as one operand of wgmma, fp32 accumulation.

All blocks of a launch first bring X into the order and the swizzle that the product wants, in the workspace, and wait
for one another as they read it: a launch has at most one block a multiprocessor, and all of them run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.arguments import make_case
from jitmx.kernels.linear.kernel import Launch, LinearKernel, require_plain
from jitmx.kernels.linear.layout import ENCODINGS, TILE_BYTES, TILE_K, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob

MAX_ROWS = 8192  # bounds the workspace, which holds X and eight counters for each tile of rows
_COUNTER_BYTES = 8192
ORDERS = ("weights_first", "x_first")

# Weights of this many packed bytes stay in the L2 beside the rows of X that blocks share.
_L2_BYTES = 24 << 20


@dataclass(frozen=True)
class WgmmaKnobs(Knobs):
    """Compile-time choices of `linear.wgmma`."""

    dtype: str = knob("bf16", choices=("bf16",), doc="type of X, Y, bias and residual")
    bias: bool = knob(False, doc="add a bias of n values")
    residual: bool = knob(False, doc="add [m, n] values on the way out")
    encoding: str = knob("swizzle", choices=ENCODINGS, doc="order of the bits in a packed word")
    scale_range: str = knob("normal", choices=("normal",), doc="E8M0 bytes: 2 to 128")
    groups: int = knob(3, choices=(2, 3, 4), doc="warpgroups that multiply, 64 rows of W each")
    tile_m: int = knob(128, choices=tuple(range(48, 257, 16)), doc="rows of X that a block takes at once")
    stages: int = knob(6, low=2, high=16, doc="steps of 64 k of X that a block keeps in shared memory")
    ring: int = knob(4, low=2, high=9, doc="steps of 64 k of W that a warp keeps in flight")
    split_k: int = knob(1, choices=(1, 2), doc="blocks, a cluster, that share a tile, each with a slice of k")
    buffers: int = knob(2, choices=(2, 3), doc="decoded fragments; products of all but one are under way")
    order: str = knob("weights_first", choices=ORDERS, doc="which operand neighbouring blocks differ in")
    pdl: bool = knob(True, doc="programmatic dependent launch: first weight loads before the previous kernel's end")


def threads(knobs: WgmmaKnobs) -> int:
    """Threads a block: a warpgroup more than multiply, which moves X."""
    return (knobs.groups + 1) * 128


def launch_registers(knobs: WgmmaKnobs) -> int:
    """Registers a thread at launch; warpgroups that multiply then take some from the one that moves X."""
    return 65536 // threads(knobs) // 8 * 8


def multiplying_registers(knobs: WgmmaKnobs) -> int:
    """Registers a thread of the warpgroups that multiply, as the template sets them."""
    return (launch_registers(knobs) * (knobs.groups + 1) - 48) // knobs.groups // 8 * 8


def shared_bytes(knobs: WgmmaKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    size = knobs.stages * knobs.tile_m * 128 + knobs.groups * (4 * knobs.ring * 640 + 32 * 144)
    if knobs.split_k > 1:
        size += knobs.groups * (knobs.tile_m // knobs.split_k * 256 + 16)
    size += 16 * knobs.stages + 8
    return -(-size // 1024) * 1024


def _needed_registers(knobs: WgmmaKnobs) -> int:
    """Sums, decoded fragments, and what addresses, decoding and the other block of a cluster take."""
    return knobs.tile_m // 2 + 8 * knobs.buffers + 32 + 8 * knobs.split_k


def _check(knobs: WgmmaKnobs, arch: Arch) -> None:
    if "wgmma" not in arch.features:
        raise KnobError(f"linear.wgmma needs the instructions of sm_90a, which {arch} lacks; use linear.tile")
    need, have = _needed_registers(knobs), multiplying_registers(knobs)
    if need > have:
        grain = 16 * knobs.split_k
        legal = (knobs.tile_m - 2 * (need - have)) // grain * grain
        raise KnobError(
            f"tile_m={knobs.tile_m} with groups={knobs.groups} and buffers={knobs.buffers} takes about {need} "
            f"registers a thread of {have}; the nearest legal value is tile_m={legal}"
        )
    if knobs.tile_m % (16 * knobs.split_k):
        raise KnobError(
            f"tile_m={knobs.tile_m} with split_k={knobs.split_k}: blocks that share a tile store 16 rows at a time; "
            f"the nearest legal value is tile_m={knobs.tile_m + 16}"
        )
    if 2 * knobs.ring % knobs.buffers:
        nearest = max(3, round(knobs.ring / 3) * 3)
        raise KnobError(
            f"ring={knobs.ring}: two fragments a step do not go round {knobs.buffers} buffers evenly; "
            f"the nearest legal value is ring={nearest}"
        )


def _contract(knobs: WgmmaKnobs, arch: Arch) -> Contract:
    return Contract(
        min_registers=launch_registers(knobs),
        max_registers=launch_registers(knobs),
        max_spill_bytes=0,
        require=(
            # Products in pairs: the compiler, where it sees a hazard, ends every one of them with a group of its own.
            rf"HGMMA\.64x{knobs.tile_m}x16\.F32\.BF16 R\d+, R\d+, gdesc\[UR\d+\], R\d+$",
            r"\bUBLKCP\b",
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
    entry="jitmx_linear_wgmma",
)


def tiles(knobs: WgmmaKnobs, m: int, n: int) -> int:
    """Tiles of Y."""
    return -(-n // (knobs.groups * 64)) * -(-m // knobs.tile_m)


def workspace_bytes(knobs: WgmmaKnobs, m: int, k: int) -> int:
    """Room for counters, the same for every shape, and X padded to whole tiles."""
    return _COUNTER_BYTES + -(-m // knobs.tile_m) * packed_tiles(1, k)[1] * knobs.tile_m * 128


def launch(knobs: WgmmaKnobs, m: int, n: int, k: int, multiprocessors: int) -> Launch:
    """A block for each tile, or one a multiprocessor where there are more tiles than that."""
    blocks = max(1, min(tiles(knobs, m, n), multiprocessors // knobs.split_k)) * knobs.split_k
    return Launch(blocks, shared_bytes(knobs), knobs.split_k, workspace_bytes(knobs, m, k))


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """What weight and tensors bring with them."""
    require_plain("wgmma", problem, "residual")
    if problem.dtype != "bf16":
        raise KnobError(f"linear.wgmma does not take dtype={problem.dtype!r}, only 'bf16'; linear.tile takes both")
    if problem.scale_range != "normal":
        raise KnobError(
            f"linear.wgmma does not take scale_range={problem.scale_range!r}, only 'normal': it scales weights as it "
            "decodes them; linear.tile takes both"
        )
    return {
        "dtype": problem.dtype, "bias": problem.bias, "residual": problem.residual, "encoding": problem.encoding,
        "scale_range": problem.scale_range,
    }  # fmt: skip


# Shapes of tiles worth trying, and how near their products come to 192 x 192 rows in 0.62 us a step of 64 k.
_SHAPES: tuple[tuple[dict[str, int], float], ...] = (
    ({"groups": 2, "tile_m": 192, "stages": 6, "ring": 4, "split_k": 1}, 0.88),
    ({"groups": 3, "tile_m": 192, "stages": 6, "ring": 4, "split_k": 1}, 0.82),
    ({"groups": 2, "tile_m": 176, "stages": 6, "ring": 4, "split_k": 1}, 0.84),
    ({"groups": 2, "tile_m": 256, "stages": 5, "ring": 4, "split_k": 1}, 0.78),
    ({"groups": 3, "tile_m": 128, "stages": 6, "ring": 4, "split_k": 1}, 0.75),
    ({"groups": 4, "tile_m": 96, "stages": 6, "ring": 4, "split_k": 1}, 0.78),
    ({"groups": 4, "tile_m": 64, "stages": 6, "ring": 8, "split_k": 1}, 0.57),
    ({"groups": 2, "tile_m": 128, "stages": 8, "ring": 4, "split_k": 1}, 0.68),
    ({"groups": 3, "tile_m": 64, "stages": 8, "ring": 4, "split_k": 1}, 0.57),
    ({"groups": 3, "tile_m": 128, "stages": 4, "ring": 4, "split_k": 2}, 0.85),
    ({"groups": 3, "tile_m": 160, "stages": 4, "ring": 4, "split_k": 2}, 0.84),
    ({"groups": 2, "tile_m": 128, "stages": 6, "ring": 4, "split_k": 2}, 0.68),
    ({"groups": 3, "tile_m": 64, "stages": 6, "ring": 4, "split_k": 2}, 0.57),
)
_STEP_US = 0.62 / (3 * 192)  # of one warpgroup and one row of X


def _ranked(problem: LinearProblem, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs by rising time that whole waves of their tiles take."""
    rows, steps = packed_tiles(problem.n, problem.k)
    order = ORDERS[0] if rows * steps * TILE_BYTES <= _L2_BYTES else ORDERS[1]
    m = min(problem.m, MAX_ROWS)

    def microseconds(item: tuple[dict[str, int], float]) -> float:
        shape, speed = item
        groups, tile_m, split = shape["groups"], shape["tile_m"], shape["split_k"]
        waves = -(-(-(-problem.n // (groups * 64)) * -(-m // tile_m)) // max(1, multiprocessors // split))
        return waves * (-(-steps // split) * groups * tile_m * _STEP_US / speed + 1.5 * split)

    legal = [item for item in _SHAPES if item[0]["split_k"] <= min(steps, multiprocessors)]
    return [{**shape, "buffers": 2, "order": order, "pdl": True} for shape, _ in sorted(legal, key=microseconds)]


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return _ranked(problem, multiprocessors)[0]


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """The tile shapes, best guesses first, each also with more weights in flight, and in the other order."""
    found: list[dict[str, Any]] = []
    for knobs in _ranked(problem, multiprocessors):
        other = ORDERS[knobs["order"] == ORDERS[0]]
        for more in ({}, {"ring": 8 if knobs["ring"] == 4 else 4}, {"buffers": 3, "ring": 3}, {"order": other}):
            candidate = knobs | more
            try:
                SPEC.variant(arch, **candidate)
            except KnobError:
                continue
            found.append(candidate)
    return found


def _check_problem(problem: LinearProblem, variant: Variant) -> None:
    steps = packed_tiles(problem.n, problem.k)[1]
    if variant.knobs.split_k > steps:
        raise KnobError(
            f"split_k={variant.knobs.split_k} is over the {steps} steps of k={problem.k}; "
            f"the nearest legal value is {steps}"
        )


def _cases(variant: Variant) -> Iterator[Case]:
    """A lone row and feature; ragged tiles, whole and broken groups of steps; blocks that take several tiles."""
    knobs = variant.knobs
    features, split, ring = knobs.groups * 64, knobs.split_k, knobs.ring
    shapes = (
        (1, 1, split * TILE_K - 32, 132),
        (knobs.tile_m + 3, features + 24, split * (ring + 1) * TILE_K, 2 * split),
        (knobs.tile_m - 5, features - 7, split * (2 * ring + 1) * TILE_K - 32, 132),
        (2 * knobs.tile_m + 1, 40, split * (ring - 1) * TILE_K, split),
    )
    for seed, (rows, n, k, multiprocessors) in enumerate(shapes):
        yield make_case(variant, launch(knobs, rows, n, k, multiprocessors), rows, n, k, seed)


def _tile(m: int, n: int, k: int | None, stages: int | None) -> dict[str, Any]:
    """A tile of m rows of X by n of W; steps of k are always 64."""
    if k not in (None, TILE_K):
        raise KnobError(f"linear.wgmma takes steps of {TILE_K} k, not {k}; the nearest legal value is {TILE_K}")
    if n not in (128, 192, 256):
        nearest = min((128, 192, 256), key=lambda legal: abs(legal - n))
        raise KnobError(f"linear.wgmma takes tiles of 128, 192 or 256 rows of W, not {n}; the nearest is {nearest}")
    return {"tile_m": m, "groups": n // 64, "stages": stages or 6}


KERNEL = LinearKernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    runs_on=lambda arch: "wgmma" in arch.features,
    tile=_tile,
)
