"""Every kernel has a process, a log and a verdict of its own under a tool of compute-sanitizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from jitmx import arch, kernels
from jitmx.registry.case import Buffer, Case
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
WAYS = ["linear.stream", "linear.stream+whole_ring", "linear.streams", "linear.scaled", "linear.scaled-arrival"]


@pytest.fixture(scope="module")
def ways() -> list[tuple[str, Variant]]:
    """The ways of all kernels on an H200."""
    return list(launches.ways(arch.parse("sm_90a")))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the script on a card with `KERNELS`, under a sanitizer that is none."""
    fake = tmp_path / "bin" / sanitize.SANITIZER
    fake.parent.mkdir()
    fake.write_text(_FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(driver, "devices", lambda: [SimpleNamespace(major=9, minor=0)])
    monkeypatch.setattr(launches, "ways", lambda arch: [(name, None) for name in KERNELS])

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


def test_a_kernel_s_name_stands_for_all_of_its_ways(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "ways", lambda arch: [(name, None) for name in WAYS])

    def ran(*words: str) -> list[str]:
        return [line.split()[1] for line in run("memcheck", *words).output.splitlines()[:-1]]

    assert ran("linear.stream") == WAYS[:2]
    assert {path.stem for path in (tmp_path / "out" / "memcheck").iterdir()} == set(WAYS[:2])
    assert ran("linear.scaled", "linear.stream+whole_ring") == [WAYS[1], *WAYS[3:]]
    assert ran("linear.scaled-arrival") == WAYS[-1:]
    assert ran() == WAYS


@pytest.mark.parametrize("name", ["linear.stream+ring", "linear", "linear.stream+", "stream", "linear.str"])
def test_a_way_that_there_is_not_is_refused(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(launches, "ways", lambda arch: [(name, None) for name in WAYS])
    found = run("memcheck", "linear.stream", name)
    assert found.exit_code == 2
    assert f"{name}: no kernel of sm_90a; its kernels: {', '.join(WAYS)}" in found.output


def test_every_way_has_a_name_of_its_own_and_a_kernel_s_first_way_has_the_kernel_s(
    ways: list[tuple[str, Variant]],
) -> None:
    names = [name for name, _ in ways]
    assert len(set(names)) == len(names)
    firsts: dict[str, str] = {}
    for name, variant in ways:
        assert launches.kernel_of(name) == f"{variant.spec.family}.{variant.spec.name}"
        firsts.setdefault(launches.kernel_of(name), name)
    assert all(kernel == name for kernel, name in firsts.items())
    assert set(firsts) == {kernel for kernel, _ in launches.usual(arch.parse("sm_90a"))}


def test_ways_differ_by_the_headers_that_their_names_tell(ways: list[tuple[str, Variant]]) -> None:
    found = {name: launches.parts(variant) for name, variant in ways}
    assert found["linear.stream+whole_ring"] - found["linear.stream"] == {"whole_ring"}
    assert found["linear.stream"] <= found["linear.stream+whole_ring"]
    assert found["moe.wgmma+activation"] - found["moe.wgmma"] == {"activation"}
    for name, made_of in found.items():
        assert name == launches.kernel_of(name) + launches.difference(found[launches.kernel_of(name)], made_of)


@pytest.mark.parametrize(("smallest", "pick"), [(False, max), (True, min)])
def test_the_case_launched_is_the_largest_or_where_asked_for_the_smallest(
    smallest: bool, pick: Callable[[list[int]], int]
) -> None:
    names = ["linear.slice", "linear.stream+whole_ring", "moe.decode"]

    def size(case: Case) -> int:
        return sum(item.data.nbytes for item in case.values.values() if isinstance(item, Buffer))

    found = list(launches.chosen(arch.parse("sm_90a"), names, smallest=smallest))
    assert len(found) == len(names)
    for variant, case in found:
        assert not case.sparse
        cases = kernels.family(variant.spec.family).cases(variant)
        sizes = [size(each) for each in cases if not each.sparse]
        assert len(set(sizes)) > 1 and size(case) == pick(sizes)


def test_racecheck_alone_watches_kernels_that_it_cannot_judge_otherwise_on_their_smallest_case() -> None:
    for tool in sanitize.TOOLS:
        for way in ("moe.wgmma-activation", "moe.decode"):
            assert ("--smallest" in sanitize.command(tool, way)) == (tool == "racecheck")
        assert "--smallest" not in sanitize.command(tool, "linear.wgmma")


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
    from jitmx.errors import DriverError

    tried: list[str] = []

    def fail(variant: Variant, case: Case) -> float:
        tried.append(f"{variant.name}, {case.name}")
        raise DriverError("unspecified launch failure")

    monkeypatch.setattr("jitmx.runtime.card.arch", lambda device: arch.parse("sm_80"))
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
