"""Kernels that a layer will ask for once its weights are there, found or compiled in a thread while they are loaded.

What decides the kernels is known before the weights but for the range of their scales, which is taken to be the usual
one. Whatever goes wrong here is left to `warmup.prepare`, which does what was not done, and says so.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from jitmx import batch
from jitmx.build import Built
from jitmx.runtime import load
from jitmx.serving.needed import Needed, variants
from jitmx.vllm.log import logger

_SILENT = 5.0  # seconds between two lines of progress
# Seconds. Who loads weights releases the GIL for each copy and launch, and would wait Python's usual 5 ms to have it
# back: a second for 36 layers.
_SWITCH_INTERVAL = 1e-4

_worker: ThreadPoolExecutor | None = None
_jobs: dict[Needed, Future[dict[str, Built]]] = {}
_later: list[Needed] = []  # to be begun behind all that is taken while weights are loaded
_usual_interval: float | None = None  # while it is `_SWITCH_INTERVAL`


def _forget_after_fork() -> None:
    global _worker
    _worker = None  # its thread is the parent's
    _jobs.clear()
    _later.clear()
    _restore_switch_interval()


os.register_at_fork(after_in_child=_forget_after_fork)


def begin(needed: Needed, *, later: bool = False) -> None:
    """Have every kernel of a layer found or compiled, without waiting for it; layers that are alike share them.

    Args:
        later: it is asked for once all weights are there, and comes behind what loading them waits for.
    """
    global _worker
    if needed in _jobs or needed in _later:
        return
    if later:
        _later.append(needed)
        return
    if _worker is None:
        _worker = ThreadPoolExecutor(1, thread_name_prefix="jitmx-ahead")  # one layer after another, as they are loaded
    _jobs[needed] = _worker.submit(_build, needed)


def take(needed: Needed) -> dict[str, Built]:
    """What `begin` came to for a layer, by the identity of the variant; waits for it. Empty where nothing was begun."""
    # Every layer is built by now, and what it takes for its weights is in line.
    waiting, _later[:] = tuple(_later), []
    for other in waiting:
        begin(other)
    job = _jobs.pop(needed, None)
    if job is None:
        return {}
    try:
        return job.result()
    except Exception as error:  # prepare meets it again, where it can be said
        logger.debug("jitmx: no kernels ahead of the weights: %s", error)
        return {}


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Have the GIL change hands soon, for as long as the worker computes beside who loads weights."""
    global _usual_interval
    usual = sys.getswitchinterval()
    if usual > _SWITCH_INTERVAL:
        _usual_interval = usual
        sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        _restore_switch_interval()


def _restore_switch_interval() -> None:
    """Undo `_short_switch_interval`, unless someone else has set another since."""
    global _usual_interval
    usual, _usual_interval = _usual_interval, None
    if usual is not None and math.isclose(sys.getswitchinterval(), _SWITCH_INTERVAL):
        sys.setswitchinterval(usual)


@_short_switch_interval()
def _build(needed: Needed) -> dict[str, Built]:
    missing = [each for each in variants(needed) if (each.identity, needed.device) not in load.loaded()]
    progress = Progress(len(missing))

    def step(result: Built | batch.Failed) -> None:
        progress.step(result)
        # Refused where the interpreter ends, which would wait for kernels that nobody will launch.
        assert _worker is not None
        _worker.submit(lambda: None)

    results = batch.build_all(missing, allow_compile=None, strict=False, on_result=step)
    return {result.variant.identity: result for result in results if isinstance(result, Built)}


class Progress:
    """A line in the log every few seconds, while `total` kernels are compiled."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._said = time.monotonic()

    def step(self, result: Built | batch.Failed) -> None:
        """One kernel more."""
        self._done += 1
        if time.monotonic() - self._said >= _SILENT:
            self._said = time.monotonic()
            logger.info("jitmx: compiling kernels, %d of %d", self._done, self._total)
