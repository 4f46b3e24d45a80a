"""Who compiles a kernel, among hosts that share a remote cache: who creates a file first.

A claim is a file that only one caller can create. Its holder writes to it again and again, and removes it when the
entry is there. Whoever finds it there waits for the entry; a claim that has not changed for `LEASE` seconds by the
waiter's own clock is a dead holder's, and the next of its name (`<key>.1`, `<key>.2`) is up for the taking: again one
caller gets it. Clocks of hosts are never compared. A holder that was only held up compiles too, and publishes the same.

A claim only saves work. Where none is to be had, in time or at all, the caller compiles for itself.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from jitmx.cache.answers import Answers, Unanswered

_T = TypeVar("_T")

LEASE = 20.0
_SMALL = 1 << 10
_FIRST_LOOK, _LAST_LOOK = 0.1, 1.0  # seconds between looks at a claim of somebody else's
_MOST_DEAD = 100  # holders of one key that have died


@contextmanager
def alone(answers: Answers, path: str, patience: float, look: Callable[[], _T | None]) -> Iterator[_T | None]:
    """Yields what `look` finds in the end, or None, where the caller is to make it: alone, as far as claims can be had.

    Args:
        path: of the claims, which get a number behind it.
        patience: seconds to wait for somebody else.
        look: finds what is claimed, if it is there.
    """
    found = look()
    if found is not None:
        yield found
        return
    held = -1
    with suppress(Unanswered):
        held, found = _wait(answers, path, patience, look)
    if held < 0:
        yield found
        return
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(answers, _name(path, held), ended), name="jitmx-claim", daemon=True)
    beating.start()
    try:
        yield found
    finally:
        ended.set()
        beating.join()
        with suppress(Unanswered):
            for number in range(held, -1, -1):
                answers.remove(_name(path, number))


def _wait(answers: Answers, path: str, patience: float, look: Callable[[], _T | None]) -> tuple[int, _T | None]:
    """The number of the claim that is held now, or -1, and what was found."""
    deadline = time.monotonic() + patience
    number, pause = 0, _FIRST_LOOK
    seen, since = b"", time.monotonic()
    while number < _MOST_DEAD:
        token = _token(0)
        created = answers.create(_name(path, number), token)
        while True:
            # An answer may be lost on its way, and the question asked again by the driver.
            there = token if created else answers.read(_name(path, number), _SMALL)
            if there == token:
                # Who held it before may have been done in the meantime.
                return number, look()
            if (found := look()) is not None:
                return -1, found
            if there is None:
                number, pause = 0, _FIRST_LOOK
                break
            if there != seen:
                seen, since = there, time.monotonic()
            elif time.monotonic() - since > LEASE:
                number, seen, since = number + 1, b"", time.monotonic()
                break
            if time.monotonic() >= deadline:
                return -1, None
            time.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(1.5 * pause, _LAST_LOOK)
        if time.monotonic() >= deadline:
            return -1, None
    return -1, None


def _beat(answers: Answers, path: str, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(LEASE / 4):
        count += 1
        with suppress(Unanswered):
            answers.write(path, _token(count))


def _token(count: int) -> bytes:
    return f"{os.getpid()}-{os.urandom(8).hex()} {count}\n".encode()


def _name(path: str, number: int) -> str:
    return f"{path}.{number}"
