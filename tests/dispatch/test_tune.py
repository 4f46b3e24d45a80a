"""Tuning with a clock and a card of the test's own: what is timed, what wins, and what an interruption costs."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch, kernels
from jitmx.dispatch import tactics, tune
from jitmx.dispatch.choose import choose
from jitmx.dispatch.journal import Fault, Journal
from jitmx.dispatch.tune import Candidate, Outcome, Task, Tuner
from jitmx.errors import CompileError, KnobError, TacticError
from jitmx.kernels.linear import TUNING, LinearProblem
from jitmx.kernels.moe import MoeProblem

SM_90 = arch.parse("sm_90")
ABOUT = {"family": "linear", "card": "a card", "code": "1"}
TASKS = tune.tasks([(LinearProblem(n=512, k=256), {"m": (4, 1, 8)})])


def named(count: int) -> list[Candidate]:
    return [Candidate("gemv", {"stages": number}, ()) for number in range(count)]


class Card:
    """Times candidates: `us` by their stages, times noise; counts what it was asked, and stops where told to."""

    def __init__(self, us: list[float | None], noise: float = 0.0, stop_after: int | None = None) -> None:
        self.us, self.noise, self.stop_after = us, noise, stop_after
        self.asked: list[tuple[int, int, int]] = []
        self.now = 0.0
        self._random = random.Random(7)

    def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((problem.m, candidate.knobs["stages"], repeats))
        self.now += 1.0
        us = self.us[candidate.knobs["stages"]]
        if us is None:
            raise CompileError("it does not compile")
        return us * problem.m * (1 + self.noise * self._random.uniform(-1, 1))

    def first_pass(self) -> list[tuple[int, int]]:
        return [(m, stages) for m, stages, repeats in self.asked if repeats == tune.QUICK]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Runs the tasks on a card, with a journal in the test's folder."""

    def call(card: Card, tasks: list[Task] = TASKS, about: dict[str, str] = ABOUT, **more: Any) -> list[Outcome]:
        with Journal(tmp_path / "linear.json.journal", about) as journal:
            offered = named(len(card.us))
            return Tuner(card, lambda _: offered, journal, clock=lambda: card.now, **more).run(tasks)

    return call


def test_each_row_serves_from_above_the_next_smaller_count() -> None:
    assert [(task.low["m"], task.problem.as_dict()["m"]) for task in TASKS] == [(1, 1), (2, 4), (5, 8)]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=12, unique_by=lambda us: round(us * 4)))
def test_without_noise_the_fastest_wins(us: list[float]) -> None:
    card = Card(list(us))
    outcome = tuner(card).run(TASKS[:1])[0]
    assert (outcome.knobs["stages"], outcome.us, outcome.stable) == (us.index(min(us)), min(us), True)
    assert (outcome.spread, outcome.tried, outcome.failed) == (0.0, len(us), 0)


def tuner(card: Card, **more: Any) -> Tuner:
    """A tuner whose journal goes nowhere."""

    class Nowhere(Journal):
        def _append(self, entry: Any) -> None:
            pass

    offered = named(len(card.us))
    return Tuner(card, lambda _: offered, Nowhere(Path("nowhere"), ABOUT), clock=lambda: card.now, **more)


def test_what_is_far_from_the_best_is_timed_once_and_the_rest_again() -> None:
    card = Card([10.0, 12.9, 13.1, 50.0])
    tuner(card).run(TASKS[:1])
    again = {stages for _, stages, repeats in card.asked if repeats == tune.THOROUGH}
    assert again == {0, 1}
    assert card.first_pass() == [(1, stages) for stages in range(4)]


def test_no_more_than_the_finalists_are_timed_again() -> None:
    card = Card([10.0 + stages / 100 for stages in range(40)])
    tuner(card).run(TASKS[:1])
    assert {stages for _, stages, repeats in card.asked if repeats == tune.THOROUGH} == set(range(tune.FINALISTS))


def test_a_candidate_that_cannot_run_is_counted_and_passed_over() -> None:
    outcome = tuner(Card([None, 5.0, None])).run(TASKS[:1])[0]
    assert (outcome.knobs["stages"], outcome.tried, outcome.failed) == (1, 1, 2)
    with pytest.raises(TacticError, match=r"none of 2 candidates for .*'n': 512.* could be timed"):
        tuner(Card([None, None])).run(TASKS[:1])


