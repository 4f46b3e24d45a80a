"""What a family declares for `jitmx bench`: where its benchmark lies, and what the command line says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jitmx.models import NAMED


@dataclass(frozen=True, eq=False)
class Benchmark:
    """What `jitmx bench` measures of a family, and `jitmx tune` times.

    Attributes:
        module: the module that measures, of the form in jitmx/bench/__init__.py; it may import torch.
        what: what is measured, in words, for `jitmx bench --help`; empty where the module has candidates to time and
            nothing else.
        fields: fields of the family's problems that may be given of what is measured; along axes, several values.
        check: raises KnobError where those that were given do not fit each other; by default all do.
        models: whose layers it can measure.
        peers: libraries that it can run beside jitmx.
        drawn: whether it can be plotted.
        device: whether it needs a card.
        family: whose problems have the fields, where it is of no family.
    """

    module: str
    what: str
    fields: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda fields: None
    models: tuple[str, ...] = tuple(NAMED)
    peers: tuple[str, ...] = ()
    drawn: bool = False
    device: bool = True
    family: str = ""
