"""`jitmx env`: every setting, its value and which variable it came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from jitmx import settings
from jitmx.cli import output
from jitmx.cli.options import json_option


def as_text(value: Any) -> str:
    """A setting's value as its variable would spell it; unset is an empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        separator = os.pathsep if any(isinstance(part, Path) for part in value) else ","
        return separator.join("=".join(part) if isinstance(part, tuple) else str(part) for part in value)
    return str(value)


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return ["=".join(part) if isinstance(part, tuple) else str(part) for part in value]
    return value


@click.command(
    "env",
    short_help="Every setting, its value and its source.",
    epilog="""\b
Examples:
  jitmx env
  JITMX_MODE=required jitmx env
  jitmx env --json | jq -r '.settings[] | select(.source != "default") | .name'
""",
)
@json_option
def command(as_json: bool) -> None:
    """Print each setting with its value, where the value comes from and what it is for.

    A setting is an environment variable; some have an alias that is read where the JITMX_ name is not set.
    A value outside its choices is an error here as everywhere (exit 2).
    """
    current = settings.current()
    if as_json:
        output.emit(
            {
                "settings": [
                    {
                        "name": setting.name,
                        "value": _as_json(current.value(setting.field)),
                        "source": settings.origin(setting.field),
                        "aliases": list(setting.aliases),
                        "choices": setting.choices,
                        "help": setting.help,
                    }
                    for setting in settings.table()
                ]
            }
        )
        return
    output.table(
        ("SETTING", "VALUE", "SOURCE", "WHAT IT IS FOR"),
        [
            (
                setting.name,
                as_text(current.value(setting.field)) or None,
                settings.origin(setting.field),
                setting.help,
            )
            for setting in settings.table()
        ],
    )
