"""Products and experts of a block (`jitmx.serving.products`) as operators: opaque to torch.compile.

What is fused depends on the number of rows, and traced code does not know it.
"""

from __future__ import annotations

from typing import Any

import torch

from jitmx.ops import custom, linear
from jitmx.serving import products
from jitmx.vllm import monitor


def _fake_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str, *rest: Any
) -> torch.Tensor:
    linear.require_columns(x, n, k)
    _, residual, _, _, _, swiglu, *_ = rest
    return x.new_empty((*(() if residual is None else (2,)), *x.shape[:-1], n // 2 if swiglu else n))


def _run_experts(stream: torch.Tensor, *rest: Any) -> torch.Tensor:
    monitor.look()
    return products.run_experts(stream, *rest)


custom.define(
    "vllm_linear(Tensor x, Tensor words, Tensor scales, int n, int k, str layout, Tensor? bias, Tensor? residual, "
    "Tensor? residual_lo, Tensor? norm, float epsilon, bool swiglu, str activation, Tensor? prefetch_words=None, "
    "Tensor? prefetch_scales=None) -> Tensor",
    products.run_linear,
    _fake_linear,
)
custom.define(
    "vllm_experts(Tensor stream, Tensor norm, float epsilon, Tensor router, Tensor? router_bias, Tensor words13, "
    "Tensor scales13, Tensor words2, Tensor scales2, int hidden, int intermediate, str layout13, str layout2, "
    "Tensor? b13, Tensor? b2, int top, str scoring, str x_format) -> Tensor",
    _run_experts,
    lambda stream, *rest: torch.empty_like(stream),
)
custom.define(
    "vllm_pair(Tensor x, Tensor more) -> Tensor", products.run_pair, lambda x, more: x.new_empty((2, *x.shape))
)
