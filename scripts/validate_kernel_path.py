"""Check that a profile holds the kernels that a configuration must run, and none that it must not.

    python scripts/validate_kernel_path.py trace.json.gz --layers moe,qkv,o --passes 24 --model-layers 36
    python scripts/validate_kernel_path.py level1.5.json --layers none --backend triton

A report of level 1.5 knows its passes and layers; a bare trace is judged by "seen at all" where they are not given.
Exit codes: 0 every rule holds, 1 one does not, 2 usage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.protocol import configurations, kernel_rules, profiles
from scripts.protocol.report import FAILED, ProtocolError, Report


@click.command(context_settings={"show_default": True})
@click.argument("profile", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--layers", "text", default="all", help="What jitmx serves: moe,qkv,o,lm_head, all, or none.")
@click.option("--backend", type=click.Choice(configurations.STOCK), default="auto", help="vLLM's backend for experts.")
@click.option("--activation", type=click.Choice(configurations.ACTIVATIONS), default="bf16", help="Of the experts.")
@click.option("--attention", type=click.Choice(configurations.ATTENTION), default="auto", help="Jitmx's, or vLLM's.")
@click.option("--passes", type=click.IntRange(1), help="Forward passes in the profile.")
@click.option("--model-layers", type=click.IntRange(1), help="Transformer layers of the model.")
def main(
    profile: Path,
    text: str,
    backend: str,
    activation: str,
    attention: str,
    passes: int | None,
    model_layers: int | None,
) -> None:
    """Judge the kernels in PROFILE by the rules for a configuration; print one JSON object."""
    try:
        layers = configurations.layers(text)
        asked = configurations.Configuration(layers, backend, activation, attention=attention)
        found = profiles.read(profile)
    except ProtocolError as error:
        raise click.UsageError(str(error)) from None
    report = Report("validate_kernel_path", {"profile": profile.name, "configuration": asked.as_dict()})
    for item in found:
        kernel_rules.check(report, item, asked, passes=passes, layers=model_layers)
    click.echo(json.dumps(report.payload(), indent=2))
    if not report.passed:
        raise click.exceptions.Exit(FAILED)


if __name__ == "__main__":
    main()
