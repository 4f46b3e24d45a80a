"""`jitmx tune` from the command to the table, on a card of the test's own that times by arithmetic."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from jitmx import arch, build, settings
from jitmx.bench import tuning, tuning_builds
from jitmx.cli import targets
from jitmx.cli import tune as verb
from jitmx.dispatch import offers, tactics, tune
from jitmx.dispatch.journal import Fault
from jitmx.kernels import linear
from jitmx.runtime import card as cards

REQUIRE_GPU = targets.require_gpu  # which the fixture takes the place of

SHAPE = ("-n", "512", "-k", "256")
COMPILING = tuning_builds.Background
CARD = {"kind": "measured", "card": "a card", "driver": "1.2"}


def offer(op: str, problem: Any, target: arch.Arch, multiprocessors: int) -> list[tuple[str, dict[str, Any]]]:
    """Three."""
    return [("gemv", {"stages": stages, "chunk": 1, "unroll": 1}) for stages in (1, 2, 3)]


class Card:
    """A stand-in for the process that times: more stages are faster; raises KeyboardInterrupt after so many timings."""

    timings = 0
    stop_after: int | None = None

    def __call__(self, problem: Any, candidate: tune.Candidate, repeats: int) -> float:
        if Card.timings == Card.stop_after:
            raise KeyboardInterrupt
        Card.timings += 1
        return 10.0 * problem.m / candidate.knobs["stages"] + candidate.knobs["chunk"]


pytestmark = pytest.mark.usefixtures("only_gemv")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The card, and a folder for tables; returns the table that is written by default."""
    monkeypatch.setenv("JITMX_TACTICS", str(tmp_path / "tactics"))
    settings.reload()
    monkeypatch.setattr(verb.targets, "require_gpu", lambda verb: None)
    monkeypatch.setattr(cards, "arch", lambda _device: arch.parse("sm_90"))
    monkeypatch.setattr(tuning, "isolated", lambda _op: contextlib.nullcontext(Card()))
    monkeypatch.setattr(cards, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(offers, "offer", offer)
    monkeypatch.setattr(tuning_builds, "Background", lambda _jobs: contextlib.nullcontext(tune.AtHand()))
    monkeypatch.setattr(tuning, "origin", lambda: dict(CARD))
    monkeypatch.setattr(Card, "timings", 0)
    monkeypatch.setattr(Card, "stop_after", None)
    return tmp_path / "tactics" / "sm_90a" / "linear.json"


def test_the_table_that_it_writes_decides_from_then_on(run: Any, read: Any, card: Path) -> None:
    said = run("tune", "linear", *SHAPE, "-m", "1,4", "dtype=fp16")
    assert f"wrote {card}" in said.stdout and "gemv" in said.stdout
    assert [line.split(":")[0] for line in said.stderr.splitlines()] == ["[1/2] [512, 256] m=1", "[2/2] [512, 256] m=4"]
    table = json.loads(card.read_text())
    assert table["origin"] | CARD == table["origin"] and "date" in table["origin"]
    assert [(row["when"]["m"], row["when"]["dtype"], row["us"]) for row in table["rows"]] == [
        ([1, 1], "fp16", round(10 / 3 + 1, 3)), ([2, 4], "fp16", round(40 / 3 + 1, 3))
    ]  # fmt: skip
    assert not list(card.parent.glob("*.journal"))
    tactics.tables.cache_clear()
    told = read("explain", "linear", "--arch", "sm_90", "-m", "3", *SHAPE, "dtype=fp16")
    assert told["decided_by"]["source"] == "user table" and told["knobs"]["stages"] == 3
    tactics.tables.cache_clear()


def test_an_interrupted_run_says_where_it_is_kept_and_the_same_command_goes_on(
    run: Any, read: Any, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("tune", "linear", *SHAPE, "-m", "1,2,8")
    monkeypatch.setattr(Card, "stop_after", 8)
    stopped = run(*command, code=130)
    journal = card.with_name("linear.json.journal")
    assert f"Interrupted: 1 of 3 rows are in {journal}; the same command goes on there" in stopped.stderr
    assert not card.exists()
    for line in journal.read_text().splitlines():
        json.loads(line)
    monkeypatch.setattr(Card, "stop_after", None)
    resumed = run(*command)
    assert f"going on from {journal}: 1 rows are done" in resumed.stderr
    timings = Card.timings
    monkeypatch.setattr(Card, "timings", 0)
    assert len(json.loads(card.read_text())["rows"]) == 3
    again = read(*command, "-q")
    assert Card.timings == timings and [row["stable"] for row in again["rows"]] == [True] * 3
    assert again["path"] == str(card)


def test_a_model_is_its_shapes_and_an_output_layer_has_fewer_rows(read: Any, card: Path) -> None:
    said = read("tune", "linear", "--model", "gpt-oss-120b", "-m", "4", "-q")
    assert [(row["problem"]["n"], row["problem"]["k"]) for row in said["rows"]] == [
        (5120, 2880), (2880, 4096), (201088, 2880)
    ]  # fmt: skip
    for n, most in ((5120, 8192), (201088, 512)):
        assert max(linear.TUNING.values(linear.LinearProblem(n=n))["m"]) == most


@pytest.mark.parametrize("option", ["--out", "--output", "-o"])
def test_the_table_goes_where_it_is_asked_to(run: Any, card: Path, tmp_path: Path, option: str) -> None:
    target = tmp_path / "mine.json"
    run("tune", "linear", *SHAPE, "-m", "1", option, str(target), "-q")
    assert target.is_file() and not card.exists()


def test_rows_of_another_card_stop_it_before_anything_is_timed(
    run: Any, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tune", "linear", *SHAPE, "-m", "1", "-q")
    monkeypatch.setattr(tuning, "origin", lambda: {**CARD, "card": "another card"})
    monkeypatch.setattr(Card, "timings", 0)
    said = run("tune", "linear", *SHAPE, "-m", "1", "-q", code=1)
    assert "holds rows measured on a card, not on another card" in said.stderr and Card.timings == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --model, or n= and k="),
        (("--model", "gpt-oss-120b", "-n", "64"), "n is that of --model gpt-oss-120b; give one of the two"),
        (("-n", "64"), "give --model, or n= and k="),
        ((*SHAPE, "-m"), "-m needs a value: it is short for m=VALUE"),
        ((*SHAPE, "-n", "64"), "n is given twice, as '512' and as '64'; give it once"),
        (("-n", "64", "-k", "65"), "k=65 is not a multiple of 32"),
        ((*SHAPE, "dtype=fp64"), "fp64"),
        ((*SHAPE, "residual=pair"), "residual=pair is not timed, and rows serve calls with and without it: leave it"),
        ((*SHAPE, "speed=1"), "'speed=1' is no field=value of linear"),
        ((*SHAPE, "-m", "0"), "'m=0': m is a whole number from 1 to 2147483616"),
        ((*SHAPE, "--seconds", "0"), "--seconds"),
        (("--model", "gpt-5"), "gpt-oss-120b"),
    ],
)
def test_a_bad_argument_is_a_usage_error_that_names_the_choices(run: Any, arguments: Any, said: str) -> None:
    assert said in run("tune", "linear", *arguments, code=2).stderr


@pytest.mark.parametrize(("name", "value"), [("JITMX_LINEAR_KNOBS", "stages=1"), ("JITMX_LINEAR_TILE", "64x128")])
def test_an_override_is_refused_that_would_be_in_every_timing(
    run: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert f"{name} overrides what is to be measured; unset it" in run("tune", "linear", *SHAPE, code=2).stderr


@pytest.mark.parametrize(
    "asked", [("linear", *SHAPE), ("moe", "experts=16", "top=8", "hidden=256", "intermediate=128")]
)
def test_without_a_gpu_it_says_so(asked: tuple[str, ...], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "require_gpu", REQUIRE_GPU)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "tune needs a GPU that torch can use" in run("tune", *asked, code=1).stderr


def test_the_time_of_every_candidate_is_kept_where_asked_for_whether_the_run_ends_or_not(
    run: Any, card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = tmp_path / "kept" / "timings.jsonl"
    command = ("tune", "linear", *SHAPE, "-m", "1,2", "--timings", str(timings))
    monkeypatch.setattr(Card, "stop_after", 2)
    run(*command, code=130)
    assert len(timings.read_text().splitlines()) == 2
    monkeypatch.setattr(Card, "stop_after", None)
    run(*command)
    told = [json.loads(line) for line in timings.read_text().splitlines()]
    for m in (1, 2):
        row = [one for one in told if one["problem"]["m"] == m]
        assert {one["knobs"]["stages"] for one in row} >= {1, 2, 3}
        assert [one["us"] for one in row] == sorted(one["us"] for one in row) and row[0]["rounds"]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Card, "timings", 0)
    said = run("tune", "linear", *SHAPE, "-m", "1", "--timings", str(tmp_path / "file" / "timings"), code=1)
    assert "the timings cannot be written there" in said.stderr and Card.timings == 0


def test_candidates_that_were_not_timed_are_one_line(run: Any, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(tune.AtHand):
        def first(self, candidates: Any, seconds: float | None) -> tuple[int, Fault | None] | None:
            breach = candidates[0].knobs["stages"] == 2
            return 0, Fault("64 B spilled", breach=True) if breach else None

    monkeypatch.setattr(tuning_builds, "Background", lambda _jobs: contextlib.nullcontext(Faulty()))
    said = run("tune", "linear", *SHAPE, "-m", "1,2").stderr.splitlines()
    (line,) = [line for line in said if "candidates were not timed" in line]
    assert line.startswith("2 of ") and "2 break their contract, 0 do not compile" in line
    assert not any("spilled" in one for one in said)


def test_what_was_compiled_without_a_gpu_is_all_that_the_run_on_the_card_takes(
    run: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    monkeypatch.setattr(tuning_builds, "Background", COMPILING)
    said = read("tune", "linear", *SHAPE, "-m", "1,2", "--compile-only", "--arch", "sm_90", "-q")
    assert (said["arch"], said["rows"], said["failed"]) == ("sm_90a", 2, 0)
    assert said["fit"] + said["breaches"] == said["candidates"] >= 6
    timed: list[tune.Candidate] = []

    class Noting(Card):
        def __call__(self, problem: Any, candidate: tune.Candidate, repeats: int) -> float:
            timed.append(candidate)
            return super().__call__(problem, candidate, repeats)

    monkeypatch.setattr(tuning, "isolated", lambda _op: contextlib.nullcontext(Noting()))
    run("tune", "linear", *SHAPE, "-m", "1,2", "-q")
    assert {candidate.knobs["stages"] for candidate in timed} >= {1, 2, 3}
    for candidate in timed:
        for variant in candidate.variants:
            assert build.obtain(variant, allow_compile=False).status == "hit"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "sm_90"), "--arch is for --compile-only"),
        (("--compile-only", "--arch", "sm_90,sm_121"), "takes one --arch"),
        (("--compile-only", "--arch", "sm_90", "--seconds", "5"), "--seconds is of a run that measures"),
        (("--compile-only", "--arch", "sm_90", "--timings", "x"), "--timings is of a run that measures"),
    ],
)
def test_measuring_and_compiling_alone_do_not_mix(run: Any, arguments: Any, said: str) -> None:
    assert said in run("tune", "linear", *SHAPE, *arguments, code=2).stderr
