"""What a benchmark of servers starts and asks, what it makes of the answers, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from scripts import serve_bench
from scripts.protocol import configurations, load, words
from scripts.protocol.engines import DEFAULTS, ROOT
from scripts.protocol.load import Load
from scripts.protocol.replay import EXTENSION
from scripts.protocol.report import ProtocolError
from scripts.protocol.sizes import PRESETS

# `vllm serve` and `vllm bench serve` as far as they are asked; how they misbehave is told by the variable TOLD.
FAKE = """
import json, os, pathlib, sys, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

told = json.loads(os.environ.get("TOLD", "{}"))
words = sys.argv[1:]

def option(name):
    return words[words.index(name) + 1]

def note(*what):
    with open(os.environ["ASKED"], "a") as file:
        print(*what, file=file)

def serve():
    side = "jitmx" if "--additional-config" in words else "stock"
    vocabulary = json.loads(pathlib.Path(words[1], "config.json").read_text())["vocab_size"]
    if told.get("fail") == side:
        sys.exit("no card")
    note("serve", side, os.environ["VLLM_PLUGINS"] or "none", os.environ["VLLM_SERVER_DEV_MODE"])
    print("jitmx: 9 kernels for sm_90a are ready after 0.2 s, 3 of them compiled now", flush=True)

    class Handler(BaseHTTPRequestHandler):
        chain = 1
        def log_message(self, *_):
            pass
        def reply(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())
        def do_GET(self):
            self.reply({})
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/collective_rpc":
                note("rpc", asked["method"])
                Handler.chain = 1 + told.get("deaf", 0)
                self.reply({"results": [None]})
            else:
                last, count = asked["prompt"][-1], asked["max_tokens"]
                self.reply({"choices": [{"token_ids": [last + Handler.chain + i for i in range(count)]}]})

    ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()

def bench():
    note("bench", option("--seed"), option("--num-warmups"), os.environ["VLLM_PLUGINS"] or "none")
    urllib.request.urlopen(option("--base-url") + "/health").read()
    time.sleep(told.get("sleep", 0))
    if told.get("client"):
        sys.exit("no figures")
    requests, prompt, tokens = (int(option(name)) for name in ("--num-prompts", "--input-len", "--output-len"))
    first = int(option("--seed"))
    texts = [" ".join(str(first + at) for at in range(tokens)) for _ in range(requests)]
    errors, read, written = [""] * requests, [prompt] * requests, [tokens] * requests
    if told.get("faults"):
        texts[0], texts[3], errors[1], written[1], written[2] = "7 8 10", "7 other", "reset", 0, tokens - 1
    rate = 1000.0 * (1 + int(option("--num-warmups")) / 100) * (2 if "jitmx" in option("--result-filename") else 1)
    found = {
        "duration": 1.5, "completed": requests, "output_throughput": rate, "total_token_throughput": 5 * rate,
        "input_lens": read, "output_lens": written, "generated_texts": texts, "errors": errors,
    }
    for at, name in enumerate(("ttft", "tpot")):
        for point in ("mean", "median", "p99"):
            found[f"{point}_{name}_ms"] = 100000 / rate + at
    if not told.get("strange"):
        pathlib.Path(option("--result-dir"), option("--result-filename")).write_text(json.dumps(found))
    else:
        pathlib.Path(option("--result-dir"), option("--result-filename")).write_text("{}")

{"serve": serve, "bench": bench}[words[0]]()
"""
SMALL = ("--model", "tiny", "--requests", 4, "--prompt", 8, "--tokens", 3)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose vllm is `FAKE`; `asked` in it has what was asked of that."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setattr(configurations, "plugins", lambda *, with_jitmx: ["jitmx"] if with_jitmx else [])
    return tmp_path


@pytest.fixture
def bench(fake: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The script within this process, which has torch; servers and clients are processes of their own, told how."""
    monkeypatch.setattr(serve_bench.signal, "signal", lambda *_: None)

    def call(*options: object, code: int = 0, **told: Any) -> Result:
        monkeypatch.setenv("TOLD", json.dumps(told))
        before = servers()
        result = CliRunner().invoke(serve_bench.main, list(map(str, (fake / "out", *SMALL, *options))))
        assert result.exit_code == code, (result.output, result.exception)
        assert servers() == before, "a server or a client is left"
        return result

    return call


def servers(of: int | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if "vllm.entrypoints.cli.main" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def rows(fake: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fake / "out" / "results.jsonl").read_text().splitlines()]


def test_both_sides_are_measured_in_turn_and_stand_beside_each_other(fake: Path, bench: Any) -> None:
    said = bench().output
    found = rows(fake)
    assert [(row["side"], row["what"]) for row in found] == [
        (side, what) for side in ("stock", "jitmx") for what in ("start", "load", "load")
    ]
    assert (fake / "asked").read_text().splitlines() == [
        "serve stock none 1", "rpc chain", "bench 0 4 none", "bench 1 0 none",
        "serve jitmx jitmx 1", "rpc chain", "bench 0 4 none", "bench 1 0 none",
    ]  # fmt: skip
    assert found[0]["ready_s"] > 0 and found[0]["compiled"] == 3 and found[0]["model"] == "tiny"
    first = found[1]
    assert (first["round"], first["s"], first["output_tok_s"], first["total_tok_s"]) == (0, 1.5, 1040.0, 5200.0)
    assert first["ttft_ms"] == {"mean": 96.15, "median": 96.15, "p99": 96.15} and first["tpot_ms"]["p99"] == 97.15
    assert all(row[name] == 0 for row in found if row["what"] == "load" for name in ("failed", "short", "parted"))
    kept = json.loads((fake / "out" / "serve.json").read_text())
    assert [(row["side"], row["round"]) for row in kept["rows"]] == [("stock", 0), ("jitmx", 0)]
    table = (fake / "out" / "serve.md").read_text()
    assert table in said and "| output tokens a second | 1040 | 2080 (2.000 ×) |" in table
    assert "| time to first token, p99, ms | 96.15 | 48.08 (0.500 ×) |" in table and len(table.splitlines()) == 10


