"""`tree.build`: trees of the best of scored candidates, each behind its root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jitmx.kernels.tree import reference
from jitmx.kernels.tree.plan import planned, sides
from jitmx.kernels.tree.problem import PLAN_FIELDS, SIZES, STARTS, Array, exact, ids, spec, words_of
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

BUILD = spec(
    "build",
    Arguments(
        "BuildArguments",
        reads("scores", "[batch, candidates]; -inf and NaN: no candidate", "float"),
        reads("tokens", "[batch, candidates], int or long long"),
        reads("parents", "[batch, candidates], the candidate before it, or -1: the root", "int"),
        reads("roots", "[batch], tokens, int or long long"),
        STARTS,
        writes("out_tokens", "[batch, nodes]; -1 of padding", "long long"),
        writes("out_parents", "[batch, nodes]; -1 of root and padding", "int"),
        writes("out_candidates", "[batch, nodes]; -1 of root and padding", "int"),
        *PLAN_FIELDS,
        number("candidates_each", "unsigned int", "1 to 4096"),
        *SIZES,
        number("wide", "unsigned int", "bits: 1 roots, 2 tokens, 4 starts are of 64 bits"),
    ),
    threads=256,
    registers=128,
    require=(r"\bREDUX\b",),
)

FIXED = ("candidates_each", "nodes", "words", "levels", "wide")


def built(
    scores: Array, tokens: Array, parents: Array, roots: Array, starts: Array, nodes: int, levels: int
) -> tuple[dict[str, Array], list[reference.Plan]]:
    """What the kernel writes, by field, and the trees."""
    found = [reference.build(*pair, nodes) for pair in zip(scores.tolist(), parents.tolist(), strict=True)]
    trees = [reference.plan(above) for _, above in found]
    there = np.array([[bool(path) for path in tree.paths] for tree in trees])
    candidates = np.where(there, [one for one, _ in found], -1).astype(np.int32)
    out = np.where(candidates >= 0, np.take_along_axis(tokens, np.maximum(candidates, 0), 1), -1).astype(np.int64)
    out[:, 0] = roots
    return {
        "out_tokens": out,
        "out_parents": np.where(there, [above for _, above in found], -1).astype(np.int32),
        "out_candidates": candidates,
        **planned(trees, starts.tolist(), levels),
    }, trees


def beams(batch: int, width: int, depth: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Scores and parents of candidates of a draft: `width` of the root, then as many of each of the best `width`."""
    scores = np.zeros((batch, width + (depth - 1) * width * width), np.float32)
    parents = np.full(scores.shape, -1, np.int32)
    for r in range(batch):
        own = np.log(generator.dirichlet(np.ones(width), 1)[0]).astype(np.float32)
        level = np.arange(width)
        scores[r, :width] = own
        for step in range(1, depth):
            best = level[np.lexsort((level, -scores[r, level]))[:width]]
            level = width + (step - 1) * width * width + np.arange(width * width)
            parents[r, level] = np.repeat(best, width)
            more = np.log(generator.dirichlet(np.ones(width), width)).ravel().astype(np.float32)
            scores[r, level] = scores[r, parents[r, level]] + np.round(more)  # of which many are equal
    return scores, parents


_LEAST, _MOST = 2.0**-149, float(np.finfo(np.float32).max)
# A better score and a worse one. Both zeros are one, of which the first candidates are taken.
_CLOSE = (
    (np.inf, _MOST), (200, 150), (2 * _LEAST, _LEAST), (_LEAST, 0), (0, -_LEAST), (-2000, -3000), (-1, -_MOST),
    (-_MOST, -np.inf), (0, -0.0),
)  # fmt: skip


