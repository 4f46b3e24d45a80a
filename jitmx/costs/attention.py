"""The cost of attention to a paged cache: keys and values once, steps of 16 tokens, and the merge of parts."""

from __future__ import annotations

from collections.abc import Iterator

from jitmx import kernels
from jitmx.costs.work import Cost, Probe, Work
from jitmx.kernels.attention.cases import case
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
        return Work(
            bytes=float(cached + q), flops=flops, tensor="wgmma" if name == "wgmma" else "mma", blocks=launch.blocks,
            busy=min(launch.blocks, multiprocessors), fills=1,
            powers=problem.batch * heads * problem.group * pairs(problem),
        )  # fmt: skip
    items, at_once = problem.batch * heads * knobs.group_split, multiprocessors * knobs.blocks_per_sm
    busy = min(launch.blocks, multiprocessors)
    share, rings = _share(variant, problem, launch.blocks), knobs.warps * knobs.group_split * 16 // knobs.rows
    chunks = -(-share // knobs.keys)
    active = min(rings, chunks) * knobs.warps / rings  # warps of a block
    return Work(
        bytes=float(cached + q + (new + written) * problem.append),
        flops=flops * knobs.rows / (problem.queries * problem.group),
        early=float(cached) * (2 * launch.blocks <= at_once),
        units=launch.blocks * chunks * knobs.keys / _STEP * knobs.rows / 16 / knobs.group_split,
        blocks=launch.blocks,
        busy=busy,
        warps=active * -(-min(launch.blocks, at_once) // multiprocessors),
        rounds=max(1.0, items / launch.blocks, launch.blocks / at_once),
        # Blocks of the next launch find their pages beside these where a multiprocessor has room for both.
        fills=2 if 2 * launch.blocks <= at_once else 3,
        clusters=int(knobs.reduction == "cluster"),
        merges=int(knobs.reduction == "global"),
        beside=2 * launch.blocks <= multiprocessors,
    )


def _share(variant: Variant, problem: AttentionProblem, blocks: int) -> float:
    """Tokens that a block takes of the (request, KV head) that it has, or of all."""
    knobs, tokens = variant.knobs, seen(problem)
    items = problem.batch * problem.kv_heads * knobs.group_split
    return float(tokens * items / blocks if knobs.reduction == "global" else tokens / knobs.parts)


def probes(variant: Variant, problem: AttentionProblem) -> Iterator[Probe]:
    """One request and one KV head, of a context that its blocks take in two rounds, and in three."""
    knobs = variant.knobs
    if variant.spec.name != "decode":
        return
    together = knobs.warps * knobs.keys * knobs.group_split * 16 // knobs.rows
    for rounds in (2, 3):
        context = rounds * knobs.parts * together
        asked = Asked(
            f"{context} tokens", ((context - problem.queries, problem.queries),), kv_heads=1,
            window=context if knobs.windowed else 0,
        )  # fmt: skip
        counted = case(knobs, asked, rounds, lambda one: kernels.family("attention").launch(variant, one, 1))
        yield Probe(counted, context / _STEP * knobs.rows / 16)


COST = Cost(work, probes, lambda variant, problem: (problem.queries,))
