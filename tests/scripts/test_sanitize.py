"""Every kernel has a process, a log and a verdict of its own under a tool of compute-sanitizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from jitmx.registry.case import Case
from jitmx.registry.spec import Variant
from jitmx.runtime import driver
from scripts.protocol import card, hazards, launches, sanitize

_CLEAN = """========= COMPUTE-SANITIZER
moe.combine.warps12, rows=1: error 0.001, gate 0.006
========= ERROR SUMMARY: 0 errors
"""
# Stands in for the sanitizer: the last word names the kernel, and what is said of it.
_FAKE = f"""#!{sys.executable}
import os, sys, time
kernel = sys.argv[-1]
said = {_CLEAN!r}
if kernel == "moe.token":
    said = said.replace("0 errors", "192 errors")
    said = said.replace("moe.combine", "========= Barrier error detected.\\nmoe.token")
if kernel == "linear.gemv":
    said = said.replace("moe.combine.warps12, rows=1: error 0.001, gate 0.006", "no kernel of this card")
if kernel == "linear.tile":
    time.sleep(60)
print(said, end="")
print(sys.argv, os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"])
sys.exit({{"moe.token": 9, "moe.stream": 1}}.get(kernel, 0))
"""
KERNELS = ["moe.combine", "moe.token", "moe.stream", "linear.gemv", "linear.tile", "pack.pack"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the script on a card with `KERNELS`, under a sanitizer that is none."""
    fake = tmp_path / "bin" / sanitize.SANITIZER
    fake.parent.mkdir()
    fake.write_text(_FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(driver, "devices", lambda: [SimpleNamespace(major=9, minor=0)])
    monkeypatch.setattr(launches, "usual", lambda arch: [(name, None) for name in KERNELS])

    def invoke(*words: str) -> Result:
        arguments = [*words, "--out", str(tmp_path / "out"), "--seconds", "5"]
        return CliRunner().invoke(sanitize.main, arguments)

    return invoke


def test_what_is_said_of_one_kernel_hides_no_other_s_verdict(run: Callable[..., Result], tmp_path: Path) -> None:
    found = run("synccheck")
    said = {line.split()[1]: line for line in found.output.splitlines()[:-1]}
    assert found.exit_code == 1 and list(said) == KERNELS
    assert said["moe.combine"].startswith("clean") and "warps12, rows=1: error 0.001" in said["moe.combine"]
    assert said["pack.pack"].startswith("clean")
    assert said["moe.token"].endswith("192 errors, the first: Barrier error detected.")
    assert said["moe.stream"].endswith("exit status 1")
    assert said["linear.gemv"].endswith("nothing was launched")
    assert said["linear.tile"].endswith("not done in 5 s")
    assert all(line.startswith("FAULT") for name, line in said.items() if name not in ("moe.combine", "pack.pack"))
    assert "2 of 6 kernels are clean" in found.output
    assert {path.stem for path in (tmp_path / "out" / "synccheck").iterdir()} == set(KERNELS)


def test_kernels_are_named_and_one_that_there_is_not_is_refused(run: Callable[..., Result]) -> None:
    found = run("memcheck", "pack.pack")
    assert (found.exit_code, len(found.output.splitlines())) == (0, 2)
    none = run("memcheck", "pack.pack", "pack.none")
    assert none.exit_code == 2
    assert f"pack.none: no kernel of sm_90a; its kernels: {', '.join(KERNELS)}" in none.output


def test_each_tool_watches_one_kernel_s_launch_and_says_so_by_its_status() -> None:
    for tool in sanitize.TOOLS:
        words = sanitize.command(tool, "moe.token")
        assert words[:5] == ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        assert words[-3:] == ["-m", "scripts.protocol.launches", "moe.token"]
    assert dict(sanitize.TOOLS["racecheck"].environment).keys() == {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS"}


def test_racecheck_s_logs_are_held_to_the_known_list() -> None:
    log = Path(__file__).with_name("racecheck.log").read_text()
    assert sanitize.verdict("racecheck", sanitize.FOUND, log) == hazards.judge(log) is not None
    clean = _CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
    assert sanitize.verdict("racecheck", 0, clean) is None
    assert sanitize.verdict("racecheck", 1, clean) == "exit status 1"
    assert sanitize.verdict("memcheck", 0, clean) == "the log has 0 summaries of errors; it should have one"


def test_a_launch_that_fails_is_named_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitmx import arch
    from jitmx.errors import DriverError

    tried: list[str] = []

    def fail(variant: Variant, case: Case) -> float:
        tried.append(f"{variant.name}, {case.name}")
        raise DriverError("unspecified launch failure")

    monkeypatch.setattr("jitmx.ops.checks.device_arch", lambda device: arch.parse("sm_80"))
    monkeypatch.setattr(launches, "launch", fail)
    monkeypatch.setattr(sys, "argv", ["launches", "pack.pack", "quantize.quantize"])
    with pytest.raises(SystemExit) as ended:
        launches.main()
    (first,) = tried
    assert str(ended.value).startswith(f"{first}: DriverError: unspecified launch failure")


def test_the_stage_of_a_card_has_a_step_a_tool() -> None:
    (stage,) = card.choose("sanitizer")
    assert [step.name for step in stage.steps] == list(sanitize.TOOLS) == ["memcheck", "racecheck", "synccheck"]
    assert all(step.command[1:3] == ("-m", "scripts.protocol.sanitize") for step in stage.steps)
