"""check_card.sh: a stage that fails or takes too long loses no other, and the summary says what became of each."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from jitmx import bench
from jitmx.cli import main
from scripts.protocol import card
from scripts.protocol.card import STAGES, Stage, Step
from scripts.protocol.report import ProtocolError


def python(name: str, code: str, seconds: float = 30, **more: Any) -> Stage:
    return Stage(name, "a test", (Step(name, (sys.executable, "-c", code), seconds, **more),))


def alive(pid: int) -> bool:
    """Whether a process still runs, a second from now; one that nobody has asked for its status does not."""
    for _ in range(10):
        try:
            state = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return False
        if state == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.1)
    return True


def test_what_fails_or_hangs_loses_neither_the_others_nor_what_it_wrote(tmp_path: Path) -> None:
    child = "import subprocess, sys; print('so far', flush=True); subprocess.run([sys.executable, '-c', {!r}])"
    sleeper = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    stages = (
        python("bad", "import sys; sys.exit('no')"),
        python("hangs", child.format(sleeper), 5),
        python("lies", "print(1)", makes=("never.json",)),
        python("good", "print('{}')", stdout="good.json", makes=("good.json",)),
    )
    report = card.run(stages, tmp_path / "out", without_card=True)
    rows = report.results["stages"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "bad": "failed", "hangs": "timed out", "lies": "failed", "good": "passed",
    }  # fmt: skip
    assert rows["bad"]["steps"][0]["exit_status"] == 1 and "never.json" in rows["lies"]["steps"][0]["reason"]
    assert (tmp_path / "out" / "hangs.log").read_text() == "so far\n"
    assert json.loads((tmp_path / "out" / "good.json").read_text()) == {}
    assert not report.passed and [check.passed for check in report.checks] == [False, False, False, True]
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_result_of_an_earlier_run_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    tmp_path.joinpath("x.json").write_text("old")
    report = card.run((python("x", "pass", makes=("x.json",)),), tmp_path, without_card=True)
    assert report.results["stages"]["x"]["status"] == "failed"


def test_a_stage_that_cannot_run_is_skipped_with_its_reason_and_fails_only_if_asked_for(tmp_path: Path) -> None:
    missing = Stage("missing", "nothing", (), lambda: "it is not here")
    stages = (missing, python("good", "pass"))
    assert card.run(stages, tmp_path, without_card=True).passed
    asked = card.run(stages, tmp_path, without_card=True, all_of_them=True)
    assert not asked.passed and asked.results["stages"]["missing"] == {
        "status": "skipped", "reason": "it is not here", "steps": [],
    }  # fmt: skip
    assert not card.run((missing,), tmp_path, without_card=True).passed


def test_stages_are_chosen_by_name_in_their_own_order() -> None:
    assert [stage.name for stage in STAGES] == ["simulator", "tests", "sanitizer", "tune", "bench", "moe"]
    assert [stage.name for stage in card.choose("bench, tests")] == ["tests", "bench"]
    for text in ("bench,tunes", ",", ""):
        with pytest.raises(ProtocolError, match="give some of simulator"):
            card.choose(text)


@pytest.mark.parametrize("name", ["tune", "bench", "moe"])
def test_the_commands_of_jitmx_that_a_stage_runs_are_legal(name: str) -> None:
    (stage,) = card.choose(name)
    assert stage.needs() is None and stage.steps
    for step in stage.steps:
        words = [word.replace("{out}", "/tmp") for word in step.command]
        verb, *rest = words[words.index("jitmx.cli") + 1 :]
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        command.make_context(verb, rest)


def test_every_benchmark_of_jitmx_is_in_a_stage() -> None:
    known = bench.known()
    steps = [step for name in ("bench", "moe") for step in card.choose(name)[0].steps]
    assert sorted(word for step in steps for word in step.command if word in known) == sorted(known)


@pytest.mark.parametrize("workers", [True, False])
def test_every_test_of_the_card_is_in_a_step_and_keeps_its_evidence(workers: bool) -> None:
    root = Path(__file__).resolve().parents[1] / "gpu"
    steps = card.tests(workers)
    asked = [(word, " ".join(step.command)) for step in steps for word in step.command if word.startswith("tests/gpu/")]
    wanted = sorted(f"tests/gpu/{path.name}" for path in root.glob("test_*.py") if path.name != "test_simulator.py")
    if workers:
        for marker, processes in (("-m alone", False), ("-m not alone", True)):
            there = [word for word, command in asked if marker in command and ("-n auto" in command) == processes]
            assert sorted(there) == wanted
    assert sorted({word for word, _ in asked}) == wanted and len(asked) == len(wanted) * (2 if workers else 1)
    evidence = [step.environment["TEST_EVIDENCE"] for step in steps]
    assert len(set(evidence)) == len(evidence) == len(steps)


def test_tests_that_time_something_are_marked_alone_and_workers_are_as_many_as_a_card_has_room_for(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from types import SimpleNamespace

    from gpu import conftest as gpu
    from jitmx import machine

    alone = {
        path.stem: path.read_text().count("pytest.mark.alone")
        for path in Path(str(gpu.__file__)).parent.glob("test_*.py")
    }
    assert alone["test_speed"] == 1 and alone["test_runtime"] == 3
    card = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(gpu, "HAVE_GPU", True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: card)
    for cores, memory, workers in ((64, 80, 8), (4, 80, 4), (64, 6, 1)):
        monkeypatch.setattr(machine, "compiles_at_once", lambda cores=cores: cores)
        card.total_memory = memory << 30
        assert gpu.pytest_xdist_auto_num_workers(request.config) == workers


def test_kernels_for_the_sanitizer_are_of_every_family_and_have_a_case() -> None:
    from jitmx import arch, kernels
    from scripts.protocol.launches import chosen, usual, ways

    target = arch.parse("sm_120")
    found = list(chosen(target, []))
    assert {variant.spec.family for variant, _ in found} == set(kernels.families())
    assert [variant for variant, _ in found] == [variant for _, variant in ways(target)]
    without = {name for name, _ in usual(target)} - {name for name, _ in ways(target)}
    assert without == {"moe.token"}  # of a usual problem, no launch fits
    assert [v.spec.name for v, _ in chosen(arch.parse("sm_90"), ["linear.wgmma"])] == ["wgmma"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_121"])
def test_kernels_that_serve_only_by_name_are_among_those_for_the_sanitizer(target: str) -> None:
    from jitmx import arch
    from scripts.protocol.launches import chosen

    found = [variant.spec.name for variant, _ in chosen(arch.parse(target), ["moe.stream", "moe.decode"])]
    assert sorted(found) == (["decode"] if target == "sm_80" else ["decode", "stream"])


def test_without_a_card_the_script_says_so_and_writes_nothing(run: Any, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    assert "no GPU" in run("check_card.sh", "--out", tmp_path / "out", code=2).stderr
    assert not (tmp_path / "out").exists()
