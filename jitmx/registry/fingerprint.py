"""What the source of a variant is rendered from, as a digest that takes no rendering."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from jitmx import resources, settings
from jitmx.registry import render
from jitmx.registry.key import frame
from jitmx.registry.spec import Variant

Stamp = tuple[int, int, int, int]  # times of content and of the file, size and number

_lock = threading.Lock()


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)


@dataclass(frozen=True)
class _Templates:
    """The templates of some folders, as they were read.

    Attributes:
        stamps: of each folder and file, what the file system says of it.
        digest: of all of them, and of what renders them.
    """

    stamps: Mapping[Path, Stamp | None]
    digest: str


_read: dict[tuple[Path, ...], _Templates] = {}


class Fingerprint:
    """What a source is rendered from: templates, what they see and what renders them.

    Attributes:
        digest: SHA-256 of all of it, 64 hexadecimal digits.
    """

    def __init__(self, variant: Variant) -> None:
        self._templates = _templates()
        seen = {
            "arch": {**dataclasses.asdict(variant.arch), "features": sorted(variant.arch.features)},
            "threads": variant.threads,
            "shared_bytes": variant.spec.shared_bytes(variant.knobs),
            **variant.knobs.as_dict(),
        }
        self.digest = frame(
            [
                ("templates", self._templates.digest.encode()),
                ("template", variant.spec.template.encode()),
                ("header", render.header(variant).encode()),
                ("arguments", variant.arguments.source.encode()),
                *((name, repr(value).encode()) for name, value in sorted(seen.items())),
            ]
        )

    def holds(self) -> bool:
        """Whether the templates are still those: what has been rendered since is what the digest stands for."""
        return _templates() is self._templates


def _templates() -> _Templates:
    """The templates as they are now: edited ones are read again, here and by what renders."""
    roots = resources.directories("templates", settings.current().families)
    with _lock:
        known = _read.get(roots)
        if known is None or any(_stamp(path) != stamp for path, stamp in known.stamps.items()):
            known = _read[roots] = _read_all(roots)
            render._environment.cache_clear()
        return known


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read_all(roots: tuple[Path, ...]) -> _Templates:
    stamps: dict[Path, Stamp | None] = {}
    parts = [("jinja", jinja2.__version__.encode()), ("code", Path(render.__file__).read_bytes())]
    for root in roots:
        files = sorted(root.rglob("*.j2"))
        folders = {parent for file in files for parent in file.parents if parent.is_relative_to(root)}
        stamps |= {path: _stamp(path) for path in (root, *folders, *files)}  # before they are read
        parts += [(f"template {file.relative_to(root).as_posix()}", file.read_bytes()) for file in files]
    return _Templates(stamps, frame(parts))
