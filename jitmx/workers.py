"""Worker processes that end with their parent, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from jitmx.errors import WorkerError


def serve() -> None:
    """What a worker process calls first: it ends as soon as its parent has, and leaves Ctrl-C to the parent.

    Whoever calls it must be in the main thread of a process that `multiprocessing` started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    # In a thread: what the worker does meanwhile may take for ever.
    threading.Thread(target=_end_with, args=(parent.sentinel,), name="jitmx-parent", daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """While processes are started: they are not interrupted before `serve` has seen to that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many worker processes; an exception, Ctrl-C among them, ends them at once, and what they were doing.

    Raises:
        WorkerError: a worker was ended from outside.
    """
    others = set(multiprocessing.active_children())
    try:
        with ProcessPoolExecutor(count, initializer=serve) as made:
            try:
                yield made
            except BaseException:
                # Before the pool waits for them. Its futures are not to be cancelled: it stumbles over such ones.
                for worker in set(multiprocessing.active_children()) - others:
                    worker.kill()
                raise
    except BrokenProcessPool as error:
        raise WorkerError(
            "a worker process was ended from outside, for lack of memory perhaps", "pass fewer --jobs"
        ) from error
