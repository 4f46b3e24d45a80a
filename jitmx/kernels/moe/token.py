"""`moe.token`: one row of x, the whole layer in one persistent launch, from its experts or from router logits.

What bounds it, by the arithmetic of gpt-oss-120b on 132 multiprocessors: 53 MB of weights, 12.4 us at the copy rate. In
`moe.stream` all of h comes at the end of the first product, since its warps take about a row of tiles each, and all
wait until the last of it is there. Here nothing but h itself stands between the products:

- A unit is a few tiles of one row of tiles. A block's units go to its warps in turn, so that rows are done one after
  the other, and all blocks make h from its first features to its last. What a unit has summed up lies in shared memory,
  and the warp that brings the last one of a row completes it.
- Units of W2 follow those of W13 through the same rings, those of the first features of h before those of the last,
  which are still being made.
- A warp multiplies, or asks for tiles: a bulk copy holds up the warp that asks for it while others are under way, by
  half a microsecond each. One warp does nothing else, with a lane for each ring.
- Units of the largest layer are as many for each of eleven warps, and with the one that asks they are three a
  scheduler.
- A row of y is made by the block with its first expert, and all it needs of another is the end of one row.
- From logits, every warp chooses the experts for itself, exactly as `routing.topk` does, which saves a launch.
- The shape is compiled in, and what a block does is found before the previous kernel has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.formats import BLOCK
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.knobs import ENCODING, SCALE_RANGE
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.moe import far, layer
from jitmx.kernels.moe.arguments import ARGUMENTS, Routing, make_case
from jitmx.kernels.moe.choice import LOGITS, ROUTING, SCORING, check_choice, choice_of, routings_of
from jitmx.kernels.moe.knobs import ACTIVATION, BIASES, RESIDUAL
from jitmx.kernels.moe.layer import COUNTER_BYTES, MAPPED, RESIDENT_THREADS, require_room
from jitmx.kernels.moe.problem import MAX_TOP, MoeProblem
from jitmx.kernels.moe.stream import ring_bytes
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

WARPS = (3, 4, 7, 8, 11, 12, 14, 15)
MOST_BLOCKS = 512  # of 32 columns
LARGE, LARGE_GRID = 4096, 33  # tiles of a first product of which few cases are enough, and their blocks
# Warps, tiles a stage, stages and unrolling worth timing.
GEOMETRIES = (
    (11, 9, 3, 3), (11, 9, 2, 3), (11, 9, 3, 9), (11, 8, 3, 4), (11, 10, 3, 5), (11, 12, 2, 3), (11, 15, 2, 3),
    (12, 9, 2, 3), (15, 9, 2, 3), (14, 9, 2, 3), (7, 15, 3, 3), (7, 9, 3, 3),
)  # fmt: skip


@dataclass(frozen=True)
class TokenKnobs(Knobs):
    """Compile-time choices of `moe.token`."""

    hidden_blocks: int = knob(90, low=1, high=MOST_BLOCKS, doc="columns of x and y, in blocks of 32")
    inner_blocks: int = knob(90, low=1, high=MOST_BLOCKS, doc="features of h, in blocks of 32")
    top: int = knob(4, low=1, high=MAX_TOP, doc="experts a row")
    routing: str = ROUTING
    experts: int = LOGITS
    scoring: str = SCORING
    activation: str = ACTIVATION
    bias: bool = BIASES
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    warps: int = knob(11, choices=WARPS, doc="warps a block that multiply, each with a ring")
    chunk: int = knob(9, low=1, high=45, doc="tiles a unit, which is a stage of a ring")
    stages: int = knob(3, low=1, high=8, doc="stages of a ring")
    unroll: int = knob(3, low=1, high=45, doc="tiles that a warp takes at once")
    pdl: bool = PDL

    @property
    def hidden(self) -> int:
        """Columns of x and y."""
        return self.hidden_blocks * BLOCK

    @property
    def intermediate(self) -> int:
        """Features of h."""
        return self.inner_blocks * BLOCK


def _tiles(knobs: TokenKnobs) -> tuple[int, int]:
    """Tiles of a row in both products."""
    return -(-knobs.hidden // TILE_K), -(-knobs.intermediate // TILE_K)


def shared_bytes(knobs: TokenKnobs, blocks: int) -> int:
    """Dynamic shared memory of a launch, bytes, as struct Shared of the template lays it out."""
    up, down = _tiles(knobs)
    size = knobs.warps * ring_bytes(knobs.chunk, knobs.stages) + (up + knobs.warps * knobs.chunk) * TILE_K * 2
    size += (2 * knobs.warps * knobs.stages + 1) * 8 + 4
    up_rows = -(-knobs.top * (knobs.intermediate // 8) // blocks)
    pairs = -(-knobs.top * -(-knobs.hidden // TILE_ROWS) // blocks)
    y_rows = (pairs + knobs.top - 2) // knobs.top + 1
    units = up_rows * -(-up // knobs.chunk) + pairs * -(-down // knobs.chunk)
    size = -(-size // 16) * 16 + units * (TILE_ROWS * 4 + 8) + (up_rows + pairs + 2 * y_rows) * TILE_ROWS * 2
    return size + (up_rows + y_rows) * 12


def _check(knobs: TokenKnobs, arch: Arch) -> None:
    if "tma" not in arch.features:
        raise KnobError("moe.token needs bulk copies, sm_90 or newer", f"on {arch} use kernel=decode")
    if knobs.unroll > knobs.chunk:
        raise KnobError(f"unroll={knobs.unroll} is more than chunk={knobs.chunk}", "lower it")
    check_choice(knobs)


SPEC = KernelSpec(
    family="moe",
    name="token",
    knobs=TokenKnobs,
    contract=lambda knobs, arch: layer.contract(knobs.warps * 32 + 32),
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, 1 << 20),
    threads=lambda knobs: knobs.warps * 32 + 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: TokenKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, all of them resident at once: they wait for one another."""
    hidden_bytes = -(-problem.top * problem.intermediate * 2 // 128) * 128
    workspace = COUNTER_BYTES + 2 * hidden_bytes + multiprocessors * TILE_ROWS * 4  # launches take turns with h
    return Launch(multiprocessors, shared_bytes(knobs, multiprocessors), 1, workspace)


def _fixed(problem: MoeProblem) -> dict[str, Any]:
    if max(problem.hidden, problem.intermediate) > MOST_BLOCKS * BLOCK:
        raise KnobError(
            f"moe.token takes at most {MOST_BLOCKS * BLOCK} columns, not hidden={problem.hidden}, "
            f"intermediate={problem.intermediate}",
            "use stream or decode",
        )
    blocks = {"hidden_blocks": problem.hidden // BLOCK, "inner_blocks": problem.intermediate // BLOCK}
    return layer.fixed("token", lambda problem: 1, problem) | choice_of(problem) | blocks | {"top": problem.top}


def _fits(knobs: dict[str, Any], problem: MoeProblem, arch: Arch, multiprocessors: int) -> bool:
    whole = TokenKnobs(**(knobs | _fixed(problem)))
    return shared_bytes(whole, min(multiprocessors, arch.multiprocessors)) <= arch.shared_bytes


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """The longest rings that fit."""
    knobs: dict[str, Any] = {"pdl": "pdl" in arch.features}
    for warps, chunk, stages in ((11, 9, 3), (11, 9, 2), (11, 6, 2), (7, 9, 2), (7, 5, 2), (3, 5, 2), (3, 1, 2)):
        knobs |= {"warps": warps, "chunk": chunk, "stages": stages, "unroll": min(chunk, 3)}
        if _fits(knobs, problem, arch, multiprocessors):
            return knobs
    return knobs


def _cases(variant: Variant) -> Iterator[Case]:
    """All slots with an expert, one twice; ids that are no expert's; a map, counts, one below zero; no expert at all.

    Rows of y are shared by two blocks or, where a launch can be so wide, by more; rows of tiles by warps; of a small
    layer some have nothing to do.
    """
    knobs = variant.knobs
    slots = np.arange(knobs.top, dtype=np.int32)[None]
    gaps = np.where(slots % 2 == 0, 1 - slots // 2 % 2, np.where(slots % 4 == 1, -1, 7)).astype(np.int32)
    routings = [Routing(slots % 2, count=1), Routing(gaps)]
    routings += [Routing(np.where(slots % 4 == 3, 7, slots % 3).astype(np.int32), MAPPED)] * 2
    routings.append(Routing(np.where(slots % 2 == 0, -1, 7).astype(np.int32)))
    routings += [Routing(slots % 2, count=count) for count in (0, layer.below(knobs.top))]
    if knobs.routing != "ids":
        routings = list(routings_of(knobs))
    resident = max(RESIDENT_THREADS // SPEC.threads(knobs), 1)
    grids: tuple[int, ...] = (3, 5, 1, 8, 2, 2, 2)
    if knobs.intermediate // 8 * _tiles(knobs)[0] * knobs.top > LARGE:
        resident = LARGE_GRID  # few blocks have no room for so many rows
        routings = [routings[0], *routings[3:]] if knobs.routing == "ids" else [*routings[:2], routings[-1]]
        grids = (resident,) * len(routings)
    elif resident > (pairs := packed_tiles(knobs.hidden, 1)[0] * knobs.top) // 2:
        # Some blocks have one pair of a row and a slot: the block that begins a row takes ends of several. Where it is
        # late, and only the last slot has an expert, of whose h it makes nothing, it finds all of them there.
        last = Routing(np.where(slots < knobs.top - 1, -1, 1).astype(np.int32))
        wide = [last, Routing(slots % 2)] if knobs.routing == "ids" else routings[:1]
        routings = [*routings[: len(grids)], *wide]
        grids = (*grids[: len(routings) - len(wide)], *(min(resident, 3 * pairs // 4) for _ in wide))
    problem = MoeProblem(1, 2, knobs.top, knobs.hidden, knobs.intermediate)
    for seed, (routing, blocks) in enumerate(zip(routings, grids, strict=False)):
        geometry = launch(knobs, problem, min(blocks, resident))
        if geometry.shared_bytes <= variant.arch.shared_bytes:
            case = make_case(variant, geometry, problem, routing, seed)
            if seed == 0:  # the same blocks with the last of very many experts
                case = far.far_experts(case)
            yield dataclasses.replace(case, resident=geometry.blocks)


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing: warps, lengths and numbers of stages."""
    base = _heuristic(problem, arch, multiprocessors)
    found = [base]
    names = "warps", "chunk", "stages", "unroll"
    found += [base | dict(zip(names, geometry, strict=True)) for geometry in GEOMETRIES]
    return [knobs for knobs in found if _fits(knobs, problem, arch, multiprocessors)]


_RARER: tuple[dict[str, Any], ...] = (
    {"hidden_blocks": 5, "inner_blocks": 3, "residual": "pair", "activation": "silu", "bias": False, "warps": 4,
     "chunk": 3},
    {"hidden_blocks": 5, "inner_blocks": 3, "top": 2, "routing": "fp32", "scoring": "softmax_all", "residual": True,
     "encoding": "nibble", "scale_range": "full", "warps": 4, "chunk": 3},
)  # fmt: skip


KERNEL = Kernel(
    spec=SPEC,
    fixed=_fixed,
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    # Activations fit shared memory beside the rings.
    check=lambda problem, variant: require_room(
        problem, variant, lambda knobs: shared_bytes(knobs, variant.arch.multiprocessors), "chunk"
    ),
    candidates=_candidates,
    runs_on=lambda arch: "tma" in arch.features,
    rarer=_RARER,
)
