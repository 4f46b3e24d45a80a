"""Reading and writing files in a directory that others, crashes and broken file systems may have touched.

A directory is opened from the root down, each by the descriptor of the one above, and looked at as it was opened: what
is renamed, linked or given away between two look-ups is never taken on trust. Files are named relative to such a
descriptor. Reads take regular files only, never block and are bounded. Writes go to a fresh name beside the target,
opened so that no link can redirect it, and are renamed into place: a reader sees the old file or the new one, never a
part.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jitmx.errors import CacheError

VERSION = "v1"  # the folder of a cache that all of it lies in
PRIVATE = 0o700
_REMEDIES = {
    errno.EROFS: "mount it writable",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EACCES: "chmod u+rwx {}",
    errno.EPERM: "chmod u+rwx {}",
}
_TEMPORARY = ".tmp"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# O_PATH takes no permission on the directory itself, so that its owner is known before it lets anybody in.
_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_CHUNK = 1 << 20


@contextmanager
def open_directory(
    root: Path, below: Sequence[str] = (), *, allow_shared: bool, make: int | None = None
) -> Iterator[int]:
    """Descriptor of the directory to which the names `below` lead from `root`, one by one.

    It serves for names within it, not for reading or changing the directory itself. Only `root` may be a symbolic link.

    Args:
        allow_shared: accept directories that other users own or can write to.
        make: permissions with which a directory that is missing below `root` is made; None makes none.

    Raises:
        CacheError: a directory on the way belongs to another user or can be written by others, or `root` is none.
        OSError: there is none (FileNotFoundError), something else has its place (NotADirectoryError), or it cannot be
            entered.
    """
    here = _open_root(root, allow_shared)
    try:
        if not allow_shared:
            check(root, (), os.fstat(here))
        for depth, name in enumerate(below, 1):
            inner = _enter(name, here, make)
            os.close(here)
            here = inner
            if not allow_shared:
                check(root, below[:depth], os.fstat(here))
        yield here
    finally:
        os.close(here)


def _open_root(root: Path, allow_shared: bool) -> int:
    try:
        return os.open(root, _ENTER | os.O_NOFOLLOW)
    except NotADirectoryError:
        link = root.lstat()
    try:
        if not stat.S_ISLNK(link.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
        if not allow_shared:
            check(root, (), link)
        return os.open(root, _ENTER)
    except NotADirectoryError as error:
        raise CacheError(f"{root} is not a directory", "name one in JITMX_CACHE_DIR, or remove that file") from error


def _enter(name: str, within: int, make: int | None) -> int:
    try:
        return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=within)
    except FileNotFoundError:
        if make is None:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, make, dir_fd=within)
        # What the umask took away; the bit by which a team's directory hands down its group stays.
        inherited = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode & stat.S_ISGID
        os.chmod(name, make | inherited, dir_fd=within)
    return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=within)


def distrust(info: os.stat_result) -> str | None:
    """Why what has this status could be somebody else's, in words; None where it is this user's or root's alone."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to user id {info.st_uid}"
    if info.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(info.st_mode):
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def check(root: Path, below: Sequence[str], info: os.stat_result) -> None:
    """Refuse a directory of the cache `root`, to which the names `below` lead, by its status.

    Raises:
        CacheError: it belongs to another user or can be written by others; the message says what mends the cache whole.
    """
    fault = distrust(info)
    if fault is None:
        return
    raise CacheError(
        f"{root.joinpath(*below)} {fault}, and code that somebody else put there would run as user id {os.geteuid()}",
        ", ".join(_mends(root, below, info)),
    )


def _mends(root: Path, below: Sequence[str], info: os.stat_result) -> Iterator[str]:
    """What to do about a directory at or below `root` that is not this user's alone, the least harmful first.

    Only what jitmx made there is ever to be removed, and a directory that is shared on purpose stays as it is.
    """
    yield "name another directory (JITMX_CACHE_DIR, JITMX_SITE_CACHE or --to, whichever named this one)"
    writable = info.st_uid in (os.geteuid(), 0)
    if below or (writable and not info.st_mode & stat.S_ISVTX):
        place, own = shlex.quote(str(root)), root / VERSION
        made = exists(own)
        if made:
            closed = "" if below else f" && chmod go-w {place}"
            removal = f"rm -r {shlex.quote(str(own))}{closed}; kernels are compiled again"
            yield f"or remove what jitmx keeps in it, which cannot be told from what others put there ({removal})"
        if writable:
            command = f"chmod {'-R ' if made else ''}go-w {place}"
            yield f"or take the permission away ({command}) only if nobody else ever wrote there"
    yield "or set JITMX_ALLOW_SHARED_CACHE=1 if you trust everyone who can write there"


def restrict(path: Path, permissions: int, *, within: int) -> None:
    """Take from the directory `within`, and from the file `path` in it if there is one, what is beyond `permissions`.

    What belongs to another user is left alone.

    Raises:
        OSError: it cannot be looked at.
    """
    for name, kind in ((".", os.O_DIRECTORY), (path.name, os.O_NOFOLLOW)):
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | kind, dir_fd=within)
        except FileNotFoundError:
            return
        try:
            info = os.fstat(descriptor)
            if info.st_uid == os.geteuid() and info.st_mode & 0o777 & ~permissions:
                os.fchmod(descriptor, stat.S_IMODE(info.st_mode) & (~0o777 | permissions))
        finally:
            os.close(descriptor)


def remedy(error: OSError, place: Path) -> str:
    """What makes the cache at `place` take what it has refused with `error`."""
    what = "`jitmx cache verify --repair` takes out what is in the way"
    return _REMEDIES.get(error.errno or 0, what).format(shlex.quote(str(place)))


