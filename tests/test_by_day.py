"""What runs by day of tests over many parameters, and that all else is left to the night."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from by_day import left_to_the_night


def items_of(mark: Any, **parameters: list[Any]) -> list[Any]:
    """A test's items, one for each combination of parameters."""
    return [
        SimpleNamespace(
            nodeid=f"test_file.py::test_it[{'-'.join(map(str, values))}]",
            callspec=SimpleNamespace(params=dict(zip(parameters, values, strict=True))),
            get_closest_marker=lambda name: mark if name == "nightly" else None,
        )
        for values in itertools.product(*parameters.values())
    ]


def by_day(items: list[Any]) -> list[Any]:
    later = {id(item) for item in left_to_the_night(items)}
    return [item.callspec.params for item in items if id(item) not in later]


def test_a_test_that_is_marked_without_more_does_not_run_by_day() -> None:
    assert by_day(items_of(pytest.mark.nightly.mark, m=[1, 2])) == []
    assert by_day(items_of(None, m=[1, 2])) == [{"m": 1}, {"m": 2}]


def test_each_value_of_each_parameter_runs_by_day_in_as_few_tests_as_have_them() -> None:
    parameters = {"target": ["sm_80", "sm_90a"], "m": [1, 2, 3], "dtype": ["bf16", "fp16"]}
    found = by_day(items_of(pytest.mark.nightly(by_day="each value").mark, **parameters))
    assert len(found) == 3
    assert {name: {params[name] for params in found} for name in parameters} == {
        name: set(values) for name, values in parameters.items()
    }


def test_those_with_a_named_value_run_by_day_and_all_where_only_others_were_asked_for() -> None:
    mark = pytest.mark.nightly(by_day=("sm_80", "sm_90a")).mark
    items = items_of(mark, target=["sm_80", "sm_89", "sm_90a"], m=[1, 2])
    assert {params["target"] for params in by_day(items)} == {"sm_80", "sm_90a"}
    assert by_day(items[2:4]) == [{"target": "sm_89", "m": 1}, {"target": "sm_89", "m": 2}]
