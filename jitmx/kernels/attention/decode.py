"""`attention.decode`: few new tokens a request, with all that a decoder layer does between its products.

Rotary embedding of q and new k, cache write, attention and merging are one launch. Blocks share old tokens by
    none      a block a (request, KV head): windows, or many requests of one length
    cluster   `parts` blocks a (request, KV head), which meet in shared memory of a cluster
    global    a fixed grid of which each block takes an even share of all tokens, whatever requests' lengths; parts meet
              in the workspace, and the last block of a (request, KV head) merges them, in the order of the tokens

Floor: 2 head_dim values of the cache a token and KV head, over the memory bandwidth.
"""

from __future__ import annotations

import contextlib
import itertools
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

ROWS = (16, 32, 64, 128)


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
    group_split: int = knob(1, choices=(1, 2, 4, 8), doc="blocks that share a KV head's rows")
    row_tiles: int = knob(1, choices=(1, 2), doc="tiles of 16 rows that a warp takes")
    keys: int = knob(32, choices=(16, 32, 64), doc="old tokens that warps of all rows take at a time")
    stages: int = knob(3, low=1, high=8, doc="of these, under way")
    warps: int = knob(4, low=1, high=16, doc="a block, in whole teams: as many as take all of its rows")
    blocks_per_sm: int = knob(1, low=1, high=8, doc="blocks that the registers of a multiprocessor must suffice for")
    reduction: str = knob("none", choices=("none", "cluster", "global"), doc="where blocks merge what they have")
    parts: int = knob(1, choices=(1, 2, 4, 8, 16), doc="blocks a cluster")
    ahead: bool = knob(False, doc="a warp reads operands of its first old tokens while q is on its way")
    pdl: bool = PDL


