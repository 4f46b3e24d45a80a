"""`vllm serve MODEL --port N …`, as far as the protocol uses it."""

from __future__ import annotations

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm import TOLD, Model, say_start

asked = argparse.ArgumentParser()
asked.add_argument("verb", choices=["serve"])
asked.add_argument("model")
for name in ("host", "port", "served-model-name", "max-model-len", "max-num-seqs", "max-num-batched-tokens",
             "gpu-memory-utilization", "seed", "compilation-config"):  # fmt: skip
    asked.add_argument(f"--{name}", required=True)
asked.add_argument("--no-enable-prefix-caching", action="store_true", required=True)
for name in ("additional-config", "kernel-config"):
    asked.add_argument(f"--{name}", type=json.loads, default={})
given = asked.parse_args()
model = Model(
    {"model": given.model, "additional_config": given.additional_config, "kernel_config": given.kernel_config}
)
answered = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, code: int, value: object) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        global answered
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) + body["max_tokens"] > int(given.max_model_len):
            self.reply(400, {"error": "longer than the context"})
            return
        answered += 1
        if TOLD.get("late") and answered == 5:
            print("compiled moe.decode.m8 for sm_90a in 212 ms: 128 registers", file=sys.stderr, flush=True)
        tokens = model.greedy(body["prompt"], body["max_tokens"])
        if TOLD.get("flaky") and answered % 7 == 0:
            tokens[-1] ^= 1
        self.reply(200, {"choices": [{"token_ids": tokens}]})


if model.name.startswith("jitmx"):
    for layer in model.name.removeprefix("jitmx:").removesuffix("+attention").split(","):
        print(f"jitmx serves {layer} in mxfp4 on sm_90a (by additional_config's mxfp4_layers)", flush=True)
else:
    print(f"Using '{model.name.upper()}' Mxfp4 MoE backend.", flush=True)
say_start(model.name)
for level in TOLD.get("tracebacks", []):
    print(f"(EngineCore pid=9) {level} 11-21 19:02:36 [utils.py:417] Traceback (most recent call last):", flush=True)
ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()
