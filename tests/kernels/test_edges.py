"""Edges of the kernels' arithmetic: between them the values of a variant's cases stand on all sides of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from contracts import some
from evidence import drawn
from jitmx import arch, kernels
from jitmx.cli import targets
from jitmx.registry.case import Case, between, deviation, judged, pair_deviation, summed, untouched
from jitmx.registry.key import frame
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

EDGELESS = {"bandwidth"}  # it sums bits
TILE = 64  # columns of X and W that are packed together


def cases(variant: Variant) -> Sequence[Case]:
    return list(kernels.family(variant.spec.family).cases(variant))


def sides(family: str, name: str, target: str = "sm_121a", **knobs: object) -> set[str]:
    """What the cases of a variant must stand on."""
    variant = kernels.family(family).spec(name).variant(arch.parse(target), **knobs)
    return {side for case in cases(variant) for side in case.sides}


def uncut(variant: Variant, made: Sequence[Case]) -> list[str]:
    """Sizes that end with whole tiles in all of a variant's cases, or in none.

    What is rounded up a tile too far is right where the last one is cut, and a model's sizes are whole tiles.
    """
    if variant.spec.family not in ("linear", "moe") or hasattr(variant.knobs, "hidden_blocks"):
        return []  # knobs fix the sizes
    units = dict.fromkeys(("k", "hidden", "intermediate"), TILE)
    if variant.spec.family == "linear" and hasattr(variant.knobs, "tile_m"):
        units["rows"] = variant.knobs.tile_m
    sizes = {
        name: {case.values[name] % unit == 0 for case in made if name in case.values} for name, unit in units.items()
    }
    return [f"{name} by {units[name]}" for name, whole in sizes.items() if len(whole) == 1]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "sm_121a"])
def test_cases_of_verified_kernels_leave_no_side_untouched_and_cut_the_last_tile_or_not(
    target: str, nightly: bool, stands: Callable[..., None]
) -> None:
    each: dict[tuple[str, str], list[Variant]] = {}
    for variant in targets.verified_variants((arch.parse(target),), ()):
        each.setdefault((variant.spec.family, variant.spec.name), []).append(variant)
    for several in each.values():
        asked = some(several, nightly)
        proof = frame([("cases", drawn(asked).encode()), ("asks", Path(__file__).read_bytes())])
        stands(asked[0], proof, functools.partial(stand_on_all_sides, asked))


def stand_on_all_sides(variants: Sequence[Variant]) -> None:
    left = {}
    for variant in variants:
        made = cases(variant)
        if variant.spec.family not in EDGELESS:
            assert any(case.sides for case in made), f"{variant.name} has edges, and declares none"
        if sides := (*untouched(made), *uncut(variant, made)):
            left[variant.name] = sides
    assert not left


def test_linear_declares_what_its_knobs_do() -> None:
    assert sides("linear", "stream", m=2) == {"scale byte 2", "scale byte 128"}
    assert sides("linear", "tile", weight="mxfp8") == {"scale byte 10", "scale byte 134"}
    assert sides("linear", "stream", m=2, scaling="post", scale_range="full") == {
        "scale byte 0", "scale byte 1", "scale byte 254", "scale byte 255",
    }  # fmt: skip
    assert {"epsilon not the usual", "mean square about epsilon"} < sides("linear", "stream", m=2, norm=True)
    assert {"largest in two tiles", "row without a number"} < sides("linear", "stream", m=2, argmax=True)
    assert {"tie to even", "tie to odd", "saturates", "block of scale byte 0"} < sides("linear", "scaled")


def test_a_side_that_no_case_stands_on_is_untouched() -> None:
    def case(**sides: bool) -> Case:
        return Case("one", Launch(1), {}, lambda outputs: 0.0, 0.0, sides=sides)

    assert untouched([case(a=True, b=False), case(a=False, b=False, c=False)]) == ("b", "c")
    assert untouched([case(b=False), dataclasses.replace(case(), sides={"b": True})]) == ()
    assert untouched([]) == ()


def test_one_wrong_element_of_many_shows() -> None:
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((64, 1024)), generator.standard_normal((512, 1024))
    wanted = x @ w.T
    bound = summed(np.abs(x) @ np.abs(w).T, 1024)
    found = wanted.astype(ml_dtypes.bfloat16)
    assert deviation(found, wanted, bound) < 0.6
    usual = float(np.median(np.abs(wanted)))
    place = np.argmin(np.abs(np.abs(wanted) - usual))
    found.ravel()[place] = wanted.ravel()[place] + 0.02 * usual
    ratio = deviation(found, wanted, bound)
    assert ratio > 1 and judged(1e-4, ratio, 0.005) > 0.005
    assert judged(1e-4, 0.9, 0.005) == 1e-4


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_deviation_knows_nan_infinity_and_subnormals(dtype: type) -> None:
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    wanted = np.array([np.nan, 1e300, -1e300, 0.0, 3 * least, 1.0])
    with np.errstate(over="ignore"):
        found = wanted.astype(dtype)
    assert deviation(found, wanted) == 0.0
    assert np.isclose(deviation(np.array([3 * least]).astype(dtype), np.array([0.0])), 3.0)
    for place in range(3):
        other = found.copy()
        other[place] = 7.0
        assert deviation(other, wanted) == np.inf
    other = found.copy()
    other[5] = np.inf
    assert deviation(other, wanted) == np.inf


def test_what_is_cut_is_not_between_what_values_within_a_bound_are_rounded_to() -> None:
    wanted = np.array([1.875, 1.875, 1.8789065, 1.8789065])
    found = np.array([1.875, 1.8671875, 1.8828125, 1.875]).astype(ml_dtypes.bfloat16)
    assert between(found, wanted, 1e-7).tolist() == [True, False, True, False]
    assert between(found, wanted, 1e-6).tolist() == [True, False, True, True]
    assert between(found, wanted, np.inf).all() and not between(np.full(4, np.nan, found.dtype), wanted, 1.0).any()


def test_the_low_part_of_a_pair_is_rounded_to_the_nearest() -> None:
    wanted = np.array([1.0 + 2.0**-9 + 2.0**-16 * 0.7])
    high, low = np.ones(1), np.array([2.0**-9])
    pairs = [np.stack([high, low + places]).astype(ml_dtypes.bfloat16) for places in (2.0**-16, 0.0)]
    assert [pair_deviation(pair, wanted) <= 1.0 for pair in pairs] == [True, False]


def test_a_pair_is_held_to_the_unit_of_its_low_part() -> None:
    wanted = np.array([1.0 + 2.0**-10, np.nan])
    kept = wanted.astype(ml_dtypes.bfloat16)
    low = (wanted - kept.astype(np.float64)).astype(ml_dtypes.bfloat16)
    assert pair_deviation(np.stack([kept, low]), wanted) < 1
    assert pair_deviation(np.stack([kept, np.zeros_like(low)]), wanted) > 1
