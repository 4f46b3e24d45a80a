"""What sums of E4M3 products lose in tensor cores: the bound that cases allow, held by an emulation of the rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import short_sums
from evidence import made_from
from jitmx import arch, kernels
from jitmx.kernels import fp8_sums
from jitmx.registry.key import frame
from jitmx.sim.verify import verify

HOPPER = arch.parse("sm_90")
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "h in E4M3": ("moe.fused_fp8", {"encoding": "nibble", "tile_m": 64, "tile_n": 128, "stages": 2}),
    "h in E4M3, deep stages": ("moe.fused_fp8", {"encoding": "nibble", "tile_m": 64, "stages": 4, "depth": 4}),
    "h in bf16": ("moe.wgmma_fp8", {"encoding": "nibble", "tile_m": 64, "tile_n": 128, "stages": 2}),
    "dense": (
        "linear.wgmma_fp8",
        {"bias": True, "groups": 2, "tile_m": 32, "stages": 2, "ring": 2, "encoding": "nibble"},
    ),
    "dense, promoted": (
        "linear.wgmma_fp8",
        {"residual": "pair", "promote": True, "groups": 2, "tile_m": 32, "stages": 2},
    ),
}


def operands(k: int, seed: int) -> tuple[Any, Any]:
    """Random rows of X in E4M3 and of W in E2M1 with a scale a block."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((48, k))
    x = (x * 440 / np.abs(x).max(axis=1, keepdims=True)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.repeat(np.exp2(generator.integers(-2, 2, (48, k // 32))), 32, axis=1)
    return x, MAGNITUDES[generator.integers(0, 8, (48, k))] * generator.choice((-1.0, 1.0), (48, k)) * scales


@pytest.mark.parametrize("k", [32, 64, 96, 128, 256, 672, 1376, 2880, 8192])
def test_short_sums_stay_within_the_bound_of_cases_and_come_near_it(k: int) -> None:
    ratios = []
    for seed in range(3):
        x, w = operands(k, seed)
        off = np.abs(short_sums.product(x, w) - x @ w.T)
        ratios.append(float((off / fp8_sums.lost(np.abs(x) @ np.abs(w).T, k)).max()))
    assert 0.2 <= max(ratios) <= 1.0, ratios


@pytest.mark.parametrize("k", [32, 64, 96, 128, 256])
def test_sums_of_which_few_terms_are_most_stay_within_the_bound_that_knows_of_them(k: int) -> None:
    beyond, ratios = [], []
    for seed in range(3):
        x, w = operands(k, seed)
        x = (x**5 / 448**4).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        off, sizes = np.abs(short_sums.product(x, w) - x @ w.T), np.abs(x) @ np.abs(w).T
        norms = np.sqrt(x**2 @ (w**2).T)
        there = sizes > 0
        beyond.append(float((off[there] / fp8_sums.lost(sizes, k)[there]).max()))
        ratios.append(float((off[there] / fp8_sums.lost(sizes, k, norms)[there]).max()))
    assert 0.1 <= max(ratios) <= 1.0, ratios
    assert max(beyond) > 1.0, "the bound of terms that are alike would do"


def test_what_fits_the_bits_that_are_kept_is_summed_exactly() -> None:
    x, w = np.full((1, 64), 1.0), np.full((1, 64), 6.0)
    assert short_sums.product(x, w) == 384
    x[0, 0], w[0, 1:] = 2.0**13, 1.0  # 49152 of 6 * 2^13, with a unit of 4: each 1 behind it is cut off
    assert short_sums.product(x, w)[0, 0] == 6 * 2**13


@pytest.mark.parametrize("name", VARIANTS)
def test_cases_pass_with_sums_as_tensor_cores_make_them(
    name: str, monkeypatch: pytest.MonkeyPatch, stands: Callable[..., None]
) -> None:
    kernel, knobs = VARIANTS[name]
    family, own = kernel.split(".")
    one = kernels.family(family).spec(own).variant(HOPPER, **knobs)

    def all_pass() -> None:
        short_sums.in_the_simulator(monkeypatch)
        verdict = verify(one)
        assert verdict.passed, verdict.failure

    made, sums = made_from(one).encode(), Path(short_sums.__file__).read_bytes()
    stands(one, frame([("passes", made), ("with sums of", sums)]), all_pass)
