"""Tuning tables: rows from a range of problems to knobs, with where they came from.

    {"schema_version": 1, "family": "linear", "arch": "sm_90a",
     "origin": {"kind": "measured", "card": "NVIDIA H200", "driver": "580.159.04", "date": "2026-11-21", "note": "…"},
     "rows": [{"when": {"m": [1, 1], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"split_k": 8}, "us": 4.3}]}

`when` holds fields of the family's problem: a number or text that must be equal, or [low, high], both included. The
first row that fits decides. `kind` is "measured" or "heuristic"; `us` is the measured time, microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmx import resources
from jitmx.arch import Arch
from jitmx.errors import KnobError, TacticError
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
        return all(
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


def load(path: Path, family: Family, arch: Arch) -> Table:
    """The table in `path`, checked.

    Raises:
        TacticError: it cannot be read, or is not a table of this family and target.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema_version"] != SCHEMA_VERSION:
            raise TacticError(f"{path}: schema_version {data['schema_version']} is not {SCHEMA_VERSION}")
        if (data["family"], data["arch"]) != (family.name, arch.name):
            raise TacticError(f"{path} is for {data['family']} on {data['arch']}, not for {family.name} on {arch}")
        if data["origin"]["kind"] not in KINDS:
            raise TacticError(f"{path}: origin kind {data['origin']['kind']!r} is not one of {', '.join(KINDS)}")
        rows = tuple(_row(f"{path}: row {number}", row, family) for number, row in enumerate(data["rows"]))
        return Table(path, family.name, arch.name, data["origin"], rows)
    except TacticError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TacticError(f"{path} is no tuning table ({type(error).__name__}: {error}); mend or remove it") from error


def _row(where: str, row: Any, family: Family) -> Row:
    when, kernel, knobs, us = row["when"], row["kernel"], row["knobs"], row.get("us")
    fields = {item.name: type(item.default) for item in dataclasses.fields(family.problem)}
    unknown = when.keys() - fields
    if unknown:
        raise TacticError(
            f"{where} asks for {', '.join(sorted(unknown))}; {family.name} problems have {', '.join(sorted(fields))}"
        )
    for name, wanted in when.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if len(values) != (2 if values is wanted else 1) or any(type(value) is not fields[name] for value in values):
            raise TacticError(f"{where}: {name} is {wanted!r}, neither one {fields[name].__name__} nor [low, high]")
    try:
        family.spec(kernel)
    except KnobError as error:
        raise TacticError(f"{where}: {error}") from error
    if not isinstance(knobs, dict) or not isinstance(us, int | float | None):
        raise TacticError(f"{where}: knobs must be an object, and us a number where there is one")
    return Row(when, kernel, knobs, us)


@functools.cache
def tables(family: Family, arch: Arch, user: Path) -> tuple[Table | None, Table | None]:
    """The user's table of a family for a target, from the folder `user`, and the shipped one."""
    own, shipped = (root / arch.name / f"{family.name}.json" for root in (user, resources.directory("tactics")))
    return _load_if_there(own, family, arch), _load_if_there(shipped, family, arch)


def _load_if_there(path: Path, family: Family, arch: Arch) -> Table | None:
    try:
        there = path.is_file()
    except OSError:  # the home directory of another user, say
        there = False
    return load(path, family, arch) if there else None
