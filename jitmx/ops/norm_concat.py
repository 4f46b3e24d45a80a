"""RMSNorm of rows of a table and of x, side by side, in one launch: what the first layer of an Eagle3 draft reads."""

from __future__ import annotations

import torch
from torch import Tensor

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels.norm import NormProblem, concat, takes
from jitmx.ops import checks, custom
from jitmx.runtime import card, plan
from jitmx.runtime.plan import Plans, Step

_MAX_ROWS = (1 << 30) - 1  # two blocks each


class Plan(plan.Plan):
    """The launch of calls with one shape."""

    def __init__(self, ids: Tensor, table: Tensor, x: Tensor) -> None:
        hidden, device = x.shape[1], x.get_device()
        problem = NormProblem(hidden, checks.HALF_DTYPES[x.dtype], concat=True)
        variant = choose("norm", problem, card.arch(device), multiprocessors=card.multiprocessors(device)).variant
        given = concat.fields(hidden, x.stride(0), len(table), ids.dtype is torch.int64)
        self.steps = (Step(variant, device, concat.launch(len(x)), given),)


_plans = Plans()


def run(
    ids: Tensor, table: Tensor, x: Tensor, table_weight: Tensor, weight: Tensor, epsilon: float, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm of `table[ids]` and of x, each row of one beside that of the other; in fp32, rounded once.

    Runs on the current stream of x's device, under `torch.cuda.graph` once the shapes have been called before capture.
    From sm_90 on the launch begins while the one before it runs, which may write all but the table and the weights;
    the one behind it begins when that has ended.

    Args:
        ids: [rows], int32 or int64, contiguous, on x's GPU. Of an id below 0 or past the table the half is zeros.
        table: [n, hidden], x's dtype, contiguous.
        x: [rows, hidden], bfloat16 or float16, on a GPU; hidden a multiple of 8, 16384 at most. Values of a row follow
            one another, and rows lie at a multiple of 8 values.
        table_weight, weight: [hidden], x's dtype, contiguous: of the norm of the table's rows, and of that of x.
        epsilon: of both, 0 or more.
        keep: whether the norm of x comes back by itself, too.

    Returns:
        [rows, 2 hidden], and [rows, hidden] or, without `keep`, [0, hidden]; in x's dtype, contiguous.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/norm/concat.cu.j2; reference: jitmx.kernels.norm.reference.
    """
    try:
        key = x.shape, x.stride(), x.dtype, x.get_device(), table.shape, ids.dtype
        made: Plan | None = _plans.get(key)
    except AttributeError:
        made = None
    if made is None:
        checks.require_cuda("x", x)
        _require(ids, table, x, table_weight, weight)
        if x.shape[0] > _MAX_ROWS:
            raise InputError(f"x has {len(x)} rows; norm.concat takes {_MAX_ROWS} at most", "split it by rows")
    hidden = x.shape[1]
    for name, tensor, shape, dtype in (
        ("ids", ids, x.shape[:1], ids.dtype), ("table", table, table.shape, x.dtype),
        ("table_weight", table_weight, x.shape[1:], x.dtype), ("weight", weight, x.shape[1:], x.dtype),
    ):  # fmt: skip
        checks.require_tensor(name, tensor)
        if (
            tensor.dtype is not dtype
            or tensor.shape != shape
            or not tensor.is_contiguous()
            or tensor.get_device() != x.get_device()
        ):
            raise checks.mismatch(name, tensor, tuple(shape), x if dtype is x.dtype else x.new_empty(0, dtype=dtype))
        if name != "ids":
            checks.require_aligned(name, tensor)
        checks.require_no_grad(name, tensor)
    checks.require_aligned("x", x)
    checks.require_no_grad("x", x)
    checks.require_epsilon(epsilon)
    y, normed = x.new_empty(len(x), 2 * hidden), x.new_empty(len(x) if keep else 0, hidden)
    if len(x) == 0:
        return y, normed
    if made is None:
        made = _plans.remember(key, Plan(ids, table, x))
    made.steps[0].run(
        ids.data_ptr(), table.data_ptr(), x.data_ptr(), table_weight.data_ptr(), weight.data_ptr(), y.data_ptr(),
        normed.data_ptr() if keep else 0, float(epsilon),
    )  # fmt: skip
    return y, normed


def _require(ids: Tensor, table: Tensor, x: Tensor, table_weight: Tensor, weight: Tensor) -> None:
    """What torch's tracing may know of the tensors already.

    Raises:
        InputError: the kernel cannot take them.
    """
    for name, tensor in (("ids", ids), ("table", table), ("table_weight", table_weight), ("weight", weight)):
        checks.require_tensor(name, tensor)
    if x.dtype not in checks.HALF_DTYPES:
        raise InputError(f"x is {checks.describe(x)}; norm.concat takes bfloat16 or float16")
    if x.dim() != 2 or not takes(x.shape[1]):
        raise InputError(
            f"x has shape {list(x.shape)}; it must be [rows, hidden], hidden a multiple of 8, 16384 at most"
        )
    if x.stride(1) != 1 or x.stride(0) % 8:
        raise InputError(f"x has strides {list(x.stride())}; rows lie at a multiple of 8 values", "pass x.contiguous()")
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"ids is {checks.describe(ids)}; it must be int32 or int64")
    if table.dim() != 2 or table.shape[1] != x.shape[1]:
        raise InputError(f"table has shape {list(table.shape)}; it must be [n, {x.shape[1]}]")


def _run_operator(
    ids: Tensor, table: Tensor, x: Tensor, table_weight: Tensor, weight: Tensor, epsilon: float, keep: bool
) -> tuple[Tensor, Tensor]:
    ids, table, x, table_weight, weight = map(custom.plain, (ids, table, x, table_weight, weight))
    return run(ids, table, x, table_weight, weight, epsilon, keep)


def _fake_operator(
    ids: Tensor, table: Tensor, x: Tensor, table_weight: Tensor, weight: Tensor, epsilon: float, keep: bool
) -> tuple[Tensor, Tensor]:
    custom.refuse_gradients(table=table, x=x, table_weight=table_weight, weight=weight)
    _require(ids, table, x, table_weight, weight)
    return x.new_empty(x.shape[0], 2 * x.shape[1]), x.new_empty(x.shape[0] if keep else 0, x.shape[1])


custom.define(
    "rms_norm_concat(Tensor ids, Tensor table, Tensor x, Tensor table_weight, Tensor weight, float epsilon, bool keep) "
    "-> (Tensor, Tensor)",
    _run_operator,
    _fake_operator,
)
