"""How far logits are apart, prompt by prompt, and which prompts may be far because a token went to another expert.

Where a router's logits of the last expert chosen and of the next are nearly equal, engines that round differently
choose differently, and that prompt's logits are far apart although none is wrong. A fault reaches all prompts, or those
beyond a border; so few prompts may be far, by no more than an expert weighs.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jitmx.registry.case import Array, relative_l2
from scripts.protocol.report import Report

# A distance may be this much larger than that on short prompts without an adapter.
SLACK = 1.5
# A prompt is far where it is so many times as far apart as short prompts are in the median.
FAR = 4.0
# Of so many prompts one may be far.
ONE_OF = 8
# What another expert may come to: in checkpoints of two layers and four experts a token it is 0.03 to 0.27 (tests).
EXPERT = 0.3
# Ties in two prompts of eight, or of one engine with itself, do come, and go with the prompts; a fault stays.
_AGAIN = "another --seed tells a tie from a fault"


@dataclass(frozen=True)
class Apart:
    """How far two tables of logits are apart.

    Attributes:
        each: relative L2 of each prompt's logits.
        lengths: tokens of each prompt, by which it is named.
        whole: relative L2 of all of them.
    """

    each: Sequence[float]
    lengths: Sequence[int]
    whole: float

    @classmethod
    def of(cls, found: Array, wanted: Array, prompts: Sequence[Sequence[int]]) -> Apart:
        """Of logits [prompts, vocabulary]; infinite where one is NaN and the other is not."""
        each = [relative_l2(*rows) for rows in zip(found, wanted, strict=True)]
        return cls(each, [len(prompt) for prompt in prompts], relative_l2(found, wanted))

    @property
    def median(self) -> float:
        """Of the prompts' distances."""
        return statistics.median(self.each)

    def far(self, measure: Apart) -> list[int]:
        """Which prompts are far, beside what short ones are."""
        return [k for k, distance in enumerate(self.each) if not distance <= FAR * measure.median]

    def near(self, measure: Apart) -> float:
        """Root mean square of the distances of prompts that are not far; 0 where all are."""
        far = self.far(measure)
        kept = [distance for k, distance in enumerate(self.each) if k not in far]
        return statistics.fmean(distance**2 for distance in kept) ** 0.5 if kept else 0.0

    def named(self, prompts: Collection[int]) -> str:
        """Prompts by their tokens, each with its distance."""
        return ", ".join(f"the prompt of {self.lengths[k]} tokens ({self.each[k]:.4g})" for k in prompts) or "none"

    def as_dict(self, measure: Apart) -> dict[str, Any]:
        """For a report."""
        return {
            "relative_l2": self.whole, "median": self.median, "near": self.near(measure), "prompts": list(self.each),
            "far": [self.lengths[k] for k in self.far(measure)],
        }  # fmt: skip


def judge(report: Report, name: str, found: Apart, measure: Apart, changed: Collection[int] = ()) -> None:
    """Two engines are no further apart than `SLACK` times as on short prompts, but for one prompt of `ONE_OF`.

    Both the median and what is left without the far prompts are held to that: the one finds what is wrong for most
    prompts, the other what is less than far for some. Without any distance an engine was compared with itself.

    Args:
        measure: of the same engines on short prompts.
        changed: prompts after which an engine's logits are far from its own; no tie of experts explains these.
    """
    far, near = found.far(measure), found.near(measure)
    said = {
        f"{len(far)} of {len(found.each)} are, wanted one of {ONE_OF}": len(far) * ONE_OF > len(found.each),
        f"another expert comes to {EXPERT} at most": any(not found.each[k] <= EXPERT for k in far),
        "there an engine is far from itself": not set(far).isdisjoint(changed),
    }
    against = ", ".join(reason for reason, holds in said.items() if holds)
    why = f"; {against}: {_AGAIN}" if against else "; a tie of experts may explain it" if far else ""
    held = found.median <= SLACK * measure.median and near <= SLACK * measure.near(measure)
    seen = (
        f"relative L2 {found.median:.4g} in the median and {near:.4g} over prompts that are not far; on short prompts "
        f"{measure.median:.4g} and {measure.near(measure):.4g}, at most {SLACK} times that; far: "
        f"{found.named(far)}{why}"
    )
    report.check(name, found.median > 0 and held and not against, seen)


def judge_same(report: Report, name: str, what: str, ours: Apart, other: Apart, measure: Apart) -> None:
    """One engine's logits after the same prompts, read in two ways, are no further apart than a stock engine's.

    No prompt may be far.

    Args:
        what: how they were read the second time.
        other: the same of the stock engine.
        measure: of the two engines on short prompts.
    """
    far, near, bound = ours.far(measure), ours.near(measure), SLACK * max(other.median, measure.median)
    why = f", wanted none: {_AGAIN}" if far else ""
    seen = (
        f"{what}: logits are {ours.median:.4g} from those without in the median and {near:.4g} over prompts that are "
        f"not far, wanted at most {bound:.4g} ({other.median:.4g} in the stock engine); far: {ours.named(far)}{why}"
    )
    report.check(name, max(ours.median, near) <= bound and not far, seen)
