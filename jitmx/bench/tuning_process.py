"""Timing in a process of its own, so that a candidate which takes the CUDA context with it takes nothing else.

After a fault on the device every further call of its process fails. The process that times is then ended and another
one started; the candidate at fault has failed, and no other.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from jitmx import workers
from jitmx.dispatch.tune import Candidate
from jitmx.errors import DriverError, TacticError
from jitmx.kernels import Problem

STARTING, TIMING = 300.0, 300.0  # seconds after which a process that does not answer is ended


class Isolated:
    """Times candidates as the bench `where` does, in a process that is replaced when it is lost.

    Args:
        where: the bench's class, as `module:name`; its instances are called with a problem, a candidate and repeats,
            and have `healthy()`, which says whether the device still answers.
        arguments: what it is made with.
        seconds: time for an answer; a candidate that takes longer has failed.
    """

    def __init__(self, where: str, *arguments: Any, seconds: float = TIMING) -> None:
        self._where, self._arguments, self._seconds = where, arguments, seconds
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, problem: Problem, candidate: Candidate, repeats: int) -> float:
        """Median microseconds a call.

        Raises:
            DriverError: the candidate cannot run, what it computes is wrong, or it took the process with it.
            TacticError: no process that times can be started.
        """
        pipe = self._ready()
        # A variant does not travel; its kernel and knobs say the same.
        pipe.send((problem, candidate.kernel, dict(candidate.knobs), repeats))
        us, reason, healthy = self._answer(pipe, self._seconds, candidate.key)
        if not healthy:
            self.close()
        if us is None:
            raise DriverError(reason)
        return us

    def _ready(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return self._pipe
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._where, self._arguments), daemon=True)
        with workers.starting():
            self._process.start()
        theirs.close()
        us, reason, healthy = self._answer(self._pipe, STARTING, self._where)
        if us is None or not healthy:
            self.close()
            raise TacticError(f"the process that times candidates does not start: {reason}")
        return self._pipe

    def _answer(self, pipe: Connection, seconds: float, what: str) -> tuple[float | None, str, bool]:
        """Microseconds or the reason why there are none, and whether the process may go on."""
        try:
            if not pipe.poll(seconds):
                return None, f"{what} did not end within {seconds:.0f} s", False
            answer: tuple[float | None, str, bool] = pipe.recv()
            return answer
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(10)
            return None, f"{what} ended the process that timed it (exit code {self._process.exitcode})", False

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()  # one whose device hangs does not hear anything milder
            self._process.join(10)
        self._pipe = self._process = None


def _serve(pipe: Connection, where: str, arguments: tuple[Any, ...]) -> None:
    """Answer until the other side is gone, or the device is."""
    workers.serve()
    with contextlib.suppress(EOFError, OSError):
        try:
            module, _, name = where.partition(":")
            bench = getattr(importlib.import_module(module), name)(*arguments)
        except Exception as error:
            pipe.send((None, _reason(error), False))
            return
        pipe.send((0.0, "", True))
        while True:
            problem, kernel, knobs, repeats = pipe.recv()
            try:
                pipe.send((float(bench(problem, Candidate(kernel, knobs, ()), repeats)), "", True))
            except Exception as error:
                healthy = bench.healthy()
                pipe.send((None, _reason(error), healthy))
                if not healthy:
                    return


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
