"""From a launch's work and a card's parameters to the microseconds that it should take, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from jitmx.costs.cards import Card
from jitmx.costs.work import Work


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


def predict(work: Work, instructions: float, card: Card, multiprocessors: int = 0) -> Prediction:
    """The time of one launch.

    Args:
        instructions: warp instructions of all its blocks.
        multiprocessors: of the device, where they are others than the card's.
    """
    value = {name: item.value for name, item in card.parameters.items()}
    busy = max(1, work.busy)
    cycles_us = value["clock_ghz"] * 1e3
    fits = work.cached <= value["l2_mb"] * 1e6
    moved, kept = work.bytes + (0.0 if fits else work.cached), work.cached if fits else 0.0
    least = moved / value["memory_gbps"] / 1e3
    each = (work.each or moved / busy) / value["block_gbps"] / 1e3
    memory = max(least, each) + kept / min(value["l2_gbps"], busy * value["exposed_gbps"]) / 1e3
    issue = instructions * work.spread / (busy * _issued(work.warps, value) * cycles_us)
    tensor = (
        value["wgmma_tflops" if work.tensor == "wgmma" else "mma_tflops"]
        * busy
        / (multiprocessors or card.multiprocessors)
    )
    products = work.flops * work.spread / tensor / 1e6 if tensor else 0.0
    handed = (
        work.merges * value["merge_us"]
        + work.clusters * value["cluster_us"]
        + work.grids * value["grid_us"]
        + work.fills * value["fill_us"]
    )
    handed += work.exchanged / value["exchange_gbps"] / 1e3
    handed = value["launch_us"] + work.exposed / value["exposed_gbps"] / 1e3 + handed * work.rounds
    if work.own_us is not None:
        bound = "memory" if memory * 1.25 > work.own_us else "model"
        return Prediction(max(work.own_us, memory), memory, issue, products, handed, bound)
    executed = max(products, issue + value["stacked"] * products)
    executed += work.powers / (value["powers"] * busy * cycles_us)
    limit = work.fills * value["fill_us"]
    hidden = min(limit, work.early / max(moved, 1.0) * memory)
    waited = max(0.0, memory - hidden)
    total = handed + max(waited, executed) + value["unhidden"] * min(waited, executed)
    parts = {"memory": memory, "instructions": issue, "products": products, "hand-overs": handed}
    return Prediction(max(total, least), memory, issue, products, handed, max(parts, key=lambda name: parts[name]))


def _issued(warps: float, value: dict[str, float]) -> float:
    """Instructions a cycle of a multiprocessor whose schedulers have these warps, each with one chain of them."""
    schedulers = 4.0 if not warps else min(4.0, warps)
    each = warps / schedulers
    return schedulers * value["issued"] * (each / (each + value["alone"]) if warps else 1.0)