def test_rounds_go_on_until_two_agree() -> None:
    class Settling(Card):
        def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
            us = super().__call__(problem, candidate, repeats)
            return us * (1 + 1 / len(self.asked))  # each time is closer to the last

    card = Settling([10.0])
    outcome = tuner(card).run(TASKS[:1])[0]
    assert outcome.stable and 3 <= len(card.asked) < 1 + tune.ROUNDS
    assert outcome.spread <= tune.AGREE


def test_a_result_that_never_agrees_with_itself_is_marked_with_its_spread(tmp_path: Path) -> None:
    card = Card([10.0], noise=0.4)
    outcome = tuner(card).run(TASKS[:1])[0]
    assert not outcome.stable and outcome.spread > tune.AGREE
    assert len(card.asked) == 1 + tune.ROUNDS
    assert tune.row(outcome, TUNING)["spread"] == round(outcome.spread, 3)
    path = tmp_path / "linear.json"
    tactics.save(path, table(path, [tune.row(outcome, TUNING)]))
    (row,) = tactics.load(path, kernels.family("linear"), SM_90).rows
    assert row.spread == round(outcome.spread, 3) and "not stable" in row.timing


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([10.0, 11.0], [10.1, 11.0], True),
        ([10.0, 11.0], [10.3, 11.0], False),  # one winner, at another time
        ([10.0, 10.1], [10.1, 10.0], True),  # two that are as fast
        ([10.0, 10.5], [10.5, 10.0], False),
        ([10.0], [10.2], True),
    ],
)
def test_rounds_agree_where_one_winner_is_as_fast_twice(before: list[float], after: list[float], same: bool) -> None:
    assert tune.agree(before, after) is same and tune.agree(after, before) is same


def test_a_finished_run_is_taken_from_its_journal(run: Callable[..., list[Outcome]]) -> None:
    first = run(Card([3.0, 2.0, 4.0]))
    card = Card([3.0, 2.0, 4.0])
    assert run(card) == first and not card.asked


