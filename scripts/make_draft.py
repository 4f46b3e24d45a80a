"""Write a synthetic Eagle3 draft of gpt-oss, or a target and a draft whose acceptance is known.

python scripts/make_draft.py OUT --preset gpt-oss-120b-eagle3
python scripts/make_draft.py OUT --preset tiny --draft-vocab 256 --aux-layers 1,2,3 --flat
python scripts/make_draft.py OUT --bigram TARGET --target-preset gpt-oss-20b --draft-vocab 32000 --corrupted 0.25
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
from scripts.protocol.sizes import PRESETS as TARGETS


def _ids(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 1,17,32") from None


_SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "draft_vocab", "positions")


def _size_options(function: Any) -> Any:
    for name in reversed(_SIZES):
        function = click.option(f"--{name.replace('_', '-')}", name, type=click.IntRange(1), help="Over the preset's.")(
            function
        )
    return function


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", default="tiny", help="Sizes to start from: a name of scripts/protocol/drafts.py.")
@_size_options
@click.option("--aux-layers", callback=_ids, metavar="IDS", help="Boundaries of the target's blocks that it reads.")
@click.option("--flat", is_flag=True, help="These beside the sizes in config.json, not within eagle_config.")
@click.option("--no-head", is_flag=True, help="Without a head of its own: engines give it the target's.")
@click.option("--seed", default=0, help="The same seed gives the same bytes.")
@click.option("--on-grid", is_flag=True, help="Weights that MXFP4 holds exactly.")
@click.option("--shard-mb", type=click.FloatRange(min=0, min_open=True), default=5120.0, help="MiB of tensors a file.")
@click.option(
    "--bigram", "target", type=click.Path(file_okay=False, path_type=Path),
    help="Also write a target into this folder, nearly all of whose tokens the draft proposes; sizes are the target's.",
)  # fmt: skip
@click.option("--target-preset", type=click.Choice(list(TARGETS)), default="tiny", help="Of --bigram: the target's.")
@click.option("--layers", type=click.IntRange(2), help="Of --bigram: the target's, over its preset.")
@click.option("--corrupted", type=click.FloatRange(0, 0.5), default=0.0, help="Of --bigram: part of d2t that is wrong.")
def main(
    out: Path,
    preset: str,
    aux_layers: tuple[int, ...] | None,
    flat: bool,
    no_head: bool,
    seed: int,
    on_grid: bool,
    shard_mb: float,
    target: Path | None,
    target_preset: str,
    layers: int | None,
    corrupted: float,
    **given: int | None,
) -> None:
    """Write an Eagle3 draft of gpt-oss, as vLLM loads it, into the folder OUT; print one JSON object."""
    from scripts.protocol import bigram, drafts

    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    asked |= {"nested": False} if flat else {}
    shard_bytes = max(1, int(shard_mb * 2**20))
    answer: dict[str, Any] = {}
    try:
        if target is None:
            if preset not in drafts.PRESETS:
                raise click.UsageError(f"--preset {preset} is none of {', '.join(drafts.PRESETS)}")
            if corrupted or layers:
                raise click.UsageError("--corrupted and --layers are of a pair: name the target's folder by --bigram")
            asked |= {} if aux_layers is None else {"aux_layers": aux_layers}
            sizes = dataclasses.replace(drafts.PRESETS[preset], **asked)
            written = drafts.write(out, sizes, seed=seed, on_grid=on_grid, head=not no_head, shard_bytes=shard_bytes)
        elif no_head:
            raise click.UsageError("--no-head is of a draft with random weights: that of --bigram has a head")
        else:
            of_target = {name: asked.pop(name) for name in ("hidden", "vocab", "positions") if name in asked}
            own = dataclasses.replace(TARGETS[target_preset], **of_target, **({"layers": layers} if layers else {}))
            few = own.layers
            asked["aux_layers"] = aux_layers or tuple(sorted({1, max(1, few // 2), max(1, few - 1)}))
            pair = bigram.Pair(own, drafts.of_target(own, **asked), seed, corrupted)
            made, written = bigram.write(pair, target, out, shard_bytes=shard_bytes)
            answer = {
                "target": str(made.folder), "target_bytes": made.nbytes, "prompt": pair.cycle[:2].tolist(),
                "acceptance": [1 - corrupted * min(position, 2) for position in (1, 2)],
            }  # fmt: skip
    except JitmxError as error:
        raise click.ClickException(str(error)) from None
    answer |= {"folder": str(written.folder), "files": list(written.files), "bytes": written.nbytes}
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **answer}))


if __name__ == "__main__":
    main()
