"""`moe.fused`: many rows an expert on sm_90a; both products of `moe.wgmma` in one launch.

Items of the second product wait for h of their tile alone, of which items of the first are counted: two rounds of items
that end with idle multiprocessors become one, and one launch has its start and its end. Results are for `moe.combine`
to add up; unlike with two launches, they do not lie in the memory of the gathered rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, NORMAL_SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K
from jitmx.kernels.linear.warpgroups import require_normal_scales, runs_on
from jitmx.kernels.moe import edges, far, tiles, wgmma
from jitmx.kernels.moe.arguments import GATE, Routing, end_sides, random_weight
from jitmx.kernels.moe.knobs import ACTIVATION, BIASES
from jitmx.kernels.moe.layout import Floats, activate
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MoeProblem
from jitmx.kernels.moe.wgmma_arguments import (
    COUNTERS,
    DEPTH,
    GRAIN,
    LINE_BYTES,
    STAGED,
    STAGES,
    TILE_M,
    TILE_N,
    Lists,
    arrange,
    rows_bytes,
)
from jitmx.kernels.routing.problem import capacity
from jitmx.registry.arguments import Arguments, Field, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case, deviation, judged, places, relative_l2, summed
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant
from jitmx.registry.tensor_map import TensorMap


def arguments(name: str, x: str, more: tuple[Field, ...] = ()) -> Arguments:
    """The argument struct of both products in one launch.

    Args:
        x: what rows of x and h are.
        more: further fields that it reads.
    """
    return Arguments(
        name,
        reads("x", f"{x} of hidden columns, as a gather leaves them"),
        reads("w13", "packed words by expert: [2 intermediate, hidden], interleaved gate and up rows"),
        reads("w13_scales", "packed"),
        reads("w2", "packed words by expert: [hidden, intermediate]"),
        reads("w2_scales", "packed"),
        *more,
        reads("b13", "[experts, 2 intermediate]"),
        reads("b2", "[experts, hidden]"),
        reads("pairs", "[pairs]: row * top + slot, by expert", "int"),
        reads("offsets", "[experts + 1]: where each expert's pairs start", "int"),
        reads("schedule", "[tiles, 4]: expert or -1, first of pairs, rows, number among its expert's tiles", "int"),
        reads("weights", "[pairs], by row and slot", "float"),
        writes("h", f"{x} of intermediate columns"),
        writes("y", "[pairs, hidden], by row and slot"),
        writes(
            "counters", "[2 + tiles], cleared by a gather: items that blocks have taken, one unused, by tile items "
            "whose h is stored", "unsigned int",
        ),
        number("alpha", "float", "of swiglu_oai"),
        number("limit", "float", "of swiglu_oai"),
        number("hidden", "int"),
        number("intermediate", "int"),
        number("tiles", "int", "of the schedule, at most"),
    ).with_maps(
        w13_codes_map="w13", w13_scales_map="w13_scales", w2_codes_map="w2", w2_scales_map="w2_scales"
    )  # fmt: skip


ARGUMENTS = arguments("FusedArguments", "ExpertRows")


@dataclass(frozen=True)
class FusedKnobs(Knobs):
    """Compile-time choices of `moe.fused`, those of `moe.wgmma` for both products."""

    activation: str = ACTIVATION
    bias: bool = BIASES
    encoding: str = ENCODING
    scale_range: str = NORMAL_SCALE_RANGE
    tile_m: int = TILE_M
    grain: int = GRAIN
    tile_n: int = TILE_N
    stages: int = STAGES
    depth: int = DEPTH
    pdl: bool = PDL


class Both(wgmma.Staged, Protocol):
    """Knobs of a kernel of both products."""

    @property
    def bias(self) -> bool: ...


def shared_bytes(knobs: FusedKnobs) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    return wgmma.frame_bytes(knobs, LINE_BYTES, 128 + 16, item_bytes(knobs))


def item_bytes(knobs: Both) -> int:
    """Of an item in shared memory, but for what is of x in E4M3."""
    return 40 + (2 * knobs.tile_n if knobs.bias else 0) + 8 * knobs.tile_m


def _check(knobs: FusedKnobs, arch: Arch) -> None:
    if not runs_on(arch):
        raise KnobError(f"moe.fused needs the instructions of sm_90a, which {arch} lacks", "use moe.grouped")
    wgmma.check_tile(knobs)


SPEC = KernelSpec(
    family="moe",
    name="fused",
    knobs=FusedKnobs,
    contract=lambda knobs, arch: wgmma.contract(knobs, r"HGMMA\.64xNx16\.F32\.BF16"),
    check=_check,
    shared_bytes=shared_bytes,
    threads=wgmma.threads,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: FusedKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, or one for each item that there can be at most; tensor maps of both weights."""
    return launch_of(knobs, problem, multiprocessors, shared_bytes(knobs))


