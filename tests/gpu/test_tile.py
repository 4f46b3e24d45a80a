"""`linear.tile` on the card, against float64, launched by itself: no table or preference has a say in what runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu.launching import call
from jitmx import build, formats
from jitmx.kernels.linear.arguments import EPSILON
from jitmx.kernels.linear.layout import pack
from jitmx.kernels.linear.mxfp8 import pack_mxfp8
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.tile import KERNEL, SPEC, launch
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

GATE = 0.005  # relative L2 against float64, rounding of the output included
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Evidence = Callable[[object, float | None, str], None]


class Weight:
    """A random weight [n, k] in a packed layout, and its values in float64."""

    def __init__(
        self, n: int, k: int, format: str = "mxfp4", encoding: str = "rotated", scales: tuple[int, int] = (117, 124)
    ) -> None:
        generator = np.random.default_rng(n * k)
        item = formats.get(format)
        bytes_ = generator.integers(*scales, (n, k // 32)).astype(np.uint8)
        if format == "mxfp4":
            codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
            words, packed = pack(codes, bytes_, encoding)
        else:
            codes = formats.encode(generator.standard_normal((n, k)) * 2, item)
            words, packed = pack_mxfp8(codes, bytes_)
        self.n, self.k = n, k
        self.values = torch.from_numpy(formats.dequantize(codes, bytes_, item)).cuda()
        self.words = torch.from_numpy(words.view(np.int32)).cuda()
        self.scales = torch.from_numpy(packed.view(np.int32)).cuda()


weight_of = functools.cache(Weight)  # large ones take seconds to pack in NumPy


class Product:
    """A variant for a shape, ready to be launched."""

    def __init__(self, variant: Variant, m: int, n: int, k: int) -> None:
        self.dtype, self.shape = DTYPES[variant.knobs.dtype], (m, n)
        fixed = {"epsilon": EPSILON, "rows": m, "n": n, "k": k}
        self.step = Step(variant, 0, launch(variant.knobs, LinearProblem(m, n, k), card.multiprocessors(0)), fixed)

    def __call__(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.full(self.shape, torch.nan, dtype=self.dtype, device="cuda")
        call(self.step, x=x, weight=weight.words, scales=weight.scales, bias=bias, residual=residual, y=y)
        return y


def made(**knobs: Any) -> Variant:
    return SPEC.variant(card.arch(0), **knobs)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def checked(variant: Variant, weight: Weight, m: int) -> float:
    """Error of a product of m random rows, with bias and residual where the variant takes them."""
    dtype = DTYPES[variant.knobs.dtype]
    x = torch.randn(m, weight.k, device="cuda").to(dtype)
    bias = torch.randn(weight.n, device="cuda").to(dtype) if variant.knobs.bias else None
    residual = torch.randn(m, weight.n, device="cuda").to(dtype) if variant.knobs.residual else None
    wanted = x.double() @ weight.values.T
    for addend in (bias, residual):
        wanted = wanted if addend is None else wanted + addend.double()
    return error(Product(variant, m, weight.n, weight.k)(x, weight, bias, residual), wanted)


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"tile_n": 128, "warps_n": 4, "warps_m": 1, "blocks_per_sm": 2, "fetch": "late"},
    {"tile_n": 64, "tile_m": 32, "tile_k": 128, "warps_n": 2, "warps_m": 1, "stages": 3, "split_k": 4},
    {"tile_n": 160, "tile_m": 96, "warps_n": 5, "warps_m": 2, "group": 2},
    {"tile_n": 256, "tile_m": 16, "tile_k": 256, "warps_n": 8, "warps_m": 1, "stages": 3, "split_k": 2},
    {"tile_n": 64, "tile_m": 16, "tile_k": 128, "warps_n": 4, "warps_m": 1, "stages": 3, "footprint": 75},
)
# Two of these have a number of blocks a cluster that is no power of two.
CLUSTERS: tuple[dict[str, Any], ...] = (
    {"tile_n": 32, "tile_m": 16, "tile_k": 256, "warps_n": 2, "warps_m": 1, "stages": 3, "split_k": 3},
    {"tile_n": 64, "tile_m": 64, "tile_k": 128, "warps_n": 4, "warps_m": 1, "split_k": 4},
    {"tile_n": 256, "tile_m": 64, "tile_k": 128, "warps_n": 8, "warps_m": 1, "stages": 3, "split_k": 6},
)


def test_every_number_of_rows_from_1_to_300_is_within_the_gate(evidence: Evidence) -> None:
    weight = Weight(329, 480)
    for knobs in SHAPES:
        variant = made(**knobs)
        worst = max(checked(variant, weight, m) for m in range(1, 301))
        assert worst <= GATE, knobs
        evidence(variant, worst, "[329, 480] m=1…300")


@pytest.mark.parametrize("knobs", CLUSTERS, ids=str)
def test_clusters_agree_with_float64_and_bit_for_bit_with_themselves(knobs: dict[str, Any], evidence: Evidence) -> None:
    if card.arch(0).major != 9:
        pytest.skip("exchange='cluster' is for sm_90")
    worst = 0.0
    for n, k in ((17, 2880), (329, 1536), (5120, 2880), (2880, 4096)):
        weight = weight_of(n, k)
        for scales in ("bytes", "halves"):
            variant = made(exchange="cluster", scales=scales, bias=True, residual=True, **knobs)
            worst = max(worst, *(checked(variant, weight, m) for m in (1, 16, 33, 64, 130)))
            assert worst <= GATE, (n, k, scales)
            evidence(variant, worst, f"[{n}, {k}] m=1…130")
        product, x = Product(made(exchange="cluster", **knobs), 64, n, k), torch.randn(64, k, device="cuda").bfloat16()
        first = product(x, weight)
        assert all(torch.equal(product(x, weight), first) for _ in range(100))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("encoding", ["rotated", "nibble"])
def test_ragged_features_and_k_agree_with_float64(encoding: str, dtype: str, format: str, evidence: Evidence) -> None:
    if format == "mxfp8" and encoding == "nibble":
        encoding = "rotated"  # MXFP8 words have one order; the other half of the cases takes odd addends
        addends = {"bias": True, "residual": True}
    else:
        addends = {"bias": encoding == "nibble", "residual": dtype == "fp16"}
    common: dict[str, Any] = {"dtype": dtype, "weight": format, "encoding": encoding, **addends}
    for n, k in ((1, 32), (17, 32), (17, 2880), (100, 4096), (5120, 2880), (2880, 4096)):
        weight = weight_of(n, k, format, encoding)
        for knobs in SHAPES:
            if knobs.get("split_k", 1) > -(-k // knobs.get("tile_k", 64)):
                continue
            variant = made(**common, **knobs)
            for m in (1, 33, 257):
                found = checked(variant, weight, m)
                assert found <= GATE, (n, k, m, knobs)
                evidence(variant, found, "ragged shapes")


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("split_k", [1, 3])
def test_scales_of_the_full_range_are_exact(split_k: int, format: str, evidence: Evidence) -> None:
    weight = Weight(130, 512, format, scales=(0, 150))
    variant = made(weight=format, scale_range="full", tile_n=64, tile_m=32, warps_n=2, warps_m=1, split_k=split_k)
    worst = max(checked(variant, weight, m) for m in (1, 31, 70))
    assert worst <= GATE
    evidence(variant, worst, "scale bytes 0…149")


def test_a_nan_scale_makes_its_feature_nan_and_no_other() -> None:
    codes, scales = np.full((40, 128), 2, np.uint8), np.full((40, 4), 120, np.uint8)
    scales[21, 2] = 255
    weight = Weight(40, 128)
    words, packed = pack(codes, scales, "rotated")
    weight.words, weight.scales = (torch.from_numpy(a.view(np.int32)).cuda() for a in (words, packed))
    x = torch.randn(20, 128, device="cuda").bfloat16()
    y = Product(made(scale_range="full", tile_m=64, warps_m=1), 20, 40, 128)(x, weight)
    assert y[:, 21].isnan().all() and int(y.isnan().sum()) == 20


def test_a_nan_in_x_stays_in_its_row() -> None:
    weight = Weight(200, 256)
    x = torch.randn(150, 256, device="cuda").bfloat16()
    x[131, 7] = torch.nan
    y = Product(made(split_k=2), 150, 200, 256)(x, weight)
    assert y[131].isnan().all() and int(y.isnan().sum()) == 200


@pytest.mark.parametrize("knobs", SHAPES, ids=str)
def test_results_are_bit_identical_over_100_runs(knobs: dict[str, Any]) -> None:
    weight = weight_of(5120, 2880)
    x = torch.randn(96, 2880, device="cuda").bfloat16()
    product = Product(made(**{"split_k": 3, **knobs}), 96, 5120, 2880)
    first = product(x, weight)
    assert error(first, x.double() @ weight.values.T) <= GATE
    for _ in range(100):
        assert torch.equal(product(x, weight), first)


def test_calls_that_feed_one_another_wait_for_one_another() -> None:
    """Dependent launches prefetch weights; none may read activations, or scratch, that the one before still uses."""
    weight = Weight(2880, 2880, scales=(112, 116))
    product = Product(made(tile_n=64, tile_m=32, warps_n=2, warps_m=1, split_k=4), 40, 2880, 2880)
    start = torch.randn(40, 2880, device="cuda").bfloat16()
    serial = chained = start
    for _ in range(50):
        serial = product(serial, weight)
        torch.cuda.synchronize()
    for _ in range(50):
        chained = product(chained, weight)
    assert serial.isfinite().all() and torch.equal(serial, chained)


@pytest.mark.parametrize("m", [1, 16, 64, 128, 512, 8192])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_what_the_heuristic_picks_is_within_the_gate_and_its_contract(format: str, m: int, evidence: Evidence) -> None:
    chip, multiprocessors = card.arch(0), card.multiprocessors(0)
    for n, k in ((5120, 2880), (2880, 4096)):
        problem = LinearProblem(m, n, k, "bf16", weight=format, encoding="rotated", bias=True)
        variant = made(**KERNEL.fixed(problem), **KERNEL.heuristic(problem, chip, multiprocessors))
        assert build.obtain(variant, strict=True).breaches == ()
        found = checked(variant, weight_of(n, k, format), m)
        assert found <= GATE
        evidence(variant, found, f"[{n}, {k}] m={m}")
