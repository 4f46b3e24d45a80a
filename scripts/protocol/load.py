"""A mixed load: requests that come at once, by `vllm bench serve`, at a `vllm serve` of random weights.

The weights are those of `chain`: every token routes to experts of its own, and what the server says is known, whoever
serves it. So both sides read and write the same tokens, and a text that is another counts as a fault.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.protocol import chain, configurations, engines, words, worker
from scripts.protocol.configurations import Configuration
from scripts.protocol.engines import Place, Server
from scripts.protocol.replay import EXTENSION
from scripts.protocol.report import ProtocolError
from scripts.protocol.sizes import Sizes, config

SIDES = ("stock", "jitmx")
# Figures of a row, each in milliseconds by mean, median and 99th percentile.
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token"}
_POINTS = ("mean", "median", "p99")
_CHECKED = 16  # tokens of the text that is looked at before anything is timed
_LATE = "jitmx loaded kernels for a request"


@dataclass(frozen=True)
class Load:
    """What comes at a server.

    Attributes:
        requests: all sent at once, and all served at a time.
        prompt, tokens: of each request, read and written.
        seed: of the prompts; each round has its own, the same on both sides.
        rounds: how often; one of the same shape, of one prompt, goes before the first and is not timed.
    """

    requests: int = 256
    prompt: int = 1024
    tokens: int = 256
    seed: int = 0
    rounds: int = 2


def target(folder: Path, sizes: Sizes) -> Path:
    """Write what a server with random weights asks of a checkpoint: its configuration, and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    words.write(folder, sizes.vocab)
    (folder / "config.json").write_text(json.dumps(config(sizes)))
    return folder


