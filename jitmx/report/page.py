"""The page of `jitmx report`: plain data in, one file of HTML out."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from jitmx.quoting import printable

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: key of its cells in rows.
        title: its header.
        number: cells are numbers: flush right, and sorted by value.
        unit: behind the header, or empty.
    """

    name: str
    title: str
    number: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """A table that a reader can sort.

    Attributes:
        caption: what it shows.
        rows: cells by the names of columns; None is shown as a dash, and comes last when sorted.
        empty: what is said where there is no row.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    empty: str = ""


@dataclass(frozen=True)
class Plot:
    """A drawing with words beneath it."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading, which the table of contents has too.
        text: paragraphs before its tables.
    """

    title: str
    text: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()


def _shown(value: Any) -> Any:
    """What a template puts out: text without characters that steer what is around it."""
    if value is None:
        return "–"
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    found.filters["number"] = _number
    return found


def _number(value: Any) -> str:
    """A number as people read it; what is none as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The page.

    Args:
        facts: what is said at its head, by name.
    """
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return _environment().get_template("page.html.j2").render(
        title=title, facts=facts, sections=sections, style=Markup(style), script=Markup(script),
        style_digest=_digest(style), script_digest=_digest(script),
    )  # fmt: skip
