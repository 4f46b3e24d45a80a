"""The NVRTC library: where it lies, what it is, and that a process uses this one and no other.

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
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jitmx.errors import ToolchainError
from jitmx.toolchain import wheels

_WHEEL = "nvidia-cuda-nvrtc"
_REINSTALL = f"pip install --force-reinstall {_WHEEL}"
_SCHEMA = 1
_KEPT = 16
# A file changed this recently may change again within the same tick of its file system's clock.
_SETTLED_NS = 2_000_000_000


def locate() -> Path:
    """The NVRTC library of this process: the one already loaded, else the wheel's.

    A library that came first (another package's, or one from LD_LIBRARY_PATH) can't be replaced within a process, so
    it is the one whose digest goes into keys.

    Raises:
        ToolchainError: no wheel has it.
    """
    loaded = _loaded(wheels.NVRTC)
    if loaded is not None:
        return loaded
    return wheels.find(f"lib/{wheels.NVRTC}", wheel=_WHEEL, purpose="to compile kernels").resolve()


def files(path: Path) -> tuple[Path, ...]:
    """The library at `path` and the one beside it that holds its built-in declarations."""
    return (path, *sorted(path.parent.glob("libnvrtc-builtins.so.*")))


def preload(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and its companions, so that whoever asks for them by name gets these.

    Raises:
        ToolchainError: it does not load, or the process has another one loaded.
    """
    try:
        for companion in files(path)[1:]:
            ctypes.CDLL(str(companion))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ToolchainError(f"NVRTC does not load: {error}; {_REINSTALL}") from error
    others = [mapped for mapped in _mapped() if not any(_same(mapped, file) for file in files(path))]
    if others:
        raise ToolchainError(
            f"this process has NVRTC loaded from {', '.join(others)} besides {path}, and code of one would be kept "
            "under the digest of the other; remove it from LD_LIBRARY_PATH, or import jitmx first"
        )
    return library


def describe(path: Path) -> dict[str, Any]:
    """What the library at `path` says of itself: `version` ("13.5") and `targets` (compute capabilities, 121 for
    12.1)."""
    library = preload(path)
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    targets = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(targets)
    return {"version": f"{major.value}.{minor.value}", "targets": list(targets)}


def identify(paths: Sequence[Path], describe: Callable[[], dict[str, Any]], memo: Path | None) -> dict[str, Any]:
    """What `describe` returns, with `digest`, the SHA-256 of the files at `paths`.

    Args:
        memo: a JSON file that remembers the answer for as long as the files stay what they are, or None to always read
            them. A memo that is damaged, that others could write or that can't be written is done without.

    Raises:
        ToolchainError: a file can't be read.
    """
    try:
        signature = _signature(paths)
        entry = _recall(memo, signature)
        if entry is None:
            entry = {**describe(), "digest": _digest(paths)}
            if _signature(paths) == signature:
                _remember(memo, signature, entry)
    except OSError as error:
        raise ToolchainError(f"NVRTC cannot be read: {error}; {_REINSTALL}") from error
    return entry


def _signature(paths: Sequence[Path]) -> list[list[int]]:
    found = [path.stat() for path in paths]
    return [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in found]


def _digest(paths: Sequence[Path]) -> str:
    """SHA-256 of one file, or over the digests of several in their order."""
    digests = []
    for path in paths:
        with path.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _recall(memo: Path | None, signature: list[list[int]]) -> dict[str, Any] | None:
    for kept in _entries(memo):
        if kept["signature"] == signature:
            entry: dict[str, Any] = kept["entry"]
            return entry
    return None


def _entries(memo: Path | None) -> list[dict[str, Any]]:
    """What the memo holds, whole entries only."""
    if memo is None or not _private(memo.parent):
        return []
    try:
        document = json.loads(memo.read_bytes())
        if document["schema_version"] != _SCHEMA:
            return []
        return [kept for kept in document["libraries"] if kept["check"] == _check(kept["signature"], kept["entry"])]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _remember(memo: Path | None, signature: list[list[int]], entry: dict[str, Any]) -> None:
    newest = max(max(times[3:]) for times in signature)
    if memo is None or time.time_ns() - newest < _SETTLED_NS:
        return
    others = [kept for kept in _entries(memo) if kept["signature"] != signature][: _KEPT - 1]
    kept = {"signature": signature, "entry": entry, "check": _check(signature, entry)}
    text = json.dumps({"schema_version": _SCHEMA, "libraries": [kept, *others]}, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
        memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(memo.parent):
            return
        handle, name = tempfile.mkstemp(prefix=f"{memo.name}.", suffix=".tmp", dir=memo.parent)
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(memo)
        except BaseException:
            Path(name).unlink()
            raise


def _check(signature: Any, entry: Any) -> str:
    return hashlib.sha256(json.dumps([signature, entry], sort_keys=True).encode()).hexdigest()


def _private(directory: Path) -> bool:
    try:
        found = directory.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    ]


def _loaded(name: str) -> Path | None:
    """The file that the process has loaded under the name `name`, if any."""
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    info = _DlInfo()
    address = ctypes.cast(library.nvrtcVersion, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) or not info.fname:
        return None
    return Path(os.fsdecode(info.fname)).resolve()


def _mapped() -> list[str]:
    """NVRTC libraries of this CUDA major that the process has mapped."""
    major = wheels.NVRTC.rpartition(".")[2]
    names = (wheels.NVRTC, f"libnvrtc-builtins.so.{major}.")
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as stream:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in stream if "libnvrtc" in line}
    return sorted(path for path in paths if Path(path).name.startswith(names))


def _same(mapped: str, file: Path) -> bool:
    # A library replaced on disk shows as "... (deleted)", which is no file: rightly another one.
    try:
        return file.samefile(mapped)
    except OSError:
        return False
