"""`jitmx.linear`: Y = X W^T (+ bias) with W in MXFP4 or MXFP8, and what may be fused with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor  # where every call looks it up: torch's own attributes are slow

from jitmx.errors import InputError
from jitmx.kernels.linear.arguments import NO_PREFETCH, X_FORMATS
from jitmx.ops import checks, custom
from jitmx.ops.checks import LARGEST
from jitmx.ops.custom import is_exporting, is_tracing
from jitmx.ops.linear import compose, operand
from jitmx.ops.linear.operand import Operand, Weight
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import Plan, Prefetch, reads_rows


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    activation: str | None = None,
    prefetch: PackedWeight | None = None,
) -> torch.Tensor:
    """Y = X W^T (+ bias) (+ residual), accumulated in fp32 and rounded once.

    Runs on the current stream of x's device. It works under `torch.cuda.graph` once the shape has been called before
    capture, and under `torch.compile`, where it is the operator `torch.ops.jitmx.linear`.

    On sm_90, blocks of a product of more than 16 rows may take a multiprocessor each and wait for one another: do not
    run two of them, or one and a `jitmx.moe`, at a time on two streams.

    With `norm`, X is first x / sqrt(mean(x^2) + epsilon) * norm over k, in fp32. With `activation`, it is then
    quantized in blocks of 32 as `jitmx.quantize` does it. Where a kernel has these steps fused they cost no pass over
    memory. Where none takes so many rows with them, they run as steps of their own, which round once more each: the
    normalised X to x's dtype, and the product before the residual is added.

    Rows of bfloat16 whose largest magnitude, times the norm's weight where there is one, lies from 2^-60 to 2^63 keep
    their precision in every kernel. The kernel for few rows on sm_90 holds products in 128 binades: there what is
    larger becomes infinite or NaN, and what is far smaller counts for nothing. Any float16 keeps its precision.

    Args:
        x: [..., k], bfloat16 or float16, contiguous, on the weight's GPU.
        weight: [n, k], from `jitmx.pack_weight`.
        bias: [n], x's dtype.
        out: [..., n], x's dtype, contiguous; written and returned. It must overlap neither x nor residual.
        residual: [..., n], x's dtype, contiguous; added to the product.
        norm: [k], x's dtype: the weight of an RMSNorm of x.
        epsilon: of that RMSNorm, 0 or more.
        activation: "mxfp8", "mxfp6" or "mxfp4": the format that X is quantized to on the way in; None leaves it. "fp8":
            E4M3 with a scale a row, a power of two. On sm_90a that takes a launch before the product, with the norm in
            it, and pays from some hundred rows on; elsewhere, and for float16, it is E4M3 with a scale a block of 32.
        prefetch: the weight of a product that comes later, behind work that leaves memory idle, such as attention.
            Kernels for few rows (`linear.gemv` and `linear.stream`, from sm_90 on) prefetch it to the L2 as they end;
            others do not. It is not freed before the launch is over. Y is the same.

    Returns:
        [..., n] in x's dtype.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/linear/, chosen by jitmx/dispatch (`jitmx explain linear`).
    """
    if type(x) is not Tensor or is_tracing() or is_exporting():
        return _traced(x, weight, bias, out, residual, norm, epsilon, activation, prefetch)
    prefetched = NO_PREFETCH
    if prefetch is not None:
        _require_prefetch(prefetch, x)
        prefetched = operand.prefetch(prefetch.words, prefetch.scales)
    return run(x, weight, bias, out, residual, norm, epsilon, activation, None, prefetched)


def run(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    activation: str | None = None,
    residual_lo: torch.Tensor | None = None,
    prefetch: Prefetch = NO_PREFETCH,
) -> torch.Tensor:
    """`linear` on plain tensors.

    Args:
        prefetch: `operand.prefetch` of a later product's weight.
        residual_lo: like the residual, which then is a hi/lo residual: this holds what rounding took from its values.
            Y is a hi/lo residual too, [2, ..., n].
    """
    # The warm path: one look-up says that a call like this one was checked and planned before.
    try:
        dtype, device = x.dtype, x.get_device()
        plan, shape, unfused = weight.plans[
            x.shape, dtype, device, bias is None, residual is None, norm is None, activation, residual_lo is None
        ]
    except (KeyError, AttributeError, TypeError):
        plan, shape, unfused = _plan(x, weight, bias, residual, norm, activation, residual_lo)
    try:
        pointer = x.data_ptr()
    except RuntimeError:  # a sparse tensor, behind a dense one of its shape
        checks.require_cuda("x", x)
        raise
    if pointer & 15 or not x.is_contiguous():
        checks.require_layout("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    bias_at = 0 if bias is None else vector("bias", bias, weight.n, x, dtype, device)
    residual_at = norm_at = residual_lo_at = 0
    if residual is not None:
        if not _is(residual, dtype, device, shape):
            raise checks.mismatch("residual", residual, shape, x)
        residual_at = residual.data_ptr()
        if residual_at & 15 or residual.requires_grad:
            checks.require_layout("residual", residual)
            checks.require_no_grad("residual", residual)
    if residual_lo is not None:
        residual_lo_at = _low_part(residual_lo, residual)
        shape = (2, *shape)
    if norm is not None:
        norm_at = vector("norm", norm, weight.k, x, dtype, device)
        if norm_at & 15:
            checks.require_layout("norm", norm)
    if type(epsilon) is not float or not 0 <= epsilon <= LARGEST:
        checks.require_epsilon(epsilon)
    if out is None:
        out = x.new_empty(*shape)  # numbers: torch takes twice the time to read a torch.Size
        target = out.data_ptr()
    else:
        if not (  # `_is`, without the call
            isinstance(out, Tensor)
            and out.dtype is dtype
            and out.get_device() == device
            and out.shape == shape
            and out.is_contiguous()
        ):
            raise checks.mismatch("out", out, shape, x)
        target = out.data_ptr()
        if target & 15 or out.requires_grad:
            checks.require_layout("out", out)
            checks.require_no_grad("out", out)
        end = target + out.nbytes
        if (pointer < end and target < pointer + x.nbytes) or (
            residual is not None
            and (residual_lo is not None or (residual_at < end and target < residual_at + residual.nbytes))
        ):
            checks.require_apart(out, x=x, residual=residual, residual_lo=residual_lo)
    if unfused:
        return _run_unfused(unfused, plan, x, out, bias_at, residual, norm, epsilon, activation, residual_lo, prefetch)
    plan.launch(pointer, target, bias_at, residual_at, norm_at, epsilon, residual_lo_at, prefetch)
    return out


def _run_unfused(
    unfused: tuple[str, ...],
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor,
    bias_at: int,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
    activation: str | None,
    residual_lo: torch.Tensor | None,
    prefetch: Prefetch,
) -> torch.Tensor:
    """The same where some steps are not fused; all that came in was checked."""
    with torch.no_grad():
        if "norm" in unfused and norm is not None:
            x, norm = compose.rms_norm(x, norm, epsilon), None
        if "activation" in unfused and activation is not None:
            x = compose.rounded(x, activation)
        fused = residual is not None and "residual" not in unfused
        residual_at = residual.data_ptr() if residual is not None and fused else 0
        norm_at = 0 if norm is None else norm.data_ptr()
        residual_lo_at = residual_lo.data_ptr() if residual_lo is not None and fused else 0
        plan(x.data_ptr(), out.data_ptr(), bias_at, residual_at, norm_at, epsilon, residual_lo_at, prefetch)
        if residual is not None and not fused:
            if residual_lo is None:
                out.add_(residual)
            else:  # the product is where the first tensor of Y is to be
                out.copy_(compose.pair(out[0].float() + residual.float() + residual_lo.float(), x.dtype))
    return out


def _plan(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    activation: str | None,
    residual_lo: torch.Tensor | None,
) -> tuple[Plan, torch.Size, tuple[str, ...]]:
    """Check what a plan rests on, make it and remember it with the weight."""
    require_product(x, weight, bias, norm)
    if activation is not None and activation not in tuple(X_FORMATS):  # it may be anything, hashable or not
        raise InputError(f"activation={activation!r} is not one of {', '.join(X_FORMATS)}, or None")
    shape = torch.Size((*x.shape[:-1], weight.n))
    if residual is not None and not _is(residual, x.dtype, x.get_device(), shape):
        raise checks.mismatch("residual", residual, shape, x)
    wanted: dict[str, Any] = {"bias": bias is not None, "residual": residual is not None, "norm": norm is not None}
    if residual_lo is not None:
        wanted["residual"] = "pair"
    extras = wanted | {"activation": activation or "none"}
    rows, device = x.numel() // weight.k, x.get_device()
    unfused = compose.unfused(weight, rows, x.dtype, device, extras)
    entry = Plan(weight, rows, x.dtype, device, compose.left(extras, unfused)), shape, unfused
    key = x.shape, x.dtype, device, bias is None, residual is None, norm is None, activation, residual_lo is None
    return weight.plans.remember(key, entry)


def require_product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, norm: torch.Tensor | None) -> None:
    """X, W, bias and norm fit one another.

    Raises:
        InputError: they do not.
    """
    if not isinstance(weight, PackedWeight | Operand):
        raise InputError(f"weight is a {type(weight).__name__}", "pack it once with jitmx.pack_weight")
    checks.require_cuda("x", x)
    require_columns(x, weight.n, weight.k)
    if weight.device != x.device:
        raise InputError(f"x is on {x.device} and the weight on {weight.device}", "put both on one GPU")
    for name, tensor, count in (("bias", bias, weight.n), ("norm", norm, weight.k)):
        if tensor is not None and not _is(tensor, x.dtype, x.get_device(), (count,)):
            raise checks.mismatch(name, tensor, (count,), x)


def require_columns(x: torch.Tensor, n: int, k: int) -> None:
    """X has a dtype that products take, and k columns.

    Raises:
        InputError: it has not.
    """
    if x.dtype not in checks.HALF_DTYPES:
        raise InputError(f"x is {checks.describe(x)}; linear takes bfloat16 or float16")
    if x.dim() == 0 or x.shape[-1] != k:
        raise InputError(f"x has shape {list(x.shape)}; its last dimension must be k={k} of the weight [{n}, {k}]")


def vector(name: str, tensor: torch.Tensor, count: int, x: torch.Tensor, dtype: torch.dtype, device: int) -> int:
    """Address of a bias or a norm, a contiguous tensor of `count` values of x's `dtype` and on its `device`.

    Raises:
        InputError: it is none, or requires a gradient.
    """
    if not (  # `_is`, without the call
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.get_device() == device
        and tensor.numel() == count
        and tensor.dim() == 1
        and tensor.is_contiguous()
    ):
        raise checks.mismatch(name, tensor, (count,), x)
    if tensor.requires_grad:
        checks.require_no_grad(name, tensor)
    address: int = tensor.data_ptr()
    return address


def _require_prefetch(prefetch: PackedWeight, x: torch.Tensor) -> None:
    """A weight that a product of x may prefetch.

    Raises:
        InputError: it is no packed weight on x's GPU.
    """
    if not isinstance(prefetch, PackedWeight):
        raise InputError(
            f"prefetch is a {type(prefetch).__name__}", "pass the packed weight that a later product reads, or None"
        )
    if prefetch.device != x.device:
        raise InputError(f"prefetch is on {prefetch.device} and x on {x.device}", "put both on one GPU")


def _low_part(residual_lo: torch.Tensor, residual: torch.Tensor | None) -> int:
    """Address of the second tensor of a residual.

    Raises:
        InputError: there is no first, or they are not alike.
    """
    if residual is None:
        raise InputError("residual_lo is the low part of a residual, which is missing", "pass that residual too")
    if not _is(residual_lo, residual.dtype, residual.get_device(), residual.shape):
        raise checks.mismatch("residual_lo", residual_lo, tuple(residual.shape), residual)
    address: int = residual_lo.data_ptr()
    if address & 15 or residual_lo.requires_grad:
        checks.require_layout("residual_lo", residual_lo)
        checks.require_no_grad("residual_lo", residual_lo)
    return address


def _is(tensor: object, dtype: torch.dtype, device: int, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.get_device() == device
        and tensor.shape == shape
        and tensor.is_contiguous()
    )


def _traced(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
    activation: str | None,
    prefetch: PackedWeight | None,
) -> torch.Tensor:
    """`linear` as an operator, which can be traced through."""
    if not isinstance(x, torch.Tensor) or not isinstance(weight, PackedWeight):
        require_product(x, weight, bias, norm)
    packed = weight.words, weight.scales, weight.n, weight.k, operand.layout(weight)
    prefetched: tuple[torch.Tensor, ...] = ()
    if prefetch is not None:
        _require_prefetch(prefetch, x)
        prefetched = prefetch.words, prefetch.scales
    if out is None:
        y: torch.Tensor = torch.ops.jitmx.linear(x, *packed, bias, residual, norm, epsilon, activation, *prefetched)
        return y
    torch.ops.jitmx.linear_out(x, *packed, bias, residual, norm, epsilon, activation, out, *prefetched)
    return out


def run_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, bias: torch.Tensor | None,
    residual: torch.Tensor | None, norm: torch.Tensor | None, epsilon: float, activation: str | None, *prefetched: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What `torch.ops.jitmx.linear` does, for who need not be traced through."""
    weight = operand.find(words, scales, n, k, layout)
    if activation is not None:
        checks.require_cuda("x", x)
        if reads_rows(activation, weight, x.dtype):
            weight.look_at(words, scales)
    prefetch = operand.prefetch(*prefetched) if prefetched else NO_PREFETCH
    return run(custom.plain(x), weight, bias, out, residual, norm, epsilon, activation, prefetch=prefetch)


def _fake_operator(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    bias, residual, norm = rest[:3]
    custom.refuse_gradients(x=x, bias=bias, residual=residual, norm=norm)
    require_columns(x, n, k)
    return x.new_empty((*x.shape[:-1], n))


def _run_into(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> None:
    *others, out = rest[:6]
    run_operator(x, words, scales, n, k, layout, *others, *rest[6:], out=out)


def _fake_into(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> None:
    *others, out = rest[:6]
    y = _fake_operator(x, words, scales, n, k, layout, *others)
    if out.dtype is not y.dtype or out.shape != y.shape:
        raise checks.mismatch("out", out, tuple(y.shape), x)


_ARGUMENTS = (
    "Tensor x, Tensor words, Tensor scales, int n, int k, str layout, Tensor? bias, Tensor? residual, Tensor? norm, "
    "float epsilon, str? activation"
)
_PREFETCH = "Tensor? prefetch_words=None, Tensor? prefetch_scales=None"
custom.define(f"linear({_ARGUMENTS}, {_PREFETCH}) -> Tensor", run_operator, _fake_operator)
custom.define(f"linear_out({_ARGUMENTS}, Tensor(a!) out, {_PREFETCH}) -> ()", _run_into, _fake_into)
