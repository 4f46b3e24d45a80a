"""Write the tuning tables of targets that nobody here could measure, from the written cost model, marked as heuristic.

    python scripts/heuristic_tactics.py [FOLDER]      default: tactics/

The model is `heuristic` of each family: for linear whole rows of tiles for every multiprocessor, and bandwidth times
latency in flight; for moe the experts that so many rows hit, the rows that each of them gets, filled up to whole tiles,
and whole waves of these. Tiles of moe on sm_121a are not the model's: 64x128 up to 16 rows and 128x128 above were the
fastest when grouped FP8 x FP4 products of CUTLASS were measured on a GB10, and are taken wherever a kernel has such a
tile. A table makes the outcome visible and easy to override row by row; a tuning run on the card replaces it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.moe import KERNELS, MoeProblem
from jitmx.kernels.moe.problem import MAX_ROWS
from jitmx.kernels.moe.tiles import makes_products

TARGETS = {"sm_120a": "RTX PRO 6000: 188 multiprocessors, 1600 GB/s", "sm_121a": "GB10: 48 multiprocessors, 240 GB/s"}
EXPERTS = (128, 32)  # of gpt-oss-120b and gpt-oss-20b
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65536)
# Rows at most, and tile: what measured best on the target, of another kernel.
MEASURED_TILES = {"sm_121a": ((16, (64, 128)), (1 << 20, (128, 128)))}
MEASURED = "; tiles of grouped FP8 x FP4 products of CUTLASS that measured best on a GB10, by rows of x"

Row = dict[str, Any]


def linear(chip: Arch) -> list[Row]:
    """Rows of `linear`: its typical calls."""
    family = kernels.family("linear")
    rows: list[Row] = []
    below: dict[tuple[Any, ...], int] = {}
    for problem in sorted(family.typical(chip), key=lambda problem: problem.m):
        kernel, knobs = family.heuristic(problem, chip, chip.multiprocessors)
        kind = {name: getattr(problem, name) for name in ("n", "k", "dtype", "scale_range", "weight", "activation")}
        low = below.get(tuple(kind.values()), 0) + 1
        if low <= problem.m:  # with and without a bias: once
            rows.append({"when": {"m": [low, problem.m], **kind}, "kernel": kernel, "knobs": knobs})
        below[tuple(kind.values())] = problem.m
    return rows


def moe(chip: Arch) -> list[Row]:
    """Rows of `moe`: layers of gpt-oss, and what kernels that go by expert take where they are asked for by name.

    A kernel that the model holds for slower has its rows behind those of the one that serves.
    """
    rows: list[Row] = []
    formats = MoeProblem.__dataclass_fields__.get("x_format")
    for x_format, experts in itertools.product(formats.metadata["choices"] if formats else ("",), EXPERTS):
        kind = {"experts": experts, "top": 4, "hidden": 2880, "intermediate": 2880, "scale_range": "normal"}
        kind |= {"x_format": x_format} if x_format else {}
        best = {m: choice(MoeProblem.on(chip, m=m, **kind), chip, None) for m in ROWS}
        rows += merged({**kind, "product": "layer"}, best)
        for name, kernel in KERNELS.items():
            if not makes_products(kernel.spec):
                continue
            for product in ("layer", "up", "down"):
                problem = MoeProblem.on(chip, **kind, product=product)
                some = {m: choice(dataclasses.replace(problem, m=m), chip, name) for m in ROWS}
                if product == "layer":  # those that serve anyway are there
                    some = {m: None if one and best[m] and one[0] == best[m][0] else one for m, one in some.items()}
                rows += merged({**kind, "product": product}, some)
    return rows


def choice(problem: MoeProblem, chip: Arch, kernel: str | None) -> tuple[str, dict[str, Any]] | None:
    """Kernel and knobs of a problem by the model, on a tile that was measured where the kernel has it."""
    family = kernels.family("moe")
    able = family.serving(problem, chip)
    if not able or (kernel and kernel not in able):
        return None
    try:
        if kernel is None:
            kernel, knobs = family.heuristic(problem, chip, chip.multiprocessors)
        else:
            knobs = family.tuned(problem, chip, chip.multiprocessors, kernel)
    except KnobError:  # nothing of it fits the shape
        return None
    tile = family.tile(kernel)
    for most, (m, n) in MEASURED_TILES.get(chip.name, ()):
        if tile is not None and problem.m <= most:
            measured = {**knobs, **tile(m, n, None, None)}
            try:
                fixed = family.fixed(problem, kernel)
                family.check(problem, family.spec(kernel).variant(chip, **{**measured, **fixed}))
            except KnobError:  # it has no such tile
                break
            return kernel, measured
    return kernel, knobs


def merged(kind: dict[str, Any], found: dict[int, tuple[str, dict[str, Any]] | None]) -> Iterator[Row]:
    """Rows of a kind: neighbouring counts that take the same are one row; none reaches over the rows of one launch."""
    low = 1
    for (m, one), after in zip(found.items(), [*tuple(found)[1:], None], strict=True):
        if one is None:
            low = m + 1
            continue
        if after is None or found[after] != one or m == MAX_ROWS:
            yield {"when": {"m": [low, m], **kind}, "kernel": one[0], "knobs": one[1]}
            low = m + 1


def table(family: str, target: str, note: str, rows: Iterable[Row]) -> dict[str, Any]:
    """The table of a family for a target."""
    note = f"cost model for {note}, 101,376 B of shared memory a block"
    note += MEASURED if family == "moe" and target in MEASURED_TILES else ""
    origin = {"kind": "heuristic", "note": note}
    return {"schema_version": 1, "family": family, "arch": target, "origin": origin, "rows": list(rows)}


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "tactics"
    for target, note in TARGETS.items():
        chip = arch.parse(target)
        folder = root / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("linear", linear(chip)), ("moe", moe(chip))):
            (folder / f"{name}.json").write_text(json.dumps(table(name, target, note, rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
