"""`jitmx cache prune`: make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from jitmx.arch import Arch
from jitmx.cache import prune, store
from jitmx.cli import output
from jitmx.cli.cache.entries import short
from jitmx.cli.options import arch_option, byte_count, duration, json_option

if TYPE_CHECKING:
    from jitmx.cache.manifest import Record


@click.command(
    "prune",
    short_help="Remove entries by size, age, target or reach.",
    epilog="""\b
Examples:
  jitmx cache prune --size 1G --dry-run   what would go, least recently used first
  jitmx cache prune --age 30d
  jitmx cache prune --arch sm_90,sm_120
  jitmx cache prune --unreachable         what an upgrade has left behind

\b
Exit codes: 1 where something could not be removed.
Whatever is removed is compiled again if it is ever needed. Leftovers of cut-off writes go in any case.
""",
)
@click.option("--size", callback=byte_count, metavar="SIZE", help="Keep at most this much, such as 500M or 1G.")
@click.option(
    "--age", callback=duration, metavar="AGE", help="Remove what was not used for so long, such as 12h or 30d."
)
@arch_option("Remove the entries for this target; repeat it or separate several by commas.")
@click.option("--unreachable", is_flag=True, help="Remove entries whose template, knobs, headers or compiler are gone.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def command(
    size: int | None,
    age: float | None,
    targets_asked: tuple[Arch, ...],
    unreachable: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove entries by size, age, target or reach. Options add up; a site cache is left to its owner."""
    reachable: Callable[[Record], bool] | None = None
    if unreachable:
        from jitmx import audit

        reachable = audit.is_reachable
    cache = store.current()
    told: dict[str | None, str] = {}
    if not as_json:
        told = {one.key: f"{short(one.key)}  {one.name}  {one.arch}" for one in cache.records()}
    done = prune.prune(
        cache,
        max_bytes=size,
        older_than=age,
        arches=[target.name for target in targets_asked],
        reachable=reachable,
        dry_run=dry_run,
    )
    entries = [removal for removal in done.removals if removal.kind == "record"]
    if as_json:
        output.emit(
            {
                "dry_run": dry_run,
                "removed": [asdict(removal) | {"path": str(removal.path)} for removal in done.removals],
                "entries": len(entries),
                "freed": done.freed,
                "kept": done.kept,
                "refused": [str(path) for path in done.refused],
            }
        )
    else:
        for removal in entries:
            output.say(f"{told.get(removal.key, removal.name)}: {removal.reason}")
        verb = "would remove" if dry_run else "removed"
        files = len(done.removals)
        output.say(
            f"{verb} {len(entries)} entries ({files} files, {output.size(done.freed)}); {output.size(done.kept)} kept"
        )
    for path in done.refused:
        output.say(f"Error: {path} could not be removed; check the permissions of its directory", err=True)
    if done.refused:
        raise click.exceptions.Exit(1)
