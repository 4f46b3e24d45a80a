"""Shared rows of clocks say the same as a row for each lane would."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx.sim.knowledge import Knowledge, merge
from strategies import examples

LANES, COLUMNS, BLOCKS = 8, 5, 3

_lanes = st.sets(st.integers(0, LANES - 1), min_size=1).map(lambda chosen: np.array(sorted(chosen)))
_clocks = st.lists(st.integers(0, 6), min_size=COLUMNS, max_size=COLUMNS).map(lambda times: np.array(times, np.int32))
_foreign = st.dictionaries(st.integers(1, BLOCKS), _clocks, max_size=BLOCKS)
_steps = st.lists(st.tuples(_lanes, st.none() | _clocks, _foreign, st.booleans()), max_size=12)


class Model:
    """Every lane on its own."""

    def __init__(self) -> None:
        self.own = np.zeros((LANES, COLUMNS), np.int32)
        self.foreign: list[dict[int, Any]] = [{} for _ in range(LANES)]

    def learn(self, lanes: Any, clocks: Any, foreign: dict[int, Any]) -> None:
        for lane in lanes:
            if clocks is not None:
                self.own[lane] = np.maximum(self.own[lane], clocks)
            merge(self.foreign[lane], foreign)

    def unite(self, lanes: Any) -> None:
        clocks = self.own[lanes].max(0)
        said: dict[int, Any] = {}
        for lane in lanes:
            merge(said, self.foreign[lane])
        self.learn(lanes, clocks, said)


def _plain(said: dict[int, Any]) -> dict[int, list[int]]:
    return {block: clocks.tolist() for block, clocks in said.items()}


@settings(max_examples=examples(200), deadline=None)
@given(_steps)
def test_what_lanes_know_is_what_each_would_know_alone(steps: list[tuple[Any, Any, dict[int, Any], bool]]) -> None:
    knowledge, model = Knowledge(LANES, COLUMNS), Model()
    for lanes, clocks, foreign, unite in steps:
        if unite:
            knowledge.unite(lanes)
            model.unite(lanes)
        else:
            knowledge.learn(lanes, clocks, foreign)
            model.learn(lanes, clocks, foreign)
        for lane in range(LANES):
            here = np.array([lane])
            np.testing.assert_array_equal(knowledge.clocks(here), model.own[lane])
            assert _plain(knowledge.said(here)) == _plain(model.foreign[lane])
        np.testing.assert_array_equal(knowledge.clocks(lanes), model.own[lanes].max(0))


def test_lanes_that_come_to_know_the_same_share_a_row() -> None:
    knowledge = Knowledge(LANES, COLUMNS)
    knowledge.learn(np.array([0]), np.array([1, 0, 0, 0, 0]), {})
    knowledge.learn(np.array([1]), np.array([0, 1, 0, 0, 0]), {})
    assert len(knowledge.groups(np.arange(LANES))) == 3
    knowledge.learn(np.arange(LANES), np.array([2, 2, 2, 2, 2]), {1: np.ones(COLUMNS, np.int32)})
    assert len(knowledge.groups(np.arange(LANES))) == 1
