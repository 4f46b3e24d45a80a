"""One cache directory, read with distrust: what is damaged, foreign or unreadable counts as absent."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jitmx.cache import files, layout
from jitmx.cache.layout import Item
from jitmx.cache.manifest import HEX64, NewerSchemaError, Record, Scan

logger = logging.getLogger("jitmx.cache")


@dataclass(frozen=True)
class Found:
    """A sound record and when it was last used, seconds since the epoch."""

    record: Record
    used: float


class Layer(Protocol):
    """What is looked into for entries: a cache directory, or a bundle."""

    root: Path

    def record(self, key: str) -> Found | None:
        """The record of `key`; None where there is none that is sound."""

    def image(self, record: Record) -> bytes | None:
        """The machine code of `record`, verified; None where it is missing or damaged."""

    def source(self, digest: str) -> str | None:
        """The rendered source with this digest, verified; None where it is missing or damaged."""

    def has_source(self, digest: str) -> bool:
        """Whether there is a source with this digest, sound or not."""

    def source_path(self, digest: str) -> Path | None:
        """The file with that source; None where there is none."""

    def scan(self, digest: str) -> Scan | None:
        """What is known of the headers of `digest`; None where nothing sound is."""

    def all_keys(self) -> list[str]:
        """The key of each record, sound or not, in order."""


class Tier:
    """A cache directory as readers see it.

    Every damaged or unreadable file is reported once, as a warning, and is a miss. Whose the directories and files are
    is looked at each time that one is opened.

    Args:
        root: the directory; it need not exist.
        allow_shared: accept one that other users own or can write to.

    Raises:
        CacheError: here or at any use, a directory that belongs to another user or can be written by others.
    """

    def __init__(self, root: Path, *, allow_shared: bool = False) -> None:
        self.root = root.absolute()
        self.allow_shared = allow_shared
        self._above = len(os.fspath(self.root / layout.VERSION)) - len(layout.VERSION)
        self._complained: set[Path] = set()
        layout.check(self.root, allow_shared=allow_shared)

    def within(self, path: Path, *, make: int | None = None) -> AbstractContextManager[int]:
        """Descriptor of the directory of `path`, a file of the cache; `make` and errors as for `open_directory`."""
        below = os.fspath(path)[self._above :].split("/")[:-1]
        return files.open_directory(self.root, below, allow_shared=self.allow_shared, make=make)

    def walk(self) -> Iterator[Item]:
        """Every file of the cache; see `layout.walk`."""
        return layout.walk(self.root, allow_shared=self.allow_shared)

    def get(self, path: Path, limit: int) -> tuple[bytes, os.stat_result] | None:
        """Contents and status of a file of the cache, which has `limit` bytes at most; None where there is none.

        Raises:
            OSError: there is something that cannot be read or is not to be trusted.
        """
        try:
            with self.within(path) as directory:
                return files.read(path, limit, within=directory, allow_shared=self.allow_shared)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def digest(self, path: Path, limit: int) -> tuple[str, int] | None:
        """SHA-256 and bytes of a file of the cache; None where there is none that can be read and is to be trusted."""
        try:
            with self.within(path) as directory:
                return files.digest(path, limit, within=directory, allow_shared=self.allow_shared)
        except OSError:
            return None

    def has(self, path: Path, limit: int) -> bool:
        """Whether `path` is known to be a file of `limit` bytes at most that can be read and trusted."""
        try:
            with (
                self.within(path) as directory,
                files.opened(path, limit, within=directory, allow_shared=self.allow_shared),
            ):
                return True
        except OSError:
            return False

    def read(self, path: Path, limit: int) -> bytes | None:
        """Contents of a file; None where there is none or it cannot be read."""
        found = self._read(path, limit)
        return found[0] if found else None

    def record(self, key: str) -> Found | None:
        """The record of `key`; None where there is none, none that is sound, or one of a newer schema."""
        path = layout.action(self.root, key)
        found = self._read(path, layout.LIMITS["record"])
        if found is None:
            return None
        try:
            return Found(Record.of(key, found[0]), found[1].st_mtime)
        except NewerSchemaError:
            return None
        except ValueError as error:
            self.complain(path, f"damaged ({error}) and taken for absent")
            return None

    def holds_newer(self, key: str) -> bool:
        """Whether the record of `key` is a sound one of a newer schema, which is not ours to replace."""
        try:
            found = self.get(layout.action(self.root, key), layout.LIMITS["record"])
            if found:
                Record.from_json(found[0])
        except NewerSchemaError:
            return True
        except (OSError, ValueError):
            pass
        return False

    def image(self, record: Record) -> bytes | None:
        """The machine code of `record`, verified; None where it is missing or damaged."""
        digest, size = record.outputs["object"], record.outputs["size"]
        path = layout.object_(self.root, digest)
        image = self.read(path, min(size, layout.LIMITS["object"]))
        if image is not None and (len(image) != size or hashlib.sha256(image).hexdigest() != digest):
            self.complain(path, "damaged (its bytes do not match its name or its record) and taken for absent")
            return None
        return image

    def source(self, digest: str) -> str | None:
        """The rendered source with this digest, verified; None where it is missing or damaged."""
        data = self.read(layout.source(self.root, digest), layout.LIMITS["source"])
        return data.decode() if data is not None and hashlib.sha256(data).hexdigest() == digest else None

    def has_source(self, digest: str) -> bool:
        """Whether there is a rendered source with this digest that can be read."""
        return self.source_path(digest) is not None

    def source_path(self, digest: str) -> Path | None:
        """The file that is the rendered source with this digest; None where there is none that can be read."""
        path = layout.source(self.root, digest)
        return path if self.has(path, layout.LIMITS["source"]) else None

    def scan(self, digest: str) -> Scan | None:
        """What is known of the headers of `digest`; None where nothing sound is."""
        path = layout.scan(self.root, digest)
        if (data := self.read(path, layout.LIMITS["scan"])) is None:
            return None
        try:
            return Scan.of(digest, data)
        except ValueError as error:
            self.complain(path, f"damaged ({error}) and taken for absent")
            return None

    def all_keys(self) -> list[str]:
        """The key of each record, sound or not, in order."""
        try:
            with self.within(self.root / layout.VERSION / "actions" / "any") as directory:
                names = files.names(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._shut_out(error)
            return []
        return [name[:64] for name in names if name.endswith(".json") and HEX64.fullmatch(name[:-5])]

    def complain(self, path: Path, what: str) -> None:
        """Warn once about `path`."""
        if self.is_news(path):
            logger.warning("%s is %s", path, what)

    def is_news(self, path: Path) -> bool:
        """Whether nothing was said about `path` yet; from now on something was."""
        known = path in self._complained
        self._complained.add(path)
        return not known

    def _read(self, path: Path, limit: int) -> tuple[bytes, os.stat_result] | None:
        """Like `get`, with a warning for an error."""
        try:
            with self.within(path) as directory:
                try:
                    return files.read(path, limit, within=directory, allow_shared=self.allow_shared)
                except OSError as error:
                    # Of a directory that lets nobody in, one warning is enough: this look raises what it refuses.
                    os.stat(path.name, dir_fd=directory, follow_symlinks=False)
                    # On a shared file system, a name may be there before its contents are.
                    self.complain(path, f"unreadable ({error.strerror}) and taken for absent")
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._shut_out(error)
        return None

    def _shut_out(self, error: OSError) -> None:
        """Warn of a directory that lets nobody in, as a whole."""
        if self.is_news(self.root):
            logger.warning(
                "the kernel cache %s cannot be looked into (%s) and is done without; what is compiled stays in memory "
                "and ends with this process: get yourself permission, or name another directory in JITMX_CACHE_DIR",
                self.root,
                error.strerror,
            )
