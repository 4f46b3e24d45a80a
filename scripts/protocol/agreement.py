"""Whether jitmx agrees with a model as well as two stock backends do."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from jitmx.registry.case import relative_l2
from scripts.protocol.report import Report

# jitmx's relative error may be this much larger than the larger one of two stock backends.
ERROR_SLACK = 1.25
# Below this probability it is no chance that jitmx parts first.
CHANCE = 0.01


def judge_logits(
    report: Report, tables: dict[str, Any], ours: str, stock: tuple[str, str], what: str = "logits"
) -> float:
    """jitmx's logits are no further from the reference than `ERROR_SLACK` times those of the worse stock backend.

    Without "transformers" among the tables, a stock backend takes the reference's place: jitmx may be no further from
    either than `ERROR_SLACK` times what they are from each other.

    Args:
        what: a name for these logits, of the check and in the results.

    Returns:
        How far from it they may be.
    """
    first, second = stock
    if "transformers" in tables:
        wanted = tables["transformers"]
        others = [name for name in tables if name != "transformers"]
        errors = {name: relative_l2(tables[name], wanted) for name in others}
        each = {name: [relative_l2(*rows) for rows in zip(tables[name], wanted, strict=True)] for name in others}
        agree = {name: float((tables[name].argmax(-1) == wanted.argmax(-1)).mean()) for name in errors}
        bound, whom = ERROR_SLACK * max(errors[first], errors[second]), "transformers in float32"
        found = errors[ours]
    else:
        errors = {f"{a} from {b}": relative_l2(tables[a], tables[b]) for a, b in ((ours, first), (ours, second), stock)}
        agree, each = {}, {}
        bound, whom = ERROR_SLACK * errors[f"{first} from {second}"], "the nearer stock backend"
        found = min(errors[f"{ours} from {first}"], errors[f"{ours} from {second}"])
    report.results.setdefault(what, {})[ours] = {
        "relative_l2": errors, "same_token": agree, "bound": bound, "against": whom, "prompts": each,
    }  # fmt: skip
    seen = f"{ours}: relative L2 {found:.4g} from {whom}, wanted at most {bound:.4g}"
    report.check(what, found <= bound, seen)
    return bound


def judge_greedy(
    report: Report, chosen: dict[str, list[list[int]]], ours: str, stock: Sequence[str], steps: int
) -> None:
    """jitmx and a stock engine part no earlier than two stock engines part from each other.

    When a chain parts is a matter of chance even between equals, so many chains are looked at: jitmx fails where it is
    the one that parts first so often that one of three equals would do so less often than `CHANCE`.
    """
    first, second = stock
    pairs = {
        f"{a} and {b}": [shared(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        for a, b in itertools.combinations(chosen, 2)
    }
    of = {frozenset(pair.split(" and ")): lengths for pair, lengths in pairs.items()}

    def lengths(a: str, b: str) -> list[list[int]]:
        return [of[frozenset(pair)] for pair in ((a, b), (ours, a), (ours, b))]

    between, *own = lengths(first, second)
    chance = parts_first(between, *own)
    engines = [name for name in chosen if name.startswith("stock-")]
    beside = {f"{a} and {b}": parts_first(*lengths(a, b)) for a, b in itertools.combinations(engines, 2)}
    alone = sum(most > max(mine) for most, *mine in zip(between, *own, strict=True))
    said = report.results.setdefault("greedy", {"steps": steps, "judged": {}})
    said["shared"] = pairs
    said["median"] = {pair: statistics.median(values) for pair, values in pairs.items()}
    said["judged"][ours] = {"stock": list(stock), "parts_alone": alone, "chains": len(between), "chance": chance}
    said["judged"][ours]["chance_beside"] = beside  # each pair of stock engines: told, not judged
    found = min(statistics.median(shares) for shares in own)
    seen = (
        f"{ours}: of {steps} tokens {found:.0f} are shared with {first} or {second} and "
        f"{statistics.median(between):.0f} between these (medians of {len(between)} chains, in {alone} of which it "
        f"parts alone); so much by chance: {chance:.3f}, wanted {CHANCE} at least"
    )
    report.check("greedy tokens", chance >= CHANCE, seen)


def parts_first(between: Sequence[int], *own: Sequence[int], rounds: int = 20000) -> float:
    """How often one of three equals parts from the other two as early as the first of them does.

    Of each chain it is known how many tokens each pair shares. That jitmx is one of three equals means that any of the
    three could be in its place, chain by chain: this is the share of such places, drawn at random, in which it shares
    as few tokens with the others, beside what these share, in the mean of logarithms over chains.

    Args:
        between: tokens that the other two share, a number a chain.
        own: tokens that it shares with each of them.
    """
    import numpy as np

    lengths = np.log1p(np.array([between, *own], np.float64))
    # Whose place it is in: the pair without it, against the two pairs with it.
    sooner = (lengths.sum(0) - lengths) / 2 - lengths
    drawn = np.random.default_rng(0).integers(0, 3, (rounds, lengths.shape[1]))
    means = np.take_along_axis(sooner.T[None], drawn[..., None], axis=2)[..., 0].mean(axis=1)
    return float((means <= sooner[0].mean() + 1e-12).mean())


def shared(one: list[int], other: list[int]) -> int:
    """Tokens before two sequences part."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
