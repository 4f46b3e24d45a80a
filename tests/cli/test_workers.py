"""Processes of a command that is killed or interrupted: none outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from clock import AGAIN, TooSlow

pytestmark = AGAIN

VERIFY = ("verify", "-q", "--arch", "sm_90", "--family", "linear", "--jobs", "2")


@pytest.fixture
def begin() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Starts `jitmx` in a process group of its own; gives it and its children, so many, once they are at work."""
    groups: list[int] = []

    def start(*arguments: str, children: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "jitmx.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        groups.append(process.pid)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = psutil.Process(process.pid).children(recursive=True)
            if len(found) >= children and all(sum(child.cpu_times()[:2]) > 0.6 for child in found[:children]):
                return process, found
            time.sleep(0.1)
        raise TooSlow("its workers did not begin")

    yield start
    for group in groups:  # of a test that has failed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _none_is_left(workers: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(workers, timeout=20)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_workers_of_a_killed_verify_end_soon_after_it(begin, number: signal.Signals) -> None:
    process, workers = begin(*VERIFY, children=2)
    os.kill(process.pid, number)
    assert process.wait(20) == -number
    assert _none_is_left(workers)


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_an_interrupted_verify_ends_its_workers_at_once_and_exits_130(begin, kill) -> None:
    process, workers = begin(*VERIFY, children=2)
    kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "Interrupted\n")
    assert _none_is_left(workers)


def test_a_worker_that_is_killed_is_an_error_in_one_line(begin) -> None:
    process, workers = begin(*VERIFY, children=2)
    workers[0].kill()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err == "Error: a worker process was ended from outside, for lack of memory perhaps; pass fewer --jobs\n"


def test_an_interrupted_warm_up_exits_130(begin) -> None:
    process, _ = begin("warmup", "--arch", "sm_90", "--family", "linear", "--jobs", "1", children=1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "Interrupted" and "Traceback" not in err
