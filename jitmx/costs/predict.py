"""From a launch's work and a card's parameters to the microseconds that it should take, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitmx.costs.cards import Card
from jitmx.costs.work import Work

_UNDER_WAY = 65536.0  # bytes that a multiprocessor had on its way where `block_gbps` was measured
_SCHEDULERS = 4.0  # of a multiprocessor
_NEAR = 1.25  # times what memory takes, up to which a kernel with a model of its own is said to be bound by it


@dataclass(frozen=True)
class Prediction:
    """What a launch should take.

    Attributes:
        us: microseconds, in a graph of dependent launches.
        memory_us, instructions_us, products_us: what its bytes, its instructions and its products alone would take.
        handover_us: launch, hand-overs and what is read before the first product.
        bound: which of "memory", "instructions", "products" and "hand-overs" is most of it; "model" where the kernel's
            own written model says what it takes.
    """

    us: float
    memory_us: float
    instructions_us: float
    products_us: float
    handover_us: float
    bound: str


def predict(
    work: Work, instructions: float, card: Card, multiprocessors: int = 0, of_blocks: float = 0.0
) -> Prediction:
    """The time of one launch.

    Args:
        instructions: warp instructions of all its units.
        multiprocessors: of the device, where they are others than the card's.
        of_blocks: those that its blocks have beside these.
    """
    busy = max(1, work.busy)
    cycles_us = card.clock_ghz.value * 1e3
    memory, least, hidden = _memory(work, card, busy)
    issue = instructions / _issued(work.warps, card) + of_blocks / _issued(work.block_warps or work.warps, card)
    issue *= work.spread / (busy * cycles_us)
    rate = card.wgmma_tflops.value if work.tensor == "wgmma" else card.mma_tflops.value
    share = busy / (multiprocessors or card.multiprocessors)
    products = work.flops * work.spread / (rate * share) / 1e6 if rate else 0.0
    handed = _handed(work, card)
    if work.own_us is not None:
        bound = "memory" if memory * _NEAR > work.own_us else "model"
        return Prediction(max(work.own_us, memory), memory, issue, products, handed, bound)
    executed = max(products, issue + card.stacked.value * products)
    powers = work.powers * work.spread / (card.powers.value * busy * cycles_us)
    executed = max(executed, powers) + card.stacked.value * min(executed, powers)
    waited = max(0.0, memory - hidden)
    executed += work.ramp * waited
    total = handed + max(waited, executed) + card.unhidden.value * min(waited, executed)
    parts = {"memory": memory, "instructions": issue, "products": products, "hand-overs": handed}
    return Prediction(max(total, least), memory, issue, products, handed, max(parts, key=lambda name: parts[name]))


def _memory(work: Work, card: Card, busy: int) -> tuple[float, float, float]:
    """Us of what is moved; of it, what device memory takes at the least, and what is asked for early."""
    fits = work.cached <= card.l2_mb.value * 1e6
    moved, kept = (work.bytes, work.cached) if fits else (work.bytes + work.cached, 0.0)
    least = moved / card.memory_gbps.value / 1e3
    each = (work.each or moved / busy) / _rate(work, card) / 1e3
    of_l2 = kept / min(card.l2_gbps.value, busy * card.exposed_gbps.value) / 1e3
    memory = max(least, each) + of_l2
    return memory, least, min(max(work.fills, 1) * card.fill_us.value, work.early / max(moved, 1.0) * memory)


def _rate(work: Work, card: Card) -> float:
    """GB/s that a multiprocessor reads by what it has on its way."""
    measured = card.block_gbps.value
    return min(max(measured, card.port_gbps.value), measured * max(1.0, work.under_way / _UNDER_WAY))


def _handed(work: Work, card: Card) -> float:
    """Us of the launch, which begins on fewer multiprocessors sooner, of hand-overs and of what comes before the first
    product.
    """
    each = work.fills * card.fill_us.value + work.clusters * card.cluster_us.value + work.grids * card.grid_us.value
    each += work.merges * card.merge_us.value + work.exchanged / card.exchange_gbps.value / 1e3
    # The slowest of some blocks counts, which comes the later the more there are, but not in proportion.
    idle = 1 - math.sqrt(min(work.busy / card.multiprocessors, 1.0))
    launch = card.launch_us.value - card.start_us.value * idle
    return launch + work.exposed / card.exposed_gbps.value / 1e3 + each * work.rounds


def _issued(warps: float, card: Card) -> float:
    """Instructions a cycle of a multiprocessor whose schedulers have these warps, each with one chain of them."""
    if not warps:
        return _SCHEDULERS * card.issued.value
    schedulers = min(_SCHEDULERS, warps)
    each = warps / schedulers
    return schedulers * card.issued.value * each / (each + card.alone.value)
