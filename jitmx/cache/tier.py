"""One cache directory, read with distrust: what is damaged, foreign or unreadable counts as absent."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from jitmx.cache import files, layout
from jitmx.cache.manifest import HEX64, NewerSchemaError, Record

logger = logging.getLogger("jitmx.cache")


@dataclass(frozen=True)
class Found:
    """A sound record and when it was last used, seconds since the epoch."""

    record: Record
    used: float


class Tier:
    """A cache directory as readers see it.

    Every damaged or unreadable file is reported once, as a warning, and is a miss.

    Args:
        root: the directory; it need not exist.
        allow_shared: accept one that other users own or can write to.
    """

    def __init__(self, root: Path, *, allow_shared: bool = False) -> None:
        self.root = root.absolute()
        self._allow_shared = allow_shared
        self._admitted = False
        self._complained: set[Path] = set()
        self.admit()

    def admit(self) -> None:
        """Refuse the directory if others could put code there.

        One that does not exist is looked at again on the next use: somebody else may make it. One that exists and is
        ours alone stays so.

        Raises:
            CacheError: it belongs to another user or can be written by others.
        """
        if not self._admitted:
            there = files.check_owner(self.root, allow_shared=self._allow_shared)
            if files.is_directory(inner := self.root / layout.VERSION):
                files.check_owner(inner, allow_shared=self._allow_shared)
            self._admitted = there

    def read(self, path: Path, limit: int) -> bytes | None:
        """Contents of a file; None where there is none or it cannot be read."""
        self.admit()
        try:
            found = files.read(path, limit)
        except OSError as error:
            # On a shared file system, a name may be there before its contents are.
            self._refused(path, error)
            return None
        return found[0] if found else None

    def record(self, key: str) -> Found | None:
        """The record of `key`; None where there is none, none that is sound, or one of a newer schema."""
        self.admit()
        path = layout.action(self.root, key)
        try:
            found = files.read(path, layout.LIMITS["record"])
            if found is None:
                return None
            record = Record.from_json(found[0])
            if record.key != key:
                raise ValueError(f"it is the record of {record.key[:12]}")
        except NewerSchemaError:
            return None
        except OSError as error:
            self._refused(path, error)
            return None
        except ValueError as error:
            self.complain(path, f"damaged ({error}) and taken for absent")
            return None
        return Found(record, found[1].st_mtime)

    def holds_newer(self, key: str) -> bool:
        """Whether the record of `key` is a sound one of a newer schema, which is not ours to replace."""
        try:
            found = files.read(layout.action(self.root, key), layout.LIMITS["record"])
            if found:
                Record.from_json(found[0])
        except NewerSchemaError:
            return True
        except (OSError, ValueError):
            pass
        return False

    def image(self, record: Record) -> bytes | None:
        """The machine code of `record`, verified; None where it is missing or damaged."""
        digest = record.outputs["object"]
        path = layout.object_(self.root, digest)
        image = self.read(path, layout.LIMITS["object"])
        if image is not None and hashlib.sha256(image).hexdigest() != digest:
            self.complain(path, "damaged (its bytes do not match its name) and taken for absent")
            return None
        return image

    def source(self, digest: str) -> str | None:
        """The rendered source with this digest, verified; None where it is missing or damaged."""
        data = self.read(layout.source(self.root, digest), layout.LIMITS["source"])
        return data.decode() if data is not None and hashlib.sha256(data).hexdigest() == digest else None

    def all_keys(self) -> list[str]:
        """The key of each record, sound or not, in order."""
        self.admit()
        try:
            names = [path.name for path in (self.root / layout.VERSION / "actions").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._refused(self.root, error)
            return []
        return sorted(name[:64] for name in names if name.endswith(".json") and HEX64.fullmatch(name[:-5]))

    def complain(self, path: Path, what: str) -> None:
        """Warn once about `path`."""
        if self.is_news(path):
            logger.warning("%s is %s", path, what)

    def is_news(self, path: Path) -> bool:
        """Whether nothing was said about `path` yet; from now on something was."""
        known = path in self._complained
        self._complained.add(path)
        return not known

    def _refused(self, path: Path, error: OSError) -> None:
        """Warn of what cannot be read: of one file by its name, of a directory that lets nobody in as a whole."""
        if isinstance(error, PermissionError) and not files.exists(path):
            path = self.root
        if path != self.root:
            self.complain(path, f"unreadable ({error.strerror}) and taken for absent")
        elif self.is_news(path):
            logger.warning(
                "the kernel cache %s cannot be looked into (%s) and is done without; what is compiled stays in memory "
                "and ends with this process: get yourself permission, or name another directory in JITMX_CACHE_DIR",
                path,
                error.strerror,
            )
