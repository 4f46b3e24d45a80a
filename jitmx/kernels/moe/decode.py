"""`moe.decode`: few rows, the whole layer in one persistent launch.

How the work is cut, by the arithmetic of gpt-oss-120b on 132 multiprocessors: an expert has 360 rows of tiles in the
first product and 180 in the second, of 45 tiles each. Assigned one by one, the first product of four experts is 10.9
rows a block, 11 at most: 1 % is lost. The second could be split so as well, but then a row of y would come from several
blocks, and its sum would need a round through device memory at the very end, when nothing hides it. So a block owns
rows of y: 180 over 132 blocks is 2 rows where 1.36 were needed, 47 % lost in a third of the time. A cluster of two owns
180 / 66 = 2.73, 3 at most, and each of its blocks takes every other expert: 10 % lost of a third, and the two sums
meet in shared memory. The tile scheduler evens out the rest: blocks that own less of y take more of the first product.
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
from jitmx.kernels.linear.layout import TILE_BYTES, TILE_K, TILE_ROWS, packed_tiles
from jitmx.kernels.linear.limits import require_divisor
from jitmx.kernels.moe import far, layer
from jitmx.kernels.moe.arguments import ARGUMENTS, Routing, make_case
from jitmx.kernels.moe.knobs import ACTIVATION, BIASES, RESIDUAL
from jitmx.kernels.moe.layer import COUNTER_BYTES, ENTRIES, MAPPED, RESIDENT_THREADS, many_rows, require_room
from jitmx.kernels.moe.problem import MAX_ROWS, MAX_TOP, MoeProblem
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import COPY, PDL, KernelSpec, Knobs, Variant, knob

COLUMNS = (1, 2, 4, 8)
WARPS = (1, 2, 4, 5, 8, 9, 10, 12, 14, 15, 16)
TEAMS = (1, 2, 3, 4)
HELPERS = 3  # warps that stream weights, bring activations and finish sums


@dataclass(frozen=True)
class DecodeKnobs(Knobs):
    """Compile-time choices of `moe.decode`."""

    columns: int = knob(1, choices=COLUMNS, doc="rows of x an item: an expert with more is read again")
    activation: str = ACTIVATION
    bias: bool = BIASES
    residual: bool | str = RESIDUAL
    encoding: str = ENCODING
    scale_range: str = SCALE_RANGE
    warps: int = knob(8, choices=WARPS, doc="warps a block that multiply, each a slice of k")
    teams: int = knob(1, choices=TEAMS, doc="teams of warps, which take rows of tiles in turn")
    chunk: int = knob(6, low=1, high=16, doc="tiles that a warp takes at once")
    stages: int = knob(4, low=1, high=16, doc="rows of tiles in shared memory, all but one of them under way")
    inputs: int = knob(4, low=1, high=32, doc="rows of activations in shared memory")
    blocks_per_sm: int = knob(1, low=1, high=2, doc="blocks that must fit a multiprocessor: caps registers")
    cluster: int = knob(1, choices=(1, 2), doc="blocks that share rows of y, each with its items")
    copy: str = COPY
    pdl: bool = PDL


def _fixed_bytes(knobs: DecodeKnobs) -> int:
    """Shared memory that does not depend on the shape, as struct Shared of the template lays it out."""
    size = knobs.stages * (knobs.warps // knobs.teams * 512 + (64 if knobs.bias else 0))
    size += -(-(ENTRIES * (4 + 4 + 2 + 2 + 2) + (ENTRIES + 2) * 2 + 4) // 16) * 16  # struct Items
    size += (3 * knobs.stages + 2 * knobs.inputs + (knobs.cluster > 1)) * 8 + knobs.stages * 4
    return -(-size // 128) * 128


def shared_bytes(knobs: DecodeKnobs, problem: MoeProblem, blocks: int) -> int:
    """Dynamic shared memory of a launch, bytes."""
    tiles = -(-max(problem.hidden, problem.intermediate) // TILE_K)
    owned = -(-packed_tiles(problem.hidden, 1)[0] // (blocks // knobs.cluster))
    inputs = knobs.inputs * (tiles * TILE_K * 2 + 64)
    sums = owned * problem.m * (TILE_ROWS * 4 + (32 if knobs.cluster > 1 else 0))
    stage = -(-(tiles * TILE_BYTES + 96) // 128) * 128
    return _fixed_bytes(knobs) + knobs.stages * stage + inputs + sums


def _check(knobs: DecodeKnobs, arch: Arch) -> None:
    if knobs.inputs < knobs.columns:
        raise KnobError(
            f"inputs={knobs.inputs} rows do not hold an item of columns={knobs.columns}",
            f"the nearest legal value is {knobs.columns}",
        )
    require_divisor(knobs, "teams", TEAMS)
    if knobs.stages % knobs.teams:
        nearest = -(-knobs.stages // knobs.teams) * knobs.teams
        raise KnobError(
            f"stages={knobs.stages} is not a multiple of teams={knobs.teams}, each of which has its own",
            f"the nearest that is is {nearest}",
        )
    if knobs.cluster > 1 and arch.major not in (9, 10):
        raise KnobError(f"cluster={knobs.cluster} needs sm_90 or sm_100", f"on {arch} use cluster=1")


SPEC = KernelSpec(
    family="moe",
    name="decode",
    knobs=DecodeKnobs,
    contract=lambda knobs, arch: layer.contract((knobs.warps + HELPERS) * 32 * knobs.blocks_per_sm, knobs.copy),
    check=_check,
    shared_bytes=lambda knobs: shared_bytes(knobs, MoeProblem(hidden=TILE_K, intermediate=TILE_K), 2),
    threads=lambda knobs: (knobs.warps + HELPERS) * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: DecodeKnobs, problem: MoeProblem, multiprocessors: int) -> Launch:
    """A block a multiprocessor, all of them resident at once: they wait for one another."""
    blocks = max(multiprocessors // knobs.cluster, 1) * knobs.cluster
    workspace = COUNTER_BYTES + problem.m * problem.top * problem.intermediate * 2
    return Launch(blocks, shared_bytes(knobs, problem, blocks), knobs.cluster, workspace)


def _heuristic(problem: MoeProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """As many rows an item as there may be and some items more, and behind them the ring that fits.

    Little's law at 1.2 us of latency under load says how many bytes a multiprocessor must have under way.
    """
    columns = next(c for c in COLUMNS if c >= min(problem.m, COLUMNS[-1]))
    multiprocessors = min(multiprocessors, arch.multiprocessors)  # with fewer, a block owns more of y
    cluster = 2 if "wgmma" in arch.features and multiprocessors >= 2 else 1
    wanted = arch.memory_gbps * 1200 // multiprocessors  # bytes
    tiles = packed_tiles(1, max(problem.hidden, problem.intermediate))[1]
    most = min(max(-(-2 * wanted // (tiles * TILE_BYTES)) + 1, 3), 16)
    knobs: dict[str, Any] = {
        "copy": "bulk" if "tma" in arch.features else "async", "pdl": "pdl" in arch.features, "cluster": cluster,
        "warps": 8, "chunk": min(-(-tiles // 8), 8),
    }  # fmt: skip
    room = 4 if problem.m > 1 else 3
    ways = (3, room, 1), (3, 2, 1), (2, 2, 1), (2, 0, 1), (2, 0, 2), (2, 0, 4), (2, 0, 8), (1, 0, 8)
    for least, spare, fewer in ways:
        for stages in range(most, least - 1, -1):
            rows = max(columns // fewer, 1)
            knobs |= {"columns": rows, "stages": stages, "inputs": rows + spare}
            if launch(DecodeKnobs(**knobs), problem, multiprocessors).shared_bytes <= arch.shared_bytes:
                return knobs
    return knobs


def _check_problem(problem: MoeProblem, variant: Variant) -> None:
    """Activations and sums of y fit shared memory beside the ring."""
    arch = variant.arch
    require_room(
        problem, variant, lambda knobs: launch(knobs, problem, arch.multiprocessors).shared_bytes, "columns or inputs"
    )


def _cases(variant: Variant) -> Iterator[Case]:
    """One row; experts with many rows, one row twice, none, and ids that are no expert's; a map and a count; no item,
    of more of y than threads store at a time. More pairs than threads, more items than lanes.

    Slices of k are nothing, ragged, one chunk and more, and rings go round; there are fewer rows of tiles than blocks,
    and many more. Rows of either product are long.
    """
    knobs = variant.knobs
    team = knobs.warps // knobs.teams
    whole = team * knobs.chunk * TILE_K
    over = (team * (knobs.chunk + 1) + 1) * TILE_K - 32
    many, crowded = many_rows(knobs.columns), min(SPEC.threads(knobs) // MAX_TOP + 1, MAX_ROWS)
    shapes = (
        (1, 32, 32, Routing(np.zeros((1, 1), np.int32)), 5),
        (3, 160, 96, Routing(many), 3),
        (3, max(whole - TILE_K, 32), 32, Routing(many[-3:], MAPPED, 2), 8),
        (2, over, 64, Routing(np.array([[1], [1]], np.int32)), 8),
        (2, 32 * knobs.cluster, 32, Routing(np.full((crowded, 1), -1, np.int32), count=crowded + 1), 1),
        (3, 32, 32, Routing(np.resize(many, (4, 3)), count=layer.below(3)), 1),
        *((1, *sizes, Routing(np.zeros((1, 1), np.int32)), 5) for sizes in ((LONG, 32), (32, LONG))),
        *(() if knobs.columns == 2 else ((layer.CROWD, 32, 32, Routing(layer.crowd(crowded)), 3),)),
    )
    most = RESIDENT_THREADS // SPEC.threads(knobs)
    for seed, (experts, longest, intermediate, routing, groups) in enumerate(shapes):
        rows, top = routing.ids.shape
        for hidden in range(longest, 0, -TILE_K):
            if hidden < longest and team > 1 and hidden // TILE_K % team == 0:
                continue  # slices of two lengths reach more
            problem = MoeProblem(rows, experts, top, hidden, intermediate)
            geometry = launch(knobs, problem, min(groups * knobs.cluster, most))
            if geometry.shared_bytes <= variant.arch.shared_bytes:
                case = make_case(variant, geometry, problem, routing, seed)
                yield case if experts < layer.CROWD else dataclasses.replace(case, again=None)  # its pairs are many
                break
    problem = MoeProblem(3, 3, 1, 64, 32)
    routing, geometry = Routing(np.arange(3, dtype=np.int32)[:, None]), launch(knobs, problem, knobs.cluster)
    yield dataclasses.replace(make_case(variant, geometry, problem, routing, 10, lone=True), again=None)
    problem = MoeProblem(1, 2, 1, 256, 1088)
    geometry = launch(knobs, problem, knobs.cluster)
    if geometry.shared_bytes <= variant.arch.shared_bytes:
        yield far.far_experts(make_case(variant, geometry, problem, Routing(np.array([[1]], np.int32)), 9))


def _candidates(problem: MoeProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing: ways to slice k, teams, and depths of both rings."""
    base = _heuristic(problem, arch, multiprocessors)
    tiles = packed_tiles(1, max(problem.hidden, problem.intermediate))[1]
    found = [base]
    for warps, teams in ((8, 1), (8, 2), (12, 1), (12, 3), (16, 2), (16, 4)):
        for stages in (2, 3, 4, 5, 6):
            for spare in (3, 8):
                if stages % teams == 0:
                    knobs = {"warps": warps, "teams": teams, "chunk": min(-(-tiles * teams // warps), 6)}
                    found.append(base | knobs | {"stages": stages, "inputs": base["columns"] + spare})
    found += [knobs | {"cluster": 1} for knobs in found if knobs["cluster"] > 1]
    fits = [launch(DecodeKnobs(**knobs), problem, multiprocessors).shared_bytes <= arch.shared_bytes for knobs in found]
    return [knobs for knobs, fit in zip(found, fits, strict=True) if fit]


_RARER: tuple[dict[str, Any], ...] = (
    {"columns": 8, "activation": "silu", "bias": False, "residual": "pair", "scale_range": "full", "copy": "async",
     "pdl": False, "warps": 4, "teams": 2, "chunk": 2, "stages": 4, "inputs": 9},
    {"columns": 2, "copy": "async", "residual": True, "warps": 4, "chunk": 2, "stages": 2, "inputs": 3, "pdl": False},
    {"columns": 2, "residual": True, "cluster": 2, "warps": 4, "chunk": 2, "stages": 2, "inputs": 3},
)  # fmt: skip


KERNEL = Kernel(
    spec=SPEC,
    fixed=partial(layer.fixed, "decode", lambda problem: MAX_ROWS),
    launch=launch,
    heuristic=_heuristic,
    cases=_cases,
    check=_check_problem,
    candidates=_candidates,
    rarer=_RARER,
)
