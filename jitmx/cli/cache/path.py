"""`jitmx cache path`: where the cache is, and where an entry's machine code lies."""

from __future__ import annotations

import click

from jitmx import settings
from jitmx.arch import Arch
from jitmx.cache import files, layout, store
from jitmx.cli import output
from jitmx.cli.cache.entries import select
from jitmx.cli.options import arch_option, json_option


@click.command(
    "path",
    short_help="Where the cache or an entry lies.",
    epilog="""\b
Examples:
  jitmx cache path
  cuobjdump -res-usage "$(jitmx cache path quantize.quantize --arch sm_121)"

cuobjdump is of the CUDA toolkit; that of the wheel lies in nvidia/cu13/bin among the installed packages.
""",
)
@click.argument("name_or_key", required=False)
@arch_option("Only entries for this target.")
@json_option
def command(name_or_key: str | None, targets_asked: tuple[Arch, ...], as_json: bool) -> None:
    """Print the cache's directory, or the file that holds the machine code of NAME_OR_KEY."""
    path = settings.current().cache_dir
    if name_or_key is not None:
        cache = store.current()
        record = select(cache, name_or_key, targets_asked)
        entry = cache.lookup(record.key)
        if entry is None or entry.root is None:
            raise click.ClickException(
                f"the machine code of {record.name} is damaged or gone; `jitmx cache verify --repair` tidies up, "
                "and the next use compiles it again"
            )
        if not files.is_directory(entry.root):
            raise click.ClickException(
                f"the machine code of {record.name} lies within the bundle {entry.root}; `jitmx bundle import` puts it "
                "into the cache, and tar unpacks it"
            )
        path = layout.object_(entry.root, record.outputs["object"])
    if as_json:
        output.emit({"path": str(path)})
    else:
        output.say(path)