def test_sides_that_ran_apart_into_one_folder_stand_beside_each_other(fake: Path, bench: Any) -> None:
    assert "2.000 ×" not in bench("--side", "jitmx", "--rounds", 1).output
    assert "2.000 ×" in bench("--side", "stock", "--rounds", 1).output


def test_a_server_that_does_not_start_is_an_error_with_its_log(fake: Path, bench: Any) -> None:
    said = bench(code=1, fail="jitmx").output
    assert "the server ended with status 1 before it answered" in said and "no card" in said
    assert {row["side"] for row in rows(fake)} == {"stock"} and "| output tokens a second | 1040 |" in said


def test_a_server_whose_text_is_not_the_known_one_is_not_timed(fake: Path, bench: Any) -> None:
    assert "so that nothing is timed" in bench(code=1, deaf=1).output
    assert "bench" not in (fake / "asked").read_text() and not (fake / "out" / "results.jsonl").exists()


def test_a_client_that_fails_is_an_error_with_its_log(fake: Path, bench: Any) -> None:
    said = bench(code=1, client=True).output
    assert "vllm bench serve ended with status 1 and without figures" in said and "no figures" in said


def test_figures_that_vllm_does_not_write_are_an_error_that_names_one(bench: Any) -> None:
    assert "vllm bench serve wrote no 'errors'" in bench(code=1, strange=True).output


def test_requests_that_fail_fall_short_or_part_are_counted_and_void_a_round(fake: Path, bench: Any) -> None:
    said = bench("--side", "stock", "--rounds", 1, code=1, faults=True).output
    (row,) = (row for row in rows(fake) if row["what"] == "load")
    assert (row["failed"], row["short"], row["parted"]) == (1, 1, 2)
    assert "4 requests failed" in said and json.loads((fake / "out" / "serve.json").read_text())["rows"] == []


def test_a_round_that_outlasts_the_limit_is_ended_with_its_server(fake: Path, bench: Any) -> None:
    begin = time.monotonic()
    said = bench("--limit", 15, code=1, sleep=600).output
    assert "round 0 was not done in " in said and time.monotonic() - begin < 60
    place = load.Place(fake, fake, {}, 9.0)
    with pytest.raises(ProtocolError, match="the time limit leaves none for stock-auto"):
        next(load.measure("stock", place, load.configuration("stock"), Load(), time.monotonic() - 1))


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind(fake: Path) -> None:
    environment = os.environ | {"TOLD": '{"sleep": 600}', "PYTHONPATH": os.pathsep.join([str(fake), str(ROOT)])}
    command = [sys.executable, str(ROOT / "scripts" / "serve_bench.py"), str(fake / "out"), "--side", "stock"]
    with subprocess.Popen([*command, *map(str, SMALL)], env=environment, stdout=subprocess.DEVNULL) as started:
        for _ in range(1200):
            if (fake / "asked").is_file() and "bench" in (fake / "asked").read_text():
                break
            time.sleep(0.05)
        left = servers(started.pid)
        assert len(left) == 2 and started.poll() is None
        started.terminate()
        assert started.wait(30) == 128 + signal.SIGTERM
    assert not any(process.is_running() for process in left)


def test_servers_of_both_sides_differ_in_what_serves_them_alone() -> None:
    asked = Load(requests=40)
    place = {side: load.Place(Path("m"), Path("o"), load.options(asked, side, {"seed": 7}), 1.0) for side in load.SIDES}
    stock, ours = (place[side].engine(load.configuration(side)) for side in load.SIDES)
    assert stock.pop("attention_config") == {"backend": "FLASH_ATTN"}
    assert ours.pop("additional_config")["jitmx"]["mxfp4_layers"] == "moe,qkv,o,lm_head"
    assert stock == ours and ours["seed"] == 7 and ours["max_num_seqs"] == 40
    assert ours["worker_extension_cls"] == EXTENSION and ours["load_format"] == "dummy"
    assert ours["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32, 48]
    assert ours["enable_prefix_caching"] is DEFAULTS["enable_prefix_caching"] is False


def test_an_activation_of_jitmx_names_a_configuration_of_its_own() -> None:
    assert load.configuration("jitmx", "moe", "fp8").name == "jitmx-moe-act:fp8"
    assert load.configuration("stock", "moe", "fp8").name == "stock-auto"


def test_text_of_any_tokens_is_read_back_as_these_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = PRESETS["gpt-oss-120b"].vocab
    words.write(tmp_path, vocabulary)
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    drawn = [0, 200, vocabulary - 1, vocabulary - 1, 17]
    text = read.decode(drawn)
    assert read.encode(text).ids == words.tokens(text) == drawn and read.get_vocab_size() == vocabulary
    assert read.encode("not of it").ids == [0, 0, 0] and words.tokens("7 other") == [7, -1]
