"""`linear`: Y = X W^T (+ bias), with W in MXFP4 packed once for every batch size.

Kernels:
    gemv    at most 8 rows of X; CUDA cores or m16n8k16 tensor cores, fp32 accumulation

Shapes: X [rows, k], W [n, k], bias [n], Y [rows, n]; k is a multiple of 32, n is any. docs/packed-layout.md draws the
layout of W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.registry.case import Buffer, Case, relative_l2
from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec, Knobs, Variant, fitting, knob

TILE_ROWS = 16
TILE_K = 64
TILE_BYTES = 544  # 512 of codes, 32 of scales
MAX_GEMV_ROWS = 8
GATE = 0.005  # relative L2 against float64, rounding of a 16-bit output included

DTYPES = ("bf16", "fp16")
ENCODINGS = ("swizzle", "nibble")
SCALE_RANGES = ("normal", "full")

# Scale bytes that bf16 kernels fold into decoding (mxfp4.cuh): 2^-125 to 2.
NORMAL_SCALES = (2, 128)


@dataclass(frozen=True)
class GemvKnobs(Knobs):
    """Compile-time choices of `linear.gemv`."""

    m: int = knob(1, choices=(1, 2, 4, 8), doc="rows of X, at most")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of X, Y and bias")
    bias: bool = knob(False, doc="add a bias of n values")
    engine: str = knob("mma", choices=("fma", "mma"), doc="CUDA cores, or m16n8k16 tensor cores")
    encoding: str = knob("swizzle", choices=ENCODINGS, doc="order of the bits in a packed word")
    scale_range: str = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes: 2 to 128, or all with 0 and NaN")
    warps: int = knob(8, choices=(1, 2, 4, 5, 8, 9, 12, 15, 16), doc="warps a block")
    split_k: int = knob(
        8, choices=(1, 2, 3, 4, 5, 8, 9, 15, 16), doc="warps that share a row of tiles, each with a slice of k"
    )
    chunk: int = knob(6, low=1, high=16, doc="tiles a copy (544 B each)")
    stages: int = knob(1, low=1, high=16, doc="copies that a warp keeps in flight")
    copy: str = knob("bulk", choices=("bulk", "async"), doc="bulk copies on an mbarrier (sm_90 and newer), or cp.async")
    unroll: int = knob(4, low=1, high=8, doc="tiles that the inner loop takes at once")
    blocks_per_sm: int = knob(3, low=1, high=16, doc="blocks that must fit a multiprocessor: caps registers")
    stage_x: bool = knob(True, doc="keep X in shared memory, for k up to what fits")
    pdl: bool = knob(True, doc="programmatic dependent launch: first weight loads before the previous kernel's end")


def packed_tiles(n: int, k: int) -> tuple[int, int]:
    """Rows of tiles and tiles of k that pad [n, k] to whole tiles."""
    return -(-n // TILE_ROWS), -(-k // TILE_K)


def gemv_layout(bias: bool) -> str:
    """`struct` format of the kernel's arguments; "0P" pads the end as the compiler does."""
    return "@PPPPPiii0P" if bias else "@PPPPiii0P"


