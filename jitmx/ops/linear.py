"""`jitmx.linear`: Y = X W^T (+ bias) with W in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitmx.dispatch.choose import split
from jitmx.errors import InputError
from jitmx.kernels.linear import LinearProblem, launch_of
from jitmx.kernels.linear.arguments import LAYOUT
from jitmx.ops import checks
from jitmx.ops.packed import PackedWeight
from jitmx.registry.spec import Variant
from jitmx.runtime.launch import Launcher

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Plan:
    """The launches of one call: everything that does not change from call to call.

    Most calls are one launch; one with more rows than its kernel takes is several.
    """

    __slots__ = ("shared", "steps", "weight")

    def __init__(
        self,
        weight: PackedWeight,
        rows: int,
        dtype: torch.dtype,
        device: int,
        extras: Mapping[str, Any] | None = None,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        self.weight = weight.words.data_ptr(), weight.scales.data_ptr()
        self.steps: list[Step] = []
        if not rows:
            return
        problem = LinearProblem(
            rows, weight.n, weight.k, _DTYPES[dtype], encoding=weight.encoding, scale_range=weight.scale_range,
            **{"weight": weight.format, **(extras or {})},
        )  # fmt: skip
        arch, multiprocessors = checks.device_arch(device), checks.multiprocessors(device)
        for choice, count in split("linear", problem, arch, multiprocessors=multiprocessors, knobs=knobs):
            step = Step(choice.variant, choice.problem.as_dict()["m"], weight.n, weight.k, device, multiprocessors)
            self.steps += [step] * count

    def __call__(
        self, stream: int, x: int, y: int, bias: int = 0, residual: int = 0, norm: int = 0, epsilon: float = 0.0
    ) -> None:
        """Launch on the CUstream `stream`; the rest are device addresses, 0 for what the call lacks."""
        words, scales = self.weight
        for step in self.steps:
            workspace = step.workspace(stream) if step.scratch else 0
            step.launcher(
                stream, x, words, scales, bias, residual, norm, y, workspace, 0, epsilon, *step.shape
            )  # fmt: skip
            x += step.x_bytes
            y += step.y_bytes
            residual += step.y_bytes if residual else 0


class Step:
    """One launch over some of the rows of a call."""

    __slots__ = ("_device", "_workspaces", "launcher", "scratch", "shape", "x_bytes", "y_bytes")

    def __init__(self, variant: Variant, rows: int, n: int, k: int, device: int, multiprocessors: int) -> None:
        geometry = launch_of(variant, rows, n, k, multiprocessors)
        self.launcher = Launcher(
            variant,
            device,
            blocks=geometry.blocks,
            shared_bytes=geometry.shared_bytes,
            cluster=geometry.cluster,
            layout=LAYOUT,
            pdl=variant.knobs.pdl,
        )
        self.shape = rows, n, k
        self.x_bytes = rows * k * 2
        self.y_bytes = rows * 8 if getattr(variant.knobs, "argmax", False) else rows * n * 2
        self.scratch = geometry.workspace
        self._device = device
        self._workspaces: dict[int, torch.Tensor] = {}

    def workspace(self, stream: int) -> int:
        """Address of scratch memory that is zero, or was left zero by an earlier launch on the same stream.

        A graph gets memory of its own at every capture, zeroed as part of it: which stream it will run on, and beside
        what, is not known yet.
        """
        if torch.cuda.is_current_stream_capturing():
            return int(torch.zeros(self.scratch, dtype=torch.uint8, device=self._device).data_ptr())
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.zeros(self.scratch, dtype=torch.uint8, device=self._device)
        return int(self._workspaces[stream].data_ptr())


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Y = X W^T (+ bias), accumulated in fp32 and rounded once.

    Runs on the current stream of x's device and works under `torch.cuda.graph` once the shape has been called before
    capture.

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

    Source: templates/linear/, chosen by jitmx/dispatch (`jitmx explain linear`).
    """
    # The warm path: one look-up says that a call like this one was checked and planned before.
    try:
        dtype, device = x.dtype, x.get_device()
        plan, shape = weight.plans[x.shape, dtype, device, bias is None]
    except (KeyError, AttributeError, TypeError):
        plan, shape = _plan(x, weight, bias)
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
    if target == pointer and plan.steps:
        raise InputError("out is x itself; a product cannot be written over what it reads: pass another tensor")
    if device == torch._C._cuda_getDevice():
        plan(_raw_stream(device), pointer, target, addend)
    else:
        with torch.cuda.device(device):
            plan(_raw_stream(device), pointer, target, addend)
    return out


def _plan(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> tuple[Plan, torch.Size]:
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
        plan = Plan(weight, x.numel() // weight.k, x.dtype, x.get_device(), {"bias": bias is not None})
    entry = plan, torch.Size((*x.shape[:-1], weight.n))
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
