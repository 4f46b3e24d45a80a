"""`jitmx bundle sign`: put a signature to a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from jitmx.cache import bundle, keys
from jitmx.cli import output
from jitmx.cli.bundle import opening
from jitmx.cli.options import NamedPath, json_option


@click.command(
    "sign",
    short_help="Sign a bundle.",
    epilog="""\b
Examples:
  jitmx bundle sign gpt-oss.jitmx --key release.key
  openssl genpkey -algorithm ed25519 -out release.key && openssl pkey -in release.key -pubout -out release.pub

\b
Exit codes: 1 where the bundle is damaged; it is left as it is.
""",
)
@click.argument("file", type=NamedPath(path_type=Path))
@click.option("--key", required=True, type=NamedPath(path_type=Path), metavar="PATH", help="A private key (PEM).")
@click.option("--output", "-o", "target", type=NamedPath(path_type=Path), help="Where to write it (default: FILE).")
@json_option
def command(file: Path, key: Path, target: Path | None, as_json: bool) -> None:
    """Add the signature of an Ed25519 key to a bundle, whose every byte is checked first.

    Several keys may sign; signing again with one changes nothing.
    """
    private = keys.private_key(key)
    data = bundle.open_(file).signed_by(private)
    output.write(target or file, data)
    made = bundle.of_bytes(str(target or file), data)
    if as_json:
        output.emit(opening.described(made))
    else:
        output.say(f"{target or file}: {opening.signed(made)}; digest {made.digest}")
