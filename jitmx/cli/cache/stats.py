"""`jitmx cache stats`: how much is kept, of what."""

from __future__ import annotations

import click

from jitmx.cache import stats, store
from jitmx.cli import output
from jitmx.cli.options import json_option


@click.command(
    "stats",
    short_help="Count entries and bytes.",
    epilog="""\b
Examples:
  jitmx cache stats
  jitmx cache stats --json | jq .files.object
""",
)
@json_option
def command(as_json: bool) -> None:
    """Count entries and bytes, by target, family and kind of file."""
    found = stats.measure(store.current())
    if as_json:
        output.emit(found)
        return
    entries = found["entries"]
    output.say(f"{found['path']}: {entries['count']} entries, {output.size(found['bytes'])}")
    for title, counts in (("target", entries["by_arch"]), ("family", entries["by_family"])):
        if counts:
            output.say(f"by {title}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    if found["files"]:
        kinds = (f"{kind} {held['count']} ({output.size(held['bytes'])})" for kind, held in found["files"].items())
        output.say(f"by file: {', '.join(kinds)}")
    for layer, count in found["layers"].items():
        output.say(f"site cache {layer}: {count} entries")
