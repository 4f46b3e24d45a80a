"""The kernels that calls of a layer's attention launch, whatever requests a batch is made of.

A call is chosen for by its requests, the longest of their contexts and the most new tokens of one. Each of these is
asked for at numbers that lie a factor of 1.5 to 4 apart; what is chosen at two of them is taken to be chosen between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import Launch
from jitmx.dispatch.choice import Choice
from jitmx.errors import KnobError
from jitmx.kernels.attention import decode
from jitmx.kernels.attention.problem import ORDER, AttentionProblem
from jitmx.registry.spec import Variant
from jitmx.serving.needed import Needed, told_apart

# A CUDA graph serves requests of any length and has one set of knobs. Few tokens are made behind the longest context
# that a server allows, so graphs are captured as for this many at most: a cluster a KV head is then chosen for one
# request, 2 us quicker than even shares behind 2k tokens and 3 us slower behind 32k, on an H200.
GRAPH_CONTEXT = 16384
# Of numbers of requests each so many is asked for, and those between where the kernels of two differ.
_STRIDE = 4


@dataclass(frozen=True)
class Attention(Needed):
    """A layer's attention to a paged cache.

    Attributes:
        problem: any call of it; `batch` requests and `context` tokens of one are the most there are.
    """

    problem: AttentionProblem

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """Those of any requests with m new tokens in all."""
        for problem in problems(self.problem, m):
            yield from map(Launch, choices(problem, arch, multiprocessors))

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Those of the most tokens: calls of fewer are among them."""

        def of(problem: AttentionProblem) -> Iterator[Variant]:
            return launches(problem, arch, multiprocessors)

        for row in _rows(self.problem, self.rows):
            yield from told_apart(row, {*range(0, len(row), _STRIDE)}, of)


def cached(batch: int, context: int, page_size: int, cache: str) -> AttentionProblem:
    """Calls of a model's attention: requests and tokens of one at most, tokens of a page, and the cache's type."""
    return AttentionProblem(batch=batch, context=context, page_size=page_size, cache=cache)


def launches(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
    """The variant of every launch of one call; order and errors as `choices` has them."""
    return (choice.variant for choice in choices(problem, arch, multiprocessors))


def choices(problem: AttentionProblem, arch: Arch, multiprocessors: int) -> Iterator[Choice]:
    """Every launch of one call, in the order that `jitmx.attention` has them: one, or up to three of many tokens.

    Raises:
        KnobError: no kernel serves the problem.
    """
    chosen = choose.choose("attention", problem, arch, multiprocessors=multiprocessors)
    made = [(ORDER.index(problem.step), chosen)]
    for other in choose.companions(chosen):
        assert isinstance(other.problem, AttentionProblem)
        made.append((ORDER.index(other.problem.step), other))
    yield from (choice for _, choice in sorted(made, key=lambda one: one[0]))


def problems(layer: AttentionProblem, tokens: int) -> Iterator[AttentionProblem]:
    """Calls of a layer, of every kind that differs.

    Args:
        layer: whose `batch` and `context` are the most there are.
        tokens: new ones of all requests, at most.
    """
    return itertools.chain.from_iterable(_rows(layer, tokens))


def _rows(layer: AttentionProblem, tokens: int) -> Iterator[list[AttentionProblem]]:
    """The same in rows of calls that have more and more requests."""
    few = [rows // layer.group for rows in decode.ROWS if rows >= layer.group]
    few = list(dict.fromkeys((1, *(queries for queries in few if queries <= tokens))))
    seen = min(layer.context, layer.window + few[-1]) if layer.window else layer.context
    # Between 1024 and 8192 tokens, knobs change with each doubling.
    bits_of = (bits for bits in range(6, 33) if bits % 2 == 0 or 10 < bits < 14)
    contexts = [1 << bits for bits in bits_of if bits == 6 or 1 << bits < 4 * seen]
    many = [queries for queries in (few[-1] + 1, *(1 << bits for bits in range(5, 25))) if few[-1] < queries]
    many = [queries for queries in many if queries < 2 * tokens]
    batches = list(_upwards(layer.batch))

    def row(batches: Iterable[int], context: int, queries: int) -> list[AttentionProblem]:
        return [replace(layer, batch=batch, context=context, queries=queries) for batch in batches]

    yield from (row(batches, context, queries) for context in contexts for queries in few)
    # How long a context is decides among the kernels of few tokens only, to which short requests are left.
    yield from (row(batches[1:], context, queries) for context in contexts[:-1] for queries in many[:1])
    yield from (row(batches, contexts[-1], queries) for queries in (*many[:1], *many[1::2]))
    longest = 1 << layer.window.bit_length() if layer.window else GRAPH_CONTEXT
    yield row(_captured(layer.batch), min(contexts[-1], GRAPH_CONTEXT, longest), 1)


def _upwards(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 and on to the first that is not below `most`."""
    yield 1
    step = 1
    while step < most:
        yield 2 * step
        if 2 * step < most:
            yield 3 * step
        step *= 2


def _captured(most: int) -> Iterator[int]:
    """Requests that vLLM captures CUDA graphs for by default."""
    yield from (size for size in (*range(8, 256, 8), *range(256, 1025, 16)) if size <= most)


def lacking(layer: AttentionProblem, arch: Arch) -> str:
    """What kernels lack for a layer on a target, in words; empty where they serve it.

    Args:
        layer: any call of it.
    """
    try:
        for queries in (1, 4096):
            problem = replace(layer, queries=queries, batch=2)
            assert all(launches(problem, arch, arch.multiprocessors))
    except KnobError as error:
        return f"no kernel serves it on {arch}: {error}"
    return ""
