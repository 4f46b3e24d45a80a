"""Write a synthetic gpt-oss checkpoint, or a copy of one with dense weights that MXFP4 holds exactly.

python scripts/make_checkpoint.py OUT --preset tiny
python scripts/make_checkpoint.py OUT --hidden 256 --layers 4 --experts 32 --shard-mb 16 --on-grid
python scripts/make_checkpoint.py OUT --round-dense MODEL
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx.errors import JitmxError
from scripts.protocol.report import SCHEMA_VERSION
from scripts.protocol.sizes import PRESETS, Sizes


def _size_options(function: Any) -> Any:
    for item in reversed(dataclasses.fields(Sizes)):
        name = f"--{item.name.replace('_', '-')}"
        function = click.option(name, item.name, type=click.IntRange(1), help="Over the preset's.")(function)
    return function


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), default="tiny", help="Sizes to start from.")
@_size_options
@click.option("--seed", default=0, help="The same seed gives the same bytes.")
@click.option("--on-grid", is_flag=True, help="Attention and output weights that MXFP4 holds exactly.")
@click.option("--shard-mb", type=click.FloatRange(min=0, min_open=True), default=5120.0, help="MiB of tensors a file.")
@click.option("--tokenizer/--no-tokenizer", default=True, help="Also write a tokenizer, a token a byte.")
@click.option(
    "--round-dense", "source", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Copy this checkpoint and round its attention and output weights to MXFP4; sizes and seed play no part.",
)  # fmt: skip
def main(
    out: Path,
    preset: str,
    seed: int,
    on_grid: bool,
    shard_mb: float,
    tokenizer: bool,
    source: Path | None,
    **given: int | None,
) -> None:
    """Write a gpt-oss checkpoint in the Hugging Face layout into the folder OUT; print one JSON object."""
    from scripts.protocol import checkpoint

    asked = {name: value for name, value in given.items() if value is not None}
    try:
        if source is not None:
            if asked or on_grid:
                raise click.UsageError("--round-dense takes its sizes and values from the checkpoint that it copies")
            written = checkpoint.rounded_copy(source, out)
        else:
            written = checkpoint.write(
                out, dataclasses.replace(PRESETS[preset], **asked), seed=seed, on_grid=on_grid,
                shard_bytes=max(1, int(shard_mb * 2**20)), tokenizer=tokenizer,
            )  # fmt: skip
    except JitmxError as error:
        raise click.ClickException(str(error)) from None
    answer = {"folder": str(written.folder), "files": list(written.files), "bytes": written.nbytes}
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **answer}))


if __name__ == "__main__":
    main()
