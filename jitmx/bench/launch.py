"""What `jitmx bench launch` measures: what a warm call costs the host."""

from __future__ import annotations

from typing import Any

import torch

from jitmx.bench import timing
from jitmx.bench.benchmark import Asked, Ceilings, Table
from jitmx.bench.linear import random_weight
from jitmx.ops import checks
from jitmx.ops.linear import linear, operand
from jitmx.ops.linear.packed import pack_weight
from jitmx.ops.linear.plan import Plan


def bench(asked: Asked) -> list[dict[str, Any]]:
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


def tables(payload: list[dict[str, Any]], limits: Ceilings) -> list[Table]:
    """Time of each call."""
    rows = [(row["name"], f"{row['us']:.2f}") for row in payload]
    return [Table(("HOST TIME OF A WARM CALL", "US"), rows, ("US",))]
