"""Taking the kernels of a bundle into a cache.

Every byte of the bundle is checked before the first is written. Then machine code goes in, and records only once all of
it is there: where the disk is full, or the process is killed on the way, no entry has come in, and what lies there is
what a cut-off publish leaves. A record comes in whole or not at all, as in any publish, and only where there is no
sound entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitmx.cache import files
from jitmx.cache.bundle import Bundle, Kernel
from jitmx.cache.store import Store
from jitmx.errors import CacheError


@dataclass(frozen=True)
class Imported:
    """What became of a bundle's entries: keys that came in, that were there, and that a newer jitmx has a record of."""

    added: tuple[str, ...]
    kept: tuple[str, ...]
    newer: tuple[str, ...]


def take_in(bundle: Bundle, store: Store, on_entry: Callable[[Kernel], None] | None = None) -> Imported:
    """Put a bundle's kernels into the cache that `store` writes.

    Args:
        on_entry: called with each entry that comes in.

    Raises:
        BundleError: it is damaged; nothing is written.
        CacheError: the cache cannot be written, or must not be used. What came in before stays, and is sound.
    """
    if store.own is None:
        raise CacheError("a bundle is taken in by a cache on disk, and JITMX_MODE=off has none", "unset JITMX_MODE")
    bundle.check()
    fates: dict[str, list[str]] = {"newer": [], "kept": [], "added": []}
    for key in bundle.of("record"):
        fates["newer" if store.own.holds_newer(key) else "kept" if store.keeps(key) else "added"].append(key)
    wanted = fates["added"]
    try:
        for digest in dict.fromkeys(bundle.record(key).outputs["object"] for key in wanted):
            store.add_object(digest, bundle.object_(digest))
        for digest in bundle.of("scan"):
            scan = bundle.scan(digest)
            if store.own.scan(digest) is None:
                store.keep_scan(digest, scan.headers, scan.source_digest)
        for key in wanted:
            kernel = bundle.kernel(key)
            if store.keeps(key):
                continue  # somebody else has made it meanwhile
            store.add(kernel.record, kernel.image, kernel.source)
            if on_entry:
                on_entry(kernel)
    except OSError as error:
        place = store.own.root
        raise CacheError(
            f"the bundle {bundle.name} cannot be taken in: the kernel cache {place} cannot be written "
            f"({error.strerror or error})",
            f"{files.remedy(error, place)}; or name another directory (--to), or leave the bundle where it is: either "
            "serves as JITMX_SITE_CACHE",
        ) from None
    return Imported(**{fate: tuple(keys) for fate, keys in fates.items()})
