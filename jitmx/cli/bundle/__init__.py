"""`jitmx bundle`: kernels in one file, to ship. Only `create` imports what compiles."""

from __future__ import annotations

import click

from jitmx.cli.group import LazyGroup


@click.group(
    "bundle",
    short_help="Ship kernels in one file: make, sign, check, import.",
    cls=LazyGroup,
    package="jitmx.cli.bundle",
    verbs=("create", "inspect", "verify", "sign", "import", "list", "keygen"),
    epilog="""\b
Examples:
  jitmx bundle create --model gpt-oss-120b --arch sm_90,sm_121 -o gpt-oss.jitmx
  jitmx bundle keygen release
  jitmx bundle sign gpt-oss.jitmx --key release.key
  jitmx bundle import gpt-oss.jitmx --keys release.pub
  JITMX_SITE_CACHE=/srv/gpt-oss.jitmx vllm serve ...

\b
FILE is a path, or the name of a bundle in an installed wheel (`jitmx bundle list`).
""",
)
def command() -> None:
    """Ship kernels in one file, so that servers need not compile.

    A bundle holds machine code, records, sources and a list that binds every byte of it. It is a tar file: the same
    kernels make the same bytes on every machine.
    """
