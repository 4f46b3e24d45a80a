"""Entries on disk: machine code named by its digest, and the records that say what it was made from.

Who may do what, without a lock
-------------------------------
Everyone who may write there may read, write and remove without a lock. Four facts make that safe:

* Files appear whole. Each is written under a fresh hidden name and renamed; a reader holds the old bytes or the new.
* Names bind contents. An object's name is the digest of its bytes, a record's name is the key that it holds, and a
  record is sealed. A reader checks all three, and reads no more than such a file can hold, so whatever a crash, a
  bad disk or a foreign hand left is a miss.
* Nothing is taken on trust from before. Each time, every directory from the root down is opened by the descriptor of
  the one above, without following links, and must be this user's or root's alone, as must each file, unless sharing is
  allowed; what is renamed, linked or given away between two look-ups is refused at the second.
* Order. An object is on disk before the record that points to it. A record without its object is therefore rare, and
  a miss too.

The lock of a key only saves work: of the processes that need a kernel at once, one compiles. It is a `flock` on a file
that is never removed, so it ends with its holder, however that ends, and two processes never hold locks on two files of
one name. Only who may write to the cache can open it, for whoever can is able to hold it. Where it cannot be had (in
time, or at all) the caller compiles for itself and publishes all the same.

Races, and why each is harmless
-------------------------------
* Two publish one key: either rename may come last. Both hold the same inputs, and each record finds its own object.
* A reader sees a record whose object is being replaced: replacement is a rename, old and new bytes both verify or miss.
* A reader finds the record, then the pruner removes the object: a miss, and it is compiled again.
* A sweeper takes an object that a publisher counts on: the publisher looks for it again after its record is out and
  writes it again if it went; the sweeper, having moved it aside, reads all records again and puts it back if one of
  them names it. Whichever comes last sees the other.
* Two sweepers work at once, and one finds what the other has moved aside: it is no cut-off write, for moving has
  renewed the time at which it was changed; and what is gone at any step, another has taken out.
* A sweeper is killed while a file is aside: what it would have put back is a miss.
* A repairer takes a damaged file just as a sound one replaces it: it moves the file aside, reads it again, and puts it
  back if it is sound.
* On a shared file system a file may be listed and yet not be readable for a while: a miss.
* A date in the future would keep an entry for ever: a look-up sets it right, and a sweeper takes it for old.
* A directory or a link has the place of a file, or a file that of a directory: what is in the way is not read, written
  through or stamped; a repairer takes it out.
* A child forked while its parent holds a lock or publishes owns neither, and can wait for both.

What cannot be written, for want of space or of permission, is kept in this process's memory after one warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitmx import settings
from jitmx.cache import bundle_layer, files, layout
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.tier import Layer, Tier

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger("jitmx.cache")

# A used record's time stamp is renewed at most this often, so that many readers do not write all the time; seconds.
_STAMP_EVERY = 3600.0
# How often a process that waits for a lock looks whether the entry has come by another way; seconds.
_LOOK_EVERY = 0.25


@dataclass(frozen=True)
class Entry:
    """A record with its machine code, verified. `root` is the cache that it came from, None for memory."""

    record: Record
    image: bytes
    root: Path | None


@dataclass(frozen=True)
class Listed:
    """A record on disk: which cache holds it, and when it was last used (seconds since the epoch, to the hour)."""

    record: Record
    root: Path
    used: float


class Store:
    """One user's cache, with read-only layers below it.

    Args:
        root: the cache that is read and written; None keeps everything in memory.
        layers: caches, or bundles, that are read after it and never written.
        installed: read those bundles too that installed wheels have.
        allow_shared: accept directories that other users own or can write to.

    Attributes:
        own: the cache that is written, as readers see it; None where all stays in memory.

    Raises:
        CacheError: here or later, a directory that others own or can write to while `allow_shared` is false.
    """

    def __init__(
        self, root: Path | None, *, layers: Sequence[Path] = (), installed: bool = False, allow_shared: bool = False
    ) -> None:
        self.own = None if root is None else Tier(root, allow_shared=allow_shared)
        below = bundle_layer.layers(layers, allow_shared=allow_shared)
        below += bundle_layer.installed_layers(allow_shared=allow_shared) if installed else []
        self._tiers: list[Layer] = [*([self.own] if self.own else []), *below]
        self._memory: dict[str, Entry] = {}

    @property
    def root(self) -> Path | None:
        """The cache that is written; None where all stays in memory."""
        return self.own.root if self.own else None

    @property
    def layers(self) -> tuple[Path, ...]:
        """The caches that are only read."""
        return tuple(tier.root for tier in self._tiers if tier is not self.own)

    def lookup(self, key: str) -> Entry | None:
        """The entry of `key`, its bytes checked against their digest; None where no sound one is found."""
        if entry := self._memory.get(key):
            return entry
        for tier in self._tiers:
            if (found := tier.record(key)) and (image := tier.image(found.record)) is not None:
                # A stamp from the future would keep the entry for ever.
                if self.own and tier is self.own and abs(time.time() - found.used) > _STAMP_EVERY:
                    with suppress(OSError):
                        self._stamp(self.own, layout.action(tier.root, key), layout.LIMITS["record"])
                return Entry(found.record, image, tier.root)
        return None

    def holds(self, key: str) -> bool:
        """Whether a look-up would find `key` on disk or in memory. Unlike a look-up, this is no use of the entry."""
        return key in self._memory or any(
            (found := tier.record(key)) is not None and tier.image(found.record) is not None for tier in self._tiers
        )

    def publish(self, record: Record, image: bytes, source: str) -> bool:
        """Keep an entry: on disk, or in memory where the disk refuses. True where it is on disk.

        Afterwards `lookup` finds it in this process, whatever the disk did. A record of a newer schema is left alone.
        """
        if self.own and not self.own.holds_newer(record.key):
            try:
                self.add(record, image, source)
            except OSError as error:
                # Another process may have won where renaming over a file is refused: then its entry serves.
                if self.keeps(record.key):
                    return True
                self._degrade(error)
            else:
                return True
        self._memory[record.key] = Entry(record, image, None)
        return False

    def keeps(self, key: str) -> bool:
        """Whether the cache that is written has a sound entry of `key`."""
        return bool(self.own and (found := self.own.record(key)) and self.own.image(found.record) is not None)

    def add(self, record: Record, image: bytes, source: str) -> None:
        """Keep an entry on disk, or in memory where the store is that.

        Raises:
            OSError: the disk refuses it.
        """
        if self.own is None:
            self._memory[record.key] = Entry(record, image, None)
            return
        self._write_entry(self.own, record, image, source)
        self._memory.pop(record.key, None)

    def add_object(self, digest: str, image: bytes) -> None:
        """Keep machine code on disk, for an entry to come; raises as `add`."""
        if self.own and not self._renew(self.own, place := layout.object_(self.own.root, digest), image):
            self._write(self.own, place, image)

    @contextmanager
    def lock(self, key: str, timeout: float, *, until: Callable[[], bool] | None = None) -> Iterator[bool]:
        """Hold the lock of `key` inside the block; yields whether it is held.

        It is not held where another process kept it for `timeout` seconds, where `until` came true meanwhile, and where
        the file system has no locks or cannot be written.
        """
        held = self._acquire(self.own, key, timeout, until) if self.own else None
        try:
            yield held is not None
        finally:
            if held is not None:
                with suppress(OSError):
                    held.release()

    def records(self) -> Iterator[Record]:
        """Every sound record, each key once."""
        return (listed.record for listed in self.listing())

    def listing(self) -> Iterator[Listed]:
        """Every sound record with the cache that holds it; of a key in several, the one that a look-up would read."""
        seen: set[str] = set()
        for tier in self._tiers:
            for key in tier.all_keys():
                if key not in seen and (found := tier.record(key)):
                    seen.add(key)
                    yield Listed(found.record, tier.root, found.used)

    def find(self, text: str) -> list[Record]:
        """Records whose name is `text`; failing that, whose key starts with it; failing that, whose name does."""
        records = [record for record in self.records() if text]
        return (
            [record for record in records if record.name == text]
            or [record for record in records if record.key.startswith(text)]
            or [record for record in records if record.name.startswith(text)]
        )

    def by_source(
        self, source_digest: str, arch: str, options: Sequence[str], header_digest: Callable[[str], str | None]
    ) -> Entry | None:
        """The newest entry made from this source by any NVRTC, for where none is at hand.

        Args:
            header_digest: the present SHA-256 of a header, None where it cannot be had. Every header of the record that
                can be had must be the one that was compiled.
        """
        wanted = (source_digest, arch, list(options))
        found = [
            record
            for record in self.records()
            if (record.inputs["source_digest"], record.arch, record.inputs["options"]) == wanted
            and all(header_digest(name) in (digest, None) for name, digest in record.inputs["headers"].items())
        ]
        entries = (self.lookup(record.key) for record in sorted(found, key=lambda record: -record.created))
        return next((entry for entry in entries if entry), None)

    def source_path(self, key: str) -> Path | None:
        """Where the rendered source of an entry is kept; None where it is not."""
        for tier in self._tiers:
            if (found := tier.record(key)) and (path := tier.source_path(found.record.inputs["source_digest"])):
                return path
        return None

    def source(self, source_digest: str) -> str | None:
        """The rendered source with this digest, verified; None where no sound one is kept."""
        return next((text for tier in self._tiers if (text := tier.source(source_digest)) is not None), None)

    def keep_source(self, source: str) -> None:
        """Keep a rendered source under its digest, if it is not there."""
        data = source.encode()
        digest = hashlib.sha256(data).hexdigest()
        if self.own and not any(tier.has_source(digest) for tier in self._tiers):
            self._try_write(self.own, layout.source(self.own.root, digest), data)

    def keep_failed(self, name: str, source: str) -> str | None:
        """Keep a source that did not compile; its path, or None where nothing can be written."""
        if not self.own:
            return None
        data = source.encode()
        path = layout.failed(self.own.root, name, hashlib.sha256(data).hexdigest())
        return str(path) if self._try_write(self.own, path, data) else None

    def scan(self, digest: str) -> dict[str, str] | None:
        """Headers (name to SHA-256) once found for what `digest` stands for; None where nothing sound is known."""
        return next((found.headers for tier in self._tiers if (found := tier.scan(digest))), None)

    def keep_scan(self, digest: str, headers: Mapping[str, str], source_digest: str) -> None:
        """Remember the headers of a source, for `scan`."""
        if self.own:
            data = Scan(digest, source_digest, dict(headers)).to_json()
            self._try_write(self.own, layout.scan(self.own.root, digest), data)

    def rendered(self, digest: str) -> str | None:
        """The source that was once rendered from what `digest` stands for; None where no sound one is kept."""
        sources = (self.source(found.source_digest) for tier in self._tiers if (found := tier.scan(digest)))
        return next((source for source in sources if source is not None), None)

    def keep_rendered(self, digest: str, source: str) -> None:
        """Remember a source, for `rendered`."""
        self.keep_source(source)
        self.keep_scan(digest, {}, hashlib.sha256(source.encode()).hexdigest())

    def clock(self) -> float:
        """Now by the clock of the cache's file system, seconds since the epoch; that of a file server may be off."""
        if self.own:
            # A file without a name: a process that is killed leaves nothing.
            with suppress(OSError), tempfile.TemporaryFile(dir=self.own.root / layout.VERSION) as probe:
                return os.fstat(probe.fileno()).st_mtime
        return time.time()

    def _write_entry(self, tier: Tier, record: Record, image: bytes, source: str) -> None:
        place = layout.object_(tier.root, record.outputs["object"])
        self.add_object(record.outputs["object"], image)
        self.keep_source(source)
        self._write(tier, layout.action(tier.root, record.key), record.to_json())
        if not tier.has(place, len(image)):
            self._write(tier, place, image)

    def _renew(self, tier: Tier, place: Path, image: bytes) -> bool:
        """Whether `place` holds `image`; if so its time stamp says now, which keeps a sweeper away."""
        try:
            found = tier.get(place, len(image))
            if found is None or found[0] != image:
                return False
            self._stamp(tier, place, len(image))
        except OSError:
            return False
        return True

    def _stamp(self, tier: Tier, path: Path, limit: int) -> None:
        """Let the time stamp of a file say now; what has its place meanwhile, such as a link, is left alone."""
        with (
            tier.within(path) as directory,
            files.opened(path, limit, within=directory, allow_shared=tier.allow_shared) as (descriptor, _),
        ):
            os.utime(descriptor)

    def _write(self, tier: Tier, path: Path, data: bytes, *, sync: bool = True) -> None:
        try:
            self._write_once(tier, path, data, sync)
        except FileNotFoundError:
            # Somebody removed the directory or the temporary file under our hands.
            self._write_once(tier, path, data, sync)

    def _write_once(self, tier: Tier, path: Path, data: bytes, sync: bool) -> None:
        permissions = self._prepare(tier)
        with tier.within(path, make=permissions) as directory:
            files.write(path, data, permissions=permissions & 0o666, sync=sync, within=directory)

    def _prepare(self, tier: Tier) -> int:
        """Make the root; the permissions that a directory below it is to have, which follow its own."""
        files.make_directory(tier.root)
        return files.permissions_of(tier.root)

    def _try_write(self, tier: Tier, path: Path, data: bytes) -> bool:
        # Sources and scans can be made again and are known by their digests: not worth waiting for the disk.
        try:
            self._write(tier, path, data, sync=False)
        except OSError as error:
            self._degrade(error)
            return False
        return True

    def _acquire(self, tier: Tier, key: str, timeout: float, until: Callable[[], bool] | None) -> BaseFileLock | None:
        from filelock import FileLock, Timeout

        path = layout.lock(tier.root, key)
        deadline = time.monotonic() + timeout
        try:
            permissions = self._prepare_lock(tier, path)
            lock = FileLock(path, mode=permissions, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
            while True:
                try:
                    lock.acquire(timeout=max(0.0, min(_LOOK_EVERY, deadline - time.monotonic())))
                    return lock
                except Timeout:
                    if until is not None and until():
                        return None
                    if time.monotonic() >= deadline:
                        logger.warning("%s was held by another process for %g s; going on without it", path, timeout)
                        return None
        except OSError as error:
            logger.debug("there is no lock to be had at %s (%s)", path, error)
            return None

    def _prepare_lock(self, tier: Tier, path: Path) -> int:
        """Make the directory of locks; the permissions of a lock there.

        Whoever can open a lock, if only to read, can hold it: so only those can who may write to the cache.
        """
        permissions = self._prepare(tier)
        writers = permissions & 0o022
        own = files.PRIVATE | writers << 1 | writers | writers >> 1
        with tier.within(path.parent, make=permissions):
            pass
        with tier.within(path, make=own) as directory:
            # An older jitmx gave locks the permissions of the cache.
            files.restrict(path, own, within=directory)
        return own & 0o666

    def _degrade(self, error: OSError) -> None:
        if self.own and self.own.is_news(self.own.root):
            logger.warning(
                "the kernel cache %s cannot be written (%s), so kernels compiled from here on stay in memory and end "
                "with this process: %s, or name another directory in JITMX_CACHE_DIR",
                self.root,
                error.strerror or error,
                files.remedy(error, self.own.root),
            )


_stores: dict[tuple[Any, ...], Store] = {}


def current() -> Store:
    """The cache that the settings name; one object per process.

    Raises:
        CacheError: it must not be used; the message says why and what to do.
    """
    now = settings.current()
    place = (now.cache_dir, now.site_cache, now.allow_shared_cache, now.bundle_keys)
    if (found := _stores.get(place)) is None:
        found = Store(now.cache_dir, layers=now.site_cache, installed=True, allow_shared=now.allow_shared_cache)
    # setdefault keeps two threads from going on with a store each, and so with a memory each.
    return _stores.setdefault(place, found)
