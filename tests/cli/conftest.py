"""The command line as users call it: in this process for speed, in its own where the process is the claim."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jitmx import settings
from jitmx.cache.manifest import Record
from jitmx.cli import main
from known_nvrtc import remember

Run = Callable[..., Result]
Process = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No setting of the caller's, and a cache of the test's own."""
    for name in {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)} & os.environ.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    yield
    monkeypatch.undo()
    settings.current.cache_clear()


@pytest.fixture
def toolchain(clean_settings: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The cache of the test's own knows NVRTC by its digest, as one does whose second command this is."""
    remember(tmp_path_factory, tmp_path / "cache")


@pytest.fixture
def run() -> Run:
    """Calls `jitmx` in this process: `run("cache", "ls")`; checks the exit code (0 unless `code` says otherwise)."""

    def call(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, prog_name="jitmx")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.output}"
        return result

    return call


@pytest.fixture
def read(run: Run) -> Callable[..., dict[str, Any]]:
    """Calls a verb with --json and returns its object, whose schema version is checked."""

    def call(*arguments: str, code: int = 0) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
        assert document["schema_version"] == 1
        return document

    return call


@pytest.fixture
def process() -> Process:
    """Calls `jitmx` in a process of its own, with further variables where given."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from jitmx.cli import main; main(prog_name='jitmx')", *arguments]
        return subprocess.run(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def _digest(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _record(
    name: str = "linear.gemv", arch: str = "sm_121a", *, salt: str = "", **changes
) -> tuple[Record, bytes, str]:
    """An entry as the store takes it; its image is no machine code, which nothing here looks into."""
    image, source = f"image of {name} {arch} {salt}".encode(), f"// {name} {arch} {salt}\n"
    family, kernel = name.split(".")[:2]
    made = Record(
        key=_digest(name, arch, salt), name=name, family=family, kernel=kernel, knobs={"m": 1, "bias": False},
        identity=_digest("identity", name, arch), arch=arch, entry=f"jitmx_{family}_{kernel}",
        inputs={
            "schema": 1, "family": family, "source_digest": hashlib.sha256(source.encode()).hexdigest(),
            "headers": {"jitmx/mxfp4.cuh": _digest("header", salt)}, "options": [f"-arch={arch}"], "arch": arch,
            "nvrtc": "13.5", "nvrtc_digest": _digest("nvrtc"),
        },
        outputs={
            "object": hashlib.sha256(image).hexdigest(), "size": len(image), "entries": [f"jitmx_{family}_{kernel}"],
            "registers": 40, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 1024, "compile_ms": 250.0,
            "contract": {}, "breaches": [],
        },
        created=time.time(), jitmx="0.1.0",
    )  # fmt: skip
    return replace(made, **changes), image, source


@pytest.fixture
def record() -> Callable[..., tuple[Record, bytes, str]]:
    """Makes an entry as the store takes it: `record("linear.gemv", "sm_121a", salt="older", created=0.0)`."""
    return _record
