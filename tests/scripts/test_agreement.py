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


def test_chains_of_equals_pass_and_those_that_part_early_do_not() -> None:
    rng = np.random.default_rng(1)
    length = [int(n) for n in np.minimum(rng.exponential(200, 60), 1000)]
    assert agreement.earlier(length[:40], length[40:]) >= agreement.CHANCE
    assert agreement.earlier([n // 5 for n in length[:40]], length[40:]) < agreement.CHANCE
    assert agreement.earlier([1000] * 40, [1000] * 20) == 1.0
    assert agreement.earlier([0] * 40, [1000] * 20) < agreement.CHANCE
    # Equals fail about as often as the gate says: one in a hundred.
    pools = rng.exponential(200, (100, 30)).astype(int)
    failed = sum(agreement.earlier(list(pool[:20]), list(pool[20:]), 2000) < agreement.CHANCE for pool in pools)
    assert failed <= 5
