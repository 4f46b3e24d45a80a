"""`linear.splitk`: some dozen to a hundred rows of X on sm_90a; blocks of a cluster share a tile, a slice of k each.

Weights are decoded in registers as one operand of wgmma. X comes by tensor copies and is put into their order of k in
shared memory, and a block's first weights are on their way there before the previous kernel has ended: a launch needs
no workspace and waits for no other blocks than those of a cluster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear import warpgroups
from jitmx.kernels.linear.arguments import MAPPED, make_case
from jitmx.kernels.linear.knobs import BF16, BIAS, ENCODING, NORMAL_SCALE_RANGE, RESIDUAL
from jitmx.kernels.linear.layout import CODE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.warpgroups import tiles
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

MAX_ROWS = 256
_MOVERS, _MOVING = 4, 56  # warps that bring X, and registers a thread of them


@dataclass(frozen=True)
class SplitKKnobs(Knobs):
    """Compile-time choices of `linear.splitk`."""

    dtype: str = BF16
    bias: bool = BIAS
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    groups: int = knob(3, choices=(2, 3, 4), doc="warpgroups that multiply, 64 rows of W each")
    tile_m: int = knob(64, choices=tuple(range(16, 129, 16)), doc="rows of X that a block takes")
    split_k: int = knob(4, low=1, high=8, doc="blocks, a cluster, that share a tile, each with a slice of k")
    chunk: int = knob(4, choices=(2, 4), doc="steps of 64 k of W that a warp asks for at once")
    ring: int = knob(2, low=1, high=6, doc="such chunks that a block has room for, of W and of X")
    pdl: bool = PDL


def threads(knobs: SplitKKnobs) -> int:
    """Threads a block: those that multiply, and those that bring X."""
    return knobs.groups * 128 + _MOVERS * 32


def launch_registers(knobs: SplitKKnobs) -> int:
    """Registers a thread at launch; warpgroups that multiply then take some from those that bring X."""
    return min(248, 65536 // threads(knobs) // 8 * 8)


def multiplying_registers(knobs: SplitKKnobs) -> int:
    """Registers a thread of the warpgroups that multiply, as the template sets them."""
    pool = launch_registers(knobs) * threads(knobs) - _MOVING * 32 * _MOVERS
    return min(240, pool // (knobs.groups * 128) // 8 * 8)


def shared_bytes(knobs: SplitKKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    steps, warps, columns = knobs.chunk * knobs.ring, knobs.groups * 4, knobs.tile_m // 8
    size = steps * (knobs.tile_m * 128 + 24) + warps * (steps * CODE_BYTES + knobs.ring * 8)
    if knobs.split_k > 1:
        # A warp's sums of 16 rows of W by 8 of X on their way to another block: 24 bits each, or all where Y is a pair.
        part = 512 if knobs.residual == "pair" else 384
        size += warps * ((knobs.split_k - 1) * -(-columns // knobs.split_k) * part + 8)
    return -(-size // 1024) * 1024


# Steps of X that a block has room for: two that are multiplied, and as many that are on their way.
_LEAST_STEPS = 4

# A thread's registers beside sums: fragments of two steps, words of one, addresses.
_WORKING = 74


def _check(knobs: SplitKKnobs, arch: Arch) -> None:
    warpgroups.require_wgmma("splitk", arch)
    if knobs.chunk * knobs.ring < _LEAST_STEPS:
        raise KnobError(
            f"ring={knobs.ring} chunks of {knobs.chunk} steps are under the {_LEAST_STEPS} that X needs room for",
            f"the nearest legal value is ring={_LEAST_STEPS // knobs.chunk}",
        )
    need, have = knobs.tile_m // 2 + _WORKING, multiplying_registers(knobs)
    if need > have:
        raise KnobError(
            f"tile_m={knobs.tile_m} with groups={knobs.groups} takes about {need} registers a thread of {have}",
            f"the nearest legal value is tile_m={2 * (have - _WORKING) // 16 * 16}",
        )


def _contract(knobs: SplitKKnobs, arch: Arch) -> Contract:
    return Contract(
        min_registers=launch_registers(knobs),
        max_registers=launch_registers(knobs),
        require=(
            # Products of two steps are under way at once: where the compiler sees a hazard, it waits for each.
            rf"HGMMA\.64x{knobs.tile_m}x16\.F32\.BF16 R\d+, R\d+, gdesc\[UR\d+\]",
            r"WARPGROUP\.DEPBAR\.LE gsb0, 0x4",
            r"\bUBLKCP\b",
            r"\bUTMALDG\b",
        ),
    )


SPEC = KernelSpec(
    family="linear",
    name="splitk",
    knobs=SplitKKnobs,
    contract=_contract,
    check=_check,
    shared_bytes=shared_bytes,
    threads=threads,
    arguments=lambda knobs: MAPPED,
)


def launch(knobs: SplitKKnobs, problem: LinearProblem, multiprocessors: int) -> Launch:
    """A cluster for each tile of Y, or a block."""
    maps = {"x_map": warpgroups.x_map(problem.m, problem.k, knobs.tile_m)}
    blocks = tiles(knobs, problem.m, problem.n) * knobs.split_k
    return Launch(blocks, shared_bytes(knobs), knobs.split_k, maps=maps)


_fixed = partial(warpgroups.fixed, "splitk")

# Clusters of so many blocks that find no place where all multiprocessors are asked for: those of a part of the chip are
# not a multiple of their size. Of 132 multiprocessors of an H200, 39 clusters of 3 have one.
_SPARE = {1: 0, 2: 0, 3: 5, 4: 1, 5: 4, 6: 4, 7: 4, 8: 1}

# Microseconds of a launch, of a warpgroup's step, and of that for each row of X, fitted to 64 to 128 rows of QKV and O
# of gpt-oss (8 % rms).
_LAUNCH_US, _STEP_US, _ROW_US = 3.9, 0.041, 0.0013

# Chunk and ring worth trying, and how much longer each takes than the first (as measured with 96 and 128 rows).
_DEPTHS = {(4, 2): 1.0, (2, 3): 1.01, (2, 4): 1.03, (2, 2): 1.13, (4, 1): 1.16}


def _microseconds(problem: LinearProblem, knobs: SplitKKnobs, multiprocessors: int) -> float:
    """What a launch should take."""
    steps = packed_tiles(problem.n, problem.k)[1]
    spare = _SPARE[knobs.split_k] if multiprocessors >= 16 * knobs.split_k else 0
    rounds = -(-tiles(knobs, problem.m, problem.n) // max(1, multiprocessors // knobs.split_k - spare))
    work = knobs.groups * -(-steps // knobs.split_k)
    return rounds * (_LAUNCH_US + work * (_STEP_US + _ROW_US * knobs.tile_m))


def _ranked(problem: LinearProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Tuned knobs that are legal and serve the problem, by rising time that they should take."""
    fixed, steps = _fixed(problem), packed_tiles(problem.n, problem.k)[1]
    whole = min(128, -(-problem.m // 16) * 16)
    half = max(16, -(-whole // 32) * 16)
    found = []
    splits = range(1, min(8, steps) + 1)
    for groups, tile_m, split, ((chunk, ring), longer) in itertools.product(
        (3, 4, 2), dict.fromkeys((whole, half)), splits, _DEPTHS.items()
    ):
        tuned = {
            "groups": groups, "tile_m": tile_m, "split_k": split, "chunk": chunk, "ring": ring, "pdl": True,
        }  # fmt: skip
        if variant := SPEC.legal(arch, **fixed, **tuned):  # else too much shared memory, or too few registers
            found.append((_microseconds(problem, variant.knobs, multiprocessors) * longer, tuned))
    return [tuned for _, tuned in sorted(found, key=lambda item: item[0])]


def _cases(variant: Variant) -> Iterator[Case]:
    """Two short rows, a lone value; ragged tiles of rows and of features, whole ones; slices that go round the ring
    three times, uneven ones.
    """
    knobs = variant.knobs
    features, split = knobs.groups * 64, knobs.split_k
    around = 3 * knobs.ring * knobs.chunk + 5
    shapes = (
        (2, 2, split * TILE_K - 32),
        (knobs.tile_m + 1, features + TILE_ROWS, (split * 3 + split - 1) * TILE_K),
        (knobs.tile_m, 2 * features - 7, split * around * TILE_K - 32),
        (1, 1, split * TILE_K),
    )
    for seed, (rows, n, k) in enumerate(shapes):
        yield make_case(variant, launch(knobs, LinearProblem(rows, n, k), 132), rows, n, k, seed)
    yield from warpgroups.far_cases(variant, launch, MAX_ROWS, 1 << 25)


_RARER: tuple[dict[str, Any], ...] = (
    {"bias": True, "residual": True, "groups": 2, "tile_m": 16, "chunk": 2, "split_k": 2},
    {"residual": "pair", "groups": 2, "tile_m": 16, "chunk": 2, "split_k": 3, "encoding": "nibble"},
    {"groups": 2, "tile_m": 32, "chunk": 2, "split_k": 1, "ring": 2, "pdl": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    max_rows=MAX_ROWS,
    fixed=_fixed,
    launch=launch,
    heuristic=lambda problem, arch, multiprocessors: _ranked(problem, arch, multiprocessors)[0],
    cases=_cases,
    check=warpgroups.check_problem,
    candidates=lambda problem, arch, multiprocessors: _ranked(problem, arch, multiprocessors)[:40],
    runs_on=warpgroups.runs_on,
    tile=lambda m, n, k, stages: warpgroups.tile("splitk", m, n, k) | {"chunk": 2, "ring": (stages or 6) // 2},
    rarer=_RARER,
)
