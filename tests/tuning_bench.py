"""Benches that a process of its own makes, for tests of what happens to it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError


class Bench:
    """Does what a candidate's knobs say, and counts how often this process was asked."""

    def __init__(self, base: float = 0.0) -> None:
        self._base, self._asked, self._lost = base, 0, False

    def healthy(self) -> bool:
        return not self._lost

    def __call__(self, problem: Any, candidate: Candidate, repeats: int) -> float:
        self._asked += 1
        match candidate.knobs["does"]:
            case "fault":  # as after an illegal address: the context is gone, and says so
                self._lost = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "wrong":
                raise DriverError("it is 0.5 off")
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(600)
        return self._base + problem.m * 100 + repeats + self._asked / 10


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no device")
