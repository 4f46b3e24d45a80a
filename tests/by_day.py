"""Which combinations of a test's parameters run by day, where the test says `pytest.mark.nightly(by_day=...)`.

"each value" of each parameter is in one that runs at least; a tuple names values, one of which those that run have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest


def left_to_the_night(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those that the marks say are for the nightly run alone."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("nightly"))]
    whole = [item for item, mark in marked if not mark.kwargs]
    partly = [(item, mark) for item, mark in marked if mark.kwargs]
    for _, group in groupby(partly, lambda pair: pair[0].nodeid.partition("[")[0]):
        several = list(group)
        tests = [item for item, _ in several]
        chosen = _chosen([_values(item) for item in tests], several[0][1].kwargs["by_day"])
        whole += [item for at, item in enumerate(tests) if at not in chosen]
    return whole


def _values(item: Any) -> set[tuple[str, str]]:
    """Its parameters, each with its value."""
    return {(name, str(value)) for name, value in item.callspec.params.items()}


def _chosen(tests: Sequence[set[tuple[str, str]]], by_day: Any) -> set[int]:
    """Which of them run by day; all, where only others were asked for."""
    if by_day != "each value":
        wanted = set(by_day)
        return {at for at, test in enumerate(tests) if wanted & {value for _, value in test}} or {*range(len(tests))}
    left, chosen = set().union(*tests), set()
    while left:
        most = max(range(len(tests)), key=lambda at: (len(tests[at] & left), -at))
        chosen.add(most)
        left -= tests[most]
    return chosen
