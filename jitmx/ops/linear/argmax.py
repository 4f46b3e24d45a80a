"""`jitmx.linear_argmax`: which output feature of a product is largest, without writing the product."""

from __future__ import annotations

from typing import Any

import torch

from jitmx.errors import InputError
from jitmx.kernels.linear.steps import rows_at_once
from jitmx.ops import checks, custom
from jitmx.ops import linear as product
from jitmx.ops.linear import compose, operand
from jitmx.ops.linear.operand import Weight
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan


def linear_argmax(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """argmax over n of X W^T (+ bias): the next token of a greedy lm_head.

    The lowest index of several that share the largest value; a NaN is never the largest. Runs on the current stream of
    x's device, under `torch.cuda.graph` as `jitmx.linear` does, and under `torch.compile`.

    Where a kernel compares the sums itself, in fp32, no product is written. Where none does, the product is made in x's
    dtype, some rows at a time, so that values which round to the same number share it. `norm` is as in `jitmx.linear`.

    Args:
        x: [..., k], bfloat16 or float16, contiguous, on the weight's GPU.
        weight: [n, k], from `jitmx.pack_weight`.
        bias: [n], x's dtype.
        norm: [k], x's dtype: the weight of an RMSNorm of x.
        epsilon: of that RMSNorm, 0 or more.
        out: [...], int64, contiguous; written and returned. It must not overlap x.

    Returns:
        [...], int64.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/linear/, chosen by jitmx/dispatch (`jitmx explain linear`).
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        if not isinstance(x, torch.Tensor) or not isinstance(weight, PackedWeight):
            product.require_product(x, weight, bias, norm)
        packed = weight.words, weight.scales, weight.n, weight.k, operand.layout(weight)
        found: torch.Tensor = torch.ops.jitmx.linear_argmax(x, *packed, bias, norm, epsilon)
        return custom.into(out, found)
    return run(x, weight, bias, norm, epsilon, out)


def run(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear_argmax` on plain tensors."""
    try:
        dtype, device = x.dtype, x.get_device()
        made, norm_apart = weight.plans["argmax", x.shape, dtype, device, bias is None, norm is None]
    except (KeyError, AttributeError, TypeError):
        made, norm_apart = _plan(x, weight, bias, norm)
    pointer = x.data_ptr()
    if pointer & 15 or not x.is_contiguous():
        checks.require_layout("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    added = 0 if bias is None else product.vector("bias", bias, weight.n, x, dtype, device)
    scaled = 0
    if norm is not None:
        scaled = product.vector("norm", norm, weight.k, x, dtype, device)
        checks.require_aligned("norm", norm)
    checks.require_epsilon(epsilon)
    shape = x.shape[:-1]
    if out is None:
        out = x.new_empty(shape, dtype=torch.int64)
    else:
        _require_out(out, shape, x)
    if norm is not None and norm_apart:
        x, norm, scaled = compose.rms_norm(x, norm, epsilon), None, 0
    if made is None:
        _compare(x, weight, bias, norm, epsilon, out)
    else:
        made(x.data_ptr(), out.data_ptr(), added, 0, scaled, epsilon)
    return out


def _compare(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """Write the product some rows at a time, and compare what was written."""
    rows = rows_at_once(weight.n)
    for some, found in zip(x.view(-1, weight.k).split(rows), out.view(-1).split(rows), strict=True):
        if some.numel():
            y = product.run(some, weight, bias, norm=norm, epsilon=epsilon)
            torch.argmax(y.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), dim=-1, out=found)


def _plan(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, norm: torch.Tensor | None
) -> tuple[Plan | None, bool]:
    """The launches of a call, None where no kernel compares so many rows itself; whether RMSNorm runs before them."""
    product.require_product(x, weight, bias, norm)
    extras: dict[str, Any] = {"bias": bias is not None, "norm": norm is not None, "argmax": True}
    rows, device = x.numel() // weight.k, x.get_device()
    entry: tuple[Plan | None, bool] = None, False
    unfused = compose.unfused(weight, rows, x.dtype, device, extras)
    if "argmax" not in unfused:
        entry = Plan(weight, rows, x.dtype, device, compose.left(extras, unfused)), "norm" in unfused
    return weight.plans.remember(("argmax", x.shape, x.dtype, device, bias is None, norm is None), entry)


def _require_out(out: object, shape: torch.Size, x: torch.Tensor) -> None:
    tensor = checks.require_cuda("out", out)
    right = tensor.dtype is torch.int64 and tensor.shape == shape and tensor.device == x.device
    if not right or not tensor.is_contiguous():
        raise InputError(f"out is {checks.describe(tensor)}; it must be contiguous int64 {list(shape)} on {x.device}")
    checks.require_apart(tensor, x=x)


def _run_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    return run(custom.plain(x), operand.find(words, scales, n, k, layout), *rest)


def _fake_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    bias, norm, _epsilon = rest
    custom.refuse_gradients(x=x, bias=bias, norm=norm)
    product.require_columns(x, n, k)
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


custom.define(
    "linear_argmax(Tensor x, Tensor words, Tensor scales, int n, int k, str layout, Tensor? bias, Tensor? norm, "
    "float epsilon) -> Tensor",
    _run_operator,
    _fake_operator,
)
