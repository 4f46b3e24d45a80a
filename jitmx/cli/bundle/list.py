"""`jitmx bundle list`: the bundles that kernels are served from where they lie."""

from __future__ import annotations

from typing import Any

import click

from jitmx import settings
from jitmx.cache import bundle, bundle_layer, files
from jitmx.cli import output
from jitmx.cli.bundle import opening
from jitmx.cli.options import json_option
from jitmx.errors import JitmxError


@click.command(
    "list",
    short_help="Bundles of installed wheels, and of JITMX_SITE_CACHE.",
    epilog="""\b
Examples:
  jitmx bundle list
  jitmx bundle list --json | jq -r '.bundles[] | select(.fault) | .file'

\b
Exit codes: 1 where one of them is refused.
A wheel names its bundles as entry points of the group jitmx.bundles: kernels = "acme.data" is acme/data/kernels.jitmx.
""",
)
@json_option
def command(as_json: bool) -> None:
    """List the bundles that look-ups go through: those in JITMX_SITE_CACHE, then those of installed wheels.

    The wheels are not imported for it.
    """
    now = settings.current()
    named = [("JITMX_SITE_CACHE", place) for place in now.site_cache if not files.is_directory(place)]
    rows: list[dict[str, Any]] = []
    for origin, place in [*named, *bundle_layer.installed()]:
        try:
            found = bundle.open_(place, trusted=bundle_layer.trusted(), own=not now.allow_shared_cache)
            rows.append({"name": origin, **opening.described(found), "fault": None})
        except JitmxError as error:
            rows.append({"name": origin, "file": str(place), "fault": str(error)})
    if as_json:
        output.emit({"bundles": rows})
    else:
        for row in rows:
            said = row["fault"] or f"{row['kernels']} kernels, signed by {', '.join(row['signed_by']) or 'nobody'}"
            output.say(f"{row['name']}: {row['file']}: {said}")
        if not rows:
            output.say("no bundles: no wheel here has one, and JITMX_SITE_CACHE names none", err=True)
    if any(row["fault"] for row in rows):
        raise click.exceptions.Exit(1)
