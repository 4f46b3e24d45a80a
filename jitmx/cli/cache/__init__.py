"""`jitmx cache`: what is kept on disk, one file a verb. Nothing here imports torch, CuPy, NumPy or Jinja by itself."""

from __future__ import annotations

import click

from jitmx.cli.group import LazyGroup


@click.group(
    "cache",
    short_help="Look into the kernel cache, check it, make room.",
    cls=LazyGroup,
    package="jitmx.cli.cache",
    verbs=("ls", "show", "why", "verify", "prune", "stats", "path"),
    epilog="""\b
Examples:
  jitmx cache ls --arch sm_121
  jitmx cache show 3f2a --sass            an entry by the start of its key
  jitmx cache why quantize.quantize --arch sm_121
  jitmx cache verify --repair
  jitmx cache prune --size 1G --dry-run
""",
)
def command() -> None:
    """Look into the kernel cache, check it and make room.

    An entry is named by its kernel's name, or by as much of its key as is unique.
    """
