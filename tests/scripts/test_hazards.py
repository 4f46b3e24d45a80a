"""What racecheck says of a card's kernels: one lane's arrival for its warp is known, all else is a hazard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.protocol import hazards

# Of an H200: two known hand-overs, and a warning of an mbarrier in routing.route, of code since changed.
RECORDED = Path(__file__).with_name("racecheck.log")
# Of the largest cases, a log a kernel.
LARGEST = Path(__file__).with_name("racecheck")
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
        ("jitmx_moe_decode", "jitmx_moe_token"),  # another kernel
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


def recorded(kernel: str, old: str = "hazards", new: str = "hazards") -> str:
    """The log of a kernel's largest case, with other words in it."""
    text = (LARGEST / f"{kernel}.log").read_text()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(("kernel", "reports"), [("linear.slice", 4), ("moe.stream", 1)])
def test_hand_overs_of_the_largest_cases_are_known(kernel: str, reports: int) -> None:
    assert len(hazards.hazards(recorded(kernel))) == reports
    assert hazards.judge(recorded(kernel)) is None


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("linear.slice", "jitmx_linear_slice", "jitmx_linear_stream"),
        ("linear.slice", "[112 hazards]", "[128 hazards]"),  # the lane that arrives is not ordered either
        ("linear.slice", "[112 hazards]", "[896 hazards]"),  # of seven lanes eight times, or of eight lanes seven times
        ("linear.slice", "Write access at jitmx_linear_slice+0x40d0", "Read access at jitmx_linear_slice+0x40d0"),
        ("linear.slice", "and Read access at jitmx_linear_slice+0x43b0",
         "and Write access at jitmx_linear_slice+0x43b0"),
        ("linear.slice", "[32 hazards]", "[64 hazards]"),  # two mbarriers a block
        ("linear.slice", "[32 hazards]", "[24 hazards]"),
        ("linear.slice", "grid=4", "grid=2"),
        ("linear.slice", "Warning: Race", "Error: Race"),  # of two warps
        ("linear.slice", "Error: Race reported between Write access at jitmx_linear_slice+0x27f0",
         "Warning: Race reported between Write access at jitmx_linear_slice+0x27f0"),
        ("moe.stream", "[5456 hazards]", "[5632 hazards]"),
        ("moe.stream", "and Write access", "and Read access"),
        ("moe.stream", "Read access", "Write access"),
        ("moe.stream", "jitmx_moe_stream", "jitmx_moe_token"),
    ],
)  # fmt: skip
def test_a_report_of_a_largest_case_that_differs_is_a_hazard(kernel: str, old: str, new: str) -> None:
    assert hazards.unexplained(recorded(kernel, old, new))


def test_of_two_accesses_the_one_at_the_lower_address_comes_first_whichever_it_is() -> None:
    text = recorded("moe.stream", "Read access at jitmx_moe_stream+0xef80", "Write access at jitmx_moe_stream+0xef80")
    assert hazards.judge(text.replace("and Write access", "and Read access")) is None
    another = "=========     and Write access at jitmx_moe_stream+0xf4a0 [496 hazards]\n"
    (hazard,) = hazards.unexplained(recorded("moe.stream", "========= \n", f"{another}========= \n"))
    assert [other.what for other in hazard.others] == ["Write", "Write"]


def test_a_fourth_instruction_that_stores_sums_is_a_hazard() -> None:
    text = recorded("linear.slice")
    start = text.index("========= Error: Race reported between Write access at jitmx_linear_slice+0x40d0")
    report = text[start : text.index("========= Warning")]
    twice = text[:start] + report.replace("+0x40d0", "+0x41d0") + text[start:]
    (hazard,) = hazards.unexplained(twice.replace("4 hazards displayed", "5 hazards displayed"))
    assert hazard.at == 0x40D0


def test_mbarriers_are_counted_by_the_blocks_of_one_launch_and_of_no_other() -> None:
    line = next(line for line in recorded("linear.slice").splitlines() if "grid=4" in line)
    (hazard,) = hazards.unexplained(recorded("linear.slice", f"{line}\n", f"{line}\n{line}\n"))
    assert hazard.severity == "Warning"
    (hazard,) = hazards.unexplained(recorded("linear.slice", " grid=4", ""))
    assert hazard.severity == "Warning"


@pytest.mark.parametrize(("kernel", "untold"), [("moe.wgmma", 6), ("moe.wgmma_fp8", 8), ("moe.decode", 4)])
def test_what_no_count_tells_from_a_race_is_a_hazard_and_its_kernel_runs_its_smallest_case(
    kernel: str, untold: int
) -> None:
    assert len(hazards.unexplained(recorded(kernel))) == untold
    assert kernel in hazards.SMALLEST


def test_the_sums_of_moe_decode_are_known_in_both_directions() -> None:
    known = {str(hazard) for hazard in hazards.hazards(recorded("moe.decode"))}
    (sums,) = known - {str(hazard) for hazard in hazards.unexplained(recorded("moe.decode"))}
    rows, given_back = 234, 205  # rows of tiles of all blocks, and those that take the place of others
    assert sums.startswith("Error: jitmx_moe_decode: Write +0x9b80") and sums.count("Read") == 8
    assert sums.count(f"({(rows + given_back) * 31 * 16})") == 8


def test_kernels_on_their_smallest_case_are_kernels_that_there_are() -> None:
    from jitmx import kernels

    names = {f"{name}.{spec.name}" for name in kernels.families() for spec in kernels.family(name).specs}
    assert names >= hazards.SMALLEST


def test_no_ring_turns_in_the_smallest_case_of_moe_decode() -> None:
    from jitmx import arch
    from scripts.protocol import launches

    ((way, case),) = launches.chosen(arch.parse("sm_90a"), ["moe.decode"], smallest=True)
    shape = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", case.name)}
    assert shape["rows"] * shape["top"] == 1  # an item
    clusters = case.launch.blocks // way.knobs.cluster
    rows = -(-shape["intermediate"] // (8 * case.launch.blocks)) + -(-shape["hidden"] // (16 * clusters))
    assert 1 < rows + 1 <= way.knobs.stages  # of a block, and the step that ends them


WGMMA = ("moe.fused", "moe.wgmma", "moe.wgmma_fp8", "moe.fused_fp8")


@pytest.mark.parametrize("way", WGMMA)
def test_no_place_of_an_item_is_taken_twice_in_the_smallest_case_of_moe_wgmma(way: str) -> None:
    from jitmx import arch
    from jitmx.kernels.moe import wgmma
    from scripts.protocol import launches

    ((variant, case),) = launches.chosen(arch.parse("sm_90a"), [way], smallest=True)
    shape = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", case.name)}
    assert shape["rows"] * shape["top"] <= variant.knobs.tile_m and shape["experts"] == 1  # a tile of rows
    sizes = [shape["n"]] if "n" in shape else [2 * shape["intermediate"], shape["hidden"]]
    items = sum(-(-n // variant.knobs.tile_n) for n in sizes)
    assert 1 < items + 1 <= wgmma._ITEMS  # with the item that ends a block
