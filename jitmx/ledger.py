"""What was checked where: the evidence that a kernel is right, by the digest of its code.

An entry holds for exactly one code and one target. The digest covers the rendered source and jitmx's own headers that
it includes, so that an edit to either withdraws the evidence. `tactics/ledger.json` ships with jitmx:

    {"schema_version": 1, "entries": [{"source_digest", "arch", "kernel", "evidence", "card", "date", "error", "note"}]}
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import json_rows, resources, settings
from jitmx.cache import files, layout
from jitmx.cache.manifest import NewerSchemaError
from jitmx.errors import TacticError, ToolchainError
from jitmx.quoting import short
from jitmx.registry import key

logger = logging.getLogger("jitmx.ledger")

SCHEMA_VERSION = 1

# From weakest to strongest.
KINDS = ("none", "compiled", "simulated", "hardware")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](jitmx/[^>"]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One check of one code on one target.

    Attributes:
        source_digest: `digest(source)` of the code that was checked.
        arch: target that it was compiled for, `sm_121a`.
        kernel: name of the variant, for readers.
        evidence: "hardware", "simulated" or "compiled".
        card: the GPU it ran on; "" for evidence without one.
        date: day of the check, YYYY-MM-DD.
        error: largest relative L2 error against float64; None where results are exact or were not compared.
        note: what was checked, in a few words.
        proof: of simulated evidence, what it rests on (`jitmx.sim.proof`); of compiled evidence, the same of a contract
            that the machine code keeps.
        made: of simulated evidence, what it rests on with all that the PTX is compiled from in place of the PTX.
        cases, coverage: of simulated evidence, how many cases ran, and the share of the kernel's PTX lines that did.
        code: of hardware evidence, a digest of the machine code that the recording machine's NVRTC makes of the source:
            a change that leaves it the same leaves the evidence (`scripts/record_evidence.py`).
    """

    source_digest: str
    arch: str
    kernel: str
    evidence: str
    card: str = ""
    date: str = ""
    error: float | None = None
    note: str = ""
    proof: str = ""
    cases: int = 0
    coverage: float | None = None
    code: str = ""
    made: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Shown on terminals, and compared with one another.
            if field.name == "cases":
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise TacticError("cases is no whole number of at least 0")
            elif field.name in ("error", "coverage"):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if value is not None and not (is_number and 0 <= value < math.inf):
                    raise TacticError(f"{field.name} is no number of at least 0")
            elif not (isinstance(value, str) and value.isprintable()):
                raise TacticError(f"{field.name} is no printable text")
        if not re.fullmatch(r"[0-9a-f]{64}", self.source_digest):
            raise TacticError(f"source_digest {self.source_digest!r} is not 64 hexadecimal digits")
        if self.evidence not in KINDS[1:]:
            raise TacticError(f"evidence {self.evidence!r} is not one of {', '.join(KINDS[1:])}")
        if self.evidence == "hardware" and not (self.card and self.date):
            raise TacticError(f"hardware evidence for {self.kernel} names no card or no date", "give both")


def digest(source: str, root: Path | None = None) -> str:
    """SHA-256 of a rendered source and of jitmx's headers that it includes, directly or not.

    Args:
        root: the folder of headers; by default that of this installation.

    Raises:
        ToolchainError: a header is missing.
    """
    folder = root or resources.directory("templates") / "include"
    texts: dict[str, bytes] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name not in texts:
            try:
                texts[name] = (folder / name).read_bytes()
            except OSError as error:
                raise ToolchainError(f"header {name} is not in {folder}: {error.strerror}") from error
            waiting += _INCLUDE.findall(texts[name].decode())
    headers = [(f"header {name}", texts[name]) for name in sorted(texts)]
    return key.frame([("source", source.encode()), *headers])


class Ledger:
    """Entries, asked by code and target."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self._best: dict[tuple[str, str], Entry] = {}
        for entry in self.entries:
            held = self._best.get((entry.source_digest, entry.arch))
            # The stronger evidence counts, and of equally strong the later.
            if held is None or (KINDS.index(held.evidence), held.date) <= (KINDS.index(entry.evidence), entry.date):
                self._best[entry.source_digest, entry.arch] = entry

        self._proven = {proof: entry for entry in self.entries for proof in (entry.proof, entry.made) if proof}

    def proven(self, proof: str) -> Entry | None:
        """The evidence that rests on just what `proof` stands for, an entry's own or what it was made from, or None."""
        return self._proven.get(proof)

    def best(self, source_digest: str, arch: str) -> Entry | None:
        """The strongest evidence for this code on this target, or None."""
        return self._best.get((source_digest, arch))


