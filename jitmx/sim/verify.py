"""Verifying variants without a card: render, compile to PTX, simulate every case, compare with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jitmx import kernels
from jitmx.errors import JitmxError, SimulationError
from jitmx.registry.case import Case, chains, untouched
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
        cases: how many there are.
        coverage: share of the kernel's PTX lines that ran.
        report: what the launches did together, None where none finished, or none was simulated now.
        uncovered: PTX source lines, with their numbers, that are not covered by any case.
        seconds: how long it took.
        proof: what it rests on (`jitmx.sim.proof`); empty where the kernel did not get so far.
        untouched: sides of the edges of its arithmetic that the values of no case stand on.
    """

    failure: str | None
    error: float
    cases: int
    coverage: float
    report: Report | None = None
    uncovered: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    seconds: float = 0.0
    proof: str = ""
    untouched: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every case was within its gate."""
        return self.failure is None


_STEPS = 60_000  # basic blocks of a case, several times what any takes: a loop without end is found within a minute

# A verdict that was given before on the same proof, or None.
Known = Callable[[str], Verdict | None]


def launch(
    case: Case, variant: Variant, ptx: str, memory: Memory | None = None, kept: Mapping[str, int] | None = None, *,
    turned: bool = False, slow: int | None = None, held: int | None = None,
) -> tuple[Report, Memory, dict[str, int]]:  # fmt: skip
    """Run one case: what its launch did, the memory afterwards and the address of each buffer there, by field.

    Args:
        memory: that of launches before this one.
        kept: addresses there of buffers that are as those launches left them.
        turned: blocks run in another order than that of their numbers.
        slow, held: the cluster that begins last, and one that others overtake (`jitmx.sim.launch.simulate`).

    Raises:
        SimulationError: a fault of the kernel.
    """
    memory = memory or Memory()
    addresses = dict(kept or {})
    for name, buffer in case.buffers(variant.arguments).items():
        if name in addresses:
            continue
        written = buffer.output and not buffer.scratch
        if buffer.at is not None and written:
            piece = buffer.data.nbytes // buffer.at.size
            addresses[name] = memory.allocate_far(buffer.size, buffer.at, piece, name)
        elif buffer.at is not None:
            addresses[name] = memory.upload_far(
                buffer.data, buffer.at, buffer.size, name, writable=buffer.scratch, constant=buffer.constant,
                early=buffer.early, ahead=buffer.ahead,
            )  # fmt: skip
        elif written:
            addresses[name] = memory.allocate(buffer.data.nbytes, name)
        else:
            addresses[name] = memory.upload(
                buffer.data, name, writable=buffer.scratch, constant=buffer.constant, early=buffer.early,
                ahead=buffer.ahead,
            )  # fmt: skip
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
        max_steps=_STEPS,
        programmatic=getattr(variant.knobs, "pdl", False),
        blocks=_turned(case) if turned and case.blocks is None else case.blocks,
        slow=slow,
        held=held,
    )
    return report, memory, addresses


def _turned(case: Case) -> list[int]:
    """The blocks of a case, every second cluster and then the others, from the last on: no order is to count."""
    cluster = max(case.launch.cluster, 1)
    firsts = range(0, case.launch.blocks, cluster)[::-1]
    return [first + rank for first in (*firsts[::2], *firsts[1::2]) for rank in range(cluster)]


def run(case: Case, variant: Variant, ptx: str) -> tuple[float, Report]:
    """The error of one case and what its launch did.

    Raises:
        SimulationError: a fault of the kernel, or an output byte that it never wrote.
    """
    _, error, report = next(run_chain((case,), variant, ptx))
    return error, report


def run_chain(chain: Sequence[Case], variant: Variant, ptx: str) -> Iterator[tuple[str, float, Report]]:
    """Run cases one after another, on the workspace of the first; all other buffers are their own.

    Yields:
        Of each launch what to call it, its error and what it did.

    Raises:
        SimulationError: a fault of the kernel, or an output byte that it never wrote; of several launches, it says in
            which.
    """
    memory, kept = Memory(), dict[str, int]()
    found: dict[int, list[bytes]] = {}
    for number, case in enumerate(chain, 1):
        name = case.name if len(chain) == 1 else f"launch {number} of {len(chain)}, {case.name}"
        try:
            # In linear some blocks wait for those of lower numbers, which on a card begin first.
            turned = number > 1 and variant.spec.family == "routing"
            # Who waits for fewer than all blocks goes on without one that is late: the first, the last, one between.
            # Who arrives and then reads what the last to arrive changes waits for ever where the others overtake it.
            slow, held = ((None, None), (0, -1), (-1, 0), (1, -1))[(number - 1) % 4]
            report, _, addresses = launch(case, variant, ptx, memory, kept, turned=turned, slow=slow, held=held)
            outputs = [
                memory.download(addresses[field], buffer.data.dtype, buffer.data.shape, buffer.at)
                for field, buffer in case.buffers(variant.arguments).items()
                if buffer.output
            ]
        except SimulationError as error:
            raise error if number == 1 else SimulationError(f"{name}: {error}") from error
        bits = [output.tobytes() for output in outputs]
        if found.setdefault(id(case), bits) != bits:
            raise SimulationError(f"{name}: its results depend on which block is late, or on the launch before")
        kept = {field: address for field, address in addresses.items() if field == "workspace"}
        for address in addresses.keys() - kept.keys():
            memory.free(addresses[address])
        yield name, case.check(outputs), report


def verify(variant: Variant, known: Known | None = None) -> Verdict:
    """Run every case of `variant`, those with a workspace in chains; a fault is part of the verdict, not raised.

    Args:
        known: asked for a verdict before anything is simulated.
    """
    started = time.perf_counter()
    failure: str | None = None
    worst, count = 0.0, 0
    together: Report | None = None
    ptx = rests_on = ""
    cases: list[Case] = []
    try:
        ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
        cases = list(kernels.family(variant.spec.family).cases(variant))
        rests_on = proof(variant, ptx, cases)
        if known and (before := known(rests_on)):
            return before
        count = len(cases)
        for chain in chains(cases):
            for case, (name, error, report) in zip(chain, run_chain(chain, variant, ptx), strict=True):
                worst = float(np.maximum(worst, error))
                together = report if together is None else together | report
                if not error <= case.gate:
                    failure = failure or f"{name}: error {error:.3g} is over the gate of {case.gate:g}"
        if count == 0:
            failure = "it has no case, so nothing was shown"
    except JitmxError as error:
        failure = str(error)
    text = ptx.splitlines()
    missed = sorted(together.lines - together.covered) if together else []
    uncovered = tuple((line, text[line - 1].strip()) for line in missed)
    coverage = together.coverage if together else 0.0
    seconds = time.perf_counter() - started
    return Verdict(failure, worst, count, coverage, together, uncovered, seconds, rests_on, untouched(cases))
