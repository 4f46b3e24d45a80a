"""What is measured of the family: the bytes of a call; and what times its candidates here, by arithmetic."""

from __future__ import annotations

from typing import Any

from jitmx.kernels.toy import ToyProblem

from jitmx.bench.benchmark import Asked, Table
from jitmx.dispatch.tune import Candidate


def bench(asked: Asked) -> list[dict[str, Any]]:
    """Rows of `rows, bytes`."""
    columns = asked.fields.get("columns", 1024)
    return [{"rows": rows, "bytes": 8 * rows * columns} for rows in asked.fields.get("rows", (1, 1000))]


def tables(payload: list[dict[str, Any]], limits: None) -> list[Table]:
    """The same."""
    return [Table(("ROWS", "BYTES"), [tuple(row.values()) for row in payload], ("ROWS", "BYTES"))]


class Bench:
    """A card on which blocks of 128 are fastest."""

    def healthy(self) -> bool:
        """It always is."""
        return True

    def __call__(self, problem: ToyProblem, candidate: Candidate, repeats: int) -> float:
        """Microseconds."""
        return problem.rows + abs(candidate.knobs["block"] - 128) / 64
