"""What an Eagle3 draft gains in vLLM, with jitmx and without: each engine in a process of its own, on a GPU.

python scripts/speculation_bench.py speed OUT
python scripts/speculation_bench.py speed OUT --part plain --side jitmx
python scripts/speculation_bench.py speed OUT --part replay --part graphs --k 1 --k 2 --limit 420
python scripts/speculation_bench.py speed OUT --part draft --part products
python scripts/speculation_bench.py acceptance OUT --corrupted 0.25
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx.errors import JitmxError
from scripts.protocol.report import SCHEMA_VERSION, ProtocolError
from scripts.protocol.sizes import PRESETS as TARGETS
from scripts.protocol.sizes import Sizes
from scripts.protocol.speculation import SIDES, Asked, Engine, engine, run, with_gains, words

PARTS = ("plain", "graphs", "replay", "synthetic", "stock", "draft", "products")
_FEW_LAYERS = 2  # of a target whose draft alone is timed
_OFF = 0.01  # of what is proposed: the first token and the last step of a text count otherwise
_NEAR = 1e-3  # of the tokens of texts: so many may be another where two logits are nearly equal


def _rates(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[float, ...]]:
    try:
        return [tuple(float(part) for part in text.split(",")) for text in texts]
    except ValueError:
        raise click.BadParameter(f"{texts!r} are no rates, such as .74,.54") from None


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Time speculation with an Eagle3 draft of gpt-oss in vLLM, or measure what is accepted of a pair that is known."""
    # `timeout` and Ctrl-C end the engine too, which else would keep the card.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _arguments(_context: click.Context, _parameter: click.Parameter, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r} is no JSON object, such as '{{\"seed\": 1}}'")
    return found


_MORE = click.option("--engine", "more", callback=_arguments, default="{}", help="More arguments of vllm.LLM, as JSON.")
_LIMIT = click.option(
    "--limit", type=click.FloatRange(1), help="Seconds that all of it may take: the engine at work then is ended."
)