def launch_of(knobs: Both, problem: MoeProblem, multiprocessors: int, shared: int) -> Launch:
    """Of blocks with so much shared memory."""
    maps: dict[str, TensorMap] = {}
    items = 0
    for name, product in (("w13", "up"), ("w2", "down")):
        maps |= {f"{name}_{field}": one for field, one in wgmma.maps(knobs, problem, product).items()}
        items += -(-problem.sizes(product)[0] // knobs.tile_n)
    items *= capacity(problem.m, problem.top, problem.experts, knobs.tile_m)
    return Launch(max(1, min(items, multiprocessors)), shared, maps=maps)


def asked(problem: MoeProblem) -> MoeProblem:
    """What this kernel is asked: of a layer both products."""
    return replace(problem, product="both") if problem.product == "layer" else problem


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    """What weights and tensors bring with them."""
    if problem.product not in ("layer", "both"):
        raise KnobError(
            f"moe.fused makes both products, and not product={problem.product}", "use product='both' or 'layer'"
        )
    require_usual("fused", problem)
    require_normal_scales("moe.fused", problem.scale_range, "moe.grouped")
    return problem.pick("activation", "bias", "encoding", "scale_range")


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Tiles and stages as of moe.wgmma."""
    m = wgmma.tile_m(problem)
    rows = wgmma.tile_n(replace(problem, product="up"), multiprocessors)
    grain, stages, depth = STAGED[m]
    stages += rows == 128
    return {"tile_m": m, "grain": grain, "tile_n": rows, "stages": stages, "depth": depth, "pdl": True}


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Wider and narrower tiles, finer and coarser widths, deeper stages; best guess first."""
    shapes = (
        (192, 192, 16, 3, 2), (192, 192, 8, 3, 2), (192, 192, 32, 3, 2), (192, 192, 16, 6, 1), (128, 192, 8, 3, 3),
        (128, 192, 16, 3, 3), (128, 192, 16, 4, 2), (32, 320, 8, 3, 4), (48, 320, 8, 3, 4), (32, 256, 8, 3, 4),
        (48, 256, 8, 3, 4), (64, 256, 8, 3, 4), (64, 192, 8, 3, 4), (64, 192, 16, 4, 3), (64, 128, 8, 4, 4),
    )  # fmt: skip
    return wgmma.shaped(_heuristic(problem, arch, multiprocessors), shapes)


def case(variant: Variant, launch: Launch, problem: MoeProblem, routing: Routing, seed: int) -> Case:
    """Both products on random inputs, with their rows in float64; pairs of no expert come last.

    Of several rows one has a NaN, which must come to all of its features and to no other row.
    """
    knobs, generator = variant.knobs, np.random.default_rng(seed)
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    by_expert = Lists.of(variant, problem, routing)
    offsets, count = by_expert.offsets, len(by_expert.there)
    alpha, limit = edges.parameters(seed)
    x = edges.loud(generator.standard_normal((count, hidden)).astype(ml_dtypes.bfloat16), seed)
    if count > 1:
        x[count // 2, 0] = np.nan
    rows, top = routing.ids.shape
    weights = edges.router_weights(rows, top, seed, generator)
    w13, packed13 = random_weight(knobs, experts, 2 * inner, hidden, generator, hot=True)
    w2, packed2 = random_weight(knobs, experts, hidden, inner, generator, ends=True)
    b13 = generator.standard_normal((experts, 2 * inner)).astype(ml_dtypes.bfloat16)
    b2 = generator.standard_normal((experts, hidden)).astype(ml_dtypes.bfloat16)
    ends = edges.end_rows(hidden, knobs)
    b2[:, ends] = 0

    parts, size = by_expert.multiplied(x.astype(np.float64), w13, b13 if knobs.bias else None)
    h = activate(parts, knobs.activation, alpha, limit)
    off = edges.activation_bound(parts, summed(size, hidden), knobs.activation, alpha, limit)
    out, size = by_expert.multiplied(h, w2, b2 if knobs.bias else None)
    # h is rounded to bf16: of these many roundings six standard deviations count.
    rounded, _ = by_expert.multiplied(places(h, ml_dtypes.bfloat16) ** 2, w2**2, None)
    bound = by_expert.multiplied(off, np.abs(w2), None)[0] + np.sqrt(3 * rounded) + summed(size, inner)
    wanted, bound = by_expert.weighted(out, weights), by_expert.weighted(bound, np.abs(weights))
    usual = np.setdiff1d(np.arange(hidden), ends)

    def error(_: Array, found: Array) -> float:
        return judged(relative_l2(found[:, usual], wanted[:, usual]), deviation(found, wanted, bound, 0.5), GATE)

    constant = {"w13": packed13[0], "w13_scales": packed13[1], "w2": packed2[0], "w2_scales": packed2[1]}
    constant |= {"b13": b13, "b2": b2} if knobs.bias else {}
    sides = edges.activation_sides(parts, knobs.activation, alpha, limit)
    sides |= edges.weight_sides(weights, routing.local >= 0) | end_sides(knobs, packed2[2], out)
    return case_of(
        by_expert, launch, problem, seed,
        inputs={"x": Buffer(arrange(x, offsets)),
                **{name: Buffer(array, constant=True) for name, array in constant.items()}},
        h=np.empty((rows_bytes(count, inner) // LINE_BYTES, TILE_K), ml_dtypes.bfloat16),
        weights=weights, tile_n=knobs.tile_n, error=error, gate=GATE, out=out, sides=sides,
    )  # fmt: skip


def case_of(
    by_expert: Lists, launch: Launch, problem: MoeProblem, seed: int, *, inputs: dict[str, Buffer], h: Array,
    weights: Array, tile_n: int, error: Callable[[Array, Array], float], gate: float, out: Floats,
    sides: dict[str, bool],
) -> Case:  # fmt: skip
    """The case of a launch of both products, which must take and count all items.

    Args:
        inputs: x and what is of W.
        h: a place for it.
        tile_n: rows of W of an item.
        error: of h and y as they were stored, against the gate.
        out: rows of y by expert, before weights.
        sides: those of the values.
    """
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    alpha, limit = edges.parameters(seed)
    used = int((by_expert.schedule[:, 0] >= 0).sum())
    across13, across2 = (-(-n // tile_n) for n in (2 * inner, hidden))
    stored = np.zeros(len(by_expert.schedule), np.uint32)  # items of each tile that is used
    stored[:used] = across13
    listed = {
        "pairs": by_expert.pairs, "offsets": by_expert.offsets, "schedule": by_expert.schedule, "weights": weights,
    }  # fmt: skip

    def check(outputs: Any) -> float:
        kept, found, counters = outputs
        taken = used * (across13 + across2) + launch.blocks  # each ends at a number behind the last item
        if counters[0] != taken or (counters[COUNTERS:] != stored).any():
            return float("inf")
        return error(kept, found)

    return Case(
        name=by_expert.name(experts, f"hidden={hidden} intermediate={inner}", launch),
        launch=launch,
        values={
            **inputs,
            **{name: Buffer(array) for name, array in listed.items()},
            "h": Buffer(h, output=True),
            "y": Buffer(np.empty(out.shape, ml_dtypes.bfloat16), output=True),
            "counters": Buffer(np.zeros(COUNTERS + len(stored), np.uint32), output=True, scratch=True),
            "alpha": alpha, "limit": limit, "hidden": hidden, "intermediate": inner, "tiles": len(by_expert.schedule),
        },
        check=check,
        gate=gate,
        sides=by_expert.sides | sides | {"row with a NaN": bool(np.isnan(out).all(axis=1).any())},
    )  # fmt: skip


def cases_of(variant: Variant, launch: Any, turn: int, case: Any, line: int = TILE_K) -> Iterator[Case]:
    """Every width, a row more than a tile, experts without rows, ids of none, no row at all; whole rings, and more.

    Args:
        turn: steps of 64 k by which loops go round.
        line: values of k in a line of activations.
    """
    knobs, generator = variant.knobs, np.random.default_rng(5)
    counts = [*(width - 3 * (index % 3) for index, width in enumerate(wgmma.widths(knobs))), 0, knobs.tile_m + 1]
    many = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = np.append(many, [-1] * (2 - len(many) % 2)).reshape(-1, 2).astype(np.int32)
    lone, turn = np.zeros((1, 1), np.int32), turn * TILE_K
    one = np.full((40, 1), -1, np.int32)
    one[0] = 39
    full = np.zeros((32, 1), np.int32)
    for seed, (routed, experts, hidden, inner, multiprocessors) in enumerate(
        (
            (lone, 1, turn, knobs.tile_n // 2 + 32, 4),  # blocks whose first item is of the second product
            (ids, len(counts), 32, knobs.tile_n // 2 + 64, 2),  # more items than are known at once
            (ids, len(counts), 3 * turn - TILE_K - 32, 96, 3),
            (lone - 1, 2, 64, 64, 2),  # of no row
            (lone, 1, 64, 64, 1),  # an item of each product, and no place of one taken twice
            (one, 40, 64, 32, 2),  # of more tiles that are not used than a warp has lanes
            (full, 1, 64, knobs.tile_n, 3),  # a block waits for both others, every warp of which stores
            (lone, 1, 64, 3 * turn - TILE_K - 32, 1),
        )
    ):
        problem = MoeProblem(len(routed), experts, routed.shape[1], hidden, inner, product="both")
        yield case(variant, launch(knobs, problem, multiprocessors), problem, Routing(routed), seed)
    yield from far.far_both(variant, launch, case, line)


_RARER: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "grain": 8, "tile_n": 256, "stages": 3, "depth": 4},
    {"tile_m": 48, "grain": 8, "tile_n": 320, "stages": 3, "depth": 4, "activation": "silu", "bias": False},
    {"tile_m": 64, "tile_n": 128, "stages": 2, "depth": 2, "activation": "silu", "bias": False},
    {"tile_m": 64, "tile_n": 128, "stages": 2, "encoding": "nibble", "pdl": False},
    {"tile_m": 320, "tile_n": 128, "stages": 4},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    few_answers=True,
    cases=lambda variant: cases_of(variant, launch, wgmma.turn(variant.knobs), case),
    candidates=_candidates,
    runs_on=runs_on,
    tile=tiles.maker(SPEC, STAGED),
    asked=asked,
    rarer=_RARER,
)
