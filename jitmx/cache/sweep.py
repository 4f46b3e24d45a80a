"""Taking files out of a live cache: they are moved aside, looked at again, and put back if they are wanted after all.

So no lock is needed: whoever publishes meanwhile either finds its file gone and writes it again, or has its record read
before anything is lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from jitmx.cache import files, layout
from jitmx.cache.manifest import NewerSchemaError, Record, hexadecimals
from jitmx.cache.tier import Tier

# A file younger than this may belong to a publish under way, whose record is not out yet; seconds.
GRACE = 3600.0


def is_future(stamp: float, clock: float) -> bool:
    """Whether a time stamp is later than `clock`, that of the file system: it says nothing, and never would."""
    return stamp > clock + GRACE


def is_old(stamp: float, clock: float, grace: float) -> bool:
    """Whether a file with this time stamp can belong to no publish under way."""
    return stamp < clock - grace or is_future(stamp, clock)


def references(tier: Tier, *, without: Iterable[str] = ()) -> set[str]:
    """Digests of the objects and sources that the records of `tier`, but for the keys in `without`, point to."""
    left_out = set(without)
    found: set[str] = set()
    for key in tier.all_keys():
        if key not in left_out:
            found |= _mentioned(tier, key)
    return found


def _mentioned(tier: Tier, key: str) -> set[str]:
    found = None
    try:
        found = tier.get(layout.action(tier.root, key), layout.LIMITS["record"])
        if found is None:
            return set()
        return Record.from_json(found[0]).parts
    except NewerSchemaError:
        # What a newer jitmx calls its members is unknown, but a digest looks like a digest.
        return hexadecimals(found[0]) if found else set()
    except (OSError, ValueError):
        return set()


def move_aside(tier: Tier, paths: Iterable[Path]) -> tuple[dict[Path, Path], dict[Path, OSError]]:
    """Rename each file to a temporary name; old to new names, and what could not be moved. Files gone are left out."""
    moved: dict[Path, Path] = {}
    refused: dict[Path, OSError] = {}
    for path in paths:
        aside = files.temporary_beside(path)
        try:
            with tier.within(path) as directory:
                os.rename(path.name, aside.name, src_dir_fd=directory, dst_dir_fd=directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            refused[path] = error
        else:
            moved[path] = aside
    return moved, refused


def settle(tier: Tier, moved: dict[Path, Path], wanted: Callable[[Path, Path], bool]) -> set[Path]:
    """Put back each file that is `wanted` (asked with its old and new name) and remove the others; those removed.

    Another sweeper may take any of them for a write that was cut off, and remove it first.
    """
    gone: set[Path] = set()
    for path, aside in moved.items():
        keep = wanted(path, aside)
        if not keep:
            gone.add(path)
        with suppress(FileNotFoundError), tier.within(path) as directory:
            if keep:
                _put_back(path.name, aside.name, directory)
            _remove(aside.name, directory)
    return gone


def _put_back(name: str, aside: str, within: int) -> None:
    # A link, not a rename: where somebody has published anew meanwhile, the newer file stays.
    try:
        os.link(aside, name, src_dir_fd=within, dst_dir_fd=within, follow_symlinks=False)
    except FileExistsError:
        pass
    except OSError:
        # No hard links on this file system, or a directory.
        try:
            os.stat(name, dir_fd=within, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(aside, name, src_dir_fd=within, dst_dir_fd=within)


def _remove(name: str, within: int) -> None:
    try:
        os.unlink(name, dir_fd=within)
    except IsADirectoryError:
        # What stays of it is found as a write that was cut off.
        shutil.rmtree(name, ignore_errors=True, dir_fd=within)
