"""The cost of attention to a paged cache: keys and values once, steps of 16 tokens, and the merge of parts."""

from __future__ import annotations

from collections.abc import Iterator

from jitmx import kernels
from jitmx.costs import cards
from jitmx.costs.work import Cost, Probe, Work
from jitmx.kernels.attention import decode
from jitmx.kernels.attention.cases import LEAST, case
from jitmx.kernels.attention.drawn import Asked
from jitmx.kernels.attention.problem import AttentionProblem
from jitmx.registry.spec import Variant

_STEP = 16  # tokens of the cache that one instruction takes


def seen(problem: AttentionProblem) -> int:
    """Tokens of a request that its last new token attends to, as the cache has them."""
    return min(problem.context, problem.window + problem.queries - 1) if problem.window else problem.context


def pairs(problem: AttentionProblem) -> float:
    """Pairs of a new token and one that it attends to, of a request and a query head."""
    q, window, context = problem.queries, problem.window or problem.context, problem.context
    before = context - q
    return float(sum(min(window, before + 1 + i) for i in range(q))) if q <= 4096 else _many(q, window, before)


def _many(q: int, window: int, before: int) -> float:
    """The same by a formula: those that a growing triangle of sees, then as many as the window lets."""
    growing = max(0, min(q, window - before))
    return growing * (before + (growing + 1) / 2) + (q - growing) * float(window)


def work(variant: Variant, problem: AttentionProblem, _rows: int, multiprocessors: int) -> Work:
    """Of one launch."""
    knobs, name = variant.knobs, variant.spec.name
    wide = 1 if problem.cache == "e4m3" else 2
    tokens, heads = problem.batch * problem.queries, problem.kv_heads
    new = 2 * 2 * tokens * heads * problem.head_dim
    written = 2 * wide * tokens * heads * problem.head_dim
    if name == "append":
        return Work(bytes=float(new + written), busy=multiprocessors)
    launch = kernels.family("attention").launch(variant, problem, multiprocessors)
    q = 2 * 2 * tokens * heads * problem.group * problem.head_dim  # and the output
    cached = 2 * wide * problem.head_dim * heads * problem.batch * seen(problem)
    flops = 4.0 * problem.batch * heads * problem.group * problem.head_dim * pairs(problem)
    if name != "decode":
        # The last of unequal blocks end half a longest one late.
        longest, rounds = seen(problem) * problem.queries / pairs(problem), launch.blocks / multiprocessors
        spread = 1 + longest / 2 / rounds if rounds > 1 else longest
        return Work(
            bytes=float(cached + q), flops=flops, tensor="wgmma" if name == "wgmma" else "mma", blocks=launch.blocks,
            busy=min(launch.blocks, multiprocessors), fills=1, spread=spread,
            powers=problem.batch * heads * problem.group * pairs(problem),
        )  # fmt: skip
    items, each = problem.batch * heads * knobs.group_split, resident(variant)
    at_once = multiprocessors * each
    busy = min(launch.blocks, multiprocessors)
    share, rings = _share(variant, problem, launch.blocks), knobs.warps * knobs.group_split * 16 // knobs.rows
    chunks = -(-share // knobs.keys)
    active = min(rings, chunks) * knobs.warps / rings  # warps of a block
    blocks = -(-min(launch.blocks, at_once) // multiprocessors)  # of a multiprocessor at a time
    beside = 2 * launch.blocks <= multiprocessors
    # Blocks of the next launch find their pages, and ask for tokens, beside these where there is room for both, in
    # whole clusters.
    room = cards.of(variant.arch).room(knobs.parts) * each if knobs.parts > 1 else at_once
    early = 2 * launch.blocks <= room
    crowded = knobs.blocks_per_sm * knobs.warps >= 16  # blocks hide each other's trips
    # Of each row its sums, their base and what they add up to.
    sent = 4.0 * (problem.head_dim + 4) * problem.queries * problem.group / knobs.group_split
    held = rings * knobs.stages * knobs.keys * 2 * wide * problem.head_dim
    return Work(
        bytes=float(cached + q + (new + written) * problem.append),
        flops=flops * knobs.rows / (problem.queries * problem.group),
        early=float(cached) * early,
        units=launch.blocks * chunks * knobs.keys / _STEP * knobs.rows / 16 / knobs.group_split,
        blocks=launch.blocks,
        busy=busy,
        warps=active * blocks,
        block_warps=float(knobs.warps * blocks),
        under_way=float(held * blocks),
        ramp=0.0 if early or beside else min(1.0, knobs.stages / -(-chunks // rings)) / blocks,
        rounds=max(1.0, items / launch.blocks, launch.blocks / at_once),
        fills=2 if early or crowded else 3,
        exchanged=sent * (1 - 1 / knobs.parts),
        clusters=int(knobs.reduction == "cluster"),
        merges=int(launch.blocks > items and knobs.reduction == "global"),
        beside=beside,
    )


# Registers of a thread at most, with steps of up to 32 tokens and with others, where as many are left to it: NVRTC 13.5
# takes 100 to 127 and 152 to 219 for variants of 16 rows.
_REGISTERS = 128, 224


def resident(variant: Variant) -> int:
    """Blocks that a multiprocessor has at a time."""
    knobs, arch = variant.knobs, variant.arch
    few = knobs.keys * knobs.row_tiles <= 32 and knobs.reduction != "global"
    threads = knobs.warps * 32
    by_registers = 65536 // (min(_REGISTERS[not few], decode.most_registers(knobs)) * threads)
    reserved = 1024  # bytes that a block takes beside its own
    by_memory = (arch.shared_bytes + reserved) // (decode.shared_bytes(knobs) + reserved)
    return int(max(knobs.blocks_per_sm, min(by_registers, by_memory)))


def _share(variant: Variant, problem: AttentionProblem, blocks: int) -> float:
    """Tokens that a block takes of the (request, KV head) that it has, or of all."""
    knobs, tokens = variant.knobs, seen(problem)
    items = problem.batch * problem.kv_heads * knobs.group_split
    return float(tokens * items / blocks if knobs.reduction == "global" else tokens / knobs.parts)


def probes(variant: Variant, problem: AttentionProblem) -> Iterator[Probe]:
    """One request, of a context that its blocks take in a few rounds, and in one more: two, or as many as all of them
    have work of; a KV head, or where blocks share all tokens one for each of a multiprocessor's.
    """
    knobs = variant.knobs
    if variant.spec.name != "decode":
        return
    together = knobs.warps * knobs.keys * knobs.group_split * 16 // knobs.rows
    heads = knobs.blocks_per_sm if knobs.reduction == "global" else 1
    least = max(2, -(-LEAST // together))
    for rounds in (least, least + 1):
        context = rounds * knobs.parts * together
        asked = Asked(
            f"{context} tokens", ((context - problem.queries, problem.queries),), kv_heads=heads,
            window=context if knobs.windowed else 0,
        )  # fmt: skip
        counted = case(knobs, asked, rounds, lambda one: kernels.family("attention").launch(variant, one, 1))
        yield Probe(counted, heads * context / _STEP * knobs.rows / 16)


COST = Cost(work, probes, lambda variant, problem: (problem.queries,))
