"""What `compute-sanitizer --tool racecheck` reports, and which reports are known to be of no race.

    python -m scripts.protocol.sanitize racecheck --out protocol-out/sanitizer
    python -m scripts.protocol.hazards protocol-out/sanitizer/racecheck/moe.token.log

racecheck follows an mbarrier from the thread that arrives to those that wait, and a warp's barrier among its lanes, but
not the one behind the other: where lanes store, `__syncwarp` orders them before one of them, and that one arrives for
all, it takes what the others stored for unordered. By the PTX memory model it is ordered: bar.warp.sync orders memory
among its lanes, mbarrier.arrive releases, mbarrier.try_wait acquires, and causality order is transitive. Such a report
leaves out exactly the bytes of the lane that arrives; one in which they are too, or one of another kernel, is a hazard.
Where it costs no time, a kernel is written so that there is no report (docs/protocol.md); moe.token is.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# It keeps what it finds byte by byte, and leaves out what is more than this.
ENVIRONMENT = (("NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS", "400000000"),)

_CUT = "Warning: Maximum number of hazards reached"  # which its summary counts
_SUMMARY = re.compile(r"^========= RACECHECK SUMMARY: (\d+) hazards? displayed", re.MULTILINE)
_REPORT = re.compile(
    r"^========= (?P<severity>\w+): Race reported between "
    r"(?P<first>\w+) access at (?P<kernel>\w+)\+(?P<at>0x[0-9a-f]+)\s*\n"
    r"(?P<others>(?:=========     and .*\n?)+)",
    re.MULTILINE,
)
_OTHER = re.compile(r"and (?P<access>\w+) access at (?P<kernel>\w+)\+(?P<at>0x[0-9a-f]+) \[(?P<count>\d+) hazards?\]")


@dataclass(frozen=True)
class Access:
    """The other side of a race: what, where in the machine code, and at how many bytes."""

    what: str
    at: int
    count: int


@dataclass(frozen=True)
class Hazard:
    """One report: an access, and those that are not ordered with it."""

    severity: str
    kernel: str
    what: str
    at: int
    others: tuple[Access, ...]

    def __str__(self) -> str:
        others = ", ".join(f"{other.what} +{other.at:#x} ({other.count})" for other in self.others)
        return f"{self.severity}: {self.kernel}: {self.what} +{self.at:#x}, {others}"


@dataclass(frozen=True)
class HandOver:
    """Where one lane arrives for its warp.

    Attributes:
        kernel: entry point.
        lanes: of a warp that store.
        size: bytes that a read takes from each.
        what: is handed over.
    """

    kernel: str
    lanes: int
    size: int
    what: str

    def explains(self, hazard: Hazard) -> bool:
        """Whether a report is of this: stored, then read, at all bytes but those of the lane that arrives."""
        missed = (self.lanes - 1) * self.size
        return (
            hazard.kernel == self.kernel
            and (hazard.severity, hazard.what) == ("Error", "Write")
            and all(other.what == "Read" and other.count % missed == 0 for other in hazard.others)
        )


# Of the launches of scripts/protocol/launches.py.
KNOWN: tuple[HandOver, ...] = (
    HandOver("jitmx_linear_stream", 8, 4, "a warp's part of the sums, to the warps of its block that add them up"),
    HandOver("jitmx_moe_decode", 32, 16, "a warp's slice of the sums, to the warp that adds them up"),
)


def hazards(log: str) -> list[Hazard]:
    """The reports of a log.

    Raises:
        ValueError: it has no summary, or one that counts other reports than were found; or it was cut short.
    """
    if _CUT in log:
        raise ValueError(f"racecheck kept no more hazards than it may and left out the rest; raise {ENVIRONMENT[0][0]}")
    found = [
        Hazard(
            report["severity"], report["kernel"], report["first"], int(report["at"], 16),
            tuple(Access(other["access"], int(other["at"], 16), int(other["count"]))
                  for other in _OTHER.finditer(report["others"]) if other["kernel"] == report["kernel"]),
        )
        for report in _REPORT.finditer(log)
    ]  # fmt: skip
    summary = _SUMMARY.findall(log)
    if len(summary) != 1:
        raise ValueError(f"the log has {len(summary)} summaries of racecheck; it should have one")
    lines = sum(line.startswith("=========     and ") for line in log.splitlines())
    if int(summary[0]) != len(found) or lines != sum(len(hazard.others) for hazard in found):
        raise ValueError(f"racecheck counts {summary[0]} hazards, and {len(found)} could be read; read the log")
    return found


def unexplained(log: str) -> list[Hazard]:
    """The reports that are none of `KNOWN`; of two for one hand-over, the second is one too.

    Raises:
        ValueError: as of `hazards`.
    """
    left = list(KNOWN)
    bad = []
    for hazard in hazards(log):
        known = next((place for place in left if place.explains(hazard)), None)
        if known is None:
            bad.append(hazard)
        else:
            left.remove(known)
    return bad


def judge(log: str) -> str | None:
    """Why a log of racecheck is bad, or None."""
    try:
        bad = unexplained(log)
    except ValueError as error:
        return str(error)
    return "; ".join(map(str, bad)) or None


def main() -> None:
    sys.exit(judge(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
