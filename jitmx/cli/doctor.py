"""`jitmx doctor`: what this machine has and lacks, in plain words, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import click

from jitmx.cli import output
from jitmx.cli.options import json_option

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command(
    "doctor",
    short_help="What is missing on this machine, and what to do.",
    epilog="""\b
Examples:
  jitmx doctor            can kernels be compiled and kept here?
  jitmx doctor --gpu      and can they run here? A missing driver, GPU or torch is then a problem
  jitmx doctor --json | jq '.checks[] | select(.status == "problem")'

\b
Exit codes: 0 nothing needed is broken; 1 a problem was found.
""",
)
@click.option(
    "--gpu", is_flag=True, help="Kernels are to run here: a missing driver, GPU or CUDA build of torch is a problem."
)
@json_option
def command(gpu: bool, as_json: bool) -> None:
    """Check driver, GPU, NVRTC, headers, nvdisasm, cache directory, clock, torch and CuPy.

    Each finding says what to do. A note is worth knowing; a problem stops jitmx from working.
    """
    from jitmx.cli import checks

    found = checks.run(gpu=gpu)
    problems = sum(check.status == "problem" for check in found)
    if as_json:
        output.emit({"checks": [asdict(check) for check in found], "problems": problems})
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            told = f"  {check.name:<{width}}  {check.found}"
            output.say(told, opening=f"{check.status:<7}", fg=_COLOURS[check.status])
            if check.remedy:
                output.say(f"{'':<7}  {'':<{width}}  → {check.remedy}")
        output.say(f"{problems} problem{'' if problems == 1 else 's'}")
    if problems:
        raise click.exceptions.Exit(1)
