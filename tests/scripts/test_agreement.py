"""What counts as agreement: logits within a quarter of the worse stock backend's error, chains that part no earlier."""

from __future__ import annotations

import numpy as np

from scripts.protocol import agreement
from scripts.protocol.report import Report


def judged(ours: float, stock: tuple[float, float]) -> bool:
    """Whether logits with these errors pass."""
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((8, 4096))
    tables = {"transformers": wanted} | {
        name: wanted + error * rng.standard_normal(wanted.shape)
        for name, error in (("ours", ours), ("a", stock[0]), ("b", stock[1]))
    }
    report = Report("2", {})
    agreement.judge_logits(report, tables, "ours", ("a", "b"))
    return report.passed


def test_logits_may_be_a_quarter_worse_than_the_worse_stock_backend_and_no_more() -> None:
    assert judged(0.012, (0.005, 0.01)) and not judged(0.013, (0.005, 0.01))
    assert judged(0.001, (0.005, 0.01)) and not judged(0.0064, (0.005, 0.005))


def chains(rates: tuple[float, float, float], count: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens that pairs of engines share: the last two of three, the first and second, the first and third.

    Each engine leaves the common path by itself, after a number of tokens with its rate.
    """
    leaves = np.random.default_rng(seed).exponential(1 / np.array(rates), (count, 3)).astype(int).clip(max=1000)
    of = [[int(n) for n in leaves[:, pair].min(axis=1)] for pair in ([1, 2], [0, 1], [0, 2])]
    return of[0], of[1], of[2]


def test_chains_of_equals_pass_and_of_one_that_parts_early_do_not() -> None:
    assert agreement.parts_first(*chains((0.01, 0.01, 0.01), 64, 0)) >= agreement.CHANCE
    assert agreement.parts_first(*chains((0.002, 0.01, 0.01), 64, 0)) > 0.5
    assert agreement.parts_first(*chains((0.05, 0.01, 0.01), 64, 0)) < agreement.CHANCE
    assert agreement.parts_first([1000] * 20, [1000] * 20, [1000] * 20) == 1.0
    # The same early step in both of a chain's pairs is one thing seen, not two.
    assert agreement.parts_first([500] * 4, [5] * 4, [5] * 4) >= agreement.CHANCE
    assert agreement.parts_first([500] * 8, [5] * 8, [5] * 8) < agreement.CHANCE


def test_equals_fail_as_often_as_the_gate_says() -> None:
    found = [agreement.parts_first(*chains((0.01, 0.01, 0.01), 24, seed), rounds=1000) for seed in range(300)]
    assert sum(p < agreement.CHANCE for p in found) <= 9  # three are expected
    assert 0.02 < np.mean([p < 0.05 for p in found]) < 0.09
