"""`moe.combine`: y from the parts that `moe.grouped` made of each row, in the order of its slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.moe import far
from jitmx.kernels.moe.arguments import Routing
from jitmx.kernels.moe.grouped_arguments import ARGUMENTS, combine_case
from jitmx.kernels.moe.knobs import RESIDUAL
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MAX_TOP, MoeProblem
from jitmx.kernels.routing.knobs import MAX_TOKENS
from jitmx.registry.case import Case
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob


@dataclass(frozen=True)
class CombineKnobs(Knobs):
    """Compile-time choices of `moe.combine`."""

    top: int = knob(4, low=1, high=MAX_TOP, doc="parts a row")
    residual: bool | str = RESIDUAL
    warps: int = knob(8, choices=(1, 2, 4, 8, 12, 16), doc="warps a block, which makes a row of y at a time")
    pdl: bool = PDL

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, as registers allow: a thread has a vector of each part and of the residual."""
        loads = self.top + RESIDUALS.index(self.residual)
        return min(16, max(1, (1536 if loads <= 4 else 1152 if loads <= 6 else 768) // (self.warps * 32)))


SPEC = KernelSpec(
    family="moe",
    name="combine",
    knobs=CombineKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (knobs.resident * knobs.warps * 32) // 8 * 8), require=(r"\bLDG\.E\..*128",)
    ),
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: CombineKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a row, as far as blocks run side by side; these go on with further rows."""
    return Launch(min(problem.m, multiprocessors * knobs.resident), 0)


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """Parts a row, and whether something is added to them."""
    require_usual("combine", problem, "activation", "x_format", "weight_on")
    if problem.product != "combine":
        raise KnobError(f"moe.combine adds up parts and makes no product={problem.product}", "use product='combine'")
    return problem.pick("top", "residual")


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """A vector of eight values a thread, more where a row is longer than a block."""
    wanted = -(-problem.hidden // 256)
    return {
        "warps": next((warps for warps in (1, 2, 4, 8, 12) if warps >= wanted), 12), "pdl": "pdl" in arch.features,
    }  # fmt: skip


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Blocks of every size, best guess first."""
    base = _heuristic(problem, arch, multiprocessors)
    return [base] + [base | {"warps": warps} for warps in (4, 8, 12, 16) if warps != base["warps"]]


def _cases(variant: Variant) -> Iterator[Case]:
    """All slots with experts; some without, a map, long rows, several a block; ids that are no expert's, no map."""
    knobs, generator = variant.knobs, np.random.default_rng(7)
    mapped = np.array([2, -1, 1, 65537, 0], np.int32)
    for seed, (rows, hidden, low, to) in enumerate(((1, 32, 0, None), (5, knobs.warps * 256 + 32, -2, mapped))):
        ids = generator.integers(low, 3 if to is None else 7, (rows, knobs.top)).astype(np.int32)
        problem = MoeProblem(rows, 3, knobs.top, hidden, 32, product="combine")
        yield combine_case(variant, Launch(min(rows, 2)), problem, Routing(ids, to), seed)
    ids = generator.integers(-1, 5, (3, knobs.top)).astype(np.int32)
    ids[1], ids[2, 0] = 3, 0
    problem = MoeProblem(3, 3, knobs.top, 32, 32, product="combine")
    yield combine_case(variant, launch(knobs, problem, 1), problem, Routing(ids), 2)
    # Of few columns, for cards; of more, so that vectors of y are over 2^32 too.
    for seed, (rows, hidden) in enumerate(((MAX_TOKENS // 8, 512), (MAX_TOKENS, 288))):
        problem = MoeProblem(2, 3, knobs.top, hidden, 32, product="combine")
        ids = np.resize(np.array([2, 0, -1], np.int32), (2, knobs.top))
        yield far.far_sums(combine_case(variant, Launch(2), problem, Routing(ids), seed), rows - 2, hidden)


_RARER: tuple[dict[str, Any], ...] = (
    {"residual": True},
    {"residual": "pair", "pdl": False},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    candidates=_candidates,
    rarer=_RARER,
)
