"""The operator of the family."""

from __future__ import annotations

import torch
from jitmx.kernels.toy import LAYOUT, ToyProblem

from jitmx import kernels
from jitmx.dispatch.choose import choose
from jitmx.ops import checks
from jitmx.runtime.launch import Launcher


def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
    """factor x, for x [rows, columns] in float32.

    Raises:
        InputError: x is not on a GPU.
    """
    checks.require_cuda("x", x)
    device, problem = x.get_device(), ToyProblem(x.shape[0], x.shape[1], factor)
    choice = choose("toy", problem, checks.device_arch(device), multiprocessors=checks.multiprocessors(device))
    geometry = kernels.family("toy").launch(choice.variant, problem, choice.multiprocessors)
    y = torch.empty_like(x)
    launcher = Launcher(choice.variant, device, blocks=geometry.blocks, shared_bytes=0, layout=LAYOUT)
    launcher(torch.cuda.current_stream().cuda_stream, x.data_ptr(), y.data_ptr(), x.numel())
    return y
