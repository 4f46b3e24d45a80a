"""What goes to stdout: JSON objects, aligned columns, and units that people read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

SCHEMA_VERSION = 1


def emit(payload: Mapping[str, Any]) -> None:
    """Print one JSON object that opens with its schema version."""
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print `rows` in columns as wide as their longest cell; columns named in `right` are flush right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]

    def line(parts: Sequence[str]) -> str:
        aligned = (
            part.rjust(width) if header in right else part.ljust(width)
            for part, width, header in zip(parts, widths, headers, strict=True)
        )
        return "  ".join(aligned).rstrip()

    click.secho(line(headers), bold=True)
    for row in cells:
        click.echo(line(row))


def size(count: int) -> str:
    """Bytes with a binary unit: `512 B`, `1.5 KiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """A span in its largest whole unit: `45 s`, `3 min`, `5 h`, `12 d`; a negative one is `in the future`."""
    if seconds < 0:
        return "in the future"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def knob(value: object) -> str:
    """A knob's value as templates and variables spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
