"""Write the tuning tables of targets that nobody here could measure, from the written cost model, marked as heuristic.

    python scripts/heuristic_tactics.py [FOLDER]      default: tactics/

The model is `heuristic` of each family (for linear: whole rows of tiles for every multiprocessor, and bandwidth times
latency in flight). A table makes its outcome visible and easy to override row by row; a tuning run on the card replaces
it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jitmx import arch, kernels

TARGETS = {"sm_120a": "RTX PRO 6000: 188 multiprocessors, 1600 GB/s", "sm_121a": "GB10: 48 multiprocessors, 240 GB/s"}


def table(target: str, note: str) -> dict[str, Any]:
    """The table of `linear` for `target`."""
    chip = arch.parse(target)
    family = kernels.family("linear")
    rows: list[dict[str, Any]] = []
    below: dict[tuple[Any, ...], int] = {}
    for problem in sorted(family.typical(chip), key=lambda problem: problem.m):
        kernel, knobs = family.heuristic(problem, chip, chip.multiprocessors)
        kind = {name: getattr(problem, name) for name in ("n", "k", "weight", "activation")}
        low = below.get(tuple(kind.values()), 0) + 1
        if low <= problem.m:  # with and without a bias: once
            rows.append({"when": {"m": [low, problem.m], **kind}, "kernel": kernel, "knobs": knobs})
        below[tuple(kind.values())] = problem.m
    origin = {"kind": "heuristic", "note": f"cost model for {note}, 101,376 B of shared memory a block"}
    return {"schema_version": 1, "family": "linear", "arch": chip.name, "origin": origin, "rows": rows}


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "tactics"
    for target, note in TARGETS.items():
        folder = root / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "linear.json").write_text(json.dumps(table(target, note), indent=1) + "\n")


if __name__ == "__main__":
    main()
