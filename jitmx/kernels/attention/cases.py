"""`attention`: launches with known results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jitmx.kernels.attention.drawn import FAR_TOKENS, Asked, drawn
from jitmx.kernels.attention.problem import AttentionProblem, with_defaults
from jitmx.kernels.attention.reference import Array
from jitmx.registry.case import Buffer, Case, between, deviation, judged, relative_l2
from jitmx.registry.launch import Launch
from jitmx.registry.spec import MAX_SIZE

AGAIN = 1000  # added to a seed, for the same launch on other inputs
GATE = {"same": 4e-3, "e4m3": 6e-3}
FP16_SUMS_GATE = 1e-2  # q k in fp16: what half a unit of a large logit makes of its weight


def case(knobs: Any, asked: Asked, seed: int, geometry: Callable[[AttentionProblem], Launch]) -> Case:
    """A launch of attention on random inputs.

    Args:
        geometry: of a launch for a problem.
    """
    knobs = SimpleNamespace(**with_defaults(knobs))
    launch = geometry(asked.problem)
    inputs = drawn(knobs, asked, seed)
    values = inputs.values
    if launch.workspace:
        values["workspace"] = Buffer(np.zeros(launch.workspace, np.uint8), scratch=True)
    wanted = list(inputs.caches.values())
    gate = GATE[knobs.cache] if knobs.qk == "qk_fp32" else FP16_SUMS_GATE

    def check(found: Sequence[Array]) -> float:
        *caches, out = found
        for cache, right in zip(caches, wanted, strict=True):
            if (cache.view(np.uint8) != right.view(np.uint8)).any():
                return float("inf")
        if not between(out, inputs.out, inputs.level).all():
            return float("inf")
        return judged(relative_l2(out, inputs.out), deviation(out, inputs.out, inputs.bound), gate)

    return Case(
        name=asked.name,
        launch=launch,
        values=values,
        check=check,
        gate=gate,
        resident=launch.blocks if launch.cluster == 1 and launch.workspace else None,
        sides=inputs.sides,
        fixed=("requests", "kv_heads"),
        again=lambda: case(knobs, asked, seed + AGAIN, geometry),
    )


def append_case(knobs: Any, asked: Asked, seed: int, geometry: Callable[[AttentionProblem], Launch]) -> Case:
    """A launch on random inputs that writes new k and v to the cache, and nothing else."""
    inputs = drawn(SimpleNamespace(**{**with_defaults(knobs), "append": True}), asked, seed)
    unused = ("q", "out", "block_table") if asked.explicit else ("q", "out")
    early = {"k_cache": False, "v_cache": False}
    values = {
        name: dataclasses.replace(item, early=early.get(name, item.early)) if isinstance(item, Buffer) else item
        for name, item in inputs.values.items()
        if name not in unused
    }

    def check(found: Sequence[Array]) -> float:
        same = [
            (x.view(np.uint8) == y.view(np.uint8)).all() for x, y in zip(found, inputs.caches.values(), strict=True)
        ]
        return 0.0 if all(same) else float("inf")

    sides = {name: inputs.sides[name] for name in ("a token alone", "a page that is full")}
    return Case(asked.name, geometry(asked.problem), values, check, 0.0, sides=sides)


LEAST = 256  # old tokens that a block takes before others share a request (attention/work.cuh)


def decode_cases(knobs: Any, launch: Callable[[AttentionProblem, int], Launch], most_queries: int) -> Iterator[Case]:
    """Requests of no old token, of a part of a round, of rounds of every warp and of many of each block.

    Args:
        launch: for a problem on so many multiprocessors.
    """
    step = knobs.keys * knobs.warps * 16 * knobs.row_tiles // (knobs.rows // knobs.group_split)
    share = max(step, LEAST)
    long = {"cluster": knobs.parts, "global": 2, "none": 0}[knobs.reduction] * share + step // 2 + 3
    # Within a window too, a ring goes on by two steps whose pages it finds on its way.
    long = max(long, step * (knobs.stages + 1 + knobs.windowed) + 5)
    window = long - step // 2 - 7
    new = min(most_queries, 5)

    def on(multiprocessors: int) -> Callable[[AttentionProblem], Launch]:
        return lambda problem: launch(problem, multiprocessors)

    yield case(
        knobs,
        Asked("ragged", ((0, 1), (long, new), (-1, 1), (window - 1, 1), (knobs.page_size, most_queries)), window=window,
              sinks=(0.5, -np.inf, 3.0, 30.0), null_slots=True),
        0, on(7),
    )  # fmt: skip
    yield case(
        knobs,
        Asked("explicit slots and positions, sharp", ((window, most_queries), (3, min(new, 2))), 3, window=window,
              explicit=True, large=4.0, soft_cap=30.0, sinks=(80.0, 0.0, -5.0)),
        1, on(7),
    )  # fmt: skip
    # So many new tokens that vectors of keys end, and those of values begin, halfway through each round of the threads.
    vectors = (knobs.group + 1) * knobs.head_dim // 8
    ends = {round_ * 16 * knobs.warps // vectors for round_ in (1, 3, 5)}
    ends |= {33, most_queries} if most_queries > 32 else set()  # and more than the bits of a word
    fresh = tuple((0, count) for count in sorted({new, *ends}) if 0 < count <= most_queries)
    yield case(
        knobs,
        Asked("a window of one", ((step + 2, 1), *fresh), 1, window=1, sinks=(-np.inf,), first=True, loud=True),
        2,
        on(7),
    )
    if knobs.parts > 2:  # not all parts of a request, whose rows these do not divide
        some = ((2 * share + 5, new), (share + 1, most_queries), (share + step, 1))
        yield case(knobs, Asked("a part that has nothing", some, 1, window=3 * share), 10, on(7))
    # With a cap that most logits are far beyond.
    others = ((step + 2, 1), (5, most_queries + 1), (7, 0), (-1, new), (4, new))
    capped = Asked("requests of other launches", others, 1, window, most_queries=most_queries, soft_cap=0.02)
    yield case(knobs, capped, 11, on(7))
    # Tiles of which a row sees all old tokens but the last, or but the first; the last request fills the last page that
    # the table has. Weights are about the same.
    few, wide = min(new, 3), 3 * step
    full = (-(-(wide + 17) // knobs.page_size) | 1) * knobs.page_size - 1  # and no more than half of a run of 32
    edges = ((knobs.keys - 1, 1), (wide + 16, 1), (wide + 17 - few, few), (full, 1))
    three = -(-3 // knobs.group)  # KV heads of query heads that have these sinks
    level = Asked("edges", edges, three, window=wide, sinks=(0.0, -2.0, -np.inf), large=0.1, level=True)
    yield case(knobs, level, 12, on(7))
    if knobs.windowed:  # which ends among the last old tokens that a second ring has
        brief = Asked("a short window", ((29 - few, few), (28, 1)), 1, window=12, sinks=(0.0,), large=0.1)
        yield case(knobs, brief, 14, on(7))
    if knobs.mask and knobs.windowed:
        tree = Asked(
            "a window within a tree", ((step + 2, new), (1, most_queries), (5, new)), 1, window=1, explicit=True
        )
        yield case(knobs, tree, 7, on(7))
    if knobs.cache == "e4m3" and knobs.dtype == "bf16":
        yield case(knobs, Asked("q beyond fp16", ((step, 1), (3, new)), 1, window=window, beyond=True), 8, on(7))
    if knobs.qk == "qk_fp32":
        sunk = ((3 * share + 5, new), (window - 1, 1), (0, 1))
        yield case(
            knobs, Asked("low logits", sunk, 1, window=window, soft_cap=1e3, sinks=(-np.inf,), sunk=True), 9, on(7)
        )
        late = ((2 * step, new), (2 * step - 1, new))  # of a step of every ring, and another
        still = Asked("rows that rise beside others", late, 1, window=MAX_SIZE, soft_cap=1e4, large=16.0, still=True)
        yield case(knobs, still, 13, on(7))
    far = ((3, 1), (knobs.page_size + 1 + (FAR_TOKENS if knobs.windowed else 0), 1))
    yield case(
        knobs, Asked("pages far apart, slots are given", far, 2, 9, explicit=True, far=True, large=0.1), 5, on(7)
    )
    yield case(knobs, Asked("pages far apart", far, 1, window=9, far=True, large=0.1), 6, on(7))
    # Of the last request values are in no sum but that of their own token.
    lost = Asked("no numbers", ((step + 2, min(new, 2)), (step + 2, 1), (step + 5, 1)), 1, window=MAX_SIZE, lost=True)
    yield case(knobs, lost, 15, on(7))
    if knobs.reduction == "global":
        # A block has steps enough for its ring to go on by some whose pages it finds on its way.
        yield case(knobs, Asked("one block", ((step * (knobs.stages + 3), 1),), 1, MAX_SIZE), 16, on(1))
        # The last blocks of a request have larger logits than those that are merged before.
        rising = Asked("many blocks a request", ((12 * share - 7, 1),), 1, 12 * share, soft_cap=30.0, rising=True)
        yield case(knobs, rising, 3, on(12))
        # Rounds are counted by lanes, 32 requests at a time, of which most have nothing new.
        many = tuple((3 * share if i == 66 else i % 3 * 7, int(i % 11 == 0)) for i in range(75))
        yield case(knobs, Asked("many requests", many, 1, window=9 * step), 4, on(7))


def append_cases(knobs: Any, launch: Callable[[AttentionProblem], Launch]) -> Iterator[Case]:
    """Slots and positions that are given, and those that are not; requests of no old token, and padding."""
    page = knobs.page_size
    ragged = ((0, 1), (-1, 2), (page - 1, 3), (page, 1), (2 * page + 5, page + 2))
    yield append_case(knobs, Asked("ragged", ragged, 3), 0, launch)
    heads = 512 // knobs.head_dim + 1  # more than two values of eight a lane
    yield append_case(knobs, Asked("slots are given", ragged[2:4], heads, null_slots=True, loud=True), 1, launch)
    yield append_case(knobs, Asked("slots and positions are given", ragged, 2, explicit=True, first=True), 2, launch)
    # Requests with fewer old tokens than others have new ones before; and more tokens than warps, twice.
    behind = (*ragged, (0, 2), (3, 1), (1, 64))
    yield append_case(knobs, Asked("positions are given", behind, 1, placed=True, first=True), 4, launch)
    many = tuple((i % 3 * 7, int(i % 5 == 0) + int(i == 69)) for i in range(75))  # of which most have nothing new
    yield append_case(knobs, Asked("many requests", many, 1), 6, launch)
    yield append_case(knobs, Asked("pages far apart", ((0, 2), (page + 1, 1)), 2, far=True), 3, launch)
    lost = Asked("no numbers", ((3, 1), (page, 3)), 2, lost=True)
    yield append_case(knobs, lost, 7, launch)
    given = Asked("pages far apart, slots and positions are given", ((0, 2), (page + 1, 1)), 2, explicit=True, far=True)
    yield append_case(knobs, given, 5, launch)


def prefill_cases(knobs: Any, launch: Callable[[AttentionProblem], Launch]) -> Iterator[Case]:
    """Requests of one token, of several tiles of rows, on and beside the borders of tiles of keys and of windows.

    A window has more tiles of keys than the ring.
    """
    knobs = SimpleNamespace(**with_defaults(knobs))
    keys, tokens = knobs.keys, -(-knobs.rows // knobs.group)
    window = keys * knobs.stages + keys // 2 + 5
    # Beside requests as they come: tiles of which a row sees all keys but the last or but the first, or the last alone.
    ragged = ((0, 1), (3, tokens + 2), (-1, 2), (2 * keys - 1, 1), (window - 1, 1))
    # The last but one: tokens of the first tile of rows fill a page, and there is one more behind them. The last: of a
    # warp's tokens the last alone sees a tile.
    old = -tokens % 16 + (16 if (tokens + -tokens % 16) % keys == 0 else 0)
    alone = max(16 * getattr(knobs, "tiles", 1) // knobs.group, 1)
    edges = (
        (2 * keys - 2, 2), (window + 15, 2), (window + 14, tokens + 1), (window + 62, 2), (window + 1, tokens),
        (old, tokens + 1), (2 * keys + 1 - alone, alone),
    )  # fmt: skip
    yield case(
        knobs,
        Asked("ragged", ragged, 1, window=window, sinks=(0.5, -np.inf, 3.0, 30.0)),
        0, launch,
    )  # fmt: skip
    # Weights are about the same, so that a key too many or too few shows in every row.
    three = -(-3 // knobs.group)  # KV heads of query heads that have these sinks
    level = Asked("edges", edges, three, window=window, sinks=(0.0, -2.0, -np.inf), large=0.1, level=True)
    yield case(knobs, level, 5, launch)
    yield case(
        knobs, Asked("bright edges", edges[1:5], 1, window=window, sinks=(0.0,), large=0.1, bright=True), 6, launch
    )
    if knobs.qk == "qk_fp32":
        sunk = ((2 * keys + 5, tokens), (3, 2))
        low = Asked("low logits", sunk, 1, window=window, soft_cap=1e3, sinks=(-np.inf,), sunk=True)
        yield case(knobs, low, 8, launch)
        # Rings go round thrice, and the last request fills the last page that the table has.
        full = -(-(keys * (3 * knobs.stages + 1) + 6) // knobs.page_size) * knobs.page_size - 1
        rising = ((2 * keys, tokens), (3 * keys, 2), (full, 1))
        still = Asked("rows that rise beside others", rising, 1, window=MAX_SIZE, soft_cap=1e4, large=16.0, still=True)
        yield case(knobs, still, 7, launch)
    page = knobs.page_size
    chunk = ((page * 2 + keys + 1, tokens), (window, 3), (5, 2), (-1, 3), (keys - 3, 3), (page, 4))
    large = 16.0 if knobs.qk == "qk_fp32" else 4.0  # powers of logits are beyond fp32, but relative to the largest
    yield case(
        knobs,
        Asked("a chunk behind a prefix, positions are given, sharp", chunk, 2, window=window, explicit=True,
              large=large, soft_cap=30.0, sinks=(80.0, 0.0, -5.0), least_queries=3),
        1, launch,
    )  # fmt: skip
    # Of the third the last row's keys begin tiles behind the first's.
    one = ((keys + 2, 1), (0, 3), (20, tokens + 1), (5, 8 * tokens + 3))
    capped = Asked("a window of one", one, 1, window=1, sinks=(-np.inf,), first=True, soft_cap=0.02)
    yield case(knobs, capped, 2, launch)
    if knobs.cache == "e4m3" and knobs.dtype == "bf16":
        yield case(knobs, Asked("q beyond fp16", ((5, 2),), 1, window=window, beyond=True), 4, launch)
    far = ((3, 1), (keys + 15 + (FAR_TOKENS if knobs.windowed else 0), 2))
    yield case(knobs, Asked("pages far apart", far, 2, window=keys, far=True), 3, launch)
    given = Asked("pages far apart, positions are given", far, 2, window=keys, explicit=True, far=True)
    yield case(knobs, given, 9, launch)
    lost = Asked("no numbers", ((2 * keys + 3, 2), (keys + 3, tokens + 1)), 1, window=MAX_SIZE, lost=True)
    yield case(knobs, lost, 10, launch)
