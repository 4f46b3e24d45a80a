"""Looking over a whole cache: what is damaged, dangling or left over, and mending it by taking it out.

Mending never needs more than removal, because whatever is missing is compiled again on its next use.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from jitmx.cache import files, layout, sweep
from jitmx.cache.layout import Item
from jitmx.cache.manifest import NewerSchemaError, Record, Scan
from jitmx.cache.store import Store
from jitmx.cache.tier import Tier
from jitmx.errors import CacheError, JitmxError


class Recompiled(NamedTuple):
    """What compiling a record's source again gives: the key that its inputs have, and the machine code."""

    key: str
    image: bytes


_DAMAGED = (
    "corrupt-folder", "corrupt-object", "corrupt-source", "corrupt-scan", "corrupt-failed", "corrupt-lock",
    "corrupt-ledger", "stray-temporary",
)  # fmt: skip
_RECORDS = ("corrupt-record", "dangling-record", "wrong-key", "unreproducible")
_LEFT_OVER = ("orphan-object", "orphan-source")

# Compiles a record's kept source again; None where the present compiler or headers are not those of the record.
Recompile = Callable[[Record, str], "Recompiled | None"]
# What is wrong with the ledger in a file, in words; None where nothing is, or no ledger is there.
Damage = Callable[[Path], "str | None"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        kind: corrupt-record, corrupt-object, corrupt-source, corrupt-scan: bytes that are not what was written, or
            somebody else's; these and corrupt-failed, corrupt-lock, corrupt-folder: something else in that place;
            corrupt-ledger: what was checked on this machine cannot be read;
            dangling-record: machine code missing or damaged; orphan-object, orphan-source: no record points there;
            stray-temporary: a write that was cut off; unmet-contract: machine code that breaks what its kernel
            promises; wrong-key, unreproducible: found by compiling again.
        path: the file.
        what: the finding in words.
        key: the entry concerned, None where none is.
        mended: whether the repair took it out.
        obstacle: why the repair could not, None where it was not tried or did.
    """

    kind: str
    path: Path
    what: str
    key: str | None = None
    mended: bool = False
    obstacle: str | None = None


@dataclass(frozen=True)
class Report:
    """What was looked at and found.

    Attributes:
        findings: in the order of the files.
        records, objects: how many were looked at.
        newer: records of a newer schema, which are left alone.
        foreign: files that jitmx did not write; they do no harm and are left alone.
        recompiled, skipped: records compiled again, and those that could not be compared.
    """

    findings: tuple[Finding, ...]
    records: int
    objects: int
    newer: tuple[Path, ...] = ()
    foreign: tuple[Path, ...] = ()
    recompiled: int = 0
    skipped: int = 0

    @property
    def unmended(self) -> tuple[Finding, ...]:
        """Findings that still stand."""
        return tuple(finding for finding in self.findings if not finding.mended)


def verify(
    store: Store,
    *,
    repair: bool = False,
    recompile: Recompile | None = None,
    ledger: Damage | None = None,
    grace: float = sweep.GRACE,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Look over the cache that `store` writes; its read-only layers are left to their owners.

    Args:
        repair: take out what is found. An unmet contract stays: compiling again would only find it again.
        recompile: compile each entry again and compare bytes.
        ledger: looks at the ledger beside the entries; None leaves it alone.
        grace: orphans and temporary files younger than this, in seconds, are taken for a publish under way.
        progress: called with the name of each entry before it is compiled again.

    Raises:
        CacheError: the cache must not be used, or cannot be looked into.
    """
    tier = store.own
    if tier is None:
        return Report((), 0, 0)
    try:
        layout.require_readable(tier.root, allow_shared=tier.allow_shared)
    except OSError as error:
        raise CacheError(
            f"the kernel cache {tier.root} cannot be looked into ({error.strerror})",
            "get yourself permission, mend the link, or name another directory in JITMX_CACHE_DIR",
        ) from error
    report = _look(tier, store.clock(), grace, recompile, progress)
    place = layout.ledger(tier.root)
    if ledger and (damage := ledger(place)):
        found = Finding("corrupt-ledger", place, f"the ledger cannot be used: {damage}")
        report = replace(report, findings=(found, *report.findings))
    if not repair:
        return report
    findings = _mend(tier, report.findings, ledger)
    # What a record taken out was the last to need is left over only now.
    while rest := [finding for finding in _look(tier, store.clock(), grace).findings if finding.kind in _LEFT_OVER]:
        more = _mend(tier, rest)
        findings += [finding for finding in more if finding.path not in {known.path for known in findings}]
        if not any(finding.mended for finding in more):
            break
    return replace(report, findings=tuple(sorted(findings, key=lambda finding: finding.path)))


def _look(
    tier: Tier,
    clock: float,
    grace: float,
    recompile: Recompile | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    # Objects are listed before records are read: one published meanwhile is not in the list, or is young.
    items = list(tier.walk())
    records, findings, newer = _read_records(tier, items)
    findings += _files(tier, items, clock, grace)
    recompiled = skipped = 0
    broken = {finding.key for finding in findings}
    for record in records.values() if recompile else ():
        source = tier.source(record.inputs["source_digest"])
        if record.key in broken or source is None:
            skipped += 1
            continue
        if progress:
            progress(record.name)
        again = _again(tier, record, source, recompile) if recompile else None
        recompiled += again is not None
        skipped += again is None
        findings += again or []
    findings.sort(key=lambda finding: finding.path)
    count = sum(item.kind == "object" for item in items)
    foreign = tuple(item.path for item in items if item.kind == "foreign")
    return Report(tuple(findings), len(records), count, tuple(newer), foreign, recompiled, skipped)


def _read_records(tier: Tier, items: list[Item]) -> tuple[dict[str, Record], list[Finding], list[Path]]:
    records: dict[str, Record] = {}
    findings: list[Finding] = []
    newer: list[Path] = []
    for item in items:
        if item.kind != "record":
            continue
        try:
            record = _record(tier, item.path, item.digest)
        except NewerSchemaError:
            newer.append(item.path)
            continue
        except (OSError, ValueError) as error:
            # The message of an OSError repeats the path.
            why = error.strerror if isinstance(error, OSError) else error
            findings.append(Finding("corrupt-record", item.path, f"the record cannot be used: {why}", item.digest))
            continue
        if record is None:
            continue
        records[record.key] = record
        if not _has_object(tier, record):
            what = f"{record.name} ({record.arch}): its machine code is missing or damaged"
            findings.append(Finding("dangling-record", item.path, what, record.key))
        if record.outputs["breaches"]:
            what = f"{record.name} ({record.arch}) breaks its contract: {'; '.join(record.outputs['breaches'])}"
            findings.append(Finding("unmet-contract", item.path, what, record.key))
    return records, findings, newer


def _record(tier: Tier, path: Path, key: str) -> Record | None:
    found = tier.get(path, layout.LIMITS["record"])
    return Record.of(key, found[0]) if found else None


def _has_object(tier: Tier, record: Record) -> bool:
    digest, size = record.outputs["object"], record.outputs["size"]
    path = layout.object_(tier.root, digest)
    return tier.digest(path, min(size, layout.LIMITS["object"])) == (digest, size)


def _is_sound(tier: Tier, kind: str, path: Path, digest: str) -> bool:
    """Whether the bytes of the object or source at `path` are those of its name."""
    found = tier.digest(path, layout.LIMITS[kind])
    return found is not None and found[0] == digest


def _files(tier: Tier, items: list[Item], clock: float, grace: float) -> list[Finding]:
    findings: list[Finding] = []
    used = sweep.references(tier)
    for item in items:
        if item.fault:
            if item.kind != "record":
                what = f"the {item.kind} cannot be used: {item.fault}"
                findings.append(Finding(f"corrupt-{item.kind}", item.path, what))
        elif item.kind in ("object", "source"):
            if not _is_sound(tier, item.kind, item.path, item.digest):
                if os.path.lexists(item.path):
                    what = f"the {item.kind}'s bytes do not match its name"
                    findings.append(Finding(f"corrupt-{item.kind}", item.path, what))
            elif item.digest not in used and sweep.is_old(item.modified, clock, grace):
                findings.append(Finding(f"orphan-{item.kind}", item.path, f"no record points to this {item.kind}"))
        elif item.kind == "scan":
            if not _is_scan(tier, item):
                findings.append(Finding("corrupt-scan", item.path, "the scan's bytes are not what was written"))
        # A file that another sweeper has just moved aside keeps its old time of modification.
        elif item.kind == "temporary" and sweep.is_old(item.changed, clock, grace):
            findings.append(Finding("stray-temporary", item.path, "a write that was cut off"))
    return findings


def _is_scan(tier: Tier, item: Item) -> bool:
    """Whether the scan is sound, or gone. One that no record needs is fine: it may be for a compile to come."""
    try:
        found = tier.get(item.path, layout.LIMITS["scan"])
        return found is None or Scan.of(item.digest, found[0]).digest == item.digest
    except (OSError, ValueError):
        return False


def _again(tier: Tier, record: Record, source: str, recompile: Recompile) -> list[Finding] | None:
    path = layout.action(tier.root, record.key)
    try:
        again = recompile(record, source)
    except JitmxError as error:
        what = f"{record.name} ({record.arch}) does not compile again: {error}"
        return [Finding("unreproducible", path, what, record.key)]
    if again is None:
        return None
    if again.key != record.key:
        what = f"{record.name} ({record.arch}): its inputs have the key {again.key[:12]}"
        return [Finding("wrong-key", path, what, record.key)]
    if hashlib.sha256(again.image).hexdigest() != record.outputs["object"]:
        what = f"{record.name} ({record.arch}): compiled again, the machine code differs"
        return [Finding("unreproducible", path, what, record.key)]
    return []


def _mend(tier: Tier, findings: Sequence[Finding], ledger: Damage | None = None) -> list[Finding]:
    refused: dict[Path, OSError] = {}
    kept = {finding.path for finding in findings if finding.kind == "unmet-contract"}
    # A record is judged by whether its object is there, and an orphan by the records: so each is settled in its turn.
    for kinds in (_DAMAGED, _RECORDS, _LEFT_OVER):
        by_path = {finding.path: finding for finding in findings if finding.kind in kinds}
        moved, failed = sweep.move_aside(tier, by_path)
        refused |= failed
        used = sweep.references(tier)
        sweep.settle(tier, moved, functools.partial(_is_wanted, tier, ledger, by_path, used))
    return [
        replace(finding, obstacle=refused[finding.path].strerror or str(refused[finding.path]))
        if finding.path in refused
        else replace(finding, mended=finding.path not in kept)
        for finding in findings
    ]


def _is_wanted(
    tier: Tier, ledger: Damage | None, findings: dict[Path, Finding], used: set[str], path: Path, aside: Path
) -> bool:
    """Whether the file that was moved aside is not the one that was found, but one published since."""
    match findings[path].kind:
        case "corrupt-object" | "corrupt-source" as kind:
            return _is_sound(tier, kind.removeprefix("corrupt-"), aside, path.stem)
        case "corrupt-folder":
            return files.is_directory(aside) and not aside.is_symlink()
        case "corrupt-ledger":
            return ledger is not None and ledger(aside) is None
        case "orphan-object" | "orphan-source":
            return path.stem in used
        case "corrupt-record" | "dangling-record":
            try:
                record = _record(tier, aside, path.stem)
            except NewerSchemaError:
                return True
            except (OSError, ValueError):
                return False
            return record is not None and _has_object(tier, record)
        case _:
            return False
