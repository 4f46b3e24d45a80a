"""The NVRTC library: where it lies, what it is, and that code kept under its digest is its own.

The digest of 150 MB takes a quarter of a second, so it is kept in `<cache>/toolchain.json` under what the kernel of
the operating system says about the files: device, inode, size, modification and change time. The change time can't
be set by a program, so a copy that keeps names and modification times does not pass for the file that it replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
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
_BUILTINS = "libnvrtc-builtins.so.*"
_RTLD_DI_LINKMAP = 2
_REINSTALL = f"pip install --force-reinstall {_WHEEL}"
_SCHEMA = 1
_KEPT = 16
# A file changed this recently may change again within the same tick of its file system's clock.
_SETTLED_NS = 2_000_000_000


def locate() -> Path:
    """The NVRTC library of this process: the one already loaded, else the wheel's.

    Where several are loaded it is the one that came first, which is the one that others find, too.

    Raises:
        ToolchainError: no wheel has it.
    """
    loaded = _loaded(wheels.NVRTC)
    if loaded is not None:
        return loaded
    return wheels.find(f"lib/{wheels.NVRTC}", wheel=_WHEEL, purpose="to compile kernels").resolve()


def files(path: Path) -> tuple[Path, ...]:
    """The library at `path` and the one beside it that holds its built-in declarations."""
    return (path, *sorted({file.resolve() for file in path.parent.glob(_BUILTINS)}))


def preload(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and its companions; those of other libraries may be loaded as well.

    Raises:
        ToolchainError: it does not load; it was replaced on disk since it did; or it would take its built-in
            declarations, which it asks for by name, from a file with other contents that came first.
    """
    try:
        for companion in files(path)[1:]:
            ctypes.CDLL(str(companion))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ToolchainError(f"NVRTC does not load: {error}; {_REINSTALL}") from error
    replaced = [str(file) for file in files(path) if f"{file} (deleted)" in _mapped()]
    if replaced:
        raise ToolchainError(
            f"{', '.join(replaced)} was replaced on disk while this process had it loaded, and its code would be kept "
            "under the digest of what lies there now; start the process again"
        )
    for companion in path.parent.glob(_BUILTINS):
        found = _loaded(companion.name)
        if found is not None:
            require_same(found, companion, f"NVRTC asks for {companion.name} by name")
    return library


def require_same(found: Path, wanted: Path, why: str) -> None:
    """Check that a library that is used in the place of `wanted` is that file or has its contents.

    Raises:
        ToolchainError: it is another one; `why` says what makes the process use it.
    """
    try:
        if found.samefile(wanted) or filecmp.cmp(found, wanted, shallow=False):
            return
    except OSError:
        pass
    raise ToolchainError(
        f"this process uses {found} in the place of {wanted}: {why}, and its code would be kept under the digest of "
        "the other; remove it from LD_LIBRARY_PATH, or run `jitmx warmup` before, so that nothing is left to compile"
    )


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


class _LinkMap(ctypes.Structure):
    """The start of what glibc keeps of a loaded file."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _loaded(name: str) -> Path | None:
    """The file that a process gets that opens a library by `name`, if one is loaded under it."""
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    found = ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(found)):
        return None
    return Path(os.fsdecode(found.contents.name)).resolve()


def _mapped() -> set[str]:
    """NVRTC's files that the process has mapped, as the kernel names them: "... (deleted)" where replaced on disk."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as stream:
        return {line.split(maxsplit=5)[5].rstrip("\n") for line in stream if "libnvrtc" in line}
