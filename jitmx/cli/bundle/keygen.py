"""`jitmx bundle keygen`: a pair of keys."""

from __future__ import annotations

import os
from pathlib import Path

import click

from jitmx.cache import keys
from jitmx.cli import output
from jitmx.cli.options import NamedPath, json_option


@click.command(
    "keygen",
    short_help="Make a pair of keys to sign bundles with.",
    epilog="""\b
Examples:
  jitmx bundle keygen release     makes release.key, which signs and stays secret, and release.pub, which servers get
""",
)
@click.argument("name", type=NamedPath(path_type=Path))
@json_option
def command(name: Path, as_json: bool) -> None:
    """Make an Ed25519 key pair: NAME.key, which only you can read, and NAME.pub. Files that are there stay."""
    private, public = keys.generate()
    pairs = ((Path(f"{name}.key"), private, 0o600), (Path(f"{name}.pub"), public, 0o644))
    if there := next((path for path, _, _ in pairs if os.path.lexists(path)), None):
        raise click.UsageError(f"{there} is there already; take another name, or remove it")
    for path, data, permissions in pairs:
        with output.writing(path, "take another name"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
    raw, _ = next(iter(keys.public_keys([pairs[1][0]]).items()))
    if as_json:
        output.emit({"private": str(pairs[0][0]), "public": str(pairs[1][0]), "fingerprint": keys.fingerprint(raw)})
    else:
        output.say(f"{pairs[0][0]} signs; {pairs[1][0]} is for servers (JITMX_BUNDLE_KEYS): {keys.fingerprint(raw)}")
