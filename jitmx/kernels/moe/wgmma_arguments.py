"""The argument struct of `moe.gather` and `moe.wgmma`, and cases made of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.moe import edges
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides, random_weight
from jitmx.kernels.moe.grouped_arguments import lists
from jitmx.kernels.moe.layout import ALPHA, LIMIT, Floats, activate
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.registry.arguments import Arguments, Field, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case, deviation, judged, mismatches, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant, knob


def arguments(name: str, x: str, y: str, bases: tuple[Field, ...] = (), scales: tuple[Field, ...] = ()) -> Arguments:
    """The argument struct of a gather and of the two products that read what it lays out.

    Args:
        x, y: what they are, of each of the three.
        bases: fields of the rows of W.
        scales: fields of the rows of x.
    """
    return Arguments(
        name,
        reads("x", x),
        reads("weight", "packed words by expert: [n, k]"),
        reads("scales", "packed"),
        *bases,
        reads("bias", "[experts, n]"),
        reads("pairs", "[pairs]: row * top + slot, by expert", "int"),
        reads("offsets", "[experts + 1]: where each expert's pairs start", "int"),
        reads("schedule", "[tiles, 4]: expert or -1, first of pairs, rows, number among its expert's tiles", "int"),
        reads("weights", "[pairs], by row and slot", "float"),
        *scales,
        writes("y", y),
        writes("counters", "[2]: items that blocks have taken, of either product; gather clears them", "unsigned int"),
        number("alpha", "float", "of swiglu_oai"),
        number("limit", "float", "of swiglu_oai"),
        number("top", "int", "experts a row"),
        number("n", "int"),
        number("k", "int"),
        number("tiles", "int", "of the schedule, at most"),
    )


ARGUMENTS = arguments(
    "ExpertArguments",
    "of gather [rows, k]; of the products ExpertRows",
    "of gather and of the first product ExpertRows; of the second [pairs, n], by row and slot",
)
MAPPED = ARGUMENTS.with_maps(codes_map="weight", scales_map="scales")  # for the products, which copy W by tensor maps
TILES_M = (32, 48, 64, 128, 192, 320)  # rows of a tile of the schedule, at most
TILES_N = (128, 192, 256, 320)  # rows of W a block, 64 for each warpgroup that multiplies
WIDEST = 192  # of TILES_M, what heuristics take where x is in bf16: tiles of fewer rows have loops of their own
TILE_M: Any = knob(WIDEST, choices=TILES_M, doc="rows of a tile of the schedule, at most")
TILE_N: Any = knob(192, choices=TILES_N, doc="rows of W a block, 64 for each warpgroup that multiplies")
TILE_COUNTERS: Any = knob(False, doc="clears a counter of each tile too, for both products in one launch")
# Of those in bf16.
GRAIN: Any = knob(32, choices=(8, 16, 32, 64), doc="rows by which the widths of tiles differ")
STAGES: Any = knob(6, low=2, high=16, doc="stages of W and activations that a block keeps in shared memory")
DEPTH: Any = knob(1, low=1, high=4, doc="steps of 64 k of a stage")
# Of moe.wgmma, by rows of a tile: rows by which widths differ, stages, and steps of 64 k of a stage.
STAGED = {32: (8, 3, 4), 48: (8, 3, 4), 64: (8, 3, 4), 128: (8, 3, 3), 192: (16, 3, 2), 320: (32, 4, 1)}
LINE_BYTES = 128  # 64 k of a row
COUNTERS = 2  # of 4 bytes

Offsets = npt.NDArray[np.int32]


def rows_bytes(pairs: int, k: int) -> int:
    """Bytes of the activations of so many pairs as the products read them."""
    return pairs * -(-k // TILE_K) * LINE_BYTES


def arrange(rows: Array, offsets: Offsets) -> Array:
    """Activations [pairs, k] in bf16 as the products read them: lines of 64 k, [pairs of all experts * steps, 64].

    An expert's rows lie together, step by step; pairs of k in a block of 32 are in the order of packed weights, and
    vectors of a line are swizzled from the expert's first row on.
    """
    steps = -(-rows.shape[1] // TILE_K)
    padded = np.zeros((len(rows), steps * TILE_K), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    # [pairs, steps, blocks of 32, vectors, pairs of k, 2]: vectors and the pairs in them change places.
    words = padded.reshape(len(rows), steps, 2, 4, 4, 2).swapaxes(3, 4).reshape(len(rows), steps, 8, 8)
    found = []
    for first, end in itertools.pairwise(offsets):
        mine = np.empty_like(words[first:end])
        for row in range(end - first):
            mine[row][:, np.arange(8) ^ row % 8] = words[first + row]
        found.append(mine.swapaxes(0, 1).reshape(-1, TILE_K))
    return np.concatenate(found)


def restore(lines: Array, offsets: Offsets, k: int) -> Array:
    """What `arrange` was given, [pairs, k]."""
    shape = int(offsets[-1]), -(-k // TILE_K) * TILE_K
    places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    rows = np.empty(places.shape, lines.dtype)
    rows.ravel()[arrange(places, offsets).ravel()] = lines.ravel()
    return rows[:, :k]


def offsets_of(local: npt.NDArray[np.int32], experts: int) -> Offsets:
    """Where each expert's pairs start, [experts + 1]."""
    valid = local[(local >= 0) & (local < experts)]
    return np.concatenate([[0], np.cumsum(np.bincount(valid, minlength=experts))]).astype(np.int32)