def _case(
    batch: int, width: int, depth: int, nodes: int, levels: int, wide: int, seed: int, *, spoiled: bool = False,
    placed: bool = True, flat: int = 0, edges: bool = False, led: int = 0, close: bool = False,
) -> Case:  # fmt: skip
    """Candidates of a draft.

    Args:
        spoiled: some have no score, and some one above that of their parent, or a parent behind them.
        flat: candidates of the root alone, whose scores are the same but for those of one thread in four.
        led: of these the best by far, fewer than there are nodes.
        close: of these each request has two scores, which differ where a comparison may not: the last have the better.
        edges: of these the best are the first and the last that all threads take at once, and some between.
    """
    generator = np.random.default_rng(seed)
    batch = len(_CLOSE) if close else batch
    scores, parents = beams(batch, width, depth, generator)
    if flat:
        scores = np.full((batch, flat), -2, np.float32)
        scores[:, np.arange(flat) % 256 < 64] = -1
        scores[:, 3 * np.arange(led)] = 5 + np.arange(led)
        parents = np.full((batch, flat), -1, np.int32)
    if edges:
        first = np.arange(0, flat, 256)
        best = np.unique([*first, *(first + 255), *(first + generator.integers(1, 255, len(first)))])
        scores[:] = -2
        scores[:, best] = generator.permutation(len(best)) / len(best)
    if close:
        for row, (more, less) in zip(scores, _CLOSE, strict=True):
            row[:] = less
            row[generator.choice(np.arange(flat // 2, flat), nodes // 2, replace=False)] = more
    if spoiled:
        nothing = np.where(np.arange(scores.shape[1]) % 2 == 0, -np.inf, np.nan)
        scores[0] = np.where(np.arange(scores.shape[1]) < 3, scores[0], nothing)  # fewer than there are nodes
        scores[1:][generator.random(scores[1:].shape) < 0.2] = np.nan
        lifted = generator.random(scores[1:].shape) < 0.1
        scores[1:][lifted] = 0
        parents[1:][lifted] = generator.choice([scores.shape[1] - 1, 1, 1 << 30], int(lifted.sum()))
    tokens = generator.integers(0, 1 << (33 if wide & 2 else 20), scores.shape)
    roots, starts = generator.integers(0, 1 << 20, batch), generator.integers(0, 1 << 20, batch)
    wanted, trees = built(
        scores, tokens, parents, roots, starts if placed else np.zeros(batch, np.int64), nodes, levels
    )
    outputs, check = exact(wanted)
    values: dict[str, Any] = {
        "scores": Buffer(scores), "tokens": Buffer(ids(tokens, bool(wide & 2))), "parents": Buffer(parents),
        "roots": Buffer(ids(roots, bool(wide & 1))), **outputs, "candidates_each": scores.shape[1], "nodes": nodes,
        "words": words_of(nodes), "levels": levels, "wide": wide,
    }  # fmt: skip
    if placed:
        values["starts"] = Buffer(ids(starts, bool(wide & 4)))
    kept = [np.sort(one[~np.isnan(one)])[::-1] for one in scores]
    return Case(
        name=f"{batch} trees of {nodes} from {scores.shape[1]} candidates",
        launch=Launch(batch),
        values=values,
        check=check,
        gate=0.0,
        sides={
            **sides(trees),
            "a tie at the end": any(len(one) >= nodes and one[nodes - 2] == one[nodes - 1] for one in kept),
            "fewer candidates than nodes": any((one > -np.inf).sum() < nodes - 1 for one in kept),
        },
        fixed=FIXED,
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Drafts of several widths; the last of very many."""
    yield _case(3, 4, 3, 12, 4, 0, 0)
    yield _case(2, 8, 3, 64, 64, 7, 1)
    yield _case(3, 3, 4, 20, 5, 1, 2, spoiled=True)
    yield _case(1, 1, 40, 34, 34, 2, 3, placed=False)
    yield _case(1, 1, 1, 2, 2, 4, 4)
    yield _case(1, 1, 1, 40, 2, 2, 5, flat=4096)
    yield _case(1, 1, 1, 49, 2, 2, 6, flat=4096, edges=True)
    yield _case(1, 1, 1, 40, 2, 2, 7, flat=4096, led=20)
    yield _case(1, 1, 1, 20, 2, 2, 8, flat=64, close=True)
    yield _far()


def _far() -> Case:
    """The last of requests whose scores are over 2^32 bytes."""
    batch, each, nodes = (1 << 18) + 2, 4096, 40
    generator = np.random.default_rng(9)
    scores = generator.standard_normal((1, each)).astype(np.float32)
    parents, tokens = np.full((1, each), -1, np.int32), generator.integers(0, 1 << 20, (1, each))
    wanted, _ = built(scores, tokens, parents, np.array([3]), np.array([9]), nodes, 2)
    outputs, check = exact(wanted)
    values: dict[str, Any] = {
        "scores": Buffer(scores), "tokens": Buffer(tokens), "parents": Buffer(parents), "roots": Buffer(np.array([3])),
        "starts": Buffer(np.array([9])), **outputs,
    }  # fmt: skip
    for name, item in values.items():
        before = (batch - 1) * item.data.nbytes
        values[name] = item.spread([before], before + item.data.nbytes)
    values |= {"candidates_each": each, "nodes": nodes, "words": 2, "levels": 2, "wide": 7}
    return Case(
        name=f"the last of {batch} trees", launch=Launch(batch), values=values, check=check, gate=0.0,
        blocks=(batch - 1,), fixed=FIXED,
    )  # fmt: skip
