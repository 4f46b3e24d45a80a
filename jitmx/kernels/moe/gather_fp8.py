"""`moe.gather_fp8`: rows of x by expert, rounded to E4M3 with a scale a row on their way to products by wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.fp8_rows import LINE_K
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.moe import far
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.fp8_arguments import ARGUMENTS, gather_case
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import TILE_COUNTERS, TILE_M, WIDEST
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob


@dataclass(frozen=True)
class GatherFp8Knobs(Knobs):
    """Compile-time choices of `moe.gather_fp8`."""

    tile_m: int = TILE_M
    rows: int = knob(16, choices=(8, 16, 32, 64), doc="rows of a tile that a block takes")
    warps: int = knob(8, choices=(4, 8, 16), doc="warps a block, each with a row at a time")
    tile_counters: bool = TILE_COUNTERS
    pdl: bool = PDL


def _check(knobs: GatherFp8Knobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(
            f"moe.gather_fp8 is of products by wgmma, which need the instructions of sm_90a; {arch} lacks them"
        )
    if knobs.warps > knobs.rows:
        raise KnobError(
            f"warps={knobs.warps} are more than rows={knobs.rows}, one of which each takes",
            f"the nearest legal value is warps={knobs.rows}",
        )


def runs_on(arch: Arch) -> bool:
    """Whether a target has the instructions of what reads these rows."""
    return "wgmma" in arch.features


SPEC = KernelSpec(
    family="moe",
    name="gather_fp8",
    knobs=GatherFp8Knobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(128, 65536 // (64 * knobs.warps)),
        require=(r"\bLDG\.E\..*128", r"\bF2FP\.SATFINITE\.E4M3\.F32\.PACK_AB"),
    ),
    check=_check,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: GatherFp8Knobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """Some blocks for each tile that the schedule can have; those without a row end at once."""
    tiles = capacity(problem.m, problem.top, problem.experts, knobs.tile_m)
    return Launch(tiles * (knobs.tile_m // knobs.rows), 0)


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    require_usual("gather_fp8", problem, "x_format")
    if problem.product != "gather" or problem.x_format != "fp8":
        raise KnobError(
            f"moe.gather_fp8 brings rows together in E4M3 and makes no product={problem.product} of "
            f"x_format={problem.x_format}",
            "use product='gather' and x_format='fp8'",
        )
    return {}


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """More and fewer rows a block, best guess first."""
    shapes = ((16, 8), (8, 8), (16, 16), (32, 16), (8, 4), (16, 4))
    return [{"tile_m": WIDEST, "rows": rows, "warps": warps, "pdl": True} for rows, warps in shapes]


def _cases(variant: Variant) -> Iterator[Case]:
    """One row of one block of k; experts of several tiles, of none, ids of none, and half lines."""
    knobs, generator = variant.knobs, np.random.default_rng(11)
    spread = generator.choice([-1, *[0] * 6, 1, 3, 4], (knobs.tile_m, 2)).astype(np.int32)
    spread[:, 0] = np.where(np.arange(knobs.tile_m) < 8, 0, spread[:, 0])  # rows with edges are there
    spread[-1] = -1
    for seed, (ids, experts, hidden) in enumerate(
        ((np.zeros((1, 1), np.int32), 1, 32), (spread, 4, 1376), (spread, 4, 128))
    ):
        problem = MoeProblem(len(ids), experts, ids.shape[1], hidden, 32, product="gather", x_format="fp8")
        yield gather_case(variant, launch(knobs, problem, 1), problem, Routing(ids), seed)
    # Vectors of x are over 2^32, of lines over 2^33.
    problem = MoeProblem(2, 2, 2, 544, 32, product="gather", x_format="fp8")
    few = np.array([[1, 0], [1, -1]], np.int32)
    case = gather_case(variant, launch(knobs, problem, 1), problem, Routing(few), 9)
    yield far.far_gather(variant, case, problem, launch, LINE_K)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "rows": 8, "warps": 4, "pdl": False},
    {"tile_m": 64, "rows": 16, "tile_counters": True},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=lambda problem, arch, multiprocessors: _candidates(problem, arch, multiprocessors)[0],
    cases=_cases,
    candidates=_candidates,
    runs_on=runs_on,
    rarer=_RARER,
)
