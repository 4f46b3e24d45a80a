"""Write a synthetic Eagle3 draft for gpt-oss, or a target and a draft whose acceptance is known.

python scripts/make_draft.py OUT --preset eagle3-120b
python scripts/make_draft.py OUT --model FOLDER --vocab 32000
python scripts/make_draft.py OUT --bigram --wrong 0.25
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx import drafts, models
from jitmx.errors import JitmxError
from scripts.protocol.report import SCHEMA_VERSION


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(list(drafts.NAMED)), help="Sizes of a draft known by name.")
@click.option("--model", help="Instead, sizes that go with this target: a name or a folder with a config.json.")
@click.option("--vocab", type=click.IntRange(1), help="Of --model: tokens of the draft; by default the target's.")
@click.option("--flat-ids", is_flag=True, help="Name the target's layers at the top of config.json.")
@click.option("--head/--no-head", default=True, help="With a head of its own, or without: the target's.")
@click.option("--seed", default=0, help="The same seed gives the same bytes.")
@click.option(
    "--bigram", is_flag=True,
    help="Write OUT/target, whose next token is fixed by the last, and OUT/draft, which knows it.",
)  # fmt: skip
@click.option("--full", is_flag=True, help="Of --bigram: the draft has the target's vocabulary and head, and no d2t.")
@click.option(
    "--wrong",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Of --bigram: share of d2t that is wrong, and so rejected.",
)
def main(
    out: Path, preset: str | None, model: str | None, vocab: int | None, flat_ids: bool, head: bool, seed: int,
    bigram: bool, full: bool, wrong: float,
) -> None:  # fmt: skip
    """Write a checkpoint in the layout of Eagle3 drafts into the folder OUT; print one JSON object."""
    from scripts.protocol import drafts as checkpoints

    if (preset is not None) + (model is not None) + bigram != 1:
        raise click.UsageError("give one of --preset, --model and --bigram")
    try:
        if bigram:
            made = checkpoints.Bigram()
            made.write(out / "target", out / "draft", reduced_vocabulary=not full, wrong=wrong)
            answer = {
                "target": str(out / "target"), "draft": str(out / "draft"), "acceptance": 1.0 - wrong,
                "prompt": made.ring[:8].tolist(),
            }  # fmt: skip
        else:
            if preset is not None:
                sizes, ids = checkpoints.named(preset)
            else:
                target = models.find(str(model))
                sizes = replace(
                    drafts.EAGLE3_120B, hidden=target.hidden, intermediate=6 * target.hidden,
                    target_hidden=target.hidden, heads=target.heads, kv_heads=target.kv_heads, head_dim=target.head_dim,
                    vocabulary=vocab or target.vocabulary, target_vocabulary=target.vocabulary,
                )  # fmt: skip
                ids = checkpoints.default_layers(target.layers)
                sizes = replace(sizes, states=len(ids))
            written = checkpoints.write(out, sizes, ids, seed=seed, nested=not flat_ids, head=head)
            answer = {"folder": str(written.folder), "files": list(written.files), "bytes": written.nbytes}
    except JitmxError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **answer}))


if __name__ == "__main__":
    main()