def _ring_bytes(knobs: GemvKnobs) -> int:
    """Shared memory that does not depend on the shape, as struct Shared of the template lays it out."""
    size = knobs.warps * knobs.stages * knobs.chunk * TILE_BYTES
    if knobs.copy == "bulk":
        size += knobs.warps * knobs.stages * 8
    if knobs.split_k > 1:
        size = -(-size // 4) * 4 + 2 * knobs.warps * TILE_ROWS * knobs.m * 4
    return -(-size // 16) * 16


def gemv_shared_bytes(knobs: GemvKnobs, k: int) -> int:
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
    if knobs.warps % knobs.split_k:
        legal = [s for s in (1, 2, 3, 4, 5, 8, 9, 15, 16) if knobs.warps % s == 0]
        nearest = min(legal, key=lambda s: abs(s - knobs.split_k))
        raise KnobError(
            f"split_k={knobs.split_k} does not divide warps={knobs.warps}; the nearest that does is {nearest}"
        )
    if knobs.split_k > 1 and knobs.warps // knobs.split_k > 15:
        raise KnobError(f"warps/split_k={knobs.warps // knobs.split_k} is over the 15 named barriers of a block")
    if knobs.blocks_per_sm * knobs.warps > 48:
        raise KnobError(
            f"blocks_per_sm={knobs.blocks_per_sm} of {knobs.warps} warps is over 48 warps a multiprocessor; "
            f"the nearest legal value is {48 // knobs.warps}"
        )
    if knobs.copy == "bulk" and "tma" not in arch.features:
        raise KnobError(f"copy='bulk' needs sm_90 or newer; on {arch} use copy='async'")
    if knobs.pdl and "pdl" not in arch.features:
        raise KnobError(f"pdl=True needs sm_90 or newer; {arch} has no programmatic dependent launch (use pdl=False)")


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
        max_spill_bytes=0,
        require=tuple(require),
        forbid=tuple(forbid),
    )


GEMV = KernelSpec(
    family="linear",
    name="gemv",
    knobs=GemvKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=lambda knobs: gemv_shared_bytes(knobs, TILE_K),
    threads=lambda knobs: knobs.warps * 32,
    entry="jitmx_linear_gemv",
)


def gemv_blocks(knobs: GemvKnobs, n: int, multiprocessors: int) -> int:
    """Blocks of a launch: one row of tiles a worker, or a full persistent wave where there are more rows than that."""
    rows, _ = packed_tiles(n, TILE_K)
    per_block = knobs.warps // knobs.split_k
    return max(1, min(-(-rows // per_block), multiprocessors * knobs.blocks_per_sm))


@dataclass(frozen=True)
class LinearProblem(Problem):
    """One call of `jitmx.linear`: X [m, k] times W [n, k]."""

    m: int = knob(1, low=1, doc="rows of X")
    n: int = knob(5120, low=1, doc="rows of W")
    k: int = knob(2880, low=formats.BLOCK, doc="columns of X and W, a multiple of 32")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of X, Y and bias")
    bias: bool = knob(False, doc="add a bias of n values")
    encoding: str = knob("swizzle", choices=ENCODINGS, doc="how the weight was packed")
    scale_range: str = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes of the weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k % formats.BLOCK:
            nearest = (self.k + formats.BLOCK // 2) // formats.BLOCK * formats.BLOCK
            raise KnobError(
                f"LinearProblem.k={self.k} is not a multiple of {formats.BLOCK}, the values that share a scale; "
                f"the nearest legal value is {nearest}"
            )

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> LinearProblem:
        """A problem whose weight was packed for `arch`; rows beyond one pass are those of a pass."""
        shape = {"encoding": preferred_encoding(arch), **shape}
        if isinstance(shape.get("m"), int):
            shape["m"] = min(shape["m"], MAX_GEMV_ROWS)
        return cls(**shape)

    @classmethod
    def launches(cls, arch: Arch, **shape: Any) -> tuple[LinearProblem, ...]:
        """Full passes over the weight, and one for the rows that they leave."""
        passes = [shape.get("m", 1)]
        if passes[0] > MAX_GEMV_ROWS and passes[0] % MAX_GEMV_ROWS:
            passes.append(passes[0] % MAX_GEMV_ROWS)
        return tuple(cls.on(arch, **{**shape, "m": rows}) for rows in passes)

    @property
    def kernel(self) -> str:
        """The kernel for this many rows."""
        return "gemv"

    def fixed(self) -> dict[str, Any]:
        """The smallest row count that holds m, and what weight and tensors bring with them."""
        rows = next(rows for rows in (1, 2, 4, 8) if rows >= min(self.m, MAX_GEMV_ROWS))
        return {
            "m": rows, "dtype": self.dtype, "bias": self.bias,
            "encoding": self.encoding, "scale_range": self.scale_range,
        }  # fmt: skip


def preferred_encoding(arch: Arch) -> str:
    """The encoding that a target's tensor cores want: nibbles where block-scaled MMA takes them as they are."""
    return "nibble" if "mma_block_scale" in arch.features else "swizzle"


# [n, k] of gpt-oss-120b, without and with a bias: QKV, O, lm_head.
_GPT_OSS = ((5120, 2880, (False, True)), (2880, 4096, (False, True)), (201088, 2880, (False,)))


def _typical(arch: Arch) -> tuple[LinearProblem, ...]:
    return tuple(
        LinearProblem(m, n, k, "bf16", bias, preferred_encoding(arch))
        for n, k, biases in _GPT_OSS
        for bias in biases
        for m in (1, 2, 4, 8)
    )


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
        if gemv_shared_bytes(GemvKnobs(m=problem.fixed()["m"], **knobs), problem.k) <= arch.shared_bytes:
            break
    return knobs


def _check_problem(problem: LinearProblem, variant: Variant) -> None:
    knobs, arch = variant.knobs, variant.arch
    _, tiles = packed_tiles(problem.n, problem.k)
    if knobs.split_k > tiles:
        raise KnobError(
            f"split_k={knobs.split_k} is over the {tiles} tiles of k={problem.k}; the nearest legal value is {tiles}"
        )
    need = gemv_shared_bytes(knobs, problem.k)
    if need > arch.shared_bytes:
        raise KnobError(
            f"{variant.name} with k={problem.k} needs {need} B of shared memory; a block on {arch} has at most "
            f"{arch.shared_bytes} B: {fitting(knobs, lambda fewer: gemv_shared_bytes(fewer, problem.k), arch)}; "
            "or lower chunk or warps, or set stage_x=0"
        )


def reference(
    x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], bias: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Y in float64 from dequantized weights: what every variant is compared with."""
    y = x @ weight.T
    return y if bias is None else y + bias


# Where pair i of a half-word goes: lowest magnitude bit and sign bit (docs/packed-layout.md).
PAIR_PLACES = {"swizzle": ((6, 15), (3, 12), (0, 14), (9, 13)), "nibble": ((0, 3), (4, 7), (8, 11), (12, 15))}


def pack(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], encoding: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The packed layout in NumPy, as `jitmx.pack_weight` makes it on a device.

    Args:
        codes: [n, k], one E2M1 code a byte.
        scales: [n, k / 32].

    Returns:
        Words [tile rows, tiles of k, 32, 4] and scales [tile rows, tiles of k, 8].
    """
    n, k = codes.shape
    tile_rows, tiles = packed_tiles(n, k)
    rows, columns = tile_rows * TILE_ROWS - n, tiles * TILE_K - k
    codes = np.pad(codes, ((0, rows), (0, columns))).reshape(
        tile_rows, 2, 8, tiles, 2, 4, 4, 2
    )  # half, g, tile, block, t, pair, odd
    scales = np.pad(scales, ((0, rows), (0, columns // 32)), constant_values=127).reshape(tile_rows, 2, 8, tiles, 2)
    words = np.zeros((tile_rows, 2, 8, tiles, 2, 4), np.uint32)
    for pair, (magnitude, sign) in enumerate(PAIR_PLACES[encoding]):
        for odd in (0, 1):
            code = codes[..., pair, odd].astype(np.uint32)
            words |= ((code & 7) << magnitude | (code >> 3) << sign) << 16 * odd
    lanes = np.ascontiguousarray(words.transpose(0, 3, 2, 5, 4, 1)).reshape(tile_rows, tiles, 32, 4)
    packed = np.ascontiguousarray(scales.transpose(0, 3, 2, 1, 4)).reshape(tile_rows, tiles, 32).view(np.uint32)
    return lanes, packed


def _cases(variant: Variant) -> Iterator[Case]:
    """One row and many, a lone feature and a ragged last tile; slices of k that are one tile, whole chunks, and uneven.

    A worker takes up to three rows of tiles, so that its ring goes round however short they are.
    """
    knobs = variant.knobs
    workers, split = knobs.warps // knobs.split_k, knobs.split_k
    shapes = (
        (1, 1, split * TILE_K - 32, 1),
        (knobs.m, 17, split * knobs.chunk * TILE_K, 2),
        (max(1, knobs.m - 1), (2 * workers + 1) * TILE_ROWS - 7, (split * (knobs.chunk + 1) + 1) * TILE_K - 32, 1),
    )
    for seed, (rows, n, k, grid) in enumerate(shapes):
        if gemv_shared_bytes(knobs, k) <= variant.arch.shared_bytes:
            yield _case(variant, rows, n, k, grid, seed)


def _case(variant: Variant, rows: int, n: int, k: int, grid: int, seed: int) -> Case:
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 6
    scales = generator.integers(centre - 3, centre + 4, (n, k // 32)).astype(np.uint8)
    if knobs.scale_range == "full":
        scales[0, 0], scales[-1, -1] = 0, formats.SCALE_NAN
    stored: Any = ml_dtypes.bfloat16 if knobs.dtype == "bf16" else np.float16
    x = generator.standard_normal((rows, k)).astype(stored)
    bias = generator.standard_normal(n).astype(stored)
    words, packed = pack(codes, scales, knobs.encoding)
    weight = formats.dequantize(codes, scales, formats.get("mxfp4"))
    wanted = reference(x.astype(np.float64), weight, bias.astype(np.float64) if knobs.bias else None)
    addend = (Buffer(bias),) if knobs.bias else ()
    return Case(
        name=f"rows={rows} n={n} k={k} grid={grid}",
        grid=grid,
        shared_bytes=gemv_shared_bytes(knobs, k),
        layout=gemv_layout(knobs.bias),
        arguments=(
            Buffer(x),
            Buffer(words),
            Buffer(packed),
            *addend,
            Buffer(np.empty((rows, n), stored), output=True),
            rows,
            n,
            k,
        ),
        check=lambda outputs: relative_l2(outputs[0], wanted),
        gate=GATE,
    )


FAMILY = Family(
    name="linear",
    summary="Y = X W^T + bias with W in MXFP4",
    specs=(GEMV,),
    problem=LinearProblem,
    typical=_typical,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
)