@main.command()
@click.argument("out", type=click.Path(file_okay=False, resolve_path=True, path_type=Path))
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS[:4],
    help="plain: engines without a draft, 5 s each once they run. Of jitmx with k drafts, in one engine: graphs (5 s), "
    "replay (5 s for each chance) and synthetic (15 s for each of --rates). stock: vLLM with k drafts, graphs and "
    "synthetic (40 s for each). draft: graphs of drafts of both vocabularies, by sides, in engines of two layers (40 s "
    "each). products: a draft's kernels without an engine, 60 s.",
)  # fmt: skip
@click.option("--model", type=click.Choice(list(TARGETS)), default="gpt-oss-120b", help="Sizes of the target.")
@click.option("--draft", default="gpt-oss-120b-eagle3", help="Of scripts/protocol/drafts.py, or a checkpoint's folder.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, default=(1, 2, 3), help="Tokens proposed a step.")
@click.option(
    "--rates", callback=_rates, multiple=True, default=(".74,.54,.40", ".60,.36,.21"),
    help="Of synthetic: part of proposals whose first 1, 2 ... tokens are accepted; may be repeated. An engine takes "
    "the first k.",
)  # fmt: skip
@click.option(
    "--replay", type=click.FloatRange(0, 1), multiple=True, default=(0.6, 0.7, 0.8),
    help="Of replay: chance that a draft is right where those before it are; may be repeated.",
)  # fmt: skip
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Of plain and draft.")
@click.option("--layers", default="all", help="Of the target: those that jitmx serves.")
@click.option("--draft-layers", default="all", help="Of the draft: those that jitmx serves.")
@click.option("--batch", "batches", type=click.IntRange(1, 8), multiple=True, default=(1,), help="Requests at a time.")
@_MORE
@_LIMIT
def speed(
    out: Path, parts: tuple[str, ...], model: str, draft: str, ks: tuple[int, ...], rates: list[tuple[float, ...]],
    replay: tuple[float, ...], sides: tuple[str, ...], layers: str, draft_layers: str, batches: tuple[int, ...],
    more: dict[str, Any], limit: float | None,
) -> None:  # fmt: skip
    """Time engines with random weights and chosen acceptance.

    Each figure is a line of OUT/results.jsonl as soon as it is known, and printed, so that a run that is cut off keeps
    what it has; figures of several runs into one OUT belong together. Logs, target and draft are in OUT, too: the draft
    takes half a minute to write, once. Starting an engine of gpt-oss-120b takes about 70 s, the first one of all up to
    a minute more, in which kernels are compiled; one engine serves all that is asked of its side and k.

    What the target says is known, whoever serves it: a token that is another is counted, and ends the run with an
    error where the two logits are not nearly equal.
    """
    how: dict[str, Any] = {"layers": layers, "draft_layers": draft_layers, "more": more}
    until, faults = None if limit is None else time.monotonic() + limit, 0
    try:
        sizes = TARGETS[model]
        target = _target(out / "target", sizes)
        for one, asked in _engines(out, target, sizes, draft, parts, ks, sides, how):
            given = [given for given in rates if len(given) >= one.k]
            asked = dataclasses.replace(
                asked, batches=batches, rates=given if asked.rates else (), replay=replay if asked.replay else ()
            )
            for row in _found(one, asked, out, until):
                faults += row.get("faults", 0)
        if "products" in parts:
            _products(out)
    except (JitmxError, ProtocolError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        _gains(out)
    if faults:
        raise click.ClickException(f"{faults} texts part from the known one where its token is clearly the best")


def _found(one: Engine, asked: Asked, out: Path, until: float | None = None) -> Iterator[dict[str, Any]]:
    """What an engine finds, said as it comes."""
    left = None if until is None else until - time.monotonic()
    if left is not None and left <= 0:
        raise ProtocolError(f"--limit leaves no time for {one.name}; ask for it alone")
    for row in run(one, asked, out, left):
        click.echo("RESULT " + words(row))
        yield row


def _gains(out: Path) -> None:
    """Say and write what the timed engines gain, of all runs into this folder."""
    results = out / "results.jsonl"
    rows = with_gains(json.loads(line) for line in results.read_text().splitlines()) if results.is_file() else []
    for row in rows:
        click.echo("GAIN " + words(row))
    if rows:
        (out / "speculation.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "rows": rows}, indent=1))


def _engines(
    out: Path, target: Path, sizes: Sizes, draft: str, parts: tuple[str, ...], ks: tuple[int, ...],
    sides: tuple[str, ...], how: dict[str, Any],
) -> Iterator[tuple[Engine, Asked]]:  # fmt: skip
    """The engines of these parts, in the order that matters, with what each is asked for; some of all that there is."""
    rates, replay, graphs = (((),), (0.0,), True)
    own = Asked(
        rates=rates if "synthetic" in parts else (), replay=replay if "replay" in parts else (),
        graphs="graphs" in parts,
    )  # fmt: skip
    if "plain" in parts:
        for side in sides:
            yield engine(side, target, target, 0, **how), Asked(plain=True, graphs="graphs" in parts)
    if own != Asked():
        for k in ks:
            yield engine("jitmx", target, _draft(out, draft), k, **how), own
    if "stock" in parts:
        for k in ks:
            yield engine("stock", target, _draft(out, draft), k, **how), Asked(rates=rates, graphs=graphs)
    if "draft" in parts:
        small = dataclasses.replace(sizes, layers=_FEW_LAYERS)
        few = _target(out / "target-small", small)
        for vocabulary in (sizes.vocab, 32000):
            folder = _draft(out, draft, vocabulary)
            for side in sides:
                yield engine(side, few, folder, 2, label=f"draft of {vocabulary}", **how), Asked(graphs=graphs)


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
        unfinished = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was cut off
        drafts.write(unfinished, sizes)
        unfinished.rename(folder)
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
@click.argument("out", type=click.Path(file_okay=False, resolve_path=True, path_type=Path))
@click.option("--target", "preset", type=click.Choice(list(TARGETS)), default="small", help="Sizes of the target.")
@click.option("--draft-vocab", type=click.IntRange(64), default=4096, help="Tokens that the draft can propose.")
@click.option("--corrupted", type=click.FloatRange(0, 0.5), default=0.0, help="Part of d2t that is wrong.")
@click.option("--k", type=click.IntRange(1), default=2, help="Tokens proposed a step.")
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Whose engines.")
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.25,
    help="Logits that are no further apart are nearly equal: that is twice what bfloat16 tells apart from 16 to 32.",
)  # fmt: skip
@_MORE
@_LIMIT
def acceptance(
    out: Path, preset: str, draft_vocab: int, corrupted: float, k: int, sides: tuple[str, ...], tolerance: float,
    more: dict[str, Any], limit: float | None,
) -> None:  # fmt: skip
    """Measure what is accepted of a pair whose acceptance is known; compare texts with those without speculation.

    It ends with an error where more or fewer tokens are accepted than the pair's tables say; where a text parts from
    that without speculation at two logits that are not nearly equal, or at such as are at more than one token of a
    thousand. Two engines a side, a minute each.
    """
    from scripts.protocol import bigram, drafts

    sizes = TARGETS[preset]
    until, against = None if limit is None else time.monotonic() + limit, []
    try:
        ids = tuple(sorted({1, max(1, sizes.layers // 2), sizes.layers - 1}))
        pair = bigram.Pair(sizes, drafts.of_target(sizes, draft_vocab=draft_vocab, aux_layers=ids), 0, corrupted)
        bigram.write(pair, out / "target", out / "draft")
        asked = Asked(prompts=[pair.cycle[start : start + 16].tolist() for start in range(0, 64, 8)])
        for side in sides:
            plain, drafting = (
                engine(side, out / "target", out / "draft", steps, real=True, more=more) for steps in (0, k)
            )
            (known,) = (row["texts"] for row in _found(plain, asked, out, until) if row["what"] == "texts")
            asked_again = dataclasses.replace(asked, known=known, tolerance=tolerance)
            rows = {row["what"]: row for row in _found(drafting, asked_again, out, until)}
            lengths = [len(text) for text in rows["texts"]["texts"]]
            places = zip(range(16, 80, 8), lengths, strict=True)
            wanted = statistics.mean(pair.accepted(k, place, count) for place, count in places)
            cycle, agreed = pair.cycle.tolist(), rows["agreement"]
            right = sum(
                text == [cycle[(start + 16 + at) % len(cycle)] for at in range(len(text))]
                for start, text in zip(range(0, 64, 8), rows["texts"]["texts"], strict=True)
            )
            accepted = rows["texts"]["tokens_step"] - 1
            click.echo(
                f"ACCEPTED {side} k={k}: {accepted:.4f} tokens a proposal, wanted {wanted:.4f}; {right} of "
                f"{len(asked.prompts)} texts are the cycle's; "
                f"of {agreed['compared']} tokens {agreed['parted']} are others than without speculation, "
                f"{agreed['near']} of these where logits are nearly equal"
            )
            if abs(accepted - wanted) > _OFF * k:
                against.append(f"{side}: {accepted:.4f} tokens are accepted a step, wanted {wanted:.4f}")
            if agreed["faults"] or agreed["near"] > _NEAR * agreed["compared"]:
                against.append(f"{side}: texts part at logits that are {agreed['logits_apart']} apart")
    except (JitmxError, ProtocolError) as error:
        raise click.ClickException(str(error)) from None
    if against:
        raise click.ClickException("; ".join(against))


if __name__ == "__main__":
    main()
