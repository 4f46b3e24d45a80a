"""What `jitmx bench topk` and `jitmx bench tree` run: right before they are timed, and shown beside torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jitmx.bench import topk as benchmarks_topk
from jitmx.bench import tree as benchmarks
from jitmx.bench.benchmark import Ceilings
from jitmx.errors import DriverError
from jitmx.kernels.tree.problem import random_parents
from jitmx.ops import tree
from simulated_card import on_cpu

LIMITS = Ceilings("a card", read=4e12, copy=4e12, matmul=7e14)


def test_a_call_that_gives_something_else_than_torch_is_an_error() -> None:
    def made(value: int) -> Callable[[], Any]:
        return lambda: (torch.tensor([1, value]),)

    benchmarks.check(benchmarks.Call("one", made(2), made(2), 8))
    with pytest.raises(DriverError, match="one gives something else than torch"):
        benchmarks.check(benchmarks.Call("one", made(2), made(3), 8))


def test_torch_s_equivalents_give_what_the_operators_give() -> None:
    draw = np.random.default_rng(0)
    with on_cpu("sm_90a"):
        parents = torch.from_numpy(np.stack([random_parents(64, draw, "bushy") for _ in range(4)]))
        tokens, says = (torch.from_numpy(draw.integers(0, 2, (4, 64))) for _ in range(2))
        starts = torch.arange(4) * 10
        paths = tree.tree_plan(parents, levels=6).paths
        found = tree.tree_verify(tokens, says, parents, starts=starts, levels=6)
        for one, right in zip(found, benchmarks.torch_verify(tokens, says, parents, paths, starts), strict=True):
            assert torch.equal(one.long(), right.long())
        mask = torch.from_numpy(draw.random((2, 64, 64)) < 0.5)
        assert torch.equal(tree.pack_mask(mask), benchmarks.torch_mask(mask))


def test_tables_name_operators_times_and_torch_s() -> None:
    peers = {"torch": {"us": 30.25, "reason": None}}
    row = {"operator": "accept_greedy", "batch": 16, "us": 2.5, "bytes": 900, "peers": peers}
    (table,) = benchmarks.tables({"nodes": 64, "drafts": 3, "rows": [row]}, LIMITS)
    assert table.headers[-1] == "TORCH US" and table.rows == [("accept_greedy", 16, "2.50", 900, "30.25")]
    best = {"dtype": "bf16", "m": 1, "k": 8, "us": 5.0, "bytes": 402176, "floor_us": 0.1, "peers": peers}
    (table,) = benchmarks_topk.tables({"vocabulary": 201088, "rows": [best]}, LIMITS)
    assert table.rows == [("bf16", 1, 8, "5.00", "0.10", "30.25")]
