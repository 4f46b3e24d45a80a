"""A pytest plugin: a test that ends the process's CUDA context ends the process's tests, and says so.

Nothing that runs in that process afterwards can pass. Alone, pytest stops; beside pytest-xdist the worker ends, and a
fresh one takes its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator

import pytest

_ENDED = 3  # exit status of a worker

_lost: list[str] = []
# What a process still has to write before it ends.
before_the_end: list[Callable[[], None]] = []


def _loss() -> str | None:
    """What the device answers, where it answers no more."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and not _lost and (answer := _loss()):
        _lost.append(f"{item.nodeid} cost this process its CUDA context ({answer}): nothing more can run in it")
        report.sections.append(("The GPU is lost", _lost[0]))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    if _lost:
        if "PYTEST_XDIST_WORKER" in os.environ:
            for write in before_the_end:
                write()
            print(_lost[0], file=sys.stderr, flush=True)
            os._exit(_ENDED)
        item.session.shouldfail = _lost[0]
    return done
