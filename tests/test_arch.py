"""SM targets: every spelling is understood, and a target that does not exist is answered with the nearest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import arch
from jitmx.arch import SUPPORTED, Arch
from jitmx.errors import ArchError

ARCHES = tuple(SUPPORTED.values())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_121", "sm_121a"),
        ("12.1", "sm_121a"),
        ("121a", "sm_121a"),
        ("12.1a", "sm_121a"),
        ("121", "sm_121a"),
        ("compute_121", "sm_121a"),
        ("SM_121A", "sm_121a"),
        ("sm121", "sm_121a"),
        (" sm_121 ", "sm_121a"),
        ("sm_120", "sm_120a"),
        ("sm_120f", "sm_120f"),
        ("12.0f", "sm_120f"),
        ("sm_90", "sm_90a"),
        ("9.0", "sm_90a"),
        ("90a", "sm_90a"),
        ("sm_100", "sm_100a"),
        ("10.3", "sm_103a"),
        ("sm_80", "sm_80"),
        ("8.6", "sm_86"),
        ("compute_89", "sm_89"),
    ],
)
def test_a_spelling_means_one_target(text: str, name: str) -> None:
    assert arch.parse(text).name == name


@given(
    target=st.sampled_from(ARCHES), prefix=st.sampled_from(["sm_", "sm", "compute_", ""]),
    point=st.sampled_from([".", "", "_"]), upper=st.booleans(), space=st.sampled_from(["", " ", "\n"]),
)  # fmt: skip
def test_every_target_is_found_by_all_its_spellings(
    target: Arch, prefix: str, point: str, upper: bool, space: str
) -> None:
    text = f"{space}{prefix}{target.major}{point}{target.minor}{target.suffix}{space}"
    assert arch.parse(text.upper() if upper else text) is target
    assert arch.parse(str(target)) is target


@given(st.text(max_size=12))
def test_any_other_text_is_refused_with_all_targets(text: str) -> None:
    try:
        assert arch.parse(text) in ARCHES
    except ArchError as error:
        assert all(name in str(error) for name in SUPPORTED)


@pytest.mark.parametrize("text", ["", "hopper", "sm_", "sm_9", "sm_90b", "sm-90", "9", "90 100", "sm_90a a", "sm_1210"])
def test_what_is_no_target_is_refused_with_all_targets(text: str) -> None:
    with pytest.raises(ArchError) as error:
        arch.parse(text)
    assert str(error.value) == f"{text!r} is not an SM target; write one of: {', '.join(SUPPORTED)}"


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("sm_70", "sm_70", "sm_80"),
        ("7.5", "sm_75", "sm_80"),
        ("sm_87", "sm_87", "sm_86"),
        ("sm_80a", "sm_80a", "sm_80"),
        ("sm_90f", "sm_90f", "sm_90a"),
        ("sm_101", "sm_101", "sm_100a"),
        ("sm_110", "sm_110", "sm_103a"),
        ("sm_121f", "sm_121f", "sm_121a"),
        ("sm_123", "sm_123", "sm_121a"),
        ("99.0", "sm_990", "sm_121a"),
    ],
)
def test_an_unsupported_target_is_answered_with_the_nearest(text: str, name: str, nearest: str) -> None:
    with pytest.raises(ArchError) as error:
        arch.parse(text)
    assert str(error.value) == (
        f"jitmx has no kernels for {name}; the nearest it has is {nearest} (all: {', '.join(SUPPORTED)})"
    )


@given(target=st.sampled_from(ARCHES), major=st.integers(1, 15), minor=st.integers(0, 9))
def test_a_cubin_runs_on_its_chip_and_without_a_suffix_on_later_ones_of_its_generation(
    target: Arch, major: int, minor: int
) -> None:
    assert target.runs_on(target.major, target.minor)
    runs = target.runs_on(major, minor)
    if target.suffix == "a":
        assert runs == ((major, minor) == (target.major, target.minor))
    else:
        assert runs == (major == target.major and minor >= target.minor)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
        ((12, 2), "sm_120f"),
    ],
)
def test_a_device_gets_the_most_particular_target_that_runs_on_it(capability: tuple[int, int], name: str) -> None:
    assert arch.of_device(*capability).name == name


@given(major=st.integers(1, 20), minor=st.integers(0, 9))
def test_a_device_gets_a_target_that_runs_on_it_or_is_refused(major: int, minor: int) -> None:
    try:
        assert arch.of_device(major, minor).runs_on(major, minor)
    except ArchError as error:
        assert not any(target.runs_on(major, minor) for target in ARCHES)
        assert f"compute capability {major}.{minor}" in str(error)
        assert all(name in str(error) for name in SUPPORTED)


def test_targets_are_told_apart_by_name_alone() -> None:
    assert [target.name for target in ARCHES] == list(SUPPORTED)
    assert [str(target) for target in ARCHES] == list(SUPPORTED)
    assert arch.parse("sm_120a") != arch.parse("sm_120f")


@pytest.mark.parametrize(("name", "number"), [("sm_80", 800), ("sm_90a", 900), ("sm_103a", 1030), ("sm_121a", 1210)])
def test_a_number_is_what_cuda_arch_holds(name: str, number: int) -> None:
    assert SUPPORTED[name].number == number


def test_block_scaled_mma_takes_a_suffix_and_tma_comes_with_hopper() -> None:
    assert {target.name for target in ARCHES if "mma_block_scale" in target.features} == {
        "sm_120a", "sm_120f", "sm_121a"
    }  # fmt: skip
    for target in ARCHES:
        for feature in ("tma", "pdl", "mbarrier"):
            assert (feature in target.features) == (target.major >= 9)
