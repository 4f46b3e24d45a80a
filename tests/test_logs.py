"""Logging: the setting decides how much, and the command line shows it on stderr once."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jitmx import logs, settings


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """The logger as it was."""
    logger = logging.getLogger("jitmx")
    before = (logger.level, list(logger.handlers))
    yield
    logger.level, logger.handlers[:] = before


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"JITMX_LOG_LEVEL": "0"}, []),
        ({"JITMX_LOG_LEVEL": "1"}, ["error"]),
        ({}, ["warning", "error"]),
        ({"JITMX_LOG_LEVEL": "3"}, ["info", "warning", "error"]),
        ({"JITMX_LOG_LEVEL": "0", "JITMX_VERBOSE": "1"}, ["info", "warning", "error"]),
        ({"FLASHINFER_LOGLEVEL": "5"}, ["debug", "info", "warning", "error"]),
    ],
)
def test_the_setting_decides_how_much_is_shown(capsys, variables, shown) -> None:
    logs.to_stderr(settings.read(variables))
    logs.to_stderr(settings.read(variables))
    logger = logging.getLogger("jitmx.build")
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("a message")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"jitmx: {level.upper()}: a message" for level in shown]


def test_importing_jitmx_adds_no_handler() -> None:
    script = "import logging, jitmx, jitmx.cache.store; assert not logging.getLogger('jitmx').handlers"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