@pytest.mark.parametrize("stop_after", range(15))
def test_an_interrupted_run_goes_on_where_it_was(stop_after: int, run: Callable[..., list[Outcome]]) -> None:
    us: list[float | None] = [30.0, 20.0, None]
    stopped = Card(us, stop_after=stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(stopped)
    rest = Card(us)
    outcomes = run(rest)
    assert [(outcome.knobs["stages"], outcome.us) for outcome in outcomes] == [(1, 20.0), (1, 80.0), (1, 160.0)]
    # No first timing is taken twice.
    timed = stopped.first_pass() + rest.first_pass()
    assert len(timed) == len(set(timed)) == 9


def test_a_journal_whose_last_line_was_cut_short_goes_on(
    run: Callable[..., list[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of lines, and no power to lose
    wanted = run(Card([3.0, 2.0]))
    path = tmp_path / "linear.json.journal"
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        found = run(Card([3.0, 2.0]))
        lines = [json.loads(line) for line in whole[:size].splitlines(keepends=True) if line.endswith(b"\n")]
        if lines and lines[-1].get("launching"):  # the process ended there: this candidate's doing
            assert sum(outcome.failed for outcome in found) == 1
        else:
            assert found == wanted
        for line in path.read_text().splitlines():
            json.loads(line)


def test_a_journal_about_something_else_is_started_anew(run: Callable[..., list[Outcome]]) -> None:
    run(Card([3.0, 2.0]))
    card = Card([1.0, 2.0])
    outcomes = run(card, about={**ABOUT, "code": "2"})
    assert [outcome.knobs["stages"] for outcome in outcomes] == [0, 0, 0] and len(card.first_pass()) == 6


def test_a_journal_that_cannot_be_kept_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TacticError, match=r"file/linear\.journal: the journal of the run cannot be kept there"):
        Journal(tmp_path / "file" / "linear.journal", ABOUT).__enter__()


def test_a_limit_of_time_cuts_the_first_pass_and_shares_what_is_left() -> None:
    card = Card([10.0 - stages / 100 for stages in range(30)])  # a second each
    outcomes = tuner(card, seconds=60).run(TASKS)
    assert all(5 <= outcome.tried < 30 for outcome in outcomes)
    assert card.now <= 60 + 2 * tune.FINALISTS


def test_even_without_time_each_row_gets_a_candidate_and_two_rounds() -> None:
    outcomes = tuner(Card([10.0, 9.0]), seconds=0.1).run(TASKS)
    assert [(outcome.knobs["stages"], outcome.tried, outcome.stable) for outcome in outcomes] == [(0, 1, True)] * 3


def test_steps_are_told_and_never_exceed_what_there_may_be() -> None:
    told: list[tuple[int, int]] = []
    tuner(Card([10.0, 11.0, 12.0], noise=0.1), step=lambda _task, done, of: told.append((done, of))).run(TASKS)
    assert told and all(0 < done <= of for done, of in told)


@pytest.mark.usefixtures("only_gemv")
def test_candidates_are_legal_at_both_ends_of_the_range_and_open_with_todays_choice() -> None:
    task = tune.tasks([(LinearProblem(n=5120, k=2880), {"m": (2, 4)})])[1]
    offered = [("gemv", {"stages": 2, "chunk": 2}), ("gemv", {"stages": 99}), ("gemv", {"stages": 2, "chunk": 2})]
    found = tune.candidates("linear", task, SM_90, 132, offered)
    today = choose("linear", task.problem, SM_90, multiprocessors=132).variant
    assert found[0].variants[0] == today
    assert [candidate.knobs["stages"] for candidate in found[1:]] == [2]
    for candidate in found:
        for problem, variant in zip((task.problem, LinearProblem(3, 5120, 2880)), candidate.variants, strict=True):
            knobs = {"kernel": candidate.kernel, **candidate.knobs}
            assert choose("linear", problem, SM_90, multiprocessors=132, knobs=knobs).variant == variant


def test_behind_the_first_of_each_kernel_come_candidates_of_todays() -> None:
    task = tune.tasks([(MoeProblem(8192), {"m": (4096, 8192)})])[1]
    offered: list[tuple[str, dict[str, Any]]] = [("grouped", {})]
    offered += [(kernel, {"grain": grain}) for grain in (8, 64) for kernel in ("wgmma", "fused")]
    found = tune.candidates("moe", task, arch.parse("sm_90a"), 132, offered)
    assert [(one.kernel, one.knobs.get("grain")) for one in found] == [
        ("fused", 16), ("grouped", None), ("wgmma", 8), ("fused", 8), ("fused", 64), ("wgmma", 64)
    ]  # fmt: skip


def test_a_kernel_that_finds_no_knobs_for_a_shape_is_left_out(only_gemv: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(problem: Any, target: Any, count: int) -> dict[str, Any]:
        raise KnobError("nothing of it fits")

    linear = kernels.family("linear")
    gemv = linear.kernel("gemv")
    knobs = type("RoomyKnobs", (gemv.spec.knobs,), {})  # which a spec gives its name: gemv's keep theirs
    roomy = dataclasses.replace(gemv, spec=dataclasses.replace(gemv.spec, name="roomy", knobs=knobs), heuristic=none)
    family = dataclasses.replace(linear, kernels=(gemv, roomy))
    monkeypatch.setattr(kernels, "families", lambda: {"linear": family})
    task = tune.tasks([(LinearProblem(n=777, k=2880), {"m": (4,)})])[0]
    found = tune.candidates("linear", task, SM_90, 132, [("roomy", {}), ("gemv", {"stages": 2, "chunk": 2})])
    assert [candidate.kernel for candidate in found] == ["gemv", "gemv"]


@pytest.mark.usefixtures("only_gemv")
def test_a_row_that_was_written_is_the_choice_that_was_timed(write: Callable[..., Path], tactics_folder: Path) -> None:
    task = tune.tasks([(LinearProblem(n=777, k=2880), {"m": (2, 4)})])[1]
    (_, found) = tune.candidates("linear", task, SM_90, 132, [("gemv", {"stages": 3, "chunk": 2, "unroll": 1})])
    outcome = Outcome(task, found.kernel, found.knobs, 4.25, 0.0, True, 1, 0)
    write("sm_90a", tune.row(outcome, TUNING))
    for m in (3, 4):
        choice = choose("linear", LinearProblem(m, 777, 2880, bias=True), SM_90)
        assert choice.decided_by.name == "user table" and choice.decided_by.detail.endswith("4.25 us")
        assert choice.variant.knobs.as_dict() == {**found.variants[0].knobs.as_dict(), "bias": True}
    assert choose("linear", LinearProblem(2, 777, 2880), SM_90).decided_by.name == "heuristic"


ORIGIN = {"kind": "measured", "card": "a card", "driver": "1.2", "date": "2026-01-02"}


def table(path: Path, rows: list[dict[str, Any]], **origin: str) -> dict[str, Any]:
    return tactics.merged(path, kernels.family("linear"), SM_90, {**ORIGIN, **origin}, rows)


def row(n: int, **when: Any) -> dict[str, Any]:
    return {"when": {"m": [1, 4], "n": n, **when}, "kernel": "gemv", "knobs": {}, "us": 1.5}


def test_rows_for_other_problems_stay_and_those_for_the_same_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    tactics.save(path, table(path, [row(1), row(2), row(2, activation="mxfp8")]))
    later = table(path, [{**row(2, weight="mxfp4"), "us": 1.25}])
    tactics.save(path, later)
    assert [(r["when"]["n"], r["us"]) for r in later["rows"]] == [(2, 1.25), (1, 1.5), (2, 1.5)]
    loaded = tactics.load(path, kernels.family("linear"), SM_90)
    assert loaded.origin == ORIGIN and [dict(r.when) for r in loaded.rows] == [r["when"] for r in later["rows"]]


def test_what_was_measured_on_another_card_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    tactics.save(path, table(path, [row(1)]))
    with pytest.raises(TacticError, match=r"holds rows measured on a card, not on another; name another file"):
        table(path, [row(2)], card="another")
    tactics.save(path, {**table(path, [row(1)]), "origin": {"kind": "heuristic"}})
    assert table(path, [row(2)], card="another")["rows"] == [row(2)]


def test_a_table_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TacticError, match=r"file/linear\.json: the table cannot be written there"):
        tactics.save(tmp_path / "file" / "linear.json", table(tmp_path / "none", [row(1)]))


def test_a_table_behind_a_link_is_written_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "linear.json").symlink_to(tmp_path / "kept.json")
    tactics.save(tmp_path / "linear.json", table(tmp_path / "none", [row(1)]))
    assert (tmp_path / "linear.json").is_symlink() and json.loads((tmp_path / "kept.json").read_text())["rows"]


MEASURED = {**ORIGIN, "code": "1"}


def at(m: int, us: float, low: int = 1, **when: Any) -> dict[str, Any]:
    return {"when": {"m": [low, m], "n": 64, **when}, "kernel": "gemv", "knobs": {}, "us": us}


def ranges(made: dict[str, Any]) -> list[tuple[list[int], float]]:
    return [(row["when"]["m"], row["us"]) for row in made["rows"]]


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        ((1,), [([1, 1], 9.0), ([2, 4], 4.0), ([5, 16], 16.0)]),
        ((4,), [([1, 1], 1.0), ([2, 4], 9.0), ([5, 16], 16.0)]),
        ((2, 64), [([1, 1], 1.0), ([2, 2], 9.0), ([3, 4], 4.0), ([5, 16], 16.0), ([17, 64], 9.0)]),
        ((1, 4, 16), [([1, 1], 9.0), ([2, 4], 9.0), ([5, 16], 9.0)]),
    ],
)
def test_counts_that_a_run_does_not_measure_keep_their_rows(
    measured: tuple[int, ...], wanted: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "linear.json"
    old = [at(1, 1.0), at(4, 4.0, 2), at(16, 16.0, 5), at(16, 5.0, 1, activation="mxfp8")]
    tactics.save(path, table(path, old, **MEASURED))
    new = [at(m, 9.0, low) for low, m in zip((1, *(m + 1 for m in measured)), measured, strict=False)]
    made = table(path, new, **MEASURED, note="later")
    assert ranges(made) == [*wanted, ([1, 16], 5.0)]
    tactics.save(path, made)
    rows = tactics.load(path, kernels.family("linear"), SM_90).rows
    for m in range(1, 17):
        (fitting, *_) = [row for row in rows if row.fits(LinearProblem(m, 64, 64))]
        assert fitting.when["m"][0] <= m <= fitting.when["m"][1]


@pytest.mark.parametrize("change", [{"code": "2"}, {"driver": "9.9"}])
def test_rows_of_other_code_or_another_driver_go_where_their_shape_is_measured_and_are_marked_elsewhere(
    change: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "linear.json"
    tactics.save(path, table(path, [at(1, 1.0), at(4, 4.0, 2), row(65)], **MEASURED))
    made = table(path, [at(1, 9.0)], **{**MEASURED, "date": "2026-03-04", **change})
    assert ranges(made) == [([1, 1], 9.0), ([1, 4], 1.5)]
    (name,) = change
    assert made["rows"][1]["origin"] == {name: MEASURED[name], "date": "2026-01-02"}
    tactics.save(path, made)
    loaded = tactics.load(path, kernels.family("linear"), SM_90)
    assert [loaded.provenance_of(one) for one in loaded.rows] == [
        f"measured on a card, 2026-03-04, code {change.get('code', '1')}", "measured on a card, 2026-01-02, code 1"
    ]  # fmt: skip
    # Once more, with nothing changed since: nothing is lost.
    assert table(path, [at(1, 8.0)], **{**MEASURED, "date": "2026-03-04", **change})["rows"][1] == made["rows"][1]


def test_a_row_whose_code_was_not_recorded_never_passes_for_one_of_the_code_of_a_later_run(tmp_path: Path) -> None:
    path, later = tmp_path / "linear.json", {**MEASURED, "date": "2026-03-04"}
    dated = {**at(4, 4.0, 2), "origin": {"date": "2026-01-01"}}
    tactics.save(path, table(path, [at(1, 1.0), row(65)]) | {"rows": [at(1, 1.0), dated, row(65)]})
    tactics.save(path, table(path, [row(1)], **later))
    kept = tactics.load(path, kernels.family("linear"), SM_90)
    said = dict(zip((one.when["n"] for one in kept.rows), map(kept.provenance_of, kept.rows), strict=True))
    assert said[65].endswith(", 2026-01-02, code not recorded")
    for _ in range(2):  # once its shape is measured it goes, however often other shapes were between
        tactics.save(path, table(path, [row(1)], **later))
    assert ranges(table(path, [at(1, 9.0)], **later))[:1] == [([1, 1], 9.0)]
    assert not [one for one in table(path, [at(1, 9.0)], **later)["rows"] if one["us"] in (1.0, 4.0)]


def test_a_row_whose_origin_is_not_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    for origin in ({"card": "x"}, 3):
        tactics.save(path, {**table(path, [{**row(1), "origin": origin}], **MEASURED)})
        with pytest.raises(TacticError, match="row 0: origin must be an object of driver, date, code"):
            tactics.load(path, kernels.family("linear"), SM_90)
        path.unlink()


class Slow:
    """Builds that are there at times of their own on the card's clock; `faults` of those that must not be timed."""

    def __init__(self, card: Card, ready: list[float], faults: dict[int, Fault] | None = None) -> None:
        self.card, self.ready, self.faults = card, ready, faults or {}
        self.asked: list[int] = []
        self.dropped: list[int] = []

    def ask(self, candidates: Sequence[Candidate]) -> None:
        self.asked += [one.knobs["stages"] for one in candidates]

    def drop(self, candidates: Sequence[Candidate]) -> None:
        self.dropped += [one.knobs["stages"] for one in candidates]

    def first(self, candidates: Sequence[Candidate], seconds: float | None) -> tuple[int, Fault | None] | None:
        when = [self.ready[one.knobs["stages"]] for one in candidates]
        soonest = max(self.card.now, min(when))
        if seconds is not None and soonest > self.card.now + seconds:
            self.card.now += seconds
            return None
        self.card.now = soonest
        place = next(place for place, at in enumerate(when) if at <= soonest)
        return place, self.faults.get(candidates[place].knobs["stages"])


def test_a_candidate_is_timed_once_it_is_built_and_those_of_the_next_rows_are_asked_for_before() -> None:
    card = Card([10.0, 11.0, 12.0, 13.0])
    builds = Slow(card, [5.0, 0.0, 20.0, 0.0])
    asked: list[int] = []
    tuner(card, builds=builds, step=lambda *_: asked.append(len(builds.asked))).run(TASKS[:1])
    assert [stages for _, stages in card.first_pass()] == [1, 3, 0, 2]
    card, asked = Card([10.0, 11.0]), []
    builds = Slow(card, [0.0, 0.0])
    tasks = tune.tasks([(LinearProblem(n=512, k=256), {"m": (1, 2, 4, 8, 16)})])
    tuner(card, builds=builds, step=lambda *_: asked.append(len(builds.asked))).run(tasks)
    assert asked[0] == 2 * 3 and asked[-1] == 2 * 5
    assert len(builds.dropped) == len(builds.asked)


def test_what_must_not_be_timed_is_not_and_has_failed_for_that_reason(tmp_path: Path) -> None:
    card = Card([10.0, 1.0, 12.0])
    with Journal(tmp_path / "journal", ABOUT) as journal:
        builds = Slow(card, [0.0] * 3, {1: Fault("it spills", breach=True)})
        (outcome,) = Tuner(card, lambda _: named(3), journal, builds=builds).run(TASKS[:1])
    assert (outcome.knobs["stages"], outcome.tried, outcome.failed) == (0, 2, 1)
    assert 1 not in {stages for _, stages, _ in card.asked}
    with Journal(tmp_path / "journal", ABOUT) as again:
        assert set(again.faults.values()) == {Fault("it spills", breach=True)} and again.faults == journal.faults


def test_compiling_does_not_take_the_time_of_the_rounds_but_todays_choice_is_waited_for() -> None:
    card = Card([10.0, 9.0, 1.0])
    builds = Slow(card, [50.0, 0.0, 1000.0])
    (outcome,) = tuner(card, builds=builds, seconds=40).run(TASKS[:1])
    assert [stages for _, stages in card.first_pass()] == [1, 0]
    assert outcome.knobs["stages"] == 1 and 50 <= card.now < 60 and 2 in builds.dropped


def test_what_the_journal_knows_is_not_built_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", ABOUT) as journal:
        stopped = Card([10.0, 9.0, 11.0], stop_after=2)
        with pytest.raises(KeyboardInterrupt):
            Tuner(stopped, lambda _: named(3), journal).run(TASKS[:1])
    with Journal(tmp_path / "journal", ABOUT) as journal:
        card = Card([10.0, 9.0, 11.0])
        builds = Slow(card, [0.0] * 3)
        Tuner(card, lambda _: named(3), journal, builds=builds).run(TASKS[:1])
    assert builds.asked == builds.dropped == [2]


def test_the_times_of_all_candidates_can_be_read_afterwards(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", ABOUT) as journal:
        Tuner(Card([10.0, None, 9.0, 30.0]), lambda _: named(4), journal).run(TASKS[:2])
    with Journal(tmp_path / "journal", ABOUT) as again:
        again.export(tmp_path / "timings" / "linear.jsonl")
    told = [json.loads(line) for line in (tmp_path / "timings" / "linear.jsonl").read_text().splitlines()]
    assert [(one["problem"]["m"], one["low"]["m"], one["knobs"]["stages"], one["us"]) for one in told] == [
        (1, 1, 2, 9.0), (1, 1, 0, 10.0), (1, 1, 3, 30.0), (1, 1, 1, None),
        (4, 2, 2, 36.0), (4, 2, 0, 40.0), (4, 2, 3, 120.0), (4, 2, 1, None),
    ]  # fmt: skip
    assert told[0]["rounds"] == [9.0, 9.0] and told[2]["rounds"] == [] and told[0]["kernel"] == "gemv"
    assert told[3]["reason"] == "it does not compile" and "rounds" not in told[3]
    (tmp_path / "file").write_text("")
    with pytest.raises(TacticError, match=r"file/timings: the timings cannot be written there"):
        again.export(tmp_path / "file" / "timings")


def test_along_two_axes_a_row_serves_what_is_above_the_next_smaller_values_of_each(tmp_path: Path) -> None:
    tasks = tune.tasks([(LinearProblem(k=256), {"m": (4, 1), "n": (64, 16)})])
    ranges = [({"m": [task.low["m"], task.problem.m], "n": [task.low["n"], task.problem.n]}) for task in tasks]  # type: ignore[attr-defined]
    assert ranges == [
        {"m": [1, 1], "n": [1, 16]}, {"m": [1, 1], "n": [17, 64]}, {"m": [2, 4], "n": [1, 16]},
        {"m": [2, 4], "n": [17, 64]},
    ]  # fmt: skip
    family = dataclasses.replace(kernels.family("linear"), axes=("m", "n"))
    origin = {"kind": "measured", "card": "a card", "driver": "1", "code": "2", "date": "2026-11-21"}

    def rows(*whens: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"when": {**when, "k": 256}, "kernel": "gemv", "knobs": {}} for when in whens]

    path = tmp_path / "linear.json"
    tactics.save(path, tactics.merged(path, family, SM_90, origin, rows(*ranges)))
    between = rows({"m": [1, 4], "n": [1, 32]})
    found = [row["when"] for row in tactics.merged(path, family, SM_90, origin, between)["rows"]]
    assert [(when["m"], when["n"]) for when in found] == [
        ([1, 1], [1, 16]), ([1, 1], [17, 64]), ([2, 4], [1, 16]), ([1, 4], [17, 32]), ([2, 4], [33, 64])
    ]  # fmt: skip