@dataclass(frozen=True)
class Lists:
    """Pairs by expert and the schedule of their tiles, as routing leaves them.

    Attributes:
        pairs, schedule, offsets: as the fields of the arguments.
        there: pairs that have an expert; those of none come last.
        routing: what they are made of.
    """

    pairs: npt.NDArray[np.int32]
    schedule: npt.NDArray[np.int32]
    offsets: Offsets
    routing: Routing

    @classmethod
    def of(cls, variant: Variant, problem: MoeProblem, routing: Routing) -> Lists:
        """Those of a case."""
        pairs, schedule = lists(routing.local, problem.experts, variant.knobs.tile_m)
        return cls(pairs, schedule, offsets_of(routing.local, problem.experts), routing)

    @property
    def there(self) -> npt.NDArray[np.int32]:
        return self.pairs[: self.offsets[-1]]

    @property
    def sides(self) -> dict[str, bool]:
        """Whether an expert has no row."""
        return {"expert of no row": bool((np.diff(self.offsets) == 0).any())}

    def name(self, experts: int, sizes: str, launch: Launch) -> str:
        """Of a case."""
        rows, top = self.routing.ids.shape
        return f"rows={rows} top={top} experts={experts} {sizes} grid={launch.blocks}"

    def gathering(
        self, launch: Launch, problem: MoeProblem, x: Array, outputs: dict[str, Any], wrong: Callable[[Any], float],
        sides: dict[str, bool] | None = None, counters: int = COUNTERS,
    ) -> Case:  # fmt: skip
        """The case of a gather, bit for bit, with counters that must be zero.

        Args:
            outputs: fields that it writes.
            wrong: the share of wrong values in these.
            sides: of x.
            counters: how many.
        """

        def check(outputs: Any) -> float:
            *found, counters = outputs
            return wrong(found) + mismatches(counters, np.zeros_like(counters))

        return Case(
            name=self.name(problem.experts, f"k={problem.hidden}", launch),
            launch=launch,
            values={
                "x": Buffer(x), "pairs": Buffer(self.pairs), "offsets": Buffer(self.offsets),
                "schedule": Buffer(self.schedule), **outputs,
                "counters": Buffer(np.empty(counters, np.uint32), output=True),
                "alpha": ALPHA, "limit": LIMIT, "top": self.routing.ids.shape[1], "k": problem.hidden,
                "tiles": len(self.schedule),
            },
            check=check,
            gate=0.0,
            sides=self.sides | {"row of no expert": bool((self.routing.local < 0).all(axis=1).any())} | (sides or {}),
        )  # fmt: skip

    def multiplied(self, x: Floats, weight: Floats, bias: Array | None) -> tuple[Floats, Floats]:
        """Rows of x [pairs, k] times the weight [experts, n, k] of their expert, and the sums of all magnitudes."""
        out, size = np.zeros((len(x), weight.shape[1])), np.zeros((len(x), weight.shape[1]))
        for expert, (first, end) in enumerate(itertools.pairwise(self.offsets)):
            mine = x[first:end]
            out[first:end], size[first:end] = mine @ weight[expert].T, np.abs(mine) @ np.abs(weight[expert]).T
            if bias is not None:
                out[first:end] += bias[expert].astype(np.float64)
                size[first:end] += np.abs(bias[expert].astype(np.float64))
        return out, size

    def weighted(self, out: Floats, weights: Array) -> Floats:
        """Rows by expert times the weights of their pairs, by row and slot."""
        placed = np.empty_like(out)
        placed[self.there] = out * weights.ravel()[self.there, None].astype(np.float64)
        return placed

    def multiplying(
        self, launch: Launch, problem: MoeProblem, inputs: dict[str, Any], y: Array, given: dict[str, Any],
        error: Callable[[Array], float], gate: float, sides: dict[str, bool], generator: np.random.Generator,
    ) -> Case:  # fmt: skip
        """The case of a product.

        Args:
            inputs: fields of x and W, and the bias.
            given: router weights, alpha and limit.
            error: of y, against the gate.
            sides: those of its values.
        """
        # Of kernels before the first product, which lets the second begin behind its own wait. Neither product may
        # touch the counter of the other.
        up = problem.product == "up"
        own, others = (0, 1) if up else (1, 0)
        counters = np.zeros(COUNTERS, np.uint32)
        counters[others] = generator.integers(1, 1 << 20)
        listed = {"pairs": self.pairs, "offsets": self.offsets, "schedule": self.schedule, "weights": given["weights"]}
        n, k = problem.sizes(problem.product)

        def check(outputs: Any) -> float:
            found, left = outputs
            return float("inf") if left[others] != counters[others] or not left[own] else error(found)

        return Case(
            name=self.name(problem.experts, f"n={n} k={k}", launch),
            launch=launch,
            values={
                **inputs,
                **{name: Buffer(array, early=not up, ahead=up) for name, array in listed.items()},
                "y": Buffer(y, output=True),
                "counters": Buffer(counters, output=True, scratch=True, early=not up, ahead=up),
                "alpha": given["alpha"], "limit": given["limit"], "top": self.routing.ids.shape[1], "n": n, "k": k,
                "tiles": len(self.schedule),
            },
            check=check,
            gate=gate,
            sides=self.sides | sides,
        )  # fmt: skip


