"""What `jitmx bench quantize` measures: a large tensor to each format and back."""

from __future__ import annotations

from typing import Any

import torch

from jitmx import formats
from jitmx.bench import timing
from jitmx.bench.benchmark import Asked, Ceilings, Table
from jitmx.models import GPT_OSS_120B
from jitmx.ops.quantize import dequantize, quantize


def bench(asked: Asked, nbytes: int = 64 << 20) -> list[dict[str, Any]]:
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


def tables(payload: list[dict[str, Any]], limits: Ceilings) -> list[Table]:
    """Time and bandwidth of each way."""
    rows = [
        (
            row["name"], f"{row['us']:.1f}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
            f"{row['bytes'] / row['us'] * 1e6 / limits.copy:.0%}",
        )
        for row in payload
    ]  # fmt: skip
    right = ("US", "TB/S", "OF COPY")
    return [Table(("QUANTIZE, 64 MB", *right), rows, right)]
