"""vLLM's own client and parser take what a benchmark of servers asks of them."""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.protocol import engines, load
from scripts.protocol.load import Load
from scripts.protocol.sizes import PRESETS

pytest.importorskip("vllm")

SIZES = PRESETS["small"]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Streams the chain's text, and keeps what it was asked."""

    asked: list[dict[str, Any]]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        self.asked.append(body)
        prompt = [int(word) for word in body["prompt"].split()]
        self.send_response(200)
        self.end_headers()
        for at in range(body["max_tokens"]):
            self._say({"choices": [{"text": f" {(prompt[-1] + 1 + at) % SIZES.vocab}"}]})
        self._say({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}})

    def _say(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's address, and the completions that it was asked for."""
    handler = type("Handler", (_Handler,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}", handler.asked  # type: ignore[attr-defined]
        finally:
            found.shutdown()
            thread.join()


def test_vllm_s_client_sends_random_tokens_of_the_whole_vocabulary_and_writes_the_figures(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.benchmarks import serve

    monkeypatch.setattr(serve, "freeze_gc_heap", lambda: None)
    asked = Load(requests=6, prompt=40, tokens=5, seed=3)
    base, got = server
    model, vocabulary = load.target(tmp_path / "model", SIZES), SIZES.vocab
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    for number, sent in ((0, 12), (1, 6)):
        got.clear()
        answer = tmp_path / f"{number}.json"
        serve.main(parser.parse_args(load.client(base, model, answer, asked, number)))
        found = load.figures(json.loads(answer.read_text()), asked, vocabulary)
        assert (found["failed"], found["short"], found["parted"]) == (0, 0, 0)
        assert found["output_tok_s"] > 0 and found["total_tok_s"] == pytest.approx(9 * found["output_tok_s"], rel=0.01)
        latencies = {name: found[f"{name}_ms"] for name in load.LATENCIES}
        assert all(one[point] >= 0 for one in latencies.values() for point in ("mean", "median", "p99"))
        assert latencies["ttft"]["median"] > 0  # words behind the first may come all at once
        assert len(got) == sent and all(body["temperature"] == 0 and body["ignore_eos"] for body in got)
        prompts = [[int(word) for word in body["prompt"].split()] for body in got]
        assert {len(prompt) for prompt in prompts} == {40} and len({tuple(prompt) for prompt in prompts}) == 6
        assert all(len(set(prompt)) == 40 for prompt in prompts)


def test_vllm_s_parser_reads_the_options_of_both_servers() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for side in load.SIDES:
        place = engines.Place(Path("model"), Path("out"), load.options(Load(), side, {}), 1.0)
        options = place.engine(load.configuration(side))
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        read = parser.parse_args(["--model", options.pop("model"), *engines.flags(options)])
        assert read.load_format == "dummy" and read.worker_extension_cls == load.EXTENSION
        assert read.max_num_seqs == 256 and ("jitmx" in read.additional_config) == (side == "jitmx")


def test_a_server_for_developers_calls_a_method_of_its_workers_by_name() -> None:
    from vllm.entrypoints.serve.dev.rpc.api_router import collective_rpc, router

    called = []

    async def own(method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[None]:
        called.append(method)
        return [None]

    async def body() -> dict[str, str]:
        return {"method": "chain"}

    client = SimpleNamespace(collective_rpc=own)
    request: Any = SimpleNamespace(json=body, app=SimpleNamespace(state=SimpleNamespace(engine_client=client)))
    answer = asyncio.run(collective_rpc(request))
    assert called == ["chain"] and json.loads(answer.body) == {"results": [None]}
    assert "/collective_rpc" in [route.path for route in router.routes]  # type: ignore[attr-defined]
