"""What `jitmx bench moe` measures, a layer from router logits to the combined output, and what `jitmx tune moe` times.

Calls are dependent (each reads what the last one wrote) and lie in a CUDA graph; each has a routing of its own, whose
experts no cache holds (see moe_inputs.py). A call is all of it: top-k and softmax, lists, both products, the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from jitmx.bench import moe_inputs, moe_peers, roofline, timing, tuning
from jitmx.bench.benchmark import Asked, Ceilings, Table, peer_cells, peer_headers, peer_notes
from jitmx.bench.moe_inputs import LayerShape, RandomLayer, calls_of, random_layer, rotated, spread_logits
from jitmx.bench.peers import Unavailable, loaded, timed
from jitmx.dispatch import tune
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError, KnobError
from jitmx.kernels.moe import KERNELS, MoeProblem
from jitmx.ops.moe import moe
from jitmx.ops.moe import plan as moe_plan
from jitmx.ops.moe.experts import PackedExperts, pack_experts
from jitmx.ops.moe.grouped import GroupedPlan
from jitmx.ops.routing.plan import Routing

ROWS = (1, 4, 16, 64, 8192)
# Relative L2; a quantized h that lies near the middle between two numbers may go to either.
GATE, QUANTIZED_GATE = 0.02, 0.06
_SEED = 1
CHECKED = 64  # rows of a call that are compared with the layer in float32

Weights = tuple[PackedExperts, PackedExperts]


class Chain:
    """Calls with m rows over weights that rotate.

    Attributes:
        rows: m.
        logits: of each call, bfloat16 [m, experts].
        hit: experts that a call hits, on the average.
    """

    def __init__(self, layer: RandomLayer, weights: Sequence[Weights], rows: int, seed: int = 0) -> None:
        self.layer, self.rows, self._weights = layer, rows, weights
        shape = layer.shape
        made, self.hit = spread_logits(shape, rows, calls_of(shape, rows, len(weights)), seed)
        self.logits = [one.to(layer.w13.codes.device) for one in made]
        chosen = [one.topk(shape.top, -1) for one in self.logits]
        self._routed = [
            Routing(one.indices.int().contiguous(), one.values.float().softmax(-1), None, None, None, None)
            for one in chosen
        ]

    def routing(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of a call."""
        found = self._routed[index]
        assert found.weights is not None
        return found.ids, found.weights

    def call(self, plan: moe_plan.Plan, index: int, routed: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A call by its plan; `routed` where top-k is not part of it."""
        layer, found = self.layer, self._routed[index]
        w13, w2 = self._weights[index % len(self._weights)]

        def run(x: torch.Tensor, y: torch.Tensor) -> None:
            lists = found
            if isinstance(plan, GroupedPlan):
                lists = plan.lists(found.ids, None, None)._replace(weights=found.weights)
            call = moe_plan.Call(
                x.data_ptr(), y.data_ptr(), (*w13.addresses, *w2.addresses),
                0 if layer.b13 is None else layer.b13.data_ptr(), 0 if layer.b2 is None else layer.b2.data_ptr(),
                bases=moe_plan.bases_of(w13, w2, layer.shape.x_format, layer.shape.activation),
            )  # fmt: skip
            if plan.adds:
                y.zero_()
            plan(call, lists)

        if routed:
            return run

        def whole(x: torch.Tensor, y: torch.Tensor) -> None:
            moe(
                x.view(self.rows, -1), self.logits[index], w13, w2, layer.b13, layer.b2, top=layer.shape.top,
                out=y.view(self.rows, -1), **layer.shape.recipe,
            )  # fmt: skip

        return whole

    def seconds(self, plan: moe_plan.Plan, repeats: int = 21, routed: bool = False) -> float:
        """Median seconds a call."""
        return self.time([self.call(plan, index, routed) for index in range(len(self.logits))], repeats)

    def time(self, calls: Sequence[Callable[[torch.Tensor, torch.Tensor], object]], repeats: int = 21) -> float:
        """Median seconds a call of a chain of calls."""
        return timing.chain(calls, self.rows * self.layer.shape.hidden, torch.bfloat16, repeats)


def gap(
    chain: Chain, run: Callable[[torch.Tensor, torch.Tensor], object], rows: int = CHECKED, x_format: str | None = None
) -> float:
    """How far the first call of a chain is from the layer in float32, relative L2 over its first rows.

    Args:
        x_format: what the layer's activations are rounded to, if it is another than the chain's.
    """
    x = torch.randn(chain.rows, chain.layer.shape.hidden, device=chain.logits[0].device).bfloat16()
    y = torch.full_like(x, torch.nan)
    run(x.view(-1), y.view(-1))
    ids, weights = (one[:rows] for one in chain.routing(0))
    layer = chain.layer
    if x_format is not None:
        layer = dataclasses.replace(layer, shape=dataclasses.replace(layer.shape, x_format=x_format))
    wanted = layer.reference(x[:rows], ids, weights)
    return float((y[:rows].float() - wanted).norm() / wanted.norm())


def bench_moe(
    shape: LayerShape,
    rows: Iterable[int],
    limits: Ceilings,
    wanted: Sequence[str] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of `m, hit, kernel, us, bytes, flops, memory_us, compute_us, floor_us, peers` for each row count.

    `memory_us` is the time of the bytes of the experts hit, x and y at the read bandwidth of this run, `compute_us`
    that of both products at its matmul rate, `floor_us` the longer one. `peers` has for each library that was wanted
    its `us`, None where it could not be measured, and then the `reason`.

    Args:
        wanted: names of libraries to run beside jitmx.
        seed: of the routing.
    """
    layer = random_layer(shape)
    encoding = "nibble" if shape.x_format == "fp8" else None  # what E4M3 is quickest decoded from
    weights = list(rotated((pack_experts(layer.w13, encoding=encoding), pack_experts(layer.w2, encoding=encoding))))
    out = []
    others = loaded(wanted, lambda name: moe_peers.load(name, layer))
    for m in rows:
        chain = Chain(layer, weights, m, seed)
        problem = moe_plan.problem_of(*weights[0], m, shape.top, bias=shape.bias, **shape.recipe)
        plan = moe_plan.launches(problem, weights[0][0].device.index)
        spent = chain.seconds(plan) * 1e6
        row: dict[str, Any] = {"m": m, "hit": chain.hit, "kernel": _multiplies(plan), "us": spent}
        row |= limits.floors(shape.bytes(m, chain.hit), shape.flops(m))
        row["peers"] = {name: time_peer(chain, other) for name, other in others.items()}
        out.append(row)
    return out


def _multiplies(plan: moe_plan.Plan) -> str:
    """The kernel that a layer is named by: the first that multiplies."""
    return next(one.spec.name for one in plan.variants if not one.spec.name.startswith("gather"))


def time_peer(chain: Chain, other: moe_peers.Layer | str) -> dict[str, Any]:
    """`us` a call of another library's layer on the calls of a chain, or the `reason` why there is none."""
    if isinstance(other, str):
        return {"us": None, "reason": other}
    hidden = chain.layer.shape.hidden

    def call(index: int) -> Callable[[torch.Tensor, torch.Tensor], object]:
        logits = chain.logits[index]
        return lambda x, y: y.view(chain.rows, hidden).copy_(other(x.view(chain.rows, hidden), logits))

    def seconds() -> float:
        calls = [call(index) for index in range(len(chain.logits))]
        error = gap(chain, calls[0], x_format="bf16")
        if not error <= moe_peers.GATE:
            raise Unavailable(f"what it computes here is {error:.2g} away from the layer, relative L2")
        return chain.time(calls)

    return timed(seconds)


def bench(asked: Asked) -> dict[str, Any]:
    """Model, or None where sizes are given; seed, shape, and the rows of `bench_moe`."""
    given = {name: value for name, value in asked.fields.items() if name != "m"}
    model = moe_inputs.MODELS[asked.model]
    shape = dataclasses.replace(model, **given)
    if shape.top > shape.experts:
        raise KnobError(f"top={shape.top} is over experts={shape.experts}", f"give top={shape.experts} or less")
    found = bench_moe(shape, asked.fields.get("m") or ROWS, asked.ceilings, asked.peers, asked.seed)
    same = dataclasses.replace(shape, x_format=model.x_format) == model
    named = asked.model if same else None
    return {"model": named, "seed": asked.seed, "shape": dataclasses.asdict(shape), "rows": found}


def _titled(payload: dict[str, Any]) -> str:
    """Whose experts they are, in words."""
    return f"experts of {payload['model']}" if payload["model"] else f"experts {LayerShape(**payload['shape'])}"


def tables(payload: dict[str, Any], limits: Ceilings) -> list[Table]:
    """Times beside the floor and other libraries."""
    rows = payload["rows"]
    headers = ["M", "EXPERTS HIT", "KERNEL", "US", "FLOOR US", "OF FLOOR", "TB/S", "OF COPY", "TFLOP/S"]
    others = peer_headers(rows)
    cells = [
        (
            row["m"], f"{row['hit']:.1f}", row["kernel"], f"{row['us']:.2f}", f"{row['floor_us']:.2f}",
            f"{row['floor_us'] / row['us']:.0%}", f"{row['bytes'] / row['us'] / 1e6:.2f}",
            f"{row['bytes'] / row['us'] * 1e6 / limits.copy:.0%}", f"{row['flops'] / row['us'] / 1e6:.1f}",
            *peer_cells(row),
        )
        for row in rows
    ]  # fmt: skip
    title = f"{_titled(payload)}, from router logits to the combined output, seed {payload['seed']}"
    return [Table((*headers, *others), cells, (*headers[:2], *headers[3:], *others), title, peer_notes(rows))]


def draw(payload: dict[str, Any], limits: Ceilings, path: Path) -> None:
    """Write a PNG: above bandwidth over the experts hit, below the rate of both products."""
    rows = [{**row, "name": _titled(payload), "n": 0, "k": 0} for row in payload["rows"]]
    roofline.draw(rows, limits, path, "moe", "TB/s of the experts hit, X and Y")


def shape_of(problem: MoeProblem) -> LayerShape:
    """The layer that a problem is of."""
    return LayerShape(**{item.name: getattr(problem, item.name) for item in dataclasses.fields(LayerShape)})


def knobs_of(problem: MoeProblem, candidate: Candidate) -> dict[str, Any]:
    """Knobs of the whole layer with a candidate: of the second product, the first is that of the same tile."""
    own = {"kernel": candidate.kernel, **candidate.knobs}
    if problem.product == "layer":
        return own
    if problem.product != "down":
        raise DriverError(f"product={problem.product} is not timed by itself; a layer's, or its second product, is")
    tile = KERNELS[candidate.kernel].tile
    sizes = candidate.knobs["tile_m"], candidate.knobs["tile_n"], None, None
    first = {"tile_m": sizes[0]} if tile is None else tile(*sizes)
    return {"kernel": candidate.kernel, **first, "down": own}


class Bench(tuning.Timer):
    """Times candidates in CUDA graphs of dependent calls, each with a routing of its own that finds experts cold.

    A candidate is timed as part of the layer: lists by expert, both products and the sum, or the one launch that makes
    all of it. Weights of the shape at hand are kept.
    """

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self._of: tuple[LayerShape, str] | None = None
        self._layer: RandomLayer | None = None
        self._weights: list[Weights] = []
        self._last: Chain | None = None

    def _seconds(self, problem: MoeProblem, candidate: Candidate, repeats: int) -> float:
        chain = self._chain(problem)
        plan = moe_plan.launches(
            dataclasses.replace(problem, product="layer"), self._device, knobs_of(problem, candidate)
        )
        if repeats <= tune.QUICK:
            self._check(chain, plan, candidate)
        return chain.seconds(plan, repeats, routed=True)

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
