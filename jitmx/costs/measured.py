"""Measured times that the model's parameters are fitted to, and those that it is held against.

`tactics/measured.json` has them, each with where it was published and the variant that was timed:

    {"schema_version": 1, "arch", "card", "note",
     "figures": [{"op", "problem", "rows", "kernel", "us", "kind", "fit", "source"}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import arch as arches
from jitmx import resources
from jitmx.cache import files
from jitmx.costs import launches
from jitmx.costs.cards import Card
from jitmx.costs.launches import Priced
from jitmx.dispatch import call
from jitmx.errors import TacticError

SCHEMA_VERSION = 1
KINDS = ("decode", "many")
_LARGEST = 16 << 20  # bytes of a file of figures


@dataclass(frozen=True)
class Figure:
    """One measured time.

    Attributes:
        op: the family.
        problem: fields of what was called; others are those of the first typical call.
        kernel: name of the variant that was timed.
        us: median us a call in a CUDA graph of dependent calls.
        kind: "decode" of at most 64 rows or requests, else "many".
        fit: whether parameters are fitted to it; else it is held out.
        source: where it was published.
        rows: of a call whose problem has none.
    """

    op: str
    problem: Mapping[str, Any]
    kernel: str
    us: float
    kind: str
    fit: bool
    source: str
    rows: int = 1


@dataclass(frozen=True)
class Figures:
    """Figures of one card."""

    arch: str
    card: str
    note: str
    figures: tuple[Figure, ...]


def load(path: Path | None = None) -> Figures:
    """The figures at `path`, by default those that ship.

    Raises:
        TacticError: they cannot be read; the message names the one at fault.
    """
    path = path or resources.directory("tactics") / "measured.json"
    try:
        found = files.read(path, _LARGEST, follow=True)
        if found is None:
            raise FileNotFoundError("there is no such file")
        document = json.loads(found[0])
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {document['schema_version']!r}; this jitmx reads {SCHEMA_VERSION}")
        rows = tuple(_figure(number, row) for number, row in enumerate(document["figures"]))
        return Figures(arches.parse(document["arch"]).name, str(document["card"]), str(document["note"]), rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TacticError(f"{path} holds no measured figures: {error}", "reinstall jitmx") from error


def _figure(number: int, row: Any) -> Figure:
    found = Figure(**row)
    types = {"op": str, "kernel": str, "kind": str, "source": str, "fit": bool, "rows": int, "problem": dict}
    wrong = [name for name, kind in types.items() if type(getattr(found, name)) is not kind]
    if wrong or found.kind not in KINDS or not (isinstance(found.us, int | float) and 0 < found.us < 1e9):
        raise ValueError(f"figure {number} has no usable {', '.join(wrong) or 'kind or us'}")
    return found


def priced(figure: Figure, arch: str, card: Card | None = None) -> list[Priced] | None:
    """What the model says of a figure's call; None where another variant than the one timed would serve it now.

    Raises:
        KnobError: the figure's problem is none.
    """
    found = call.explain(figure.op, arches.parse(arch), **figure.problem)
    if found.choice.variant.name != figure.kernel:
        return None
    return launches.of_call(found, card, figure.rows)
