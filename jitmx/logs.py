"""How much jitmx logs, and where it shows.

Modules log to children of the logger "jitmx" and leave it to the application to say where that goes. The command line
is such an application: it shows them on stderr. In any other program JITMX_LOG_LEVEL and JITMX_VERBOSE, where one is
set, decide how much is logged, and it shows on stderr unless the program has said where it is to go.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from jitmx import settings as variables
from jitmx.quoting import printable
from jitmx.settings import Settings

_LEVELS = (logging.CRITICAL + 1, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at the time, unlike a StreamHandler, which keeps the one it was made with."""

    def emit(self, record: logging.LogRecord) -> None:
        # A closed stderr is None, for which print would take stdout; that one is full is no error of jitmx's.
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                print(printable(self.format(record)), file=sys.stderr)


_stderr = _Stderr()
_stderr.setFormatter(logging.Formatter("jitmx: %(levelname)s: %(message)s"))
_followed: Settings | None = None


def level(settings: Settings) -> int:
    """The level of Python's `logging` that JITMX_LOG_LEVEL stands for; JITMX_VERBOSE asks for information at least."""
    chosen = _LEVELS[settings.log_level]
    return min(chosen, logging.INFO) if settings.verbose else chosen


def to_stderr(settings: Settings) -> None:
    """Show what jitmx logs on stderr. Calling it again changes the level only."""
    logger = logging.getLogger("jitmx")
    logger.setLevel(level(settings))
    # The same handler each time, which a logger takes once, whichever threads offer it.
    logger.addHandler(_stderr)


def follow(settings: Settings) -> None:
    """Do what the variables say, on the first use of `settings`; where neither is set, nothing changes.

    A program that has a handler for what jitmx logs keeps it as the only one.
    """
    global _followed
    if settings is _followed:
        return
    _followed = settings
    if all(variables.origin(field) == "default" for field in ("log_level", "verbose")):
        return
    logger = logging.getLogger("jitmx")
    if logger.hasHandlers():
        logger.setLevel(level(settings))
    else:
        to_stderr(settings)
