"""cvt against ml_dtypes and, for every rounding, against the neighbours of a value among all values of the format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.convert import DTYPES, conversion

Array = npt.NDArray[Any]
# NaN and overflow are what is tested; the oracles warn about both.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
WIDTH = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}
HALVES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def run(name: str, *operands: Array) -> Array:
    return conversion(("cvt", *name.split("."))).function(*operands)


def halves_of(name: str) -> Array:
    """Every value of f16 or bf16, as float32."""
    return np.arange(1 << 16, dtype=np.uint16).view(HALVES[name]).astype(np.float32)


def near(values: Array) -> Array:
    """float32 values, the midpoints between neighbours, and the floats just beside both."""
    ordered = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float64))
    middles = (ordered[1:] + ordered[:-1]) / 2
    points = np.concatenate((ordered, middles, [ordered[-1] * 1.01, ordered[-1] * 4])).astype(np.float32)
    points = np.concatenate((points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))))
    return np.concatenate((points, -points))


def samples(seed: int, count: int = 200_000) -> Array:
    """float32 of every exponent, specials first."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    bits[:8] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001]
    return bits.view(np.float32)


def small_values(kind: str) -> Array:
    """Value of each code, by ml_dtypes."""
    return np.arange(1 << WIDTH[kind], dtype=np.uint8).view(SMALL[kind][0]).astype(np.float32)


def expected_small(values: Array, kind: str) -> Array:
    dtype, largest = SMALL[kind]
    clipped = np.clip(np.nan_to_num(values, nan=0.0, posinf=largest, neginf=-largest), -largest, largest)
    codes = clipped.astype(np.float32).astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), NAN_CODE[kind], codes)


@pytest.mark.parametrize("kind", SMALL)
def test_f32_rounds_to_small_formats_as_ml_dtypes_does_ties_and_hairs_included(kind: str) -> None:
    values = np.concatenate((near(small_values(kind)), samples(1), halves_of("f16"), halves_of("bf16")))
    other = np.roll(values, 1)
    packed = run(f"rn.satfinite.{kind}x2.f32", values, other)
    shift = 4 if kind == "e2m1" else 8
    assert packed.dtype == DTYPES[f"{kind}x2"]
    np.testing.assert_array_equal(packed >> shift, expected_small(values, kind))
    np.testing.assert_array_equal(packed & ((1 << shift) - 1), expected_small(other, kind))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kind", SMALL)
def test_every_16_bit_pattern_rounds_to_small_formats_as_ml_dtypes_does(kind: str, half: str) -> None:
    low = np.arange(1 << 16, dtype=np.uint32)
    high = np.roll(low, 12345)
    packed = run(f"rn.satfinite.{kind}x2.{half}x2", (high << 16) | low)
    shift = 4 if kind == "e2m1" else 8
    np.testing.assert_array_equal(packed & ((1 << shift) - 1), expected_small(halves_of(half), kind))
    np.testing.assert_array_equal(packed >> shift, expected_small(np.roll(halves_of(half), 12345), kind))


@pytest.mark.parametrize("kind", SMALL)
def test_every_small_code_widens_to_its_value_in_f16(kind: str) -> None:
    shift = 4 if kind == "e2m1" else 8
    codes = np.arange(1 << WIDTH[kind], dtype=np.uint32)
    packed = run(f"rn.f16x2.{kind}x2", ((codes[::-1] << shift) | codes).astype(DTYPES[f"{kind}x2"]))
    low, high = (packed & 0xFFFF).astype(np.uint16), (packed >> 16).astype(np.uint16)
    wanted = small_values(kind)
    for got, value in ((low, wanted), (high, wanted[::-1])):
        nan = np.isnan(value)
        np.testing.assert_array_equal(got[~nan], value[~nan].astype(np.float16).view(np.uint16))
        assert (got[nan] == 0x7FFF).all()


def test_nan_becomes_the_largest_magnitude_where_a_format_has_no_nan() -> None:
    nan = np.array([np.nan, -np.nan], np.float32)
    assert run("rn.satfinite.e2m1x2.f32", nan, nan).tolist() == [0x77, 0x77]
    assert run("rn.satfinite.e2m3x2.f32", nan, nan).tolist() == [0x1F1F, 0x1F1F]
    assert run("rn.satfinite.e3m2x2.f32", nan, nan).tolist() == [0x1F1F, 0x1F1F]
    assert run("rn.satfinite.e4m3x2.f32", nan, nan).tolist() == [0x7F7F, 0x7F7F]


