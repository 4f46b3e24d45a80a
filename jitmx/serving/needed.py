"""What a layer of a served model launches: while its weights are loaded, and in calls of up to so many tokens."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from jitmx import arch as arches
from jitmx import settings
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import Launch
from jitmx.kernels import Problem
from jitmx.registry.spec import Variant

_EVERY = 128  # tokens up to which each number is asked for; beyond, every 32nd part of a number


@dataclass(frozen=True)
class Needed(ABC):
    """What decides the kernels of a layer.

    Attributes:
        arch: SM target.
        device: CUDA device number, or None where there is none to load onto.
        rows: tokens of a call, at most.
    """

    arch: str
    device: int | None
    rows: int

    @abstractmethod
    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """Every launch of a call with m tokens, with why and how often."""

    def launches(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """The variants of every launch of a call with m tokens."""
        return (launch.choice.variant for launch in self.made(m, arch, multiprocessors))

    def every(self, arch: Arch, multiprocessors: int) -> Iterator[Variant]:
        """Every launch of every call."""
        for m in _rows(self.rows):
            yield from self.launches(m, arch, multiprocessors)


def chosen(family: str, problem: Problem, arch: Arch, multiprocessors: int) -> Launch:
    """The launch that serves a problem which takes one."""
    return Launch(choose.choose(family, problem, arch, multiprocessors=multiprocessors))


@functools.lru_cache(maxsize=64)
def variants(needed: Needed, multiprocessors: int | None = None) -> tuple[Variant, ...]:
    """Every variant that calls of a layer launch.

    Beyond 128 tokens numbers 3 % apart are asked for: two that close together, whose kernels are the same, are taken to
    have no others between them.

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


def _rows(most: int) -> Iterator[int]:
    m = 0
    while m < most:
        m = min(most, m + max(1, m // _EVERY * _EVERY // 32))
        yield m
