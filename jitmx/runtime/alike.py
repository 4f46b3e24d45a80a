"""Whether the tensors of a call are what those of an earlier call were, said by one function of C.

torch guards what it compiles by the same function. It is not documented: where a release lacks it, or it says otherwise
than it must, the same is compared in Python, at 4 us for a dozen tensors in the place of 1 us.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Whether so many tensors are alike those that it was made of.
Alike = Callable[..., bool]


def alike(tensors: Sequence[torch.Tensor]) -> Alike:
    """A function that says of as many objects whether they are tensors like these, in the same order.

    Alike are type, dtype, device, shape, strides and whether a gradient is required. It keeps none of the tensors and
    raises nothing. It may say no of tensors that are alike where torch is in another mode (inference, autocast), or one
    of them is given twice and was not before.
    """
    guards = _guards()
    if guards is None or len({id(tensor) for tensor in tensors}) < len(tensors):  # guards take each once
        return compared(tensors)
    same: Alike = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return same


def compared(tensors: Sequence[torch.Tensor]) -> Alike:
    """`alike` in Python."""
    wanted = [_described(tensor) for tensor in tensors]

    def same(*others: Any) -> bool:
        try:
            return [_described(tensor) for tensor in others] == wanted
        except (AttributeError, RuntimeError):
            return False

    return same


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.dtype, tensor.device.type, tensor.get_device(), tensor.shape, tensor.stride(),
        tensor.requires_grad,
    )  # fmt: skip


@functools.cache
def _guards() -> Any:
    """torch's class of such guards, if it does as this module says."""
    try:
        made: Any = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        a, b = torch.zeros(2, 2, device="cpu"), torch.zeros(2, 2, dtype=torch.int32, device="cpu")
        check = made(a, b, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = (a.t(), a[:1], a.double(), a.clone().requires_grad_(), torch.nn.Parameter(a, False), None)
        right = check(a, b) is True and check(a.clone(), b.clone()) is True
        return made if right and not any(check(other, b) for other in others) else None
    except Exception:
        return None
