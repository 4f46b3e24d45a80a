"""The argument struct of the kernels of `moe` that make a layer in one launch, and cases made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.layout import NORMAL_SCALES
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.layout import pack_experts, reference
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, deviation, judged, pair_deviation, pair_l2, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ARGUMENTS = Arguments(
    "MoeArguments",
    reads("x", "[rows, hidden]"),
    reads("w13", "packed words by expert: [2 intermediate, hidden], interleaved gate and up rows"),
    reads("w13_scales", "packed"),
    reads("w2", "packed words by expert: [hidden, intermediate]"),
    reads("w2_scales", "packed"),
    reads("b13", "[experts, 2 intermediate]"),
    reads("b2", "[experts, hidden]"),
    reads("ids", "[rows, top]: any that is not in 0 … experts - 1 is skipped; or one row's logits", "int"),
    reads("weights", "[rows, top]; none beside logits", "float"),
    reads("map", "[map_size], from ids to local experts, or null", "int"),
    reads("count", "rows that count, or null: all", "int"),
    reads("residual", "[rows, hidden], added to y; with low parts [2, rows, hidden]; or null"),
    writes("y", "[rows, hidden]; with low parts [2, rows, hidden]"),
    writes("workspace", "counters, zero before the first launch; then activations"),
    number("alpha", "float", "of swiglu_oai"),
    number("limit", "float", "of swiglu_oai"),
    number("rows", "int"),
    number("top", "int", "experts a row"),
    number("experts", "int", "local ones"),
    number("map_size", "int"),
    number("hidden", "int"),
    number("intermediate", "int"),
)
GATE = 0.006  # relative L2 against float64: h and y are rounded to bf16
CONSTANT = ("b13", "b2", "map")  # of what not every call has
AGAIN = 1000  # added to a seed, for the same launch on other inputs
PAIR_GATE = 3e-4  # of a pair, whose residual is far larger than what is added to it


@dataclass(frozen=True)
class Routing:
    """Where the rows of a case go.

    Attributes:
        ids: [rows, top], before the map.
        map: from those ids to the local experts, or None.
        count: rows that count, or None.
        logits: [rows, ids there are], which a launch gets instead of ids and weights.
        weights: [rows, top], of the ids; random ones where there are none.
    """

    ids: npt.NDArray[np.int32]
    map: npt.NDArray[np.int32] | None = None
    count: int | None = None
    logits: npt.NDArray[Any] | None = None
    weights: npt.NDArray[Any] | None = None

    @property
    def local(self) -> npt.NDArray[np.int32]:
        """The local experts, -1 where there is none."""
        ids = self.ids
        if self.map is not None:
            known = (ids >= 0) & (ids < len(self.map))
            ids = np.where(known, self.map[np.where(known, ids, 0)], -1)
        rows = np.arange(len(ids))[:, None]
        return np.where(rows < (len(ids) if self.count is None else self.count), ids, -1).astype(np.int32)


def make_case(
    variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int, *, lone: bool = False
) -> Case:  # fmt: skip
    """A launch of `variant` on random inputs, with the layer in float64.

    Where all scale bytes are allowed, the last expert has a NaN in a row of W2, and 2^-127 among its scales.

    Args:
        lone: of the last expert but one a gate alone is NaN, of the last one an up, if biases are.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    rows, top = routing.ids.shape
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    alpha, limit = edges.parameters(seed)
    x = edges.loud(generator.standard_normal((rows, hidden)).astype(ml_dtypes.bfloat16), seed)
    x[:, seed % 8 :: 11] = 0  # which is no mark of what is not there
    if rows > 3:
        x[(seed + 2) % rows, hidden // 2] = np.nan
    weights = edges.router_weights(rows, top, seed, generator)
    if routing.weights is not None:
        weights = routing.weights.astype(np.float32)
    w13, packed13 = random_weight(knobs, experts, 2 * inner, hidden, generator, hot=True)
    w2, packed2 = random_weight(knobs, experts, hidden, inner, generator, nan=knobs.scale_range == "full", ends=True)
    b13 = generator.standard_normal((experts, 2 * inner)).astype(ml_dtypes.bfloat16)
    b2 = generator.standard_normal((experts, hidden)).astype(ml_dtypes.bfloat16)
    if lone:
        b13[[-2, -1], [2 * inner - 2, 2 * inner - 1]] = np.nan
    ends = edges.end_rows(hidden, knobs)  # beside nothing, what W2 multiplies there is not rounded away
    b2[:, ends] = 0
    biases = (b13.astype(np.float64), b2.astype(np.float64)) if knobs.bias else (None, None)
    wide, factors, made = x.astype(np.float64), weights.astype(np.float64), (knobs.activation, alpha, limit)
    with np.errstate(invalid="ignore"):
        product = reference(
            wide, routing.local, factors, w13, w2, *biases, activation=knobs.activation, alpha=alpha, limit=limit
        )
        bound, sides = edges.layer_bound(wide, routing.local, factors, w13, w2, biases, made)
        # A row that meets an expert twice, with weights of either sign, is small beside what is rounded.
        parts = [
            reference(
                wide, routing.local, factors * (np.arange(top) == slot), w13, w2, *biases, activation=knobs.activation,
                alpha=alpha, limit=limit,
            )
            for slot in range(top)
            if any(len(set(ids)) < top for ids in routing.local.tolist())
        ]  # fmt: skip
    residual = residual_of(knobs, rows, hidden, generator, over=product)
    residual[..., ends] = 0
    wanted = stream_of(residual) + product
    bound = bound + summed(np.abs(stream_of(residual)), top)
    sides |= edges.routing_sides(routing, experts) | end_sides(knobs, packed2[2], product)
    if routing.logits is None:
        sides |= edges.weight_sides(weights, edges.all_rows(routing, experts))
    if variant.spec.name != "token":  # which takes one row
        sides["row with a NaN"] = bool(np.isnan(wanted).all(axis=1).any())

    usual = np.setdiff1d(np.arange(hidden), ends)
    pair = knobs.residual == "pair"
    gate = (PAIR_GATE if pair else GATE) * edges.cancelled(parts, product)

    def check(outputs: Any) -> float:
        error = (pair_l2 if pair else relative_l2)(outputs[0][..., usual], wanted[:, usual])
        off = pair_deviation(outputs[0], wanted, bound) if pair else deviation(outputs[0], wanted, bound, 0.5)
        return judged(error, off, gate)

    optional: dict[str, npt.NDArray[Any] | None] = {
        "b13": b13 if knobs.bias else None,
        "b2": b2 if knobs.bias else None,
        "weights": weights if routing.logits is None else None,
        "map": routing.map,
        "count": None if routing.count is None else np.array([routing.count], np.int32),
        "residual": residual if knobs.residual else None,
    }
    packed = {"w13": packed13[0], "w13_scales": packed13[1], "w2": packed2[0], "w2_scales": packed2[1]}
    return Case(
        name=f"rows={rows} top={top} experts={experts} hidden={hidden} intermediate={inner} grid={launch.blocks}",
        launch=launch,
        values={
            "x": Buffer(x), "ids": Buffer(_given(routing, experts) if routing.logits is None else routing.logits),
            **{name: Buffer(array, constant=True) for name, array in packed.items()},
            **{name: Buffer(array, constant=name in CONSTANT) for name, array in optional.items() if array is not None},
            "y": Buffer(np.empty_like(residual), output=True),
            "workspace": Buffer(np.zeros(launch.workspace, np.uint8), scratch=True),
            "alpha": alpha, "limit": limit, "rows": rows, "top": top, "experts": experts,
            "map_size": 0 if routing.map is None else len(routing.map), "hidden": hidden, "intermediate": inner,
        },
        check=check,
        gate=gate,
        sides=sides,
        fixed=("rows", "top", "experts", "hidden", "intermediate"),
        again=lambda: make_case(variant, launch, problem, routing, seed + AGAIN, lone=lone),
    )  # fmt: skip


def _given(routing: Routing, experts: int) -> npt.NDArray[np.int32]:
    return edges.strangers(routing.ids, experts if routing.map is None else len(routing.map))


def residual_of(
    knobs: Any, rows: int, hidden: int, generator: np.random.Generator, over: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[Any]:
    """What is added to y: random values, a pair [2, rows, hidden] of larger ones, or zeros where nothing is added.

    Args:
        over: what a pair is larger than.
    """
    if not knobs.residual:
        return np.zeros((rows, hidden), ml_dtypes.bfloat16)
    values = generator.standard_normal((rows, hidden))
    kept = values.astype(ml_dtypes.bfloat16)
    if knobs.residual != "pair":
        return kept
    some = np.ones(1) if over is None or np.isnan(over).all() else over[~np.isnan(over)]
    values = values * 64 * max(1.0, float(np.sqrt(np.mean(some**2))))
    kept = values.astype(ml_dtypes.bfloat16)
    return np.stack([kept, (values - kept.astype(np.float64)).astype(ml_dtypes.bfloat16)])


def stream_of(residual: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What a residual comes to in float64, a pair or not."""
    wide = residual.astype(np.float64)
    return wide if wide.ndim == 2 else wide.sum(0)


def random_weight(
    knobs: Any,
    experts: int,
    n: int,
    k: int,
    generator: np.random.Generator,
    nan: bool = False,
    hot: bool = False,
    ends: bool = False,
    faint: int = 0,
) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint8]]]:
    """Values of a random weight of each expert, and its packed words and scales, and scales as they are.

    Args:
        nan: the last row of the last expert has a NaN.
        hot: rows of every fourth pair are 16 times as large.
        ends: there are rows with nothing but a block whose scale is at an end.
        faint: of the second block of each row, powers of two by which its scale is larger: what it meets is as small.
    """
    codes = generator.integers(0, 16, (experts, n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 2 - round(np.log2(k) / 2)
    scales = generator.integers(centre - 2, centre + 2, (experts, n, k // 32)).astype(np.uint8)
    if hot:
        scales[:, np.arange(n) // 2 % edges.HOT == 1] += 4
    if faint:
        scales[..., 1] += np.uint8(faint)
    if knobs.scale_range == "full":
        scales[:, 0, 0] = NORMAL_SCALES[0] - 2
    if nan:
        scales[-1, -1, -1] = formats.SCALE_NAN
    if ends:
        for byte, row in zip(edges.scale_ends(knobs.scale_range, nan=False), edges.end_rows(n, knobs), strict=True):
            block = int(generator.integers(0, k // 32))
            block = 0 if block == 1 and faint else block
            codes[:, row, : 32 * block] = codes[:, row, 32 * block + 32 :] = 0
            scales[:, row, block] = byte
    values = formats.dequantize(codes, scales, formats.get("mxfp4"))
    return values, (*pack_experts(codes, scales, knobs.encoding), scales)


def end_sides(knobs: Any, scales: npt.NDArray[np.uint8], y: npt.NDArray[np.float64]) -> dict[str, bool]:
    """Whether products of blocks whose scale is at an end are what columns of y [..., n] are made of."""
    columns = zip(edges.scale_ends(knobs.scale_range, nan=False), edges.end_rows(y.shape[-1], knobs), strict=True)
    found = {
        f"scale byte {byte}": bool((scales[:, row] == byte).any() and (y[..., row] != 0).any()) for byte, row in columns
    }
    if knobs.scale_range == "full":
        found["scale byte 255"] = bool((scales == formats.SCALE_NAN).any() and np.isnan(y[..., -1]).any())
    return found
