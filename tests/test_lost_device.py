"""What the tests on a card do once one of them has cost the process its CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent

# A card that answers until a test has broken it, as one does in a process of its own.
_TORCH = """
from types import SimpleNamespace

broken = []

def answer():
    if broken:
        raise RuntimeError("CUDA error: an illegal instruction was encountered\\nmore")

cuda = SimpleNamespace(synchronize=answer)
"""
_SUITE = """
from torch import answer, broken

def test_1(): pass
def test_2_fails_and_breaks_nothing(): assert False
def test_3_breaks_the_card():
    broken.append(True)
    answer()
def test_4(): answer()
def test_5(): answer()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("torch.py").write_text(_TORCH)
    folder.joinpath("test_suite.py").write_text(_SUITE)
    folder.joinpath("conftest.py").write_text(
        "from pathlib import Path\n"
        "from gpu.lost_device import before_the_end, pytest_runtest_makereport, pytest_runtest_protocol\n"
        f"before_the_end.append(Path({str(folder / 'written')!r}).touch)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, *options, str(folder)]
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the other plugins would be most of what each process takes
    return subprocess.run(
        command, env=environment | {"PYTHONPATH": os.pathsep.join((str(folder), str(_TESTS)))},
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_lost_context_ends_the_tests_with_its_reason(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout and "test_4" not in done.stdout
    assert "test_3_breaks_the_card cost this process its CUDA context (CUDA error: an illegal" in done.stdout


def test_a_worker_that_lost_its_context_is_replaced_and_the_rest_runs_in_another(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    done = run(tmp_path, "-p", "xdist", "-n", "1")
    for name in ("test_1", "test_4", "test_5"):
        assert f"PASSED test_suite.py::{name}" in done.stdout, done.stdout + done.stderr
    assert "test_3_breaks_the_card cost this process its CUDA context" in done.stdout
    assert "worker 'gw0' crashed while running" in done.stdout
    assert (tmp_path / "written").exists()
