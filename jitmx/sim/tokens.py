"""PTX text to tokens: strings, floats, numbers, names and marks."""

from __future__ import annotations

import re

from jitmx.errors import SimulationError

_STRING = r'"[^"]*"'
_TOKEN = re.compile(
    _STRING
    + r"|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d+(?:[eE][-+]?\d+)?"
    + r"|0[xX][0-9a-fA-F]+U?|\d+U?(?!\w)"
    + r"|[A-Za-z_%$.][\w$%.]*(?:::[\w$.]+)*"
    + r"|[-+,;:{}()\[\]<>@!|=~?*&^/]"
)
_COMMENTS = re.compile(_STRING + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LINE_DIRECTIVES = re.compile(r"^[ \t]*\.(loc|file|section)\b[^\n]*", re.MULTILINE)


def tokens(source: str) -> tuple[list[str], list[int]]:
    """The tokens of PTX text, and the line of each.

    Raises:
        SimulationError: text that is no token; the message has its line.
    """
    source = _COMMENTS.sub(_blanked, _LINE_DIRECTIVES.sub("", source))
    texts: list[str] = []
    lines: list[int] = []
    for number, line in enumerate(source.split("\n"), 1):
        found = _TOKEN.findall(line)
        texts += found
        lines += [number] * len(found)
    # `findall` passes over what is no token, which shows in what is missing.
    if "".join("".join(texts).split()) != "".join(source.split()):
        raise _error(source)
    return texts, lines


def kind(token: str) -> str:
    """ "string", "float", "number", "name" or "mark"; "end" of none."""
    first = token[:1]
    if first.isalpha() or first in ("_", "%", "$", "."):
        return "name"
    if first.isdigit():
        return "float" if "." in token or token[1:2] in ("f", "F", "d", "D") else "number"
    return "string" if first == '"' else "mark" if first else "end"


def _blanked(match: re.Match[str]) -> str:
    """A comment's lines, without what they say."""
    return match[0] if match[0][0] == '"' else "\n" * match[0].count("\n") or " "


def _error(source: str) -> SimulationError:
    for number, line in enumerate(source.split("\n"), 1):
        position = 0
        for match in _TOKEN.finditer(line):
            if line[position : match.start()].strip():
                break
            position = match.end()
        if rest := line[position:].strip():
            return SimulationError(f"PTX line {number}: no token starts at {rest[:20]!r}")
    raise AssertionError("every character of the text lies in a token")
