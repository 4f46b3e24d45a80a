"""`jitmx bundle verify`: is a bundle what was made, and by whom?"""

from __future__ import annotations

from pathlib import Path

import click

from jitmx.cli import output
from jitmx.cli.bundle import opening
from jitmx.cli.options import NamedPath, json_option, keys_option


@click.command(
    "verify",
    short_help="Check every byte of a bundle, and who signed it.",
    epilog="""\b
Examples:
  jitmx bundle verify gpt-oss.jitmx
  jitmx bundle verify gpt-oss.jitmx --keys /etc/jitmx/keys

\b
Exit codes: 0 it is sound, and signed as required; 1 it is not, and is not to be used.
""",
)
@click.argument("file", type=NamedPath())
@keys_option
@json_option
def command(file: str, key_places: tuple[Path, ...], as_json: bool) -> None:
    """Check every byte of a bundle against its list, and that one of the keys has signed it.

    Keys are those of --keys, or else of JITMX_BUNDLE_KEYS; where there are neither, no signature is required.
    """
    found = opening.opened(file, key_places)
    found.check()
    if as_json:
        output.emit(opening.described(found) | {"sound": True})
    else:
        required = "" if opening.trusted(key_places) is None else ", as required"
        count = len(found.of("record"))
        output.say(f"{file}: sound, {count} kernels, {opening.signed(found)}{required}; digest {found.digest}")
