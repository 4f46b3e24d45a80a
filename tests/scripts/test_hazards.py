"""What racecheck says of a card's kernels: one lane's arrival for its warp is known, all else is a hazard."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from scripts.protocol import card, hazards
from scripts.protocol.card import Stage, Step

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
    assert hazards.judge(hazards.FOUND, log) is None
    reason = hazards.judge(hazards.FOUND, RECORDED.read_text())
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
    reason = hazards.judge(hazards.FOUND, log.replace(old, "x", 1))
    assert reason is not None and ("could be read" in reason or "0 summaries" in reason)


def test_what_the_kernels_themselves_say_counts_too(log: str) -> None:
    assert hazards.judge(1, log) == "exit status 1"
    assert hazards.judge(0, "") == "the log has 0 summaries of racecheck; it should have one"


def test_the_stage_of_a_card_holds_racecheck_to_the_known_list_and_the_other_tools_to_silence(
    tmp_path: Path, log: str
) -> None:
    (stage,) = card.choose("sanitizer")
    judges = {step.name: step.judge for step in stage.steps}
    assert judges == {"memcheck": None, "racecheck": hazards.judge, "synccheck": None}
    for name, text, status in (("known", log, "passed"), ("new", RECORDED.read_text(), "failed")):
        tmp_path.joinpath(name).write_text(text)
        code = f"print(open({str(tmp_path / name)!r}).read()); raise SystemExit({hazards.FOUND})"
        step = Step(name, (sys.executable, "-c", code), 30, judge=hazards.judge)
        report = card.run((Stage(name, "a test", (step,)),), tmp_path / "out", without_card=True)
        assert report.results["stages"][name]["status"] == status
    assert "jitmx_routing_route" in report.results["stages"]["new"]["steps"][0]["reason"]
