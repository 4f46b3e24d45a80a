"""What was checked where: the evidence that a kernel is right, by the digest of its code.

An entry holds for exactly one code and one target. The digest covers the rendered source and jitmx's own headers that
it includes, so that an edit to either withdraws the evidence. `tactics/ledger.json` ships with jitmx:

    {"schema_version": 1, "entries": [{"source_digest", "arch", "kernel", "evidence", "card", "date", "error", "note"}]}
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import json_rows, resources, settings
from jitmx.cache import files, layout
from jitmx.errors import TacticError, ToolchainError
from jitmx.registry import key

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
        # A ledger that ships may be linked to where an installer keeps its files.
        found = files.read(path, layout.LIMITS["ledger"], follow=True)
    except OSError as error:
        raise TacticError(f"{path} cannot be read as a ledger: {error.strerror}", remedy) from error
    if found is None:
        return Ledger(())
    try:
        document: Any = json.loads(found[0])
        version = document["schema_version"]
        rows = list(document["entries"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TacticError(f"{path} is not a ledger: {error}", remedy) from error
    if not isinstance(version, int):
        raise TacticError(f"{path} is not a ledger: its schema version is no number", remedy)
    if version != SCHEMA_VERSION:
        raise TacticError(f"{path} has schema version {version}; this jitmx reads {SCHEMA_VERSION}", remedy)
    entries = []
    for number, row in enumerate(rows):
        try:
            entries.append(Entry(**row))
        except (TypeError, TacticError) as error:
            raise TacticError(f"{path}, entry {number}: {error}", remedy) from error
    return Ledger(entries)


def own_path() -> Path:
    """Where checks made on this machine are noted, beside the kernels that they are of."""
    return settings.current().cache_dir / "ledger.json"


def known() -> Ledger:
    """What ships with jitmx together with what was checked on this machine; of the latter nothing if it is unreadable.

    Raises:
        TacticError: one of them is not a ledger.
    """
    try:
        own = load(own_path())
    except TacticError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        own = Ledger(())
    return Ledger([*load().entries, *own.entries])


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
