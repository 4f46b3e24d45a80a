"""Reading a buffer at the speed of the memory, for rooflines."""

from __future__ import annotations

import functools

import torch

from jitmx.dispatch.choose import choose
from jitmx.kernels.bandwidth import ReadProblem
from jitmx.ops import checks
from jitmx.runtime.launch import Launcher

_BLOCKS_A_MULTIPROCESSOR = 1  # of 512 threads with 8 loads each: 64 KB under way


@functools.cache
def _launcher(device: int) -> tuple[Launcher, torch.Tensor]:
    count = checks.multiprocessors(device)
    variant = choose("bandwidth", ReadProblem(), checks.device_arch(device), multiprocessors=count).variant
    launcher = Launcher(
        variant, device, blocks=count * _BLOCKS_A_MULTIPROCESSOR, shared_bytes=0, layout="@PPQ", pdl=False
    )
    return launcher, torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def read(data: torch.Tensor) -> None:
    """Read every byte of `data` (contiguous, on a GPU, a multiple of 16 bytes) on the current stream.

    Raises:
        InputError: a device or layout that the kernel cannot take.

    Source: templates/bandwidth/read.cu.j2.
    """
    checks.require_cuda("data", data)
    checks.require_layout("data", data)
    launcher, sink = _launcher(data.get_device())
    stream = torch.cuda.current_stream(data.device).cuda_stream
    launcher(stream, data.data_ptr(), sink.data_ptr(), data.numel() * data.element_size() // 16)
