"""What `jitmx bench` measures: each function returns rows of plain numbers.

Weights are random and rotate past the L2; linear products run in CUDA graphs of dependent calls, beside cuBLAS in bf16
and what other libraries there are, on the same shapes in the same run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitmx import formats
from jitmx.bench import peers, timing
from jitmx.models import GPT_OSS_120B
from jitmx.ops import checks, operand
from jitmx.ops.linear import linear
from jitmx.ops.linear_plan import Plan
from jitmx.ops.mx import MXTensor
from jitmx.ops.packed import PackedWeight, pack_weight
from jitmx.ops.quantize import dequantize, quantize


@dataclass(frozen=True)
class Ceilings:
    """What the card yields in this run: bytes and operations a second."""

    card: str
    read: float
    copy: float
    matmul: float

    def floors(self, moved: float, flops: float) -> dict[str, float]:
        """Bytes and operations of a call, the microseconds that each takes at the rates of the card, and the longer."""
        memory, compute = moved / self.read * 1e6, flops / self.matmul * 1e6
        return {
            "bytes": moved, "flops": flops, "memory_us": memory, "compute_us": compute,
            "floor_us": max(memory, compute),
        }  # fmt: skip


def ceilings() -> Ceilings:
    """Measure them."""
    return Ceilings(
        torch.cuda.get_device_name(), timing.read_bandwidth(), timing.copy_bandwidth(), timing.matmul_rate()
    )


def random_weight(n: int, k: int, format: str = "mxfp4") -> MXTensor:
    """A random weight whose products neither grow nor vanish along a chain."""
    if format != "mxfp4":
        parts = [torch.randn(min(8192, n - at), k, device="cuda").mul_(k**-0.5) for at in range(0, n, 8192)]
        tensors = [quantize(part, format) for part in parts]
        return MXTensor(torch.cat([t.codes for t in tensors]), torch.cat([t.scales for t in tensors]), format)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    centre = formats.SCALE_ONE - round(k**0.5 * 2.5).bit_length() + 1
    return MXTensor(codes, torch.randint(centre - 1, centre + 2, (n, k // 32), device="cuda").to(torch.uint8))


def time_linear(
    weights: list[PackedWeight],
    m: int,
    knobs: Mapping[str, Any] | None = None,
    calls: int | None = None,
    extras: Mapping[str, Any] | None = None,
) -> float:
    """Seconds a call of `jitmx.linear` with m rows in a chain over `weights`, copies of one shape.

    Args:
        knobs: as for `choose`.
        calls: calls a graph.
        extras: further fields of the problem that need no further tensor, such as the activation's format.
    """
    n, k = weights[0].shape
    plan = Plan(weights[0], m, torch.bfloat16, weights[0].words.get_device(), extras, knobs)
    plans = [plan.over(weight) for weight in weights]

    def call(plan: Plan) -> Any:
        return lambda x, y: plan(x.data_ptr(), y.data_ptr())

    count = calls or calls_of(weights[0].nbytes, len(weights), m, n, k)
    return timing.chain([call(plans[i % len(plans)]) for i in range(count)], m * max(n, k), torch.bfloat16)


def calls_of(nbytes: int, copies: int, m: int, n: int, k: int) -> int:
    """Calls a graph: all copies, and some milliseconds at the most by a guess of what a call takes."""
    guess = max(nbytes / 4e12, 2 * m * n * k / 6e14, 2e-6)
    return max(min(copies, 8), min(max(copies, 64), int(4e-3 / guess)))


def time_cublas(n: int, k: int, m: int) -> float:
    """Seconds a call of bf16 `torch.mm` with m rows in a chain over copies of the weight."""
    count = timing.copies_past_l2(n * k * 2)
    weights = [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(count)]

    def call(weight: torch.Tensor) -> Any:
        return lambda x, y: torch.mm(x[: m * k].view(m, k), weight.T, out=y[: m * n].view(m, n))

    calls = calls_of(n * k * 2, count, m, n, k)
    return timing.chain([call(weights[i % count]) for i in range(calls)], m * max(n, k), torch.bfloat16)


def rotated(weight: PackedWeight) -> list[PackedWeight]:
    """`weight` and copies of it, enough to exceed the L2 several times."""
    count = timing.copies_past_l2(weight.nbytes)
    return [weight] + [
        dataclasses.replace(weight, words=weight.words.clone(), scales=weight.scales.clone()) for _ in range(count - 1)
    ]


def bench_linear(
    shapes: Iterable[tuple[str, int, int]],
    rows: Iterable[int],
    wanted: Sequence[str] = tuple(peers.PEERS),
    on_row: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Rows of `name, n, k, m, kernel, us, bytes, flops, cublas_us, peers` for each shape and row count.

    `peers` has for each library that was wanted its `us`, None where it could not be measured, and then the `reason`.

    Args:
        wanted: names of libraries to run beside jitmx and cuBLAS.
        on_row: called with each row as it comes.
    """
    out = []
    counts = tuple(rows)
    for name, n, k in shapes:
        tensor = random_weight(n, k)
        weights = rotated(pack_weight(tensor))
        others: dict[str, list[peers.Product] | str] = {}
        for peer in wanted:
            try:
                others[peer] = peers.load(peer, tensor, len(weights))
            except peers.Unavailable as error:
                others[peer] = str(error)
        for m in counts:
            spent = time_linear(weights, m)
            moved = weights[0].nbytes + m * (n + k) * 2
            row = {"name": name, "n": n, "k": k, "m": m, "kernel": _kernel(weights[0], m)}
            row |= {"us": spent * 1e6, "bytes": moved, "flops": 2 * m * n * k}
            row |= {"cublas_us": time_cublas(n, k, m) * 1e6}
            row["peers"] = {peer: time_peer(found, n, k, m) for peer, found in others.items()}
            out.append(row)
            on_row(row)
        del weights, others
    return out