def most_queries(knobs: Any) -> int:
    """New tokens a request that a launch takes; others are left to another."""
    return int(min(knobs.rows // knobs.group, knobs.mask or knobs.rows))


def rows_for(problem: AttentionProblem) -> int:
    """Rows that a problem needs; KnobError where no variant has as many."""
    need = problem.queries * problem.group
    if problem.mask and problem.queries > problem.mask:
        remedy = "use mask=64" if problem.queries <= 64 else "no mask has more than 64; give fewer new tokens"
        raise KnobError(f"mask={problem.mask} bits are fewer than {problem.queries} new tokens", remedy)
    if need > ROWS[-1]:
        said = f"attention.decode takes {ROWS[-1]} rows, and {problem.queries} new tokens of"
        remedy = "use attention.prefill"
        if problem.mask:  # which no other kernel takes
            remedy = f"give {ROWS[-1] // problem.group} new tokens of a request or fewer"
        raise KnobError(f"{said} group={problem.group} are {need}", remedy)
    return next(rows for rows in ROWS if rows >= need)


def _block_rows(knobs: DecodeKnobs) -> int:
    return knobs.rows // knobs.group_split


def _row_bytes(knobs: DecodeKnobs) -> int:
    return knobs.head_dim * (1 if knobs.cache == "e4m3" else 2)


def _partial_bytes(knobs: DecodeKnobs, spread: int = 4) -> int:
    return _block_rows(knobs) * (knobs.head_dim + spread) * 4


def _team(knobs: DecodeKnobs) -> int:
    return _block_rows(knobs) // 16 // knobs.row_tiles


def _rings(knobs: DecodeKnobs) -> int:
    return knobs.warps // _team(knobs)


def shared_bytes(knobs: DecodeKnobs) -> int:
    """Shared memory of a block, bytes, as the template lays it out."""
    spread = 4 if knobs.head_dim > 128 else 16 if knobs.cache == "e4m3" else 8
    partial = _partial_bytes(knobs, spread)
    ring = max(knobs.stages * 2 * knobs.keys * _row_bytes(knobs), partial)
    size = _rings(knobs) * ring + _block_rows(knobs) * knobs.head_dim * 2
    if knobs.append:
        size += 2 * -(-most_queries(knobs) // 16) * 16 * _row_bytes(knobs)
    if knobs.reduction == "cluster":
        size += (_block_rows(knobs) + knobs.parts) * (knobs.head_dim + 4) * 4 + 8
    elif knobs.reduction == "global":
        size += 24 + 4  # the scheduler, and whether this block is the last
    size += 48 + 4  # what it works on, and whether there is work
    if knobs.sinks != "no_sinks":
        size += knobs.group // knobs.group_split * 4
    return -(-size // 128) * 128


def most_registers(knobs: DecodeKnobs) -> int:
    """Registers that a thread may take."""
    return min(255, 65536 // (knobs.warps * 32 * knobs.blocks_per_sm) // 8 * 8)


def _registers(knobs: DecodeKnobs) -> int:
    """Registers that a thread needs: sums, logits, words of E4M3 keys, and all else, by what compilers took."""
    words = knobs.keys * knobs.head_dim // 128 if knobs.cache == "e4m3" else 0
    if knobs.ahead:  # operands of both products in place of words
        words = knobs.keys * knobs.head_dim * 7 // 320
    need = 44 + words * 5 // 4 + (22 if _block_rows(knobs) > 16 else 0)
    need += knobs.row_tiles * (knobs.head_dim // 2 + knobs.keys * 5 // 8) + 30 * (knobs.row_tiles > 1)
    need += 8 * (knobs.cache == "e4m3" and knobs.append)  # reciprocals of its scales, and clamps
    need += 16 * (knobs.reduction == "global" and _block_rows(knobs) > 16)
    need += 6 * knobs.soft_cap + 10 * (knobs.mask > 0) + 5 * (knobs.reduction != "none")
    return 208 if knobs.head_dim == 256 and knobs.keys == 16 else need  # operands are loaded as they are needed


def _check(knobs: DecodeKnobs, arch: Arch) -> None:
    team, least = _team(knobs), 16 * knobs.row_tiles
    if knobs.group % knobs.group_split or _block_rows(knobs) % least:
        said = f"group_split={knobs.group_split} of group={knobs.group} and rows={knobs.rows} leaves no whole"
        raise KnobError(f"{said} {least} rows", "lower group_split or row_tiles")
    if knobs.row_tiles > 1 and (knobs.head_dim > 64 or knobs.keys > 32 or knobs.reduction == "global"):
        said = f"row_tiles=2 of head_dim={knobs.head_dim}, keys={knobs.keys} and reduction={knobs.reduction} takes more"
        raise KnobError(f"{said} than 255 registers a thread", "use row_tiles=1")
    shared.check_shared(knobs, arch)
    need, most = _registers(knobs), most_registers(knobs)
    if need > most:
        said = f"keys={knobs.keys} of head_dim={knobs.head_dim} take {need} registers a thread, over {most}"
        raise KnobError(said, "lower keys, warps or blocks_per_sm")
    if knobs.warps % team:
        said = f"warps={knobs.warps} are not whole teams: {_block_rows(knobs)} rows take {team} warps each"
        raise KnobError(said, f"use a multiple of {team}")
    if team > 1 and knobs.stages < 2:
        raise KnobError(f"stages=1 of a team of {team} warps: it fills a stage while it reads another", "use stages=2")
    if knobs.ahead and knobs.reduction == "global":
        said = "ahead=1 with reduction=global: a block has parts of several requests, one after another"
        raise KnobError(said, "use ahead=0, or another reduction")
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
        max_registers=most_registers(knobs),
        max_spill_bytes=shared.spilled(knobs),
        require=(r"\bHMMA\.16816\.F", r"\bLDGSTS\.E\..*128", r"\bLDSM\b"),
    ),
    check=_check,
    shared_bytes=shared_bytes,
    threads=lambda knobs: knobs.warps * 32,
    arguments=lambda knobs: ARGUMENTS,
)


# Between them every branch of the template.
RARER: tuple[dict[str, Any], ...] = (
    {"cache": "e4m3", "sinks": "sinks_fp32", "reduction": "cluster", "parts": 2, "rows": 32, "mask": 32, "keys": 16,
     "rope": "interleaved", "rotary": 32, "table": "table_fp32", "windowed": True, "ahead": True},
    {"dtype": "fp16", "qk": "qk_fp16", "soft_cap": True, "sinks": "sinks_fp16", "reduction": "global", "keys": 16,
     "warps": 2, "append": False},
    {"head_dim": 128, "group": 5, "page_size": 48, "reduction": "none", "keys": 16, "warps": 2, "rope": "neox",
     "rotary": 64, "table": "table_fp16", "dtype": "fp16", "cache": "e4m3", "soft_cap": True},
    {"rows": 32, "group_split": 2, "reduction": "cluster", "parts": 2, "group": 8, "keys": 16, "warps": 2,
     "rope": "neox", "rotary": 64, "cache": "e4m3", "ahead": True},
    {"rows": 32, "row_tiles": 2, "reduction": "cluster", "parts": 2, "group": 8, "keys": 16, "warps": 2, "rope": "neox",
     "rotary": 64, "sinks": "sinks_bf16"},
    {"rows": 64, "group": 1, "mask": 64, "keys": 16, "windowed": True},
    {"rows": 128, "group": 2, "keys": 16, "warps": 8, "stages": 2, "windowed": True},
    {"group": 3, "keys": 16, "warps": 2},
    {"group": 1, "keys": 16, "warps": 8, "stages": 2, "reduction": "global"},
)  # fmt: skip


def fixed(problem: AttentionProblem) -> dict[str, Any]:
    """Knobs that a problem decides."""
    return {**shared.fixed_for(DecodeKnobs, problem), "rows": rows_for(problem)}


def launch(knobs: DecodeKnobs, problem: AttentionProblem, multiprocessors: int) -> Launch:
    """Geometry for a problem's requests; with `global`, whole multiples of them, near what the device runs at once."""
    items = problem.batch * problem.kv_heads * knobs.group_split
    if knobs.reduction != "global":
        return Launch(items * knobs.parts, shared_bytes(knobs), knobs.parts)
    blocks = items * max(1, multiprocessors * knobs.blocks_per_sm // items)
    return Launch(blocks, shared_bytes(knobs), workspace=workspace_bytes(knobs, blocks))


def workspace_bytes(knobs: DecodeKnobs, blocks: int) -> int:
    """A counter a block, and two partial results a block."""
    return -(-blocks * 4 // 16) * 16 + blocks * 2 * _partial_bytes(knobs)


# Contexts below the first are over before an uneven share of them counts. Up to the second, requests of other lengths,
# which clusters do not help, take little longer.
_SHORT, _EVEN = 1024, 4096
_FEW = 512  # tokens of E4M3 up to which many warps convert sooner than several blocks
# Tokens times KV heads from which on warps of two tiles each are quicker than two blocks that read the same.
_ONCE = 8 * 4096
# Beyond this one request keeps more multiprocessors busy than clusters of eight blocks a KV head do.
_LONG = 16384
# Of old tokens that a block reads: three quarters of what blocks of an H200 do.
_BLOCK_GBPS = 34


def heuristic(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    """A block a window, or a short context; a cluster for one request; for more, an even share of all tokens."""
    items, team = problem.batch * problem.kv_heads, rows_for(problem) // 16
    knobs: dict[str, Any] = {"pdl": "pdl" in arch.features, "parts": 1, "warps": 4, "keys": 32}
    if arch.shared_bytes < 200 << 10:
        knobs |= {"keys": 16, "reduction": "none"}
        if not 0 < problem.window <= 512:
            parts = _parts(problem, arch, multiprocessors)
            knobs |= {"reduction": "cluster" if parts > 1 else "none" if parts else "global", "parts": parts or 1}
        return _within(problem, arch, knobs, stages=4)
    full = items * 2 > multiprocessors  # more blocks than a multiprocessor has at a time hide each other's ends
    crowded = items > 2 * multiprocessors and team == 1
    if 0 < problem.window <= 512 or (problem.context <= _SHORT and full):
        knobs |= {"reduction": "none"}
        short = 0 < problem.window <= 256 and problem.window < problem.context
        if crowded and short and problem.head_dim <= 64:  # smaller blocks, whose begins and ends others hide
            shape, stages = ({"warps": 3}, 2) if problem.cache == "same" else ({"warps": 2}, 4)
            return _within(problem, arch, knobs | shape | {"keys": 16, "blocks_per_sm": 6}, stages)
        if crowded:
            return _within(problem, arch, knobs | {"keys": 16, "blocks_per_sm": 4}, stages=2)
        if not problem.window and problem.cache == "e4m3" and problem.context <= _FEW and team == 1:
            return _within(problem, arch, knobs | {"warps": 8, "keys": 16, "blocks_per_sm": 1}, stages=2)
        if not problem.window:
            return _within(problem, arch, knobs | {"blocks_per_sm": 2}, stages=3)
        # The ring holds the whole window and the new tokens, where it can: one step.
        split, one_step = _split(problem, multiprocessors, blocks=1), problem.window <= 8 * 32 - 8
        ahead = _reads_ahead(problem, multiprocessors)
        if problem.cache == "e4m3" and team == 1 and problem.window <= 5 * 2 * 16 - 8:  # few keys a warp to convert
            if ahead:
                return _within(problem, arch, knobs | {"ahead": True, "warps": 5, "blocks_per_sm": 1}, stages=1)
            return _within(problem, arch, knobs | {"warps": 5, "keys": 16, "blocks_per_sm": 1}, stages=2)
        knobs |= {"warps": 8, "blocks_per_sm": 1, "group_split": split}
        if not one_step:
            return _within(problem, arch, knobs | {"keys": 16}, stages=2)
        if ahead:
            knobs["ahead"] = True
        elif problem.cache == "same" and team == split and problem.head_dim <= 64:
            knobs["blocks_per_sm"] = 2  # so that blocks of two calls share a multiprocessor
        return _within(problem, arch, knobs, stages=1)
    if problem.context <= 8 * 32 and _reads_ahead(problem, multiprocessors):  # one step, which nothing is merged with
        return _within(problem, arch, knobs | {"reduction": "none", "warps": 8, "ahead": True}, stages=1)
    if shared_out := _cluster(problem, arch, multiprocessors):
        return _within(problem, arch, knobs | shared_out, shared_out["stages"])
    knobs |= {"reduction": "global"}
    if crowded:
        shape = {"warps": 2, "blocks_per_sm": 4} if problem.cache == "same" else {"warps": 4, "blocks_per_sm": 2}
        return _within(problem, arch, knobs | shape, stages=3)
    return _within(problem, arch, knobs | {"warps": 8 if team == 1 else 4, "blocks_per_sm": 1}, stages=3)


def _reads_ahead(problem: AttentionProblem, multiprocessors: int) -> bool:
    """Whether warps read their first operands while q is on its way: of one request, whose heads have few rows."""
    return (
        rows_for(problem) == 16 and problem.head_dim <= 64 and problem.batch * problem.kv_heads * 8 <= multiprocessors
    )


def _split(problem: AttentionProblem, multiprocessors: int, blocks: int) -> int:
    """Blocks that share a KV head's query heads, 16 rows each, where `blocks` of each leave multiprocessors idle."""
    items, team = problem.batch * problem.kv_heads, rows_for(problem) // 16
    return team if team in (2, 4) and problem.group % team == 0 and items * team * blocks <= multiprocessors else 1


def _cluster(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> dict[str, Any] | None:
    """Clusters on half of the multiprocessors, for a few requests: they read as fast, and fewer parts are merged."""
    items, team = problem.batch * problem.kv_heads, rows_for(problem) // 16
    if problem.context > (_LONG if items * 8 <= multiprocessors else _EVEN) or "cluster" not in arch.features:
        return None
    found = {"reduction": "cluster", "blocks_per_sm": 1, "warps": 8, "keys": 32, "stages": 3}
    # Keys are read once for rows of several tokens by warps of two tiles each, which pays where reading takes longest.
    crowded = items * 2 > multiprocessors  # with each request's blocks
    if team in (2, 4) and problem.head_dim <= 64 and problem.context > _SHORT and (problem.cache == "same" or crowded):
        split = team // 2
        fit = [parts for parts in (2, 4, 8) if items * split * parts * 2 <= multiprocessors]
        found |= {"group_split": split, "row_tiles": 2}
        if items * problem.context >= _ONCE and fit:
            return found | {"parts": fit[-1]}
        if items * problem.context >= _ONCE and items * split <= multiprocessors:  # two blocks a multiprocessor
            return found | {"parts": 2, "warps": 4, "stages": 2}
        found["row_tiles"] = 1
        if team == 2 and items * 2 * 4 * 2 <= multiprocessors:
            return found | {"group_split": 2, "parts": 4, "keys": 16}
    split = _split(problem, multiprocessors, blocks=2)
    if items * split * 2 > multiprocessors:
        return None
    found |= {"group_split": split}
    fit = [parts for parts in (2, 4, 8) if items * split * parts * 2 <= multiprocessors]
    if not fit:
        return found | {"parts": 2, "stages": 3 if split == 1 else 2}
    for keys in (32, 64):  # all of a short context is one step of four blocks, or of E4M3 two of eight
        if problem.context <= 4 * 8 * keys and 4 in fit:
            if keys == 64 and problem.cache == "e4m3":
                return found | {"parts": fit[-1] if team == 1 else 4, "stages": 2}
            return found | {"parts": 4, "keys": keys, "stages": 1}
    if problem.cache == "same" and _reads_ahead(problem, multiprocessors):
        found["ahead"] = True
    return found | {"parts": fit[-1]}


def _parts(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> int:
    """Blocks a (request, KV head) where those of one request alone use up the memory bandwidth; 0 where they do not.

    The fewest of which all requests together have twice as many as that takes, or else as many as there is room for.
    """
    offered = (1, 2, 4, 8) if "cluster" in arch.features else (1,)
    enough = [parts for parts in offered if problem.kv_heads * parts * _BLOCK_GBPS >= arch.memory_gbps]
    items = problem.batch * problem.kv_heads
    fit = [parts for parts in enough if items * parts <= multiprocessors]
    if not fit:
        return int(1 in enough)
    return next((parts for parts in fit if items * parts * _BLOCK_GBPS >= 2 * arch.memory_gbps), fit[-1])


def _within(problem: AttentionProblem, arch: Arch, knobs: dict[str, Any], stages: int) -> dict[str, Any]:
    """The knobs, whose `warps` are for 16 rows, for those of the problem: as many teams, until 16 warps make a block.

    There are fewer old tokens at a time, fewer stages, blocks or teams until shared memory and registers hold them;
    where they never do, the blocks of a cluster, which take rows of each other, are not one, and then blocks share the
    rows.
    """
    given = fixed(problem)
    team = given["rows"] // 16 // knobs.get("group_split", 1) // knobs.get("row_tiles", 1)
    most = max(1, min(knobs["warps"], 16 // team))
    for teams in sorted({most, min(most, 2), 1}, reverse=True):
        for blocks in sorted({knobs.get("blocks_per_sm", 1), 1}, reverse=True):
            for keys, count in ((knobs["keys"], stages), (16, 4), (16, 3), (16, 2)):
                found = {"keys": keys, "stages": count, "warps": teams * team, "blocks_per_sm": blocks}
                if DECODE.legal(arch, **given, **knobs | found):
                    return knobs | found
    if knobs["reduction"] == "cluster":
        alone = {"reduction": "global", "parts": 1, "group_split": 1, "row_tiles": 1}
        return _within(problem, arch, knobs | alone, stages)
    for split in (2, 4, 8):  # blocks that share the rows need less each
        if knobs.get("group_split", 1) < split <= given["rows"] // 16 and problem.group % split == 0:
            with contextlib.suppress(KnobError):
                return _within(problem, arch, knobs | {"group_split": split, "row_tiles": 1}, stages)
    least = {"keys": 16, "stages": 2, "warps": team, "blocks_per_sm": 1}
    DECODE.variant(arch, **given, **knobs | least)  # says what does not fit
    return knobs


def candidates(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs that tuning tries."""
    pdl, whole = "pdl" in arch.features, rows_for(problem) // 16
    shapes = [
        {"warps": warps * whole // split // tiles, "keys": keys, "stages": stages, "blocks_per_sm": blocks, "pdl": pdl,
         "group_split": split, "row_tiles": tiles}
        for warps, keys, stages in (
            (4, 32, 3), (4, 32, 2), (8, 32, 2), (8, 16, 2), (8, 16, 3), (4, 16, 3), (4, 16, 4), (2, 32, 3), (5, 32, 2),
            (5, 16, 2), (4, 64, 3), (1, 32, 3), (1, 16, 4), (8, 32, 3), (8, 16, 5), (4, 64, 1), (8, 64, 1), (8, 32, 1),
        )
        for blocks in (1, 2, 4)
        for split, tiles in itertools.product((1, 2, 4), (1, 2)) if whole % (split * tiles) == 0
    ]  # fmt: skip
    reductions: list[dict[str, Any]] = [{"reduction": "global", "parts": 1}, {"reduction": "none", "parts": 1}]
    if "cluster" in arch.features:
        alone = problem.batch * problem.kv_heads * 16 <= multiprocessors  # clusters of 16 have a place
        offer = (2, 4, 8, 16) if alone else (2, 4, 8)
        reductions += [{"reduction": "cluster", "parts": parts} for parts in offer]
    offered = [reduction | shape for shape in shapes for reduction in reductions]
    return [knobs for knobs in offered if DECODE.legal(arch, **fixed(problem), **knobs)]
