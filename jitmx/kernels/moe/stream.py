"""`moe.stream`: few rows, the whole layer in one persistent launch, every warp with a stream of weights of its own.

How the work is cut, by the arithmetic of gpt-oss-120b on 132 multiprocessors: an expert has 360 rows of 45 tiles in
the first product and 180 in the second. Blocks take rows of the first product, 10.9 with one row of x, 11 at most;
warps of a block equal numbers of tiles, whatever rows they are of; the second product is cut at tiles everywhere. So
nothing waits for a longer share than the others', and a block has to do with one or two experts, whose activations it
reads once: assigned row by row, every block would read those of every expert, a quarter of the weights' bytes with
64 rows of x.

An item is read once. Of at most four rows, both blocks of a tile take one multiplication: columns 0 to 3 are the rows
times the first, 4 to 7 times the second. Of five to eight, each block takes one of its own, which is six instructions
a tile more. Chunks of nine tiles end where rows of 45 do, and three tiles are taken at once, so that the loads of one
overlap with the products of another.

This split costs sums of the second product in device memory, 64 bytes a row of x for 24 KB of weights, and waiting for
other blocks twice: for h, and for the sums. The rings, 15 MB on all multiprocessors, fill up meanwhile. A value that is
its own flag (a mailbox) is seen one trip to the L2 earlier than with a counter after it, and needs no fence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.linear.far import LONG
from jitmx.kernels.linear.knobs import ENCODING, SCALE_RANGE
from jitmx.kernels.linear.layout import CODE_BYTES, SCALE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.moe import far, layer
from jitmx.kernels.moe.arguments import ARGUMENTS, Routing, make_case
from jitmx.kernels.moe.knobs import ACTIVATION, BIASES, RESIDUAL
from jitmx.kernels.moe.layer import COUNTER_BYTES, ENTRIES, MAPPED, RESIDENT_THREADS, many_rows, require_room
from jitmx.kernels.moe.problem import MAX_ROWS, MoeProblem
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

COLUMNS = (1, 2, 4, 8)
WARPS = (4, 8, 10, 12, 14, 16)
HANDSHAKES = ("data", "counters")
SCALINGS = ("bare", "fold", "halves", "post")
# Warps, tiles a stage, stages and unrolling worth timing.
GEOMETRIES = (
    (12, 9, 2, 3), (12, 9, 2, 2), (12, 9, 2, 5), (12, 9, 2, 9), (12, 9, 2, 1), (12, 9, 3, 3), (8, 15, 2, 5),
    (8, 12, 2, 3), (8, 9, 3, 3), (8, 9, 2, 3), (10, 9, 2, 3), (12, 5, 4, 5), (12, 5, 3, 5), (16, 6, 3, 1),
    (16, 6, 2, 1), (14, 9, 2, 1), (16, 9, 2, 1), (12, 15, 2, 3), (12, 12, 2, 3),
)  # fmt: skip
MANY_ROWS = 16  # up to so many, hardly an expert of a large layer has more than four
WHOLE_ROWS = 64  # up to so many, hardly two experts side by side have more than sixteen


@dataclass(frozen=True)
class StreamKnobs(Knobs):
    """Compile-time choices of `moe.stream`."""

    columns: int = knob(4, choices=COLUMNS, doc="rows of x an item at most: an expert with more is read again")
    activation: str = ACTIVATION
    bias: bool = BIASES
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    scaling: str = knob("bare", choices=SCALINGS, doc="what scales multiply: codes, or sums of blocks (post, bare)")
    warps: int = knob(12, choices=WARPS, doc="warps a block, each with a ring")
    chunk: int = knob(9, low=1, high=45, doc="tiles a stage of a ring")
    stages: int = knob(2, low=1, high=8, doc="stages of a ring")
    unroll: int = knob(3, low=1, high=9, doc="tiles that a warp takes at once")
    handshake: str = knob("data", choices=HANDSHAKES, doc="what says that h and sums are there: they do, or counters")
    pdl: bool = PDL


def ring_bytes(chunk: int, stages: int) -> int:
    """Shared memory of a warp's ring: codes, and scales with room for the step of 32 bytes at which they start."""
    return stages * (chunk * CODE_BYTES + -(-(chunk * SCALE_BYTES + 96) // 128) * 128)


def _fixed_bytes(knobs: StreamKnobs) -> int:
    """Shared memory that does not depend on the shape, as struct Shared of the template lays it out."""
    rings = knobs.warps * ring_bytes(knobs.chunk, knobs.stages)
    heads = knobs.warps * 512
    items = -(-(ENTRIES * (4 + 4 + 2 + 2 + 2) + (ENTRIES + 2) * 2 + 4) // 16) * 16
    items += 4 if knobs.handshake == "data" else 0
    size = rings + heads + items + ENTRIES * 2 + knobs.warps * (knobs.stages + 2) * 8
    return -(-size // 16) * 16


def most_items(problem: MoeProblem, columns: int) -> int:
    """Items of the routing that makes the most: an expert's first row makes one, and each `columns` rows more."""
    pairs = problem.m * problem.top
    return min(pairs, problem.experts + max(pairs - problem.experts, 0) // columns)


def held_rows(knobs: StreamKnobs, problem: MoeProblem, blocks: int) -> int:
    """Rows of activations that a block has room for.

    Those of any span, but of at most 64 rows of x with eight columns: where two items have not room enough, or of
    four columns as many as there may be, which is rare there, a launch makes items of four rows (lacks_room in the
    template).
    """

    def most(columns: int) -> int:
        # A span of so many items may start and end within one.
        held = -(-most_items(problem, columns) // blocks) + 1
        return min(held * columns, problem.m * problem.top)

    needed = most(knobs.columns)
    few = knobs.columns > 4 and problem.m <= WHOLE_ROWS
    return min(needed, max(most(4), 2 * knobs.columns)) if few else needed


def shared_bytes(knobs: StreamKnobs, problem: MoeProblem, blocks: int) -> int:
    """Dynamic shared memory of a launch, bytes."""
    pitch = -(-max(problem.hidden, problem.intermediate) // TILE_K) * TILE_K * 2 + 64
    return _fixed_bytes(knobs) + held_rows(knobs, problem, blocks) * pitch


def _check(knobs: StreamKnobs, arch: Arch) -> None:
    if "tma" not in arch.features:
        raise KnobError("moe.stream needs bulk copies, sm_90 or newer", f"on {arch} use kernel=decode")
    if knobs.scaling in ("fold", "halves") and knobs.scale_range == "full":
        raise KnobError(f"scaling={knobs.scaling} takes scale_range=normal only", "use post or bare")


SPEC = KernelSpec(
    family="moe",
    name="stream",
    knobs=StreamKnobs,
    contract=lambda knobs, arch: layer.contract(knobs.warps * 32),
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, MoeProblem(1, 1, 1, TILE_K, TILE_K), 1),
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: StreamKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, all of them resident at once: they wait for one another."""
    hidden_bytes = -(-problem.m * problem.top * problem.intermediate * 2 // 128) * 128
    hidden_bytes *= 2 if knobs.handshake == "data" else 1  # launches take turns
    parts = problem.m * problem.top * packed_tiles(problem.hidden, 1)[0] * 2 * TILE_ROWS * 4
    workspace = COUNTER_BYTES + hidden_bytes + parts
    return Launch(multiprocessors, shared_bytes(knobs, problem, multiprocessors), 1, workspace)


def _fits(knobs: dict[str, Any], problem: MoeProblem, arch: Arch, multiprocessors: int) -> bool:
    blocks = min(multiprocessors, arch.multiprocessors)  # with fewer, a block has to do with more items
    return shared_bytes(StreamKnobs(**knobs), problem, blocks) <= arch.shared_bytes


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """Rows an item as there may be: eight where long rings fit beside them, else four. Then the longest that do."""
    most = min(next(c for c in COLUMNS if c >= min(problem.m, COLUMNS[-1])), 4)
    rings = ((12, 9, 3), (12, 6, 3), (8, 9, 3), (8, 5, 3), (8, 3, 3), (4, 5, 3), (4, 2, 3), (4, 1, 3))
    knobs: dict[str, Any] = {"pdl": "pdl" in arch.features}
    wide = rings[:0] if problem.m <= MANY_ROWS else rings[:1] if problem.m <= WHOLE_ROWS else ((12, 9, 3), (12, 5, 5))
    tried = (*((8, *ring) for ring in wide), *((c, *ring) for c in (4, 2, 1) if c <= most for ring in rings))
    for columns, warps, chunk, unroll in tried:
        knobs |= {"columns": columns, "warps": warps, "chunk": chunk, "unroll": unroll}
        if _fits(knobs, problem, arch, multiprocessors):
            return knobs
    return knobs


def _check_problem(problem: MoeProblem, variant: Variant) -> None:
    """Activations fit shared memory beside the rings."""
    arch = variant.arch
    require_room(problem, variant, lambda knobs: shared_bytes(knobs, problem, arch.multiprocessors), "columns")


def _of_each(*experts: int) -> Routing:
    """One expert of each row."""
    return Routing(np.array(experts, np.int32)[:, None])


# Experts, hidden, intermediate, routing, blocks, where by eight columns a block has no room: by one row; for its items
# of the second product; and none but a late one.
_CROWDED = (
    (
        5,
        32,
        128,
        _of_each(0, 3, 4, *[3] * 5, 2, 2, 1, 2, 3, 4, 3, 3, 3, 2, 3, 3, 0, 3, 1, 0, 0, 3, 3, 3, 0, 3, 1, 1, 1),
        4,
    ),
    (4, 128, 32, _of_each(2, *[1] * 13, 0, *[1] * 9, 3, *[1] * 5, 3, 1, 1), 5),
    (
        5,
        64,
        64,
        _of_each(0, *[2] * 4, 1, 4, 1, 2, 2, 1, 2, 4, 2, 0, 2, 2, 3, 2, 2, 4, *[2] * 4, 0, 1, 1, 3, 2, 0, 2, 2),
        5,
    ),
)


def _cases(variant: Variant) -> Iterator[Case]:
    """One row; experts with many rows, one row twice, none, and ids that are no expert's; a map and a count; no item.

    Rows of tiles are shared by two blocks, by many warps or by none; chunks end within rows and rows within chunks;
    some warps have nothing to do. Rings go round in both products, and runs are as long as what is taken at once;
    threads bring several vectors; experts come in every slot, or none; pairs are as many as a warp's lanes, or more;
    counts are below zero and above the rows, or zero between launches that have items; so many launches were before
    that their count goes round. Of eight columns, items have four rows where blocks have no room for more:
    a row more than there is room for, of the second product alone, of the last block alone. One row has more vectors
    than a block has threads.
    """
    knobs = variant.knobs
    many = many_rows(knobs.columns)
    turns = (np.arange(4)[:, None] + np.arange(8)) % 4  # as many pairs as a warp has lanes
    turns = np.where(turns < 3, turns, -1).astype(np.int32)
    long = (knobs.chunk + 1) * TILE_K + 32
    # Vectors for four rounds of all threads, by an item of all its columns.
    wide = -(-4 * SPEC.threads(knobs) // (8 * knobs.columns)) * TILE_K - 32
    tiles, most = knobs.unroll + 1, knobs.warps * (knobs.chunk * (knobs.stages + 1) + knobs.unroll)
    while packed_tiles(tiles * TILE_K - 32, 1)[0] * tiles < most:
        tiles += 1
    round_ = tiles * TILE_K - 32
    paths = (1, 8) if knobs.columns == 8 else (1,)  # items of few rows take another than those of many
    often = np.resize(many, (11, 3))  # a pair more than a warp's lanes
    # Of so many pairs h is cleared in two rounds, and of the second one some is read by another block than makes it.
    most_pairs = (np.arange(layer.ENTRIES // 4)[:, None] * 5 + np.arange(4) * 13).astype(np.int32) % 47
    crowded = np.zeros((33, 1), np.int32)  # of five items of eight rows the second of three blocks has parts of three
    shapes = (
        (1, 32, 32, Routing(np.zeros((1, 1), np.int32)), 5),
        (3, 96, 160, Routing(np.array([[2, 0, 1, 2]], np.int32)), 7),  # the last of h is another block's
        (3, 32, 32, Routing(np.array([[2, 0, 1, 2]], np.int32)), 1),  # one row, of which a block has all items
        (3, 160, 160, Routing(many), 3),
        (3, 96, 96, Routing(often), 4),
        (3, 96, 96, Routing(often, MAPPED, len(often) - 1), 4),
        (3, long, 96, Routing(many[-3:], MAPPED, 2), 8),
        (2, 96, long, Routing(np.array([[1]], np.int32)), 8),
        (2, 32, 32, Routing(np.full((2, 1), -1, np.int32), count=3), 1),
        *((3, 32, 32, Routing(ids, count=layer.below(3)), 2) for ids in (often[:2], often)),
        (layer.CROWD, 32, 32, Routing(layer.crowd(MAX_ROWS)), 4),
        *([(48, 32, 32, Routing(most_pairs), 3)] if knobs.columns == 8 else []),
        *((1, round_, round_, Routing(np.zeros((rows, 1), np.int32)), 1) for rows in paths),
        (1, wide, 32, Routing(np.zeros((knobs.columns, 1), np.int32)), 1),
        (1, 32, wide, Routing(np.zeros((knobs.columns, 1), np.int32)), 1),
        (3, 224, 160, Routing(turns), 4),
        *([(1, 32, 32, Routing(crowded), 3)] if knobs.columns == 8 else []),
        *(_CROWDED if knobs.columns == 8 else ()),
        (1, max(8 * SPEC.threads(knobs) + 32, LONG), 32, Routing(np.zeros((1, 1), np.int32)), 2),
        (1, 32, LONG, Routing(np.zeros((1, 1), np.int32)), 2),
        (3, 96, 96, Routing(often, count=0), 4),  # between launches that have items, on their workspace
    )
    resident = max(RESIDENT_THREADS // SPEC.threads(knobs), 1)
    for seed, (experts, hidden, intermediate, routing, blocks) in enumerate(shapes):
        rows, top = routing.ids.shape
        problem = MoeProblem(rows, experts, top, hidden, intermediate)
        geometry = launch(knobs, problem, min(blocks, resident))
        if geometry.shared_bytes <= variant.arch.shared_bytes:
            case = make_case(variant, geometry, problem, routing, seed)
            if seed == 0 and knobs.handshake == "counters":
                _wear(case)
            # What blocks leave for others is not a matter of how long the rows of one are.
            yield case if blocks > 1 else dataclasses.replace(case, again=None)
    problem = MoeProblem(3, 3, 1, 64, 32)
    routing, geometry = Routing(np.arange(3, dtype=np.int32)[:, None]), launch(knobs, problem, 1)
    yield dataclasses.replace(make_case(variant, geometry, problem, routing, 10, lone=True), again=None)
    problem = MoeProblem(1, 2, 1, 256, 1088)
    geometry = launch(knobs, problem, 1)
    if geometry.shared_bytes <= variant.arch.shared_bytes:
        yield far.far_experts(make_case(variant, geometry, problem, Routing(np.array([[1]], np.int32)), 9))


def _wear(case: Case) -> None:
    """Have the workspace of a case be as 2^32 - 1 launches leave it: then their count goes round."""
    workspace = case.values["workspace"]
    assert isinstance(workspace, Buffer)
    workspace.data.view("u4")[ENTRIES + 1] = 0xFFFFFFFF  # `generation` of moe/workspace.cuh


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing: rows an item, warps, lengths and numbers of stages."""
    base = _heuristic(problem, arch, multiprocessors)
    found = [base, base | {"handshake": "counters"}]
    columns = [c for c in COLUMNS if c <= 2 * base["columns"] and (c >= 2 or problem.m == 1)]
    for count in sorted(columns, key=lambda c: abs(c - base["columns"])):
        scalings = ("bare", "halves") if count == 8 and problem.scale_range == "normal" else ("bare",)
        for scaling in scalings:
            for warps, chunk, stages, unroll in GEOMETRIES:
                found.append(
                    base | {"columns": count, "scaling": scaling, "warps": warps, "chunk": chunk, "stages": stages,
                            "unroll": unroll}
                )  # fmt: skip
    return [knobs for knobs in found if _fits(knobs, problem, arch, multiprocessors)]


_RARER: tuple[dict[str, Any], ...] = (
    {"columns": 2, "activation": "silu", "residual": "pair", "bias": False, "encoding": "nibble", "scaling": "post",
     "scale_range": "full", "handshake": "counters", "warps": 4, "chunk": 3},
    {"columns": 8, "residual": True, "scaling": "halves", "warps": 4, "chunk": 3},
    {"columns": 2, "bias": False, "scaling": "fold", "warps": 4, "chunk": 2},
)  # fmt: skip

KERNEL = Kernel(
    spec=SPEC,
    fixed=partial(layer.fixed, "stream", layer.rows_by_pairs),
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    runs_on=lambda arch: "tma" in arch.features,
    rarer=_RARER,
)
