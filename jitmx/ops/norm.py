"""`jitmx.rms_norm`: RMSNorm of rows in a launch of its own, which starts while the one before it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor  # where every call looks it up: torch's own attributes are slow

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.norm import MAX_HIDDEN, MAX_ROWS, VALUES_A_VECTOR, NormProblem, launch, of_rows, takes
from jitmx.ops import checks, custom
from jitmx.ops.checks import LARGEST
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Plans, Step

_is_compiling = torch.compiler.is_compiling


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in fp32, rounded once to x's dtype.

    Runs on the current stream of x's device. It works under `torch.cuda.graph` once the shape has been called before
    capture, and under `torch.compile`, where it is the operator `torch.ops.jitmx.rms_norm`. From sm_90 on the launch
    reads the weight while the one before it ends: what writes the weight must be over, or be a launch before that one.

    A row whose squares add up to more than fp32 holds becomes zeros, as torch's does in fp32.

    Args:
        x: [..., hidden], bfloat16 or float16, on a GPU; hidden a multiple of 8, 16384 at most. Values of a row follow
            one another, and rows lie at one distance, a multiple of 8 values: a slice of columns is such an x.
        weight: [hidden], x's dtype, contiguous.
        epsilon: 0 or more.
        out: [..., hidden], x's dtype, contiguous; written and returned. It may be x itself, and must else not overlap
            it.

    Returns:
        [..., hidden] in x's dtype, contiguous.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/norm/rms.cu.j2; reference: jitmx.kernels.norm.reference.
    """
    if type(x) is not Tensor or _is_compiling():
        return _traced(x, weight, epsilon, out)
    return run(x, weight, epsilon, out)


class Plan(plan.Plan):
    """The launch of calls with one shape.

    Attributes:
        launch: takes the addresses of x, weight and y, and epsilon; does nothing where there are no rows.
        shape: of y.
        hidden: values of a row.
        reach: bytes from the first value of x to the end of its last.
        bytes: of y.
        dense: x lies as y does.
    """

    def __init__(self, x: torch.Tensor) -> None:
        hidden = x.shape[-1]
        rows, stride = x.numel() // hidden, _row_stride(x)
        self.shape, self.hidden = tuple(x.shape), hidden
        self.bytes = rows * hidden * 2
        self.reach = ((rows - 1) * stride + hidden) * 2 if rows else 0
        self.dense = self.reach == self.bytes
        self.launch: Any = _nothing
        if rows:
            device = x.get_device()
            problem, multiprocessors = NormProblem(hidden, checks.HALF_DTYPES[x.dtype]), card.multiprocessors(device)
            variant = choose("norm", problem, card.arch(device), multiprocessors=multiprocessors).variant
            geometry = launch(variant.knobs, rows, multiprocessors)
            self.steps = (Step(variant, device, geometry, of_rows(rows, hidden, stride)),)
            self.launch = self.steps[0].run


_plans = Plans()


def run(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5, out: torch.Tensor | None = None) -> torch.Tensor:
    """`rms_norm` on plain tensors."""
    # The warm path: one look-up says that an x like this one was checked and planned before.
    try:
        dtype, device = x.dtype, x.get_device()
        made: Plan = _plans[x.shape, x.stride(), dtype, device]
    except (KeyError, AttributeError, TypeError):
        made = _plan(x)
    pointer = x.data_ptr()
    if pointer & 15:
        checks.require_aligned("x", x)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    if not (
        isinstance(weight, Tensor)
        and weight.dtype is dtype
        and weight.get_device() == device
        and weight.numel() == made.hidden
        and weight.dim() == 1
        and weight.is_contiguous()
    ):
        raise checks.mismatch("weight", weight, (made.hidden,), x)
    weight_at = weight.data_ptr()
    if weight_at & 15 or weight.requires_grad:
        checks.require_layout("weight", weight)
        checks.require_no_grad("weight", weight)
    if type(epsilon) is not float or not 0 <= epsilon <= LARGEST:
        checks.require_epsilon(epsilon)
    if out is None:
        out = x.new_empty(*made.shape)  # numbers: torch takes twice the time to read a torch.Size
        made.launch(pointer, weight_at, out.data_ptr(), epsilon)
        return out
    if not (
        isinstance(out, Tensor)
        and out.dtype is dtype
        and out.get_device() == device
        and out.shape == x.shape
        and out.is_contiguous()
    ):
        raise checks.mismatch("out", out, made.shape, x)
    target = out.data_ptr()
    if target & 15 or out.requires_grad:
        checks.require_layout("out", out)
        checks.require_no_grad("out", out)
    if pointer < target + made.bytes and target < pointer + made.reach and not (target == pointer and made.dense):
        checks.require_apart(out, "pass another tensor, or x itself, where x is contiguous", x=x)
    made.launch(pointer, weight_at, target, epsilon)
    return out


