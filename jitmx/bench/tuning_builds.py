"""Compiling candidates of `jitmx tune` in the background, while others are timed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from jitmx import build, machine, settings
from jitmx.build import Built
from jitmx.dispatch.journal import Fault
from jitmx.dispatch.tune import Candidate
from jitmx.errors import CacheError, JitmxError
from jitmx.registry.spec import Variant

_THREADS = "jitmx-tune"
_NICE = 10  # what times candidates goes before what compiles them


def _compiled(variant: Variant) -> Built:
    return build.obtain(variant, allow_compile=True)


class Background:
    """Compiles candidates in threads, in the order asked for.

    What breaks its contract (registers, spills) is found here and not warned about one by one: the caller of `first`
    hears of it.

    Args:
        jobs: compiles at once; by default JITMX_JOBS, else as many as cores and memory bear, less `idle`.
        idle: cores left to what times candidates.
        compile: makes the code of a variant.
    """

    def __init__(
        self, jobs: int | None = None, *, idle: int = 1, compile: Callable[[Variant], Built] = _compiled
    ) -> None:
        workers = jobs or settings.current().jobs or max(1, machine.compiles_at_once() - idle)
        self._compile = compile
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=_THREADS, initializer=_step_back)
        self._futures: dict[str, Future[Fault | None]] = {}
        self._wanted: Counter[str] = Counter()

    def __enter__(self) -> Background:
        logging.getLogger("jitmx.build").addFilter(_expected)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        logging.getLogger("jitmx.build").removeFilter(_expected)

    def ask(self, candidates: Sequence[Candidate]) -> None:
        """Compile them, in their order, after all that was asked for before."""
        for variant in (variant for candidate in candidates for variant in _variants(candidate)):
            self._wanted[variant.identity] += 1
            self._begin(variant)

    def drop(self, candidates: Sequence[Candidate]) -> None:
        """They are no longer wanted: those that were asked for as often as dropped need not be begun."""
        for variant in (variant for candidate in candidates for variant in _variants(candidate)):
            self._wanted[variant.identity] -= 1
            if self._wanted[variant.identity] <= 0:
                self._futures[variant.identity].cancel()

    def first(self, candidates: Sequence[Candidate], seconds: float | None) -> tuple[int, Fault | None] | None:
        """The place of the first that is there, and why it must not be timed, or None.

        Waits for one so many seconds, or however long it takes; None where none has come.

        Raises:
            CacheError: the cache directory must not be used.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            waiting: set[Future[Fault | None]] = set()
            for place, candidate in enumerate(candidates):
                futures = [self._begin(variant) for variant in _variants(candidate)]
                if all(future.done() for future in futures):
                    return place, next(filter(None, (future.result() for future in futures)), None)
                waiting.update(future for future in futures if not future.done())
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            wait(waiting, left, FIRST_COMPLETED)

    def _begin(self, variant: Variant) -> Future[Fault | None]:
        future = self._futures.get(variant.identity)
        if future is None or future.cancelled():
            future = self._futures[variant.identity] = self._pool.submit(self._fault, variant)
        return future

    def _fault(self, variant: Variant) -> Fault | None:
        """Why a variant must not be timed, or None."""
        try:
            breaches = self._compile(variant).breaches
        except CacheError:
            raise
        except JitmxError as error:
            return Fault(str(error))
        return Fault(f"it breaks its contract: {'; '.join(breaches)}", breach=True) if breaches else None


def _variants(candidate: Candidate) -> list[Variant]:
    return list({variant.identity: variant for variant in candidate.variants}.values())


def _expected(record: logging.LogRecord) -> bool:
    """Whether a record of a build is to be shown: not the warning of a candidate's breach."""
    return record.levelno != logging.WARNING or not (record.threadName or "").startswith(_THREADS)


def _step_back() -> None:
    # On Linux a thread has a priority of its own.
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
