"""What `jitmx.moe` asks of its tensors, with data and without."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, bfloat16

from jitmx import formats
from jitmx.errors import InputError, KnobError
from jitmx.kernels.moe.problem import ACTIVATIONS, BOUNDED, MAX_TOP, REDUCTIONS, UNGATED, WEIGHT_ON, X_FORMATS
from jitmx.ops import checks
from jitmx.ops.moe.experts import PackedExperts
from jitmx.ops.moe.operand import ExpertOperand, Experts
from jitmx.ops.routing.calls import SCORING
from jitmx.ops.routing.plan import Routing
from jitmx.quoting import short

LOGITS = (torch.bfloat16, torch.float16, torch.float32)

# Ids and weights, or logits and None.
Chosen = tuple[torch.Tensor, torch.Tensor | None]


class Recipe(NamedTuple):
    """What a layer makes of its weights: fields of MoeProblem."""

    activation: str = ACTIVATIONS[0]
    x_format: str = X_FORMATS[0]
    scale_rule: str = formats.SCALE_RULES[0]
    weight_on: str = WEIGHT_ON[0]
    reduction: str = REDUCTIONS[0]

    @property
    def rows(self) -> int:
        """Rows of W13 a feature."""
        return 1 if self.activation in UNGATED else 2

    def require(self) -> None:
        """Raise KnobError where there is no such thing."""
        choices = ACTIVATIONS + UNGATED, X_FORMATS, formats.SCALE_RULES, WEIGHT_ON, REDUCTIONS
        for (name, value), known in zip(self._asdict().items(), choices, strict=True):
            if value not in known:
                raise KnobError(f"{name}={value!r} is not one of {', '.join(known)}")


def require_experts(w13: Any, w2: Any, recipe: Recipe) -> None:
    """Both weights are packed, and fit one another.

    Raises:
        InputError: they are not, or do not.
        KnobError: an unknown activation or format.
    """
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, PackedExperts | ExpertOperand):
            raise InputError(f"{name} is a {type(weight).__name__}", "pack it once with jitmx.pack_experts")
    recipe.require()
    if (w2.experts, w2.n, recipe.rows * w2.k) != (w13.experts, w13.k, w13.n):
        rows = "2 intermediate" if recipe.rows == 2 else "intermediate"
        raise InputError(
            f"w13 {list(w13.shape)} and w2 {list(w2.shape)} do not fit: with activation={recipe.activation!r} they "
            f"must be [experts, {rows}, hidden] and [experts, hidden, intermediate]"
        )
    if w13.encoding != w2.encoding:
        raise InputError(f"w13 was packed as {w13.encoding} and w2 as {w2.encoding}", "pack both alike")


def require_numbers(recipe: Recipe, alpha: Any, limit: Any) -> None:
    """Numbers of swiglu_oai that kernels take.

    Raises:
        InputError: alpha is no number that is finite in float32, limit none of 0 or more and no infinity, or with fp8
            one of them gives h no bound.
    """
    known = checks.is_number(alpha) and checks.is_number(limit)
    if known and recipe.x_format == "fp8" and recipe.activation in BOUNDED and not (alpha > 0 and limit > 0):
        raise InputError(
            f"alpha={short(alpha)} and limit={short(limit)} of swiglu_oai give h no bound, by which x_format='fp8' "
            "scales it",
            "use numbers above 0, or x_format='mxfp8'",
        )
    if not checks.is_finite(alpha):
        raise InputError(f"alpha={short(alpha)} of swiglu_oai is not a finite number in float32")
    if not known or not limit >= 0 or not (limit == math.inf or checks.is_finite(limit)):
        said = f"limit={short(limit)} of swiglu_oai is not a number of 0 or more in float32"
        raise InputError(said, "pass inf where there is none")


def taken_apart(routing: Any) -> Chosen:
    """Ids and weights of what was passed as routing, or logits and None.

    Raises:
        InputError: it is neither.
    """
    if isinstance(routing, Routing):
        return routing.ids, routing.weights
    if isinstance(routing, torch.Tensor):
        return routing, None
    if isinstance(routing, tuple) and len(routing) == 2:
        return routing
    raise InputError(
        f"routing is a {type(routing).__name__}", "pass router logits, (ids, weights), or what jitmx.route returns"
    )


def require_layer(
    x: torch.Tensor, chosen: Chosen, w13: Experts, w2: Experts, b13: Any, b2: Any, expert_map: Any, count: Any,
    top: int | None, scoring: str,
) -> int:  # fmt: skip
    """Dtypes and shapes fit together; what has no data has these too.

    Returns:
        Experts a row.

    Raises:
        InputError: they do not.
        KnobError: an unknown scoring.
    """
    checks.require_tensor("x", x)
    if x.dtype != torch.bfloat16 or x.dim() == 0 or x.shape[-1] != w13.k:
        raise InputError(
            f"x is {checks.describe(x)}; moe takes bfloat16 whose last dimension is hidden={w13.k} of w13 "
            f"{list(w13.shape)}"
        )
    if w13.device != x.device or w2.device != x.device:
        raise InputError(f"x is on {x.device}, w13 on {w13.device} and w2 on {w2.device}", "put all on one GPU")
    if expert_map is not None:
        checks.require_tensor("expert_map", expert_map)
        _require("expert_map", expert_map, x, (torch.int32,), (expert_map.numel(),))
    top = _require_chosen(x, chosen, w13.experts if expert_map is None else expert_map.numel(), top, scoring)
    if (b13 is None) != (b2 is None):
        raise InputError("one of b13 and b2 is missing", "pass both or neither (zeros where one product has none)")
    if b13 is not None:
        _require("b13", b13, x, (torch.bfloat16,), (w13.experts, w13.n))
        _require("b2", b2, x, (torch.bfloat16,), (w2.experts, w2.n))
    if count is not None:
        _require("count", count, x, (torch.int32,), (1,))
    return top


def _require_chosen(x: torch.Tensor, chosen: Chosen, experts: int, top: int | None, scoring: str) -> int:
    """Ids and weights, or logits, are of x's rows; how many experts a row has."""
    ids, weights = chosen
    rows = tuple(x.shape[:-1])
    if weights is None:
        if scoring not in SCORING:
            raise KnobError(f"scoring={scoring!r} is not one of {', '.join(SCORING)}")
        checks.require_tensor("routing", ids)
        if not ids.is_floating_point() and ids.dim() == x.dim():
            raise InputError(
                f"routing is {checks.describe(ids)}, which are no logits",
                "of ids and weights pass both: (ids, weights)",
            )
        most = min(MAX_TOP, experts)
        if type(top) is not int or not 1 <= top <= most:
            raise InputError(f"top={top!r} of router logits is not 1 to {most}", "say how many experts a row takes")
        _require("router logits", ids, x, LOGITS, (*rows, experts))
        return top
    checks.require_tensor("ids", ids)
    found = ids.shape[-1] if ids.dim() else 0
    if not 1 <= found <= MAX_TOP:
        raise InputError(f"ids is {checks.describe(ids)}; its last dimension, experts a row, must be 1 to {MAX_TOP}")
    if top is not None and (type(top) is not int or top != found):
        raise InputError(f"top={short(top)} is for router logits, and ids is {checks.describe(ids)}", "leave top out")
    _require("ids", ids, x, (torch.int32,), (*rows, found))
    _require("weights", weights, x, (torch.float32,), (*rows, found))
    return int(found)


