"""What an Eagle3 draft gains in vLLM, with jitmx and without: each engine in a process of its own, on a GPU.

python scripts/speculation_bench.py speed OUT
python scripts/speculation_bench.py speed OUT --part plain --part speculate --k 3
python scripts/speculation_bench.py speed OUT --part draft --part products
python scripts/speculation_bench.py acceptance OUT --corrupted 0.25
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx.errors import JitmxError
from scripts.protocol.report import SCHEMA_VERSION, ProtocolError
from scripts.protocol.sizes import PRESETS as TARGETS
from scripts.protocol.sizes import Sizes
from scripts.protocol.speculation import SIDES, Asked, Engine, engine, parted, prompts, run, with_gains, words

PARTS = ("plain", "speculate", "stock", "draft", "products")
_FEW_LAYERS = 2  # of a target whose draft alone is timed
_TEXTS = 4  # requests whose texts are compared


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
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, default=("plain", "speculate"),
    help="plain: engines without a draft. speculate: jitmx with k drafts, its graphs, --rates and --replay. stock: "
    "vLLM with k drafts and --rates. draft: graphs of drafts of both vocabularies, sides. products: a draft's kernels.",
)  # fmt: skip
@click.option("--model", type=click.Choice(list(TARGETS)), default="gpt-oss-120b", help="Sizes of the target.")
@click.option("--draft", default="gpt-oss-120b-eagle3", help="Of scripts/protocol/drafts.py, or a checkpoint's folder.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, default=(1, 2), help="Tokens proposed a step.")
@click.option(
    "--rates", callback=_rates, multiple=True, default=(".74,.54", ".60,.36"),
    help="Part of proposals whose first 1, 2 ... tokens are accepted; may be repeated. Engines take those of k.",
)  # fmt: skip
@click.option(
    "--replay", type=click.FloatRange(0, 1), multiple=True, default=(0.6, 0.7, 0.8),
    help="Chance that a token of a recorded run is proposed in the place of the draft's; may be repeated.",
)  # fmt: skip
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Of plain and draft.")
@click.option("--layers", default="all", help="Of the target: those that jitmx serves.")
@click.option("--draft-layers", default="all", help="Of the draft: those that jitmx serves.")
@click.option("--batch", "batches", type=click.IntRange(1, 8), multiple=True, default=(1,), help="Requests at a time.")
@click.option("--engine", "more", default="{}", help="More arguments of vllm.LLM, as JSON.")
def speed(
    out: Path, parts: tuple[str, ...], model: str, draft: str, ks: tuple[int, ...], rates: list[tuple[float, ...]],
    replay: tuple[float, ...], sides: tuple[str, ...], layers: str, draft_layers: str, batches: tuple[int, ...],
    more: str,
) -> None:  # fmt: skip
    """Time engines with random weights and chosen acceptance.

    Each figure is a line of OUT/results.jsonl as soon as it is known, so that a run that is cut off keeps what it has;
    logs, target and draft are in OUT, too. Starting an engine takes about 70 s, and what is asked of it half a minute.
    """
    how: dict[str, Any] = {"layers": layers, "draft_layers": draft_layers}
    try:
        how["more"] = json.loads(more)
        sizes = TARGETS[model]
        target = _target(out / "target", sizes)
        known: list[list[int]] = []
        for one, asked in _engines(out, target, sizes, draft, parts, ks, sides, how):
            if one.side == "jitmx" and "draft" not in one.label:
                asked = dataclasses.replace(asked, prompts=prompts(target, _TEXTS), known=known)
            given = [given for given in rates if len(given) >= one.k]
            asked = dataclasses.replace(
                asked, batches=batches, rates=given if asked.rates else (), replay=replay if asked.replay else ()
            )
            for row in run(one, asked, out):
                click.echo("RESULT " + words(row))
                if row["what"] == "texts" and not one.k:
                    known = row["texts"]
        if "products" in parts:
            _products(out)
    except (JitmxError, ProtocolError, json.JSONDecodeError) as error:
        raise click.ClickException(str(error)) from None
    results = out / "results.jsonl"
    rows = with_gains(json.loads(line) for line in results.read_text().splitlines()) if results.is_file() else []
    for row in rows:
        click.echo("GAIN " + words(row))
    (out / "speculation.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "rows": rows}, indent=1))


def _engines(
    out: Path, target: Path, sizes: Sizes, draft: str, parts: tuple[str, ...], ks: tuple[int, ...],
    sides: tuple[str, ...], how: dict[str, Any],
) -> Iterator[tuple[Engine, Asked]]:  # fmt: skip
    """The engines of these parts, in the order that matters, with what each is asked for."""
    some = Asked(rates=((),), replay=(0.0,), graphs=True)  # all that there is
    if "plain" in parts:
        for side in sides:
            yield engine(side, target, target, 0, **how), Asked(plain=True, graphs=True)
    if "speculate" in parts:
        for k in ks:
            yield engine("jitmx", target, _draft(out, draft), k, **how), some
    if "stock" in parts:
        for k in ks:
            yield engine("stock", target, _draft(out, draft), k, **how), dataclasses.replace(some, replay=())
    if "draft" in parts:
        small = dataclasses.replace(sizes, layers=_FEW_LAYERS)
        few = _target(out / "target-small", small)
        for vocabulary in (sizes.vocab, 32000):
            folder = _draft(out, draft, vocabulary)
            for side in sides:
                yield engine(side, few, folder, 2, label=f"draft of {vocabulary}", **how), Asked(graphs=True)


def _target(folder: Path, sizes: Sizes) -> Path:
    from scripts.protocol.sizes import config

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(sizes)))
    return folder


def _draft(out: Path, name: str, vocabulary: int | None = None) -> Path:
    """The folder of a draft, written where it is known by name.

    Args:
        vocabulary: tokens that it proposes, of a target with few layers; None: as the name has it.
    """
    from scripts.protocol import drafts

    if name not in drafts.PRESETS:
        return Path(name)
    sizes = drafts.PRESETS[name]
    folder = out / name
    if vocabulary is not None:
        sizes = dataclasses.replace(sizes, draft_vocab=min(vocabulary, sizes.vocab), aux_layers=(0, 1, 2))
        folder = out / f"{name}-{vocabulary}"
    if not (folder / "config.json").is_file():
        drafts.write(folder, sizes)
    return folder


def _products(out: Path) -> None:
    """Microseconds of a draft's products and of its head's choice, in a graph over weights that pass the L2."""
    import torch

    import jitmx
    from jitmx.bench import timing
    from jitmx.models import NAMED_DRAFTS

    sizes = NAMED_DRAFTS["gpt-oss-120b-eagle3"]

    def said(what: str, rows: int, n: int, k: int, call: Any, pack: Any) -> None:
        nbytes = n * k * 17 // 32
        weights = [pack(torch.randn(n, k, device="cuda").bfloat16()) for _ in range(timing.copies_past_l2(nbytes))]
        x = torch.randn(rows, k, device="cuda").bfloat16()

        def every() -> None:
            for weight in weights:
                call(x, weight)

        us = timing.replayed(every) / len(weights) * 1e6
        row = {"engine": "products", "side": "jitmx", "k": 0, "what": what, "rows": rows, "n": n, "us": round(us, 2)}
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        click.echo("RESULT " + words(row))

    def packed(weight: Any) -> Any:
        return jitmx.pack_weight(jitmx.quantize(weight, "mxfp4"))

    def gates(weight: Any) -> Any:
        return packed(jitmx.interleave_gate_up(weight))

    for rows in (1, 2, 3, 4):
        for vocabulary in (sizes.vocabulary, 32000):
            said("head", rows, vocabulary, sizes.hidden, jitmx.linear, packed)
            said("head's largest", rows, vocabulary, sizes.hidden, jitmx.linear_argmax, packed)
        for kind in ("fc", "qkv", "o", "gate_up", "down"):
            n, k = sizes.dense[kind]
            if kind == "gate_up":
                said("gate_up with swiglu", rows, n, k, jitmx.linear_swiglu, gates)
            said(kind, rows, n, k, jitmx.linear, packed)


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
        asked = [pair.cycle[start : start + 16].tolist() for start in range(0, 64, 8)]
        for side in sides:
            texts, counts = [], {}
            for steps in (0, k):
                one = engine(side, out / "target", out / "draft", steps, real=True)
                (counts,) = [row for row in run(one, Asked(prompts=asked), out) if row["what"] == "texts"]
                texts.append(counts["texts"])
            wanted = sum(1 - corrupted * min(at + 1, 2) for at in range(k))
            cycle = pair.cycle.tolist()
            right = sum(
                text == [cycle[(start + 16 + at) % len(cycle)] for at in range(len(text))]
                for start, text in zip(range(0, 64, 8), texts[1], strict=True)
            )
            click.echo(
                f"ACCEPTED {side} k={k}: {counts['accepted'] / max(counts['drafts'], 1):.4f} tokens a proposal"
                f"{f', wanted {wanted:.4f}' if k <= 2 else ''}; {right} of {len(asked)} texts are the cycle's, "
                f"{len(parted(*texts))} part from those without speculation"
            )
    except (JitmxError, ProtocolError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
