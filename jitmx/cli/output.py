"""What is printed: lines, JSON objects, aligned columns, and units that people read; and files that users name."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from jitmx.quoting import printable

SCHEMA_VERSION = 1
_GIVES_OUT = (errno.ENOSPC, errno.EDQUOT)
_BREAKS = (errno.EFBIG, errno.EIO, errno.EPIPE)
_PLAIN = str.maketrans({"–": "-", "→": "->"})  # jitmx's own signs where the output's encoding has none


def say(text: object = "", *, err: bool = False, opening: str = "", **style: Any) -> None:
    """Print `text` and the end of a line; every verb prints by this.

    Whatever would steer a terminal, and characters that the output's encoding lacks, are shown escaped.

    Args:
        err: to stderr. What cannot be written there is lost: that is no reason to do less.
        opening: goes before the text, in the `style` that `click.style` takes.

    Raises:
        OSError: stdout cannot be written.
    """
    stream = sys.stderr if err else sys.stdout
    first, rest = (_encodable(printable(str(part)), getattr(stream, "encoding", None)) for part in (opening, text))
    with suppress(OSError) if err else nullcontext():
        click.echo((click.style(first, **style) if first else "") + rest, file=stream)


def _encodable(text: str, encoding: str | None) -> str:
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
    return text


def emit(payload: Mapping[str, Any]) -> None:
    """Print one JSON object that opens with its schema version."""
    say(json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2))


def stream(data: bytes) -> None:
    """Write `data` to stdout as it is: a file that a user wants there.

    Raises:
        OSError: stdout cannot be written.
    """
    click.echo(data, nl=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print `rows` in columns as wide as their longest cell; columns named in `right` are flush right."""
    cells = [["–" if cell is None else printable(str(cell)).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]

    def line(parts: Sequence[str]) -> str:
        aligned = (
            part.rjust(width) if header in right else part.ljust(width)
            for part, width, header in zip(parts, widths, headers, strict=True)
        )
        return "  ".join(aligned).rstrip()

    say(opening=line(headers), bold=True)
    for row in cells:
        say(line(row))


@contextmanager
def writing(path: Path, remedy: str = "name another file by -o") -> Iterator[None]:
    """Have what keeps a file from being written end in an error with a remedy: of usage, unless the disk gives out."""
    try:
        yield
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror}"
        if error.errno in _GIVES_OUT:
            raise click.ClickException(f"{said}; free some space there, or {remedy}") from error
        if error.errno in _BREAKS:
            raise click.ClickException(f"{said}; {remedy}") from error
        raise click.UsageError(f"{said}; {remedy}") from error


def check_writable(path: Path) -> None:
    """Refuse a file that `write` could not put there, before what is to be written is made.

    Raises:
        click.ClickException: its directory takes no file, or a directory is there.
    """
    import tempfile  # which the light verbs have no use for

    with writing(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if stat.S_ISREG(mode):
            # A file without a name: a process that is killed leaves nothing.
            tempfile.TemporaryFile(dir=path.resolve().parent).close()


def write(path: Path, data: bytes) -> None:
    """Put `data` at a path that a user names, as `files.write_named` does.

    Raises:
        click.ClickException: it cannot be written.
    """
    from jitmx.cache import files

    with writing(path):
        files.write_named(path, data)


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
