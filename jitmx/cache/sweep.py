"""Taking files out of a live cache: they are moved aside, looked at again, and put back if they are wanted after all.

So no lock is needed: whoever publishes meanwhile either finds its file gone and writes it again, or has its record read
before anything is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from jitmx.cache import files, layout
from jitmx.cache.manifest import NewerSchemaError, Record, hexadecimals
from jitmx.cache.tier import Tier

# A file younger than this may belong to a publish under way, whose record is not out yet; seconds.
GRACE = 3600.0


def references(tier: Tier, *, without: Iterable[str] = ()) -> set[str]:
    """Digests of the objects and sources that the records of `tier`, but for the keys in `without`, point to."""
    left_out = set(without)
    found: set[str] = set()
    for key in tier.all_keys():
        if key not in left_out:
            found |= _mentioned(layout.action(tier.root, key))
    return found


def _mentioned(path: Path) -> set[str]:
    try:
        found = files.read(path, layout.LIMITS["record"])
        if found is None:
            return set()
        record = Record.from_json(found[0])
    except NewerSchemaError:
        # What a newer jitmx calls its members is unknown, but a digest looks like a digest.
        return hexadecimals(found[0]) if found else set()
    except (OSError, ValueError):
        return set()
    return {record.outputs["object"], record.inputs["source_digest"]}


def move_aside(paths: Iterable[Path]) -> tuple[dict[Path, Path], dict[Path, OSError]]:
    """Rename each file to a temporary name; old to new names, and what could not be moved. Files gone are left out."""
    moved: dict[Path, Path] = {}
    refused: dict[Path, OSError] = {}
    for path in paths:
        aside = files.temporary_beside(path)
        try:
            path.rename(aside)
        except FileNotFoundError:
            continue
        except OSError as error:
            refused[path] = error
        else:
            moved[path] = aside
    return moved, refused


def settle(moved: dict[Path, Path], wanted: Callable[[Path, Path], bool]) -> set[Path]:
    """Put back each file that is `wanted` (asked with its old and new name) and remove the others; those removed."""
    gone: set[Path] = set()
    for path, aside in moved.items():
        if wanted(path, aside):
            # A link, not a rename: where somebody has published anew meanwhile, the newer file stays.
            try:
                os.link(aside, path)
            except FileExistsError:
                pass
            except OSError:
                # No hard links on this file system.
                if not files.exists(path):
                    aside.rename(path)
        else:
            gone.add(path)
        with suppress(FileNotFoundError):
            aside.unlink()
    return gone
