"""Tuning tables: rows from a range of problems to knobs, with where they came from.

    {"schema_version": 1, "family": "linear", "arch": "sm_90a",
     "origin": {"kind": "measured", "card": "NVIDIA H200", "driver": "580.159.04", "date": "2026-11-21", "note": "…"},
     "rows": [{"when": {"m": [1, 1], "n": 5120, "k": 2880}, "kernel": "gemv", "knobs": {"split_k": 8}, "us": 4.3}]}

`when` holds fields of the family's problem: a number or text that must be equal, or [low, high], both included; and
ranges of what follows from them (`Problem.derived`): {"rows_an_expert": [12, 48]}. The first row that fits decides.
`kind` is "measured" or "heuristic"; `us` is the measured time, microseconds. A row that did not come out the same when
it was measured again has `spread`: how far its times lay apart, relative to `us`. A row that was measured in an
earlier run has an `origin` of its own, which names driver, date and digest of the code where they are not the table's;
null stands for what was not recorded. Without a digest nothing says of which code a time is.

A row that can never apply is no error of a call, which passes it over: a table may be of other code. `idle` tells.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitmx import json_rows
from jitmx.arch import Arch
from jitmx.cache import files
from jitmx.errors import KnobError, TacticError
from jitmx.kernels import Family, Problem
from jitmx.quoting import short
from jitmx.registry.spec import said_kind

SCHEMA_VERSION = 1
KINDS = ("measured", "heuristic")
OWN = ("driver", "date", "code")  # what a row's own origin names where it is not the table's
_DIGITS = 12  # of a digest, in words
_LARGEST = 64 << 20  # bytes of a table
_LONGEST = 1e12  # microseconds
_TEXTS = ("card", "driver", "date", "code", "note")  # of an origin
_OF_TABLE = ("schema_version", "family", "arch", "origin", "rows")
_OF_ROW = ("when", "kernel", "knobs", "us", "spread", "origin")
_REMEDY = "mend or remove it"


@dataclass(frozen=True)
class Row:
    """One row: when it applies, and the knobs that it gives."""

    when: Mapping[str, Any]
    kernel: str
    knobs: Mapping[str, Any]
    us: float | None
    spread: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timing(self) -> str:
        """Its measured time in words, empty where there is none."""
        if self.us is None:
            return ""
        return f"{self.us:.2f} us" + (f", not stable: times lay {self.spread:.0%} apart" if self.spread else "")

    def fits(self, problem: Problem) -> bool:
        """Whether the row applies to `problem`."""
        for name, wanted in self.when.items():
            value = getattr(problem, name)
            if not (wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else value == wanted):
                return False
        return True


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
        return self.provenance_of(None)

    def provenance_of(self, row: Row | None) -> str:
        """Where a row came from, in words."""
        origin = {**self.origin, **(row.origin if row else {})}
        if origin["kind"] == "heuristic":
            return "heuristic, not measured" + (f": {origin['note']}" if origin.get("note") else "")
        code = f"code {origin['code'][:_DIGITS]}" if origin.get("code") else "code not recorded"
        return f"measured on {origin.get('card', 'an unnamed card')}, {origin.get('date') or 'undated'}, {code}"


def load(path: Path, family: Family, arch: Arch) -> Table:
    """The table in `path`, checked.

    Raises:
        TacticError: it cannot be read, or is not a table of this family and target.
    """
    return _checked(path, _parsed(path), family, arch)


def idle(table: Table, family: Family, arch: Arch) -> list[str]:
    """Of the rows that can serve no call, what is wrong with each: a row a line, for who looks after the table."""
    found = []
    for number, row in enumerate(table.rows):
        said = _never(row, family, arch)
        if said:
            found.append(f"{table.path}: row {number} {said}")
    return found


def _never(row: Row, family: Family, arch: Arch) -> str:
    """Why a row applies to no problem on a target, or is illegal for each; empty where it may serve."""
    kernel = family.kernel(row.kernel)
    if not kernel.runs_on(arch):
        return f"never applies: {family.name}.{row.kernel} does not run on {arch}"
    for item in dataclasses.fields(family.problem):
        wanted = row.when.get(item.name)
        if wanted is None:
            continue
        low, high = wanted if isinstance(wanted, list) else (wanted, wanted)
        choices, least, most = (item.metadata.get(part) for part in ("choices", "low", "high"))
        if choices is not None and not any(low <= choice <= high for choice in choices if type(choice) is type(low)):
            return f"never applies: {item.name}={short(wanted)} is not one of {', '.join(map(str, choices))}"
        if (least is not None and high < least) or (most is not None and low > most):
            return f"never applies: {item.name}={short(wanted)} is beyond the limits of {family.name} problems"
    try:
        kernel.spec.own(**row.knobs)
    except KnobError as error:
        return f"is illegal: {error}"
    return ""


def _parsed(path: Path) -> Any:
    """The JSON value in `path`."""
    cause: Exception
    try:
        found = files.read(path, _LARGEST, follow=True)
        if found is None:
            raise TacticError(f"{path} is gone", "name a table that is there")
        return json.loads(found[0])
    except OSError as error:
        said, cause = f"it cannot be read: {error.strerror or error}", error
    except UnicodeDecodeError as error:
        said, cause = f"no text in UTF-8: {error.reason} at byte {error.start}", error
    except json.JSONDecodeError as error:
        said, cause = f"no JSON: {error}", error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists without end
        said, cause = f"no JSON that can be read: {error}", error
    raise TacticError(f"{path} is no tuning table ({said})", _REMEDY) from cause


def _require_keys(path: Path, data: Any, keys: Sequence[str], of: str = "") -> None:
    """Raise TacticError where a JSON value is no object with these keys."""
    if not isinstance(data, dict):
        said = f"{of or 'it'} is no object"
    else:
        said = f"{of or 'it'} has no {' and no '.join(name for name in keys if name not in data)}"
        if all(name in data for name in keys):
            return
    raise TacticError(f"{path} is no tuning table ({said})", _REMEDY)


def _require_known(where: str, data: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise TacticError where an object has a key that nothing reads."""
    unknown = sorted(data.keys() - set(known))
    if unknown:
        listed = ", ".join(map(short, unknown))
        raise TacticError(f"{where} has {listed}, which nothing reads; its keys: {', '.join(known)}", _REMEDY)


