"""Where things lie below a cache's root, and what each file there is.

    v1/actions/<key>.json           records
    v1/objects/ab/<sha256>.cubin    machine code, named by its digest; cuobjdump reads it as it is
    v1/sources/<sha256>.cu          rendered sources, named by their digest
    v1/scans/<digest>.json          which headers a source includes, or which source templates render to, so that asking
                                    takes no compiler and no template
    v1/failed/<name>-<digest>.cu    sources that did not compile
    v1/locks/<3 digits>.lock        empty; never removed, 4096 at most
    toolchain.json, ledger.json     beside v1: digests of NVRTC libraries, and what was checked on this machine

Names below `v1/` that start with a dot and end in `.tmp` are files being written, as are those of the two files beside
it; any other name is foreign and left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jitmx.cache import files
from jitmx.cache.manifest import HEX64

VERSION = files.VERSION

# Bytes that a file of a kind has at most: a larger one is damaged. An object has as many as its record says.
LIMITS = {
    "record": 1 << 20,
    "object": 256 << 20,
    "source": 16 << 20,
    "scan": 1 << 20,
    "toolchain": 1 << 20,
    "ledger": 64 << 20,
}

_ROOT_TEMPORARY = re.compile(r"\.*(toolchain|ledger)\.json\..*\.tmp")
_FORMS = {
    "actions": ("record", re.compile(r"([0-9a-f]{64})\.json")),
    "sources": ("source", re.compile(r"([0-9a-f]{64})\.cu")),
    "scans": ("scan", re.compile(r"([0-9a-f]{64})\.json")),
    "failed": ("failed", re.compile(r"([^/]+)\.cu")),
    "locks": ("lock", re.compile(r"([0-9a-f]{3})\.lock")),
}
_OBJECTS = (VERSION, "objects")
_FOLDERS = ((), (VERSION,), *((VERSION, name) for name in _FORMS), _OBJECTS)
_OBJECT = re.compile(r"([0-9a-f]{64})\.cubin")


def _digest(text: str) -> str:
    if not HEX64.fullmatch(text):
        raise ValueError(f"{text!r} is not a SHA-256 of 64 hexadecimal digits")
    return text


def action(root: Path, key: str) -> Path:
    """The record of `key`."""
    return root / VERSION / "actions" / f"{_digest(key)}.json"


def object_(root: Path, digest: str) -> Path:
    """The machine code with this SHA-256."""
    return root / VERSION / "objects" / digest[:2] / f"{_digest(digest)}.cubin"


def source(root: Path, digest: str) -> Path:
    """The rendered source with this SHA-256."""
    return root / VERSION / "sources" / f"{_digest(digest)}.cu"


def scan(root: Path, digest: str) -> Path:
    """The headers of the source, options and compiler that `digest` stands for."""
    return root / VERSION / "scans" / f"{_digest(digest)}.json"


def failed(root: Path, name: str, digest: str) -> Path:
    """Where the source of a failed compile of `name` is kept."""
    readable = re.sub(r"[^A-Za-z0-9._=-]", "_", name).lstrip(".")[:160]
    return root / VERSION / "failed" / f"{readable}-{digest[:8]}.cu"


def ledger(root: Path) -> Path:
    """What was checked on this machine."""
    return root / "ledger.json"


def lock(root: Path, key: str) -> Path:
    """The lock that `key` shares with a 4096th of all keys, so that lock files, which stay for ever, stay few."""
    return root / VERSION / "locks" / f"{_digest(key)[:3]}.lock"


@dataclass(frozen=True)
class Item:
    """One file of a cache.

    Attributes:
        kind: record, object, source, scan, failed, lock, temporary, folder (where something else has the place of a
            directory) or foreign (a name that jitmx does not write).
        digest: the digest in its name, or an empty text.
        size: bytes.
        modified: seconds since the epoch by the file system's clock; for a record, when it was last used.
        changed: likewise, when it last was written, renamed or stamped, which no program can set.
        fault: why it is no such file whatever is in it, in words: no regular file, too large, or somebody else's.
    """

    kind: str
    path: Path
    digest: str
    size: int
    modified: float
    changed: float
    fault: str | None


def check(root: Path, *, allow_shared: bool) -> None:
    """Look at every directory of a cache.

    Raises:
        CacheError: one of them belongs to another user or can be written by others.
    """
    for below in _FOLDERS:
        with suppress(OSError), files.open_directory(root, below, allow_shared=allow_shared) as directory:
            if below == _OBJECTS and not allow_shared:
                for name in files.names(directory):
                    if _is_folder(below, name):
                        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                        files.check(root, (*below, name), info)


def require_readable(root: Path, *, allow_shared: bool) -> None:
    """Look into every directory of a cache, of which `walk` leaves out those that it cannot.

    Raises:
        CacheError: one of them belongs to another user or can be written by others.
        OSError: one that is there cannot be looked into.
    """
    for below in _FOLDERS:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            files.open_directory(root, below, allow_shared=allow_shared) as directory,
        ):
            files.names(directory)


def walk(root: Path, *, allow_shared: bool) -> Iterator[Item]:
    """Every file of the cache, in the order of the directories, and in each of the names.

    What vanishes meanwhile or cannot be looked at is left out.

    Raises:
        CacheError: a directory belongs to another user or can be written by others.
    """
    for below in _directories(root, allow_shared):
        with suppress(OSError), files.open_directory(root, below, allow_shared=allow_shared) as directory:
            yield from _items(directory, root.joinpath(*below), below, allow_shared)


def _directories(root: Path, allow_shared: bool) -> Iterator[tuple[str, ...]]:
    yield from _FOLDERS
    with suppress(OSError):
        with files.open_directory(root, _OBJECTS, allow_shared=allow_shared) as objects:
            found = files.names(objects)
        yield from ((*_OBJECTS, name) for name in found if _is_folder(_OBJECTS, name))


def _items(directory: int, path: Path, below: tuple[str, ...], allow_shared: bool) -> Iterator[Item]:
    for name in files.names(directory):
        try:
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            continue
        folder = _is_folder(below, name)
        if folder and stat.S_ISDIR(info.st_mode):
            continue
        kind, digest = ("folder", "") if folder else _classify(below, name)
        if kind == "foreign" and not below:
            continue
        if folder:
            fault = "something else is in the place of a directory"
        elif kind in ("foreign", "temporary"):
            fault = None
        else:
            fault = files.unfit(info, LIMITS.get(kind, info.st_size), allow_shared=allow_shared)
        yield Item(kind, path / name, digest, info.st_size, info.st_mtime, info.st_ctime, fault)


def _is_folder(below: tuple[str, ...], name: str) -> bool:
    if not below:
        return name == VERSION
    if below == (VERSION,):
        return name == "objects" or name in _FORMS
    return below == _OBJECTS and re.fullmatch("[0-9a-f]{2}", name) is not None


def _classify(below: tuple[str, ...], name: str) -> tuple[str, str]:
    if files.is_temporary(name) if below else _ROOT_TEMPORARY.fullmatch(name):
        return "temporary", ""
    if len(below) == 3 and (match := _OBJECT.fullmatch(name)) and match[1].startswith(below[2]):
        return "object", match[1]
    if len(below) == 2 and below[1] in _FORMS:
        kind, form = _FORMS[below[1]]
        if match := form.fullmatch(name):
            return kind, match[1]
    return "foreign", ""