def test_relu_clears_negative_results_and_keeps_nan() -> None:
    a = np.array([-1.0, -0.0, 2.0, np.nan], np.float32)
    zero = np.zeros(4, np.float32)
    assert run("rn.relu.bf16.f32", a).tolist() == [0, 0, 0x4000, 0x7FFF]
    assert run("rn.relu.f16.f32", a).tolist() == [0, 0, 0x4000, 0x7FFF]
    assert (run("rn.satfinite.relu.e4m3x2.f32", a, zero) >> 8).tolist() == [0, 0, 0x40, 0x7F]


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", [False, True])
def test_scales_are_powers_of_two_of_the_magnitude(rounding: str, satfinite: bool) -> None:
    values = samples(2)
    values[8:12] = [2.0**-127, 2.0**-126, 2.0**127, np.nextafter(np.float32(2.0**127), np.float32(np.inf))]
    flag = ".satfinite" if satfinite else ""
    codes = run(f"{rounding}{flag}.ue8m0x2.f32", values, np.zeros_like(values)) >> 8
    magnitude = np.abs(values.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log2(magnitude)
        mantissa, exponent = np.frexp(magnitude)
    floor = exponent - 1
    wanted = np.where((rounding == "rp") & (mantissa != 0.5), floor + 1, floor)
    wanted = np.where(np.isinf(power) & (power < 0), -127, np.maximum(wanted, -127))
    wanted = np.where(np.isinf(magnitude), 128, wanted)
    wanted = np.minimum(wanted, 127) if satfinite else wanted
    wanted = np.where(np.isnan(values), 128, wanted)
    np.testing.assert_array_equal(codes, wanted + 127)


def test_scales_from_bf16_and_back_agree_with_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint16)
    widened = run("rn.bf16x2.ue8m0x2", (codes << 8) | codes[::-1])
    values = (widened >> 16).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(values, codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    back = run("rz.ue8m0x2.bf16x2", widened)
    np.testing.assert_array_equal(back, (codes << 8) | codes[::-1])


def test_f32_rounds_to_bf16_and_f16_as_the_libraries_do() -> None:
    values = np.concatenate((samples(3), near(halves_of("f16"))[::3], near(halves_of("bf16"))[::3]))
    nan = np.isnan(values)
    for name, dtype in HALVES.items():
        with np.errstate(over="ignore"):
            wanted = np.where(nan, np.uint16(0x7FFF), values.astype(dtype).view(np.uint16))
        np.testing.assert_array_equal(run(f"rn.{name}.f32", values), wanted)
        packed = run(f"rn.{name}x2.f32", values, values[::-1])
        np.testing.assert_array_equal(packed >> 16, wanted)
        np.testing.assert_array_equal(packed & 0xFFFF, wanted[::-1])


def rounded(values: Array, table: Array, rounding: str) -> Array:
    """Values rounded to `table` (all finite values of a format, ascending), by looking at both neighbours."""
    exact = values.astype(np.float64)
    above = table[np.clip(np.searchsorted(table, exact, "left"), 0, len(table) - 1)]
    below = table[np.clip(np.searchsorted(table, exact, "right") - 1, 0, len(table) - 1)]
    results = {
        "rz": np.where(exact >= 0, below, above),
        "rm": np.where(exact < table[0], -np.inf, below),
        "rp": np.where(exact > table[-1], np.inf, above),
    }
    return np.where(np.isinf(exact), exact, results[rounding])


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", HALVES)
def test_directed_roundings_choose_the_right_neighbour(name: str, rounding: str) -> None:
    table = np.unique(halves_of(name)[np.isfinite(halves_of(name))].astype(np.float64))
    values = np.concatenate((samples(4, 50_000), near(halves_of(name))[::5]))
    values = values[~np.isnan(values)]
    wanted = rounded(values, table, rounding)
    bits = run(f"{rounding}.{name}.f32", values)
    np.testing.assert_array_equal(bits.view(HALVES[name]).astype(np.float64), wanted)
    np.testing.assert_array_equal(bits >> 15, np.signbit(values))


def test_satfinite_stops_at_the_largest_finite_value() -> None:
    huge = np.array([np.inf, -np.inf, 1e38, -1e38, 65520.0, np.nan], np.float32)
    assert run("rn.satfinite.f16.f32", huge).tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7BFF, 0x7FFF]
    assert run("rn.f16.f32", huge).tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x7C00, 0x7FFF]
    assert run("rz.f16.f32", huge).tolist() == [0x7C00, 0xFC00, 0x7BFF, 0xFBFF, 0x7BFF, 0x7FFF]
    assert run("rn.satfinite.bf16.f32", huge)[:2].tolist() == [0x7F7F, 0xFF7F]


