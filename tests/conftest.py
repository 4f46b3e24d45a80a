"""What tests of several packages share: clean settings, and a small kernel family of their own.

`probe` gives the family within this process. `project` gives a copy of the package with the family added, the way any
family is added (a file in kernels/, a folder in templates/), for tests that need processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

import evidence
import jitmx
from by_day import left_to_the_night
from evidence import Verdicts, kept, made_from, write
from jitmx import arch, kernels, resources, settings
from jitmx.cache import store as stores
from jitmx.dispatch import tactics
from jitmx.registry.case import Case
from jitmx.registry.key import frame
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import Verdict, run, verify
from jitmx.toolchain import headers, nvrtc

# A deadline for one example measures the machine, and what else runs on it.
hypothesis.settings.register_profile("jitmx", deadline=None, max_examples=20)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300)
hypothesis.settings.load_profile("jitmx")

_PROBE = Path(__file__).parent / "probe"
_PACKAGE = Path(jitmx.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run also what takes hours: the fuzzing of .ci/nightly")
    parser.addoption("--all-evidence", action="store_true", help="see anew what a ledger has the same evidence of")


def pytest_configure(config: pytest.Config) -> None:
    evidence.anew = config.getoption("--all-evidence") or config.getoption("--nightly")
    if config.getoption("--nightly"):
        hypothesis.settings.load_profile("nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    later = left_to_the_night(items)
    config.hook.pytest_deselected(items=later)
    dropped = set(later)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether a test is to take as long as it likes."""
    return bool(request.config.getoption("--nightly"))


def pytest_collection_finish() -> None:
    """The tests themselves stay: the collector of garbage, which took a tenth of the time, need not walk them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_sessionfinish(session: pytest.Session) -> None:
    write()


def variables() -> set[str]:
    """Every environment variable that jitmx reads."""
    return {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)}


def add_templates(templates: Path) -> None:
    """Put the probe family's template and header into a template folder."""
    (templates / "probe").mkdir(parents=True, exist_ok=True)
    (templates / "include" / "jitmx").mkdir(parents=True, exist_ok=True)
    shutil.copy(_PROBE / "scale.cu.j2", templates / "probe")
    shutil.copy(_PROBE / "probe.cuh", templates / "include" / "jitmx")


