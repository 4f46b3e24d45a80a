"""Launching a kernel of PTX text on simulated memory."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim import instructions, parser
from jitmx.sim.inline import inline
from jitmx.sim.layout import granules, upload_variables
from jitmx.sim.machine import Machine
from jitmx.sim.memory import Memory
from jitmx.sim.program import Program
from jitmx.sim.shadow import Shadow
from jitmx.sim.translate import Translator

RESIDENT_LANES = 4096


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        instructions: instructions that groups of lanes ran together.
        thread_instructions: the same, times the lanes of each.
        covered: PTX lines that at least one thread ran.
        lines: every PTX line that holds an instruction of the kernel.
    """

    instructions: int
    thread_instructions: int
    covered: frozenset[int]
    lines: frozenset[int]

    @property
    def coverage(self) -> float:
        """Share of the lines that ran."""
        return len(self.covered) / len(self.lines) if self.lines else 1.0

    def __or__(self, other: Report) -> Report:
        """Both launches of one kernel together."""
        return Report(
            self.instructions + other.instructions,
            self.thread_instructions + other.thread_instructions,
            self.covered | other.covered,
            self.lines | other.lines,
        )


def _cluster(program: Program, grid: tuple[int, int, int], cluster: int) -> int:
    """Blocks of a cluster; errors where they fit neither the kernel nor the grid."""
    name, required = program.entry.name, program.entry.directives.get("reqnctapercluster")
    if required:
        wanted = int(np.prod(required))
        if required[0] != wanted:
            raise SimulationError(f"{name}: clusters of {required} blocks; only those along x are simulated")
        if cluster not in (1, wanted):
            raise SimulationError(f"{name}: clusters of {cluster} blocks; the kernel requires {wanted}")
        cluster = wanted
    if not 1 <= cluster <= 16 or grid[0] % cluster:
        raise SimulationError(
            f"{name}: clusters of {cluster} blocks in a grid of {grid[0]}; they must be 1 to 16 and divide the grid"
        )
    return cluster


