"""Timing, rooflines, other libraries, and what `jitmx bench` and `jitmx tune` measure.

A module that a family's `Benchmark` names has

    bench(asked: Asked) -> Any                  what was measured, in plain numbers; it is printed as JSON
    tables(payload, limits) -> list[Table]      the same for people
    draw(payload, limits, path)                 a plot, where the family says that it can be drawn
    Bench(device=0)                             times candidates, where the family is tuned: called with a problem, a
                                                candidate and repeats it gives microseconds a call, or raises
                                                JitmxError; healthy() says whether the device still answers

each where it applies; `Asked` and `Table` are in benchmark.py.
"""

from __future__ import annotations

from jitmx import kernels, resources, settings
from jitmx.kernels.benchmark import Benchmark
from jitmx.models import NAMED

__path__ = resources.extended(__path__, "bench", settings.current().families)

# What is measured of no one family.
OTHERS = {
    "block": Benchmark(
        "jitmx.bench.block", "transformer blocks in one graph, and what each of their launches adds",
        ("batch", "context", "cache"), models=tuple(NAMED), family="attention",
    ),
    "launch": Benchmark("jitmx.bench.launch", "host time a call"),
}  # fmt: skip


def known() -> dict[str, Benchmark]:
    """What `jitmx bench` measures, by name: every family that has something to be measured, and what is of none."""
    found = {name: family.benchmark for name, family in kernels.families().items() if family.benchmark}
    return {name: one for name, one in found.items() if one.what} | OTHERS
