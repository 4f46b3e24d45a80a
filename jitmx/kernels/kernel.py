"""The form that every kernel fills in, so that dispatch and launches need not know which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jitmx.arch import Arch
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant

_Item = TypeVar("_Item")

# Knobs for a tile M x N (x K) with so many stages, as JITMX_<FAMILY>_TILE asks.
Tile = Callable[[int, int, int | None, int | None], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a family needs of one kernel.

    Attributes:
        spec: the kernel.
        cases: launches with known results, small and ragged.
        fixed: knobs that a problem decides, by default none; KnobError where the kernel cannot serve it.
        launch: geometry, from knobs, problem and the multiprocessors of the device; None where the operator knows it.
        heuristic: tuned knobs where no table has a row, others at their defaults; KnobError where nothing of it fits
            the shape.
        few_answers: whether the heuristic has few answers, each for a range of rows: no bucket then stands for a range.
        candidates: knobs that tuning tries beside the heuristic's, best guesses first.
        check: KnobError where a legal variant cannot serve a problem; by default all can.
        max_rows: rows, the first axis of the family, that one launch takes at most, or None.
        runs_on: whether the kernel has variants for a target; by default for each.
        tile: knobs for a tile; None where the kernel has none.
        asked: what of a problem is asked of this kernel: of a layer its first product, say; by default all of it.
        rarer: knobs of variants that `jitmx verify` takes beside those that typical problems choose, so that between
            them they have every branch of the template; a target takes those that are legal there.
    """

    spec: KernelSpec
    cases: Callable[[Variant], Iterable[Case]]
    fixed: Callable[[Any], dict[str, Any]] = lambda problem: {}
    launch: Callable[[Any, Any, int], Launch] | None = None
    heuristic: Callable[[Any, Arch, int], dict[str, Any]] = lambda problem, arch, multiprocessors: {}
    few_answers: bool = False
    candidates: Callable[[Any, Arch, int], list[dict[str, Any]]] = lambda problem, arch, multiprocessors: []
    check: Callable[[Any, Variant], None] = lambda problem, variant: None
    max_rows: int | None = None
    runs_on: Callable[[Arch], bool] = lambda arch: True
    tile: Tile | None = None
    asked: Callable[[Any], Any] = lambda problem: problem
    rarer: Sequence[Mapping[str, Any]] = ()


def spread(*parts: Sequence[_Item]) -> list[_Item]:
    """The items of all parts, in their order and evenly spread: any beginning has its share of every part."""
    placed = [(place / len(part), number, item) for number, part in enumerate(parts) for place, item in enumerate(part)]
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]
