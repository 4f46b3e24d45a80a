"""`jitmx.linear`: Y = X W^T (+ bias) with W in MXFP4."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.linear import MAX_GEMV_ROWS, LinearProblem, gemv_blocks, gemv_layout, gemv_shared_bytes
from jitmx.ops import checks
from jitmx.ops.packed import PackedWeight
from jitmx.runtime.launch import Launcher

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Plan:
    """A launch for one shape and dtype: everything that does not change from call to call."""

    __slots__ = ("bias", "fixed", "launcher", "scales", "words", "x_bytes", "y_bytes")

    def __init__(
        self,
        weight: PackedWeight,
        rows: int,
        dtype: torch.dtype,
        bias: bool,
        device: int,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        problem = LinearProblem(rows, weight.n, weight.k, _DTYPES[dtype], bias, weight.encoding, weight.scale_range)
        multiprocessors = checks.multiprocessors(device)
        variant = choose(
            "linear", problem, checks.device_arch(device), multiprocessors=multiprocessors, knobs=knobs
        ).variant
        if rows > variant.knobs.m:
            raise InputError(f"{rows} rows are over the {variant.knobs.m} that {variant.name} takes in one pass")
        self.bias = bias
        self.x_bytes, self.y_bytes = rows * weight.k * 2, rows * weight.n * 2
        self.words, self.scales = weight.words.data_ptr(), weight.scales.data_ptr()
        self.fixed = (rows, weight.n, weight.k)
        self.launcher = Launcher(
            variant,
            device,
            blocks=gemv_blocks(variant.knobs, weight.n, multiprocessors),
            shared_bytes=gemv_shared_bytes(variant.knobs, weight.k),
            layout=gemv_layout(bias),
            pdl=variant.knobs.pdl,
        )

    def __call__(self, stream: int, x: int, bias: int, y: int) -> None:
        if self.bias:
            self.launcher(stream, x, self.words, self.scales, bias, y, *self.fixed)
        else:
            self.launcher(stream, x, self.words, self.scales, y, *self.fixed)


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Y = X W^T (+ bias), accumulated in fp32 and rounded once.

    Runs on the current stream of x's device and works under `torch.cuda.graph` once the shape has been called before
    capture. Up to 8 rows take one pass over the weight; more take one for each 8.

    Args:
        x: [..., k], bfloat16 or float16, contiguous, on the weight's GPU.
        weight: [n, k], from `jitmx.pack_weight`.
        bias: [n], x's dtype.
        out: [..., n], x's dtype, contiguous; written and returned. It must not overlap x.

    Returns:
        [..., n] in x's dtype.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/linear/gemv.cu.j2, chosen by jitmx/dispatch (`jitmx explain linear`).
    """
    # The warm path: one look-up says that a call like this one was checked and planned before.
    try:
        dtype, device = x.dtype, x.get_device()
        passes, shape = weight.plans[x.shape, dtype, device, bias is None]
    except (KeyError, AttributeError, TypeError):
        passes, shape = _plan(x, weight, bias)
    pointer = x.data_ptr()
    if pointer & 15 or not x.is_contiguous():
        checks.require_layout("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    if bias is None:
        addend = 0
    elif (
        isinstance(bias, torch.Tensor)
        and bias.dtype is dtype
        and bias.get_device() == device
        and bias.shape == (weight.n,)
        and bias.is_contiguous()
    ):
        addend = bias.data_ptr()
        if bias.requires_grad:
            checks.require_no_grad("bias", bias)
    else:
        raise _bad_bias(bias, weight, x)
    if out is None:
        out = x.new_empty(shape)
    elif not (
        isinstance(out, torch.Tensor)
        and out.dtype is dtype
        and out.get_device() == device
        and out.shape == shape
        and out.is_contiguous()
    ):
        raise _bad_out(out, shape, x)
    target = out.data_ptr()
    if target == pointer and passes.tail is not None:
        raise InputError("out is x itself; a product cannot be written over what it reads: pass another tensor")
    if device == torch._C._cuda_getDevice():
        passes(_raw_stream(device), pointer, addend, target)
    else:
        with torch.cuda.device(device):
            passes(_raw_stream(device), pointer, addend, target)
    return out


class Passes:
    """The launches of one call: `count` over as many rows as one takes, and one over the rest."""

    __slots__ = ("count", "full", "tail")

    def __init__(
        self,
        weight: PackedWeight,
        rows: int,
        dtype: torch.dtype,
        bias: bool,
        device: int,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        # At least one row is left to the tail, so that a call of few rows is the tail alone.
        self.count = max(0, -(-rows // MAX_GEMV_ROWS) - 1)
        rest = rows - self.count * MAX_GEMV_ROWS
        plan = functools.partial(_remembered, weight, dtype=dtype, bias=bias, device=device, knobs=knobs)
        self.full = plan(MAX_GEMV_ROWS) if self.count else None
        self.tail = plan(rest) if rest else None

    def __call__(self, stream: int, x: int, bias: int, y: int) -> None:
        if self.full is not None:
            for _ in range(self.count):
                self.full(stream, x, bias, y)
                x += self.full.x_bytes
                y += self.full.y_bytes
        if self.tail is not None:
            self.tail(stream, x, bias, y)


def _remembered(
    weight: PackedWeight, rows: int, *, dtype: torch.dtype, bias: bool, device: int, knobs: Mapping[str, Any] | None
) -> Plan:
    if knobs:
        return Plan(weight, rows, dtype, bias, device, knobs)
    key = (rows, dtype, bias, device)
    plan: Plan | None = weight.plans.get(key)
    if plan is None:
        plan = weight.plans[key] = Plan(weight, rows, dtype, bias, device)
    return plan


def _plan(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> tuple[Passes, torch.Size]:
    """Check what a plan rests on, make it and remember it with the weight."""
    if not isinstance(weight, PackedWeight):
        raise InputError(f"weight is a {type(weight).__name__}; pack it once with jitmx.pack_weight")
    checks.require_cuda("x", x)
    if x.dtype not in _DTYPES:
        raise InputError(f"x is {checks.describe(x)}; linear takes bfloat16 or float16")
    if x.dim() == 0 or x.shape[-1] != weight.k:
        raise InputError(
            f"x has shape {list(x.shape)}; its last dimension must be k={weight.k} of the weight "
            f"[{weight.n}, {weight.k}]"
        )
    if weight.device != x.device:
        raise InputError(f"x is on {x.device} and the weight on {weight.device}; put both on one GPU")
    if bias is not None:
        checks.require_cuda("bias", bias)
        if (
            bias.shape != (weight.n,)
            or bias.dtype is not x.dtype
            or bias.device != x.device
            or not bias.is_contiguous()
        ):
            raise _bad_bias(bias, weight, x)
    with torch.cuda.device(x.device):
        passes = Passes(weight, x.numel() // weight.k, x.dtype, bias is not None, x.get_device())
    entry = passes, torch.Size((*x.shape[:-1], weight.n))
    weight.plans[x.shape, x.dtype, x.get_device(), bias is None] = entry
    return entry


def _bad_bias(bias: object, weight: PackedWeight, x: torch.Tensor) -> InputError:
    bias = checks.require_cuda("bias", bias)
    wanted = f"{str(x.dtype).removeprefix('torch.')} [{weight.n}] on {x.device}"
    return InputError(f"bias is {checks.describe(bias)}; it must be contiguous {wanted}")


def _bad_out(out: object, shape: torch.Size, x: torch.Tensor) -> InputError:
    tensor = checks.require_cuda("out", out)
    wanted = f"{str(x.dtype).removeprefix('torch.')} {list(shape)} on {x.device}"
    return InputError(
        f"out is {checks.describe(tensor)} with strides {list(tensor.stride())}; it must be contiguous {wanted}"
    )
