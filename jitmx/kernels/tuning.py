"""What a family declares for `jitmx tune`: what is tuned, what a row of its tables says, and what is tuned after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Follow(NamedTuple):
    """A problem that is tuned once the winner of another is known, among candidates that have the knobs in `agree`."""

    problem: Any
    agree: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Tuning:
    """How `jitmx tune` goes about a family. What is timed is `Bench` of the module that its benchmark names.

    Attributes:
        sizes: fields that say what is tuned, besides the axes: all of them are given, or a model is.
        models: of each model, the fields of the problems that are tuned for it, others at their defaults.
        values: of a problem, the values along each axis that are measured where none are asked for.
        described: what is tuned, in words, axes aside.
        named: text fields that a row always names. Numbers are always named, others where they are not the default.
        nameless: fields that no row names.
        implied: what a row of an older table means by a field that it does not name.
        untimed: fields, or field=value, that no timed call has: rows serve calls with and without.
        refused: fields that are not given, since tuning sets them.
        follows: what is tuned once kernel and knobs of a problem's row are known.
        serves: further problems that the row of a problem with this kernel serves; by default none.
        beside: families whose templates a timed call runs too.
        check: KnobError where no call of a problem can be timed; by default all can.
    """

    sizes: tuple[str, ...]
    values: Callable[[Any], Mapping[str, Sequence[int]]]
    described: Callable[[Any], str]
    models: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    nameless: tuple[str, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    untimed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    follows: Callable[[Any, str, Mapping[str, Any]], Sequence[Follow]] | None = None
    serves: Callable[[Any, str], Sequence[Any]] = lambda problem, kernel: ()
    beside: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda problem: None
