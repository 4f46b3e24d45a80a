"""`NAME=VALUE` words and sizes, by which verbs are told of calls and knobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from jitmx.quoting import short
from jitmx.registry.spec import MAX_SIZE, flags, read_flag
from jitmx.setting_text import whole

if TYPE_CHECKING:
    from jitmx.kernels import Problem


def pairs(words: tuple[str, ...], owner: str, names: list[str], kind: str) -> dict[str, str]:
    """Name to text of `name=value` words.

    Raises:
        click.UsageError: a word of another form, a name that `owner` has not among its `names`, or one given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in names:
            raise click.UsageError(f"{short(word)} is no {kind}=value of {owner}; its {kind}s: {', '.join(names)}")
        if name in found:
            raise click.UsageError(f"{name} is given twice, as {short(found[name])} and as {short(text)}; give it once")
        found[name] = text
    return found


def read(op: str, problem: type[Problem], words: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a problem of `op` from words, each read as the type of its field.

    Raises:
        click.UsageError: words that are no fields, or a field given twice.
    """
    items = {item.name: item for item in dataclasses.fields(problem)}
    fields: dict[str, Any] = {name: item.default for name, item in items.items()}
    found: dict[str, Any] = {}
    for name, text in pairs(words, op, list(fields), "field").items():
        word = f"{name}={text}"
        usual = fields[name]
        if isinstance(usual, bool):
            value = read_flag(items[name], text)
            if value is None:
                raise click.UsageError(f"{short(word)}: {name} is {' or '.join(flags(items[name]))}")
            found[name] = value
        elif isinstance(usual, int):
            found[name] = _whole(name, text, least=min(1, usual))
        else:
            found[name] = text
    return found


def read_values(
    op: str, problem: type[Problem], words: tuple[str, ...], axes: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """As `read`, but for fields along `axes`: each of these may have several values, as `m=1,4` or in several words.

    Returns:
        The other fields; and the values along axes for which some are given.
    """
    lists: dict[str, dict[int, None]] = {}
    others = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in axes:
            values = text.replace(",", " ").split() or [text]
            lists.setdefault(name, {}).update(dict.fromkeys(_whole(name, value) for value in values))
        else:
            others.append(word)
    return read(op, problem, tuple(others)), {name: tuple(values) for name, values in lists.items()}


def _whole(name: str, text: str, least: int = 1) -> int:
    try:
        return whole(text, least, MAX_SIZE)
    except ValueError:
        said = short(f"{name}={text}")
        raise click.UsageError(f"{said}: {name} is a whole number from {least} to {MAX_SIZE}") from None
