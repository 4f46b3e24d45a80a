"""Whether jitmx agrees with a model as well as two stock backends do."""

from __future__ import annotations

import statistics
from typing import Any

from jitmx.registry.case import relative_l2
from scripts.protocol.report import Report

# jitmx's relative error may be this much larger than the larger one of two stock backends.
ERROR_SLACK = 1.25
# Below this probability a difference in when greedy chains part is no chance.
CHANCE = 0.01


def judge_logits(report: Report, tables: dict[str, Any], ours: str, stock: tuple[str, str]) -> None:
    """jitmx's logits are no further from the reference than `ERROR_SLACK` times those of the worse stock backend.

    Without "transformers" among the tables, a stock backend takes the reference's place: jitmx may be no further from
    either than `ERROR_SLACK` times what they are from each other.
    """
    first, second = stock
    if "transformers" in tables:
        wanted = tables["transformers"]
        errors = {name: relative_l2(tables[name], wanted) for name in (ours, first, second)}
        agree = {name: float((tables[name].argmax(-1) == wanted.argmax(-1)).mean()) for name in errors}
        bound, whom = ERROR_SLACK * max(errors[first], errors[second]), "transformers in float32"
        found = errors[ours]
    else:
        errors = {f"{a} from {b}": relative_l2(tables[a], tables[b]) for a, b in ((ours, first), (ours, second), stock)}
        agree = {}
        bound, whom = ERROR_SLACK * errors[f"{first} from {second}"], "the nearer stock backend"
        found = min(errors[f"{ours} from {first}"], errors[f"{ours} from {second}"])
    report.results["logits"] = {"relative_l2": errors, "same_token": agree, "bound": bound, "against": whom}
    report.check("logits", found <= bound, f"relative L2 {found:.4g} from {whom}, wanted at most {bound:.4g}")


def judge_greedy(
    report: Report, chosen: dict[str, list[list[int]]], ours: str, stock: tuple[str, str], steps: int
) -> None:
    """jitmx and a stock backend part no earlier than the two stock backends part from each other.

    When a chain parts is a matter of chance even between equals, so many chains are looked at: jitmx fails where it
    parts earlier and a permutation of who is who would show as much less often than `CHANCE`.
    """
    first, second = stock
    pairs = {
        f"{a} and {b}": [shared(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        for a, b in ((ours, first), (ours, second), stock)
    }
    medians = {pair: statistics.median(values) for pair, values in pairs.items()}
    between = pairs[f"{first} and {second}"]
    chance = earlier([*pairs[f"{ours} and {first}"], *pairs[f"{ours} and {second}"]], between)
    report.results["greedy"] = {"steps": steps, "shared": pairs, "median": medians, "chance": chance}
    found = min(medians[f"{ours} and {first}"], medians[f"{ours} and {second}"])
    seen = (
        f"of {steps} tokens {found:.0f} are shared with a stock backend and {statistics.median(between):.0f} between "
        f"them (medians of {len(between)} chains); so much by chance: {chance:.3f}, wanted {CHANCE} at least"
    )
    report.check("greedy tokens", chance >= CHANCE, seen)


def earlier(found: list[int], wanted: list[int], rounds: int = 20000) -> float:
    """How often a random split of all lengths has its first part as short as `found`, in the mean of logarithms."""
    import numpy as np

    pool = np.log1p(np.array([*found, *wanted], np.float64))
    seen = pool[: len(found)].mean()
    shuffled = np.random.default_rng(0).permuted(np.tile(pool, (rounds, 1)), axis=1)
    return float((shuffled[:, : len(found)].mean(axis=1) <= seen + 1e-12).mean())


def shared(one: list[int], other: list[int]) -> int:
    """Tokens before two sequences part."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
