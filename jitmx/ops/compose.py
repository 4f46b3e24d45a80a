"""What a product does with X before it and with Y after it, as steps of their own where no kernel has them fused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from jitmx.dispatch.choose import fits_one_launch
from jitmx.ops import checks, plan
from jitmx.ops.operand import Weight
from jitmx.ops.quantize import dequantize, quantize

# Formats by the names that `activation` has for them.
ACTIVATIONS = {"mxfp8": "mxfp8", "mxfp6": "mxfp6e2m3", "mxfp4": "mxfp4"}

# What may go apart: the field's value where it does, and what a step of its own costs beside the others.
_ABSENT = {"norm": False, "residual": False, "activation": "none"}
_COST = {"residual": 1, "norm": 2, "activation": 4}


def apart(
    weight: Weight, rows: int, dtype: torch.dtype, device: int, extras: Mapping[str, Any]
) -> tuple[str, ...]:
    """Which of norm, activation and residual run on their own, so that one launch takes all rows.

    As few as can be; all of them where no kernel takes the plain product in one launch either.

    Args:
        extras: fields of the problem.
    """
    wanted = [name for name, absent in _ABSENT.items() if extras.get(name, absent) != absent]
    subsets = itertools.chain.from_iterable(itertools.combinations(wanted, size) for size in range(len(wanted) + 1))
    for names in sorted(subsets, key=lambda names: sum(_COST[name] for name in names)):
        # RMSNorm comes before the quantization: it cannot stay where that goes.
        if "activation" in names and "norm" in wanted and "norm" not in names:
            continue
        asked = plan.problem(weight, max(rows, 1), dtype, left(extras, names))
        if fits_one_launch("linear", asked, checks.device_arch(device)):
            return names
    return tuple(wanted)


def left(extras: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Fields of the problem without those that run apart."""
    return {**extras, **{name: _ABSENT[name] for name in names}}


def rms_norm(x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * norm over the last dimension, in fp32, rounded once to x's dtype."""
    return torch.nn.functional.rms_norm(x.float(), norm.shape, norm.float(), epsilon).to(x.dtype)


def pair(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tensor as a pair [2, ...] of `dtype`: its values rounded, and what that lost, rounded."""
    kept = total.to(dtype)
    return torch.stack([kept, (total - kept.float()).to(dtype)])


def rounded(x: torch.Tensor, activation: str) -> torch.Tensor:
    """What the codes of x in a format stand for, in x's dtype."""
    return dequantize(quantize(x, ACTIVATIONS[activation]), x.dtype)
