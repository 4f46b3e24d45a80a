"""Reading and writing files in a directory that others, crashes and broken file systems may have touched.

Reads take regular files only and never block. Writes go to a fresh name beside the target, opened so that no link can
redirect it, and are renamed into place: a reader sees the old file or the new one, never a part.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from jitmx.errors import CacheError

PRIVATE = 0o700
_TEMPORARY = ".tmp"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read(
    path: Path | str, limit: int, *, within: int | None = None, follow: bool = False
) -> tuple[bytes, os.stat_result] | None:
    """Contents and status of the regular file `path`; None where there is none.

    Args:
        limit: bytes that such a file can have at most; no more than one beyond it is ever read.
        within: descriptor of the directory that `path` is relative to.
        follow: read through a symbolic link under this name.

    Raises:
        OSError: something is there that cannot be read, that is no regular file, or that is larger than `limit`
            (EFBIG).
    """
    # Without O_NONBLOCK, a FIFO under this name would hold the reader for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=within)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        parts, rest = [], limit + 1
        if info.st_size <= limit:
            # What grows meanwhile is read no further either.
            while rest and (part := os.read(descriptor, min(rest, max(info.st_size + 1, 1 << 16)))):
                parts.append(part)
                rest -= len(part)
        if info.st_size > limit or not rest:
            raise OSError(errno.EFBIG, f"larger than such a file can be ({limit} bytes)", str(path))
        return b"".join(parts), info
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def exists(path: Path) -> bool:
    """Whether anything is known to be at `path`. Unlike pathlib's, this is False where looking is refused."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether a regular file is known to be at `path`; False where looking is refused."""
    return stat.S_ISREG(_mode(path))


def is_directory(path: Path) -> bool:
    """Whether a directory is known to be at `path`; False where looking is refused."""
    return stat.S_ISDIR(_mode(path))


def write(path: Path, data: bytes, *, permissions: int = 0o600, sync: bool = True) -> None:
    """Put `data` at `path` atomically; `sync` makes it survive a power cut.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = temporary_beside(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if permissions != 0o600:
                os.fchmod(descriptor, permissions)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_directory(path.parent)


def temporary_beside(path: Path) -> Path:
    """A fresh hidden name in the directory of `path`; `is_temporary` recognizes it."""
    return path.with_name(f".{path.name[:128]}.{os.getpid()}-{os.urandom(6).hex()}{_TEMPORARY}")


def is_temporary(name: str) -> bool:
    """Whether `name` was made by `temporary_beside`."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def sync_directory(path: Path) -> None:
    """Make the names in `path` survive a power cut, where the file system can."""
    # Some file systems refuse to sync a directory; the digests catch what is then lost.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directory(path: Path, permissions: int = PRIVATE) -> None:
    """Make `path` and what is missing above it, each private or with `permissions`.

    Raises:
        OSError: it cannot be made, or a file is in its place.
    """
    if is_directory(path):
        return
    try:
        try:
            path.mkdir(PRIVATE)
        except FileNotFoundError:
            make_directory(path.parent, permissions)
            # Only once more: some file systems, /proc for one, give this answer below a directory that is there.
            path.mkdir(PRIVATE)
    except FileExistsError:
        if not is_directory(path):
            raise
    else:
        if permissions != PRIVATE:
            path.chmod(permissions)


def permissions_of(path: Path) -> int:
    """The permission bits for what is made within the directory `path`: all for its owner, its own for others."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & 0o077 | PRIVATE
    except OSError:
        return PRIVATE


def check_owner(path: Path, *, allow_shared: bool) -> bool:
    """Refuse a directory into which somebody else could put machine code for this process to run.

    Returns whether there is a directory; one that does not exist, or cannot be looked at, holds nothing to be trusted.

    Raises:
        CacheError: `path` is no directory, belongs to another user, or can be written by group or others.
    """
    try:
        link, target = path.lstat(), path.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(target.st_mode):
        raise CacheError(f"{path} is not a directory; name one in JITMX_CACHE_DIR, or remove that file")
    if allow_shared:
        return True
    remedy = (
        "name another directory in JITMX_CACHE_DIR, "
        "or set JITMX_ALLOW_SHARED_CACHE=1 if you trust everyone who can write there"
    )
    user = os.geteuid()
    for info in (link, target):
        if info.st_uid not in (user, 0):
            raise CacheError(
                f"{path} belongs to user id {info.st_uid}; a cache must belong to the user who runs its code "
                f"(user id {user}) or to root: {remedy}"
            )
    if target.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"{path} can be written by others (mode {stat.S_IMODE(target.st_mode):04o}), who could put their code into "
            f"this process: chmod go-w {path}, {remedy}"
        )
    return True
