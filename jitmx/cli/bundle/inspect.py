"""`jitmx bundle inspect`: what a bundle says of itself."""

from __future__ import annotations

from pathlib import Path

import click

from jitmx.cli import output
from jitmx.cli.bundle import opening
from jitmx.cli.options import NamedPath, json_option, keys_option


@click.command(
    "inspect",
    short_help="What is in a bundle, and where it comes from.",
    epilog="""\b
Examples:
  jitmx bundle inspect gpt-oss.jitmx
  jitmx bundle inspect gpt-oss.jitmx --json | jq -r '.entries[].name'

\b
Exit codes: 0 its list is sound; 1 it is no bundle, damaged, or not signed by a key that is required.
""",
)
@click.argument("file", type=NamedPath())
@keys_option
@json_option
def command(file: str, key_places: tuple[Path, ...], as_json: bool) -> None:
    """Print where a bundle comes from, who signed it and which kernels it has.

    Its list, signatures and records are checked, machine code and sources are not: `jitmx bundle verify` checks all.
    """
    found = opening.opened(file, key_places)
    records = sorted((found.record(key) for key in found.of("record")), key=lambda one: (one.name, one.arch))
    if as_json:
        members = ("name", "family", "arch", "key")
        entries = [
            {name: getattr(one, name) for name in members}
            | {name: one.outputs[name] for name in ("registers", "spill_bytes", "shared_bytes", "size")}
            for one in records
        ]
        output.emit(opening.described(found) | {"entries": entries})
        return
    output.say(f"{'digest':<15} {found.digest}")
    output.say(f"{'signatures':<15} {opening.signed(found)}")
    for title, text in opening.made(found.made):
        output.say(f"{title:<15} {text}")
    output.say()
    output.table(
        ("NAME", "ARCH", "KEY", "REGISTERS", "SIZE"),
        [
            (one.name, one.arch, one.key[:12], one.outputs["registers"], output.size(one.outputs["size"]))
            for one in records
        ],
        right=("REGISTERS", "SIZE"),
    )
