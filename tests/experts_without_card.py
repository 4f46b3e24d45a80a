"""`jitmx.moe` and `jitmx.route` without a card: their kernels, simulated on CPU tensors. Small shapes only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch

import jitmx
import without_card
from jitmx import arch
from jitmx.dispatch.choose import choose
from jitmx.kernels import routing
from jitmx.kernels.moe import MoeProblem, launch_of
from jitmx.kernels.moe.arguments import LAYOUT
from jitmx.kernels.moe.layout import ALPHA, LIMIT
from jitmx.kernels.routing import RoutingProblem
from jitmx.kernels.routing_cases import arguments
from jitmx.ops.experts import PackedExperts
from jitmx.ops.routing_plan import Routing
from jitmx.registry.case import Buffer

MULTIPROCESSORS = 4


@contextlib.contextmanager
def on_cpu(target: str = "sm_90a") -> Iterator[list[str]]:
    """`jitmx.moe` with at most 64 rows, and `jitmx.route`, take CPU tensors and run kernels for `target`.

    Yields:
        The names of the variants that ran, in order.
    """
    chip, ran = arch.parse(target), list[str]()

    def route(
        x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, k: int,
        scoring: str = "softmax_topk",
    ) -> Routing:  # fmt: skip
        m, h = (len(x), 8) if weight is None else x.shape
        experts = x.shape[1] if weight is None else len(weight)
        problem = RoutingProblem(
            m, experts, k, h, "logits" if weight is None else "hidden", bias="none" if bias is None else "bias_bf16",
            scoring=scoring,
        )  # fmt: skip
        variant = choose("routing", problem, chip, multiprocessors=MULTIPROCESSORS).variant
        geometry = routing.launch(variant, m, experts, MULTIPROCESSORS)
        inputs = {"x": x, "weight": weight, "bias": bias}
        given = {name: Buffer(without_card.array(tensor)) for name, tensor in inputs.items() if tensor is not None}
        asked = arguments(
            m, h, **given, local=experts, workspace=_scratch(geometry.workspace),
            ids=Buffer(np.empty((m, k), np.int32), output=True),
            weights=Buffer(np.empty((m, k), np.float32), output=True),
        )  # fmt: skip
        ids, weights = without_card.launch(
            variant, geometry.blocks, geometry.shared_bytes, routing.LAYOUT, asked, geometry.cluster
        )
        ran.append(variant.name)
        return Routing(torch.from_numpy(ids), torch.from_numpy(weights), None, None, None, None)

    def moe(
        x: torch.Tensor, chosen: Any, w13: PackedExperts, w2: PackedExperts, b13: torch.Tensor, b2: torch.Tensor, *,
        top: int | None = None, scoring: str = "softmax_topk", expert_map: torch.Tensor | None = None,
        x_format: str = "bf16",
    ) -> torch.Tensor:  # fmt: skip
        assert x_format == "bf16"
        if isinstance(chosen, torch.Tensor):
            assert top is not None
            chosen = route(chosen, k=top, scoring=scoring)
        ids, weights = (tensor.numpy() for tensor in chosen[:2])
        rows, top = ids.shape
        scales = "normal" if w13.scale_range == w2.scale_range == "normal" else "full"
        problem = MoeProblem(rows, w13.experts, top, w13.k, w2.k, encoding=w13.encoding, scale_range=scales)
        variant = choose("moe", problem, chip, multiprocessors=MULTIPROCESSORS).variant
        geometry = launch_of(variant, problem, MULTIPROCESSORS)
        packed = (part.numpy().view(np.uint32) for weight in (w13, w2) for part in (weight.words, weight.scales))
        asked = (
            Buffer(without_card.array(x)), *map(Buffer, packed), *(Buffer(without_card.array(b)) for b in (b13, b2)),
            Buffer(ids), Buffer(weights), 0 if expert_map is None else Buffer(expert_map.numpy()), 0,
            Buffer(np.empty(x.shape, ml_dtypes.bfloat16), output=True), _scratch(geometry.workspace), ALPHA, LIMIT,
            rows, top, w13.experts, 0 if expert_map is None else len(expert_map), w13.k, w2.k,
        )  # fmt: skip
        (y,) = without_card.launch(variant, geometry.blocks, geometry.shared_bytes, LAYOUT, asked, geometry.cluster)
        ran.append(variant.name)
        return torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)

    with mock.patch.object(jitmx, "moe", moe), mock.patch.object(jitmx, "route", route):
        yield ran


def _scratch(size: int) -> Any:
    return Buffer(np.zeros(size, np.uint8), scratch=True) if size else 0
