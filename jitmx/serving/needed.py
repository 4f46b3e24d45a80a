"""What a layer of a served model launches: while its weights are loaded, and in calls of up to so many tokens."""

from __future__ import annotations

import bisect
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from jitmx import arch as arches
from jitmx import kernels, resources, settings
from jitmx.arch import Arch
from jitmx.dispatch import choose, tactics
from jitmx.dispatch.call import Launch
from jitmx.kernels import Problem
from jitmx.registry.spec import Variant

Call = TypeVar("Call")

# Tokens up to which each number is told from the next; beyond, every 32nd part of a number.
_EVERY = 128
# Of those numbers each so many is asked for, and whatever lies between two whose kernels differ.
_STRIDE = 8


@dataclass(frozen=True)
class Needed(ABC):
    """What decides the kernels of a layer.

    Attributes:
        arch: SM target.
        device: CUDA device number, or None where there is none to load onto.
        rows: tokens of a call, at most.
        families: whose tables may say something else of some numbers of tokens.
    """

    families: ClassVar[tuple[str, ...]] = ()
    arch: str
    device: int | None
    rows: int

    @abstractmethod
    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """Every launch of a call with m tokens, with why and how often."""

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The variants of every launch of a call with m tokens."""
        return (launch.choice.variant for launch in self.made(m, arch, multiprocessors))

    def numbers(self) -> list[int]:
        """Numbers of tokens that are told apart, the last of them `rows`.

        Of more tokens than the largest launch takes, what is left is a launch of its own: there it begins anew, once.
        """
        found, m, whole = [], 0, self._whole
        while m < self.rows:
            rest = m - whole if whole <= m < 2 * whole else m
            m = min(whole if m < whole < self.rows else self.rows, m + max(1, rest // _EVERY * _EVERY // 32))
            found.append(m)
        return found

    @property
    def _whole(self) -> int:
        """Tokens of the largest launch."""
        most = [kernel.max_rows or 0 for family in self.families for kernel in kernels.family(family).kernels]
        return max(most, default=0) or self.rows

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Every launch of every call."""
        numbers = self.numbers()
        edges = _edges(self.families, arch)
        edges |= {self._whole + edge for edge in edges}
        places = {*range(len(numbers))[::_STRIDE]}
        places |= {bisect.bisect_left(numbers, edge) for edge in edges if edge <= self.rows}
        return told_apart(numbers, places, lambda m: self.launches(m, arch, multiprocessors))


def told_apart(calls: Sequence[Call], places: set[int], ask: Callable[[Call], Iterable[Variant]]) -> Iterator[Variant]:
    """Every variant of calls in a row: of those in some places, of the last, and of those between two that differ.

    Args:
        ask: the variants of a call.
    """
    found: dict[int, dict[str, Variant]] = {}

    def asked(at: int) -> dict[str, Variant]:
        if at not in found:
            found[at] = {variant.name: variant for variant in ask(calls[at])}
        return found[at]

    def between(low: int, high: int) -> None:
        if asked(low).keys() != asked(high).keys() and high - low > 1:
            middle = (low + high) // 2
            between(low, middle)
            between(middle, high)

    ordered = sorted({*places, *range(len(calls))[-1:]})
    for low, high in itertools.pairwise([*ordered[:1], *ordered]):
        between(low, high)
    for at in sorted(found):
        yield from found[at].values()


def chosen(family: str, problem: Problem, arch: Arch, multiprocessors: int) -> Launch:
    """The launch that serves a problem which takes one."""
    return Launch(choose.choose(family, problem, arch, multiprocessors=multiprocessors))


@functools.lru_cache(maxsize=64)
def variants(needed: Needed, multiprocessors: int | None = None) -> tuple[Variant, ...]:
    """Every variant that calls of a layer launch.

    Numbers of tokens are asked for that are 8 apart, beyond 128 a quarter, and where tables and powers of two say that
    something else begins. Where two that follow have other kernels, so are those between, down to each number, beyond
    128 to 3 %. Two whose kernels are the same are taken to have no others between them.

    Args:
        multiprocessors: of the card; by default those of the device, or of the card that the target stands for.
    """
    arch = arches.parse(needed.arch)
    count = multiprocessors or (arch.multiprocessors if needed.device is None else _multiprocessors(needed.device))
    found: dict[str, Variant] = {}
    for variant in needed.every(arch, count):
        found.setdefault(variant.name, variant)
    return tuple(found.values())


settings.when_changed(variants.cache_clear)


def _multiprocessors(device: int) -> int:
    # Asking a device takes torch, which warm-up on a host without one does not need.
    from jitmx.runtime import card

    return card.multiprocessors(device)


def _edges(families: tuple[str, ...], arch: Arch) -> set[int]:
    """Numbers of tokens with which something else may begin or end: few, powers of two, and those of tables."""
    now = settings.current()
    edges = {*range(1, 2 * _STRIDE), *((1 << bits) + behind for bits in range(32) for behind in (0, 1))}
    for family in map(kernels.family, families):
        shipped = resources.directories("tactics", now.families)
        for table in filter(None, tactics.tables(family, arch, now.tactics_dir, shipped)):
            for asked in (row.when.get(family.axes[0]) for row in table.rows):
                low, high = asked if isinstance(asked, list) else (asked or 0, asked or 0)
                edges |= {low, high, high + 1}
    return edges
