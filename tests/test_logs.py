"""Logging: the setting decides how much, and it shows on stderr once."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

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


PROGRAM = """
import logging
{setup}
from jitmx import arch, build
from jitmx.kernels import probe
for _ in range(2):
    build.obtain(probe.SCALE.variant(arch.parse("sm_121a")))
logger = logging.getLogger("jitmx")
print(logger.level, len(logger.handlers))
"""


@pytest.mark.parametrize("variables", [{"JITMX_VERBOSE": "1"}, {"JITMX_LOG_LEVEL": "3"}, {"FLASHINFER_LOGLEVEL": "3"}])
def test_in_any_program_a_variable_that_asks_for_it_shows_each_compile(project: Any, variables) -> None:
    done = project.run(PROGRAM.format(setup=""), **variables)
    assert re.fullmatch(r"jitmx: INFO: compiled probe\.scale for sm_121a in \d+ ms: .* registers, .*\n", done.stderr)
    assert done.stdout == f"{logging.INFO} 1\n"


def test_where_no_variable_is_set_the_program_s_logging_is_left_alone(project: Any) -> None:
    done = project.run(PROGRAM.format(setup=""))
    assert (done.stdout, done.stderr) == (f"{logging.NOTSET} 0\n", "")


def test_a_program_with_a_handler_of_its_own_shows_each_message_once(project: Any) -> None:
    done = project.run(PROGRAM.format(setup="logging.basicConfig(format='own: %(message)s')"), JITMX_VERBOSE="1")
    assert done.stderr.startswith("own: compiled probe.scale") and len(done.stderr.splitlines()) == 1
    assert done.stdout == f"{logging.INFO} 0\n"
