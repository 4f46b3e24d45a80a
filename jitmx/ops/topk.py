"""`jitmx.topk`: the k largest of each row and their indices, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels import topk as kernels
from jitmx.kernels.topk import MAX_K, MAX_ROWS, MAX_VOCAB, TopkProblem
from jitmx.ops import checks, custom
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Plans, Step

_TAKES = ("x", "values", "indices")

_plans = Plans()


class TopK(NamedTuple):
    """The k largest of each row, the largest first.

    Attributes:
        values: [..., k], x's dtype.
        indices: int64 [..., k].
    """

    values: torch.Tensor
    indices: torch.Tensor


class Plan(plan.Plan):
    """The launch for rows of one shape."""

    def __init__(self, x: torch.Tensor, k: int, stride: int) -> None:
        device = card.number(x.device)
        problem = TopkProblem(x.numel() // x.shape[-1], x.shape[-1], k, checks.DTYPES[x.dtype])
        choice = choose("topk", problem, card.arch(device), multiprocessors=card.multiprocessors(device))
        geometry = kernels.launch(choice.variant.knobs, problem, choice.multiprocessors)
        fixed = {"stride": stride, **kernels.numbers_of(geometry, problem)}
        step = Step(choice.variant, device, geometry, fixed, _TAKES)
        self.steps = (step,)
        self.run = step.run


def topk(x: torch.Tensor, k: int) -> TopK:
    """The k largest values of the last dimension, the largest first, and where they are.

    Of equals the lower index comes first, so that the outcome is the same every time; both zeros are one value, +0; a
    NaN comes after every number, and is among the k only where numbers run out. One launch, on the current stream of
    x's device, under `torch.cuda.graph` once the shape has been called before capture, and under `torch.compile`.

    Args:
        x: [..., vocab], bfloat16, float16 or float32, on a GPU. Values of a row follow one another; rows may lie apart.
        k: 1 to 64, and to vocab.

    Returns:
        Values [..., k] in x's dtype, and indices int64 [..., k].

    Raises:
        InputError: a device, dtype, shape, layout or k that the kernel cannot take, or a tensor that requires a
            gradient; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/topk/select.cu.j2; reference: jitmx.kernels.topk.reference.
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("x", x)
        return TopK(*torch.ops.jitmx.topk_rows(x, k))
    return run(x, k)


def run(x: torch.Tensor, k: int) -> TopK:
    """`topk` on plain tensors."""
    try:
        key = x.shape, x.stride(), x.dtype, x.get_device(), k
        made: Plan | None = _plans[key] if type(k) is int else _plan(x, k)  # an equal number finds a plan, too
    except (KeyError, AttributeError, TypeError):
        made = _plan(x, k)
    if x.requires_grad:
        checks.require_no_grad("x", x)
    shape = (*x.shape[:-1], k)
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if made is not None:
        made.run(x.data_ptr(), values.data_ptr(), indices.data_ptr())
    return TopK(values, indices)


def _plan(x: torch.Tensor, k: int) -> Plan | None:
    checks.require_cuda("x", x)
    _require(x, k)
    stride = checks.row_stride(x)
    if stride is None:
        said = f"x has strides {list(x.stride())}"
        raise InputError(
            f"{said}; values of a row must follow one another, and rows lie evenly", "pass a contiguous copy"
        )
    made = Plan(x, k, stride) if x.numel() else None
    return _plans.remember((x.shape, x.stride(), x.dtype, x.get_device(), k), made)


def _require(x: torch.Tensor, k: int) -> None:
    """Raise InputError where dtype, shape or k are none that the kernel takes."""
    if x.dtype not in checks.DTYPES:
        raise InputError(f"x is {checks.describe(x)}", "topk takes bfloat16, float16 or float32")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_VOCAB:
        raise InputError(f"x has shape {list(x.shape)}; a row has 1 to {MAX_VOCAB} values")
    if x.numel() // x.shape[-1] > MAX_ROWS:
        raise InputError(f"x has shape {list(x.shape)}, over {MAX_ROWS} rows", "split it by rows")
    checks.require_whole(k=k)
    if not 1 <= k <= min(MAX_K, x.shape[-1]):
        most = min(MAX_K, int(x.shape[-1]))
        raise InputError(f"k={k} of rows of {x.shape[-1]}: topk takes 1 to {most}", f"use k={most} at most")


def _run_operator(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return run(custom.plain(x), k)


def _fake_operator(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    custom.refuse_gradients(x=x)
    _require(x, k)
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


custom.define("topk_rows(Tensor x, int k) -> (Tensor, Tensor)", _run_operator, _fake_operator)
