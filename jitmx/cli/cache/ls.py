"""`jitmx cache ls`: what is kept."""

from __future__ import annotations

from typing import Final

import click

from jitmx.arch import Arch
from jitmx.cache import store
from jitmx.cli import output
from jitmx.cli.cache.entries import short
from jitmx.cli.options import arch_option, family_option, json_option

_TAKES: Final = ("registers", "spill_bytes", "shared_bytes", "size")


@click.command(
    "ls",
    short_help="List the entries.",
    epilog="""\b
Examples:
  jitmx cache ls
  jitmx cache ls --arch sm_121 --family linear
  jitmx cache ls --json | jq -r '.entries[] | select(.spill_bytes > 0) | .name'

\b
USED is when a process last loaded the entry, to the hour.
""",
)
@arch_option("Only entries for this target; repeat it or separate several by commas.")
@family_option
@json_option
def command(targets_asked: tuple[Arch, ...], family_names: tuple[str, ...], as_json: bool) -> None:
    """List the entries of the cache, and of the site caches below it."""
    cache = store.current()
    arches = {target.name for target in targets_asked}
    entries = list(cache.listing())
    listed = sorted(
        (
            item
            for item in entries
            if (not arches or item.record.arch in arches) and (not family_names or item.record.family in family_names)
        ),
        key=lambda item: (item.record.name, item.record.arch, -item.record.created),
    )
    now = cache.clock()
    if as_json:
        output.emit(
            {
                "entries": [
                    {
                        **{name: getattr(item.record, name) for name in ("name", "family", "arch", "key")},
                        **{name: item.record.outputs[name] for name in _TAKES},
                        "created": item.record.created,
                        "used": item.used,
                        "cache": str(item.root),
                    }
                    for item in listed
                ]
            }
        )
        return
    if not listed:
        asked = " and ".join(" or ".join(names) for names in (sorted(arches), family_names) if names)
        if asked and entries:
            said = f"none of {len(entries)} entries is for {asked}; without --arch and --family all are listed"
            output.say(said, err=True)
        else:
            output.say("no entries; `jitmx warmup --arch sm_121` makes some", err=True)
        return
    output.table(
        ("NAME", "ARCH", "KEY", "REGISTERS", "SPILLED", "SHARED", "SIZE", "USED"),
        [
            (
                item.record.name,
                item.record.arch,
                short(item.record.key),
                *(item.record.outputs[name] for name in _TAKES[:3]),
                output.size(item.record.outputs["size"]),
                # A stamp and the clock may differ by the grain of the file system's time.
                output.age(max(0.0, now - item.used) if now - item.used > -2 else now - item.used),
            )
            for item in listed
        ],
        right=("REGISTERS", "SPILLED", "SHARED", "SIZE", "USED"),
    )
