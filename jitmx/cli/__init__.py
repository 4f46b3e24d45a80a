"""The command line: one file a verb, imported when it is called.

Data goes to stdout, progress and messages to stderr. Exit codes: 0 fine, 1 findings (stale, corrupt, unmet contract),
2 usage, 3 compile failure, 130 interrupted. The `cache` verbs import neither torch, cupy, numpy nor jinja2, so that
they answer at once.
"""

from __future__ import annotations

from contextlib import suppress

import click

from jitmx import logs, settings
from jitmx.cli import output
from jitmx.cli.group import Program
from jitmx.errors import SettingError


def _version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from importlib.metadata import version

    output.say(f"jitmx {version('jitmx')}")
    context.exit()


@click.group(
    cls=Program,
    package="jitmx.cli",
    verbs=("warmup", "variants", "explain", "verify", "bench", "tune", "report", "env", "doctor", "cache", "bundle"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  jitmx warmup --arch sm_121              compile every default kernel; no GPU needed
  jitmx explain linear -m 1 -n 5120 -k 2880 --arch sm_121
  jitmx cache why quantize.quantize       what changed since it was last compiled
  jitmx doctor                            what is missing on this machine, and what to do

Every verb takes --json. Settings are environment variables: see `jitmx env`.
""",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version and exit."
)
def main() -> None:
    """JIT-compiled CUDA kernels for MXFP4 inference.

    Kernels are rendered from templates, compiled by NVRTC, kept on disk and picked by batch size.
    Exit codes: 0 fine, 1 findings, 2 usage, 3 compile failure, 130 interrupted.
    """
    # A bad setting is for the verb to report: `doctor` has more to say about it than that.
    with suppress(SettingError):
        logs.to_stderr(settings.reload())
