"""Products and experts of a transformer block with its RMSNorm and residual, as a served model launches them.

What is fused depends on the number of rows. A norm that is not is `norm.rms`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from jitmx import settings
from jitmx.arch import Arch
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.ops import custom, moe
from jitmx.ops import linear as product
from jitmx.ops.linear import compose, operand
from jitmx.ops.linear import plan as linear_plan
from jitmx.ops.linear import swiglu as gates
from jitmx.ops.moe import operand as expert_operand
from jitmx.ops.moe.checks import Recipe
from jitmx.ops.moe.plan import reads_rows
from jitmx.ops.routing import calls as routing_calls
from jitmx.runtime import card
from jitmx.serving import linear as linear_kernels
from jitmx.serving import rounded_inputs
from jitmx.serving.experts import routed_rows


def run_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, bias: torch.Tensor | None,
    residual: torch.Tensor | None, residual_lo: torch.Tensor | None, norm: torch.Tensor | None, epsilon: float,
    swiglu: bool, activation: str, *prefetched: Any,
) -> torch.Tensor:  # fmt: skip
    """Y = RMSNorm(X) W^T (+ bias), in one launch where the product's kernel has all of it.

    A residual is added with its low part, where there is one; Y is a hi/lo residual then, [2, ..., n].

    Args:
        swiglu: rows of W are gates and ups, and Y is up * silu(gate), [..., n / 2].
        activation: what X of many rows is rounded to, or "none".
        prefetched: words and scales of the weight to prefetch, where there is one.
    """
    x, bias, residual, residual_lo, norm = map(custom.plain, (x, bias, residual, residual_lo, norm))
    weight = operand.find(words, scales, n, k, layout)
    if linear_plan.reads_rows(activation, weight, x.dtype):
        weight.look_at(words, scales)
    fused = _fused(weight, x, bias is not None, residual is not None, norm is not None, swiglu, activation)
    rounded = None if fused.activation == "none" else fused.activation
    if norm is not None and not fused.norm:
        x, norm = compose.rms_norm(x, norm, epsilon), None
    prefetch = operand.prefetch(*prefetched)
    if fused.swiglu:
        return gates.run(x, weight, norm, epsilon, prefetch=prefetch)
    if swiglu:
        return gates.gated(product.run(x, weight, bias, None, None, norm, epsilon, rounded, prefetch=prefetch))
    if residual is None:
        return product.run(x, weight, bias, None, None, norm, epsilon, rounded, prefetch=prefetch)
    residual_lo = _no_low(residual) if residual_lo is None else residual_lo
    if fused.residual:
        return product.run(x, weight, bias, None, residual, norm, epsilon, rounded, residual_lo, prefetch=prefetch)
    y = product.run(x, weight, bias, None, None, norm, epsilon, rounded, prefetch=prefetch)
    return compose.pair(y.float() + residual.float() + residual_lo.float(), y.dtype)


# Zeros that nobody writes to, by width, type and device; kept for so many rows.
_NO_LOW_ROWS = 64
_no_lows: dict[tuple[Any, ...], torch.Tensor] = {}


def _no_low(residual: torch.Tensor) -> torch.Tensor:
    """The low part of a residual that has none: of few rows zeros that are kept, so that a graph launches nothing."""
    width = residual.shape[-1]
    rows, key = residual.numel() // max(width, 1), (width, residual.dtype, residual.device)
    if rows > _NO_LOW_ROWS or not residual.is_cuda:
        return torch.zeros_like(residual)
    found = _no_lows.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():  # it would be the graph's
            return torch.zeros_like(residual)
        found = _no_lows[key] = residual.new_zeros(_NO_LOW_ROWS, width)
        torch.cuda.current_stream(residual.device).synchronize()  # other streams read it, too
    return found[:rows].view(residual.shape)


def _fused(
    weight: operand.Operand, x: torch.Tensor, bias: bool, residual: bool, norm: bool, swiglu: bool, activation: str
) -> LinearProblem:
    """What of a call its product has fused, looked up among the weight's plans, which settings that change clear."""
    device = x.get_device()
    key = "fused", x.shape, x.dtype, device, bias, residual, norm, swiglu, activation
    found: LinearProblem | None = weight.plans.get(key)
    if found is None:
        arch, multiprocessors = card.arch(device), card.multiprocessors(device)
        extras: dict[str, Any] = {
            "bias": bias,
            "residual": "pair" if residual else False,
            "norm": norm,
            "swiglu": swiglu,
        }
        plain = linear_plan.problem(weight, max(x.numel() // weight.k, 1), x.dtype, extras)
        extras["activation"] = rounded_inputs.activation_of(plain, activation, arch)
        problem = linear_plan.problem(weight, plain.m, x.dtype, extras)
        found = _of(problem, arch, multiprocessors, settings.current())
        weight.plans.remember(key, found)
    return found


@functools.lru_cache(maxsize=4096)
def _of(problem: LinearProblem, arch: Arch, multiprocessors: int, _chosen_under: settings.Settings) -> LinearProblem:
    return linear_kernels.fused(problem, arch, multiprocessors)


def run_pair(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The sum of two tensors as a hi/lo residual [2, ...]: rounded, and the low part."""
    return compose.pair(x.float() + more.float(), x.dtype)


def run_experts(
    stream: torch.Tensor, norm: torch.Tensor, epsilon: float, router: torch.Tensor, router_bias: torch.Tensor | None,
    words13: torch.Tensor, scales13: torch.Tensor, words2: torch.Tensor, scales2: torch.Tensor, hidden: int,
    intermediate: int, layout13: str, layout2: str, b13: torch.Tensor | None, b2: torch.Tensor | None, top: int,
    scoring: str, x_format: str,
) -> torch.Tensor:  # fmt: skip
    """A hi/lo residual [2, tokens, hidden], and what the experts of its RMSNorm, chosen by its router, add to it.

    The norm reads the high part. One row is two launches: the routing normalises it and writes what the
    experts read. More are normalised first.
    """
    stream, norm, router, router_bias, b13, b2 = map(custom.plain, (stream, norm, router, router_bias, b13, b2))
    x = stream[0]
    w13 = expert_operand.find(words13, scales13, 2 * intermediate, hidden, layout13)
    w2 = expert_operand.find(words2, scales2, hidden, intermediate, layout2)
    if x_format == "fp8":
        x_format = rounded_inputs.x_format_of(x.shape[0], w13.experts, top, x_format, card.arch(x.get_device()))
    if reads_rows(x_format, w13, w2):
        w13.look_at(words13, scales13)
        w2.look_at(words2, scales2)
    ids: torch.Tensor
    weights: torch.Tensor | None = None
    fuses = 0 < x.shape[0] <= linear_kernels.NORMED_ROWS
    seen = x if fuses else compose.rms_norm(x, norm, epsilon)
    if 0 < x.shape[0] <= routed_rows(card.arch(x.get_device())):
        found = routing_calls.run_route(
            seen, router, router_bias, norm if fuses else None, None, top, scoring, epsilon, None, None,
            normalized=fuses,
        )  # fmt: skip
        ids, weights = found.ids, found.weights
        seen = seen if found.normalized is None else found.normalized
    else:
        ids = torch_linear(seen, router, router_bias)
    return moe.run(
        seen, (ids, weights), w13, w2, b13, b2, None, None, top if weights is None else None, scoring,
        Recipe(x_format=x_format), ALPHA, LIMIT, None, stream,
    )  # fmt: skip
