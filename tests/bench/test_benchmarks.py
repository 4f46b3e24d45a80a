"""What families declare for `jitmx bench` and `jitmx tune` is there: modules of the form that the verbs ask for."""

from __future__ import annotations

import importlib
import inspect

import pytest

from jitmx import bench, kernels
from jitmx.bench import tuning

TUNED = [name for name, family in kernels.families().items() if family.tuning]


@pytest.mark.parametrize("name", bench.known())
def test_a_benchmark_has_what_the_verb_calls(name: str) -> None:
    benchmark = bench.known()[name]
    module = importlib.import_module(benchmark.module)
    assert next(iter(inspect.signature(module.bench).parameters)) == "asked"
    assert [*inspect.signature(module.tables).parameters] == ["payload", "limits"]
    assert hasattr(module, "draw") == benchmark.drawn
    if benchmark.fields:
        assert set(benchmark.fields) <= {*kernels.family(benchmark.family or name).problem.__dataclass_fields__}


def test_attention_linear_and_moe_are_tuned() -> None:
    assert TUNED == ["attention", "linear", "moe"]


@pytest.mark.parametrize("name", TUNED)
def test_what_times_candidates_is_where_the_process_that_times_looks_for_it(name: str) -> None:
    module, _, attribute = tuning.isolated(name)._where.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert callable(found.__call__) and callable(found.healthy)
    family = kernels.family(name)
    assert family.tuning is not None
    fields = {*family.problem.__dataclass_fields__}
    untimed = {text.partition("=")[0] for text in family.tuning.untimed}
    said = {*family.axes, *family.tuning.sizes, *family.tuning.named, *family.tuning.nameless, *family.tuning.refused}
    assert said | untimed <= fields
    for model, problems in family.tuning.models.items():
        assert problems and all(family.problem(**problem) for problem in problems), model
