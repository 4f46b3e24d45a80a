"""What `compute-sanitizer --tool racecheck` reports, and which reports are known to be of no race.

    python -m scripts.protocol.sanitize racecheck --out protocol-out/sanitizer
    python -m scripts.protocol.hazards protocol-out/sanitizer/racecheck/moe.token.log

racecheck follows an mbarrier from the thread that arrives to those that wait, and a warp's barrier among its lanes, but
not the one behind the other: where lanes store, `__syncwarp` orders them before one of them, and that one arrives for
all, it takes what the others stored for unordered; so, too, what they have read, where others store once they have
waited. By the PTX memory model it is ordered: bar.warp.sync orders memory among its lanes, mbarrier.arrive releases,
mbarrier.try_wait acquires, and causality order is transitive. Such a report leaves out exactly the bytes of the lane
that arrives; one in which they are too, or one of another kernel, is a hazard. That the warp's barrier is there no
report shows: the simulator does (`tests/sim/test_mutations.py`).

What a report tells, by what an H200 has shown: it begins with the access that several others conflict with, of two
with the one at the lower address, so that it does not say which came first. A byte that is written over counts against
its last reader alone. Where several lanes read it, the last of them hides the one that arrives: no byte is left out,
and a kernel in which nothing waits would be reported with the same figures. Such reports are never explained;
`SMALLEST` has the kernels of which there are any as soon as their rings turn.

Where it costs no time, a kernel is written so that there is no report (docs/protocol.md); moe.token is.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# It keeps what it finds byte by byte, and leaves out what is more than this.
ENVIRONMENT = (("NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS", "400000000"),)
MBARRIER_BYTES = 8

_CUT = "Warning: Maximum number of hazards reached"  # which its summary counts
_SUMMARY = re.compile(r"^========= RACECHECK SUMMARY: (\d+) hazards? displayed", re.MULTILINE)
_REPORT = re.compile(
    r"^========= (?P<severity>\w+): Race reported between "
    r"(?P<first>\w+) access at (?P<kernel>\w+)\+(?P<at>0x[0-9a-f]+)\s*\n"
    r"(?P<others>(?:=========     and .*\n?)+)",
    re.MULTILINE,
)
_BLOCKS = re.compile(r"^\S+, .*\bgrid=(\d+): error ", re.MULTILINE)  # of a launch
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
        lanes: of a warp that store, and the one that arrives is among them.
        size: bytes of each, all in one access.
        what: is handed over.
        stores: instructions that store it, each with a report of its own.
    """

    kernel: str
    lanes: int
    size: int
    what: str
    stores: int = 1

    def explains(self, hazard: Hazard, blocks: int | None) -> bool:
        """Whether a report is of this: stored and read, at all bytes but those of the lane that arrives.

        A count that may as well be one of all lanes' bytes is none of it.
        """
        missed, all_bytes = (self.lanes - 1) * self.size, self.lanes * self.size
        others = [other.what for other in hazard.others]
        stored = (hazard.what == "Write" and set(others) == {"Read"}) or (hazard.what == "Read" and others == ["Write"])
        return (
            stored
            and (hazard.kernel, hazard.severity) == (self.kernel, "Error")
            and all(other.count % missed == 0 and other.count % all_bytes for other in hazard.others)
        )


@dataclass(frozen=True)
class OwnBarriers:
    """Where several lanes of a warp initialise an mbarrier each and arrive at it, with no warp's barrier between.

    Every lane arrives at the one that it has initialised itself, so that program order is enough. ptxas initialises
    them in a loop of the whole warp, and racecheck takes one of a block's, however many it has, for another lane's.
    Were it one lane that initialised the others', all but its own would be: of more than two, more than one.

    Attributes:
        kernel: entry point.
        what: the mbarriers are of.
        stores: instructions that initialise them.
    """

    kernel: str
    what: str
    stores: int = 1

    def explains(self, hazard: Hazard, blocks: int | None) -> bool:
        """Whether a report is of this: of one warp's lanes, and of one mbarrier a block."""
        others = [(other.what, other.count) for other in hazard.others]
        return (
            (hazard.kernel, hazard.severity, hazard.what) == (self.kernel, "Warning", "Write")
            and blocks is not None
            and others == [("Read", blocks * MBARRIER_BYTES)]
        )


# Of the launches of scripts/protocol/launches.py.
KNOWN: tuple[HandOver | OwnBarriers, ...] = (
    # Its first two rows of tiles stand before the loop over the rest.
    HandOver("jitmx_linear_slice", 8, 16, "a warp's sums of a row of tiles that another block completes", stores=3),
    OwnBarriers("jitmx_linear_slice", "rows of tiles"),
    HandOver("jitmx_linear_stream", 8, 4, "a warp's part of the sums, to the warps of its block that add them up"),
    HandOver("jitmx_moe_decode", 32, 16, "a warp's slice of the sums, to the warp that adds them up"),
    HandOver("jitmx_moe_stream", 32, 16, "a warp's part of a row of tiles, to the warp that has begun the row"),
)

# Kernels with reports that nothing in a log tells from those of a race, as soon as a ring turns: they are watched on
# their smallest case, in which none does. moe.decode: a step of the ring, which all lanes of all warps read, and scales
# and bias, which four lanes read at a time. moe.fused, moe.wgmma and both in E4M3, which are one in this: the places of
# items, whose every byte several lanes read, or all. They are written again behind an mbarrier at which one lane of
# each warp that reads has arrived. Of the cases of these kernels, none but the smallest has work and turns no ring.
SMALLEST = frozenset({"moe.decode", "moe.fused", "moe.fused_fp8", "moe.wgmma", "moe.wgmma_fp8"})


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
    """The reports that are none of `KNOWN`; one more for a hand-over than it has stores is one too.

    Raises:
        ValueError: as of `hazards`.
    """
    left = [place for place in KNOWN for _ in range(place.stores)]
    launched = _BLOCKS.findall(log)
    blocks = int(launched[0]) if len(launched) == 1 else None
    bad = []
    for hazard in hazards(log):
        known = next((place for place in left if place.explains(hazard, blocks)), None)
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
