"""Float instructions against exact rational arithmetic, rounded once; bits and all."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from assembly import evaluate

Array = npt.NDArray[Any]

FORMATS: dict[str, tuple[int, int, Any]] = {  # mantissa bits, smallest exponent, dtype
    "f16": (10, -14, np.float16),
    "bf16": (7, -126, ml_dtypes.bfloat16),
    "f32": (23, -126, np.float32),
}
EDGES = {
    "f16": [
        0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3BFF, 0x3C00,
        0x3C01, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0xFE00,
    ],
    "bf16": [
        0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F7F, 0x3F80,
        0x3F81, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFC0,
    ],
    "f32": [
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
        0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC00000, 0x1A000000, 0x5F000000,
    ],
}  # fmt: skip


def operands(kind: str, count: int) -> list[Array]:
    """Every combination of edge cases, then random bits, then numbers of like size."""
    bits = 32 if kind == "f32" else 16
    rng = np.random.default_rng(count)
    edges = np.array(EDGES[kind], f"u{bits // 8}")
    crossed = [x.ravel() for x in np.meshgrid(*[edges] * count)]
    if count == 3:
        crossed = [x[::3] for x in crossed]
    free = [rng.integers(0, 1 << bits, 1500).astype(edges.dtype) for _ in range(count)]
    near = [
        (rng.standard_normal(1500) * np.exp2(rng.integers(-6, 6, 1500))).astype(FORMATS[kind][2]).view(edges.dtype)
        for _ in range(count)
    ]
    return [np.concatenate(columns) for columns in zip(crossed, free, near, strict=True)]


def value(bits: int, kind: str) -> float:
    size = 4 if kind == "f32" else 2
    return float(np.array(bits, f"u{size}").view(FORMATS[kind][2]))


def rounded(exact: Fraction, kind: str, rounding: str, zero_sign: bool) -> int:
    """Bits of the number nearest to `exact` in the direction asked for."""
    mantissa, lowest, dtype = FORMATS[kind]
    width = 32 if kind == "f32" else 16
    sign = exact < 0 or (exact == 0 and zero_sign)
    magnitude = abs(exact)
    if magnitude == 0:
        return sign << width - 1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent  # the largest of which 2 to its power is not over the magnitude
    exponent = max(exponent, lowest)
    unit = Fraction(2) ** (exponent - mantissa)
    steps, rest = divmod(magnitude, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and steps % 2 == 1),
        "rz": False,
        "rp": rest > 0 and not sign,
        "rm": rest > 0 and sign,
    }[rounding]
    code = (exponent - lowest) * (1 << mantissa) + int(steps) + up
    infinity = int(np.array(np.inf, dtype).view(f"u{width // 8}"))
    if code >= infinity:
        stays = rounding == "rz" or (rounding == "rp" and sign) or (rounding == "rm" and not sign)
        code = infinity - 1 if stays else infinity
    return code | sign << width - 1


def expected(numbers: list[float], apply: Callable[..., Any], kind: str, rounding: str) -> int:
    """Bits of an operation on numbers: rational where all are finite, that of float64 where one is not."""
    nan = 0x7FFFFFFF if kind == "f32" else 0x7FFF
    if all(map(math.isfinite, numbers)):
        # float64 tells the sign of a zero: opposites cancel to +0, or to -0 when rounding down.
        zero = float(apply(*map(np.float64, numbers)))
        exact = apply(*map(Fraction, numbers))
        negative = math.copysign(1, zero) < 0
        if exact == 0 and rounding == "rm" and not negative and apply not in (product,):
            signs = [math.copysign(1, x) for x in numbers]
            terms = [signs[0] * signs[1], signs[2]] if len(numbers) == 3 else [signs[0], apply_sign(apply) * signs[1]]
            negative = not (terms[0] > 0 and terms[1] > 0)
        return rounded(exact, kind, rounding, negative)
    with np.errstate(all="ignore"):
        result = float(apply(*map(np.float64, numbers)))
    if math.isnan(result):
        return nan
    return int(np.array(result, FORMATS[kind][2]).view("u4" if kind == "f32" else "u2"))


def product(x: Any, y: Any) -> Any:
    return x * y


def total(x: Any, y: Any) -> Any:
    return x + y


def difference(x: Any, y: Any) -> Any:
    return x - y


def fused(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def apply_sign(apply: Callable[..., Any]) -> int:
    return -1 if apply is difference else 1


CASES = [
    (f"{name}.{rounding}.{kind}", apply, kind, rounding)
    for kind in ("f32", "f16", "bf16")
    for name, apply in (("add", total), ("sub", difference), ("mul", product), ("fma", fused))
    for rounding in (("rn", "rz", "rm", "rp") if kind == "f32" else ("rn",))
]


@pytest.mark.parametrize(("name", "apply", "kind", "rounding"), CASES, ids=[case[0] for case in CASES])
def test_results_are_rounded_once(name: str, apply: Callable[..., Any], kind: str, rounding: str) -> None:
    columns = operands(kind, 3 if apply is fused else 2)
    listed = ", ".join("abc"[: len(columns)])
    got = evaluate(f"{name} z, {listed};", *columns, result=f"u{columns[0].dtype.itemsize}")
    for *bits, z in zip(*(column.tolist() for column in columns), got.tolist(), strict=True):
        want = expected([value(x, kind) for x in bits], apply, kind, rounding)
        assert z == want, ([hex(x) for x in bits], hex(z), hex(want))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed_operations_are_two_of_their_own(name: str, kind: str) -> None:
    count = 3 if name == "fma" else 2
    columns = operands(kind, count)
    length = len(columns[0]) // 2 * 2
    halves = [column[:length] for column in columns]
    single = evaluate(f"{name}.rn.{kind} z, {', '.join('abc'[:count])};", *halves, result="u2")
    words = [np.ascontiguousarray(half).view("u4") for half in halves]
    packed = evaluate(f"{name}.rn.{kind}x2 z, {', '.join('abc'[:count])};", *words)
    np.testing.assert_array_equal(packed.view("u2"), single)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_quotients_and_roots(rounding: str) -> None:
    a, b = operands("f32", 2)
    got = evaluate(f"div.{rounding}.f32 z, a, b;", a, b)
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        p, q = value(x, "f32"), value(y, "f32")
        if math.isfinite(p) and math.isfinite(q) and q:
            sign = math.copysign(1, p) * math.copysign(1, q) < 0
            assert z == rounded(Fraction(p) / Fraction(q), "f32", rounding, sign), (hex(x), hex(y))
    got = evaluate(f"sqrt.{rounding}.f32 z, a;", a)
    for x, z in zip(a.tolist(), got.tolist(), strict=True):
        p = value(x, "f32")
        if p < 0 or math.isnan(p):
            assert z == 0x7FFFFFFF
        elif math.isfinite(p) and p:
            low, high = Fraction(value(z, "f32")), Fraction(p)
            step = Fraction(float(np.spacing(np.float32(value(z, "f32")))))
            if rounding in ("rz", "rm"):
                assert low * low <= high < (low + step) ** 2
            elif rounding == "rp":
                assert (low - step) ** 2 < high <= low * low
            else:
                assert (low - step / 2) ** 2 <= high <= (low + step / 2) ** 2


def test_flushing_saturation_and_relu() -> None:
    a, b = operands("f32", 2)
    tiny = np.abs(a.view("f4")) < 2.0**-126
    with np.errstate(all="ignore"):
        flat = np.where(tiny, np.copysign(np.float32(0), a.view("f4")), a.view("f4"))
        other = np.where(np.abs(b.view("f4")) < 2.0**-126, np.copysign(np.float32(0), b.view("f4")), b.view("f4"))
        total = flat + other
        total = np.where(np.abs(total) < 2.0**-126, np.copysign(np.float32(0), total), total)
    got = evaluate("add.ftz.f32 z, a, b;", a, b).view("f4")
    np.testing.assert_array_equal(got[~np.isnan(total)], total[~np.isnan(total)])
    got = evaluate("add.sat.f32 z, a, b;", a, b).view("f4")
    with np.errstate(all="ignore"):
        whole = a.view("f4") + b.view("f4")
    np.testing.assert_array_equal(got, np.where(np.isnan(whole), 0, np.clip(whole, 0, 1)))
    x, y = (np.array([0x3C00, 0xBC00, 0x7E00, 0x8001], "u2") for _ in range(2))
    got = evaluate("fma.rn.relu.f16 z, a, b, c;", x, np.full(4, 0x3C00, "u2"), np.zeros(4, "u2"), result="u2")
    assert got.tolist() == [0x3C00, 0, 0x7FFF, 0]
    assert len(y) == 4


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_minima_order_zeros_and_step_over_nan(kind: str) -> None:
    a, b = operands(kind, 2)
    size = a.dtype.itemsize
    nan = 0x7FFFFFFF if kind == "f32" else 0x7FFF
    for name in ("min", "max"):
        plain = evaluate(f"{name}.{kind} z, a, b;", a, b, result=f"u{size}")
        strict = evaluate(f"{name}.NaN.{kind} z, a, b;", a, b, result=f"u{size}")
        for x, y, z, s in zip(a.tolist(), b.tolist(), plain.tolist(), strict.tolist(), strict=True):
            p, q = value(x, kind), value(y, kind)
            keys = sorted([(p, math.copysign(1, p), x), (q, math.copysign(1, q), y)]) if p == p and q == q else None
            want = nan if keys is None else keys[0 if name == "min" else -1][2]
            assert s == want
            if keys is None and (p == p or q == q):
                want = x if p == p else y
            assert z == want, (hex(x), hex(y))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_sign_operations_leave_the_other_bits(kind: str) -> None:
    a = operands(kind, 1)[0]
    size = a.dtype.itemsize
    sign = 1 << 8 * size - 1
    assert evaluate(f"neg.{kind} z, a;", a, result=f"u{size}").tolist() == [x ^ sign for x in a.tolist()]
    assert evaluate(f"abs.{kind} z, a;", a, result=f"u{size}").tolist() == [x & ~sign for x in a.tolist()]


def test_ordered_and_unordered_comparisons() -> None:
    a, b = operands("f32", 2)
    with np.errstate(all="ignore"):
        x, y = a.view("f4"), b.view("f4")
        nan = np.isnan(x) | np.isnan(y)
        for name, ordered in (("lt", x < y), ("ge", x >= y), ("eq", x == y), ("ne", (x != y) & ~nan)):
            for suffix, want in (("", ordered), ("u", ordered | nan)):
                got = evaluate(f"setp.{name}{suffix}.f32 p0, a, b; selp.u32 z, 1, 0, p0;", a, b)
                np.testing.assert_array_equal(got, want, err_msg=name + suffix)
        np.testing.assert_array_equal(evaluate("setp.nan.f32 p0, a, b; selp.u32 z, 1, 0, p0;", a, b), nan)
        np.testing.assert_array_equal(evaluate("set.num.u32.f32 z, a, b;", a, b), np.where(nan, 0, 0xFFFFFFFF))


def test_float64() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(500).view("u8") for _ in range(2))
    c = -(a.view("f8") * b.view("f8"))
    got = evaluate("fma.rn.f64 z, a, b, c;", a, b, c.view("u8"), result="f8")
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.view("f8"), b.view("f8"), c, strict=True)]
    assert got.tolist() == [float(x) for x in exact]
    np.testing.assert_array_equal(evaluate("add.f64 z, a, b;", a, b, result="f8"), a.view("f8") + b.view("f8"))


@pytest.mark.parametrize(
    ("name", "function", "ulps"),
    [("ex2", np.exp2, 2), ("lg2", np.log2, 2), ("rcp", lambda x: 1 / x, 1), ("rsqrt", lambda x: 1 / np.sqrt(x), 2)],
)
def test_approximations_lie_within_their_bound(name: str, function: Callable[[Array], Array], ulps: int) -> None:
    a = np.exp2(np.random.default_rng(3).uniform(-6, 6, 500)).astype("f4")
    got = evaluate(f"{name}.approx.f32 z, a;", a, result="f4")
    want = function(a.astype("f8"))
    assert (np.abs(got - want) <= ulps * np.spacing(np.abs(want).astype("f4"))).all()


def test_an_approximate_tanh_has_eleven_bits() -> None:
    a = np.concatenate([np.random.default_rng(6).uniform(-4, 4, 500), [0.0, 20.0, -20.0, np.inf, np.nan]]).astype("f4")
    got = evaluate("tanh.approx.f32 z, a;", a, result="f4")
    want = np.tanh(a.astype("f8"))
    off = np.abs(got[:500] - want[:500]) / np.abs(want[:500])
    assert (off <= 2.0**-11).all() and (off > 2.0**-12).sum() > 100
    assert (np.abs(got[:-1]) <= 1).all() and got[500] == 0 and got[503] == 1 and np.isnan(got[504])


@pytest.mark.parametrize("form", ["approx", "full", "approx.ftz"])
def test_approximate_quotients_are_off_by_less_than_two_units_and_whole_ones_come_out_less(form: str) -> None:
    a = np.concatenate([np.exp2(np.random.default_rng(4).uniform(-6, 6, 500)), [6.0, 12.0, -9.0]]).astype("f4")
    b = np.concatenate([np.exp2(np.random.default_rng(5).uniform(-6, 6, 500)), [3.0, 1.0, 3.0]]).astype("f4")
    got = evaluate(f"div.{form}.f32 z, a, b;", a, b, result="f4")
    want = a.astype("f8") / b
    off = np.abs(got - want) / np.spacing(np.abs(want).astype("f4"))
    assert (off <= 1.5).all() and (off > 0.5).sum() > 100
    assert (np.abs(got[-3:]) < [2.0, 12.0, 3.0]).all()


def test_a_product_with_nothing_to_add_is_rounded_once_too() -> None:
    """fma with -0 is how kernels multiply pairs of bf16."""
    a, b, _ = operands("bf16", 3)
    length = len(a) // 2 * 2
    zeros = np.full(length // 2, 0x80008000, "u4")
    words = [np.ascontiguousarray(x[:length]).view("u4") for x in (a, b)]
    got = evaluate("fma.rn.bf16x2 z, a, b, c;", *words, zeros).view("u2")
    calm = np.full(length, 0x3FC0, "u2")
    plain = evaluate("fma.rn.bf16x2 z, a, b, c;", calm.view("u4"), (calm ^ 0x8011).view("u4"), zeros).view("u2")
    for p, q, z in [*zip(a.tolist(), b.tolist(), got.tolist(), strict=False), (0x3FC0, 0x3FC0 ^ 0x8011, int(plain[0]))]:
        assert z == expected([value(p, "bf16"), value(q, "bf16"), -0.0], fused, "bf16", "rn"), (hex(p), hex(q))
