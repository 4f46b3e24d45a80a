"""float64 rounded towards zero, minus and plus infinity, against integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from assembly import evaluate

Array = npt.NDArray[Any]

EDGES = [0.0, 5e-324, 2.2250738585072014e-308, 1.0, 1.0 + 2**-52, 3.0, 1e-200, 1e200, 1.7976931348623157e308, 2.0**53]


def numbers(count: int) -> list[Array]:
    signed = np.array([*EDGES, *(-edge for edge in EDGES)])
    rng = np.random.default_rng(count)
    crossed = [x.ravel()[:: 7 if count == 3 else 1] for x in np.meshgrid(*[signed] * count)]
    near = [rng.standard_normal(600) * 2.0 ** rng.integers(-40, 40, 600) for _ in range(count)]
    return [np.concatenate(columns) for columns in zip(crossed, near, strict=True)]


def below(value: Fraction) -> float:
    """The largest float64 at most `value`, minus infinity included."""
    if value == 0:
        return 0.0
    exponent = max(abs(value.numerator).bit_length() - value.denominator.bit_length() - 54, -1074)
    while True:
        scaled = math.floor(value / Fraction(2) ** exponent)
        if abs(scaled) <= 1 << 53:
            break
        exponent += 1
    limit = int(np.finfo(float).max)
    if value > limit:
        return math.ldexp((1 << 53) - 1, 971)
    return -math.inf if value < -limit else math.ldexp(scaled, exponent)


def rounded(value: Fraction, how: str) -> float:
    if how == "rm" or (how == "rz" and value > 0):
        return below(value)
    return -below(-value)


OPERATIONS: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("how", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_lie_on_the_side_that_the_rounding_names(name: str, how: str) -> None:
    count = 3 if name == "fma" else 2
    values = numbers(count)
    if name == "div":
        values = [x[values[1] != 0] for x in values]
    operands = ", ".join("abc"[:count])
    got = evaluate(f"{name}.{how}.f64 z, {operands};", *values, result="f8")
    for found, *row in zip(got.tolist(), *(x.tolist() for x in values), strict=True):
        want = rounded(OPERATIONS[name](*map(Fraction, row)), how)
        assert found == want, (name, how, row, found, want)


@pytest.mark.parametrize("how", ["rz", "rm", "rp"])
def test_roots_and_reciprocals(how: str) -> None:
    values = np.abs(numbers(2)[0])
    for x, found in zip(values.tolist(), evaluate(f"sqrt.{how}.f64 z, a;", values, result="f8").tolist(), strict=True):
        near = Fraction(found)
        beyond = Fraction(math.nextafter(found, math.inf if how != "rp" else -math.inf))
        assert near**2 == x or (near**2 < x < beyond**2 if how != "rp" else beyond**2 < x < near**2), (x, found)
    some = values[values != 0]
    for x, found in zip(some.tolist(), evaluate(f"rcp.{how}.f64 z, a;", some, result="f8").tolist(), strict=True):
        assert found == rounded(1 / Fraction(x), how)


def test_zeros_infinities_and_nan() -> None:
    a = np.array([1.0, -1.0, 0.0, -0.0, -0.0, 0.0, np.inf, np.inf, np.nan])
    b = np.array([-1.0, 1.0, 0.0, -0.0, 0.0, -0.0, 1.0, -np.inf, 1.0])
    for how, zeros in (("rm", "--+---"), ("rp", "+++-++"), ("rz", "+++-++")):
        got = evaluate(f"add.{how}.f64 z, a, b;", a, b, result="f8")
        assert "".join("-" if np.signbit(x) else "+" for x in got[:6]) == zeros
        assert got[6] == np.inf and np.isnan(got[7:]).all()
    division = evaluate("div.rz.f64 z, a, b;", np.array([1.0, -1.0, 0.0]), np.zeros(3), result="f8")
    assert division[0] == np.inf and division[1] == -np.inf and np.isnan(division[2])
