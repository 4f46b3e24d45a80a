"""Write the tuning table of GB10's experts, where measurements of another kernel say more than the cost model.

    python scripts/heuristic_tactics.py [FOLDER]      default: tactics/

64x128 up to 16 rows and 128x128 above were the fastest when grouped FP8 x FP4 products of CUTLASS were measured on a
GB10, and are taken where activations are quantized and a kernel has such a tile. Products in bf16 have no rows: there a
tile of 128 rows for the few of an expert takes a quarter more than its bytes, and the model, `heuristic` of the family,
has what is quicker. Other targets that nobody here could measure have no table, since it would repeat the model. A
tuning run on the card replaces it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jitmx import arch, kernels
from jitmx.arch import Arch
from jitmx.dispatch import tactics
from jitmx.errors import KnobError
from jitmx.kernels.moe import KERNELS, USUAL_ROWS, MoeProblem
from jitmx.kernels.moe.problem import MAX_ROWS, MX_FORMATS
from jitmx.kernels.moe.tiles import makes_products

TARGET = "sm_121a"
NOTE = (
    "cost model for GB10: 48 multiprocessors, 240 GB/s, 101,376 B of shared memory a block; of quantized activations "
    "tiles of grouped FP8 x FP4 products of CUTLASS that measured best on a GB10, by rows of x"
)
EXPERTS = (128, 32)  # of gpt-oss-120b and gpt-oss-20b
# Rows at most, and tile.
MEASURED_TILES = ((16, (64, 128)), (1 << 20, (128, 128)))

Row = dict[str, Any]


def moe(chip: Arch) -> list[Row]:
    """Rows of `moe`: layers of gpt-oss, and what kernels that go by expert take where they are asked for by name.

    A kernel that the model holds for slower has its rows behind those of the one that serves.
    """
    rows: list[Row] = []
    for x_format, experts in itertools.product(MX_FORMATS, EXPERTS):
        kind = {"experts": experts, "top": 4, "hidden": 2880, "intermediate": 2880, "scale_range": "normal"}
        kind |= {"x_format": x_format}
        best = {m: choice(MoeProblem.on(chip, m=m, **kind), chip, None) for m in USUAL_ROWS}
        rows += merged({**kind, "product": "layer"}, best)
        for name, kernel in KERNELS.items():
            if not makes_products(kernel.spec):
                continue
            for product in ("layer", "up", "down"):
                problem = MoeProblem.on(chip, **kind, product=product)
                some = {m: choice(dataclasses.replace(problem, m=m), chip, name) for m in USUAL_ROWS}
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
            kernel, knobs = family.guess(problem, chip, chip.multiprocessors)
        else:
            knobs = family.tuned(problem, chip, chip.multiprocessors, kernel)
    except KnobError:  # nothing of it fits the shape
        return None
    tile = family.kernel(kernel).tile
    for most, (m, n) in MEASURED_TILES:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = Path(__file__).parents[1] / "tactics"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=shipped, help="where the table goes")
    root = parser.parse_args(arguments).folder
    origin = {"kind": "heuristic", "note": NOTE}
    rows = moe(arch.parse(TARGET))
    tactics.save(
        root / TARGET / "moe.json",
        {"schema_version": tactics.SCHEMA_VERSION, "family": "moe", "arch": TARGET, "origin": origin, "rows": rows},
    )


if __name__ == "__main__":
    main()
