"""Stock vLLM and jitmx under a mixed load: `vllm bench serve` against a `vllm serve` of each, on a GPU.

python scripts/serve_bench.py OUT
python scripts/serve_bench.py OUT --side jitmx --activation fp8 --limit 200
python scripts/serve_bench.py OUT --model gpt-oss-20b --requests 64 --prompt 2048 --tokens 128
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitmx.errors import JitmxError
from scripts.protocol import load as loads
from scripts.protocol.configurations import ACTIVATIONS
from scripts.protocol.engines import Place
from scripts.protocol.load import SIDES, Load
from scripts.protocol.report import SCHEMA_VERSION, ProtocolError, save
from scripts.protocol.sizes import PRESETS


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(file_okay=False, resolve_path=True, path_type=Path))
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, help="Whose servers.")
@click.option("--model", type=click.Choice(list(PRESETS)), default="gpt-oss-120b", help="Sizes of the model.")
@click.option("--requests", type=click.IntRange(1), default=Load.requests, help="Sent at once, and served at a time.")
@click.option("--prompt", type=click.IntRange(1), default=Load.prompt, help="Tokens of each prompt.")
@click.option("--tokens", type=click.IntRange(2), default=Load.tokens, help="Tokens written for each.")
@click.option("--rounds", type=click.IntRange(1), default=Load.rounds, help="Timed, behind one that is not.")
@click.option("--seed", type=int, default=Load.seed, help="Of the prompts.")
@click.option("--layers", default="all", help="Those that jitmx serves.")
@click.option("--activation", type=click.Choice(ACTIVATIONS), default="bf16", help="What jitmx rounds inputs to.")
@click.option("--engine", "more", default="{}", help="More arguments of the server's engine, as JSON.")
@click.option("--limit", type=click.FloatRange(1), help="Seconds that all of it may take: what is at work then ends.")
def main(
    out: Path, sides: tuple[str, ...], model: str, requests: int, prompt: int, tokens: int, rounds: int, seed: int,
    layers: str, activation: str, more: str, limit: float | None,
) -> None:  # fmt: skip
    """Time servers with random weights under many requests at once.

    A server of each side is started on a checkpoint without weights and is ended. Prompts and texts are the same for
    both sides, of tokens from all of the vocabulary, and so is the routing: each token has experts of its own. Each
    figure is a line of OUT/results.jsonl as soon as it is known, and printed. The quickest round of every configuration
    is in OUT/serve.json and, beside each other, in OUT/serve.md: of all runs into OUT, so that sides may run on two
    cards at once. A request that fails, or whose text is not the known one, ends the run with an error.
    """
    # `timeout` and Ctrl-C end the server too, which else would keep the card.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    until, faults = None if limit is None else time.monotonic() + limit, 0
    load = Load(requests, prompt, tokens, seed, rounds)
    try:
        given = json.loads(more)
        for side in sides:
            own = loads.configuration(side, layers, activation)
            # A folder of its own, so that sides may start at the same time.
            folder = loads.target(out / f"target-{side}", PRESETS[model])
            place = Place(folder, out, loads.options(load, side, given), 900.0)
            for row in loads.measure(side, place, own, load, until):
                row = {"model": model, **dataclasses.asdict(load), **row}
                with (out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                click.echo("RESULT " + loads.said(row))
                faults += loads.faults(row)
    except (JitmxError, ProtocolError, json.JSONDecodeError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        _beside(out)
    if faults:
        raise click.ClickException(f"{faults} requests failed, or their texts are not as asked for or known")


def _beside(out: Path) -> None:
    """Write and print the quickest rounds of all runs into this folder."""
    results = out / "results.jsonl"
    if not results.is_file():
        return
    rows: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    found = loads.table(rows)
    save({"schema_version": SCHEMA_VERSION, "rows": list(loads.best(rows).values())}, out / "serve.json")
    (out / "serve.md").write_text(found)
    click.echo(found)


if __name__ == "__main__":
    main()
