"""`tree.move`: keys and values of an accepted path to where the tokens of its sequence lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jitmx.kernels.tree.problem import exact, ids, spec
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

CACHES = 32  # of one launch; the template has as many

MOVE = spec(
    "move",
    Arguments(
        "MoveArguments",
        *(
            writes(f"cache{i}", "[pages, page_size, heads, vectors], in any order but the last", "Vec4")
            for i in range(CACHES)
        ),
        reads("path", "[batch, width], nodes from the root on, then -1", "int"),
        reads("accepted", "[batch], nodes of the path behind the root", "int"),
        reads("starts", "[batch], where the root is in the sequence, int or long long"),
        reads("block_table", "[batch, pages], pages of the cache", "int"),
        number("page_stride", "unsigned long long", "vectors of 16 bytes from a page to the next"),
        number("token_stride", "unsigned long long", "and from a token"),
        number("head_stride", "unsigned long long", "and from a head"),
        number("table_stride", "unsigned long long", "pages of the table from a request to the next"),
        number("pages", "unsigned long long", "of a request"),
        number("page_size", "unsigned int", "tokens of a page"),
        number("heads", "unsigned int"),
        number("vectors", "unsigned int", "of 16 bytes of a head"),
        number("width", "unsigned int", "nodes of a path, 64 at most"),
        number("caches", "unsigned int", f"1 to {CACHES}"),
        number("wide", "unsigned int", "1: starts are of 64 bits"),
    ),
    threads=128,
    registers=96,
    require=(r"\bLDG\.E\..*128", r"\bSTG\.E\..*128"),
)

FIXED = (
    "page_stride", "token_stride", "head_stride", "table_stride", "pages", "page_size", "heads", "vectors", "width",
    "caches", "wide",
)  # fmt: skip


def _case(
    caches: int, heads: int, vectors: int, page: int, width: int, seed: int, *, wide: bool, heads_first: bool = False
) -> Case:
    """Requests of every kind of path, in caches that lie as vLLM's two layouts do."""
    generator = np.random.default_rng(seed)
    batch, nodes = 5, 64
    pages = -(-(40 + nodes) // page)
    all_pages = (batch + 5) * pages + 2
    table = generator.permutation(all_pages)[:-2].reshape(batch + 5, pages).astype(np.int32)
    table, extra = table[:batch], table[batch:]
    starts = generator.integers(0, 40, batch)
    starts[4] = pages * page - 3  # nodes beyond the pages of the table are left
    path = np.full((batch, width), -1, np.int32)
    accepted = np.array([width - 1, 0, width // 2, width - 1, width - 1])
    for r, count in enumerate(accepted):
        path[r, : count + 1] = np.sort(np.append(generator.choice(np.arange(1, nodes), count, replace=False), 0))
    path[3] = np.arange(width)  # nothing moves
    # What lies behind the accepted part does not count, nor what is said to be accepted beyond the width, or before the
    # root, or of a sequence that is padding.
    behind = generator.integers(width, nodes, (batch, width))
    path[1:3] = np.where(path[1:3] < 0, behind[1:3], path[1:3])
    path, accepted = np.concatenate([path, behind[:3], path[:1]]).astype(np.int32), np.append(accepted, [-1, -9, 0, 0])
    accepted[7], accepted[8] = width // 2, width + 70
    path[8] = np.arange(width) + np.where(np.arange(width) < 2 * width // 3, 0, 7)
    path[8, width - width // 8 :] = -1
    # The last one starts beyond the pages of its table, where the lower word alone does not tell.
    path, accepted = np.concatenate([path, path[:1]]), np.append(accepted, width - 1)
    starts = np.concatenate([starts, [3, 5, -1, 0, (1 << 32) + 2 if wide else pages * page + 2]])
    table = np.concatenate([table, extra])
    batch += 5
    shape = (all_pages, heads, page, vectors, 16) if heads_first else (all_pages, page, heads, vectors, 16)
    before = [generator.integers(0, 256, shape, np.uint8) for _ in range(caches)]
    after = [one.copy() for one in before]
    for was, now in zip(before, after, strict=True):
        was, now = (one.swapaxes(1, 2) if heads_first else one for one in (was, now))
        for r, d in np.ndindex(batch, width):
            source, target = starts[r] + path[r, d], starts[r] + d
            if d <= accepted[r] and path[r, d] > d and source < pages * page and starts[r] >= 0:
                now[table[r, target // page], target % page] = was[table[r, source // page], source % page]
    outputs, check = exact({f"cache{i}": one for i, one in enumerate(after)})
    outputs = {name: Buffer(was, output=True, scratch=True) for name, was in zip(outputs, before, strict=True)}
    row = heads * vectors
    values: dict[str, Any] = {
        **outputs, "path": Buffer(path), "accepted": Buffer(accepted.astype(np.int32)),
        "starts": Buffer(ids(starts, wide)), "block_table": Buffer(table), "page_stride": page * row,
        "token_stride": vectors if heads_first else row,
        "head_stride": page * vectors if heads_first else vectors, "table_stride": pages, "pages": pages,
        "page_size": page, "heads": heads, "vectors": vectors, "width": width, "caches": caches, "wide": int(wide),
    }  # fmt: skip
    return Case(
        name=f"{caches} caches of {heads} heads of {16 * vectors} bytes, paths of {width}",
        launch=Launch(batch * caches),
        values=values,
        check=check,
        gate=0.0,
        sides={
            "more than a thread has at once": width > 8,
            "a page to another": page < nodes,
            "more vectors than threads": row > 128,
            "both layouts": heads_first or heads == 1,
            "more nodes than lanes": width > 32,
        },
        fixed=FIXED,
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Caches of few and many heads in both layouts; pages, heads or tokens that are over 2^32 vectors apart."""
    yield _case(2, 2, 8, 16, 9, 0, wide=False)
    yield _case(CACHES, 1, 1, 16, 3, 1, wide=True)
    yield _case(3, 9, 16, 32, 20, 2, wide=True, heads_first=True)
    yield _case(2, 2, 4, 128, 1, 3, wide=False)
    yield _case(1, 1, 2, 16, 50, 4, wide=False)
    yield _far()
    yield _apart("head")
    yield _apart("token")


def _far() -> Case:
    """Pages that lie far behind the first."""
    page, vectors, stride, first = 16, 8, (1 << 16) + 8, 70001  # all of them lie beyond 2^32 vectors
    generator = np.random.default_rng(4)
    before = generator.integers(0, 256, (3, page, 1, vectors, 16), np.uint8)
    after = before.copy()
    after[1, 1], after[1, 2] = before[1, 3], before[2, 2]  # nodes 3 and 18 of a root in a page's first place
    _, check = exact({"cache0": after})
    values: dict[str, Any] = {
        "cache0": Buffer(before, output=True, scratch=True).spread(
            (first + np.arange(3)) * stride * 16, (first + 2) * stride * 16 + before[0].nbytes
        ),
        "path": Buffer(np.array([[0, 3, 18]], np.int32)), "accepted": Buffer(np.array([2], np.int32)),
        "starts": Buffer(np.array([16], np.int32)), "block_table": Buffer((first + np.arange(3, dtype=np.int32))[None]),
        "page_stride": stride, "token_stride": vectors, "head_stride": vectors, "table_stride": 3, "pages": 3,
        "page_size": page, "heads": 1, "vectors": vectors, "width": 3, "caches": 1,
    }  # fmt: skip
    return Case(
        name=f"pages from number {first} on", launch=Launch(1), values=values, check=check, gate=0.0, fixed=FIXED
    )


def _apart(far: str) -> Case:
    """Heads, or tokens of a page, that lie over 2^32 vectors apart; rows of the table that do as well."""
    page, heads, vectors = 16, 2, 2
    strides = {"page": 16 * 32, "token": 16, "head": 4} | {far: (1 << 32) + 64 if far == "head" else 5 << 26}
    generator = np.random.default_rng(6)
    # Of two pages heads and tokens; the request is the second of two.
    before = generator.integers(0, 256, (2, page, heads, vectors, 16), np.uint8)
    after = before.copy()
    after[0, 14], after[0, 15] = before[1, 1], before[1, 15]  # nodes 4 and 18 of a root in place 13
    places = np.indices((2, page, heads))
    at = sum(
        (count * strides[name] for name, count in zip(("page", "token", "head"), places, strict=True)), places[0] * 0
    )
    at *= 16
    _, check = exact({"cache0": after})
    row = (1 << 32) + 8
    values: dict[str, Any] = {
        "cache0": Buffer(before, output=True, scratch=True).spread(at, int(at.max()) + vectors * 16),
        "path": Buffer(np.array([[0, -1, -1], [0, 4, 18]], np.int32)), "accepted": Buffer(np.array([0, 2], np.int32)),
        "starts": Buffer(np.array([0, 13], np.int32)),
        "block_table": Buffer(np.array([[1, 0], [0, 1]], np.int32)).spread([0, row * 4], row * 4 + 8),
        **{f"{name}_stride": stride for name, stride in strides.items()},
        "table_stride": row, "pages": 2, "page_size": page, "heads": heads, "vectors": vectors, "width": 3, "caches": 1,
    }  # fmt: skip
    return Case(name=f"{far}s far apart", launch=Launch(2), values=values, check=check, gate=0.0, fixed=FIXED)