def _checked(path: Path, data: Any, family: Family, arch: Arch) -> Table:
    _require_keys(path, data, _OF_TABLE[:1])
    if data["schema_version"] != SCHEMA_VERSION:
        raise TacticError(f"{path}: schema_version {short(data['schema_version'])} is not {SCHEMA_VERSION}", _REMEDY)
    _require_keys(path, data, _OF_TABLE)
    _require_known(str(path), data, _OF_TABLE)
    if (data["family"], data["arch"]) != (family.name, arch.name):
        raise TacticError(f"{path} is for {data['family']} on {data['arch']}, not for {family.name} on {arch}")
    origin = data["origin"]
    _require_keys(path, origin, ("kind",), "its origin")
    if origin["kind"] not in KINDS:
        raise TacticError(f"{path}: origin kind {short(origin['kind'])} is not one of {', '.join(KINDS)}")
    for name in _TEXTS:
        if not isinstance(origin.get(name), str | None):
            raise TacticError(f"{path}: {name} of its origin is no text", _REMEDY)
    if not isinstance(data["rows"], list):
        raise TacticError(f"{path} is no tuning table (its rows are no list)", _REMEDY)
    rows = tuple(_row(path, *item, family) for item in enumerate(data["rows"]))
    return Table(path, family.name, arch.name, origin, rows)


def _row(path: Path, number: int, row: Any, family: Family) -> Row:
    where = f"{path}: row {number}"
    if not (isinstance(row, dict) and isinstance(row.get("when"), dict) and isinstance(row.get("knobs"), dict)):
        raise TacticError(f"{where} is no object with `when` and `knobs`, objects both", _REMEDY)
    _require_known(where, row, _OF_ROW)
    kernel: Any = row.get("kernel")
    when, knobs, us, spread = row["when"], row["knobs"], row.get("us"), row.get("spread")
    items = {item.name: item for item in dataclasses.fields(family.problem)}
    fields = {name: type(item.default) for name, item in items.items()}
    derived = family.problem.derived
    unknown = when.keys() - fields - set(derived)
    if unknown:
        raise TacticError(
            f"{where} asks for {', '.join(sorted(unknown))}; {family.name} problems have "
            f"{', '.join(sorted({*fields, *derived}))}"
        )
    for name, wanted in when.items():
        if name in derived:
            if not (isinstance(wanted, list) and len(wanted) == 2 and all(_is_number(value) for value in wanted)):
                raise TacticError(f"{where}: {name} is {short(wanted)}, no [low, high] of numbers")
            _require_ascending(where, name, wanted)
            continue
        values = wanted if isinstance(wanted, list) else [wanted]
        if len(values) != (2 if values is wanted else 1) or any(type(value) is not fields[name] for value in values):
            raise TacticError(f"{where}: {name} is {short(wanted)}, neither {said_kind(items[name])} nor [low, high]")
        _require_ascending(where, name, values)
    try:
        family.spec(kernel)
    except KnobError as error:
        raise TacticError(f"{where}: {error}") from error
    if not all(isinstance(value, str | int) for value in knobs.values()):
        raise TacticError(f"{where}: knobs must be numbers, texts, true or false")
    if not all(value is None or _is_time(value) for value in (us, spread)):
        raise TacticError(f"{where}: us and spread must be numbers where they are there, from 0 to {_LONGEST:.0e}")
    origin = row.get("origin", {})
    if not isinstance(origin, dict) or origin.keys() - set(OWN):
        raise TacticError(f"{where}: origin must be an object of {', '.join(OWN)}")
    if not all(isinstance(value, str | None) for value in origin.values()):
        raise TacticError(f"{where}: what origin names must be texts, or null where it was not recorded")
    return Row(when, kernel, knobs, us, spread, origin)


