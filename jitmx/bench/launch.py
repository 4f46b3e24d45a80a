"""What `jitmx bench launch` measures: what a warm call costs the host."""

from __future__ import annotations

from typing import Any

import torch

from jitmx.bench import timing
from jitmx.bench.attention_inputs import Layer, Workload
from jitmx.bench.benchmark import Asked, Ceilings, Table
from jitmx.bench.linear import random_weight
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.ops import checks
from jitmx.ops.attention import attention
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
    layer = Layer(Workload(AttentionProblem(context=256, window=128, sinks="sinks_bf16", rope="neox", rotary=64)))
    q, k, v = layer.split(layer.inputs())
    table, slots, y = layer.tables[0], layer.slots[0], torch.empty_like(q)

    def attend() -> None:
        attention(
            q, k, v, layer.k_cache, layer.v_cache, table, layer.seq_lens, layer.starts, max_query_len=1,
            max_seq_len=256, window=128, sinks=layer.sinks, rope=layer.rope, slot_mapping=slots, out=y,
        )  # fmt: skip

    calls = {
        "jitmx.linear(x, weight, out=out)": lambda: linear(x, weight, out=out),
        "jitmx.linear(x, weight, bias, out=out)": lambda: linear(x, weight, bias, out=out),
        "jitmx.linear(x, weight)": lambda: linear(x, weight),
        "torch.ops.jitmx.linear(x, ...)": lambda: traced(x, *packed, None, None, None, 1e-5, None),
        "jitmx.attention(q, k, v, ..., out=out)": attend,
        "launch alone": lambda: plan(*pointers),
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    checks.require_cuda("x", x)
    return [{"name": name, "us": timing.host_seconds(run) * 1e6} for name, run in calls.items()]


def tables(payload: list[dict[str, Any]], limits: Ceilings) -> list[Table]:
    """Time of each call."""
    rows = [(row["name"], f"{row['us']:.2f}") for row in payload]
    return [Table(("HOST TIME OF A WARM CALL", "US"), rows, ("US",))]
