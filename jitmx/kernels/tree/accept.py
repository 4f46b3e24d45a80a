"""`tree.accept`: how many drafts of a chain a greedy target takes, and what comes behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jitmx.kernels.tree import reference
from jitmx.kernels.tree.problem import Array, exact, ids, spec
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

ACCEPT = spec(
    "accept",
    Arguments(
        "AcceptArguments",
        reads("drafts", "[batch, drafts_each], or those of all requests; int or long long, below 0: fits nowhere"),
        reads("target", "the target's tokens, one row more a request than drafts; int or long long"),
        reads("ends", "[batch], drafts of each request and those before it, or of rows, with a first 0; or 0", "int"),
        reads("positions", "[batch], of each request's first row, int or long long; or 0"),
        reads("requests", "[batch], where the prompt's length of each is; or 0", "long long"),
        reads("lengths", "[batch], tokens of each request that are in this step or before it", "int"),
        reads("prompts", "by request, tokens that are read before one is sampled; or 0", "int"),
        writes("tokens", "[batch, drafts_each + 1]: those accepted, the target's behind them, then -1", "long long"),
        writes("accepted", "[batch], drafts", "int"),
        writes("next_token", "[batch], the target's behind them", "long long"),
        writes("next_positions", "[batch], of that token", "long long"),
        writes("num_sampled", "[batch], or 0", "int"),
        writes("num_rejected", "[batch]", "int"),
        number("drafts_each", "unsigned int", "of a request at most"),
        number(
            "rows_counted", "unsigned int", "1: ends are of rows, and drafts lie in the rows behind those they follow"
        ),
        number("wide", "unsigned int", "bits: 1 drafts, 2 target, 4 positions are of 64 bits"),
    ),
    threads=32,
    require=(r"\bVOTE",),
)

FIXED = ("drafts_each", "rows_counted", "wide")


def accepted(drafts: list[Array], target: list[Array], positions: Array, most: int) -> dict[str, Array]:
    """What the kernel writes, by field; a request without a row of the target has nothing."""
    tokens = [
        reference.accept(own[:most].tolist(), rows.tolist()) if len(rows) else []
        for own, rows in zip(drafts, target, strict=True)
    ]
    counts = np.array([len(one) for one in tokens])
    return {
        "tokens": np.array([reference.filled(one, most + 1) for one in tokens]),
        "accepted": np.maximum(counts - 1, 0).astype(np.int32),
        "next_token": np.array([one[-1] if one else -1 for one in tokens], np.int64),
        "next_positions": positions + counts,
    }


def _requests(counts: list[int], few: int, generator: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Drafts and rows of requests; of some all fit, of some the last does not."""
    target = [generator.integers(0, few, count + 1) for count in counts]
    drafts = []
    for number_, (count, rows) in enumerate(zip(counts, target, strict=True)):
        own = rows[:-1].copy()
        if count and number_ % 3 == 1:
            # The lower word alone may not tell.
            own[generator.integers(0, count)] += 1 << 32 if few > 1 << 32 and number_ % 2 else 1
            own[-1] -= 1
        if count and number_ % 3 == 2:
            own[generator.integers(0, count)] = -1
            rows[generator.integers(0, count)] = -1  # which fits no placeholder
        drafts.append(own)
    return drafts, target


def _sides(counts: list[int], wanted: dict[str, Array], most: int) -> dict[str, bool]:
    taken = wanted["accepted"]
    return {
        "none of some": bool(((taken == 0) & (np.array(counts) > 0)).any()),
        "all": bool(((taken == counts) & (np.array(counts) > 0)).any()),
        "no drafts": 0 in counts,
        "more than a warp's": most > 32 and bool((taken > 32).any()),
        "32": bool((taken == 32).any()),
    }