def load(path: Path | None = None) -> Ledger:
    """The ledger at `path`, by default the one that ships with jitmx; a missing file is an empty ledger.

    Raises:
        TacticError: the file is not a ledger, or cannot be read; the message names the entry at fault.
    """
    remedy = "mend or remove it" if path else "reinstall jitmx"
    path = path or resources.directory("tactics") / "ledger.json"
    try:
        return Ledger(_entries(path))
    except OSError as error:
        raise TacticError(f"{path} cannot be read as a ledger: {error.strerror}", remedy) from error
    except NewerSchemaError as error:
        raise TacticError(f"{path} is of a newer jitmx: {error}", "upgrade jitmx, or remove it") from error
    except ValueError as error:
        raise TacticError(f"{path} is not a ledger: {error}", remedy) from error


def damage(path: Path) -> str | None:
    """What is wrong with the ledger at `path`, in words; None where it is sound, another's, a newer jitmx's or none."""
    try:
        _entries(path)
    except (PermissionError, NewerSchemaError):
        return None
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def _entries(path: Path) -> list[Entry]:
    """The entries of a file; none where there is no file.

    Raises:
        OSError: it cannot be read.
        NewerSchemaError: it is of a newer jitmx.
        ValueError: it is no ledger.
    """
    # A ledger that ships may be linked to where an installer keeps its files.
    found = files.read(path, layout.LIMITS["ledger"], follow=True)
    if found is None:
        return []
    try:
        document: Any = json.loads(found[0])
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    version, rows = document.get("schema_version"), document.get("entries")
    if not isinstance(version, int):
        raise ValueError("its schema version is no number")
    if version != SCHEMA_VERSION:
        kind = NewerSchemaError if version > SCHEMA_VERSION else ValueError
        raise kind(f"it has schema version {short(version)}; this jitmx reads {SCHEMA_VERSION}")
    if not isinstance(rows, list):
        raise ValueError("its entries are no list")
    return [_entry(number, row) for number, row in enumerate(rows)]


def _entry(number: int, row: Any) -> Entry:
    if not isinstance(row, dict):
        raise ValueError(f"entry {number} is no object")
    fields = dataclasses.fields(Entry)
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in row]:
        raise ValueError(f"entry {number} has no {' and no '.join(missing)}")
    if unknown := row.keys() - {field.name for field in fields}:
        raise ValueError(f"entry {number} has {short(min(unknown))}, which no entry has")
    try:
        return Entry(**row)
    except TacticError as error:
        raise ValueError(f"entry {number}: {error.message}") from error


def own_path() -> Path:
    """Where checks made on this machine are noted, beside the kernels that they are of."""
    return layout.ledger(settings.current().cache_dir)


def known() -> Ledger:
    """What ships with jitmx together with what was checked on this machine.

    Of the latter nothing where it is damaged, of which a warning tells, or where it may not be read.

    Raises:
        TacticError: what ships is not a ledger.
    """
    try:
        own = load(own_path())
    except TacticError as error:
        if not isinstance(error.__cause__, PermissionError):
            logger.warning(
                "%s; going on without what was checked on this machine: %s", error.message, own_remedy(error)
            )
        own = Ledger(())
    return Ledger([*load().entries, *own.entries])


def own_remedy(error: TacticError) -> str:
    """What to do about the ledger of this machine, which `load` refused."""
    mendable = not isinstance(error.__cause__, PermissionError | NewerSchemaError)
    return "`jitmx cache verify --repair` takes it out" if mendable else error.remedy


def save(entries: Iterable[Entry], path: Path) -> None:
    """Write a ledger in a stable order: of each code, target, evidence and card, or note without one, the latest."""
    latest: dict[tuple[str, str, str, str], Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.date):
        latest[entry.source_digest, entry.arch, entry.evidence, entry.card or entry.note] = entry
    ordered = sorted(latest.values(), key=lambda one: (one.arch, one.kernel, one.evidence, one.card or one.note))
    document = {"schema_version": SCHEMA_VERSION, "entries": [_told(entry) for entry in ordered]}
    files.write_named(path, json_rows.text(document, "entries").encode(), permissions=0o644)


def _told(entry: Entry) -> dict[str, Any]:
    """The fields of an entry that say something."""
    return {
        item.name: value for item in dataclasses.fields(entry) if (value := getattr(entry, item.name)) != item.default
    }
