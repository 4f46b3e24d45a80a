"""Bundles that are looked into where they lie, like site caches: those that are named, and those of installed wheels.

A wheel that has one names it among its entry points, of the group `jitmx.bundles`: `kernels = "acme.data"` stands for
the file `acme/data/kernels.jitmx`. It is found by the metadata of the wheel; nothing of the wheel is imported.
What reads metadata and bundles is imported where there are some.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from jitmx import settings
from jitmx.cache import files
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.tier import Found, Layer, Tier
from jitmx.errors import BundleError, CacheError, JitmxError

if TYPE_CHECKING:
    from jitmx.cache.bundle import Bundle

logger = logging.getLogger("jitmx.cache")

GROUP = "jitmx.bundles"
_PACKAGE = re.compile(r"\w+(?:\.\w+)*")
_FILE = re.compile(r"\w[\w.-]*")


class BundleLayer:
    """A bundle as readers of a cache see it: what is damaged in it counts as absent, after one warning.

    Attributes:
        root: the file.
    """

    def __init__(self, root: Path, bundle: Bundle) -> None:
        self.root = root.absolute()
        self._bundle = bundle
        self._dated = root.stat().st_mtime
        self._complained = False

    def record(self, key: str) -> Found | None:
        """As `Layer.record`; when it was used is not known, but how old the file is."""
        if not self._bundle.has("record", key):
            return None
        try:
            return Found(self._bundle.record(key), self._dated)
        except BundleError as error:
            self._complain(error)
            return None

    def image(self, record: Record) -> bytes | None:
        """As `Layer.image`."""
        if not self._bundle.has("object", record.outputs["object"]):
            return None
        try:
            return self._bundle.image(record)
        except BundleError as error:
            self._complain(error)
            return None

    def source(self, digest: str) -> str | None:
        """As `Layer.source`."""
        if not self._bundle.has("source", digest):
            return None
        try:
            return self._bundle.source(digest)
        except BundleError as error:
            self._complain(error)
            return None

    def has_source(self, digest: str) -> bool:
        """As `Layer.has_source`."""
        return self._bundle.has("source", digest)

    def source_path(self, digest: str) -> Path | None:
        """None: it is no file of its own."""
        return None

    def scan(self, digest: str) -> Scan | None:
        """As `Layer.scan`."""
        if not self._bundle.has("scan", digest):
            return None
        try:
            return self._bundle.scan(digest)
        except BundleError as error:
            self._complain(error)
            return None

    def all_keys(self) -> list[str]:
        """As `Layer.all_keys`."""
        return self._bundle.of("record")

    def _complain(self, error: BundleError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s; what is damaged in it is taken for absent", error)


def layers(places: Sequence[Path], *, allow_shared: bool) -> list[Layer]:
    """Site caches, each a directory or a bundle; a bundle that is refused is done without, after a warning.

    Raises:
        CacheError: others own one of them or can write to it while `allow_shared` is false.
    """
    found: list[Layer] = []
    for place in places:
        if files.exists(place) and not files.is_directory(place):
            found += _opened(place, allow_shared=allow_shared)
            continue
        tier = Tier(place, allow_shared=allow_shared)
        if not files.is_directory(tier.root) and tier.is_news(tier.root):
            logger.warning("the site cache %s is not there; going on without it", tier.root)
        found.append(tier)
    return found


def installed_layers(*, allow_shared: bool) -> list[Layer]:
    """The bundles of installed wheels; one that is refused is done without, after a warning."""
    found: list[Layer] = []
    for _, place in installed():
        try:
            found += _opened(place, allow_shared=allow_shared)
        except CacheError as error:
            logger.warning("%s; going on without it", error)
    return found


def installed() -> Iterator[tuple[str, Path]]:
    """The bundles that installed wheels name, in order: "WHEEL:NAME", and the file."""
    if not _may_be_named():
        return
    from importlib import metadata

    from jitmx.cache import bundle

    named: dict[str, Path] = {}
    try:
        points = metadata.entry_points(group=GROUP)
    except Exception as error:  # the metadata of any package here may be damaged in any way
        logger.warning("the metadata of installed packages cannot be read (%r); no bundle of a wheel is found", error)
        return
    for point in points:
        if point.dist is None or not (_PACKAGE.fullmatch(point.value) and _FILE.fullmatch(point.name)):
            continue
        place = point.dist.locate_file("/".join([*point.value.split("."), f"{point.name}{bundle.SUFFIX}"]))
        if isinstance(place, os.PathLike):  # a member of an archive is not
            named.setdefault(f"{point.dist.name}:{point.name}", Path(place))
    yield from sorted(named.items())


def _may_be_named() -> bool:
    """Whether the metadata of any package has the name of the group; true where only `importlib.metadata` can say."""
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    return any(hasattr(finder, "find_distributions") for finder in others) or any(map(_may_name, sys.path))


def _may_name(place: str) -> bool:
    if place.lower().endswith(".egg"):
        return True
    try:
        with os.scandir(place or ".") as found:
            packages = [entry.path for entry in found if entry.name.lower().endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False  # an archive, whose members are no files, or nothing at all
    for package in packages:
        try:
            if GROUP.encode() in Path(package, "entry_points.txt").read_bytes():
                return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return False


def trusted() -> dict[bytes, Path] | None:
    """The keys that JITMX_BUNDLE_KEYS names; None where it is not set, and bundles need no signature.

    Raises:
        SettingError: as `keys.public_keys`.
    """
    from jitmx.cache import keys

    places = settings.current().bundle_keys
    return keys.public_keys(places) if places else None


def _opened(place: Path, *, allow_shared: bool) -> list[Layer]:
    from jitmx.cache import bundle

    try:
        return [BundleLayer(place, bundle.open_(place, trusted=trusted(), own=not allow_shared))]
    except CacheError:
        raise
    except JitmxError as error:
        logger.warning("%s; going on without the bundle %s", error, place)
        return []
