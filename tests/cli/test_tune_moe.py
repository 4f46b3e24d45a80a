"""`jitmx tune moe` from the command to the table, on a card of the test's own that times by arithmetic."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jitmx import arch, settings
from jitmx.bench import moe, tuning, tuning_builds
from jitmx.cli import tune as verb
from jitmx.dispatch import offers, tactics, tune
from jitmx.dispatch.choose import choose, companions
from jitmx.kernels.moe import MoeProblem
from jitmx.runtime import card as cards

SM_121 = arch.parse("sm_121")
LAYER = ("experts=16", "top=8", "hidden=256", "intermediate=128")
Timed = list[tuple[int, str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Timed]:
    """What the card was asked: up to 64 rows one launch is faster, beyond them tiles of 32 rows, deep rings first.

    Of one launch, a ring a block is.
    """
    asked: Timed = []

    def measure(problem: Any, candidate: tune.Candidate, repeats: int) -> float:
        knobs = candidate.knobs
        asked.append((problem.m, problem.product, dict(knobs)))
        moe.knobs_of(problem, candidate)  # a whole layer can be made of it
        if candidate.kernel in ("decode", "stream", "token"):
            return {"decode": 5.0, "stream": 7.0, "token": 9.0}[candidate.kernel] + knobs["stages"] / 10
        return 10.0 + abs(knobs["tile_m"] - 32) + abs(knobs["stages"] - (3 if problem.product == "down" else 6)) / 10

    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / "tactics"))
    settings.reload()
    monkeypatch.setattr(verb.targets, "require_gpu", lambda verb: None)
    monkeypatch.setattr(cards, "arch", lambda _device: SM_121)
    monkeypatch.setattr(cards, "multiprocessors", lambda _device: 48)
    monkeypatch.setattr(tuning, "isolated", lambda _op: contextlib.nullcontext(measure))
    monkeypatch.setattr(tuning_builds, "Background", lambda _jobs: contextlib.nullcontext(tune.AtHand()))
    monkeypatch.setattr(tuning, "origin", lambda: {"kind": "measured", "card": "a card", "driver": "1.2"})
    tactics.tables.cache_clear()
    yield asked
    tactics.tables.cache_clear()


def test_a_layer_is_tuned_first_and_then_its_second_product_on_the_tile_of_the_first(
    run: Any, read: Any, timed: Timed, tmp_path: Path
) -> None:
    said = read("tune", "moe", *LAYER, "-m", "16,256", "-q")
    found = {(row["problem"]["m"], row["problem"]["product"]): row for row in said["rows"]}
    assert {key: row["kernel"] for key, row in found.items()} == {
        (16, "layer"): "decode", (256, "layer"): "grouped", (256, "down"): "grouped"
    }  # fmt: skip
    assert (found[256, "layer"]["knobs"]["tile_m"], found[256, "layer"]["knobs"]["stages"]) == (32, 6)
    assert (found[256, "down"]["knobs"]["tile_m"], found[256, "down"]["knobs"]["stages"]) == (32, 3)
    assert {knobs["tile_m"] for m, product, knobs in timed if product == "down"} == {32}
    assert {knobs.get("tile_m") for m, product, knobs in timed if (m, product) == (256, "layer")} >= {16, 32, 64, 128}

    table = json.loads((tmp_path / "tactics" / "sm_121a" / "moe.json").read_text())
    assert [(row["when"]["product"], row["when"]["m"], row["kernel"]) for row in table["rows"]] == [
        ("layer", [1, 16], "decode"), ("layer", [17, 256], "grouped"), ("up", [17, 256], "grouped"),
        ("down", [17, 256], "grouped"),
    ]  # fmt: skip
    tactics.tables.cache_clear()
    for m in (17, 100, 256):
        choice = choose("moe", MoeProblem.on(SM_121, m=m, experts=16, top=8, hidden=256, intermediate=128), SM_121)
        assert choice.decided_by.name == "user table"
        _, down, _ = companions(choice)
        assert down.decided_by.name == "user table"
        assert (choice.variant.knobs.stages, down.variant.knobs.stages) == (6, 3)
        assert choice.variant.knobs.tile_m == down.variant.knobs.tile_m == 32
    told = run("explain", "moe", "--arch", "sm_121", "-m", "200", *LAYER).stdout
    assert "decided by  user table: measured on a card" in told and "moe.grouped.down" in told


def test_other_counts_of_a_layer_stay_in_the_table(run: Any, tmp_path: Path) -> None:
    run("tune", "moe", *LAYER, "-m", "16,256", "-q")
    said = run("tune", "moe", *LAYER, "-m", "1024")
    assert "16 x [256, 128] top 8 m=1024: " in said.stderr and "16 x [256, 128] top 8 down m=1024: " in said.stderr
    table = json.loads((tmp_path / "tactics" / "sm_121a" / "moe.json").read_text())
    ranges: dict[str, list[list[int]]] = {}
    for row in table["rows"]:
        ranges.setdefault(row["when"]["product"], []).append(row["when"]["m"])
    assert ranges == {
        "layer": [[1, 16], [17, 256], [257, 1024]], "up": [[17, 256], [257, 1024]], "down": [[17, 256], [257, 1024]]
    }  # fmt: skip


def test_a_finished_run_of_layers_is_taken_from_its_journal(run: Any, timed: Timed, monkeypatch: Any) -> None:
    stopped = offers.candidates

    def interrupted(op: str, task: tune.Task, target: Any, count: int, agree: Any = None) -> list[tune.Candidate]:
        if agree:
            raise KeyboardInterrupt
        return stopped(op, task, target, count, agree)

    monkeypatch.setattr(offers, "candidates", interrupted)
    run("tune", "moe", *LAYER, "-m", "256", "-q", code=130)
    monkeypatch.setattr(offers, "candidates", stopped)
    before = len(timed)
    run("tune", "moe", *LAYER, "-m", "256", "-q")
    assert {product for _, product, _ in timed[before:]} == {"down"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --model, or experts=, top=, hidden= and intermediate="),
        (("experts=16",), "give --model, or experts=, top=, hidden= and intermediate="),
        (("--model", "gpt-oss-20b", "experts=16"), "experts is that of --model gpt-oss-20b"),
        (("-n", "64"), "'n=64' is no field=value of moe; its fields: m, experts, top, hidden, intermediate"),
        ((*LAYER, "product=up"), "product is no field to give"),
        ((*LAYER, "residual=1"), "residual=True is not timed, and rows serve calls with and without it: leave it out"),
        ((*LAYER, "routing=bf16"), "routing=bf16 is not timed"),
        (("experts=4", *LAYER[1:]), "top=8 is over experts=4; give top=4 or less"),
        ((*LAYER[:3], "intermediate=100"), "intermediate=100 is not a multiple of 32"),
    ],
)
def test_a_bad_argument_is_a_usage_error_that_names_the_choices(run: Any, arguments: Any, said: str) -> None:
    assert said in run("tune", "moe", *arguments, "-m", "16", code=2).stderr


@pytest.mark.parametrize("name", ["JITMX_MOE_KNOBS", "JITMX_MOE_TILE", "FLASHINFER_MOE_TILE"])
def test_an_override_is_refused_that_would_be_in_every_timing(run: Any, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv(name, "stages=3" if name.endswith("KNOBS") else "64x128")
    settings.reload()
    assert f"{name} overrides what is to be measured" in run("tune", "moe", *LAYER, code=2).stderr


def test_a_model_is_its_layer(read: Callable[..., dict[str, Any]]) -> None:
    said = read("tune", "moe", "--model", "gpt-oss-20b", "-m", "4", "-q")
    problem = said["rows"][0]["problem"]
    assert [problem[name] for name in ("experts", "top", "hidden", "intermediate")] == [32, 4, 2880, 2880]
