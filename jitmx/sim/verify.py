"""Verifying variants without a card: render, compile to PTX, simulate every case, compare with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jitmx import kernels
from jitmx.errors import JitmxError
from jitmx.registry.case import Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import Report, simulate
from jitmx.sim.memory import Memory
from jitmx.sim.proof import proof
from jitmx.sim.tensormap import encode
from jitmx.toolchain import nvrtc


@dataclass(frozen=True)
class Verdict:
    """What became of one variant; plain values, so that it travels between processes.

    Attributes:
        failure: why it failed, or None.
        error: largest error of its cases; 0 where results are exact.
        cases: how many ran.
        coverage: share of the kernel's PTX lines that ran.
        report: what the launches did together, None where none finished, or none was simulated now.
        uncovered: PTX source lines, with their numbers, that are not covered by any case.
        seconds: how long it took.
        proof: what it rests on (`jitmx.sim.proof`); empty where the kernel did not get so far.
    """

    failure: str | None
    error: float
    cases: int
    coverage: float
    report: Report | None = None
    uncovered: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    seconds: float = 0.0
    proof: str = ""

    @property
    def passed(self) -> bool:
        """Whether every case was within its gate."""
        return self.failure is None


# A verdict that was given before on the same proof, or None.
Known = Callable[[str], Verdict | None]


def launch(case: Case, variant: Variant, ptx: str) -> tuple[Report, Memory, dict[str, int]]:
    """Run one case: what its launch did, the memory afterwards and the address of each buffer there, by field.

    Raises:
        SimulationError: a fault of the kernel.
    """
    memory = Memory()
    addresses: dict[str, int] = {}
    for name, buffer in case.buffers(variant.arguments).items():
        if buffer.output and not buffer.scratch:
            addresses[name] = memory.allocate(buffer.data.nbytes, name)
        else:
            addresses[name] = memory.upload(buffer.data, name, writable=buffer.scratch, early=buffer.early)
    report = simulate(
        ptx,
        (case.launch.blocks, 1, 1),
        (variant.threads, 1, 1),
        case.pack(variant.arguments, addresses, encode),
        memory,
        entry=variant.spec.entry,
        shared_bytes=case.launch.shared_bytes,
        cluster=case.launch.cluster,
        resident_blocks=case.resident,
        programmatic=getattr(variant.knobs, "pdl", False),
    )
    return report, memory, addresses


def run(case: Case, variant: Variant, ptx: str) -> tuple[float, Report]:
    """The error of one case and what its launch did.

    Raises:
        SimulationError: a fault of the kernel, or an output byte that it never wrote.
    """
    report, memory, addresses = launch(case, variant, ptx)
    outputs = [
        memory.download(addresses[name], buffer.data.dtype, buffer.data.shape)
        for name, buffer in case.buffers(variant.arguments).items()
        if buffer.output
    ]
    return case.check(outputs), report


def verify(variant: Variant, known: Known | None = None) -> Verdict:
    """Run every case of `variant`; a fault is part of the verdict, not raised.

    Args:
        known: asked for a verdict before anything is simulated.
    """
    started = time.perf_counter()
    failure: str | None = None
    worst, count = 0.0, 0
    together: Report | None = None
    ptx = rests_on = ""
    try:
        ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
        cases = list(kernels.family(variant.spec.family).cases(variant))
        rests_on = proof(variant, ptx, cases)
        if known and (before := known(rests_on)):
            return before
        for case in cases:
            error, report = run(case, variant, ptx)
            count += 1
            worst = float(np.maximum(worst, error))
            together = report if together is None else together | report
            if not error <= case.gate:
                failure = failure or f"{case.name}: error {error:.3g} is over the gate of {case.gate:g}"
        if count == 0:
            failure = "it has no case, so nothing was shown"
    except JitmxError as error:
        failure = str(error)
    text = ptx.splitlines()
    missed = sorted(together.lines - together.covered) if together else []
    uncovered = tuple((line, text[line - 1].strip()) for line in missed)
    coverage = together.coverage if together else 0.0
    seconds = time.perf_counter() - started
    return Verdict(failure, worst, count, coverage, together, uncovered, seconds, rests_on)
