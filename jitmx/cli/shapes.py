"""`NAME=VALUE` words and sizes, by which verbs are told of calls and knobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jitmx.registry.spec import flags, read_flag

if TYPE_CHECKING:
    from jitmx.kernels import Problem

_F = TypeVar("_F", bound=Callable[..., Any])

# An output layer sees one row a sequence, not one a token.
_WIDE, _WIDE_ROWS = 100_000, 512


def usual_rows(n: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Those of the row counts that a product with n output features meets."""
    return tuple(m for m in counts if n < _WIDE or m <= _WIDE_ROWS)


def size_options(function: _F) -> _F:
    """`-n` and `-k`; the verb receives `n: int | None` and `k: int | None`."""
    size = click.IntRange(min=1)
    function = click.option("-k", "k", type=size, help="Input features: the same as k=...")(function)
    return click.option("-n", "n", type=size, help="Output features: the same as n=...")(function)


def size_list(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Reads `1,2,4`, or several such options, as numbers of 1 or more."""
    words = [word for value in values for word in value.replace(",", " ").split()]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise click.BadParameter(f"{word!r} is no whole number of 1 or more", param=parameter)
    return tuple(dict.fromkeys(map(int, words)))


def pairs(words: tuple[str, ...], owner: str, names: list[str], kind: str) -> dict[str, str]:
    """Name to text of `name=value` words.

    Raises:
        click.UsageError: a word of another form, a name that `owner` has not among its `names`, or one given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in names:
            raise click.UsageError(f"{word!r} is no {kind}=value of {owner}; its {kind}s: {', '.join(names)}")
        if name in found:
            raise click.UsageError(f"{name} is given twice, as {found[name]} and as {text}; give it once")
        found[name] = text
    return found


def read(op: str, problem: type[Problem], words: tuple[str, ...], **sizes: Any) -> dict[str, Any]:
    """Fields of a problem of `op` from words, each read as the type of its field, and from `sizes` that are not None.

    Raises:
        click.UsageError: words that are no fields, or a field given twice.
    """
    items = {item.name: item for item in dataclasses.fields(problem)}
    fields = {name: item.default for name, item in items.items()}
    found: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    for name, text in pairs(words, op, list(fields), "field").items():
        if name in found:
            raise click.UsageError(f"{name} is given twice, as {name}={text} and as -{name}; give it once")
        word = f"{name}={text}"
        if isinstance(fields[name], bool):
            value = read_flag(items[name], text)
            if value is None:
                raise click.UsageError(f"{word!r}: {name} is {' or '.join(flags(items[name]))}")
            found[name] = value
        elif isinstance(fields[name], int):
            if not text.isdecimal() or int(text) < 1:
                raise click.UsageError(f"{word!r}: {name} is a whole number of 1 or more")
            found[name] = int(text)
        else:
            found[name] = text
    return found