@dataclass(frozen=True)
class Probe:
    """The probe family in this process."""

    module: ModuleType
    templates: Path
    cache: Path

    @property
    def template(self) -> Path:
        return self.templates / "probe" / "scale.cu.j2"

    @property
    def header(self) -> Path:
        return self.templates / "include" / "jitmx" / "probe.cuh"

    def variant(self, target: str = "sm_121a", **knobs: Any) -> Variant:
        variant: Variant = self.module.SCALE.variant(arch.parse(target), **knobs)
        return variant

    def set(self, **environment: str) -> None:
        """Go on with these settings, as a new process would."""
        os.environ.update(environment)
        self.next_process()

    def next_process(self) -> None:
        """Forget what a process remembers."""
        settings.reload()
        headers.pool.cache_clear()
        stores._stores.clear()


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """The probe family, its templates in a folder of the test's own, and an empty cache."""
    for name in variables() & os.environ.keys():
        monkeypatch.delenv(name)
    before = dict(os.environ)
    templates = tmp_path / "templates"
    add_templates(templates)
    found = importlib.util.spec_from_file_location("jitmx.kernels.probe", _PROBE / "probe.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "jitmx.kernels.probe", module)
    found.loader.exec_module(module)
    monkeypatch.setattr(resources, "directory", {"templates": templates}.__getitem__)
    monkeypatch.setattr(kernels, "families", lambda: {"probe": module.FAMILY})
    probe = Probe(module, templates, tmp_path / "cache")
    probe.set(JITMX_CACHE_DIR=str(probe.cache))
    yield probe
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    monkeypatch.undo()
    probe.next_process()
    settings.current.cache_clear()


@pytest.fixture
def only_gemv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """`linear` with one kernel for every problem and shipped tables of its own, for tests that name knobs."""
    everything, linear = dict(kernels.families()), kernels.family("linear")
    everything["linear"] = dataclasses.replace(
        linear,
        kernels=tuple(
            kernel if kernel.spec.name == "gemv" else dataclasses.replace(kernel, runs_on=lambda arch: False)
            for kernel in linear.kernels
        ),
        candidates=None,
        heuristic=lambda problem, arch, count: ("gemv", linear.tuned(problem, arch, count, "gemv")),
    )
    row = {"when": {"m": [1, 8], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"stages": 2, "chunk": 3}, "us": 4.5}
    guessed, measured = {"kind": "heuristic"}, {"kind": "measured", "card": "NVIDIA H200", "date": "2026-11-21"}
    for target, origin in (("sm_90a", measured), ("sm_120a", guessed), ("sm_121a", guessed)):
        path = tmp_path / "shipped" / target / "linear.json"
        path.parent.mkdir(parents=True)
        table = {"schema_version": 1, "family": "linear", "arch": target, "origin": origin, "rows": [row]}
        path.write_text(json.dumps(table))
    real = resources.directory
    monkeypatch.setattr(resources, "directory", lambda name: tmp_path / "shipped" if name == "tactics" else real(name))
    monkeypatch.setattr(kernels, "families", lambda: everything)
    tactics.tables.cache_clear()
    yield
    tactics.tables.cache_clear()


@dataclass(frozen=True)
class Project:
    """A copy of the package with the probe family in it, and a cache beside it."""

    root: Path
    cache: Path

    def environment(self, **variables_set: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name not in variables()}
        return clean | {"PYTHONPATH": str(self.root), "JITMX_CACHE_DIR": str(self.cache)} | variables_set

    def start(self, script: str, *arguments: object, **variables_set: str) -> subprocess.Popen[str]:
        """A Python process that runs `script`; its output is piped."""
        return subprocess.Popen(
            # -P: the working directory may hold another copy of the package.
            [sys.executable, "-P", "-c", script, *map(str, arguments)],
            env=self.environment(**variables_set),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: object, **variables_set: str) -> subprocess.CompletedProcess[str]:
        """Run `script` in a Python process and wait; it must succeed."""
        process = self.start(script, *arguments, **variables_set)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return subprocess.CompletedProcess(process.args, 0, out, err)


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[[str], Project]:
    """Makes projects by name, all with the same cache."""

    def make(name: str) -> Project:
        root = tmp_path / name
        shutil.copytree(_PACKAGE, root / "jitmx", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(_PROBE / "probe.py", root / "jitmx" / "kernels")
        add_templates(root / "templates")
        (root / "tactics").mkdir()
        (root / "counting.py").write_text(_COUNTING)
        return Project(root, tmp_path / "cache")

    return make


@pytest.fixture
def project(make_project: Callable[[str], Project]) -> Project:
    return make_project("project")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a directory on a disk with so many bytes free; called again, it makes another.

    Where mounting is not allowed, the limit on the size of a file stands in for the disk: for a cache, whose files are
    small, both mean that a write fails in the middle.
    """
    with contextlib.ExitStack() as stack:
        count = 0

        def make(free: int) -> Path:
            nonlocal count
            place = tmp_path / f"disk{count}"
            count += 1
            place.mkdir(mode=0o700)
            if _mount("-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", place):
                stack.callback(_unmount, place)
                _fill(place, free)
            else:
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (free // 4, before[1]))
                stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
            return place

        yield make


@pytest.fixture
def read_only() -> Iterator[Callable[[Path, str], str]]:
    """Makes a directory read-only: `read_only(path, "mount")`, or by "permissions".

    Returns what a script has to start with: root is not bound by permissions until it gives up that privilege. Where
    mounting is not allowed, permissions stand in for it.
    """
    with contextlib.ExitStack() as stack:

        def make(path: Path, how: str) -> str:
            if how == "mount" and _mount("--bind", path, path):
                stack.callback(_unmount, path)
                if _mount("-o", "remount,bind,ro", path, path):
                    return ""
            for inner in (path, *path.rglob("*")):
                if inner.is_dir():
                    stack.callback(inner.chmod, inner.stat().st_mode & 0o7777)
                    inner.chmod(0o500)
            return _GIVE_UP_PRIVILEGES if os.geteuid() == 0 else ""

        yield make


@pytest.fixture
def shut() -> Iterator[Callable[[Path], str]]:
    """Makes a directory that nobody can look into; returns what a script has to start with, as `read_only` does."""
    with contextlib.ExitStack() as stack:

        def make(path: Path) -> str:
            stack.callback(path.chmod, path.stat().st_mode & 0o7777)
            path.chmod(0o000)
            return _GIVE_UP_PRIVILEGES if os.geteuid() == 0 else ""

        yield make


def _mount(*arguments: object) -> bool:
    command = shutil.which("mount")
    return command is not None and subprocess.run([command, *map(str, arguments)], capture_output=True).returncode == 0


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


def _fill(place: Path, free: int) -> None:
    info = os.statvfs(place)
    with (place / "filler").open("wb") as stream:
        stream.write(bytes(max(0, info.f_bavail * info.f_frsize - free)))


_GIVE_UP_PRIVILEGES = """
import ctypes
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
"""

# Writes one line for each compile and each scan that NVRTC really makes; appends of one short line are atomic.
_COUNTING = """
import os
from jitmx.toolchain import nvrtc

def count_in(log):
    def counted(name, really):
        def call(source, options, **more):
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{name}\\n".encode())
            os.close(descriptor)
            return really(source, options, **more)
        return call
    nvrtc.compile = counted("compile", nvrtc.compile)
    nvrtc.scan = counted("scan", nvrtc.scan)
"""


@pytest.fixture
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Verdict]:
    """Runs every case of a variant in the simulator; the variant must pass, and its cases must reach its code.

    Where its PTX, or what this is made from, its cases and the simulator are those of evidence that is kept, or that
    another process of this run has just given, that stands, unless `--all-evidence` is passed.
    """
    base = tmp_path_factory.getbasetemp()
    beside = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    verdicts = Verdicts(beside / "verdicts", None if evidence.anew else kept())

    def run(variant: Variant, coverage: float = 0.95) -> Verdict:
        made = made_from(variant)
        verdict = verdicts.find(made) or verify(variant, verdicts.find)
        assert verdict.passed, f"{variant.name} for {variant.arch}: {verdict.failure}"
        missed = "\n".join(f"{line}: {text}" for line, text in verdict.uncovered)
        assert verdict.coverage >= coverage, f"{variant.name} for {variant.arch}: not covered by any case:\n{missed}"
        verdicts.keep(variant, verdict, made)
        return verdict

    return run


@pytest.fixture
def stands(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Asks whether something holds of a variant, where no evidence says by the same proof that it did."""

    def find(variant: Variant, proof: str, ask: Callable[[], None], source: str = "", also: str = "") -> None:
        if evidence.anew or not evidence.kept().proven(proof):
            ask()
            note = ", ".join(filter(None, (request.node.name, also)))
            evidence.note(variant, "compiled", source, note=note, proof=proof)

    return find


@pytest.fixture
def passes(stands: Callable[..., None]) -> Callable[..., None]:
    """Has a variant pass a case of a test's own; `source`: what was made of its source, where it is not that."""

    def find(variant: Variant, case: Case, source: str = "") -> None:
        def ask() -> None:
            ptx = nvrtc.compile_ptx(source or render(variant), nvrtc.options(variant.arch))
            error, _ = run(case, variant, ptx)
            assert error <= case.gate, f"{case.name}: error {error:.3g} is over the gate of {case.gate:g}"

        proof = frame([("passes", evidence.given(variant, case, source).encode())])
        stands(variant, proof, ask, source, case.name)

    return find
