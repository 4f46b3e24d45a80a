"""What `jitmx bench` measures: each function returns rows of plain numbers.

Weights are random and rotate past the L2; linear products run in CUDA graphs of dependent calls, beside cuBLAS in bf16
on the same shapes in the same run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitmx import formats
from jitmx.ops import checks, measure
from jitmx.ops.linear import Plan, linear
from jitmx.ops.mx import MXTensor
from jitmx.ops.packed import PackedWeight, pack_weight
from jitmx.ops.quantize import dequantize, quantize

# [n, k] of gpt-oss-120b's dense products.
GPT_OSS = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)}


@dataclass(frozen=True)
class Ceilings:
    """What the card yields in this run: bytes and operations a second."""

    card: str
    read: float
    copy: float
    matmul: float


def ceilings() -> Ceilings:
    """Measure them."""
    return Ceilings(
        torch.cuda.get_device_name(), measure.read_bandwidth(), measure.copy_bandwidth(), measure.matmul_rate()
    )


def random_weight(n: int, k: int) -> MXTensor:
    """A random MXFP4 weight whose products neither grow nor vanish along a chain."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    centre = formats.SCALE_ONE - round(k**0.5 * 2.5).bit_length() + 1
    return MXTensor(codes, torch.randint(centre - 1, centre + 2, (n, k // 32), device="cuda").to(torch.uint8))


def time_linear(
    weights: list[PackedWeight], m: int, knobs: Mapping[str, Any] | None = None, calls: int | None = None
) -> float:
    """Seconds a call of `jitmx.linear` with m rows in a chain over `weights`, copies of one shape."""
    n, k = weights[0].shape
    device = weights[0].words.get_device()
    plans = [Plan(weight, m, torch.bfloat16, device, knobs=knobs) for weight in weights]

    def call(plan: Plan) -> Any:
        return lambda x, y: plan(torch.cuda.current_stream().cuda_stream, x.data_ptr(), y.data_ptr())

    count = calls or max(len(weights), 64 if weights[0].nbytes < 64 << 20 else 4)
    return measure.chain([call(plans[i % len(plans)]) for i in range(count)], m * max(n, k), torch.bfloat16)


def time_cublas(n: int, k: int, m: int) -> float:
    """Seconds a call of bf16 `torch.mm` with m rows in a chain over copies of the weight."""
    count = measure.copies_past_l2(n * k * 2)
    weights = [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(count)]

    def call(weight: torch.Tensor) -> Any:
        return lambda x, y: torch.mm(x[: m * k].view(m, k), weight.T, out=y[: m * n].view(m, n))

    calls = max(count, 64 if n * k < 64 << 20 else 4)
    return measure.chain([call(weights[i % count]) for i in range(calls)], m * max(n, k), torch.bfloat16)


def rotated(weight: PackedWeight) -> list[PackedWeight]:
    """`weight` and copies of it, enough to exceed the L2 several times."""
    count = measure.copies_past_l2(weight.nbytes)
    return [weight] + [
        dataclasses.replace(weight, words=weight.words.clone(), scales=weight.scales.clone()) for _ in range(count - 1)
    ]


def bench_linear(
    shapes: Iterable[tuple[str, int, int]], rows: Iterable[int], peers: bool = True
) -> list[dict[str, Any]]:
    """Rows of `name, n, k, m, us, bytes, flops, cublas_us` for each shape and row count."""
    out = []
    for name, n, k in shapes:
        weights = rotated(pack_weight(random_weight(n, k)))
        for m in rows:
            spent = time_linear(weights, m)
            moved = weights[0].nbytes + m * (n + k) * 2
            row = {"name": name, "n": n, "k": k, "m": m, "us": spent * 1e6, "bytes": moved, "flops": 2 * m * n * k}
            out.append(row | {"cublas_us": time_cublas(n, k, m) * 1e6 if peers else None})
        del weights
    return out


def bench_quantize(nbytes: int = 64 << 20) -> list[dict[str, Any]]:
    """Rows of `name, us, bytes` for a bf16 tensor of `nbytes` to each format and back."""
    copies = measure.copies_past_l2(nbytes)
    xs = [torch.randn(nbytes // 2 // 2880, 2880, device="cuda").bfloat16() for _ in range(copies)]
    out = []
    for format in formats.FORMATS:
        tensors = [quantize(x, format) for x in xs]
        moved = xs[0].numel() * 2 + tensors[0].codes.numel() + tensors[0].scales.numel()
        for name, run in (
            (f"bf16 to {format}", lambda format=format: [quantize(x, format) for x in xs]),
            (f"{format} to bf16", lambda tensors=tensors: [dequantize(tensor) for tensor in tensors]),
        ):
            out.append({"name": name, "us": measure.replayed(run) / copies * 1e6, "bytes": moved})
    return out


def bench_launch() -> list[dict[str, Any]]:
    """Rows of `name, us`: host time of warm calls small enough that the GPU never keeps the host waiting."""
    weight = pack_weight(random_weight(16, 64))
    x, out = torch.randn(1, 64, device="cuda").bfloat16(), torch.empty(1, 16, device="cuda").bfloat16()
    bias = torch.randn(16, device="cuda").bfloat16()
    plan = Plan(weight, 1, torch.bfloat16, x.get_device())
    stream = torch.cuda.current_stream().cuda_stream
    pointers = x.data_ptr(), out.data_ptr()
    calls = {
        "jitmx.linear(x, weight, out=out)": lambda: linear(x, weight, out=out),
        "jitmx.linear(x, weight, bias, out=out)": lambda: linear(x, weight, bias, out=out),
        "jitmx.linear(x, weight)": lambda: linear(x, weight),
        "launch alone": lambda: plan(stream, *pointers),
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    checks.require_cuda("x", x)
    return [{"name": name, "us": measure.host_seconds(run) * 1e6} for name, run in calls.items()]
