"""How much jitmx logs, and where its own programs show it.

Modules log to children of the logger "jitmx" and leave it to the application to say where that goes. The command line
is such an application: it shows them on stderr.
"""

from __future__ import annotations

import logging
import sys

from jitmx.settings import Settings

_LEVELS = (logging.CRITICAL + 1, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at the time, unlike a StreamHandler, which keeps the one it was made with."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def level(settings: Settings) -> int:
    """The level of Python's `logging` that JITMX_LOG_LEVEL stands for; JITMX_VERBOSE asks for information at least."""
    chosen = _LEVELS[settings.log_level]
    return min(chosen, logging.INFO) if settings.verbose else chosen


def to_stderr(settings: Settings) -> None:
    """Show what jitmx logs on stderr. Calling it again changes the level only."""
    logger = logging.getLogger("jitmx")
    logger.setLevel(level(settings))
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("jitmx: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
