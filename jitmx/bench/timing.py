"""Timing kernels: medians, inside CUDA graphs, over data that no cache holds.

A step of a decoder reads each weight once and every call waits for the one before. `chain` measures just that: a graph
of calls in which each reads what the last one wrote, over copies of the weight that together exceed the L2 several
times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from jitmx.bench import bandwidth

L2_MULTIPLE = 6


def copies_past_l2(nbytes: int, device: int = 0) -> int:
    """How many buffers of `nbytes` it takes to exceed the L2 `L2_MULTIPLE` times, at least 2."""
    return max(2, -(-L2_MULTIPLE * l2_bytes(device) // nbytes))


def l2_bytes(device: int = 0) -> int:
    """Size of a device's L2."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def seconds(run: Callable[[], object], repeats: int = 21) -> float:
    """Median seconds of `run` on the current stream, by events, after three runs to warm up."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def replayed(run: Callable[[], object], repeats: int = 21) -> float:
    """Median seconds of `run` replayed from a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds(graph.replay, repeats)


# Products of many rows lower the clock of the card beyond their end; what is timed next is not to pay for them. On an
# H200 a chain of one row takes 3.3 us a call right behind 200 of them, 2.9 to 3.2 after 20 ms, and 2.6 after 200 ms.
PAUSE_S = 0.2


def chain(
    calls: Sequence[Callable[[torch.Tensor, torch.Tensor], object]],
    elements: int,
    dtype: torch.dtype,
    repeats: int = 21,
    pause: float = PAUSE_S,
) -> float:
    """Median seconds a call when `calls` run one after another in a CUDA graph, each reading what the last one wrote.

    Args:
        calls: each takes a flat buffer to read and one to write, of `elements` elements.
        elements: size of the two buffers that are passed on, filled at random.
        pause: seconds that the card rests before; less will do where it comes from the like.
    """
    buffers = [torch.randn(elements, device="cuda").to(dtype) for _ in range(2)]
    for call in calls[:1]:
        call(buffers[0], buffers[1])  # compiles and loads before capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, call in enumerate(calls):
            call(buffers[i % 2], buffers[1 - i % 2])
    time.sleep(pause)
    return seconds(graph.replay, repeats) / len(calls)


def host_seconds(run: Callable[[], object], calls: int = 300, repeats: int = 15) -> float:
    """Median seconds of host time that `run` takes when the GPU keeps up."""
    for _ in range(50):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes a second of a device-to-device copy, read and written bytes counted."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source))


def read_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes a second of a kernel that only reads."""
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    return nbytes / seconds(lambda: bandwidth.read(data))


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations a second of a square bf16 product on random data."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), repeats=9)


def calls_of(nbytes: int, copies: int, m: int, n: int, k: int) -> int:
    """Calls a graph: all copies, and some milliseconds at the most by a guess of what a call takes."""
    guess = max(nbytes / 4e12, 2 * m * n * k / 6e14, 2e-6)
    return max(min(copies, 8), min(max(copies, 64), int(4e-3 / guess)))
