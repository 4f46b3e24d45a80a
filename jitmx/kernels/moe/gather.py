"""`moe.gather`: rows of x that each expert gets, in the order in which `moe.wgmma` and `fused` multiply by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.moe import far
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import ARGUMENTS, TILE_COUNTERS, TILE_M, WIDEST, gather_case
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

RESIDENT = {1: 32, 2: 24, 3: 20, 4: 16}  # warps of a multiprocessor by steps under way


@dataclass(frozen=True)
class GatherKnobs(Knobs):
    """Compile-time choices of `moe.gather`."""

    tile_m: int = TILE_M
    spans: int = knob(5, low=1, high=32, doc="blocks that share a tile of the schedule")
    warps: int = knob(4, choices=(1, 2, 4), doc="a block, each with 16 rows at a time")
    at_once: int = knob(3, low=1, high=4, doc="steps of 64 k whose loads a warp has under way")
    tile_counters: bool = TILE_COUNTERS
    pdl: bool = PDL

    @property
    def resident(self) -> int:
        """Warps of a multiprocessor, as registers allow: an item of a lane is four vectors a step."""
        return RESIDENT[self.at_once]


def _check(knobs: GatherKnobs, arch: Arch) -> None:
    if "wgmma" not in arch.features:
        raise KnobError(f"moe.gather is of moe.wgmma, which needs the instructions of sm_90a; {arch} lacks them")


SPEC = KernelSpec(
    family="moe",
    name="gather",
    knobs=GatherKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=65536 // (32 * knobs.resident) // 8 * 8,
        require=(r"\bLDG\.E\..*128", r"\bSTG\.E\..*128"),
    ),
    check=_check,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: GatherKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """Some blocks for each tile that the schedule can have; those without a tile end at once."""
    return Launch(capacity(problem.m, problem.top, problem.experts, knobs.tile_m) * knobs.spans, 0)


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    require_usual("gather", problem)
    if problem.product != "gather":
        raise KnobError(
            f"moe.gather brings rows together and makes no product={problem.product}", "use product='gather'"
        )
    return {}


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Twenty warps a tile: an item each of 16 rows of gpt-oss' 45 steps, nine of 192 rows."""
    return {"tile_m": WIDEST, "spans": 5, "warps": 4, "at_once": 3, "pdl": True}


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Other shares and loads under way, best guess first."""
    base = _heuristic(problem, arch, multiprocessors)
    others = ({"spans": 3}, {"spans": 8}, {"spans": 10, "warps": 2}, {"at_once": 1}, {"at_once": 2}, {"at_once": 4})
    return [base, *(base | other for other in others)]


def _cases(variant: Variant) -> Iterator[Case]:
    """One row of one step; experts of several tiles, of none, ids of none, and slices that are unlike; warps with items
    of two units of rows.
    """
    knobs, generator = variant.knobs, np.random.default_rng(11)
    spread = generator.choice([-1, *[0] * 6, 1, 3, 4], (knobs.tile_m, 2)).astype(np.int32)
    first = np.flatnonzero(spread == 0)
    spread.flat[first[: (len(first) - 1) % 16]] = -1  # the last warp has one row
    wide = (2 * knobs.spans + knobs.at_once) * TILE_K - 32
    # Of three units, warps have two items and more, and where one ends another's are some of a warp's.
    three, long = np.zeros((33, 1), np.int32), (2 * knobs.spans * knobs.warps // 3 + 1) * knobs.at_once * TILE_K - 32
    shapes = (np.zeros((1, 1), np.int32), 1, TILE_K), (spread, 4, wide), (three, 1, long)
    for seed, (ids, experts, hidden) in enumerate(shapes):
        problem = MoeProblem(len(ids), experts, ids.shape[1], hidden, 32, product="gather")
        yield gather_case(variant, launch(knobs, problem, 1), problem, Routing(ids), seed)
    # Vectors of x are over 2^32, of lines over 2^33.
    problem = MoeProblem(2, 2, 2, 288, 32, product="gather")
    few = np.array([[1, 0], [1, -1]], np.int32)
    case = gather_case(variant, launch(knobs, problem, 1), problem, Routing(few), 9)
    yield far.far_gather(variant, case, problem, launch)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_counters": True},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    candidates=_candidates,
    runs_on=lambda arch: "wgmma" in arch.features,
    rarer=_RARER,
)
