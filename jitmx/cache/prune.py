"""Taking out of a cache what is no longer wanted: by target, by age, by reach, by size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from jitmx.cache import layout, sweep
from jitmx.cache.layout import Item
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.store import Store
from jitmx.cache.tier import Tier

_DAY = 86400.0


@dataclass(frozen=True)
class Removal:
    """One file that goes: `kind` as in `layout.Item`, its bytes, why, and for a record its key and name."""

    kind: str
    path: Path
    size: int
    reason: str
    key: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Pruned:
    """What was removed, or would be; `freed` and `kept` are in bytes, `refused` lists what could not be removed."""

    removals: tuple[Removal, ...]
    freed: int
    kept: int
    refused: tuple[Path, ...] = ()


def prune(
    store: Store,
    *,
    max_bytes: int | None = None,
    older_than: float | None = None,
    arches: Collection[str] = (),
    reachable: Callable[[Record], bool] | None = None,
    dry_run: bool = False,
    grace: float = sweep.GRACE,
) -> Pruned:
    """Remove entries, and with them the machine code and sources that nothing else needs.

    Orphans and cut-off writes older than `grace` go in any case. Records of a newer schema and foreign files stay.

    Args:
        max_bytes: remove the least recently used until at most so many bytes are left.
        older_than: remove what was not used for so many seconds.
        arches: remove entries for these targets, such as "sm_90a".
        reachable: remove entries for which this is false: those that nothing would look up any more.
        dry_run: only say what would go.
        grace: seconds during which a file may belong to a publish under way.
    """
    tier = store.own
    if tier is None:
        return Pruned((), 0, 0)
    plan = _Plan(tier, store.clock(), grace)
    for record, item in plan.records.values():
        age = plan.age(item)
        if record.arch in arches:
            plan.drop(record.key, f"for {record.arch}")
        elif older_than is not None and age > older_than:
            since = "dated in the future" if math.isinf(age) else f"not used for {age / _DAY:.1f} days"
            plan.drop(record.key, since)
        elif reachable is not None and not reachable(record):
            plan.drop(record.key, "unreachable: what it was made from has changed")
    if older_than is not None:
        for item in plan.failed:
            if plan.age(item) > older_than:
                plan.drop_failed(item, "a failed compile's source, old")
    if max_bytes is not None:
        plan.shrink(max_bytes)
    removals = plan.removals()
    refused: set[Path] = set()
    if not dry_run:
        removals, refused = _carry_out(tier, plan, removals)
    freed = sum(removal.size for removal in removals)
    return Pruned(tuple(removals), freed, plan.total - freed, tuple(sorted(refused)))


@dataclass
class _Plan:
    """What a cache holds and what of it is to go. `clock` is its file system's, `grace` as for `prune`."""

    tier: Tier
    clock: float
    grace: float
    records: dict[str, tuple[Record, Item]] = field(default_factory=dict)
    parts: dict[str, list[Item]] = field(default_factory=dict)
    failed: list[Item] = field(default_factory=list)
    temporary: list[Item] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    doomed: dict[str, str] = field(default_factory=dict)
    doomed_failed: dict[Path, str] = field(default_factory=dict)
    total: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        for item in self.tier.walk():
            self._add(item)
        # What only records of a newer schema mention counts as used.
        for digest in sweep.references(self.tier, without=self.records):
            self.uses[digest] += 1
        self.left = self.total

    def _add(self, item: Item) -> None:
        if item.kind in ("foreign", "lock") or item.fault:
            # What is no such file at all is for `verify` to find.
            return
        self.total += item.size
        if item.kind == "record" and (found := self.tier.record(item.digest)):
            self.records[item.digest] = (found.record, item)
            self.uses.update(found.record.parts)
        elif item.kind in ("object", "source"):
            self.parts.setdefault(item.digest, []).append(item)
        elif item.kind == "scan" and (source := _scanned(self.tier, item)):
            self.parts.setdefault(source, []).append(item)
        elif item.kind == "failed":
            self.failed.append(item)
        elif item.kind == "temporary":
            self.temporary.append(item)

    def age(self, item: Item) -> float:
        """Seconds since it was last used; infinite where its stamp is from the future, which says nothing."""
        return math.inf if sweep.is_future(item.modified, self.clock) else self.clock - item.modified

    def drop(self, key: str, reason: str) -> None:
        """The entry goes, and each part that no other entry uses."""
        record, item = self.records[key]
        self.doomed[key] = reason
        self.left -= item.size
        for digest in record.parts:
            self.uses[digest] -= 1
            if self.uses[digest] == 0:
                self.left -= sum(part.size for part in self.parts.get(digest, ()))

    def drop_failed(self, item: Item, reason: str) -> None:
        """A failed compile's source goes."""
        self.doomed_failed[item.path] = reason
        self.left -= item.size

    def shrink(self, max_bytes: int) -> None:
        """Failed compiles' sources go, oldest first, then entries, least recently used first, until the rest fits."""
        for digest, parts in self.parts.items():
            self.left -= sum(part.size for part in parts if self._is_orphan(digest, part))
        self.left -= sum(item.size for item in self.temporary if self._is_cut_off(item))
        reason = f"over the limit of {max_bytes} bytes"
        for item in sorted(self.failed, key=self.age, reverse=True):
            if self.left > max_bytes and item.path not in self.doomed_failed:
                self.drop_failed(item, reason)
        for key, _ in sorted(self.records.items(), key=lambda pair: (-self.age(pair[1][1]), pair[0])):
            if self.left > max_bytes and key not in self.doomed:
                self.drop(key, f"{reason}, least recently used")

    def _is_orphan(self, digest: str, part: Item) -> bool:
        return digest not in self.uses and sweep.is_old(part.modified, self.clock, self.grace)

    def _is_cut_off(self, item: Item) -> bool:
        # A file that another sweeper has just moved aside keeps its old time of modification.
        return sweep.is_old(item.changed, self.clock, self.grace)

    def removals(self) -> list[Removal]:
        """Records first, so that no record is left without its object."""
        found = []
        for key, reason in self.doomed.items():
            record, item = self.records[key]
            found.append(Removal("record", item.path, item.size, reason, key, record.name))
        for digest, parts in self.parts.items():
            for part in parts:
                if self._is_orphan(digest, part):
                    found.append(Removal(part.kind, part.path, part.size, "no record points to it"))
                elif digest in self.uses and self.uses[digest] == 0:
                    found.append(Removal(part.kind, part.path, part.size, "only removed records pointed to it"))
        for item in self.failed:
            if item.path in self.doomed_failed:
                found.append(Removal("failed", item.path, item.size, self.doomed_failed[item.path]))
        found += [
            Removal("temporary", item.path, item.size, "a write that was cut off")
            for item in self.temporary
            if self._is_cut_off(item)
        ]
        return found


def _scanned(tier: Tier, item: Item) -> str | None:
    try:
        found = tier.get(item.path, layout.LIMITS["scan"])
        return Scan.of(item.digest, found[0]).source_digest if found else None
    except (OSError, ValueError):
        return None


def _carry_out(tier: Tier, plan: _Plan, removals: list[Removal]) -> tuple[list[Removal], set[Path]]:
    records = [removal for removal in removals if removal.kind == "record"]
    stamps = {item.path: item.modified for _, item in plan.records.values()}
    moved, refused = sweep.move_aside(tier, [removal.path for removal in records])
    # An entry that was used or published again since it was looked at stays.
    gone = sweep.settle(tier, moved, lambda path, aside: _stamp(aside) not in (stamps[path], None))
    others = [removal for removal in removals if removal.kind != "record"]
    moved, refused_too = sweep.move_aside(tier, [removal.path for removal in others])
    used = sweep.references(tier)
    sources = {part.path: digest for digest, parts in plan.parts.items() for part in parts}
    gone |= sweep.settle(tier, moved, lambda path, _aside: sources.get(path, "") in used)
    return [removal for removal in removals if removal.path in gone], {*refused, *refused_too}


def _stamp(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
