"""The operator of the family."""

from __future__ import annotations

import torch
from jitmx.kernels.toy import ToyProblem

from jitmx import kernels
from jitmx.dispatch.choose import choose
from jitmx.ops import checks
from jitmx.runtime import card
from jitmx.runtime.plan import Step


def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
    """factor x, for x [rows, columns] in float32.

    Raises:
        InputError: x is not on a GPU.
    """
    checks.require_cuda("x", x)
    device, problem = x.get_device(), ToyProblem(x.shape[0], x.shape[1], factor)
    choice = choose("toy", problem, card.arch(device), multiprocessors=card.multiprocessors(device))
    launch = kernels.family("toy").launch(choice.variant, problem, choice.multiprocessors)
    y = torch.empty_like(x)
    Step(choice.variant, device, launch, {})(x=x.data_ptr(), y=y.data_ptr(), values=x.numel())
    return y
