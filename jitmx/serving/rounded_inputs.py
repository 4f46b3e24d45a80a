"""From how many rows on the layers of a model take inputs that are rounded to 8 bits, where that is asked for."""

from __future__ import annotations

import functools

from jitmx.arch import Arch
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.moe import MoeProblem

# Tokens from which dense products take their inputs in E4M3 where that is asked for: they are bound by operations.
FP8_ROWS = 256
# Rows of an expert that has some, on average, from which experts do: by wgmma (True), where products in bf16 go by
# expert too, and by mma.sync, which up to there is bound by bytes (docs/perf-log.md).
FP8_ROWS_AN_EXPERT = {True: 16, False: 64}


def activation_of(problem: LinearProblem, activation: str, arch: Arch) -> str:
    """What X of a product is rounded to where `activation` is asked for: nothing where that gains nothing.

    Of fewer rows products read weights, which are as they were; E4M3 with a scale a row goes with MXFP4 weights whose
    scales are within the usual.
    """
    few = problem.m < FP8_ROWS or problem.weight != "mxfp4"
    return "none" if few or ("wgmma" in arch.features and problem.scale_range != "normal") else activation


def x_format_of(m: int, experts: int, top: int, x_format: str, arch: Arch) -> str:
    """What inputs of a layer of experts are rounded to where `x_format` is asked for: of fp8 nothing for few rows.

    Products of few rows an expert read weights, which are as they were. These stay packed as nibbles, which all kernels
    take.

    Args:
        m, experts, top: as in `MoeProblem`.
    """
    if x_format != "fp8":
        return x_format
    many = m and _rows_an_expert(m, experts, top) >= FP8_ROWS_AN_EXPERT["wgmma" in arch.features]
    return x_format if many else "bf16"


@functools.lru_cache(maxsize=1024)
def _rows_an_expert(m: int, experts: int, top: int) -> float:
    return MoeProblem(m, experts, top).rows_an_expert