def _case(
    counts: list[int], most: int, layout: str, wide: int, seed: int, *, reading: bool = False, placed: bool = False,
    wrong: list[int] | None = None,
) -> Case:  # fmt: skip
    """Requests with so many drafts each, -1: none and no row either.

    Args:
        placed: whether there are positions, of 32 bits if `wide` does not say otherwise.
        wrong: of each request the one draft that does not fit; ids are 0 and 1.
    """
    generator = np.random.default_rng(seed)
    few = 1 << (33 if wide & 3 == 3 else 20)
    drafts, target = _requests([max(count, 0) for count in counts], 2 if wrong else few, generator)
    if wrong:
        drafts = [rows[:-1].copy() for rows in target]
        for own, at in zip(drafts, wrong, strict=True):
            own[at] = 1 - own[at]
    target = [rows if count >= 0 else rows[:0] for rows, count in zip(target, counts, strict=True)]
    batch = len(counts)
    placed = placed or wide & 4 != 0
    positions = generator.integers(0, 1 << (40 if wide & 4 else 20), batch) if placed else np.zeros(batch, np.int64)
    wanted = accepted(drafts, target, positions, most)
    rows_counted = layout == "rows"
    if rows_counted:  # a row has its own input: of the first the last token before the drafts
        drafts = [np.concatenate([[7], own])[: len(rows)] for own, rows in zip(drafts, target, strict=True)]
    values: dict[str, Any] = {
        "drafts": Buffer(ids(np.concatenate(drafts), bool(wide & 1))),
        "target": Buffer(ids(np.concatenate(target), bool(wide & 2))),
    }  # fmt: skip
    if layout != "even":
        ends = np.cumsum([len(one) for one in drafts])
        values["ends"] = Buffer(np.concatenate([[0], ends] if rows_counted else [ends]).astype(np.int32))
    if placed:
        values["positions"] = Buffer(ids(positions, bool(wide & 4)))
    if reading:
        prompts = generator.integers(1, 100, batch + 3).astype(np.int32)
        requests = generator.permutation(batch + 3)[:batch]
        lengths = (prompts[requests] + generator.integers(-1, 2, batch)).astype(np.int32)
        lengths[4] = prompts[requests[4]] - 1  # with drafts that do not fit
        behind = lengths >= prompts[requests]
        sampled = np.where(behind, wanted["next_positions"] - positions, 0)
        wanted["num_sampled"] = sampled.astype(np.int32)
        rows = np.array([len(one) for one in target])
        wanted["num_rejected"] = np.where(behind, rows - sampled, 0).astype(np.int32)
        values |= {"requests": Buffer(requests), "lengths": Buffer(lengths), "prompts": Buffer(prompts)}
    outputs, check = exact(wanted)
    values |= outputs | {"drafts_each": most, "rows_counted": int(rows_counted), "wide": wide}
    return Case(
        name=f"{batch} requests of up to {most} drafts, {layout}",
        launch=Launch(batch),
        values=values,
        check=check,
        gate=0.0,
        sides=_sides(counts, wanted, most),
        fixed=FIXED,
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Every layout; the last of very many."""
    yield _case([3] * 7, 3, "even", 0, 0)
    yield _case([0] * 2, 0, "even", 7, 1)
    yield _case([70] * 4, 70, "even", 3, 2)
    yield _case([0, 4, 1, 32, 33, 2, 40, 0, 64, 32], 64, "drafts", 4, 3)
    yield _case([2, 0, -1, 5, 33, 1, 32, 4, -1, 40], 40, "rows", 2, 4, reading=True)
    yield _case([1, 3, 2], 3, "rows", 5, 5)
    yield _case([5, 2, 9, 0, 7], 4, "drafts", 2, 6, placed=True)  # more than are taken
    yield _case([70] * 8, 70, "even", 1, 7, placed=True, wrong=[0, 31, 32, 33, 63, 64, 65, 69])
    yield _far()


def _far() -> Case:
    """The last of requests with so many drafts that those of all are over 2^32 bytes."""
    batch, each = 1 << 20, (1 << 12) + 8
    generator = np.random.default_rng(8)
    rows = generator.integers(0, 1 << 20, each + 1)
    wanted = accepted([rows[:40]], [rows[:41]], np.array([0]), each)
    drafts = rows[None, :each].copy()
    drafts[0, 40] += 1
    outputs, check = exact(wanted)
    values: dict[str, Any] = {"drafts": Buffer(drafts), "target": Buffer(rows[None]), **outputs}
    for name, item in values.items():
        before = (batch - 1) * item.data.nbytes
        values[name] = item.spread([before], before + item.data.nbytes)
    values |= {"drafts_each": each, "wide": 3}
    return Case(
        name=f"the last of {batch} requests", launch=Launch(batch), values=values, check=check, gate=0.0,
        blocks=(batch - 1,), fixed=FIXED,
    )  # fmt: skip
