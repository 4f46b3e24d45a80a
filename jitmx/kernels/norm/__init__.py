"""`norm`: RMSNorm of rows, for whoever has it in no launch of its own, and rows in E4M3 for products.

Kernels:
    rms    y = x / sqrt(mean(x^2) + epsilon) * weight, in fp32, rounded once
    rows   the same, or x itself, rounded once to E4M3 with a scale a row, as linear.wgmma_fp8 reads it
    concat rows of a table, by number, and those of x, each normalised, side by side: what an Eagle3 draft reads

Shapes: x [rows, hidden] with a stride of its own, weight [hidden], y [rows, hidden]; hidden a multiple of 8. Floor:
bytes read plus bytes written over the memory bandwidth; for few rows a load, a sum over a block and a store, one after
the other.
"""

from __future__ import annotations

from typing import Any

from jitmx.arch import Arch
from jitmx.kernels import Family
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.norm import concat, rms, rows
from jitmx.kernels.norm.problem import (
    BLOCKS,
    EPSILON,
    MAX_HIDDEN,
    MAX_ROWS,
    VALUES_A_VECTOR,
    NormProblem,
    takes,
)  # fmt: skip
from jitmx.kernels.norm.rms import RMS, RmsKnobs, launch, of_rows, reference

__all__ = [
    "BLOCKS", "EPSILON", "FAMILY", "MAX_HIDDEN", "MAX_ROWS", "RMS", "VALUES_A_VECTOR", "NormProblem", "RmsKnobs",
    "launch", "of_rows", "reference", "takes",
]  # fmt: skip


def _makes(step: str, problem: Any) -> NormProblem | None:
    """RMSNorm of a product's X, where no kernel has it fused; torch makes that of other lengths."""
    return NormProblem(problem.k, problem.dtype) if step == "norm" and takes(problem.k) else None


def _typical(arch: Arch) -> tuple[NormProblem, ...]:
    in_e4m3 = tuple(NormProblem(y="e4m3", norm=norm) for norm in (True, False)) if "wgmma" in arch.features else ()
    return (NormProblem(), NormProblem(concat=True), *in_e4m3)


FAMILY = Family(
    name="norm",
    summary="RMSNorm of rows, launched beside what comes before and after",
    kernels=(rms.KERNEL, rows.KERNEL, concat.KERNEL),
    problem=NormProblem,
    typical=_typical,
    makes=_makes,
    benchmark=Benchmark("jitmx.bench.norm", "RMSNorm of 1 to 8192 rows", peers=("torch", "vllm")),
)
