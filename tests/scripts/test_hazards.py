"""What racecheck says of a card's kernels: one lane's arrival for its warp is known, all else is a hazard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.protocol import hazards

# Of an H200: two known hand-overs, and a warning of an mbarrier in routing.route, of code since changed.
RECORDED = Path(__file__).with_name("racecheck.log")
_WARNING = re.compile(r"========= Warning.*?========= \n", re.DOTALL)


@pytest.fixture
def log() -> str:
    """The recorded log without the warning."""
    text, count = _WARNING.subn("", RECORDED.read_text())
    assert count == 1
    return text.replace("3 hazards displayed (2 errors, 1 warning)", "2 hazards displayed (2 errors, 0 warnings)")


def test_a_recorded_log_is_read_whole() -> None:
    stream, decode, route = hazards.hazards(RECORDED.read_text())
    assert (stream.kernel, stream.severity, stream.what, stream.at) == ("jitmx_linear_stream", "Error", "Write", 0x1CF0)
    assert [(other.what, other.count) for other in stream.others] == [("Read", 28)] * 6
    assert [other.at for other in decode.others] == [0x2330, 0x2370, 0x23A0, 0x23C0]
    assert {(other.what, other.count) for other in decode.others} == {("Read", 2976)}
    assert (route.kernel, route.severity, route.others[0].count) == ("jitmx_routing_route", "Warning", 8)


def test_what_is_known_passes_and_what_is_not_is_named(log: str) -> None:
    assert hazards.judge(log) is None
    reason = hazards.judge(RECORDED.read_text())
    assert reason == "Warning: jitmx_routing_route: Write +0x220, Read +0x240 (8)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jitmx_moe_decode", "jitmx_moe_stream"),  # another kernel
        ("[2976 hazards]", "[3072 hazards]"),  # the lane that arrives is not ordered either
        ("[28 hazards]", "[32 hazards]"),
        ("Write access at jitmx_linear_stream", "Read access at jitmx_linear_stream"),
        ("and Read access at jitmx_moe_decode", "and Write access at jitmx_moe_decode"),
    ],
)
def test_a_report_that_differs_from_the_known_one_is_a_hazard(log: str, old: str, new: str) -> None:
    assert old in log
    assert len(hazards.unexplained(log.replace(old, new))) == 1


def test_known_places_are_of_kernels_that_there_are() -> None:
    from jitmx import kernels

    entries = {spec.entry for name in kernels.families() for spec in kernels.family(name).specs}
    assert {place.kernel for place in hazards.KNOWN} <= entries


def test_a_second_report_of_a_known_place_is_a_hazard(log: str) -> None:
    start, end = log.index("========= Error"), log.index("linear.stream.")
    twice = log[:end] + log[start:end].replace("+0x1cf0", "+0x1d10") + log[end:]
    assert [hazard.at for hazard in hazards.unexplained(twice.replace("2 hazards disp", "3 hazards disp"))] == [0x1D10]


@pytest.mark.parametrize("old", ["2 hazards displayed", "[28 hazards]", "=========     and Read access at jitmx_moe"])
def test_a_log_that_cannot_be_read_whole_is_not_clean(log: str, old: str) -> None:
    reason = hazards.judge(log.replace(old, "x", 1))
    assert reason is not None and ("could be read" in reason or "0 summaries" in reason)


def test_a_log_that_was_cut_short_is_not_clean(log: str) -> None:
    warning = (
        "========= Warning: Maximum number of hazards reached. Environment variable "
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used to increase this count.\n========= \n"
    )
    start = log.index("========= Error")
    reason = hazards.judge(log[:start] + warning + log[start:].replace("2 hazards displayed", "3 hazards displayed"))
    assert reason is not None and "raise NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS" in reason


def test_a_log_without_a_summary_is_not_clean() -> None:
    assert hazards.judge("") == "the log has 0 summaries of racecheck; it should have one"
