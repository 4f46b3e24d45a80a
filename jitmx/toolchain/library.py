"""The NVRTC library: where it lies, what it is, and that code kept under its digest is its own.

The digest of 150 MB takes a quarter of a second, so it is kept in `<cache>/toolchain.json` under what the kernel of
the operating system says about the files: device, inode, size, modification and change time. The change time can't
be set by a program, so a copy that keeps names and modification times does not pass for the file that it replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jitmx.cache import files, layout
from jitmx.errors import ToolchainError
from jitmx.toolchain import wheels

_WHEEL = "nvidia-cuda-nvrtc"
_BUILTINS = "libnvrtc-builtins.so.*"
REINSTALL = f"pip install --force-reinstall {_WHEEL}"
_SCHEMA = 1
_KEPT = 16
# A file changed this recently may change again within the same tick of its file system's clock.
_SETTLED_NS = 2_000_000_000


def locate() -> Path:
    """The NVRTC library of the wheel.

    Raises:
        ToolchainError: no wheel has it.
    """
    return wheels.find(f"lib/{wheels.NVRTC}", wheel=_WHEEL, purpose="to compile kernels").resolve()


def parts(path: Path) -> tuple[Path, ...]:
    """The library at `path` and the one beside it that holds its built-in declarations."""
    return (path, *sorted({file.resolve() for file in path.parent.glob(_BUILTINS)}))


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded for this process, and before it the one that it asks for by name.

    Raises:
        ToolchainError: it does not load.
    """
    try:
        for companion in parts(path)[1:]:
            ctypes.CDLL(str(companion))
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"NVRTC does not load: {error}", REINSTALL) from error


def signature(paths: Sequence[Path]) -> list[list[int]]:
    """What the operating system says of files, by which a change of them shows.

    Raises:
        ToolchainError: one of them is not there.
    """
    try:
        found = [path.stat() for path in paths]
    except OSError as error:
        raise ToolchainError(f"NVRTC cannot be read: {error}", REINSTALL) from error
    return [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in found]


def identify(paths: Sequence[Path], describe: Callable[[], dict[str, Any]], memo: Path | None) -> dict[str, Any]:
    """What `describe` returns, with `digest`, the SHA-256 of the files at `paths`.

    Args:
        memo: a JSON file that remembers the answer for as long as the files stay what they are, or None to always read
            them. A memo that is damaged, that others could write or that can't be written is done without.

    Raises:
        ToolchainError: a file can't be read.
    """
    seen = signature(paths)
    entry: dict[str, Any] | None = next((kept["entry"] for kept in _entries(memo) if kept["signature"] == seen), None)
    if entry is None:
        # Another process describes it: that one comes up while the contents are read here.
        with ThreadPoolExecutor(1) as beside:
            described = beside.submit(describe)
            read = digest(paths)
            entry = {**described.result(), "digest": read}
        if signature(paths) == seen:
            _remember(memo, seen, entry)
    return entry


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 of one file, or over the digests of several in their order.

    Raises:
        ToolchainError: a file can't be read.
    """
    digests = []
    try:
        for path in paths:
            with path.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise ToolchainError(f"NVRTC cannot be read: {error}", REINSTALL) from error
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _entries(memo: Path | None) -> list[dict[str, Any]]:
    """What the memo holds, whole entries only."""
    if memo is None or not _private(memo.parent):
        return []
    try:
        found = files.read(memo, layout.LIMITS["toolchain"])
        if found is None or found[1].st_uid != os.geteuid():
            return []
        document = json.loads(found[0])
        if document["schema_version"] != _SCHEMA:
            return []
        return [kept for kept in document["libraries"] if _is_sound(kept)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _remember(memo: Path | None, seen: list[list[int]], entry: dict[str, Any]) -> None:
    newest = max(max(times[3:]) for times in seen)
    if memo is None or time.time_ns() - newest < _SETTLED_NS:
        return
    others = [kept for kept in _entries(memo) if kept["signature"] != seen][: _KEPT - 1]
    kept = {"signature": seen, "entry": entry, "check": _check(seen, entry)}
    text = json.dumps({"schema_version": _SCHEMA, "libraries": [kept, *others]}, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
        files.make_directory(memo.parent)
        if _private(memo.parent):
            files.write(memo, text.encode())


def _is_sound(kept: Any) -> bool:
    entry = kept["entry"]
    targets, texts = entry["targets"], (entry["version"], entry["digest"])
    typed = all(isinstance(text, str) for text in texts) and all(isinstance(target, int) for target in targets)
    return typed and bool(kept["check"] == _check(kept["signature"], entry))


def _check(seen: Any, entry: Any) -> str:
    return hashlib.sha256(json.dumps([seen, entry], sort_keys=True).encode()).hexdigest()


def _private(directory: Path) -> bool:
    try:
        found = directory.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
