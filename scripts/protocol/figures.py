"""What level 4 measures, and its figures under a name each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Two rounds of the same engine in one run; further apart, the run measured the machine.
DRIFT = 0.05
# Seconds that jitmx may add to the start of an engine whose kernels are in the cache.
STARTUP = 1.0
STARTS = "plugins_s", "loading_s", "warmup_s"


@dataclass(frozen=True)
class Workload:
    """What level 4 measures: batches and tokens of decoding, sizes of prompts, requests alone for latencies."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prefill: tuple[int, ...] = (2048, 8192)
    decode_prompt: int = 128
    decode_tokens: int = 128
    prompt: int = 2048
    requests: int = 20
    rounds: int = 2

    def task(self, seed: int) -> dict[str, Any]:
        """For a worker."""
        return {"task": "bench", "seed": seed} | asdict(self)


def flat(run: dict[str, Any]) -> dict[str, float]:
    """Figures of one benchmark, a name each: `decode_16_tokens_s`, `ttft_p99_ms`, `beside_cache_bytes`."""
    found = {f"decode_{row['batch']}_tokens_s": row["tokens_s"] for row in run["decode"]}
    found |= {f"prefill_{row['prompt']}_tokens_s": row["tokens_s"] for row in run["prefill"]}
    for name, values in run["latency"].items():
        stem = name.removesuffix("_ms")
        found |= {f"{stem}_{point}_ms": values[point] for point in ("p50", "p99")}
    if run["memory"] is not None:
        found["beside_cache_bytes"] = run["memory"]["peak_bytes"] - run["memory"]["cache_bytes"]
    return found


def merged(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def added(
    ours: list[dict[str, Any]], stock: list[list[dict[str, Any]]], phases: Sequence[str] = STARTS
) -> float | None:
    """Seconds that jitmx adds to a start: of plugins, loading, and warm-up with the capture of graphs.

    Loading by itself is no fair measure: jitmx readies its kernels there, stock backends theirs in warm-up.

    Args:
        ours: figures of starts, as `engines.run` gives them; medians count.
        stock: the same of each stock backend; the quickest counts.
        phases: which figures are added up.

    Returns:
        None where a log said nothing.
    """
    rows = [[[run[phase] for phase in phases] for run in runs] for runs in (ours, *stock)]
    if not all(rows) or any(seconds is None for runs in rows for run in runs for seconds in run):
        return None
    first, *others = (statistics.median(map(sum, runs)) for runs in rows)
    return first - min(others)


def drift(runs: list[dict[str, float]]) -> float:
    """Largest distance of a decode rate between runs, relative to the slower."""
    keys = [key for key in runs[0] if key.startswith("decode_")]
    return max((max(r[k] for r in runs) / min(r[k] for r in runs) - 1 for k in keys), default=0.0)
