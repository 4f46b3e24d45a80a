"""What an Eagle3 draft gains in vLLM, with jitmx and without: each engine in a process of its own, on a GPU.

python scripts/speculation_bench.py speed OUT --model gpt-oss-120b --draft gpt-oss-120b-eagle3 --k 1 --k 2
python scripts/speculation_bench.py acceptance OUT --corrupted 0.25
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx.errors import JitmxError
from scripts.protocol.report import SCHEMA_VERSION, ProtocolError
from scripts.protocol.sizes import PRESETS as TARGETS
from scripts.protocol.speculation import SIDES, differing, engine, gains, run


def _rates(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[float, ...]]:
    try:
        return [tuple(float(part) for part in text.split(",")) for text in texts]
    except ValueError:
        raise click.BadParameter(f"{texts!r} are no rates, such as .74,.54") from None


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Time speculation with an Eagle3 draft of gpt-oss in vLLM, or measure what is accepted of a pair that is known."""


@main.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", type=click.Choice(list(TARGETS)), default="gpt-oss-120b", help="Sizes of the target.")
@click.option("--draft", default="gpt-oss-120b-eagle3", help="Of scripts/protocol/drafts.py, or a checkpoint's folder.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, default=(1, 2), help="Tokens proposed a step.")
@click.option(
    "--rates", callback=_rates, multiple=True, default=(".74,.54", ".60,.36"),
    help="Part of proposals whose first 1, 2 ... tokens are accepted; may be repeated.",
)  # fmt: skip
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Whose engines.")
@click.option("--layers", default="all", help="Of the target: those that jitmx serves.")
@click.option("--draft-layers", default="all", help="Of the draft: those that jitmx serves.")
@click.option("--batch", "batches", type=click.IntRange(1, 8), multiple=True, default=(1,), help="Requests at a time.")
@click.option("--engine", "more", default="{}", help="More arguments of vllm.LLM, as JSON.")
def speed(
    out: Path,
    model: str,
    draft: str,
    ks: tuple[int, ...],
    rates: list[tuple[float, ...]],
    sides: tuple[str, ...],
    layers: str,
    draft_layers: str,
    batches: tuple[int, ...],
    more: str,
) -> None:
    """Time engines with random weights and given acceptance; results, logs and the draft go to the folder OUT."""
    from scripts.protocol import drafts, sizes

    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(sizes.config(TARGETS[model])))
    folder = Path(draft)
    try:
        if draft in drafts.PRESETS:
            folder = out / draft
            if not (folder / "config.json").is_file():
                drafts.write(folder, drafts.PRESETS[draft])
        how: dict[str, Any] = {"layers": layers, "draft_layers": draft_layers, "more": json.loads(more)}
        chosen = [
            engine(side, target, folder, k, given, **how)
            for side in sides
            for k, given in [(0, ()), *((k, given) for given in rates for k in ks)]
        ]
        found: dict[str, Any] = {}
        for number, one in enumerate(chosen):
            found[one.name] = run(one, batches, log=out / f"engine-{number}.log")
            click.echo(f"RESULT {one.name} {json.dumps(found[one.name]['batches'])}")
    except (JitmxError, ProtocolError, json.JSONDecodeError) as error:
        raise click.ClickException(str(error)) from None
    rows = {str(batch): gains(found, chosen, batch) for batch in batches}
    for batch, own in rows.items():
        for row in own:
            click.echo(
                f"GAIN batch {batch} {row['side']:<5} k={row['k']} {row['rates']}: {row['tok_s']} tok/s, "
                f"{row['ms_step']} ms a step of {row['tokens_step']} tokens, {row['gain']} x"
            )
    (out / "speculation.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "batches": rows}, indent=1))


@main.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", "preset", type=click.Choice(list(TARGETS)), default="small", help="Sizes of the target.")
@click.option("--draft-vocab", type=click.IntRange(64), default=4096, help="Tokens that the draft can propose.")
@click.option("--corrupted", type=click.FloatRange(0, 0.5), default=0.0, help="Part of d2t that is wrong.")
@click.option("--k", type=click.IntRange(1), default=2, help="Tokens proposed a step.")
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Whose engines.")
def acceptance(out: Path, preset: str, draft_vocab: int, corrupted: float, k: int, sides: tuple[str, ...]) -> None:
    """Measure what is accepted of a pair whose acceptance is known; compare texts with those without speculation."""
    from scripts.protocol import bigram, drafts

    sizes = TARGETS[preset]
    try:
        ids = tuple(sorted({1, max(1, sizes.layers // 2), sizes.layers - 1}))
        pair = bigram.Pair(sizes, drafts.of_target(sizes, draft_vocab=draft_vocab, aux_layers=ids), 0, corrupted)
        bigram.write(pair, out / "target", out / "draft")
        prompts = [pair.cycle[start : start + 16].tolist() for start in range(0, 64, 8)]
        for side in sides:
            texts = []
            for steps in (0, k):
                one = engine(side, out / "target", out / "draft", steps, real=True)
                found = run(one, (), prompts=prompts, log=out / f"{side}-{steps}.log")
                texts.append(found["texts"])
            counts, wanted = found["counts"], sum(1 - corrupted * min(at + 1, 2) for at in range(k))
            cycle = pair.cycle.tolist()
            right = sum(
                text == [cycle[(start + 16 + at) % len(cycle)] for at in range(256)]
                for start, text in zip(range(0, 64, 8), texts[1], strict=True)
            )
            click.echo(
                f"ACCEPTED {side} k={k}: {counts['accepted'] / max(counts['drafts'], 1):.4f} tokens a proposal"
                f"{f', wanted {wanted:.4f}' if k <= 2 else ''}; {right} of {len(prompts)} texts are the cycle's, "
                f"{differing(*texts)} part from those without speculation"
            )
    except (JitmxError, ProtocolError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
