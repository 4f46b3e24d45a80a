"""Timing in a process of its own: what a candidate takes with it, and what the others notice of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jitmx.bench.tuning_process import Isolated
from jitmx.dispatch import tune
from jitmx.dispatch.journal import Journal
from jitmx.dispatch.tune import Candidate, Tuner
from jitmx.errors import DriverError, TacticError
from jitmx.kernels.linear import LinearProblem

PROBLEM = LinearProblem(n=64, k=64)


def candidate(does: str, number: int = 0) -> Candidate:
    return Candidate("gemv", {"does": does, "number": number}, ())


@pytest.fixture
def isolated() -> Iterator[Isolated]:
    with Isolated("tuning_bench:Bench", 1000.0, seconds=3.0) as made:
        yield made


RUN = """
import sys
from jitmx.dispatch.tune import Candidate
from jitmx.kernels.linear import LinearProblem
from jitmx.bench.tuning_process import Isolated
if __name__ == "__main__":
    with Isolated("tuning_bench:Bench", 1000.0) as isolated:
        isolated(LinearProblem(n=64, k=64), Candidate("gemv", {"does": "time"}, ()), 5)
        print(isolated._process.pid, flush=True)
        isolated(LinearProblem(n=64, k=64), Candidate("gemv", {"does": "hang"}, ()), 5)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_that_times_ends_with_a_run_that_is_killed_while_a_candidate_hangs(number, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, start_new_session=True,
        ) as run,
    ):  # fmt: skip
        assert run.stdout is not None
        worker = psutil.Process(int(run.stdout.readline()))
        os.killpg(run.pid, number) if number == signal.SIGINT else run.kill()
        _, alive = psutil.wait_procs([worker], timeout=20)
        left = [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        assert not left
        run.wait(20)
        errors.seek(0)
        # That of this script, and none of the worker's.
        assert errors.read().count("Traceback") == (number == signal.SIGINT)


def test_one_process_times_all_candidates_and_ends_with_the_run() -> None:
    with Isolated("tuning_bench:Bench", 1000.0) as isolated:
        assert isolated(PROBLEM, candidate("time"), 5) == pytest.approx(1105.1)
        assert isolated(dataclasses.replace(PROBLEM, m=2), candidate("time"), 15) == pytest.approx(1215.2)
        assert isolated._process is not None and isolated._process.pid is not None
        pid = isolated._process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("does", "said", "starts_anew"),
    [
        ("wrong", "DriverError: it is 0.5 off", False),
        ("fault", "RuntimeError: CUDA error: an illegal memory access", True),
        ("crash", r"ended the process that timed it \(exit code -11\)", True),
        ("hang", r"did not end within 3 s", True),
    ],
)
def test_a_candidate_that_fails_fails_alone(does: str, said: str, starts_anew: bool, isolated: Isolated) -> None:
    isolated(PROBLEM, candidate("time"), 5)
    with pytest.raises(DriverError, match=said):
        isolated(PROBLEM, candidate(does), 5)
    # A process that was started anew has been asked once.
    assert isolated(PROBLEM, candidate("time"), 5) == pytest.approx(1105.1 if starts_anew else 1105.3)


def test_where_nothing_can_be_timed_no_candidate_is_to_blame(tmp_path: Path) -> None:
    with Isolated("tuning_bench:Broken") as isolated, Journal(tmp_path / "journal", {}) as journal:
        offered = [candidate("time")]
        with pytest.raises(TacticError, match="does not start: RuntimeError: no device"):
            Tuner(isolated, lambda _: offered, journal).run(tune.tasks([(PROBLEM, {"m": (1,)})]))
    with Journal(tmp_path / "journal", {}) as journal:
        assert journal.timings == {}


def test_a_run_goes_past_candidates_that_take_the_process_with_them(isolated: Isolated, tmp_path: Path) -> None:
    offered = [candidate(does, number) for number, does in enumerate(("time", "crash", "fault", "wrong", "time"))]
    with Journal(tmp_path / "journal", {}) as journal:
        (outcome,) = Tuner(isolated, lambda _: offered, journal).run(tune.tasks([(PROBLEM, {"m": (1,)})]))
    assert (outcome.tried, outcome.failed) == (2, 3) and outcome.knobs["does"] == "time"


# A run in a process that ends, as the machine might, while the second candidate is timed.
_RUN = """
import os, signal, sys
from pathlib import Path
from jitmx.dispatch import tune
from jitmx.dispatch.journal import Journal
from jitmx.dispatch.tune import Candidate, Tuner
from jitmx.kernels.linear import LinearProblem

def measure(problem, one, repeats):
    if one.knobs["number"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(one.knobs["number"], repeats, flush=True)
    return 10.0 + one.knobs["number"]

offered = [Candidate("gemv", {"number": number}, ()) for number in range(3)]
with Journal(Path(sys.argv[1]), {}) as journal:
    (outcome,) = Tuner(measure, lambda _: offered, journal).run(tune.tasks([(LinearProblem(n=64, k=64), {"m": (1,)})]))
print(outcome.tried, outcome.failed, outcome.us)
"""


def test_a_candidate_that_took_the_whole_run_with_it_is_not_launched_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(tmp_path / "journal")]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, f"0 {tune.QUICK}\n")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[0] == f"2 {tune.QUICK}" and second.stdout.splitlines()[-1] == "2 1 10.0"


def test_a_finalist_that_fails_in_a_round_does_not_win(tmp_path: Path) -> None:
    task = tune.tasks([(PROBLEM, {"m": (1,)})])[0]
    offered = [candidate("time", number) for number in range(2)]
    rounds = 0

    def measure(_problem: Any, one: Candidate, repeats: int) -> float:
        nonlocal rounds
        if one.knobs["number"] == 0 and repeats == tune.THOROUGH:
            rounds += 1
            if rounds == 2:
                raise DriverError("it faults now and then")
        return 10.0 + one.knobs["number"]

    with Journal(tmp_path / "journal", {}) as journal:
        (outcome,) = Tuner(measure, lambda _: offered, journal).run([task])
        assert journal.timings[task.key, offered[0].key] is None
    assert outcome.knobs["number"] == 1