def names(directory: int) -> list[str]:
    """The names in a directory that `open_directory` opened, in order."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(descriptor) as entries:
            return sorted(entry.name for entry in entries)
    finally:
        os.close(descriptor)


@contextmanager
def opened(
    path: Path, limit: int, *, within: int | None = None, allow_shared: bool = True, follow: bool = False
) -> Iterator[tuple[int, os.stat_result]]:
    """Descriptor and status of the regular file `path`, which has `limit` bytes at most.

    Args:
        within: descriptor of its directory; None goes by its path.
        allow_shared: accept a file that other users own or can write to.
        follow: accept a symbolic link under this name.

    Raises:
        OSError: there is none, it cannot be opened, or it is not what it should be; EFBIG where it is too large.
    """
    # Without O_NONBLOCK, a FIFO under this name would hold the reader for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(_name(path, within), flags, dir_fd=within)
    try:
        info = os.fstat(descriptor)
        if fault := unfit(info, limit, allow_shared=allow_shared):
            number = errno.EFBIG if info.st_size > limit else errno.EINVAL
            raise OSError(number, fault, str(path))
        yield descriptor, info
    finally:
        os.close(descriptor)


def unfit(info: os.stat_result, limit: int, *, allow_shared: bool) -> str | None:
    """Why what has this status is not read as a file of `limit` bytes at most, in words; None where it is."""
    if not stat.S_ISREG(info.st_mode):
        return "not a regular file"
    if info.st_size > limit:
        return f"larger than such a file can be ({limit} bytes)"
    if not allow_shared and (fault := distrust(info)):
        return f"not to be trusted: it {fault}"
    return None


def read(
    path: Path, limit: int, *, within: int | None = None, allow_shared: bool = True, follow: bool = False
) -> tuple[bytes, os.stat_result] | None:
    """Contents and status of the regular file `path`; None where there is none.

    Args:
        limit: bytes that such a file can have at most; no more than one beyond it is ever read.
        within, allow_shared, follow: as for `opened`.

    Raises:
        OSError: something is there that cannot be read, that is no regular file, or that is larger than `limit`
            (EFBIG).
    """
    try:
        with opened(path, limit, within=within, allow_shared=allow_shared, follow=follow) as (descriptor, info):
            return b"".join(_chunks(path, descriptor, limit, max(info.st_size + 1, 1 << 16))), info
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest(path: Path, limit: int, *, within: int | None = None, allow_shared: bool = True) -> tuple[str, int] | None:
    """SHA-256 and bytes of the regular file `path`, of which little is in memory at once; None where there is none.

    Arguments and errors are those of `read`.
    """
    found, size = hashlib.sha256(), 0
    try:
        with opened(path, limit, within=within, allow_shared=allow_shared) as (descriptor, _):
            for part in _chunks(path, descriptor, limit, _CHUNK):
                found.update(part)
                size += len(part)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.hexdigest(), size


def _chunks(path: Path, descriptor: int, limit: int, size: int) -> Iterator[bytes]:
    """What is in a file, which may grow meanwhile."""
    rest = limit + 1
    while part := os.read(descriptor, min(rest, size)):
        rest -= len(part)
        if not rest:
            raise OSError(errno.EFBIG, f"larger than such a file can be ({limit} bytes)", str(path))
        yield part


def _name(path: Path, within: int | None) -> str:
    return os.fspath(path) if within is None else path.name


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def exists(path: Path) -> bool:
    """Whether anything is known to be at `path`. Unlike pathlib's, this is False where looking is refused."""
    return _mode(path) != 0


def is_directory(path: Path) -> bool:
    """Whether a directory is known to be at `path`; False where looking is refused."""
    return stat.S_ISDIR(_mode(path))


def write(path: Path, data: bytes, *, permissions: int = 0o600, sync: bool = True, within: int | None = None) -> None:
    """Put `data` at `path` atomically; `sync` makes it survive a power cut.

    Args:
        within: descriptor of its directory; None goes by its path.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = _name(temporary_beside(path), within)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=within)
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
        os.replace(temporary, _name(path, within), src_dir_fd=within, dst_dir_fd=within)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=within)
        raise
    if sync:
        _sync_directory(path.parent, within)


def write_named(path: Path, data: bytes, *, permissions: int | None = None) -> None:
    """Put `data` where a path that a user names leads: a link stays one, and a file is replaced atomically.

    What is no regular file, such as a device or a pipe, takes the data in place.

    Args:
        permissions: of a file that is new, by default the usual ones; one that is there keeps its own.

    Raises:
        OSError: it cannot be written.
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        usual = _usual_permissions() if permissions is None else permissions
        write(path.resolve(), data, permissions=usual)
        return
    if stat.S_ISREG(info.st_mode):
        write(path.resolve(), data, permissions=stat.S_IMODE(info.st_mode))
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb") as stream:
        stream.write(data)


def _usual_permissions() -> int:
    """Those that the umask leaves to a new file."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def temporary_beside(path: Path) -> Path:
    """A fresh hidden name in the directory of `path`; `is_temporary` recognizes it."""
    return path.with_name(f".{path.name[:128]}.{os.getpid()}-{os.urandom(6).hex()}{_TEMPORARY}")


def is_temporary(name: str) -> bool:
    """Whether `name` was made by `temporary_beside`."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def _sync_directory(path: Path, within: int | None) -> None:
    """Make the names in a directory survive a power cut, where the file system can."""
    # Some file systems refuse to sync a directory; the digests catch what is then lost.
    with suppress(OSError):
        name = os.fspath(path) if within is None else "."
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
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
            path.chmod(permissions | path.stat().st_mode & stat.S_ISGID)


def permissions_of(path: Path) -> int:
    """The permission bits for what is made within the directory `path`: all for its owner, its own for others."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & 0o077 | PRIVATE
    except OSError:
        return PRIVATE