def test_tf32_keeps_ten_mantissa_bits_with_ties_away_under_rna() -> None:
    # 1 + 2^-11 is half way between 1 and 1 + 2^-10; 1 + 3·2^-11 lies between 1 + 2^-10 and 1 + 2^-9.
    bits = np.array([0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0xBF801000, 0x7F800000, 0x7FC00000], np.uint32)
    values = bits.view(np.float32)
    away = [0x3F802000, 0x3F804000, 0x3F800000, 0x3F802000, 0xBF802000, 0x7F800000, 0x7FFFFFFF]
    even = [0x3F800000, 0x3F804000, 0x3F800000, 0x3F802000, 0xBF800000, 0x7F800000, 0x7FFFFFFF]
    assert run("rna.tf32.f32", values).tolist() == away
    assert run("rn.tf32.f32", values).tolist() == even
    assert run("rz.relu.tf32.f32", values).tolist()[:5] == [0x3F800000, 0x3F802000, 0x3F800000, 0x3F800000, 0]


def test_widening_is_exact_and_f16_nan_becomes_canonical() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    wide = run("f32.f16", codes)
    nan = np.isnan(halves_of("f16"))
    np.testing.assert_array_equal(wide[~nan].view(np.uint32), halves_of("f16")[~nan].view(np.uint32))
    assert (wide[nan].view(np.uint32) == 0x7FFFFFFF).all()
    np.testing.assert_array_equal(run("f32.bf16", codes).view(np.uint32), codes.astype(np.uint32) << 16)
    np.testing.assert_array_equal(run("f64.f32", samples(5)), samples(5).astype(np.float64))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_f64_rounds_once_to_f32(rounding: str) -> None:
    rng = np.random.default_rng(6)
    values = samples(6, 50_000).astype(np.float64)
    values = values[np.isfinite(values)]
    values = values * (1.0 + rng.choice([0.0, 2.0**-24, 2.0**-25, -(2.0**-24), 2.0**-50], len(values)))
    values[:4] = [3.5e38, -3.5e38, 1e-46, -1e-46]
    nearest = values.astype(np.float32) if rounding == "rn" else None
    got = run(f"{rounding}.f32.f64", values)
    if nearest is not None:
        np.testing.assert_array_equal(got, nearest)
        return
    exact = got.astype(np.float64)
    one_up = np.nextafter(got, np.float32(np.inf)).astype(np.float64)
    one_down = np.nextafter(got, np.float32(-np.inf)).astype(np.float64)
    if rounding == "rm":
        assert ((exact <= values) & (values < one_up)).all()
    elif rounding == "rp":
        assert ((exact >= values) & (values > one_down)).all()
    else:
        assert (np.abs(exact) <= np.abs(values)).all()
        away = np.where(values > 0, one_up, one_down)
        assert ((np.abs(values) < np.abs(away)) | (np.abs(exact) == np.finfo(np.float32).max)).all()


INTEGERS = ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"]
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("rounding", ROUND)
@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("source", ["f32", "f64", "f16", "bf16"])
def test_floats_clamp_to_the_integer_range(source: str, integer: str, rounding: str) -> None:
    info = np.iinfo(DTYPES[integer])
    values = np.concatenate((samples(7, 2000).astype(np.float64), np.arange(-300, 300) / 2))
    edges = np.array([float(info.min), float(info.max)])
    values = np.concatenate((values, edges, np.nextafter(edges, 0), edges * 1.001, edges + 0.5, edges - 0.5))
    with np.errstate(over="ignore", invalid="ignore"):
        if source in HALVES:
            operand = values.astype(HALVES[source]).view(np.uint16)
            values = operand.view(HALVES[source]).astype(np.float64)
        else:
            operand = values.astype(DTYPES[source])
            values = operand.astype(np.float64)
    got = run(f"{rounding}.{integer}.{source}", operand)
    assert got.dtype == DTYPES[integer]
    nan = 1 << info.bits - 1 if source == "f64" or info.bits == 64 else 0
    for result, value in zip(got.tolist(), values.tolist(), strict=True):
        if value != value:
            assert result % (1 << info.bits) == nan
        elif abs(value) == float("inf"):
            assert result == (info.max if value > 0 else info.min)
        else:
            assert result == min(max(int(ROUND[rounding](value)), info.min), info.max)


