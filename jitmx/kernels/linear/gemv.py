"""`linear.gemv`: at most 8 rows of X; CUDA cores or m16n8k16 tensor cores, fp32 accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import far
from jitmx.kernels.linear.arguments import ARGUMENTS, make_case
from jitmx.kernels.linear.gated import whole_rows
from jitmx.kernels.linear.knobs import BIAS, ENCODING, RESIDUAL, SCALE_RANGE, SWIGLU
from jitmx.kernels.linear.layout import DTYPES, TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import (
    require_divisor,
    require_plain,
    require_registers,
    require_resident,
    require_slices,
    row_count,
)
from jitmx.kernels.linear.problem import LinearProblem, require_gated
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import COPY, PDL, KernelSpec, Knobs, Variant, fitting, knob

ROWS = (1, 2, 4, 8)
MAX_ROWS = ROWS[-1]
SPLITS = (1, 2, 3, 4, 5, 8, 9, 15, 16)


@dataclass(frozen=True)
class GemvKnobs(Knobs):
    """Compile-time choices of `linear.gemv`."""

    m: int = knob(1, choices=ROWS, doc="rows of X, at most")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of X, Y, bias and residual")
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    swiglu: bool = SWIGLU
    engine: str = knob("mma", choices=("fma", "mma"), doc="CUDA cores, or m16n8k16 tensor cores")
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    warps: int = knob(8, choices=(1, 2, 4, 5, 8, 9, 12, 15, 16), doc="warps a block")
    split_k: int = knob(8, choices=SPLITS, doc="warps that share a row of tiles, each with a slice of k")
    chunk: int = knob(6, low=1, high=16, doc="tiles a copy (544 B each)")
    stages: int = knob(1, low=1, high=16, doc="copies that a warp keeps in flight")
    copy: str = COPY
    unroll: int = knob(4, low=1, high=8, doc="tiles that the inner loop takes at once")
    blocks_per_sm: int = knob(3, low=1, high=16, doc="blocks that must fit a multiprocessor: caps registers")
    stage_x: bool = knob(True, doc="keep X in shared memory, for k up to what fits")
    pdl: bool = PDL


def _ring_bytes(knobs: GemvKnobs) -> int:
    """Shared memory that does not depend on the shape, as struct Shared of the template lays it out."""
    size = knobs.warps * knobs.stages * knobs.chunk * TILE_BYTES
    if knobs.copy == "bulk":
        size += knobs.warps * knobs.stages * 8
    if knobs.split_k > 1:
        size = -(-size // 4) * 4 + 2 * knobs.warps * TILE_ROWS * knobs.m * 4
    return -(-size // 16) * 16


def shared_bytes(knobs: GemvKnobs, k: int) -> int:
    """Dynamic shared memory of a launch for rows of `k` elements, bytes."""
    size = _ring_bytes(knobs)
    if knobs.stage_x:
        tiles = -(-k // TILE_K)
        if knobs.split_k > 1:
            size += knobs.warps * knobs.m * (-(-tiles // knobs.split_k) * TILE_K * 2 + 64)
        else:
            size += knobs.m * (tiles * TILE_K * 2 + 64)
    return size


def _check(knobs: GemvKnobs, arch: Arch) -> None:
    if knobs.swiglu:
        require_gated(knobs)
    require_divisor(knobs, "split_k", SPLITS)
    if knobs.split_k > 1 and knobs.warps // knobs.split_k > 15:
        raise KnobError(f"warps/split_k={knobs.warps // knobs.split_k} is over the 15 named barriers of a block")
    require_resident(knobs.blocks_per_sm, knobs.warps, "warps")
    require_registers(knobs.warps, knobs.blocks_per_sm, _least_registers(knobs))


def _least_registers(knobs: GemvKnobs) -> int:
    """Registers that a thread takes at least: sums and X of its rows, or tiles taken at once, and the rest."""
    products = 24 + 9 * knobs.m if knobs.engine == "fma" else 37 + 2 * min(knobs.unroll, knobs.chunk)
    folded = knobs.dtype == "bf16" and knobs.scale_range == "normal"
    return products + 6 * (not folded) + 10 * (not knobs.stage_x) - 4 * (knobs.copy == "async")


def _contract(knobs: GemvKnobs, arch: Arch) -> Contract:
    require = [r"\bLDS\.128\b", r"\bUBLKCP\b" if knobs.copy == "bulk" else r"\bLDGSTS\.E\..*128"]
    forbid = []
    if knobs.engine == "mma":
        require.append(r"HMMA\.16816\.F32" + (r"\.BF16" if knobs.dtype == "bf16" else ""))
    else:
        require.append(r"\bFFMA\b")
        forbid.append(r"HMMA")
    return Contract(
        max_registers=min(255, 65536 // (knobs.warps * 32 * knobs.blocks_per_sm)),
        require=tuple(require),
        forbid=tuple(forbid),
    )


SPEC = KernelSpec(
    family="linear",
    name="gemv",
    knobs=GemvKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, TILE_K),
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: GemvKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """One row of tiles a worker, or a full persistent wave where there are more rows than that."""
    rows, _ = packed_tiles(problem.n, problem.k)
    per_block = knobs.warps // knobs.split_k
    blocks = max(1, min(-(-rows // per_block), multiprocessors * knobs.blocks_per_sm))
    return Launch(blocks, shared_bytes(knobs, problem.k))


def _fixed(problem: LinearProblem) -> dict[str, Any]:
    """The smallest row count that holds m, and what weight and tensors bring with them."""
    require_plain("gemv", problem, "residual", "swiglu")
    return {
        "m": row_count(problem, ROWS),
        **problem.pick("dtype", "bias", "residual", "swiglu", "encoding", "scale_range"),
    }


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Knobs from the shape: every multiprocessor gets rows of tiles, and keeps bandwidth times latency in flight.

    With many rows of tiles a warp streams whole rows; with few, the warps of a block share one, so that all bytes of a
    small weight are under way at once. Little's law at 0.8 us of latency says how many bytes those are.
    """
    rows, tiles = packed_tiles(problem.n, problem.k)
    small_shared = arch.shared_bytes < 128 * 1024
    if rows >= 12 * multiprocessors and tiles > 4:
        warps, split, blocks = 8 if small_shared else 12, 1, 1
        chunk = next(c for c in (9, 8, 5, 4) if tiles % c == 0 or c == 4)
    else:
        warps = split = next(s for s in (8, 4, 2, 1) if s <= tiles)
        blocks = 1 if small_shared else 3
        chunk = min(8, -(-tiles // split))
    in_flight = arch.memory_gbps * 800 // multiprocessors  # bytes
    lone_row = rows <= multiprocessors * blocks * (warps // split) and chunk * split >= tiles
    stages = 1 if lone_row else min(max(-(-2 * in_flight // (warps * chunk * blocks * TILE_BYTES)), 2), 3)
    knobs: dict[str, Any] = {
        "engine": "mma", "copy": "bulk" if "tma" in arch.features else "async", "pdl": "pdl" in arch.features,
        "warps": warps, "split_k": split, "blocks_per_sm": blocks,
    }  # fmt: skip
    shapes = [
        (c, s, x)
        for x in (True, False)
        for c, s in ((chunk, stages), (-(-chunk // 2), stages), (-(-chunk // 2), 1), (1, 1))
    ]
    for chunk, stages, stage_x in shapes:
        knobs |= {"chunk": chunk, "stages": stages, "stage_x": stage_x, "unroll": min(chunk, 5)}
        if shared_bytes(GemvKnobs(m=_fixed(problem)["m"], **knobs), problem.k) <= arch.shared_bytes:
            break
    return knobs


def _check_problem(problem: LinearProblem, variant: Variant) -> None:
    knobs, arch = variant.knobs, variant.arch
    _, tiles = packed_tiles(problem.n, problem.k)
    require_slices(knobs.split_k, tiles, f"{tiles} tiles of k={problem.k}")
    need = shared_bytes(knobs, problem.k)
    if need > arch.shared_bytes:
        raise KnobError(
            f"{variant.name} with k={problem.k} needs {need} B of shared memory; a block on "
            f"{arch} has at most {arch.shared_bytes} B",
            f"{fitting(knobs, lambda fewer: shared_bytes(fewer, problem.k), arch)}; "
            "or lower chunk or warps, or set stage_x=0",
        )


def _cases(variant: Variant) -> Iterator[Case]:
    """One row and many, a lone feature, whole tiles and a ragged last one; slices of k that are one tile, whole chunks,
    and uneven.

    A worker takes up to three rows of tiles, so that its ring goes round however short they are.
    """
    knobs = variant.knobs
    workers, split = knobs.warps // knobs.split_k, knobs.split_k
    shapes = (
        (1, 1, split * TILE_K - 32, 1),
        (knobs.m, 2 * TILE_ROWS, split * knobs.chunk * TILE_K, 2),
        (max(1, knobs.m - 1), (2 * workers + 1) * TILE_ROWS - 7, (split * (knobs.chunk + 1) + 1) * TILE_K - 32, 1),
    )
    for seed, (rows, n, k, grid) in enumerate(shapes):
        if shared_bytes(knobs, k) <= variant.arch.shared_bytes:
            yield make_case(variant, Launch(grid, shared_bytes(knobs, k)), rows, whole_rows(knobs, n), k, seed)
    yield from _far_cases(variant)


def _far_cases(variant: Variant) -> Iterator[Case]:
    """The last block's rows of tiles where features are many: Y, W, scales and bias are far. X has few rows."""
    knobs = variant.knobs
    k = (knobs.split_k - 1) * TILE_K + 96
    features = far.far_features(packed_tiles(1, k)[1])
    if knobs.m == MAX_ROWS:  # values of Y are over 2^31 too
        features = max(features, -(-(1 << 31) // (knobs.m - 1)))
    workers = knobs.warps // knobs.split_k
    blocks = features // TILE_ROWS // workers + 1
    features = (blocks - 1) * workers * TILE_ROWS
    if shared_bytes(knobs, k) <= variant.arch.shared_bytes:
        yield far.far_case(
            variant, Launch(blocks, shared_bytes(knobs, k)), (0, knobs.m),
            (features, whole_rows(knobs, workers * TILE_ROWS - 7)), k, (blocks - 1,),
        )  # fmt: skip


def _candidates(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing: blocks that share rows where rows are few, warps that stream them where many.

    Those that differ from the heuristic's in the fewest knobs come first.
    """
    rows, tiles = packed_tiles(problem.n, problem.k)
    found: list[tuple[Any, ...]] = []
    if rows < 12 * multiprocessors:
        for engine, split, blocks, unroll in itertools.product(("mma", "fma"), (4, 8, 9, 16), (2, 3, 4), (2, 5)):
            whole = -(-tiles // split)
            for chunk, stages in ((whole, 1), (-(-whole // 2), 2), (-(-whole // 2), 3), (whole, 2)):
                found.append((engine, split, split, chunk, stages, unroll, blocks))
    else:
        found = list(itertools.product(("mma", "fma"), (8, 12, 16), (1,), (5, 9), (2, 3), (5,), (1, 2)))
    usual = _heuristic(problem, arch, multiprocessors)
    names = "engine", "warps", "split_k", "chunk", "stages", "unroll", "blocks_per_sm"
    ways = [dict[str, Any](zip(names, way, strict=True)) for way in found]
    return sorted(ways, key=lambda knobs: sum(value != usual[name] for name, value in knobs.items()))


_RARER: tuple[dict[str, Any], ...] = (
    {"engine": "fma", "dtype": "fp16", "scale_range": "full", "copy": "async", "warps": 2, "split_k": 1, "chunk": 1,
     "stages": 3, "unroll": 1, "blocks_per_sm": 1},
    {"m": 2, "engine": "fma", "bias": True, "encoding": "nibble", "warps": 4, "split_k": 2, "chunk": 1, "stages": 2,
     "unroll": 1, "stage_x": False, "blocks_per_sm": 1},
    {"m": 4, "dtype": "fp16", "bias": True, "encoding": "nibble", "copy": "async", "pdl": False, "warps": 2,
     "split_k": 1, "chunk": 1, "stages": 2, "unroll": 1, "blocks_per_sm": 1},
    {"m": 4, "bias": True, "residual": "pair", "warps": 4, "split_k": 2, "chunk": 2, "stages": 2, "unroll": 2,
     "blocks_per_sm": 1},
    {"m": 2, "residual": True, "encoding": "nibble", "warps": 2, "split_k": 1, "chunk": 1, "stages": 2, "unroll": 1,
     "blocks_per_sm": 1},
    {"swiglu": True, "warps": 2, "split_k": 1, "chunk": 1, "stages": 2, "unroll": 1, "blocks_per_sm": 1},
    {"m": 8, "swiglu": True, "encoding": "nibble", "warps": 4, "split_k": 2, "chunk": 2, "stages": 2, "unroll": 2,
     "blocks_per_sm": 1},
    {"m": 2, "swiglu": True, "engine": "fma", "dtype": "fp16", "warps": 2, "split_k": 1, "chunk": 1, "stages": 2,
     "unroll": 1, "blocks_per_sm": 1},
    {"m": 8, "bias": True, "scale_range": "full", "warps": 8, "split_k": 4, "chunk": 2, "stages": 2, "unroll": 2,
     "blocks_per_sm": 1},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    rarer=_RARER,
)