def options(load: Load, side: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a server's engine, over `engines.DEFAULTS`; `more` wins.

    CUDA graphs are for every 16 requests: as texts end, the batch is of any size.
    """
    steps = range(16, load.requests + 16, 16)
    found: dict[str, Any] = {
        "load_format": "dummy", "worker_extension_cls": EXTENSION, "max_num_seqs": load.requests,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, *steps]},
    }  # fmt: skip
    if side == "stock":
        found["attention_config"] = {"backend": "FLASH_ATTN"}
    return found | dict(more)


def configuration(side: str, layers: str = "all", activation: str = "bf16") -> Configuration:
    """Stock vLLM, or jitmx on these layers.

    Raises:
        ProtocolError: no such layer or activation.
    """
    return Configuration() if side == "stock" else Configuration(configurations.layers(layers), activation=activation)


def measure(
    side: str, place: Place, own: Configuration, load: Load, until: float | None = None
) -> Iterator[dict[str, Any]]:
    """Start a server and give a row for its start and for each round, as soon as it is known; at last it is ended.

    Args:
        place: with the options of `options`; its timeout is for the server's start and for each round.
        until: by the monotonic clock, when all of it has to be done.

    Raises:
        ProtocolError: the server or `vllm bench serve` failed or took too long, or the server does not say the text
            that is known; the message has the end of a log.
    """
    host = worker.host_loop()
    place = _within(place, own, until)
    vocabulary = engines.vocabulary(place.model)
    about = {"side": side, "configuration": own.name}
    with engines.serving(place, own, VLLM_SERVER_DEV_MODE="1") as server:
        server.on_workers("chain")
        (prompt,) = chain.prompts(vocabulary, 1, load.prompt, _CHECKED)
        found, known = server.complete(prompt, _CHECKED), chain.text(prompt, _CHECKED)
        if found != known:
            raise ProtocolError(
                f"{own.name}: behind token {prompt[-1]} the server says {found}, not {known}; its weights are not "
                "those whose text is known, so that nothing is timed"
            )
        said = engines.startup(server.log.read_text(errors="replace"))
        yield about | {
            "what": "start", "ready_s": round(server.ready_s, 1), "host_loop_ms": round(host, 2), **said,
        }  # fmt: skip
        for number in range(load.rounds):
            answer = _round(server, _within(place, own, until), own, load, number)
            row = figures(answer, load, vocabulary)
            row["late"] = server.log.read_text(errors="replace").count(_LATE)
            yield about | {"what": "load", "round": number, **row}


def _within(place: Place, own: Configuration, until: float | None) -> Place:
    """The same place with no more time than is left."""
    left = place.timeout if until is None else until - time.monotonic()
    if left <= 0:
        raise ProtocolError(f"the time limit leaves none for {own.name}; raise it, or ask for this side alone")
    return dataclasses.replace(place, timeout=min(place.timeout, left))


def _round(server: Server, place: Place, own: Configuration, load: Load, number: int) -> dict[str, Any]:
    """What `vllm bench serve` writes of one round."""
    stem = place.out / f"{own.name}.round{number}"
    answer, log = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.log")
    answer.unlink(missing_ok=True)
    # No plugin in the client, and no proxy between it and a server of this machine.
    over = worker.ENVIRONMENT | {"VLLM_PLUGINS": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += client(server.base, place.model, answer, load, number)
    with engines.started(command, engines.with_checkout(over), log) as process:
        try:
            process.wait(place.timeout)
        except subprocess.TimeoutExpired:
            raise ProtocolError(
                f"{own.name}: round {number} was not done in {place.timeout:.0f} s; {engines.tail(log)}"
            ) from None
    try:
        found: dict[str, Any] = json.loads(answer.read_text())
    except (OSError, ValueError):
        raise ProtocolError(
            f"{own.name}: vllm bench serve ended with status {process.returncode} and without figures; "
            f"{engines.tail(log)}"
        ) from None
    return found


def client(base: str, model: Path, answer: Path, load: Load, number: int) -> list[str]:
    """Arguments of `vllm bench serve` for a round."""
    asked: dict[str, Any] = {
        "backend": "openai", "base-url": base, "endpoint": "/v1/completions", "model": "model", "tokenizer": model,
        "dataset-name": "random", "input-len": load.prompt, "output-len": load.tokens, "num-prompts": load.requests,
        "max-concurrency": load.requests, "request-rate": "inf", "seed": load.seed + number, "temperature": 0,
        "percentile-metrics": ",".join(LATENCIES), "metric-percentiles": 99,
        "num-warmups": 0 if number else load.requests, "result-dir": answer.parent, "result-filename": answer.name,
    }  # fmt: skip
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    return [word for name, value in asked.items() for word in (f"--{name}", str(value))] + flags


def figures(answer: Mapping[str, Any], load: Load, vocabulary: int) -> dict[str, Any]:
    """Figures of a round: seconds, tokens a second, written and in all, latencies; and of its requests those `failed`,
    those `short` of the tokens that were asked for, and those whose text `parted` from the known one.

    Raises:
        ProtocolError: a figure is missing.
    """
    try:
        counts = dict.fromkeys(("failed", "short", "parted"), 0)
        columns = (answer[name] for name in ("errors", "input_lens", "output_lens", "generated_texts"))
        for error, *lengths, text in zip(*columns, strict=True):
            counts["failed"] += bool(error)
            counts["short"] += not error and lengths != [load.prompt, load.tokens]
            counts["parted"] += not error and not _known(text, vocabulary)
        return {
            "s": round(answer["duration"], 3), "output_tok_s": round(answer["output_throughput"], 1),
            "total_tok_s": round(answer["total_token_throughput"], 1),
            **{
                f"{name}_ms": {point: round(answer[f"{point}_{name}_ms"], 2) for point in _POINTS}
                for name in LATENCIES
            },
            **counts,
        }  # fmt: skip
    except KeyError as error:
        raise ProtocolError(f"vllm bench serve wrote no {error}; protocol and vLLM do not fit together") from None


def _known(text: str, vocabulary: int) -> bool:
    """Whether a text is of the chain: each token the next number."""
    return all((a + 1) % vocabulary == b for a, b in itertools.pairwise(words.tokens(text)))


def faults(row: Mapping[str, Any]) -> int:
    """Requests of a round that are not as they should be."""
    return sum(row.get(name, 0) for name in ("failed", "short", "parted"))


def said(row: Mapping[str, Any]) -> str:
    """A row as text."""
    values = ((name, value) for name, value in row.items() if name not in ("configuration", "side", "what"))
    return f"{row['configuration']}, {row['what']}: " + ", ".join(f"{name} {value}" for name, value in values)


def best(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The quickest round of each configuration without faults: a stall of the host only adds time."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        name = row["configuration"]
        if row["what"] == "load" and not faults(row):
            found[name] = max(found.get(name, row), row, key=lambda item: item["output_tok_s"])
    return found


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: configurations beside each other by their quickest rounds, those of jitmx also over stock's."""
    found = best(rows)
    columns = [_flat(row) for row in found.values()]
    stock = next((column for column, row in zip(columns, found.values(), strict=True) if row["side"] == "stock"), None)
    lines = [["", *found], ["---", *["---:"] * len(found)]]
    for name in columns[0] if columns else ():
        ratios = [
            f" ({column[name] / stock[name]:.3f} ×)" if stock and column is not stock and stock[name] else ""
            for column in columns
        ]
        lines.append([name, *(f"{column[name]:g}{ratio}" for column, ratio in zip(columns, ratios, strict=True))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _flat(row: Mapping[str, Any]) -> dict[str, float]:
    """What the table says of a round."""
    found = {"output tokens a second": row["output_tok_s"], "tokens a second, prompts too": row["total_tok_s"]}
    for name, said in LATENCIES.items():
        found |= {f"{said}, {point}, ms": row[f"{name}_ms"][point] for point in _POINTS}
    return found
