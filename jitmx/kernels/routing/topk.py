"""`routing.topk`: the choice of the largest from logits that are given, and lists if asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.kernels.routing import form, lists
from jitmx.kernels.routing import knobs as shared
from jitmx.kernels.routing.arguments import ARGUMENTS
from jitmx.kernels.routing.problem import LOGIT_DTYPES, MAPPED, TILE, RoutingProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob


@dataclass(frozen=True)
class TopkKnobs(Knobs):
    """Compile-time choices of `routing.topk`."""

    experts: int = shared.EXPERTS
    k: int = shared.K
    dtype: str = knob("bf16", choices=LOGIT_DTYPES, doc="type of the logits")
    scoring: str = shared.SCORING
    mapped: bool = MAPPED
    tile: int = TILE
    warps: int = knob(8, choices=(1, 4, 8, 16, 32), doc="warps a block")
    pdl: bool = PDL


def _check(knobs: TopkKnobs, arch: Arch) -> None:
    shared.check_k(knobs)
    lists.check_mapped(knobs)


def launch(knobs: TopkKnobs, m: int, local: int) -> Launch:
    """A warp a token; with lists one block."""
    if not knobs.tile:
        return Launch(-(-m // knobs.warps))
    return Launch(1, 4 * (lists.round_up(m * knobs.k, 8) + (m * knobs.k > 32) * lists.words(knobs.warps, local)))


SPEC = KernelSpec(
    family="routing",
    name="topk",
    knobs=TopkKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (knobs.warps * 32)), require=(r"\bREDUX\b|\bCREDUX\b",)
    ),
    check=_check,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def _fixed(problem: RoutingProblem) -> dict[str, Any]:
    form.require_source("topk", problem, "logits")
    return lists.fixed(problem) | problem.pick("dtype", "scoring")


def _heuristic(problem: RoutingProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"pdl": "pdl" in arch.features, "warps": 8 if problem.m <= 8 or not problem.tile else 32}


_RARER: tuple[dict[str, Any], ...] = (
    {"experts": 60, "dtype": "fp32", "scoring": "softmax_all", "warps": 4},
    {"experts": 60, "k": 2, "dtype": "fp16", "mapped": True, "tile": 8, "warps": 4},
)  # fmt: skip

KERNEL = form.kernel(SPEC, launch, _fixed, _heuristic, _RARER)
