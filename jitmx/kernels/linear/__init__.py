"""`linear`: Y = X W^T (+ bias), with W in MXFP4 packed once for every batch size.

Kernels, a module and a template each:
    gemv    at most 8 rows of X; CUDA cores or m16n8k16 tensor cores
    stream  at most 64 rows: one fat block a multiprocessor streams its share of W
    tile    any number of rows, on every target
    wgmma   many rows, on sm_90a
    scaled  X quantized to an MX format on the way in; block-scaled MMA on sm_12x

Shapes: X [rows, k], W [n, k], bias [n], Y [rows, n]; k is a multiple of 32, n is any. docs/packed-layout.md draws the
layout of W.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family
from jitmx.kernels.linear import gemv
from jitmx.kernels.linear.kernel import Launch, LinearKernel
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Case
from jitmx.registry.spec import Variant

__all__ = ["FAMILY", "GPT_OSS", "KERNELS", "Launch", "LinearKernel", "LinearProblem", "launch_of"]

KERNELS: dict[str, LinearKernel] = {module.KERNEL.spec.name: module.KERNEL for module in (gemv,)}

# [n, k] of gpt-oss-120b, without and with a bias: QKV, O, lm_head.
GPT_OSS = ((5120, 2880, (False, True)), (2880, 4096, (False, True)), (201088, 2880, (False,)))
TYPICAL_ROWS = (1, 2, 4, 8)


def launch_of(variant: Variant, m: int, n: int, k: int, multiprocessors: int) -> Launch:
    """Geometry of a launch of `variant` for m rows."""
    return KERNELS[variant.spec.name].launch(variant.knobs, m, n, k, multiprocessors)


def _typical(arch: Arch) -> tuple[LinearProblem, ...]:
    return tuple(
        LinearProblem(m, n, k, "bf16", bias, preferred_encoding(arch))
        for n, k, biases in GPT_OSS
        for bias in biases
        for m in TYPICAL_ROWS
    )


def _heuristic(problem: LinearProblem, arch: Arch, multiprocessors: int) -> tuple[str, dict[str, Any]]:
    """The first kernel by falling preference for this many rows that serves the problem on the target."""
    for name in _preference(problem, arch):
        if name in serving(problem, arch):
            return name, KERNELS[name].heuristic(problem, arch, multiprocessors)
    raise KnobError(f"no kernel of linear serves {problem.as_dict()} on {arch}")


def _preference(problem: LinearProblem, arch: Arch) -> tuple[str, ...]:
    return ("gemv",)


def serving(problem: LinearProblem, arch: Arch) -> tuple[str, ...]:
    """Kernels that can serve the problem on a target."""
    found = []
    for name, kernel in KERNELS.items():
        try:
            kernel.fixed(problem)
        except KnobError:
            continue
        found.append(name)
    return tuple(found)


def _cases(variant: Variant) -> Iterable[Case]:
    return KERNELS[variant.spec.name].cases(variant)


def _check(problem: LinearProblem, variant: Variant) -> None:
    KERNELS[variant.spec.name].check(problem, variant)


FAMILY = Family(
    name="linear",
    summary="Y = X W^T + bias with W in MXFP4",
    specs=tuple(kernel.spec for kernel in KERNELS.values()),
    problem=LinearProblem,
    typical=_typical,
    serving=serving,
    fixed=lambda problem, kernel: KERNELS[kernel].fixed(problem),
    heuristic=_heuristic,
    tuned=lambda problem, arch, multiprocessors, kernel: KERNELS[kernel].heuristic(problem, arch, multiprocessors),
    cases=_cases,
    check=_check,
    max_rows=lambda kernel: KERNELS[kernel].max_rows,
)
