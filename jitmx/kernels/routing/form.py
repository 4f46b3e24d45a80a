"""How the kernels of `routing` fill in the form of a kernel: their launches go by tokens and local experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.routing import cases
from jitmx.kernels.routing.cases import Geometry
from jitmx.kernels.routing.problem import RoutingProblem
from jitmx.registry.spec import KernelSpec, Variant


def require_source(kernel: str, problem: RoutingProblem, source: str) -> None:
    """Raise KnobError where a kernel is asked to start from what it does not take."""
    if problem.source != source:
        other = {"hidden": "route", "logits": "topk", "ids": "sort"}[problem.source]
        raise KnobError(f"routing.{kernel} does not take {problem.source}", f"use routing.{other}")


def check_shared_bytes(problem: RoutingProblem, variant: Variant, geometry: Geometry) -> None:
    """Raise KnobError where a launch with all experts here needs more shared memory than a block has."""
    need = geometry(variant.knobs, problem.m, problem.experts).shared_bytes
    if need > variant.arch.shared_bytes:
        raise KnobError(
            f"{variant.name} with m={problem.m} needs {need} B of shared memory; a block on "
            f"{variant.arch} has at most {variant.arch.shared_bytes} B",
            "use fewer tokens, parts or warps, or sort in a launch of its own",
        )


def kernel(
    spec: KernelSpec,
    geometry: Geometry,
    fixed: Callable[[RoutingProblem], dict[str, Any]],
    heuristic: Callable[[RoutingProblem, Arch, int], dict[str, Any]],
    rarer: Sequence[dict[str, Any]],
) -> Kernel:
    """The form of one of them."""
    return Kernel(
        spec,
        lambda variant: cases.cases(variant, geometry),
        fixed=fixed,
        # Where all experts are local.
        launch=lambda knobs, problem, multiprocessors: geometry(knobs, problem.m, problem.experts),
        heuristic=heuristic,
        check=lambda problem, variant: check_shared_bytes(problem, variant, geometry),
        rarer=rarer,
    )
