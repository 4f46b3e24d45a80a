"""The cost model beside times of this card, measured now."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from jitmx import arch
from jitmx.cli import main
from jitmx.costs import cards, launches
from jitmx.dispatch import call

pytestmark = pytest.mark.alone  # what runs beside it takes of what is timed
WITHIN, RUNS = 0.15, 0.05  # of the figures that ship, and by how much cards of a kind and runs differ from them


@pytest.fixture(scope="module")
def target() -> arch.Arch:
    found = arch.of_device(*torch.cuda.get_device_capability())
    card = cards.CARDS.get(found.name)
    if card is None or card.name not in torch.cuda.get_device_name():
        pytest.skip("the model has no parameters for this card")
    return found


@pytest.mark.parametrize(
    "words", [("linear", "m=1,16,64"), ("attention", "batch=1,16", "context=2048")], ids=lambda one: one[0]
)
def test_decode_kernels_take_what_the_model_says(target, words) -> None:
    done = CliRunner().invoke(main, ["bench", *words, "--peers", "none", "--json"], prog_name="jitmx")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)[words[0]]
    rows = found if isinstance(found, list) else found["rows"]
    assert rows
    fields = {"m", "n", "k", "batch", "context", "queries", "window", "cache"}
    for row in rows:
        shape = {name: value for name, value in row.items() if name in fields and value is not None}
        more = {"sinks": "sinks_bf16", "rope": "neox"} if words[0] == "attention" else {"bias": False}
        us = launches.total(launches.of_call(call.explain(words[0], target, **shape, **more)))
        assert us == pytest.approx(row["us"], rel=WITHIN + RUNS), row