def _chosen(program: Program, grid: tuple[int, int, int], cluster: int, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    """Blocks of a grid by number; errors where there are no such, or clusters are not whole."""
    order = np.array(blocks, np.int64)
    size = int(np.prod(grid))
    ranks = np.arange(len(order)) % cluster
    if not len(order) or order.min() < 0 or order.max() >= size or len(np.unique(order)) < len(order):
        raise SimulationError(f"{program.entry.name}: blocks {order} of a grid of {size}; they must be some of it")
    if (
        len(order) % cluster
        or (order != order[np.arange(len(order)) - ranks] + ranks).any()
        or (order % cluster != ranks).any()
    ):
        raise SimulationError(f"{program.entry.name}: blocks {order} are no whole clusters of {cluster}")
    return order


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: translating keeps nearly all that it makes, which the collector would walk in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.lru_cache(maxsize=64)
def translate(source: str, entry: str | None = None) -> Program:
    """The program of one kernel of PTX text; `entry` may be left out where there is one.

    Raises:
        SimulationError: text that is not understood, an instruction that is not known, no such kernel.
    """
    with _uncollected():
        return _translate(source, entry)


def _translate(source: str, entry: str | None) -> Program:
    module = parser.parse(source)
    entries = {name: f for name, f in module.functions.items() if f.entry}
    if entry is None and len(entries) == 1:
        entry = next(iter(entries))
    if entry not in entries:
        raise SimulationError(f"{entry!r} is no kernel of this PTX; its kernels: {', '.join(entries) or 'none'}")
    whole = inline(module, entries[entry])
    program = Translator(module, whole, instructions.handlers(), instructions.members).translate()
    program.granules = granules(program)
    return program


def simulate(
    source: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: bytes,
    memory: Memory,
    *,
    entry: str | None = None,
    shared_bytes: int = 0,
    cluster: int = 1,
    resident_blocks: int | None = None,
    max_steps: int = 2_000_000,
    programmatic: bool = False,
    old_reads: bool = True,
    blocks: Sequence[int] | None = None,
    slow: int | None = None,
    held: int | None = None,
) -> Report:
    """Run a kernel over a whole grid.

    Args:
        source: PTX text.
        grid, block: blocks of the grid, threads of a block, in x, y, z.
        arguments: the kernel's parameters as they lie in memory.
        shared_bytes: dynamic shared memory.
        cluster: blocks of a cluster, along x; the kernel's own `.reqnctapercluster` where it has one and this is 1.
        resident_blocks: blocks that run side by side, which those that wait for each other must; by default as many
            as make 4096 threads.
        max_steps: basic blocks that may run before a launch counts as endless.
        programmatic: a programmatic dependent launch: what is not constant must not be touched by threads that do not
            come after a `griddepcontrol.wait`, which each block must run, and what is used early must not meet what
            launches before may still do (jitmx.sim.sequence).
        old_reads: whether strong reads that nothing orders find what was there before the last write, as they may on a
            card: some of them, where their thread looks for the first time.
        blocks: which blocks of the grid run, in this order, whole clusters of them; by default all.
        slow: the cluster, of those that run side by side, that begins when all others wait or are done; counted from
            the first, or if negative from the last. The first finds nothing old but where it polls: what is asked for
            once, before it is waited for, is there. In a kernel whose threads do not poll, each other one waits for it
            before an atomic operation on global memory, by turns any but the first of the code; those that wait at the
            same go on together.
        held: in a kernel whose threads poll, the cluster, counted likewise, whose threads go on behind the first of its
            atomic operations on global memory when all others wait or are done; behind the second the next cluster, and
            so on.

    Raises:
        SimulationError: a fault of the kernel; the message names kernel, PTX line, block, thread and address.
    """
    program = translate(source, entry)
    threads = int(np.prod(block))
    if not 1 <= threads <= 1024:
        raise SimulationError(f"{program.entry.name}: a block of {threads} threads; it must have 1 to 1024")
    limit = program.entry.directives.get("maxntid")
    if limit is not None and threads > int(np.prod(limit)):
        most = int(np.prod(limit))
        raise SimulationError(f"{program.entry.name}: a block of {threads} threads; the kernel allows {most}")
    cluster = _cluster(program, grid, cluster)
    upload_variables(program, memory)
    memory.begin(programmatic=programmatic)
    order = None if blocks is None else _chosen(program, grid, cluster, blocks)
    total = int(np.prod(grid)) if order is None else len(order)
    at_once = resident_blocks or max(1, RESIDENT_LANES // (-(-threads // 32) * 32))
    at_once = max(at_once // cluster, 1) * cluster
    shadow: Shadow | None = None
    runs = np.zeros(len(program.blocks), np.int64)
    lanes = np.zeros_like(runs)
    clock = 0
    lines = [0]
    for first in range(0, total, at_once):
        numbers = np.arange(first, min(first + at_once, total))
        machine = Machine(
            program, memory, grid, block, numbers, shared_bytes, arguments, cluster=cluster, clock=clock,
            max_steps=max_steps, order=order, slow=slow, held=held,
        )  # fmt: skip
        machine.races.lines = lines
        machine.races.sequential[:] |= not old_reads
        shadow = machine.use_shadow(shadow)
        machine.run()
        machine.races.shadows.clear()  # large, and a machine is garbage that refers to itself
        clock = machine.races.time
        runs += machine.runs
        lanes += machine.lane_runs
    memory.sequence.end(program.entry.name, total, shadow, lines, memory)
    sizes = np.array([len(b.lines) for b in program.blocks], np.int64)
    return Report(
        int(runs @ sizes),
        int(lanes @ sizes),
        frozenset(line for b, n in zip(program.blocks, runs, strict=True) if n for line in b.lines),
        frozenset(line for b in program.blocks for line in b.lines),
    )
