"""What a product does with X before it and with Y after it, as steps of their own where no kernel has them fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.dispatch.call import decomposition
from jitmx.kernels.linear.arguments import X_FORMATS
from jitmx.kernels.linear.steps import ABSENT
from jitmx.kernels.norm import takes
from jitmx.ops import norm as kernel
from jitmx.ops.linear.operand import Weight
from jitmx.ops.linear.plan import problem
from jitmx.ops.quantize import dequantize, quantize
from jitmx.runtime import card


def unfused(weight: Weight, rows: int, dtype: torch.dtype, device: int, extras: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of norm, activation, residual and argmax run on their own, so that one launch takes all rows.

    As few as can be; all of them where no kernel takes the plain product in one launch either.

    Args:
        extras: fields of the problem.
    """
    asked = problem(weight, max(rows, 1), dtype, extras)
    return decomposition("linear", asked, card.arch(device)).unfused


def left(extras: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Fields of the problem without those that are not fused."""
    return {**extras, **{name: ABSENT[name] for name in names}}


def rms_norm(x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * norm over the last dimension, in fp32, rounded once to x's dtype.

    By `norm.rms` where it takes the rows, else by torch.
    """
    if card.holds(x) and takes(x.shape[-1]):
        return kernel.run(x, norm, epsilon)
    return torch.nn.functional.rms_norm(x.float(), norm.shape, norm.float(), epsilon).to(x.dtype)


def pair(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tensor as a pair [2, ...] of `dtype`: its values rounded, and what that lost, rounded."""
    kept = total.to(dtype)
    return torch.stack([kept, (total - kept.float()).to(dtype)])


def rounded(x: torch.Tensor, activation: str) -> torch.Tensor:
    """What the codes of x in a format stand for, in x's dtype."""
    rule = "ceil" if activation == "fp8" else "floor"
    return dequantize(quantize(x, X_FORMATS[activation], scale_rule=rule), x.dtype)
