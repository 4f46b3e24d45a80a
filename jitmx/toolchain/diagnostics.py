"""NVRTC's messages, with the lines that they are about."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# `name(12): error: ...` is the front end; `ptxas ..., line 17; error : ...` is about the PTX made from the source.
_FRONT_END = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:catastrophic |internal )?error\b", re.MULTILINE)
_PTXAS = re.compile(r"^ptxas .*\bline (?P<line>\d+)\s*;\s*(?:fatal|error)\b", re.MULTILINE)
_MISSING = re.compile(
    r'^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): .*(?:could not|cannot) open source file "(?P<name>[^"\n]+)"',
    re.MULTILINE,
)

_CONTEXT = 3
_EXCERPTS = 8
_LOG_LINES = 120
_WIDTH = 200
PTX = "PTX"


@dataclass(frozen=True)
class Missing:
    """A header that NVRTC could not open: its name, and where it is included."""

    name: str
    file: str
    line: int


def missing_header(log: str) -> Missing | None:
    """The header that ended the compile, if that is what did."""
    match = _MISSING.search(log)
    return Missing(match["name"], match["file"], int(match["line"])) if match else None


def explain(log: str, text_of: Callable[[str], str | None]) -> str:
    """The log, and below it the lines around each error with their numbers.

    Args:
        text_of: the text of a file named in the log, or of `PTX`; None where it is not known.
    """
    marked: dict[str, set[int]] = {}
    for file, line in _places(log)[:_EXCERPTS]:
        marked.setdefault(file, set()).add(line)
    blocks = [_shorten(log.strip())]
    for file, lines in marked.items():
        text = text_of(file)
        if text is not None:
            blocks.append(excerpt(file, text, lines))
    return "\n\n".join(block for block in blocks if block)


def _places(log: str) -> list[tuple[str, int]]:
    """File and line of each error, in the order of the log, each once."""
    found = [(match.start(), match["file"], int(match["line"])) for match in _FRONT_END.finditer(log)]
    found += [(match.start(), PTX, int(match["line"])) for match in _PTXAS.finditer(log)]
    return list(dict.fromkeys((file, line) for _, file, line in sorted(found)))


def excerpt(file: str, text: str, marked: set[int], context: int = _CONTEXT) -> str:
    """The lines of `text` around those `marked` (from 1), numbered, the marked ones with an arrow."""
    lines = text.splitlines()
    near = {number for line in marked for number in range(line - context, line + context + 1)}
    shown = sorted(number for number in near if 0 < number <= len(lines))
    if not shown:
        return ""
    width = len(str(shown[-1]))
    rows = [f"{file}:"]
    previous = shown[0] - 1
    for number in shown:
        if number != previous + 1:
            rows.append(f"     {'…':>{width}}")
        arrow = "-->" if number in marked else "   "
        rows.append(f"{arrow} {number:>{width}} | {lines[number - 1][:_WIDTH]}".rstrip())
        previous = number
    return "\n".join(rows)


def _shorten(log: str) -> str:
    lines = log.splitlines()
    if len(lines) <= _LOG_LINES:
        return log
    return "\n".join([*lines[:_LOG_LINES], f"… and {len(lines) - _LOG_LINES} more lines"])


def count_errors(log: str) -> int:
    """How many errors the log reports, at least 1."""
    return max(1, len(_FRONT_END.findall(log)) + len(_PTXAS.findall(log)))