def _require_ascending(where: str, name: str, values: Sequence[Any]) -> None:
    """Raise TacticError for [low, high] in which nothing lies."""
    if not values[0] <= values[-1]:
        turned = short([values[-1], values[0]])
        raise TacticError(f"{where}: {name} is {short(list(values))}, whose low is above its high", f"write {turned}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return _is_number(value) and bool(0 <= value <= _LONGEST)


def merged(
    path: Path, family: Family, arch: Arch, origin: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A table of new `rows` and of those in `path` that were measured on the same card and not in this run.

    Rows for the same problems but other values along the family's axes stay where `origin` names the same code and
    driver, and each serves what lies between the next smaller values that were measured and its own. Rows for other
    problems stay in any case, with their own origin where code or driver are others by now.

    Raises:
        TacticError: `path` holds what was measured on another card, or cannot be read.
    """
    kept: list[dict[str, Any]] = []
    if files.exists(path):
        data = _parsed(path)
        old = _checked(path, data, family, arch)
        if old.origin["kind"] == "measured":
            if old.origin.get("card") != origin.get("card"):
                raise TacticError(
                    f"{path} holds rows measured on {old.origin.get('card', 'an unnamed card')}, not on "
                    f"{origin.get('card')}",
                    "name another file with --out, or move it away",
                )
            served = {_kind(family, row) for row in rows}
            for row in data["rows"]:
                made = {**old.origin, **row.get("origin", {})}
                same = all(made.get(name) and made[name] == origin.get(name) for name in ("code", "driver"))
                if same or _kind(family, row) not in served:
                    # What a row does not say, the table's origin must not say for it.
                    own = {name: made.get(name) for name in OWN if made.get(name) != origin.get(name)}
                    kept.append({**row, "origin": own} if own else {**row, "origin": None})
    return {
        "schema_version": SCHEMA_VERSION, "family": family.name, "arch": arch.name, "origin": dict(origin),
        "rows": _ranged(family, [dict(row) for row in rows], kept),
    }  # fmt: skip


def _ranged(family: Family, rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows and kept ones, kind by kind; along each axis a row serves what is above the next smaller value."""
    kinds: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    for row in (*rows, *kept):
        row = {name: value for name, value in row.items() if name != "origin" or value}
        kinds.setdefault(_kind(family, row), {}).setdefault(_most(family, row), row)
    return [_above(family, kind, most) for kind in kinds.values() for most in sorted(kind)]


def _above(family: Family, kind: Mapping[tuple[int, ...], dict[str, Any]], most: tuple[int, ...]) -> dict[str, Any]:
    """A row of a kind, with what it serves along each axis beginning behind the row before it there."""
    when = dict(kind[most]["when"])
    for place, name in enumerate(family.axes):
        if isinstance(when.get(name), list):
            beside = (other for other in kind if all(at == place or other[at] == most[at] for at in range(len(most))))
            below = max((other[place] for other in beside if other[place] < most[place]), default=0)
            when[name] = [max(below + 1, when[name][0]), most[place]]
    return {**kind[most], "when": when}


def _most(family: Family, row: Mapping[str, Any]) -> tuple[int, ...]:
    """What a row serves at most along each axis: what it was measured for."""
    values = (row["when"].get(name, 0) for name in family.axes)
    return tuple(int(value[1] if isinstance(value, list) else value) for value in values)


def _kind(family: Family, row: Mapping[str, Any]) -> str:
    """What a row is for, axes aside; a field that it does not name is what rows of older tables mean by that."""
    implied = family.tuning.implied if family.tuning else {}
    said = {name: value for name, value in row["when"].items() if name not in family.axes}
    return json.dumps(sorted({**implied, **said}.items()))


def save(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table, whole or not at all.

    Raises:
        TacticError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_named(path, json_rows.text(table, "rows").encode(), permissions=0o644)
    except OSError as error:
        raise TacticError(f"{path}: the table cannot be written there ({error})", "name another file") from error


@functools.cache
def tables(family: Family, arch: Arch, user: Path, shipped: tuple[Path, ...]) -> tuple[Table | None, Table | None]:
    """A family's tables for a target, the one in the folder `user` and the first in the folders `shipped`."""
    paths = (root / arch.name / f"{family.name}.json" for root in (user, *shipped))
    # Looking may be refused: in the home directory of another user, say.
    own, *ours = (load(path, family, arch) if files.exists(path) else None for path in paths)
    return own, next(filter(None, ours), None)