def _plan(x: torch.Tensor) -> Plan:
    """Check what a plan rests on, make it and remember it."""
    checks.require_cuda("x", x)
    _require_rows(x)
    if x.numel() // x.shape[-1] > MAX_ROWS:
        raise InputError(f"x has shape {list(x.shape)}; rms_norm takes {MAX_ROWS} rows at most", "split it by rows")
    return _plans.remember((x.shape, x.stride(), x.dtype, x.get_device()), Plan(x))


def _require_rows(x: torch.Tensor) -> None:
    """X has rows that the kernel takes.

    Raises:
        InputError: it has not.
    """
    checks.require_tensor("x", x)
    if x.dtype not in checks.HALF_DTYPES:
        raise InputError(f"x is {checks.describe(x)}; rms_norm takes bfloat16 or float16")
    if x.dim() == 0 or not takes(x.shape[-1]):
        raise InputError(
            f"x has shape {list(x.shape)}; its last dimension must be a multiple of {VALUES_A_VECTOR}, "
            f"{MAX_HIDDEN} at most"
        )


def _row_stride(x: torch.Tensor) -> int:
    """Values from a row of x to the next; those of a row where there is one.

    Raises:
        InputError: rows lie at several distances, or at one that the kernel cannot take.
    """
    found = checks.row_stride(x) if x.numel() else int(x.shape[-1])
    if found is None or found % VALUES_A_VECTOR:
        raise InputError(
            f"x has strides {list(x.stride())}: values of a row must follow one another, and rows lie at one distance, "
            f"a multiple of {VALUES_A_VECTOR}",
            "pass x.contiguous()",
        )
    return found


def _nothing(*_given: object) -> None:
    """The launch of no rows."""


def _traced(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None) -> torch.Tensor:
    """`rms_norm` as an operator, which can be traced through."""
    _require_rows(x)
    checks.require_tensor("weight", weight)
    if out is None:
        y: torch.Tensor = torch.ops.jitmx.rms_norm(x, weight, epsilon)
        return y
    torch.ops.jitmx.rms_norm_out(x, weight, epsilon, out)
    return out


def _run_operator(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return run(custom.plain(x), custom.plain(weight), epsilon)


def _fake_operator(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    custom.refuse_gradients(x=x, weight=weight)
    _require_rows(x)
    if weight.dtype is not x.dtype or weight.shape != x.shape[-1:]:
        raise checks.mismatch("weight", weight, (x.shape[-1],), x)
    return x.new_empty(x.shape)


def _run_into(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    run(custom.plain(x), custom.plain(weight), epsilon, custom.plain(out))


def _fake_into(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    y = _fake_operator(x, weight, epsilon)
    if out.dtype is not y.dtype or out.shape != y.shape:
        raise checks.mismatch("out", out, tuple(y.shape), x)


custom.define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", _run_operator, _fake_operator)
custom.define("rms_norm_out(Tensor x, Tensor weight, float epsilon, Tensor(a!) out) -> ()", _run_into, _fake_into)
