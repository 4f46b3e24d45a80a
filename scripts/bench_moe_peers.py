"""Other libraries' MXFP4 experts side by side with jitmx's: one JSON object a line, as each is measured.

    python scripts/bench_moe_peers.py [--model gpt-oss-120b] [--rows 1,4,16,64,8192] [--peers humming,triton,marlin]

The first line has what the card yields in this run, each further one a row of `jitmx bench moe --json`. A library that
is not installed, or that fails, is a row with the reason in place of a time. Needs a GPU; vLLM 0.33 for its experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from jitmx.bench import benchmark, moe_inputs, moe_peers
from jitmx.bench import moe as benchmarks_moe


def show(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(moe_inputs.MODELS), default="gpt-oss-120b")
    parser.add_argument("--rows", default="1,4,16,64,8192")
    parser.add_argument("--peers", default=",".join(moe_peers.PEERS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    limits = benchmark.ceilings()
    show({"model": asked.model, "seed": asked.seed, "ceilings": dataclasses.asdict(limits)})
    rows, peers = [int(word) for word in asked.rows.split(",")], tuple(filter(None, asked.peers.split(",")))
    benchmarks_moe.bench_moe(moe_inputs.MODELS[asked.model], rows, limits, peers, asked.seed, on_row=show)


if __name__ == "__main__":
    main()
