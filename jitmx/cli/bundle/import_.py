"""`jitmx bundle import`: take the kernels of a bundle into a cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from jitmx import settings
from jitmx.cache import importing
from jitmx.cache.store import Store
from jitmx.cli import output
from jitmx.cli.bundle import opening
from jitmx.cli.options import NamedPath, json_option, keys_option


@click.command(
    "import",
    short_help="Take the kernels of a bundle into a cache.",
    epilog="""\b
Examples:
  jitmx bundle import gpt-oss.jitmx
  jitmx bundle import gpt-oss.jitmx --keys /etc/jitmx/keys
  jitmx bundle import acme-kernels:gpt-oss          from an installed wheel; see `jitmx bundle list`
  mkdir -m 755 /srv/jitmx && jitmx bundle import gpt-oss.jitmx --to /srv/jitmx     for JITMX_SITE_CACHE=/srv/jitmx

\b
Exit codes: 0 all of its kernels are there; 1 it is damaged or not signed as required, and nothing is written, or the
cache cannot be written.
A cache that is read-only needs no import: JITMX_SITE_CACHE takes the bundle itself, beside directories.
""",
)
@click.argument("file", type=NamedPath())
@click.option("--to", type=NamedPath(path_type=Path), metavar="DIR", help="Instead of the cache: this directory.")
@keys_option
@json_option
def command(file: str, to: Path | None, key_places: tuple[Path, ...], as_json: bool) -> None:
    """Take the kernels of a bundle into the cache, after checking every byte of it.

    Entries that are there and sound stay as they are. Of a bundle that is refused nothing is written; an import that is
    cut off leaves a sound cache, and can be done again.
    """
    now = settings.current()
    found = opening.opened(file, key_places)
    place = to or (None if now.mode == "off" else now.cache_dir)
    store = Store(place, allow_shared=now.allow_shared_cache)
    done = importing.take_in(found, store)
    if as_json:
        output.emit({"cache": str(place), **{fate: list(keys) for fate, keys in asdict(done).items()}})
        return
    newer = f", {len(done.newer)} left to a newer jitmx that has its own" if done.newer else ""
    output.say(f"{place}: {len(done.added)} kernels came in, {len(done.kept)} were there{newer}")
