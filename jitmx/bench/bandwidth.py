"""Reading a buffer at the speed of the memory, for rooflines."""

from __future__ import annotations

import functools

import torch

from jitmx.dispatch.choose import choose
from jitmx.kernels.bandwidth import ReadProblem
from jitmx.ops import checks
from jitmx.registry.launch import Launch
from jitmx.runtime import card
from jitmx.runtime.plan import Step

_BLOCKS_A_MULTIPROCESSOR = 1  # of 512 threads with 8 loads each: 64 KB under way


@functools.cache
def _step(device: int) -> tuple[Step, torch.Tensor]:
    count = card.multiprocessors(device)
    variant = choose("bandwidth", ReadProblem(), card.arch(device), multiprocessors=count).variant
    step = Step(variant, device, Launch(count * _BLOCKS_A_MULTIPROCESSOR), {})
    return step, torch.zeros(1, dtype=torch.int32, device=card.place(device))


def read(data: torch.Tensor) -> None:
    """Read every byte of `data` (contiguous, on a GPU, a multiple of 16 bytes) on the current stream.

    Raises:
        InputError: a device or layout that the kernel cannot take.

    Source: templates/bandwidth/read.cu.j2.
    """
    checks.require_cuda("data", data)
    checks.require_layout("data", data)
    step, sink = _step(data.get_device())
    step(data=data.data_ptr(), sink=sink.data_ptr(), vectors=data.numel() * data.element_size() // 16)
