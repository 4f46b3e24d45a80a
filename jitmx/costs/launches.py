"""What the launches of a call cost: work, instructions, and the time that the model predicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jitmx import costs, kernels
from jitmx.costs import cards, counts, predict
from jitmx.costs.cards import Card
from jitmx.costs.predict import Prediction
from jitmx.costs.work import Work
from jitmx.dispatch.call import Call, Launch
from jitmx.dispatch.choice import Choice


@dataclass(frozen=True)
class Priced:
    """A launch with what it costs.

    Attributes:
        label: what it is of a step, in a word or two.
        choice: why this variant.
        times: how often it is launched.
        work: what it does; None where its family declares no cost of the kernel.
        instructions: warp instructions of PTX; None where none are counted.
        of_blocks: of these, what blocks have beside their units.
        prediction: what one launch should take; None where there is no work.
    """

    label: str
    choice: Choice
    times: int
    work: Work | None
    instructions: float | None
    prediction: Prediction | None
    of_blocks: float = 0.0

    @property
    def us(self) -> float:
        """Predicted us of all its launches; 0 where nothing is predicted."""
        return self.prediction.us * self.times if self.prediction else 0.0

    @property
    def handovers(self) -> dict[str, float]:
        """Hand-overs of one launch by kind: a launch that depends on the one before is one itself."""
        if self.work is None:
            return {}
        work = self.work
        found = {"cluster": work.clusters, "grid": work.grids, "merge": work.merges}
        return {"launch": 1.0} | {kind: times * work.rounds for kind, times in found.items() if times}

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        said: dict[str, Any] = {"label": self.label, "kernel": self.choice.variant.name, "times": self.times}
        if self.work is None or self.prediction is None:
            return said | {"bytes": None, "instructions": None, "handovers": None, "us": None, "bound": None}
        return said | {
            "bytes": round(self.work.bytes + self.work.cached),
            "flops": round(self.work.flops),
            "instructions": None if self.instructions is None else round(self.instructions),
            "handovers": self.handovers,
            "us": round(self.prediction.us, 3),
            "memory_us": round(self.prediction.memory_us, 3),
            "instructions_us": round(self.prediction.instructions_us, 3),
            "products_us": round(self.prediction.products_us, 3),
            "handover_us": round(self.prediction.handover_us, 3),
            "bound": self.prediction.bound,
        }


def price(launch: Launch, card: Card | None = None, label: str = "", rows: int = 1, *, simulate: bool = True) -> Priced:
    """What a launch costs on the card that its target stands for.

    Args:
        rows: of a call whose problem has no number of them (`norm`).
        simulate: as in `counts.count`.

    Raises:
        ArchError: no card of the target has parameters.
        SimulationError, ToolchainError, TacticError: as `counts.count` has them.
    """
    choice = launch.choice
    variant, problem = choice.variant, choice.problem
    card = card or cards.of(variant.arch)
    cost = costs.of(variant.spec.family)
    work = cost.work(variant, problem, rows, choice.multiprocessors) if cost else None
    if work is None:
        return Priced(label, choice, launch.times, None, None, None)
    found = counts.count(variant, problem, simulate=simulate) if work.units else None
    units = found.unit * work.units if found else 0.0
    of_blocks = found.block * work.blocks if found and not work.beside else 0.0
    prediction = predict.predict(work, units, card, choice.multiprocessors, of_blocks)
    instructions = units + of_blocks if found else None
    return Priced(label, choice, launch.times, work, instructions, prediction, of_blocks)


def of_call(call: Call, card: Card | None = None, rows: int = 1) -> list[Priced]:
    """What each launch of a call costs; raises as `price`.

    Args:
        rows: of a call whose problem has no number of them (`norm`).
    """
    family = kernels.family(call.choice.variant.spec.family)
    rows = family.rows(call.problem) if family.axes else rows
    return [price(launch, card, rows=-(-rows // launch.times)) for launch in call.launches]


def floor(priced: Iterable[Priced], card: Card) -> float:
    """What launches take at the least, us: their bytes, or operations that the call asks for, at the card's rates."""
    work = [one.work for one in priced if one.work is not None for _ in range(one.times)]
    rate = max(card.mma_tflops.value, card.wgmma_tflops.value)
    memory = sum(one.bytes for one in work) / card.memory_gbps.value / 1e3
    return max(memory, sum(one.needed for one in work) / rate / 1e6)


def total(priced: Iterable[Priced]) -> float:
    """Predicted us of launches one after another."""
    return sum(one.us for one in priced)
