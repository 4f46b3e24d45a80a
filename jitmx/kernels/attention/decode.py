"""`attention.decode`: few new tokens a request, with all that a decoder layer does between its products.

Rotary embedding of q and new k, cache write, attention and merging are one launch. Blocks share old tokens by
    none      a block a (request, KV head): windows, or many requests of one length
    cluster   `parts` blocks a (request, KV head), which meet in shared memory of a cluster
    global    a fixed grid of which each block takes an even share of all tokens, whatever requests' lengths; parts meet
              in the workspace, and the last block of a (request, KV head) merges them, in the order of the tokens

Floor: 2 head_dim values of the cache a token and KV head, over the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.attention import problem as shared
from jitmx.kernels.attention.arguments import ARGUMENTS
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

ROWS = (16, 32, 64)


@dataclass(frozen=True)
class DecodeKnobs(Knobs):
    """Compile-time choices of `attention.decode`."""

    dtype: str = shared.DTYPE
    cache: str = shared.CACHE
    head_dim: int = shared.HEAD_DIM
    group: int = shared.GROUP
    page_size: int = shared.PAGE_SIZE
    sinks: str = shared.SINK
    soft_cap: bool = shared.SOFT_CAP
    windowed: bool = shared.WINDOWED
    qk: str = shared.QK
    rope: str = shared.ROPE
    rotary: int = knob(0, low=0, high=256, doc="first values of a head that are rotated; 0: none")
    table: str = shared.TABLE
    mask: int = shared.MASK
    append: bool = shared.APPEND
    rows: int = knob(16, choices=ROWS, doc="new tokens x group, at most")
    keys: int = knob(32, choices=(16, 32, 64), doc="old tokens that a warp takes at a time")
    stages: int = knob(3, low=2, high=8, doc="of these, under way a warp")
    warps: int = knob(4, low=1, high=16, doc="a block")
    blocks_per_sm: int = knob(1, low=1, high=8, doc="blocks that the registers of a multiprocessor must suffice for")
    reduction: str = knob("none", choices=("none", "cluster", "global"), doc="where blocks merge what they have")
    parts: int = knob(1, choices=(1, 2, 4, 8, 16), doc="blocks a cluster")
    pdl: bool = PDL


def most_queries(knobs: Any) -> int:
    """New tokens a request that a launch takes; others are left to another."""
    return int(min(knobs.rows // knobs.group, knobs.mask or knobs.rows))


def rows_for(problem: AttentionProblem) -> int:
    """Rows that a problem needs; KnobError where no variant has as many."""
    need = problem.queries * problem.group
    if problem.mask and problem.queries > problem.mask:
        raise KnobError(f"mask={problem.mask} bits are fewer than {problem.queries} new tokens", "use mask=64")
    most = max(rows for rows in ROWS if rows * problem.head_dim <= 4096 or rows == 16)
    if need > most:
        said = f"attention.decode takes {most} rows of head_dim={problem.head_dim}, and {problem.queries} new tokens of"
        raise KnobError(f"{said} group={problem.group} are {need}", "use attention.prefill")
    return next(rows for rows in ROWS if rows >= need)


def _row_bytes(knobs: DecodeKnobs) -> int:
    return knobs.head_dim * (1 if knobs.cache == "e4m3" else 2)


def _partial_bytes(knobs: DecodeKnobs) -> int:
    return knobs.rows * (knobs.head_dim + 4) * 4


def shared_bytes(knobs: DecodeKnobs) -> int:
    """Shared memory of a block, bytes, as the template lays it out."""
    ring = max(knobs.stages * 2 * knobs.keys * _row_bytes(knobs), _partial_bytes(knobs))
    size = knobs.warps * ring + knobs.rows * knobs.head_dim * 2
    if knobs.append:
        size += 2 * -(-most_queries(knobs) // 16) * 16 * _row_bytes(knobs)
    if knobs.reduction == "cluster":
        size += knobs.parts * -(-knobs.rows // knobs.parts) * (knobs.head_dim + 4) * 4 + 8
    elif knobs.reduction == "global":
        size += 4
    return -(-size // 128) * 128


def _check(knobs: DecodeKnobs, arch: Arch) -> None:
    shared.check_shared(knobs)
    if knobs.cache == "e4m3" and "cvt_e4m3" not in arch.features:
        raise KnobError(f"cache=e4m3 needs sm_89 or newer; {arch} converts no E4M3", "use cache=same")
    if knobs.rows * knobs.head_dim > 4096 and knobs.rows > 16:
        most = max(rows for rows in ROWS if rows * knobs.head_dim <= 4096 or rows == 16)
        said = f"rows={knobs.rows} of head_dim={knobs.head_dim} are over the registers of a warp"
        raise KnobError(said, f"the nearest legal value is {most}")
    if knobs.group > knobs.rows:
        raise KnobError(f"rows={knobs.rows} hold no token of group={knobs.group}", f"use rows={knobs.group}")
    if (knobs.reduction == "cluster") != (knobs.parts > 1):
        raise KnobError(
            f"parts={knobs.parts} with reduction={knobs.reduction}", "use parts > 1 with cluster, and parts=1 else"
        )
    if knobs.reduction == "cluster" and "cluster" not in arch.features:
        raise KnobError(f"reduction=cluster needs clusters; {arch} has none", "use reduction=global")


DECODE = KernelSpec(
    family="attention",
    name="decode",
    knobs=DecodeKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=min(255, 65536 // (knobs.warps * 32 * knobs.blocks_per_sm) // 8 * 8),
        require=(r"\bHMMA\.16816\.F", r"\bLDGSTS\.E\..*128", r"\bLDSM\b"),
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


def fixed(problem: AttentionProblem) -> dict[str, Any]:
    """Knobs that a problem decides."""
    return {**problem.fixed, "rows": rows_for(problem)}


def launch(knobs: DecodeKnobs, problem: AttentionProblem, multiprocessors: int) -> Launch:
    """Geometry for a problem's requests; with `global`, whole multiples of them, near what the device runs at once."""
    items = problem.batch * problem.kv_heads
    if knobs.reduction != "global":
        return Launch(items * knobs.parts, shared_bytes(knobs), knobs.parts)
    blocks = items * max(1, multiprocessors * knobs.blocks_per_sm // items)
    return Launch(blocks, shared_bytes(knobs), workspace=workspace_bytes(knobs, blocks))


def workspace_bytes(knobs: DecodeKnobs, blocks: int) -> int:
    """A counter a block, and two partial results a block."""
    return -(-blocks * 4 // 16) * 16 + blocks * 2 * _partial_bytes(knobs)


def heuristic(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """A block a window; a cluster for one or two requests; for more, an even share of all tokens."""
    # Without append the launch before may be what writes the cache, of which this one reads ahead.
    knobs: dict[str, Any] = {"pdl": "pdl" in arch.features and problem.append}
    knobs |= {"warps": 4, "parts": 1, "blocks_per_sm": 1}
    row = problem.head_dim * (1 if problem.cache == "e4m3" else 2)
    knobs["keys"] = 16 if rows_for(problem) > 16 or row >= 256 else 32
    items = problem.batch * problem.kv_heads
    large = arch.shared_bytes >= 200 << 10
    if problem.window and problem.window <= 512:
        return _within(problem, arch, knobs | {"reduction": "none", "warps": 8, "keys": 16, "stages": 3})
    if large and "cluster" in arch.features and items * 8 <= multiprocessors:
        parts = 16 if items * 16 <= multiprocessors else 8
        return _within(problem, arch, knobs | {"reduction": "cluster", "parts": parts, "stages": 4})
    return _within(problem, arch, knobs | {"reduction": "global", "stages": 3, "blocks_per_sm": 2 if large else 1})


def _within(problem: AttentionProblem, arch: Arch, knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs with fewer stages, fewer old tokens at a time or fewer warps, until shared memory holds them."""
    for warps in (knobs["warps"], 4, 2):
        for keys, stages in ((knobs["keys"], knobs["stages"]), (16, 4), (16, 3), (16, 2)):
            found = knobs | {"keys": keys, "stages": stages, "warps": warps}
            if DECODE.legal(arch, **fixed(problem), **found):
                return found
    DECODE.variant(arch, **fixed(problem), **knobs)  # says what does not fit
    return knobs
