"""`toy`: y = factor x, of rows that follow one another; a family of its own, in a folder that JITMX_FAMILIES names.

Shapes: x and y [rows, columns] in fp32. Floor: bytes read and written over the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitmx.arch import Arch
from jitmx.kernels import Family, Problem
from jitmx.kernels.benchmark import Benchmark
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.tuning import Tuning
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Knobs, Variant, knob

ARGUMENTS = Arguments(
    "ToyArguments",
    reads("x", "[rows, columns]", "float"),
    writes("y", "[rows, columns]", "float"),
    number("values", "int"),
)


@dataclass(frozen=True)
class ScaleKnobs(Knobs):
    """Compile-time choices of `toy.scale`."""

    factor: int = knob(2, low=1, high=100, doc="what to multiply by")
    block: int = knob(256, choices=(64, 128, 256), doc="threads a block")


@dataclass(frozen=True)
class ToyProblem(Problem):
    """One call of `scale`."""

    rows: int = knob(1, low=1, high=1 << 20, doc="rows of x")
    columns: int = knob(1024, low=1, high=1 << 10, doc="columns of x")
    factor: int = knob(2, low=1, high=100, doc="what to multiply by")


SCALE = KernelSpec(
    family="toy",
    name="scale",
    knobs=ScaleKnobs,
    contract=lambda knobs, arch: Contract(max_registers=32, max_spill_bytes=0),
    shared_bytes=lambda knobs: 0,
    threads=lambda knobs: knobs.block,
    entry="toy_scale",
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: ScaleKnobs, problem: ToyProblem, multiprocessors: int) -> Launch:
    """A thread for each value."""
    return Launch(-(-problem.rows * problem.columns // knobs.block))


def _cases(variant: Variant) -> Iterator[Case]:
    """Less than a block, and a ragged second one."""
    for rows, columns in ((1, 3), (2, variant.knobs.block // 2 + 1)):
        x = np.arange(rows * columns, dtype=np.float32)
        wanted = x * variant.knobs.factor
        yield Case(
            name=f"[{rows}, {columns}]",
            launch=launch(variant.knobs, ToyProblem(rows, columns), 1),
            values={"x": Buffer(x), "y": Buffer(wanted, output=True), "values": x.size},
            check=lambda found, wanted=wanted: mismatches(found[0], wanted),
            gate=0.0,
        )


def _heuristic(problem: ToyProblem, arch: Arch, multiprocessors: int) -> dict[str, Any]:
    return {"block": 128 if problem.rows < multiprocessors else 256}


FAMILY = Family(
    name="toy",
    summary="y = factor x",
    kernels=(
        Kernel(
            SCALE,
            _cases,
            fixed=lambda problem: {"factor": problem.factor},
            launch=launch,
            heuristic=_heuristic,
            candidates=lambda problem, arch, multiprocessors: [{"block": block} for block in (64, 128, 256)],
        ),
    ),
    problem=ToyProblem,
    typical=lambda arch: tuple(ToyProblem(rows) for rows in (1, 1000)),
    axes=("rows",),
    buckets=lambda problem: {"rows": (1, 1000)},
    tuning=Tuning(
        sizes=("columns",), values=lambda problem: {"rows": (1, 1000)}, described=lambda problem: f"x{problem.factor}"
    ),
    benchmark=Benchmark("jitmx.bench.toy", "bytes that a call moves", fields=("rows", "columns"), device=False),
)