def _require(name: str, tensor: Any, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Raise InputError unless a tensor is of one of these types and of this shape, on x's device."""
    checks.require_tensor(name, tensor)
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or tensor.device != x.device:
        names = checks.names(dtypes)
        raise InputError(
            f"{name} is {checks.describe(tensor)}; it must be contiguous {names} {list(shape)} on {x.device}"
        )


def require_like(name: str, tensor: Any, x: torch.Tensor) -> None:
    """What is written or added has x's shape.

    Raises:
        InputError: it has not.
    """
    _require(name, tensor, x, (torch.bfloat16,), tuple(x.shape))


def is_pair(residual: Any, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a residual is one, and has two tensors of x's shape."""
    return isinstance(residual, torch.Tensor) and tuple(residual.shape) == (2, *x.shape)


def require_residual(residual: Any, x: torch.Tensor) -> None:
    """A residual is like x, or a pair of such tensors.

    Raises:
        InputError: it is not.
    """
    _require("residual", residual, x, (torch.bfloat16,), (2, *x.shape) if is_pair(residual, x) else tuple(x.shape))


def require_data(**tensors: torch.Tensor | None) -> None:
    """Tensors lie on a GPU, contiguous, and no gradient is asked of them; 16-bit ones start on 16 bytes.

    Raises:
        InputError: one does not.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        checks.require_cuda(name, tensor)
        if not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous (strides {list(tensor.stride())})", f"pass {name}.contiguous()")
        if tensor.dtype is torch.bfloat16:  # read and written several at a time
            checks.require_layout(name, tensor)
        checks.require_no_grad(name, tensor)


def address(name: str, tensor: torch.Tensor | None) -> int:
    """Where a tensor lies, 0 for None; of one whose shape, dtype and device were seen before, the rest is checked.

    Raises:
        InputError: as `require_data`.
    """
    if tensor is None:
        return 0
    found: int = tensor.data_ptr()
    if found & 15 or not tensor.is_contiguous() or tensor.requires_grad:
        require_data(**{name: tensor})
    return found


def require_out(out: Any, like: torch.Tensor, device: int) -> int:
    """Address of what is written: bfloat16, `like` another tensor in shape, on the CUDA device of that number.

    Raises:
        InputError: it is not, or as `require_data`.
    """
    if not (
        isinstance(out, Tensor)
        and out.dtype is bfloat16
        and out.get_device() == device
        and out.shape == like.shape
        and out.is_contiguous()
        and not out.requires_grad
        and not out.data_ptr() & 15
    ):
        require_data(out=out)
        require_like("out", out, like)
    found: int = out.data_ptr()
    return found