def _kernel(weight: PackedWeight, m: int) -> str:
    """The kernel that most rows of a call run on."""
    device = weight.words.get_device()
    return str(Plan(weight, m, torch.bfloat16, device).steps[0].variant.spec.name)


def time_peer(products: list[peers.Product] | str, n: int, k: int, m: int) -> dict[str, Any]:
    """`us` a call of another library's product with m rows in a chain over copies of the weight, or the `reason`."""
    if isinstance(products, str):
        return {"us": None, "reason": products}

    def call(product: peers.Product) -> Any:
        return lambda x, y: product(x[: m * k].view(m, k), y[: m * n].view(m, n))

    count = calls_of(n * k // 2, len(products), m, n, k)
    calls = [call(products[i % len(products)]) for i in range(count)]
    try:
        return {"us": timing.chain(calls, m * max(n, k), torch.bfloat16) * 1e6, "reason": None}
    except Exception as error:
        return {"us": None, "reason": peers.reason(error)}


def bench_quantize(nbytes: int = 64 << 20) -> list[dict[str, Any]]:
    """Rows of `name, us, bytes` for a bf16 tensor of `nbytes` to each format and back."""
    copies = timing.copies_past_l2(nbytes)
    k = GPT_OSS_120B.hidden
    xs = [torch.randn(nbytes // 2 // k, k, device="cuda").bfloat16() for _ in range(copies)]
    out = []
    for format in formats.FORMATS:
        tensors = [quantize(x, format) for x in xs]
        moved = xs[0].numel() * 2 + tensors[0].codes.numel() + tensors[0].scales.numel()
        for name, run in (
            (f"bf16 to {format}", lambda format=format: [quantize(x, format) for x in xs]),
            (f"{format} to bf16", lambda tensors=tensors: [dequantize(tensor) for tensor in tensors]),
        ):
            out.append({"name": name, "us": timing.replayed(run) / copies * 1e6, "bytes": moved})
    return out


def bench_launch() -> list[dict[str, Any]]:
    """Rows of `name, us`: host time of warm calls small enough that the GPU never keeps the host waiting."""
    weight = pack_weight(random_weight(16, 64))
    x, out = torch.randn(1, 64, device="cuda").bfloat16(), torch.empty(1, 16, device="cuda").bfloat16()
    bias = torch.randn(16, device="cuda").bfloat16()
    plan = Plan(weight, 1, torch.bfloat16, x.get_device())
    pointers = x.data_ptr(), out.data_ptr()
    packed = weight.words, weight.scales, weight.n, weight.k, operand.layout(weight)
    traced = torch.ops.jitmx.linear.default
    calls = {
        "jitmx.linear(x, weight, out=out)": lambda: linear(x, weight, out=out),
        "jitmx.linear(x, weight, bias, out=out)": lambda: linear(x, weight, bias, out=out),
        "jitmx.linear(x, weight)": lambda: linear(x, weight),
        "torch.ops.jitmx.linear(x, ...)": lambda: traced(x, *packed, None, None, None, 1e-5, None),
        "launch alone": lambda: plan(*pointers),
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    checks.require_cuda("x", x)
    return [{"name": name, "us": timing.host_seconds(run) * 1e6} for name, run in calls.items()]
