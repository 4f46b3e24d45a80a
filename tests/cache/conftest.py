"""Entries made up of bytes: what the cache does with them does not depend on their being machine code."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmx.cache import bundle, keys
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.store import Store

Make = Callable[..., tuple[Record, bytes, str]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def make() -> Make:
    """Makes a record with its image and source: `make("a", arch="sm_90a")`; `inputs` and `outputs` update members."""

    def make(text: str = "a", *, image: bytes | None = None, source: str | None = None, **members: Any) -> Any:
        image = f"\x7fELF {text}".encode() * 40 if image is None else image
        source = f"// {text}\nsource\n" if source is None else source
        arch = members.get("arch", "sm_121a")
        inputs = {
            "schema": 1,
            "family": "probe",
            "source_digest": sha256(source.encode()),
            "headers": {"jitmx/a.cuh": sha256(b"a"), "cuda_fp8.h": sha256(b"fp8")},
            "options": [f"-arch={arch}", "-std=c++17"],
            "arch": arch,
            "nvrtc": "13.5",
            "nvrtc_digest": sha256(b"nvrtc 13.5"),
        } | members.pop("inputs", {})
        outputs = {
            "object": sha256(image),
            "size": len(image),
            "entries": ["probe_scale"],
            "registers": 8,
            "spill_bytes": 0,
            "stack_bytes": 0,
            "shared_bytes": 0,
            "compile_ms": 12.5,
            "contract": {"max_registers": 255},
            "breaches": [],
        } | members.pop("outputs", {})
        record = Record(
            key=sha256(repr((text, arch)).encode()),
            name=f"probe.scale.{text}",
            family="probe",
            kernel="scale",
            knobs={"factor": 2, "stages": 3, "half": False},
            identity=sha256(f"identity {text} {arch}".encode()),
            arch=arch,
            entry="probe_scale",
            inputs=inputs,  # type: ignore[arg-type]
            outputs=outputs,  # type: ignore[arg-type]
            created=1_000_000_000.0,
            jitmx="0.1.0",
        )
        members.pop("arch", None)
        return replace(record, arch=arch, **members), image, source

    return make


@pytest.fixture
def pack(make: Make) -> Callable[..., bytes]:
    """Makes a bundle of entries by their texts: `pack("a", "b")`; `key` signs it."""

    def pack(*texts: str, key: Any = None, scans: tuple[Scan, ...] = ()) -> bytes:
        kernels = [Kernel(*make(text)).undated("0.1.0") for text in texts]
        return bundle.make(kernels, list(scans), {"jitmx": "0.1.0", "arches": ["sm_121a"]}, key)

    return pack


@pytest.fixture
def keypair(tmp_path: Path) -> Callable[[str], tuple[Any, Path]]:
    """Makes a key pair by name: the private key, and the file with the public one."""

    def pair(name: str) -> tuple[Any, Path]:
        private, public = keys.generate()
        folder = tmp_path / f"key-{name}"
        folder.mkdir()
        (folder / "own.key").write_bytes(private)
        (folder / "own.key").chmod(0o600)
        (folder / "own.pub").write_bytes(public)
        return keys.private_key(folder / "own.key"), folder / "own.pub"

    return pair


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def as_user() -> Callable[..., None]:
    """Calls a function in a process of another user: `as_user(12345, function, groups=[23456])`; it must not raise.

    Which users a system knows does not matter to its files: the number is all.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can act as other users")

    def call(user: int, function: Callable[[], object], *, groups: tuple[int, ...] = ()) -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups(groups)
                os.setgid(user)
                os.setuid(user)
                os.umask(0o077)
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, "see the traceback of the other user's process"

    return call


@pytest.fixture
def commons() -> Iterator[Path]:
    """A directory in which everyone may write; that of pytest lets other users not even in."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)
