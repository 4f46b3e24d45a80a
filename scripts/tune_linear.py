"""Measure the legal variants of `linear` on the present card and write its tuning table.

    python scripts/tune_linear.py [OUT.json]      default: tactics/<arch>/linear.json

For each of gpt-oss-120b's dense shapes and each row count, every candidate is timed in CUDA graphs of dependent calls
over weights that rotate past the L2; the best few are timed again, and the median of those times decides.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from jitmx import build, errors
from jitmx.dispatch.choose import choose
from jitmx.kernels.linear import LinearProblem, packed_tiles
from jitmx.ops import benchmarks, checks
from jitmx.ops.packed import PackedWeight, pack_weight

ROWS = (1, 2, 4, 8)
REPEATS = 3
FINALISTS = 4


def candidates(n: int, k: int, multiprocessors: int) -> list[dict[str, Any]]:
    """Knobs worth timing for a shape: blocks that share rows where rows are few, warps that stream them where many."""
    rows, tiles = packed_tiles(n, k)
    found = []
    if rows < 12 * multiprocessors:
        for engine, split, blocks, unroll in itertools.product(("mma", "fma"), (4, 8, 9, 16), (2, 3, 4), (2, 5)):
            whole = -(-tiles // split)
            for chunk, stages in ((whole, 1), (-(-whole // 2), 2), (-(-whole // 2), 3), (whole, 2)):
                found.append(
                    {
                        "engine": engine,
                        "warps": split,
                        "split_k": split,
                        "chunk": chunk,
                        "stages": stages,
                        "unroll": unroll,
                        "blocks_per_sm": blocks,
                    }
                )
    else:
        for engine, warps, chunk, stages, blocks in itertools.product(
            ("mma", "fma"), (8, 12, 16), (5, 9), (2, 3), (1, 2)
        ):
            found.append(
                {
                    "engine": engine,
                    "warps": warps,
                    "split_k": 1,
                    "chunk": chunk,
                    "stages": stages,
                    "unroll": 5,
                    "blocks_per_sm": blocks,
                }
            )
    return found


def driver_release() -> str:
    """Release of the NVIDIA driver, such as 580.159.04."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()


def legal(problem: LinearProblem, knobs: dict[str, Any], multiprocessors: int) -> bool:
    try:
        choose("linear", problem, checks.device_arch(0), multiprocessors=multiprocessors, knobs=knobs)
    except errors.KnobError:
        return False
    return True


def tune(weights: list[PackedWeight], m: int, progress: Progress) -> tuple[dict[str, Any], float]:
    """The fastest knobs for m rows, and its microseconds."""
    n, k = weights[0].shape
    multiprocessors = checks.multiprocessors(0)
    problem = LinearProblem(m, n, k, encoding=weights[0].encoding, scale_range=weights[0].scale_range)
    tried = [knobs for knobs in candidates(n, k, multiprocessors) if legal(problem, knobs, multiprocessors)]
    variants = [
        choose("linear", problem, checks.device_arch(0), multiprocessors=multiprocessors, knobs=knobs).variant
        for knobs in tried
    ]
    build.build_all(variants, strict=False)
    task = progress.add_task(f"[{n}, {k}] m={m}", total=len(tried) + FINALISTS * REPEATS)

    def time(knobs: dict[str, Any]) -> float:
        progress.advance(task)
        return benchmarks.time_linear(weights, m, knobs) * 1e6

    first = sorted(((time(knobs), i) for i, knobs in enumerate(tried)))
    final = [(statistics.median([time(tried[i]) for _ in range(REPEATS)]), i) for _, i in first[:FINALISTS]]
    best, index = min(final)
    for engine in ("mma", "fma"):
        fastest = next(((us, tried[i]) for us, i in first if tried[i]["engine"] == engine), None)
        print(f"[{n}, {k}] m={m} {engine}: {fastest and round(fastest[0], 2)} us {fastest and fastest[1]}", flush=True)
    return tried[index], best


def main() -> None:
    arch = checks.device_arch(0)
    target = (
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "tactics" / arch.name / "linear.json"
    )
    rows = []
    with Progress(disable=not sys.stderr.isatty()) as progress:
        for n, k in benchmarks.GPT_OSS.values():
            weights = benchmarks.rotated(pack_weight(benchmarks.random_weight(n, k)))
            for m in ROWS:
                knobs, us = tune(weights, m, progress)
                low = 1 if m == 1 else ROWS[ROWS.index(m) - 1] + 1
                rows.append(
                    {
                        "when": {"m": [low, m], "n": n, "k": k, "dtype": "bf16", "scale_range": "normal"},
                        "kernel": "gemv",
                        "knobs": knobs,
                        "us": round(us, 3),
                    }
                )
    origin = {
        "kind": "measured",
        "card": torch.cuda.get_device_name(),
        "driver": driver_release(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": "medians in CUDA graphs of dependent calls over rotating weights",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": 1, "family": "linear", "arch": arch.name, "origin": origin, "rows": rows}
    target.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
