"""Knobs of `linear.stream`: what is legal where, what a launch takes, and what its machine code must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.arguments import ARGUMENTS
from jitmx.kernels.linear.knobs import BIAS, DTYPE, ENCODING, RESIDUAL, SCALE_RANGE, SWIGLU
from jitmx.kernels.linear.layout import TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import has_clusters, require_divisor, require_registers, require_resident
from jitmx.kernels.linear.problem import LinearProblem, require_gated
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import COPY, PDL, KernelSpec, Knobs, Variant, knob

ROWS = (1, 2, 4, 8, 16, 32)
MAX_ROWS = ROWS[-1]
WARPS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24)
SPLITS = (1, 2, 3, 4, 5, 6, 8)

FOLDED = ("fold", "halves")  # scales multiply codes as they are decoded

# Targets whose tensor cores were seen to count subnormal bf16 operands, which PTX leaves open.
SUBNORMAL_BF16 = frozenset({"sm_90a"})

# A launch of clusters of 4 or 8 finds no place for all of them in one wave when it asks for every multiprocessor: the
# multiprocessors of a part of the chip are not always a multiple of 4.
SPARE_CLUSTERS = {1: 0, 2: 0, 4: 1, 8: 1}


@dataclass(frozen=True)
class StreamKnobs(Knobs):
    """Compile-time choices of `linear.stream`."""

    m: int = knob(1, choices=ROWS, doc="rows of X, at most")
    dtype: str = DTYPE
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    norm: bool = knob(False, doc="RMSNorm of X, whose product with the norm's weight is rounded once as it is staged")
    argmax: bool = knob(False, doc="no Y, but the n of each row's largest sum, compared in fp32 with all that is added")
    swiglu: bool = SWIGLU
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    scaling: str = knob(
        "fold",
        choices=("fold", "halves", "post", "bare"),
        doc="scales multiply codes as they are decoded (halves: two of them in a register), or sums of blocks; bare: "
        "codes are not even brought to their exponent, and bf16 X must be below 2^63",
    )
    warps: int = knob(8, choices=WARPS, doc="warps a block")
    share: bool = knob(True, doc="warps share rows of tiles; without it each takes whole rows")
    split_k: int = knob(4, choices=SPLITS, doc="warps that share a row of tiles, each with a slice of k")
    cluster: int = knob(1, choices=(1, 2, 4, 8), doc="blocks that share rows of tiles, each with a slice of k")
    sums: str = knob("warp", choices=("warp", "block"), doc="whose sums go to another block of the cluster")
    tile_rows: int = knob(1, choices=(1, 2), doc="rows of tiles that a warp takes at once")
    resident: bool = knob(True, doc="with share: all weights of a block lie in shared memory; without: a ring a warp")
    chunk: int = knob(4, low=1, high=16, doc="of a ring: tiles a copy, of each row of tiles (544 B each)")
    stages: int = knob(2, low=1, high=8, doc="of a ring: copies that a warp keeps in flight")
    whole: bool = knob(False, doc="without share: a row of tiles is a multiple of `chunk`: no copy crosses two")
    copy: str = COPY
    unroll: int = knob(2, low=1, high=8, doc="tiles that the inner loop takes at once")
    predecode: int = knob(0, low=0, high=4, doc="with share: tiles that a warp decodes before the wait for X")
    ahead: int = knob(
        0, choices=(0, 2),
        doc="with share: groups of rows of tiles asked for before the wait for X, the others once X is; 0: all",
    )  # fmt: skip
    blocks_per_sm: int = knob(1, low=1, high=4, doc="blocks that must fit a multiprocessor: caps registers")
    late: bool = knob(False, doc="let the next launch start once X is here, so that its weights do not delay X")
    pdl: bool = PDL


def _groups(knobs: StreamKnobs, n: int) -> int:
    """Groups of `tile_rows` rows of tiles."""
    return -(-packed_tiles(n, TILE_K)[0] // knobs.tile_rows)


def _clusters(knobs: StreamKnobs, n: int, multiprocessors: int) -> int:
    """Clusters of a launch: as many as there are places for, but no more than there is work for."""
    return max(1, min(_groups(knobs, n), multiprocessors // knobs.cluster - SPARE_CLUSTERS[knobs.cluster]))


def _splits_columns(knobs: StreamKnobs) -> bool:
    """Whether the two blocks of a tile go to columns of their own."""
    return knobs.scaling not in FOLDED and knobs.m <= 4


def slot_bytes(knobs: Any) -> int:
    """What one warp's sums of a row of tiles take, bytes."""
    return int(-(-knobs.m // 8) * 8 * (1 if knobs.m <= 2 else 2 if knobs.m <= 4 else 4) * 16)


def least_tiles(knobs: StreamKnobs) -> int:
    """Tiles of k that give each block one, and with sums='block' room for its warps' sums where a row's codes were."""
    parts = knobs.split_k * slot_bytes(knobs) if knobs.sums == "block" else 1
    return knobs.cluster * -(-parts // (TILE_ROWS * TILE_K // 2))


def _tail_bytes(knobs: StreamKnobs, longest: int) -> int:
    """What argmax and norm take where a block has so many tiles of k: ranks of warps, and sums of squares, bytes."""
    ranks = knobs.argmax * knobs.warps * 8
    squares = knobs.norm * (knobs.cluster + -(-longest // 4)) * 4
    return knobs.m * (ranks + squares)


def shared_bytes(knobs: StreamKnobs, n: int, k: int, clusters: int) -> int:
    """Dynamic shared memory of a launch of so many clusters, bytes."""
    tiles = packed_tiles(n, k)[1]
    longest = -(-tiles // knobs.cluster)
    x = (knobs.m if _splits_columns(knobs) else -(-knobs.m // 8) * 8) * (longest * TILE_K * 2 + 64)
    x += _tail_bytes(knobs, longest)
    rings = knobs.warps * knobs.stages
    stage = knobs.chunk * knobs.tile_rows * TILE_BYTES
    if not knobs.share:
        return -(-rings * (stage + 8 * (knobs.copy == "bulk")) // 16) * 16 + x
    most = -(-_groups(knobs, n) // clusters)
    weights, barriers = (
        (most * knobs.tile_rows * longest * TILE_BYTES, most) if knobs.resident else (rings * stage, rings)
    )
    sharers = knobs.cluster - 1 if knobs.sums == "block" else knobs.cluster * knobs.split_k
    places = -(-most // knobs.cluster) * sharers * knobs.tile_rows
    return weights + (barriers + 2) // 2 * 16 + x + places * slot_bytes(knobs)


def _check(knobs: StreamKnobs, arch: Arch) -> None:
    _check_idle(knobs)
    if knobs.argmax and knobs.residual == "pair":
        raise KnobError("residual='pair' leaves Y as a pair, and argmax=True leaves none", "use residual=True")
    if knobs.swiglu:
        require_gated(knobs)
    if knobs.share:
        require_divisor(knobs, "split_k", SPLITS)
    if knobs.ahead and knobs.predecode:
        raise KnobError(
            f"predecode={knobs.predecode} needs weights before the wait, some of which "
            f"ahead={knobs.ahead} asks for after it",
            "use predecode=0 or ahead=0",
        )
    if not knobs.resident and knobs.predecode > knobs.chunk:
        raise KnobError(
            f"predecode={knobs.predecode} takes more tiles than the chunk={knobs.chunk} that comes first",
            f"use predecode={knobs.chunk}",
        )
    check_decoding(knobs, arch)
    if knobs.cluster > 1:
        if not has_clusters(arch):
            raise KnobError(f"cluster={knobs.cluster} needs sm_90 or sm_100", f"on {arch} use cluster=1")
        if not knobs.share:
            raise KnobError(f"cluster={knobs.cluster} shares rows of tiles, which share=0 rules out", "use cluster=1")
    require_registers(knobs.warps, knobs.blocks_per_sm, _least_registers(knobs))


def _least_registers(knobs: StreamKnobs) -> int:
    """Registers that a thread takes at least, in its loop over tiles or, with tiles decoded early, as it stages X."""
    folded, split, columns = knobs.scaling in FOLDED, _splits_columns(knobs), -(-knobs.m // 8)
    early = knobs.predecode * knobs.tile_rows
    sums = 4 * (2 if split or (folded and columns == 1) else columns) * knobs.tile_rows
    scales = 0 if folded else 5 if split else 27
    loop = 10 + 2 * sums + 12 * max(0, early - 1) + 8 * (knobs.unroll > 1) + scales
    staging = (56 if knobs.m >= 4 else 26) + 14 * early if knobs.norm else 0
    # In 40 registers a warp that decodes nothing early, or more than a tile at once, spills.
    return max(loop, staging, 41 if knobs.unroll > 1 or early != 1 else 0)


# Knobs of one way to share the work, which select nothing in the other; and of a ring.
_SHARED, _STREAMED, _RING = ("split_k", "predecode", "ahead", "resident"), ("whole",), ("chunk", "stages")


def _check_idle(knobs: StreamKnobs) -> None:
    """Refuse a value that would select nothing, so that no code has two names."""
    idle = [(name, f"share={int(knobs.share)}") for name in (_STREAMED if knobs.share else _SHARED)]
    if knobs.share:
        resident = f"resident={int(knobs.resident)}"
        idle += [(name, resident) for name in (_RING if knobs.resident else ("sums", "ahead"))]
    if not knobs.pdl:
        idle.append(("late", "pdl=0"))
    if knobs.copy == "async":
        idle.append(("ahead", "copy='async'"))
    if knobs.cluster == 1 or knobs.split_k == 1 or not knobs.share:
        idle.append(("sums", f"cluster={knobs.cluster}, split_k={knobs.split_k} and share={int(knobs.share)}"))
    for name, beside in idle:
        usual = StreamKnobs.__dataclass_fields__[name].default
        if getattr(knobs, name) != usual:
            raise KnobError(f"{name}={getattr(knobs, name)!r} selects nothing with {beside}", f"leave it at {usual!r}")


def check_decoding(knobs: Any, arch: Arch) -> None:
    """Refuse warps that a multiprocessor has not, and a `scaling` that dtype, scales or target rule out."""
    require_resident(knobs.blocks_per_sm, knobs.warps, "warps")
    if knobs.scaling in FOLDED and (knobs.dtype != "bf16" or knobs.scale_range != "normal"):
        raise KnobError(
            f"scaling={knobs.scaling!r} with dtype={knobs.dtype!r} and "
            f"scale_range={knobs.scale_range!r}: only bf16 weights with normal scales can be "
            "scaled as they are decoded",
            "use scaling='post'",
        )
    if knobs.scaling == "bare" and knobs.dtype == "bf16" and arch.name not in SUBNORMAL_BF16:
        raise KnobError(
            f"scaling='bare' with dtype='bf16' needs tensor cores that count subnormal operands, as seen on "
            f"{', '.join(sorted(SUBNORMAL_BF16))}",
            f"on {arch} use scaling='post'",
        )


def contract(knobs: Any, arch: Arch) -> Contract:
    """What kernels promise whose warps decode tiles from shared memory, and share rows of tiles in clusters."""
    return Contract(
        max_registers=min(255, 65536 // (knobs.warps * 32 * knobs.blocks_per_sm)),
        require=(
            r"\bLDS\.128\b",
            r"\bUBLKCP\b" if knobs.copy == "bulk" else r"\bLDGSTS\.E\..*128",
            r"HMMA\.16816\.F32" + (r"\.BF16" if knobs.dtype == "bf16" else ""),
            *((r"\bSTAS\b",) if knobs.cluster > 1 else ()),
        ),
    )


SPEC = KernelSpec(
    family="linear",
    name="stream",
    knobs=StreamKnobs,
    contract=contract,
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, 1, TILE_K * knobs.cluster, 1),
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: StreamKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """One block a multiprocessor, in clusters."""
    clusters = _clusters(knobs, problem.n, multiprocessors)
    # A counter, and the rank of what is largest in each row.
    workspace = 8 * (1 + knobs.m) if knobs.argmax else 0
    return Launch(
        clusters * knobs.cluster, shared_bytes(knobs, problem.n, problem.k, clusters), knobs.cluster, workspace
    )


Misfit = Callable[[LinearProblem, Any, Arch, int], tuple[str, str] | None]


def checker(misfit: Misfit) -> Callable[[LinearProblem, Variant], None]:
    """What raises KnobError where a legal variant cannot serve a problem, for the reason that `misfit` gives."""

    def check(problem: LinearProblem, variant: Variant) -> None:
        if found := misfit(problem, variant.knobs, variant.arch, variant.arch.multiprocessors):
            reason, remedy = found
            raise KnobError(f"{variant.name}: {reason}", remedy)

    return check


def misfit(problem: LinearProblem, knobs: StreamKnobs, arch: Arch, multiprocessors: int) -> tuple[str, str] | None:
    """Why knobs that are legal on the target cannot serve the problem, and the remedy; or None."""
    tiles = packed_tiles(problem.n, problem.k)[1]
    if knobs.cluster > tiles:
        nearest = max(cluster for cluster in SPARE_CLUSTERS if cluster <= tiles)
        return (
            f"cluster={knobs.cluster} is over the {tiles} tiles of k={problem.k}",
            f"the nearest legal value is {nearest}",
        )
    least = least_tiles(knobs)
    if tiles < least:
        return (
            f"sums='block' puts sums where codes were, which takes {least} tiles of k; k={problem.k} has {tiles}",
            "use sums='warp'",
        )
    if knobs.whole and tiles % knobs.chunk:
        nearest = min((c for c in range(1, 17) if tiles % c == 0), key=lambda chunk: abs(chunk - knobs.chunk))
        return (
            f"whole=1 with chunk={knobs.chunk} needs a multiple of that many tiles of k; k={problem.k} has {tiles}",
            f"use chunk={nearest} or whole=0",
        )
    most = -(-_groups(knobs, problem.n) // _clusters(knobs, problem.n, multiprocessors))
    if not knobs.resident and most * knobs.split_k > knobs.warps:
        return (
            f"resident=0 streams a group of rows of tiles by {knobs.split_k} of {knobs.warps} warps; with "
            f"n={problem.n} a block has {most}",
            "use resident=1, fewer split_k or more warps",
        )
    need = launch(knobs, problem, multiprocessors).shared_bytes
    if need > arch.shared_bytes:
        remedy = "set share=0 or raise cluster" if knobs.share else "lower warps, chunk or stages"
        return (
            f"with m={knobs.m}, n={problem.n} and k={problem.k} it needs {need} B of shared memory; a block on {arch} "
            f"has at most {arch.shared_bytes} B",
            f"{remedy}, or use another kernel",
        )
    return None
