"""Progress: a bar where a terminal is, a line a step elsewhere, nothing where quiet is asked for."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from jitmx.cli.progress import Progress

SCRIPT = """
import sys
from jitmx.cli.progress import Progress
with Progress(3, "Warming sm_121a", quiet={quiet}) as progress:
    for name in ("one", "two", "three"):
        progress.step(name)
print("rich" in sys.modules)
"""


def on_a_terminal(quiet: bool) -> tuple[str, str]:
    """What the script prints to stdout, and to a terminal that is its stderr."""
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(quiet=quiet)], env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE, stderr=follower, text=True, timeout=60, check=True,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 4096):
            shown += part
    except OSError:
        pass  # Linux tells the end of a terminal's output by EIO
    os.close(leader)
    return done.stdout, shown.decode()


def test_a_terminal_gets_a_bar_that_counts_to_the_end() -> None:
    stdout, shown = on_a_terminal(quiet=False)
    assert stdout == "True\n"
    assert "Warming sm_121a" in shown and "3/3" in shown and "\x1b[" in shown


def test_quiet_leaves_the_terminal_alone_and_does_not_import_rich() -> None:
    assert on_a_terminal(quiet=True) == ("False\n", "")


def test_elsewhere_each_step_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, "Warming", quiet=False) as progress:
        progress.step("one")
        progress.step("two")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "[1/2] one\n[2/2] two\n")
