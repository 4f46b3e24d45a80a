"""Tests by the clock of a machine that others use too."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Of a module whose tests go by the clock: `pytestmark = AGAIN`.
AGAIN = pytest.mark.flaky(reruns=2, only_rerun=["TooSlow", "TimeoutExpired"])

# What a start of Python costs is weighed in starts of this: what jitmx's light parts are made of, none of it jitmx's.
REFERENCE = "import click, dataclasses, hashlib, json, logging, pathlib"


class TooSlow(AssertionError):
    """Something took longer than it should. pytest runs the test again, twice at most: a wedge is there each time."""


@contextmanager
def within(seconds: float, least: float = 0.0) -> Iterator[None]:
    """What is done here takes `least` to `seconds` seconds."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took >= least, f"took {took:.3g} s, and was to take {least} at least"
    assert_within(took, seconds)


def assert_within(took: float, seconds: float) -> None:
    """What took so many seconds was to take less than `seconds`."""
    if took >= seconds:
        raise TooSlow(f"took {took:.3g} s, and was to take less than {seconds}")


def assert_costs(code: str, most: float, *words: str, **environment: str) -> None:
    """A Python process that runs `code` takes less CPU than `most` times one that runs `REFERENCE`, on any machine.

    The two run in turn, and the least of either counts: what else the machine does adds to both. It takes five turns at
    least, and as many as it takes to be sure, at most 15.
    """
    taken, reference = [], []
    for turn in range(15):
        reference.append(_cpu(REFERENCE))
        taken.append(_cpu(code, *words, **environment))
        if turn >= 4 and min(taken) < most * min(reference):
            return
    raise TooSlow(
        f"{code!r} took {min(taken):.3g} s of CPU, {min(taken) / min(reference):.3g} times the {min(reference):.3g} s "
        f"of {REFERENCE!r}, and was to take less than {most} times as much"
    )


def _cpu(code: str, *words: str, **environment: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
