"""What a family declares of the cost of its launches: the work of one, and small launches that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jitmx.registry.case import Case
from jitmx.registry.spec import Variant


@dataclass(frozen=True)
class Work:
    """What one launch does on a card with so many multiprocessors.

    Attributes:
        bytes: of device memory that it moves at the least.
        flops: operations of its products, with those of rows that only fill up an instruction.
        needed: those that the call asks for, for its floor; of E4M3 half of them, as they take half of the time.
        tensor: what makes the products: "mma" (m16n8k16) or "wgmma".
        powers: of two, where they take turns with products.
        exposed: bytes that a multiprocessor brings from the L2 between the wait for the launch before and its first
            product.
        cached: bytes of activations that it reads and writes, which stay in the L2 where they fit.
        early: bytes, of the first, that it may ask for before the launch before it ends.
        each: bytes that the busiest multiprocessor reads of the L2 or of memory; 0: its share of them.
        units: pieces of equal work; the instructions of each are counted (`Probe`).
        blocks: of the grid; the instructions that each has beside its units are counted too.
        busy: multiprocessors that have some of the work.
        warps: that a multiprocessor has at a time, where each of them has one chain of instructions that depend on one
            another; 0 where there are enough independent ones.
        block_warps: those that share what blocks have beside their units; 0: as many.
        under_way: bytes that a multiprocessor has on their way at a time, where rings hold more than 64 KiB.
        ramp: share of memory's time that passes before instructions are at their pace: rings fill up together.
        spread: work of the busiest of them over that of all on average.
        rounds: pieces of work that a block makes one after the other, each with its fills and hand-overs.
        fills: dependent trips to memory between the wait and the first product, beside one load of x.
        exchanged: bytes that a block sends to others of its cluster.
        clusters: times that blocks of a cluster hand something to each other and wait for it.
        grids: times that all blocks hand something to others through device memory, and wait for it.
        merges: times that the last of some blocks takes what the others have left in device memory.
        beside: whether all blocks of the next launch find idle multiprocessors beside these: what they do before they
            wait costs nothing.
        own_us: what the kernel's own written model, where its heuristic has one, gives the launch, in us.
    """

    bytes: float
    flops: float = 0.0
    needed: float = 0.0
    tensor: str = "mma"
    powers: float = 0.0
    exposed: float = 0.0
    cached: float = 0.0
    early: float = 0.0
    each: float = 0.0
    units: float = 0.0
    blocks: int = 1
    busy: int = 1
    warps: float = 0.0
    block_warps: float = 0.0
    under_way: float = 0.0
    ramp: float = 0.0
    spread: float = 1.0
    rounds: float = 1.0
    fills: int = 0
    exchanged: float = 0.0
    clusters: int = 0
    grids: int = 0
    merges: int = 0
    beside: bool = False
    own_us: float | None = None


@dataclass(frozen=True)
class Probe:
    """A small launch of a variant, which the simulator counts: how many units it has."""

    case: Case
    units: float


@dataclass(frozen=True)
class Cost:
    """What a family says of the cost of its launches, in `jitmx/costs/<family>.py` as `COST`.

    Attributes:
        work: of a launch of a variant for a problem, of so many rows, on so many multiprocessors; None of a kernel
            whose cost is not declared.
        probes: launches of a variant that differ in units, for a problem; none of a kernel that is not counted.
        counted: what of a problem the probes of a variant depend on.
    """

    work: Callable[[Variant, Any, int, int], Work | None]
    probes: Callable[[Variant, Any], Iterable[Probe]] = lambda variant, problem: ()
    counted: Callable[[Variant, Any], tuple[int, ...]] = lambda variant, problem: ()
