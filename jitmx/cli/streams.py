"""The standard streams of a command: there though the caller closed them, open to any text, settled at the end."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import IO, Any


def prepare() -> None:
    """Give descriptors 0 to 2 and `sys.stdin`, `stdout` and `stderr` a file where they have none.

    A descriptor that the caller closed would else be the number of the next file that is opened, which whatever writes
    to that stream, a child process too, would take for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            # Not the descriptor: what has its number may be a file that was opened before this.
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def settle(stream: IO[Any]) -> OSError | None:
    """Write out what `stream` holds back. Why that cannot be, if so: it is dropped then, for good."""
    try:
        stream.flush()
    except OSError as error:
        # The interpreter writes it out once more when it ends, and would print a traceback.
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, stream.fileno())
            os.close(null)
        return error
    return None