def test_ftz_flushes_subnormal_inputs_before_rounding_to_an_integer() -> None:
    tiny = np.array([1e-40, -1e-40], np.float32)
    assert run("rpi.s32.f32", tiny).tolist() == [1, 0]
    assert run("rpi.ftz.s32.f32", tiny).tolist() == [0, 0]
    assert run("rmi.ftz.s32.f32", tiny).tolist() == [0, 0]


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("destination", INTEGERS)
def test_integers_wrap_and_saturate_on_demand(destination: str, source: str) -> None:
    low, high = (f(np.iinfo(DTYPES[source])) for f in (lambda i: i.min, lambda i: i.max))
    values = [low, low + 1, 0, 1, 100, 127, high // 2, high - 1, high]
    operand = np.array(values, DTYPES[source])
    info = np.iinfo(DTYPES[destination])
    wrapped = [(v - info.min) % (1 << info.bits) + info.min for v in values]
    assert run(f"{destination}.{source}", operand).tolist() == wrapped
    assert run(f"sat.{destination}.{source}", operand).tolist() == [min(max(v, info.min), info.max) for v in values]


@pytest.mark.parametrize("source", ["s64", "u64"])
def test_64_bit_integers_round_once(source: str) -> None:
    rng = np.random.default_rng(8)
    info = np.iinfo(DTYPES[source])
    shifts = rng.integers(0, 63, 3000)
    values = [
        int(v) >> int(s) for v, s in zip(rng.integers(info.min, info.max, 3000, DTYPES[source]), shifts, strict=True)
    ]
    # Ties of f32 and f64, and a unit beside them, where rounding twice goes wrong.
    values += [(1 << 60) + (1 << 36) + d for d in (-1, 0, 1)] + [(1 << 62) + (1 << 9) + d for d in (-1, 0, 1)]
    values += [3 << 60 | 1 << 37 | 1, info.max, info.min]
    operand = np.array(values, DTYPES[source])
    for target, digits in (("f64", 53), ("f32", 24), ("bf16", 8)):
        for rounding in ("rn", "rz", "rm", "rp"):
            got = run(f"{rounding}.{target}.{source}", operand)
            if target == "bf16":
                got = (got.astype(np.uint32) << 16).view(np.float32)
            assert [int(v) for v in got.tolist()] == [round_int(v, digits, rounding) for v in values]


def round_int(value: int, digits: int, rounding: str) -> int:
    """`value` with `digits` significant bits."""
    magnitude = abs(value)
    shift = max(magnitude.bit_length() - digits, 0)
    floor, rest = magnitude >> shift, magnitude & ((1 << shift) - 1)
    half = 1 << shift >> 1
    if rounding == "rn":
        up = shift > 0 and (rest > half or (rest == half and floor & 1 == 1))
    else:
        up = rest > 0 and ((rounding == "rp" and value > 0) or (rounding == "rm" and value < 0))
    return (-1 if value < 0 else 1) * (floor + up << shift)


def test_floats_round_to_integral_floats() -> None:
    values = np.array([-2.5, -0.3, 0.5, 1.5, 2.5, np.inf, 1e30], np.float32)
    assert run("rni.f32.f32", values).tolist() == [-2.0, -0.0, 0.0, 2.0, 2.0, np.inf, np.float32(1e30)]
    assert run("rpi.f32.f32", values).tolist()[:3] == [-2.0, -0.0, 1.0]
    assert np.signbit(run("rzi.f32.f32", values)[1])
    halves = values[:5].astype(np.float16).view(np.uint16)
    assert run("rmi.f16.f16", halves).view(np.float16).tolist() == [-3.0, -1.0, 0.0, 1.0, 2.0]


def test_sat_clamps_to_one_and_turns_nan_into_zero() -> None:
    values = np.array([-1.0, -0.0, 0.25, 1.5, np.inf, np.nan], np.float32)
    got = run("sat.f32.f32", values)
    assert got.tolist() == [0.0, 0.0, 0.25, 1.0, 1.0, 0.0]
    assert not np.signbit(got).any()
    assert run("rn.sat.f16.f32", values).tolist() == [0, 0, 0x3400, 0x3C00, 0x3C00, 0]


def test_ftz_flushes_results_to_zeros_of_their_sign() -> None:
    values = np.array([1e-40, -1e-40, 1.5], np.float64)
    got = run("rn.ftz.f32.f64", values)
    assert got.tolist() == [0.0, 0.0, 1.5]
    assert np.signbit(got).tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["rn.e4m3x2.f32", "rz.satfinite.e4m3x2.f32", "rn.e2m1x2.f32", "rn.e2m3x2.f16x2"])
def test_narrow_results_are_rounded_to_the_nearest_and_saturate(name: str) -> None:
    with pytest.raises(SimulationError, match=r"but with \.rn\.satfinite"):
        conversion(("cvt", *name.split(".")))


@pytest.mark.parametrize(
    "name", ["rn.bf16.e9m9", "rs.f16x2.f32", "rn.f32.e4m3x2", "rn.satfinite.e4m3x2.s32", "wild.f32.f64"]
)
def test_an_unknown_conversion_is_named(name: str) -> None:
    with pytest.raises(SimulationError, match="cvt"):
        conversion(("cvt", *name.split(".")))
