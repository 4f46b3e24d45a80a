"""What the properties run in: a folder of hostile files, a cache with one kernel, nothing that compiles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from jitmx import settings, workers
from jitmx.cache import store as stores
from jitmx.cli import main
from jitmx.dispatch import offers, tactics
from jitmx.errors import CompileError
from jitmx.sim import verify as simulated
from jitmx.toolchain import nvrtc

CODES = (0, 1, 2, 3, 130)
ARCH = "sm_121a"
SEED = ("warmup", "-q", "--arch", ARCH, "--variant", "quantize.quantize")


@dataclass(frozen=True)
class World:
    """A folder that the commands run in; `seed` is a cache with one kernel."""

    root: Path
    seed: Path

    @contextlib.contextmanager
    def cache(self) -> Iterator[Path]:
        """A copy of the cache, for one example to spoil."""
        with tempfile.TemporaryDirectory(dir=self.root, ignore_cleanup_errors=True) as name:
            place = Path(name) / "cache"
            shutil.copytree(self.seed, place)
            place.chmod(0o700)
            yield place

    def run(self, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Call `jitmx` in this process, which is to end as a command may."""
        environment = {"JITMX_CACHE_DIR": str(self.seed), **(variables or {})}
        for forget in (stores._stores.clear, tactics.tables.cache_clear, nvrtc.identity.cache_clear):
            forget()
        try:
            result = CliRunner(env=environment).invoke(main, list(arguments), prog_name="jitmx")
        finally:
            settings.current.cache_clear()
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        check(arguments, result.exit_code, result.stdout, result.stderr)


def check(arguments: Sequence[str], code: int, stdout: str, stderr: str) -> None:
    """A command has ended as one may: with one of its exit codes, no traceback, and JSON where that was asked for."""
    assert code in CODES, (code, stderr)
    assert "Traceback" not in stdout + stderr, stderr
    assert code == 0 or stdout or stderr, "a command that fails says why"
    if "--json" in arguments[:3] and not {"-h", "--help", "--version"} & set(arguments) and stdout:
        assert isinstance(json.loads(stdout), dict)


@contextlib.contextmanager
def made() -> Iterator[World]:
    """The folder, as the working directory, and no setting of the caller's."""
    names = {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)} & os.environ.keys()
    with (
        tempfile.TemporaryDirectory(prefix="jitmx-fuzz-", ignore_cleanup_errors=True) as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ),
    ):
        for name in names:
            del os.environ[name]
        world = World(Path(folder), Path(folder) / "seed")
        _hostile(world.root)
        world.run(SEED)
        with _quick():
            yield world
    settings.current.cache_clear()


HOSTILE = ("fifo", "folder", "nothing/here", "text", "/dev/full", "/proc/self/mem", "loop", "caf\udce9\x1b[31m")


def _hostile(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "folder").mkdir()
    (root / "text").write_bytes(b"\xff\x00 no table\n")
    (root / "loop").symlink_to("loop")
    Path(os.fsdecode(bytes(root) + b"/caf\xe9\x1b[31m")).write_text("{}")


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Compiling fails at once, and simulating finds nothing: what is called is what is before and after that."""

    def refuse(*_: object, **__: object) -> Any:
        raise CompileError("nothing compiles here\x1b[31m", log="no log")

    @contextlib.contextmanager
    def pool(_count: int) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(1) as made:
            yield made

    failed = simulated.Verdict("none\x1b[31m", 0.0, 0, 0.0, uncovered=((1, "\x1b[31m"),))
    with contextlib.ExitStack() as stack:
        for where, name, instead in (
            (nvrtc, "compile", refuse), (nvrtc, "scan", refuse), (workers, "pool", pool),
            (offers, "everything", lambda *_: []),
            (simulated, "verify", lambda _: failed),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, instead))
        yield
