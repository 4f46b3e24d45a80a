"""PTX text to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from jitmx.errors import SimulationError

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<string>"[^"]*")
    |(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d+(?:[eE][-+]?\d+)?)
    |(?P<number>0[xX][0-9a-fA-F]+U?|\d+U?(?!\w))
    |(?P<name>[A-Za-z_%$.][\w$%.]*(?:::[\w$.]+)*)
    |(?P<mark>[-+,;:{}()\[\]<>@!|=~?*&^/])""",
    re.VERBOSE | re.DOTALL,
)
_LINE_DIRECTIVES = re.compile(r"^[ \t]*\.(loc|file|section)\b[^\n]*", re.MULTILINE)


class Token(NamedTuple):
    """One token: a string, float, number, name or mark, and its line."""

    kind: str
    text: str
    line: int


def tokens(source: str) -> list[Token]:
    """The tokens of PTX text.

    Raises:
        SimulationError: text that is no token; the message has its line.
    """
    source = _LINE_DIRECTIVES.sub("", source)
    out, position, line = [], 0, 1
    for match in _TOKEN.finditer(source):
        if match.start() != position:
            break
        position = match.end()
        kind, text = match.lastgroup or "", match[0]
        if kind != "skip":
            out.append(Token(kind, text, line))
        if kind in ("skip", "string"):
            line += text.count("\n")
    if position < len(source):
        raise SimulationError(f"PTX line {line}: no token starts at {source[position : position + 20]!r}")
    return out
