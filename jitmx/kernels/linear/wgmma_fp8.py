"""`linear.wgmma_fp8`: many rows of X in E4M3 with a scale a row, on sm_90a; products at the rate of E4M3.

W becomes E4M3 as it is decoded (jitmx.kernels.fp8_rows): exact, since the scales of a row's blocks differ by at most
eleven binades in a pass over k. Rows whose scales differ more take further passes, and all of their tile does. X comes
from `norm.rows`, the launch before it in a call, which makes the RMSNorm too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import warpgroups, wgmma
from jitmx.kernels.linear.fp8_arguments import ARGUMENTS, far_cases, make_case
from jitmx.kernels.linear.knobs import BF16, BIAS, ENCODING, NORMAL_SCALE_RANGE, RESIDUAL
from jitmx.kernels.linear.layout import TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import require_plain
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.warpgroups import GROUP_ROWS, tiles
from jitmx.kernels.norm.problem import MAX_HIDDEN
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

_SPARE_REGISTERS = 32


@dataclass(frozen=True)
class WgmmaFp8Knobs(Knobs):
    """Compile-time choices of `linear.wgmma_fp8`."""

    dtype: str = BF16
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    rows: str = knob("narrow", choices=ROW_RANGES, doc="rows of W: all of one pass over k, or some of more")
    groups: int = knob(3, choices=(2, 3, 4), doc="warpgroups that multiply, 64 rows of W each")
    tile_m: int = knob(192, choices=tuple(range(32, 257, 16)), doc="rows of X that a block takes at once")
    stages: int = knob(6, low=2, high=16, doc="steps of 128 k of X that a block keeps in shared memory")
    ring: int = knob(4, choices=(2, 4, 6, 8), doc="steps of 64 k of W that a warp keeps in flight")
    promote: bool = knob(
        False,
        doc="sums leave the tensor cores, which keep 14 bits of them, after each ring of W: fp32 in twice as many",
    )
    order: str = knob("weights_first", choices=wgmma.ORDERS, doc="which operand neighbouring blocks differ in")
    pdl: bool = PDL


def shared_bytes(knobs: WgmmaFp8Knobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    size = knobs.stages * (knobs.tile_m * 128 + 16) + knobs.groups * (4 * knobs.ring * 640 + 64 * 144)
    return -(-size // 1024) * 1024


def multiplying_registers(knobs: WgmmaFp8Knobs) -> int:
    """Registers a thread of the warpgroups that multiply, as the template sets them."""
    return (wgmma.launch_registers(knobs) * (knobs.groups + 1) - _SPARE_REGISTERS) // knobs.groups // 8 * 8


def _check(knobs: WgmmaFp8Knobs, arch: Arch) -> None:
    if not warpgroups.runs_on(arch):
        raise KnobError(
            f"linear.wgmma_fp8 needs the instructions of sm_90a, which {arch} lacks", "linear.scaled is there"
        )
    # Sums, once or twice, two decoded fragments, tables of two rows, and what addresses and decoding take.
    have = multiplying_registers(knobs)
    sums, rest = (4 / 3, 44) if knobs.promote else (1 / 2, 60 + 8 * (knobs.residual == "pair"))
    need = int(knobs.tile_m * sums) + rest
    if need > have:
        raise KnobError(
            f"tile_m={knobs.tile_m} with groups={knobs.groups} and promote={knobs.promote} takes about {need} "
            f"registers a thread of {have}",
            f"the nearest legal value is tile_m={int((have - rest) / sums) // 16 * 16}",
        )


def _contract(knobs: WgmmaFp8Knobs, arch: Arch) -> Contract:
    return Contract(
        min_registers=wgmma.launch_registers(knobs),
        max_registers=wgmma.launch_registers(knobs),
        require=(
            rf"QGMMA\.64x{knobs.tile_m}x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc\[UR\d+\], R\d+$",
            r"\bUBLKCP\b",
            r"\bLDGSTS\.E\..*128",
        ),
        # An empty group: products are complete before the next decode.
        forbid=(r"\b[HQ]GMMA\S* RZ,",),
    )


SPEC = KernelSpec(
    family="linear",
    name="wgmma_fp8",
    knobs=WgmmaFp8Knobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=wgmma.threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: WgmmaFp8Knobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """A block for each tile, or as many as there are multiprocessors where there are more tiles."""
    return Launch(max(1, min(tiles(knobs, problem.m, problem.n), multiprocessors)), shared_bytes(knobs))


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """What weight and tensors bring with them. RMSNorm is made where rows become E4M3."""
    if problem.activation != "fp8":
        raise KnobError(
            f"linear.wgmma_fp8 does not take activation={problem.activation!r}, only 'fp8'",
            "linear.wgmma and linear.scaled take others",
        )
    require_plain("wgmma_fp8", problem, "activation", "norm", "residual")
    if problem.dtype != "bf16":
        raise KnobError(f"linear.wgmma_fp8 does not take dtype={problem.dtype!r}, only 'bf16'", "use bfloat16")
    if problem.k > MAX_HIDDEN:
        raise KnobError(f"linear.wgmma_fp8 takes rows of {MAX_HIDDEN} values at most, not k={problem.k}")
    warpgroups.require_normal_scales("linear.wgmma_fp8", problem.scale_range, "activation='mxfp8'")
    return {"rows": problem.row_range, **problem.pick("dtype", "bias", "residual", "encoding", "scale_range")}


# Warpgroups and rows of X a tile: what is worth trying, with sums that stay in the tensor cores and that do not.
_SHAPES = {
    False: (
        (3, 192),
        (3, 176),
        (2, 256),
        (2, 208),
        (3, 160),
        (2, 192),
        (2, 160),
        (3, 128),
        (2, 128),
        (2, 96),
        (4, 96),
        (2, 64),
        (3, 64),
    ),
    True: ((2, 128), (2, 112), (2, 96), (3, 80), (3, 64), (2, 64), (4, 48), (4, 32)),
}
# Columns up to which sums stay there: what a product of 32 k cuts off grows with the root of k, to 0.3 % of 4096.
_KEPT_K = 8192
_MOST_STAGES = 6
_L2_BYTES = 24 << 20  # packed bytes of a weight that stay there beside the rows of X that blocks share

# Cycles of an H200's scheduler at 1.87 GHz: what a warp decodes in a step of 64 k, and products of a row of X. Rates,
# not measured yet.
_DECODING, _PRODUCTS, _CYCLES_US = 110, 1.15, 1870


def _filled(knobs: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """With as many stages as shared memory has room for."""
    for stages in range(_MOST_STAGES, 2, -1):
        if shared_bytes(WgmmaFp8Knobs(**knobs, stages=stages)) <= arch.shared_bytes:
            return knobs | {"stages": stages}
    return knobs | {"stages": 2}


def _ranked(problem: LinearProblem, arch: Arch, multiprocessors: int, promote: bool) -> list[dict[str, Any]]:
    """Knobs by rising time that whole waves of their tiles take."""
    rows, steps = packed_tiles(problem.n, problem.k)

    def microseconds(shape: tuple[int, int]) -> float:
        groups, tile_m = shape
        waves = -(-(-(-problem.n // (groups * GROUP_ROWS)) * -(-problem.m // tile_m)) // multiprocessors)
        step = groups * max(_DECODING + tile_m // 4, _PRODUCTS * tile_m) / _CYCLES_US
        return waves * (steps * step + 1.5)

    order = wgmma.ORDERS[rows * steps * TILE_BYTES > _L2_BYTES]
    found = (
        {"groups": groups, "tile_m": tile_m, "ring": 4, "promote": promote, "order": order, "pdl": True}
        for groups, tile_m in sorted(_SHAPES[promote], key=microseconds)
    )
    return [_filled(knobs, arch) for knobs in found if SPEC.legal(arch, **_fixed(problem), **knobs, stages=2)]


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """The shape that takes least by that reckoning."""
    return _ranked(problem, arch, multiprocessors, problem.k > _KEPT_K)[0]


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """The tile shapes, best guesses first; of the best, other orders, rings and stages too."""
    promote = problem.k > _KEPT_K
    found = _ranked(problem, arch, multiprocessors, promote)
    more: list[dict[str, Any]] = []
    for knobs in found[:4]:
        other = wgmma.ORDERS[1 - wgmma.ORDERS.index(knobs["order"])]
        for change in (
            {"order": other},
            {"ring": 8},
            {"ring": 2},
            {"ring": 6},
            {"stages": max(2, knobs["stages"] - 2)},
        ):
            candidate = {**knobs, **change}
            if "ring" in change:
                candidate = _filled({name: value for name, value in candidate.items() if name != "stages"}, arch)
            if SPEC.legal(arch, **candidate):
                more.append(candidate)
    return found + more + _ranked(problem, arch, multiprocessors, not promote)[:4]


def _cases(variant: Variant) -> Iterator[Case]:
    """Two short rows, a lone value; tiles ragged and whole, whole and broken rings, odd tiles of k; blocks of several;
    far ones.
    """
    knobs = variant.knobs
    features, ring = knobs.groups * GROUP_ROWS, knobs.ring
    shapes = (
        (2, 4, 32, 132),
        (knobs.tile_m + 3, features + 24, (2 * ring - 1) * TILE_K, 2),
        (knobs.tile_m - 5, features - 7, (2 * ring + 1) * TILE_K - 32, 132),
        (2 * knobs.tile_m + 1, 3 * TILE_ROWS, ring * TILE_K, 1),
        (knobs.tile_m, features + 40, (ring - 1) * TILE_K, 1),
        (1, 1, 64, 132),
    )
    for seed, (rows, n, k, multiprocessors) in enumerate(shapes):
        yield make_case(variant, launch(knobs, LinearProblem(rows, n, k), multiprocessors), rows, n, k, seed)
    yield from far_cases(variant, launch)


_RARER: tuple[dict[str, Any], ...] = (
    {"groups": 2, "tile_m": 48, "stages": 2, "ring": 2, "rows": "wide", "bias": True, "residual": True,
     "promote": True},
    {"groups": 2, "tile_m": 32, "stages": 3, "ring": 2, "residual": "pair", "encoding": "nibble", "order": "x_first",
     "promote": True},
    {"groups": 2, "tile_m": 32, "stages": 2, "ring": 4, "rows": "wide", "pdl": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    candidates=_candidates,
    runs_on=warpgroups.runs_on,
    tile=lambda m, n, k, stages: warpgroups.tile("wgmma_fp8", m, n, k) | {"stages": stages or 4},
    rarer=_RARER,
)
