"""Every script explains itself, and the shell ones are names for a verb and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.protocol.__main__ import main

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SHELL = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name != "protocol.sh")
OURS = [
    *SHELL,
    "benchmark_matrix.py",
    "make_checkpoint.py",
    "make_draft.py",
    "serve_bench.py",
    "speculation_bench.py",
    "validate_kernel_path.py",
]


def verb(name: str) -> str:
    found = re.search(r'/protocol\.sh" (\S+) "\$@"', (SCRIPTS / name).read_text())
    assert found is not None, name
    return found[1]


def test_each_level_and_tool_of_the_protocol_has_its_script() -> None:
    assert {verb(name) for name in SHELL} == set(main.commands)
    for level in ("1_", "1.5_", "2_", "3_", "4_", "5_", "6_"):
        assert len([name for name in SHELL if name.startswith(f"test_level{level}")]) == 1


@pytest.mark.parametrize("name", OURS)
def test_help_says_what_a_script_shows_and_what_it_takes_and_imports_no_torch(
    run: Any, name: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('it takes seconds')")
    said = run(name, "--help", PYTHONPATH=str(tmp_path)).stdout
    assert said.startswith("Usage: ") and len(said.split("Options:")[0].splitlines()) > 3 and "--help" in said


@pytest.mark.parametrize("name", ["heuristic_tactics.py", "record_evidence.py", "refresh_outputs.py"])
def test_help_of_a_script_that_writes_files_says_what_it_does_and_writes_none(
    run: Any, name: str, tmp_path: Path
) -> None:
    said = run(name, "--help").stdout
    assert said.startswith(f"usage: {name} ") and f"python scripts/{name}" in said
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("name", ["record_evidence.py", "refresh_outputs.py"])
def test_a_script_refuses_files_that_are_not_there_before_it_writes_any(run: Any, name: str, tmp_path: Path) -> None:
    document = tmp_path / "there.md"
    document.write_text("```console\n$ jitmx nothing\n```")
    assert f"there is no file {tmp_path}/absent" in run(name, document, tmp_path / "absent", code=2).stderr


@pytest.mark.parametrize("name", [*SHELL, "protocol.sh"])
def test_shell_scripts_are_thin_executable_and_share_no_block(name: str) -> None:
    path = SCRIPTS / name
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert path.stat().st_mode & 0o111 and len(lines) <= (1 if name != "protocol.sh" else 4)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", *(str(SCRIPTS / name) for name in [*SHELL, "protocol.sh"])], check=True)


def test_the_document_names_every_script_of_the_protocol_and_none_that_is_not_there() -> None:
    page = (SCRIPTS.parent / "docs" / "protocol.md").read_text()
    named = set(re.findall(r"scripts/([\w.]+\.(?:sh|py))", page))
    assert set(OURS) <= named and all((SCRIPTS / name).is_file() for name in named)
