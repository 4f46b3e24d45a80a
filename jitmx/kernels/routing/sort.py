"""`routing.sort`: lists of tokens by expert from ids that are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels.routing import form, lists
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing.arguments import ARGUMENTS
from jitmx.kernels.routing.problem import FEW_TOKENS, MAPPED, TILES, RoutingProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob


@dataclass(frozen=True)
class SortKnobs(Knobs):
    """Compile-time choices of `routing.sort`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    mapped: bool = MAPPED
    tile: int = knob(64, choices=TILES[1:], doc="rows of a tile of the schedule, at most")
    warps: int = knob(16, choices=(1, 4, 8, 16, 32), doc="warps a block")
    cluster: int = knob(1, choices=(1, 2, 4, 8), doc="blocks; more than one are a cluster")
    pdl: bool = PDL


def _check(knobs: SortKnobs, arch: Arch) -> None:
    shared.check_k(knobs)
    shared.check_cluster(knobs.cluster, "cluster=1", arch)


def launch(knobs: SortKnobs, m: int, local: int) -> Launch:
    """One block, or one cluster."""
    return Launch(knobs.cluster, 4 * lists.words(knobs.warps, local), knobs.cluster)


SPEC = KernelSpec(
    family="routing",
    name="sort",
    knobs=SortKnobs,
    contract=lambda knobs, arch: Contract(max_registers=64, require=(r"\bMATCH\.ANY\b",)),
    check=_check,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def _fixed(problem: RoutingProblem) -> dict[str, Any]:
    form.require_source("sort", problem, "ids")
    return lists.fixed(problem)


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    wide = shared.takes_clusters(arch) and problem.m * problem.k > 4 * FEW_TOKENS
    return {"pdl": "pdl" in arch.features, "warps": 16, "cluster": 8 if wide else 1}


_RARER: tuple[dict[str, Any], ...] = (
    {"experts": 100, "k": 2, "mapped": True, "tile": 8, "pdl": False},
    {"experts": 100, "k": 2, "cluster": 8},
)  # fmt: skip

KERNEL = form.kernel(SPEC, launch, _fixed, _heuristic, _RARER)
