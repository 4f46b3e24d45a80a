"""How much a cache holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jitmx.cache.store import Store


def measure(store: Store) -> dict[str, Any]:
    """Counts and bytes of the cache that `store` writes.

    Returns `path`; `files`, which maps each kind of file (see `layout.Item`) to its `count` and `bytes`; `bytes`, their
    sum; `entries` by family and by target; and `layers`, the number of entries in each read-only cache.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    if store.own is not None:
        for item in store.own.walk():
            counts[item.kind] += 1
            sizes[item.kind] += item.size
    listed = list(store.listing())
    own = [entry.record for entry in listed if entry.root == store.root]
    return {
        "path": str(store.root) if store.root else None,
        "bytes": sum(sizes.values()),
        "files": {kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)},
        "entries": {
            "count": len(own),
            "by_family": dict(sorted(Counter(record.family for record in own).items())),
            "by_arch": dict(sorted(Counter(record.arch for record in own).items())),
        },
        "layers": {str(layer): sum(entry.root == layer for entry in listed) for layer in store.layers},
    }
