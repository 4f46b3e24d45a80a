"""`jitmx.linear_swiglu`: the first half of an MLP, whose gates and ups meet before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from jitmx.errors import InputError
from jitmx.kernels.linear.arguments import NO_PREFETCH
from jitmx.kernels.linear.gated import HALF
from jitmx.kernels.linear.layout import TILE_ROWS
from jitmx.ops import checks, custom
from jitmx.ops import linear as product
from jitmx.ops.linear import compose, operand
from jitmx.ops.linear.operand import Weight
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan, Prefetch


def interleave_gate_up(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a weight in the order that `linear_swiglu` takes: 8 gates and their 8 ups by turns.

    Args:
        weight: [2 i, ...], all gates and then all ups; i is a multiple of 8.

    Returns:
        The same rows [2 i, ...], in new memory.

    Raises:
        InputError: no tensor, or another number of rows.
    """
    checks.require_tensor("weight", weight)
    n = weight.shape[0] if weight.dim() else 0
    if n == 0 or n % TILE_ROWS:
        raise InputError(f"weight has {n} rows; gates and ups are a multiple of {HALF} each")
    return weight.unflatten(0, (2, -1, HALF)).transpose(0, 1).flatten(0, 2).contiguous()


def linear_swiglu(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """up * silu(gate) of the products of X with gate and up rows, accumulated in fp32 and rounded once.

    Runs on the current stream of x's device, under `torch.cuda.graph` as `jitmx.linear` does, and under
    `torch.compile`. Where a kernel has gate and up of a feature at hand, the product is not written. Where none takes
    so many rows, it is, rounded to x's dtype, as is silu(gate). `norm` is as in `jitmx.linear`.

    Args:
        x: [..., k], bfloat16 or float16, contiguous, on the weight's GPU.
        weight: [2 i, k], from `jitmx.pack_weight` of rows in the order of `jitmx.interleave_gate_up`.
        norm: [k], x's dtype: the weight of an RMSNorm of x.
        epsilon: of that RMSNorm, 0 or more.
        out: [..., i], x's dtype, contiguous; written and returned. It must not overlap x.

    Returns:
        [..., i] in x's dtype.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/linear/, chosen by jitmx/dispatch (`jitmx explain linear swiglu=1`).
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        if not isinstance(x, torch.Tensor) or not isinstance(weight, PackedWeight):
            product.require_product(x, weight, None, norm)
        packed = weight.words, weight.scales, weight.n, weight.k, operand.layout(weight)
        found: torch.Tensor = torch.ops.jitmx.linear_swiglu(x, *packed, norm, epsilon)
        return custom.into(out, found)
    return run(x, weight, norm, epsilon, out)


def run(
    x: torch.Tensor,
    weight: Weight,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    out: torch.Tensor | None = None,
    prefetch: Prefetch = NO_PREFETCH,
) -> torch.Tensor:
    """`linear_swiglu` on plain tensors.

    Args:
        prefetch: `operand.prefetch` of a later product's weight.
    """
    try:
        dtype, device = x.dtype, x.get_device()
        made, norm_apart = weight.plans["swiglu", x.shape, dtype, device, norm is None]
    except (KeyError, AttributeError, TypeError):
        made, norm_apart = _plan(x, weight, norm)
    pointer = x.data_ptr()
    if pointer & 15 or not x.is_contiguous():
        checks.require_layout("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    scaled = 0
    if norm is not None:
        scaled = product.vector("norm", norm, weight.k, x, dtype, device)
        checks.require_aligned("norm", norm)
    checks.require_epsilon(epsilon)
    shape = *x.shape[:-1], weight.n // 2
    if out is None:
        out = x.new_empty(shape)
    else:
        _require_out(out, shape, x)
    if made is None:
        return out.copy_(gated(product.run(x, weight, norm=norm, epsilon=epsilon, prefetch=prefetch)))
    if norm is not None and norm_apart:
        x, scaled = compose.rms_norm(x, norm, epsilon), 0
    made(x.data_ptr(), out.data_ptr(), norm=scaled, epsilon=epsilon, prefetch=prefetch)
    return out


def gated(y: torch.Tensor) -> torch.Tensor:
    """up * silu(gate) of a product [..., 2 i] that was written, in its dtype."""
    gate, up = y.unflatten(-1, (-1, 2, HALF)).unbind(-2)
    return (silu(gate) * up).flatten(-2)


def _plan(x: torch.Tensor, weight: Weight, norm: torch.Tensor | None) -> tuple[Plan | None, bool]:
    """The launches of a call, None where no kernel takes so many rows; whether RMSNorm runs before them."""
    product.require_product(x, weight, None, norm)
    if weight.n % TILE_ROWS:
        raise InputError(f"weight has {weight.n} rows; gates and ups are a multiple of {HALF} each")
    extras: dict[str, Any] = {"norm": norm is not None, "swiglu": True}
    rows, device = x.numel() // weight.k, x.get_device()
    entry: tuple[Plan | None, bool] = None, False
    unfused = compose.unfused(weight, rows, x.dtype, device, extras)
    if "swiglu" not in unfused:
        entry = Plan(weight, rows, x.dtype, device, compose.left(extras, unfused)), "norm" in unfused
    return weight.plans.remember(("swiglu", x.shape, x.dtype, device, norm is None), entry)


def _require_out(out: object, shape: tuple[int, ...], x: torch.Tensor) -> None:
    tensor = checks.require_cuda("out", out)
    right = tensor.dtype is x.dtype and tuple(tensor.shape) == shape and tensor.device == x.device
    if not right or not tensor.is_contiguous():
        raise checks.mismatch("out", tensor, shape, x)
    checks.require_layout("out", tensor)
    checks.require_no_grad("out", tensor)
    checks.require_apart(tensor, x=x)


def _run_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    return run(custom.plain(x), operand.find(words, scales, n, k, layout), *rest)


def _fake_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    norm, _epsilon = rest
    custom.refuse_gradients(x=x, norm=norm)
    product.require_columns(x, n, k)
    return x.new_empty((*x.shape[:-1], n // 2))


custom.define(
    "linear_swiglu(Tensor x, Tensor words, Tensor scales, int n, int k, str layout, Tensor? norm, float epsilon) "
    "-> Tensor",
    _run_operator,
    _fake_operator,
)
