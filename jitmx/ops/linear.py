"""`jitmx.linear`: Y = X W^T (+ bias) with W in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.linear import MAX_GEMV_ROWS, LinearProblem, gemv_blocks, gemv_shared_bytes
from jitmx.ops import checks
from jitmx.ops.packed import PackedWeight
from jitmx.runtime.launch import Launcher

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Plan:
    """A launch for one shape and dtype: everything that does not change from call to call."""

    __slots__ = ("bias", "fixed", "k", "launcher", "rows", "scales", "words")

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
        self.bias = bias
        self.rows = rows
        self.words, self.scales = weight.words.data_ptr(), weight.scales.data_ptr()
        self.fixed = (rows, weight.n, weight.k)
        self.launcher = Launcher(
            variant,
            device,
            blocks=gemv_blocks(variant.knobs, weight.n, multiprocessors),
            shared_bytes=gemv_shared_bytes(variant.knobs, weight.k),
            layout="@PPPPPiii" if bias else "@PPPPiii",
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
        key = (x.shape, x.dtype, x.get_device(), bias is None)
        plan, shape = weight.plans[key]
    except (KeyError, AttributeError, TypeError):
        plan, shape = _plan(x, weight, bias)
    pointer = x.data_ptr()
    if pointer & 15 or not x.is_contiguous():
        checks.require_layout("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    if bias is not None and (
        bias.shape != (weight.n,) or bias.dtype is not x.dtype or bias.device != x.device or not bias.is_contiguous()
    ):
        _refuse_bias(bias, weight, x)
    if out is None:
        out = x.new_empty(shape)
    elif out.shape != shape or out.dtype is not x.dtype or out.device != x.device or not out.is_contiguous():
        raise InputError(
            f"out is {checks.describe(out)} with strides {list(out.stride())}; it must be contiguous {str(x.dtype).removeprefix('torch.')} {list(shape)} on {x.device}"
        )
    if plan:
        device = key[2]
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                _run(plan, device, pointer, bias, out)
        else:
            stream = _raw_stream(device)
            if len(plan) == 1:
                plan[0](stream, pointer, 0 if bias is None else bias.data_ptr(), out.data_ptr())
            else:
                _run(plan, device, pointer, bias, out)
    return out


def _run(plan: tuple[Plan, ...], device: int, x: int, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    stream = _raw_stream(device)
    y, b = out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for step in plan:
        step(stream, x, b, y)
        rows, n, k = step.fixed
        x += rows * k * 2
        y += rows * n * 2


def _plan(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> tuple[tuple[Plan, ...], torch.Size]:
    """Check what a plan rests on, make it and remember it with the weight."""
    if not isinstance(weight, PackedWeight):
        raise InputError(f"weight is a {type(weight).__name__}; pack it once with jitmx.pack_weight")
    checks.require_cuda("x", x)
    if x.dtype not in _DTYPES:
        raise InputError(f"x is {checks.describe(x)}; linear takes bfloat16 or float16")
    if x.dim() == 0 or x.shape[-1] != weight.k:
        raise InputError(
            f"x has shape {list(x.shape)}; its last dimension must be k={weight.k} of the weight [{weight.n}, {weight.k}]"
        )
    if weight.device != x.device:
        raise InputError(f"x is on {x.device} and the weight on {weight.device}; put both on one GPU")
    if bias is not None:
        _refuse_bias(bias, weight, x, only_wrong=True)
    rows = x.numel() // weight.k
    with torch.cuda.device(x.device):
        made: dict[int, Plan] = {}
        steps = []
        while rows > 0:
            step = min(rows, MAX_GEMV_ROWS)
            if step not in made:
                made[step] = Plan(weight, step, x.dtype, bias is not None, x.get_device())
            steps.append(made[step])
            rows -= step
    entry = tuple(steps), torch.Size((*x.shape[:-1], weight.n))
    weight.plans[x.shape, x.dtype, x.get_device(), bias is None] = entry
    return entry


def _refuse_bias(bias: object, weight: PackedWeight, x: torch.Tensor, *, only_wrong: bool = False) -> None:
    checks.require_cuda("bias", bias)
    assert isinstance(bias, torch.Tensor)
    fine = bias.shape == (weight.n,) and bias.dtype is x.dtype and bias.device == x.device and bias.is_contiguous()
    if not (only_wrong and fine):
        raise InputError(
            f"bias is {checks.describe(bias)}; it must be contiguous {str(x.dtype).removeprefix('torch.')} [{weight.n}] on {x.device}"
        )
