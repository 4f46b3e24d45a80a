"""`jitmx cache verify`: is what is kept still what was written?"""

from __future__ import annotations

from dataclasses import asdict

import click

from jitmx import ledger
from jitmx.cache import store, verify
from jitmx.cli import output
from jitmx.cli.options import json_option, quiet_option
from jitmx.cli.progress import Progress


@click.command(
    "verify",
    short_help="Check digests and leftovers; mend them.",
    epilog="""\b
Examples:
  jitmx cache verify
  jitmx cache verify --repair
  jitmx cache verify --recompile -q --json | jq .findings

\b
Exit codes: 0 all is sound, or was mended; 1 something is left: damage, leftovers, an unmet contract.
Mending takes files out; what is missing then is compiled again on its next use.
""",
)
@click.option("--recompile", is_flag=True, help="Compile each entry again and compare the machine code, byte by byte.")
@click.option("--repair", is_flag=True, help="Take out what is found.")
@quiet_option
@json_option
def command(recompile: bool, repair: bool, quiet: bool, as_json: bool) -> None:
    """Check digests, records, ledger and leftovers of the whole cache. Site caches are left to their owners."""
    cache = store.current()
    again: verify.Recompile | None = None
    if recompile:
        from jitmx import audit

        again = audit.recompile
    total = sum(1 for _ in cache.records()) if recompile else 0
    with Progress(total, "Compiling again", quiet=quiet or not recompile) as progress:
        report = verify.verify(
            cache, repair=repair, recompile=again, ledger=ledger.damage, progress=progress.step
        )  # fmt: skip
    if as_json:
        output.emit(
            {
                "records": report.records,
                "objects": report.objects,
                "findings": [asdict(finding) | {"path": str(finding.path)} for finding in report.findings],
                "mended": len(report.findings) - len(report.unmended),
                "newer": [str(path) for path in report.newer],
                "foreign": [str(path) for path in report.foreign],
                "recompiled": report.recompiled,
                "skipped": report.skipped,
            }
        )
    else:
        for finding in report.findings:
            outcome = (
                " [mended]" if finding.mended else f" [not mended: {finding.obstacle}]" if finding.obstacle else ""
            )
            output.say(f"{finding.kind}: {finding.what}{outcome}\n  {finding.path}")
        counts = f"{report.records} records, {report.objects} objects"
        if recompile:
            counts += f", {report.recompiled} compiled again"
            if report.skipped:
                counts += f", {report.skipped} not compared (another compiler or other headers, or no source kept)"
        if report.newer:
            counts += f", {len(report.newer)} records of a newer jitmx left alone"
        if report.foreign:
            counts += f", {len(report.foreign)} files that are not jitmx's left alone"
        left = len(report.unmended)
        mended = len(report.findings) - left
        output.say(f"{counts}: {left} finding{'' if left == 1 else 's'}" + (f", {mended} mended" if mended else ""))
        if left and not repair:
            output.say("`jitmx cache verify --repair` takes out what is damaged or left over", err=True)
    if report.unmended:
        raise click.exceptions.Exit(1)