def gather_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """The rows of a random x by expert, bit for bit, and counters that are zero."""
    rows, top = routing.ids.shape
    by_expert = Lists.of(variant, problem, routing)
    x = np.random.default_rng(seed).standard_normal((rows, problem.hidden)).astype(ml_dtypes.bfloat16)
    wanted = arrange(x[by_expert.there // top], by_expert.offsets).view(np.uint16)
    y = {"y": Buffer(np.empty(wanted.shape, np.uint16), output=True)}
    counters = COUNTERS + len(by_expert.schedule) * variant.knobs.tile_counters
    return by_expert.gathering(launch, problem, x, y, lambda found: mismatches(found[0], wanted), counters=counters)


def product_case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """One product of `variant` on random inputs, with its rows in float64; pairs of no expert come last.

    Of several rows one has a NaN, which must come to all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    up = knobs.product == "up"
    rows, top = routing.ids.shape
    n, k = problem.sizes(knobs.product)
    by_expert = Lists.of(variant, problem, routing)
    offsets, count = by_expert.offsets, len(by_expert.there)
    alpha, limit = edges.parameters(seed)
    x = generator.standard_normal((count, k)).astype(ml_dtypes.bfloat16)
    if up:
        x = edges.loud(x, seed)
    if count > 1:
        x[count // 2, 0] = np.nan
    weights = edges.router_weights(rows, top, seed, generator)
    values, packed = random_weight(knobs, problem.experts, n, k, generator, hot=up, ends=not up)
    bias = generator.standard_normal((problem.experts, n)).astype(ml_dtypes.bfloat16)
    if not up:
        bias[:, edges.end_rows(n, knobs)] = 0
    out, size = by_expert.multiplied(x.astype(np.float64), values, bias if knobs.bias else None)
    bound = summed(size, k)
    sides = {"row with a NaN": bool(np.isnan(out).all(axis=1).any())}
    if up:
        sides |= edges.activation_sides(out, knobs.activation, alpha, limit)
        bound = edges.activation_bound(out, bound, knobs.activation, alpha, limit)
        wanted = activate(out, knobs.activation, alpha, limit)
        y = np.empty((rows_bytes(count, n // 2) // LINE_BYTES, TILE_K), ml_dtypes.bfloat16)
    else:
        sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, packed[2], out)
        wanted, bound = by_expert.weighted(out, weights), by_expert.weighted(bound, np.abs(weights))
        y = np.empty(wanted.shape, ml_dtypes.bfloat16)
    usual = np.setdiff1d(np.arange(wanted.shape[1]), () if up else edges.end_rows(n, knobs))

    def error(found: Array) -> float:
        found = restore(found, offsets, n // 2) if up else found
        return judged(relative_l2(found[:, usual], wanted[:, usual]), deviation(found, wanted, bound, 0.5), GATE)

    inputs = {
        "x": Buffer(arrange(x, offsets)),
        "weight": Buffer(packed[0], constant=True), "scales": Buffer(packed[1], constant=True),
        **({"bias": Buffer(bias, constant=True)} if knobs.bias else {}),
    }  # fmt: skip
    given = {"weights": weights, "alpha": alpha, "limit": limit}
    return by_expert.multiplying(launch, problem, inputs, y, given, error, GATE, sides, generator)
