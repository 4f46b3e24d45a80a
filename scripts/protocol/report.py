"""What a level hands back: one JSON object with its checks, and the exit status that follows from them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
FAILED = 1  # exit status of a level with a check that failed


class ProtocolError(Exception):
    """A level cannot be run as asked. The message names the value, the rule and the remedy."""


@dataclass(frozen=True)
class Check:
    """One thing that a level asserts: what, whether it held, and what was seen."""

    name: str
    passed: bool
    seen: str


@dataclass
class Report:
    """What one run of a level found.

    Attributes:
        level: "1", "1.5", … or the name of a tool.
        about: what was asked for: model, configurations, workload.
        checks: what was asserted; a report without any has not passed.
        results: figures.
        metadata: of the machine and software, as `metadata.collect` gives it.
    """

    level: str
    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: bool, seen: str) -> bool:
        """Note a check, say it on stderr, and give back whether it held."""
        self.checks.append(Check(name, passed, seen))
        print(f"{'pass' if passed else 'FAIL'}  {name}: {seen}", file=sys.stderr, flush=True)
        return passed

    def check_warm_up(self, name: str, late: list[str]) -> None:
        """Check that no kernel was loaded for a request, `late`, which warm-up should have had."""
        self.check(name, not late, f"loaded for a request: {', '.join(late) or 'nothing'}")

    def check_attention(self, name: str, wanted: str, startup: Mapping[str, Any]) -> None:
        """Check that who serves attention, by an engine's log, is who is to serve it."""
        found = startup["attention"]
        self.check("attention", found == wanted, f"{name}: by its log {found} serves it, wanted {wanted}")

    @property
    def passed(self) -> bool:
        """Whether there was something to check and all of it held."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def payload(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "schema_version": SCHEMA_VERSION, "level": self.level, "passed": self.passed, "about": self.about,
            "checks": [asdict(check) for check in self.checks], "results": _finite(self.results),
            "metadata": self.metadata,
        }  # fmt: skip


def _finite(value: Any) -> Any:
    """The same, with null for infinities and NaN, which JSON does not have; a check has said what they mean."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(payload: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(json.dumps(payload, indent=2, allow_nan=False) + "\n")
    scratch.replace(path)


def load(path: Path, level: str | None = None) -> dict[str, Any]:
    """A JSON object that `save` wrote.

    Raises:
        ProtocolError: no such file, no JSON, another schema, or another level's.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProtocolError(f"{path} is no readable JSON report: {error}") from None
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        found = value.get("schema_version") if isinstance(value, dict) else None
        raise ProtocolError(f"{path} has schema_version {found!r}; this protocol reads {SCHEMA_VERSION}: measure again")
    if level is not None and value.get("level") != level:
        raise ProtocolError(f"{path} is a report of level {value.get('level')!r}; level {level} is wanted")
    return value
