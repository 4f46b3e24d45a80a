"""Kernels in a profile: how often each ran and how long, from a torch profiler's trace or a report of level 1.5."""

from __future__ import annotations

import collections
import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.protocol.report import SCHEMA_VERSION, ProtocolError


@dataclass(frozen=True)
class Kernel:
    """One kernel of a profile: demangled name, launches, and microseconds of all of them."""

    name: str
    launches: int
    us: float


@dataclass(frozen=True)
class Profile:
    """Kernels of some forward passes, those that took longest first.

    Attributes:
        phase: what ran: "decode 1", "prefill 512".
        passes: forward passes, or None where nobody said.
        layers: transformer layers of the model, likewise.
    """

    phase: str
    kernels: tuple[Kernel, ...]
    passes: int | None = None
    layers: int | None = None

    @property
    def launches(self) -> dict[str, int]:
        """Name to number of launches."""
        return {kernel.name: kernel.launches for kernel in self.kernels}

    def as_dict(self) -> dict[str, Any]:
        """For a report; `read` takes it back."""
        return asdict(self)


def of_events(phase: str, events: Iterable[tuple[str, float]], passes: int | None, layers: int | None) -> Profile:
    """A profile from (kernel name, microseconds) of every launch."""
    count: collections.Counter[str] = collections.Counter()
    spent: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, us in events:
        count[name] += 1
        spent[name] += us
    ordered = sorted(count, key=lambda name: (-spent[name], name))
    return Profile(phase, tuple(Kernel(name, count[name], round(spent[name], 3)) for name in ordered), passes, layers)


def read(path: Path) -> list[Profile]:
    """Profiles in a file: a trace in Chrome's format (.json or .json.gz), or a report that level 1.5 wrote.

    Raises:
        ProtocolError: neither of them, or one in which no kernel ran.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        value = json.loads(text)
    except (OSError, ValueError, EOFError) as error:
        raise ProtocolError(f"{path} is no readable profile: {error}") from None
    if isinstance(value, dict) and "traceEvents" in value:
        ran = (event for event in value["traceEvents"] if event.get("cat") == "kernel")
        kernels = ((event["name"], float(event.get("dur", 0))) for event in ran)
        found = [of_events(path.name, kernels, None, None)]
    elif isinstance(value, dict) and value.get("schema_version") == SCHEMA_VERSION and value.get("level") == "1.5":
        found = [from_dict(item) for items in value["results"]["profiles"].values() for item in items]
    else:
        raise ProtocolError(f"{path} is neither a torch profiler's trace nor a report of level 1.5")
    for profile in found:
        if not profile.kernels:
            raise ProtocolError(f"{path}: no kernel ran in {profile.phase}; profile with CUDA activities, on a card")
    return found


def from_dict(item: dict[str, Any]) -> Profile:
    """A profile that `as_dict` gave."""
    return Profile(**item | {"kernels": tuple(Kernel(**kernel) for kernel in item["kernels"])})
