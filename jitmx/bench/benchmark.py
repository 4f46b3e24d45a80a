"""What benchmarks have in common: what they are asked, the rates of the card, and tables of what they measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ceilings:
    """What the card yields in this run: bytes and operations a second."""

    card: str
    read: float
    copy: float
    matmul: float

    def floors(self, moved: float, flops: float) -> dict[str, float]:
        """Bytes and operations of a call, the microseconds that each takes at the rates of the card, and the longer."""
        memory, compute = moved / self.read * 1e6, flops / self.matmul * 1e6
        return {
            "bytes": moved, "flops": flops, "memory_us": memory, "compute_us": compute,
            "floor_us": max(memory, compute),
        }  # fmt: skip


def ceilings() -> Ceilings:
    """Measure them."""
    import torch

    from jitmx.bench import timing

    return Ceilings(
        torch.cuda.get_device_name(), timing.read_bandwidth(), timing.copy_bandwidth(), timing.matmul_rate()
    )


@dataclass(frozen=True)
class Asked:
    """What a benchmark is asked.

    Attributes:
        fields: of the family's problems, those that were given; along axes, all values that were.
        model: whose layers.
        seed: of what is random.
        peers: libraries to run beside jitmx.
        limits: rates of the card; None for a benchmark that needs none.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    model: str = "gpt-oss-120b"
    seed: int = 0
    peers: tuple[str, ...] = ()
    limits: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """The rates of the card, for a benchmark that needs it."""
        assert self.limits is not None
        return self.limits


@dataclass(frozen=True)
class Table:
    """What was measured, for people.

    Attributes:
        right: headers of columns that are flush right.
        title: a line above it, or empty.
        notes: what is to be said beside it: why a library has no time, say.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[str]
    title: str = ""
    notes: Sequence[str] = ()


def peer_headers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Headers of the columns of other libraries."""
    return [f"{name.upper()} US" for name in rows[0]["peers"]]


def peer_cells(row: Mapping[str, Any]) -> list[str | None]:
    """The cells of a row in these columns."""
    return [None if found["us"] is None else f"{found['us']:.2f}" for found in row["peers"].values()]


def peer_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a library has no time, once each."""
    found = ((name, row["peers"][name]["reason"]) for name in rows[0]["peers"] for row in rows)
    return list(dict.fromkeys(f"{name}: {reason}" for name, reason in found if reason))
