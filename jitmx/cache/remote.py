"""A cache that hosts share by a URL: looked in after all others, and written to where that was asked for.

    <URL>/v1/entries/ab/<key>.jitmx     a bundle of one entry
    <URL>/v1/scans/ab/<digest>.jitmx    a bundle of one scan: which headers a source includes
    <URL>/v1/claims/<key>.<number>      who compiles it now (`claim`)

Each is a bundle, checked as any other before anything of it is used: every byte by its digests and, where keys are
required, by a signature. An entry is one file, so that it is there whole or not at all; whatever else a crash, a
truncation or a foreign hand left is a miss. A remote that fails costs one warning, and time as `answers` bounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jitmx import resources, settings
from jitmx.cache import bundle, bundle_layer, claim, keys, layout
from jitmx.cache.answers import Answers, Unanswered
from jitmx.cache.bundle import Bundle, Kernel
from jitmx.cache.manifest import Scan
from jitmx.errors import BundleError, JitmxError, SettingError

logger = logging.getLogger("jitmx.cache")

# Bytes of a bundle of one entry at most, which are held in memory, and of one scan.
_MOST_ENTRY = 64 << 20
_MOST_SCAN = 3 * layout.LIMITS["scan"]


class Remote:
    """A remote cache.

    Args:
        url: of its folder, as fsspec takes it.
        timeout: seconds to wait for each answer.
        trusted: raw public keys, one of which must have signed what is read; None takes it as it is.
        writes: what is compiled here is written there.
        key: signs what is written, or None.
    """

    def __init__(
        self, url: str, *, timeout: float, trusted: Mapping[bytes, Path] | None, writes: bool, key: Any = None
    ) -> None:
        self.url = url
        self.writes = writes
        self._answers = Answers(url, timeout)
        self._trusted = trusted
        self._key = key
        self._refused = False

    def entry(self, key: str) -> Kernel | None:
        """The entry of `key`, verified; None where there is none to be had."""
        found = self._read(_place("entries", key), _MOST_ENTRY)
        if found is None:
            return None
        try:
            if found.of("record") != [key]:
                raise BundleError(f"it is no bundle of {key[:12]} alone")
            found.check()
            return found.kernel(key)
        except BundleError as error:
            self._refuse(found.name, error)
            return None

    def scan(self, digest: str) -> Scan | None:
        """What is known of the headers of `digest`; None where nothing is to be had."""
        found = self._read(_place("scans", digest), _MOST_SCAN)
        if found is None:
            return None
        try:
            if found.of("scan") != [digest]:
                raise BundleError(f"it is no bundle of {digest[:12]} alone")
            found.check()
            return found.scan(digest)
        except BundleError as error:
            self._refuse(found.name, error)
            return None

    def put(self, kernel: Kernel) -> None:
        """Write an entry, if this cache is written and answers."""
        if self.writes:
            data = bundle.make([kernel], [], _made(), self._key)
            if len(data) <= _MOST_ENTRY:
                self._write(_place("entries", kernel.record.key), data)

    def put_scan(self, scan: Scan) -> None:
        """Write which headers a source includes, if this cache is written and answers."""
        if self.writes:
            self._write(_place("scans", scan.digest), bundle.make([], [scan], _made(), self._key))

    @contextmanager
    def alone(self, key: str, patience: float) -> Iterator[Kernel | None]:
        """Yields the entry of `key`, or None, where the caller is to compile it.

        Of all hosts that write to this cache one is told to; the others wait for it, `patience` seconds at most.
        """
        if not self.writes:
            yield self.entry(key)
            return
        with claim.alone(self._answers, f"{layout.VERSION}/claims/{key}", patience, lambda: self.entry(key)) as found:
            yield found

    def _read(self, path: str, limit: int) -> Bundle | None:
        try:
            data = self._answers.read(path, limit)
        except Unanswered:
            return None
        if data is None:
            return None
        name = f"{self.url}/{path}"
        try:
            if len(data) > limit:
                raise BundleError(f"{name} is larger than such a file can be ({limit} bytes)")
            return bundle.of_bytes(name, data, trusted=self._trusted)
        except BundleError as error:
            self._refuse(name, error)
            return None

    def _write(self, path: str, data: bytes) -> None:
        with suppress(Unanswered):
            self._answers.write(path, data)

    def _refuse(self, name: str, error: BundleError) -> None:
        """Warn of the first file that is refused; of the others, which may be many, tell those who ask for more."""
        log = logger.info if self._refused else logger.warning
        self._refused = True
        log("%s is taken for absent: %s", name, error)


def _place(kind: str, digest: str) -> str:
    return f"{layout.VERSION}/{kind}/{digest[:2]}/{digest}{bundle.SUFFIX}"


def _made() -> dict[str, Any]:
    return {"jitmx": resources.release()}


_remotes: dict[tuple[Any, ...], Remote | None] = {}


def current() -> Remote | None:
    """The remote cache that the settings name; None where there is none, or where its keys cannot be used."""
    now = settings.current()
    if now.remote_cache is None or now.mode == "off":
        return None
    place = (now.remote_cache, now.remote_write, now.remote_timeout, now.bundle_keys, now.signing_key)
    if place not in _remotes:
        _remotes.setdefault(place, _opened(now))
    return _remotes[place]


def _opened(now: settings.Settings) -> Remote | None:
    assert now.remote_cache is not None
    try:
        trusted = bundle_layer.trusted()
    except SettingError as error:
        logger.warning("%s; going on without the remote cache %s", error, now.remote_cache)
        return None
    writes, key = now.remote_write, None
    try:
        if writes and now.signing_key:
            key = keys.private_key(now.signing_key)
        if writes and key is None and trusted is not None:
            raise SettingError("what is written there is to be signed, and JITMX_SIGNING_KEY names no key")
    except JitmxError as error:
        logger.warning("%s; going on without writing to the remote cache %s", error, now.remote_cache)
        writes = False
    return Remote(now.remote_cache, timeout=now.remote_timeout, trusted=trusted, writes=writes, key=key)
