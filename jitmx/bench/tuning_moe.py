"""Timing candidates of `moe` on the present card, for `jitmx tune`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from jitmx.bench import tuning
from jitmx.bench.moe import CHECKED, Chain, Weights, gap
from jitmx.bench.moe_inputs import LayerShape, RandomLayer, random_layer, rotated
from jitmx.dispatch import tune
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError
from jitmx.kernels.moe import KERNELS, MoeProblem, tiles
from jitmx.ops import moe_plan
from jitmx.ops.experts import pack_experts

# Relative L2; a quantized h that lies near the middle between two numbers may go to either.
GATE, QUANTIZED_GATE = 0.02, 0.06
_SEED = 1


def shape_of(problem: MoeProblem) -> LayerShape:
    """The layer that a problem is of."""
    return LayerShape(**{item.name: getattr(problem, item.name) for item in fields(LayerShape)})


def knobs_of(problem: MoeProblem, candidate: Candidate) -> dict[str, Any]:
    """Knobs of the whole layer with a candidate: of the second product, the first is that of the same tile."""
    own = {"kernel": candidate.kernel, **candidate.knobs}
    if problem.product == "layer":
        return own
    if problem.product != "down":
        raise DriverError(f"product={problem.product} is not timed by itself; a layer's, or its second product, is")
    tile = tiles.maker(KERNELS[candidate.kernel])
    sizes = candidate.knobs["tile_m"], candidate.knobs["tile_n"], None, None
    first = {"tile_m": sizes[0]} if tile is None else tile(*sizes)
    return {"kernel": candidate.kernel, **first, "down": own}


class Bench:
    """Times candidates in CUDA graphs of dependent calls, each with a routing of its own that finds experts cold.

    A candidate is timed as part of the layer: lists by expert, both products and the sum, or the one launch that makes
    all of it. Weights of the shape at hand are kept.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._of: tuple[LayerShape, str] | None = None
        self._layer: RandomLayer | None = None
        self._weights: list[Weights] = []
        self._last: Chain | None = None

    def healthy(self) -> bool:
        """Whether the device still answers."""
        return tuning.answers(self._device)

    def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        """Median microseconds of a layer.

        Raises:
            JitmxError: the candidate cannot run, or what it computes is wrong.
        """
        with torch.no_grad(), torch.cuda.device(self._device):
            chain = self._chain(problem)
            plan = moe_plan.plan(replace(problem, product="layer"), self._device, knobs_of(problem, candidate))
            try:
                if repeats <= tune.QUICK:
                    self._check(chain, plan, candidate)
                return chain.seconds(plan, repeats, routed=True) * 1e6
            except torch.OutOfMemoryError as error:
                raise DriverError(f"{candidate.key} on {problem.as_dict()} takes too much memory ({error})") from error

    def _chain(self, problem: MoeProblem) -> Chain:
        """Calls of a problem; weights and calls of the last one are kept."""
        of = shape_of(problem), problem.encoding
        if of != self._of or self._layer is None:
            self._layer, self._weights, self._last, self._of = None, [], None, of
            self._layer = random_layer(of[0])
            first, second = (
                pack_experts(weight, encoding=problem.encoding) for weight in (self._layer.w13, self._layer.w2)
            )
            self._weights = list(rotated((first, second)))
        if self._last is None or self._last.rows != problem.m:
            self._last = Chain(self._layer, self._weights, problem.m, _SEED)
        return self._last

    def _check(self, chain: Chain, plan: moe_plan.Plan, candidate: Candidate) -> None:
        error = gap(chain, chain.call(plan, 0, routed=True), CHECKED)
        if not error <= (GATE if chain.layer.shape.x_format == "bf16" else QUANTIZED_GATE):
            raise DriverError(f"{candidate.key} is {error:.2g} off with {chain.rows} rows")
