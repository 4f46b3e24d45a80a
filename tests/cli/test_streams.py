"""A command's streams: closed, full, a pipe that nobody reads, or of an encoding that lacks what is to be said."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from jitmx.cli import main, output

pytestmark = pytest.mark.usefixtures("toolchain")
JITMX = [sys.executable, "-m", "jitmx.cli"]
QUANTIZE = ("warmup", "--arch", "sm_121", "--variant", "quantize.quantize")


def shell(redirection: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`jitmx` with these redirections, in a process of its own."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *JITMX, *arguments], env=os.environ | variables,
        capture_output=True, text=True, timeout=120, check=False, errors="backslashreplace",
    )  # fmt: skip


CLOSED = [" ".join(some) for count in (1, 2, 3) for some in itertools.combinations(("<&-", ">&-", "2>&-"), count)]


@pytest.mark.nightly(by_day=(*CLOSED[:3], CLOSED[-1]))
@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_with_closed_streams_compiles_and_disassembles_as_any_other(closed: str) -> None:
    # doctor gives machine code to a child by a descriptor, which must not be one of the child's streams.
    done = shell(closed, "doctor", "--json")
    assert done.returncode == 0, done
    if ">&-" not in closed.replace("2>&-", ""):
        found = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
        assert found["nvdisasm"] == "ok"
    else:
        assert done.stdout == ""


def test_with_stderr_closed_exit_codes_are_the_same_and_stdout_is_still_json() -> None:
    done = shell("2>&-", *QUANTIZE, "--json", JITMX_VERBOSE="1")
    assert done.returncode == 0 and json.loads(done.stdout)["compiled"] == 1
    assert shell("2>&-", *QUANTIZE, JITMX_VERBOSE="1").stdout.startswith("sm_121a: 1 kernels")
    assert shell("2>&-", "explain", "linears").returncode == 2


def test_a_program_with_stderr_closed_gets_no_log_line_on_stdout() -> None:
    script = (
        "import logging\nfrom jitmx import logs, settings\nlogs.to_stderr(settings.current())\n"
        "logging.getLogger('jitmx.build').error('a message')\nprint('done')"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "done\n"


SAYING = [
    ("--help",), ("--version",), ("env",), ("env", "--json"), ("doctor",), ("explain", "linear", "--arch", "sm_121"),
    ("variants", "--arch", "sm_121", "--family", "quantize"), ("cache", "path"), ("cache", "stats"),
    ("cache", "verify"), ("cache", "prune", "--dry-run"), ("cache", "ls", "--json"), QUANTIZE, ("cache", "ls", "-h"),
    ("bench", "--help"), ("verify", "-q", "--arch", "sm_121", "--family", "bandwidth"), ("tune", "linear", "--help"),
]  # fmt: skip


@pytest.mark.nightly(by_day=[str(words) for words in SAYING[::3]])
@pytest.mark.parametrize("arguments", SAYING, ids=" ".join)
def test_a_full_output_is_an_error_in_one_line(arguments: tuple[str, ...]) -> None:
    done = shell(">/dev/full", *arguments)
    assert done.returncode == 1, done
    last = done.stderr.splitlines()[-1]
    assert last == "Error: the output could not be written (No space left on device)"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", [("env",), ("--help",), ("cache", "path")], ids=" ".join)
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*JITMX, *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("end", ["/dev/full", "pipe"])
def test_messages_that_cannot_be_written_cost_nothing_but_themselves(end: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = writer if end == "pipe" else os.open(end, os.O_WRONLY)
    done = subprocess.run([*JITMX, *QUANTIZE, "--json"], stdout=subprocess.PIPE, stderr=errors, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 0 and json.loads(done.stdout)["failed"] == 0


ENCODINGS = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C"}, {}]


@pytest.mark.nightly(by_day=[str(some) for some in ENCODINGS[::2]])
@pytest.mark.parametrize("variables", ENCODINGS)
def test_a_path_outside_the_output_s_encoding_is_shown_escaped(tmp_path: Path, variables: dict[str, str]) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/caf\xe9 \xc5\x81 \x1b[31m")
    done = shell("", "cache", "path", JITMX_CACHE_DIR=path, **variables)
    assert done.returncode == 0, done.stderr
    shown = "Ł" if not variables or "LC_ALL" in variables else "\\u0141"
    assert done.stdout == f"{tmp_path}/caf\\udce9 {shown} \\x1b[31m\n"
    said = json.loads(shell("", "cache", "path", "--json", JITMX_CACHE_DIR=path, **variables).stdout)
    assert said["path"] == path
    for arguments in (("env",), ("variants", "--arch", "sm_121", "--family", "quantize"), ("variants", "--help")):
        assert shell("", *arguments, JITMX_CACHE_DIR=path, **variables).returncode == 0


def test_what_would_steer_a_terminal_is_shown_escaped_and_jitmx_s_own_colours_stay(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.say("a\x1b[31m\u202e\udce9\x9b\r\x00b\tc\nd", opening="no\x1b[0mte", fg="yellow")
    styled = click.style("no\\x1b[0mte", fg="yellow")
    assert capsys.readouterr().out == styled + "a\\x1b[31m\\u202e\\udce9\\x9b\\r\\x00b\tc\nd\n"
    output.table(("NAME",), [("a\nb\x1b[2J",), ("c",)])
    assert capsys.readouterr().out.splitlines()[1:] == ["a\\nb\\x1b[2J", "c"]


def test_every_verb_prints_by_the_one_function_that_escapes() -> None:
    for path in (Path(__file__).parents[2] / "jitmx" / "cli").rglob("*.py"):
        if path.name != "output.py":
            text = path.read_text()
            assert not re.search(r"click\.echo|\bprint\(|secho", text), path


TYPED = [("warm\x1b[31m",), ("cache", "show", "--\x1b[31m"), ("explain", "linear", "m=\x1b")]


@pytest.mark.parametrize("arguments", TYPED)
def test_an_error_shows_what_was_typed_escaped(run, arguments: tuple[str, ...]) -> None:
    said = run(*arguments, code=2).stderr
    assert "\\x1b" in said and "\x1b" not in said


def test_an_interrupted_command_exits_130_and_says_so(run, monkeypatch) -> None:
    def interrupt(_self: click.Command, _context: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", interrupt)
    for verb in main.list_commands(click.Context(main)):
        arguments = ("cache", "ls") if verb == "cache" else (verb, "linear") if verb in ("tune", "explain") else (verb,)
        assert run(*arguments, code=130).stderr == "Interrupted\n"
