"""Tests by the clock of a machine that others use too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Of a module whose tests go by the clock: `pytestmark = AGAIN`.
AGAIN = pytest.mark.flaky(reruns=2, only_rerun=["TooSlow", "TimeoutExpired"])


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
