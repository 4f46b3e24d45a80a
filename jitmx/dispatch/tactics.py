"""Tuning tables: rows from a range of problems to knobs, with where they came from.

    {"schema_version": 1, "family": "linear", "arch": "sm_90a",
     "origin": {"kind": "measured", "card": "NVIDIA H200", "driver": "580.159.04", "date": "2026-11-21", "note": "…"},
     "rows": [{"when": {"m": [1, 1], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"split_k": 8}, "us": 4.3}]}

`when` holds fields of the family's problem: a number or text that must be equal, or [low, high], both included. The
first row that fits decides. `kind` is "measured" or "heuristic"; `us` is the measured time, microseconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import resources
from jitmx.arch import Arch
from jitmx.errors import TacticError
from jitmx.kernels import Family, Problem

SCHEMA_VERSION = 1
KINDS = ("measured", "heuristic")


@dataclass(frozen=True)
class Row:
    """One row: when it applies, and the knobs that it gives."""

    when: Mapping[str, Any]
    kernel: str
    knobs: Mapping[str, Any]
    us: float | None

    def fits(self, problem: Problem) -> bool:
        """Whether the row applies to `problem`."""
        values = problem.as_dict()
        return problem.kernel == self.kernel and all(
            wanted[0] <= values[name] <= wanted[1] if isinstance(wanted, list) else values[name] == wanted
            for name, wanted in self.when.items()
        )


@dataclass(frozen=True)
class Table:
    """One table, as read from `path`."""

    path: Path
    family: str
    arch: str
    origin: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def provenance(self) -> str:
        """Where the rows came from, in words."""
        if self.origin["kind"] == "heuristic":
            return "heuristic, not measured" + (f": {self.origin['note']}" if self.origin.get("note") else "")
        return f"measured on {self.origin.get('card', 'an unnamed card')}, {self.origin.get('date', 'undated')}"


def load(path: Path, family: str, arch: Arch, problem: type[Problem]) -> Table:
    """The table in `path`, checked.

    Raises:
        TacticError: it cannot be read, or is not a table of this family and target.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema_version"] != SCHEMA_VERSION:
            raise TacticError(f"{path}: schema_version {data['schema_version']} is not {SCHEMA_VERSION}")
        if (data["family"], data["arch"]) != (family, arch.name):
            raise TacticError(f"{path} is for {data['family']} on {data['arch']}, not for {family} on {arch}")
        if data["origin"]["kind"] not in KINDS:
            raise TacticError(f"{path}: origin kind {data['origin']['kind']!r} is not one of {', '.join(KINDS)}")
        fields = set(problem.__dataclass_fields__)
        rows = []
        for number, row in enumerate(data["rows"]):
            unknown = set(row["when"]) - fields
            if unknown:
                raise TacticError(
                    f"{path}: row {number} asks for {', '.join(sorted(unknown))}; "
                    f"{family} problems have {', '.join(sorted(fields))}"
                )
            rows.append(Row(row["when"], row["kernel"], row["knobs"], row.get("us")))
        return Table(path, family, arch.name, data["origin"], tuple(rows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TacticError):
            raise
        raise TacticError(f"{path} is no tuning table ({type(error).__name__}: {error}); mend or remove it") from error


@functools.cache
def tables(family: Family, arch: Arch, user: Path) -> tuple[Table, ...]:
    """The tables of a family for a target, the user's before the shipped one."""
    name = Path(arch.name) / f"{family.name}.json"
    return tuple(
        load(root / name, family.name, arch, family.problem)
        for root in (user, resources.directory("tactics"))
        if (root / name).is_file()
    )
