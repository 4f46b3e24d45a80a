"""What the command line prints: columns, units, sizes and ages it reads."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.cli import options, output

PARAMETER = click.Option(["--value"])


def read_size(text: str) -> int | None:
    return options.byte_count(click.Context(click.Command("x")), PARAMETER, text)


def read_age(text: str) -> float | None:
    return options.duration(click.Context(click.Command("x")), PARAMETER, text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("1K", 1024), ("1.5k", 1536), ("500M", 500 << 20), ("1G", 1 << 30), ("2 GiB", 2 << 30)],
)
def test_a_size_is_read_in_binary_units(text: str, count: int) -> None:
    assert read_size(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1 2", "1e9", "many"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="500M"):
        read_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600)]
)
def test_an_age_is_read_in_seconds(text: str, seconds: float) -> None:
    assert read_age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "3y", "30 days"])
def test_what_is_no_age_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="30d"):
        read_age(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_printed_size_reads_back_within_a_tenth_of_its_unit(count: int) -> None:
    printed = output.size(count)
    value, unit = printed.split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(value) * scale - count) <= 0.051 * scale


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (86_400 * 3, "3 d"), (-5, "in the future")],
)
def test_an_age_is_printed_in_its_largest_whole_unit(seconds: float, words: str) -> None:
    assert output.age(seconds) == words


def test_columns_are_as_wide_as_their_longest_cell_and_numbers_stand_right(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "SIZE"), [("a", 5), ("longer", 12345), ("none", None)], right=("SIZE",))
    assert capsys.readouterr().out.splitlines() == [
        "NAME     SIZE",
        "a           5",
        "longer  12345",
        "none        –",
    ]
