"""The argument struct of the kernels of `moe` that make a layer in one launch, and cases made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx import formats
from jitmx.kernels.linear.layout import NORMAL_SCALES
from jitmx.kernels.moe.layout import ALPHA, LIMIT, pack_experts, reference
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, pair_l2, relative_l2
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


def make_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """A launch of `variant` on random inputs, with the layer in float64.

    Where all scale bytes are allowed, the last expert has a NaN in a row of W2, and 2^-127 among its scales.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    rows, top = routing.ids.shape
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    x = generator.standard_normal((rows, hidden)).astype(ml_dtypes.bfloat16)
    weights = generator.uniform(0.1, 1.0, (rows, top)).astype(np.float32)
    if routing.weights is not None:
        weights = routing.weights.astype(np.float32)
    w13, packed13 = random_weight(knobs, experts, 2 * inner, hidden, generator)
    w2, packed2 = random_weight(knobs, experts, hidden, inner, generator, nan=knobs.scale_range == "full")
    b13 = generator.standard_normal((experts, 2 * inner)).astype(ml_dtypes.bfloat16)
    b2 = generator.standard_normal((experts, hidden)).astype(ml_dtypes.bfloat16)
    biases = (b13.astype(np.float64), b2.astype(np.float64)) if knobs.bias else (None, None)
    residual = residual_of(knobs, rows, hidden, generator)
    wanted = stream_of(residual) + reference(
        x.astype(np.float64), routing.local, weights.astype(np.float64), w13, w2, *biases, activation=knobs.activation
    )

    pair = knobs.residual == "pair"

    def check(outputs: Any) -> float:
        return (pair_l2 if pair else relative_l2)(outputs[0], wanted)

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
            "x": Buffer(x), "ids": Buffer(routing.ids if routing.logits is None else routing.logits),
            **{name: Buffer(array) for name, array in packed.items()},
            **{name: Buffer(array) for name, array in optional.items() if array is not None},
            "y": Buffer(np.empty_like(residual), output=True),
            "workspace": Buffer(np.zeros(launch.workspace, np.uint8), scratch=True),
            "alpha": ALPHA, "limit": LIMIT, "rows": rows, "top": top, "experts": experts,
            "map_size": 0 if routing.map is None else len(routing.map), "hidden": hidden, "intermediate": inner,
        },
        check=check,
        gate=PAIR_GATE if pair else GATE,
    )  # fmt: skip


def residual_of(knobs: Any, rows: int, hidden: int, generator: np.random.Generator) -> npt.NDArray[Any]:
    """What is added to y: random values, a pair [2, rows, hidden] of larger ones, or zeros where nothing is added."""
    if not knobs.residual:
        return np.zeros((rows, hidden), ml_dtypes.bfloat16)
    values = generator.standard_normal((rows, hidden))
    kept = values.astype(ml_dtypes.bfloat16)
    if knobs.residual != "pair":
        return kept
    kept = (64 * values).astype(ml_dtypes.bfloat16)
    return np.stack([kept, (64 * values - kept.astype(np.float64)).astype(ml_dtypes.bfloat16)])


def stream_of(residual: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What a residual comes to in float64, a pair or not."""
    wide = residual.astype(np.float64)
    return wide if wide.ndim == 2 else wide.sum(0)


def random_weight(
    knobs: Any, experts: int, n: int, k: int, generator: np.random.Generator, nan: bool = False
) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
    """Values of a random weight of each expert, and its packed words and scales."""
    codes = generator.integers(0, 16, (experts, n, k)).astype(np.uint8)
    centre = formats.SCALE_ONE - 2 - round(np.log2(k) / 2)
    scales = generator.integers(centre - 2, centre + 2, (experts, n, k // 32)).astype(np.uint8)
    if knobs.scale_range == "full":
        scales[:, 0, 0] = NORMAL_SCALES[0] - 2
    if nan:
        scales[-1, -1, -1] = formats.SCALE_NAN
    values = formats.dequantize(codes, scales, formats.get("mxfp4"))
    return values, pack_experts(codes, scales, knobs.encoding)
