"""Where things lie below a cache's root, and what each file there is.

    v1/actions/<key>.json           records
    v1/objects/ab/<sha256>.cubin    machine code, named by its digest; cuobjdump reads it as it is
    v1/sources/<sha256>.cu          rendered sources, named by their digest
    v1/scans/<digest>.json          which headers a source includes, so that asking takes no compiler
    v1/failed/<name>-<digest>.cu    sources that did not compile
    v1/locks/<3 digits>.lock        empty; never removed, 4096 at most

Names that start with a dot and end in `.tmp` are files being written; any other name is foreign and left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitmx.cache import files
from jitmx.cache.manifest import HEX64

VERSION = "v1"

# Bytes that a file of a kind has at most: a larger one is damaged. An object has as many as its record says.
LIMITS = {
    "record": 1 << 20,
    "object": 256 << 20,
    "source": 16 << 20,
    "scan": 1 << 20,
    "toolchain": 1 << 20,
    "ledger": 64 << 20,
}

_FORMS = {
    "actions": ("record", re.compile(r"([0-9a-f]{64})\.json")),
    "sources": ("source", re.compile(r"([0-9a-f]{64})\.cu")),
    "scans": ("scan", re.compile(r"([0-9a-f]{64})\.json")),
    "failed": ("failed", re.compile(r"([^/]+)\.cu")),
    "locks": ("lock", re.compile(r"([0-9a-f]{3})\.lock")),
}
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


def lock(root: Path, key: str) -> Path:
    """The lock that `key` shares with a 4096th of all keys, so that lock files, which stay for ever, stay few."""
    return root / VERSION / "locks" / f"{_digest(key)[:3]}.lock"


@dataclass(frozen=True)
class Item:
    """One file below `v1/`.

    Attributes:
        kind: record, object, source, scan, failed, lock, temporary or foreign (a name that jitmx does not write).
        digest: the digest in its name, or an empty text.
        size: bytes.
        modified: seconds since the epoch by the file system's clock; for a record, when it was last used.
    """

    kind: str
    path: Path
    digest: str
    size: int
    modified: float


def walk(root: Path) -> Iterator[Item]:
    """Every file below `v1/`, in the order of the names. What vanishes meanwhile or cannot be looked at is left out."""
    return _walk(root / VERSION, ())


def _walk(directory: Path, below: tuple[str, ...]) -> Iterator[Item]:
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        path = directory / entry.name
        if stat.S_ISDIR(info.st_mode) and _is_ours(below, entry.name):
            yield from _walk(path, (*below, entry.name))
        else:
            kind, digest = _classify(below, entry.name) if stat.S_ISREG(info.st_mode) else ("foreign", "")
            yield Item(kind, path, digest, info.st_size, info.st_mtime)


def _is_ours(below: tuple[str, ...], name: str) -> bool:
    if not below:
        return name == "objects" or name in _FORMS
    return below == ("objects",) and re.fullmatch("[0-9a-f]{2}", name) is not None


def _classify(below: tuple[str, ...], name: str) -> tuple[str, str]:
    if below and files.is_temporary(name):
        return "temporary", ""
    if len(below) == 2 and (match := _OBJECT.fullmatch(name)) and match[1].startswith(below[1]):
        return "object", match[1]
    if len(below) == 1 and below[0] in _FORMS:
        kind, form = _FORMS[below[0]]
        if match := form.fullmatch(name):
            return kind, match[1]
    return "foreign", ""
