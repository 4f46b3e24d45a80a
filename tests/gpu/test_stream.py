"""`linear.stream` on the card, against float64, launched by itself: no table or preference has a say in what runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu.launching import call, given_workspace
from jitmx import build, formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.arguments import EPSILON
from jitmx.kernels.linear.layout import pack
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.linear.stream import KERNEL, MAX_ROWS, ROWS, SPEC, launch
from jitmx.registry.spec import Variant
from jitmx.runtime import card

GATE = 0.005  # relative L2 against float64, rounding of the output included
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Evidence = Callable[[object, float | None, str], None]

# Each a different way through the kernel, on targets that have clusters and count subnormal bf16 operands.
WAYS: tuple[dict[str, Any], ...] = (
    {"scaling": "bare", "warps": 12, "cluster": 2, "unroll": 1, "predecode": 1, "blocks_per_sm": 2},
    {"scaling": "fold", "warps": 12, "cluster": 2, "late": True},
    {"scaling": "post", "warps": 8, "split_k": 2, "cluster": 4},
    {"scaling": "bare", "warps": 8, "tile_rows": 2, "copy": "async"},
    {"scaling": "fold", "warps": 6, "split_k": 3, "pdl": False},
    {"scaling": "post", "share": False, "warps": 4, "chunk": 3, "stages": 3},
    {"scaling": "fold", "share": False, "warps": 4, "chunk": 5, "tile_rows": 2, "copy": "async"},
    {"scaling": "halves", "warps": 12, "cluster": 2, "sums": "block", "late": True},
    {"scaling": "bare", "warps": 16, "cluster": 4, "sums": "block", "ahead": 2},
    {"scaling": "halves", "share": False, "warps": 12, "chunk": 4, "tile_rows": 2},
)

# Rows that a way serves on sm_90a where it does not serve all, by [n, k]: four blocks cannot share two tiles of k; sums
# of a block take the place of codes, of which each block has a slice of k; X of 4096 k leaves little room for W.
FEWER_ROWS: tuple[dict[tuple[int, int], int], ...] = (
    {}, {}, {(17, 96): 0}, {(1000, 4096): 16}, {(1000, 4096): 16}, {(1000, 4096): 16}, {(1000, 4096): 16},
    {(17, 96): 2, (2051, 544): 8}, {(17, 96): 0, (2051, 544): 4}, {(1000, 4096): 8},
)  # fmt: skip


class Weight:
    """A random MXFP4 weight [n, k], packed, and its values in float64."""

    def __init__(self, n: int, k: int, encoding: str = "rotated", scales: tuple[int, int] = (117, 124)) -> None:
        generator = np.random.default_rng(n * k)
        codes = generator.integers(0, 16, (n, k)).astype(np.uint8)
        bytes_ = generator.integers(*scales, (n, k // 32)).astype(np.uint8)
        words, packed = pack(codes, bytes_, encoding)
        self.n, self.k = n, k
        self.values = torch.from_numpy(formats.dequantize(codes, bytes_, formats.get("mxfp4"))).cuda()
        self.words = torch.from_numpy(words.view(np.int32)).cuda()
        self.scales = torch.from_numpy(packed.view(np.int32)).cuda()


weight_of = functools.cache(Weight)  # large ones take seconds to pack in NumPy


def target() -> Arch:
    return card.arch(0)


def made(n: int, k: int, **knobs: Any) -> Variant | None:
    """The variant if it is legal here and serves the shape, else None."""
    try:
        variant = SPEC.variant(target(), **knobs)
        KERNEL.check(LinearProblem(variant.knobs.m, n, k), variant)
    except KnobError:
        return None
    return variant


def served(way: dict[str, Any], rows: int, n: int, k: int, **extras: bool) -> Variant | None:
    """The variant for so many rows, or None; on sm_90a it must be there for exactly those that the way serves."""
    m = next(m for m in ROWS if m >= rows)
    variant = made(n, k, m=m, **extras, **way)
    if target().name == "sm_90a":
        most = FEWER_ROWS[WAYS.index(way)].get((n, k), MAX_ROWS)
        assert (variant is not None) == (m <= most), f"m={m} of [{n}, {k}]; {most} rows are to be served"
    return variant


def skip_unless(shown: int) -> Any:
    """Leave a test that had nothing to show, which only happens on other targets than sm_90a."""
    if not shown:
        pytest.skip(f"nothing of this is legal on {target()}")


def multiply(
    variant: Variant,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y, or with argmax the indices; `workspace` is that of a launch before, or none."""
    rows = len(x)
    step = given_workspace(
        variant, launch(variant.knobs, LinearProblem(rows, weight.n, weight.k), card.multiprocessors(0))
    )
    y = torch.full((rows, weight.n), torch.nan, dtype=x.dtype, device="cuda")
    if variant.knobs.argmax:
        y = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
        workspace = scratch(variant) if workspace is None else workspace
    call(
        step, x=x, weight=weight.words, scales=weight.scales, bias=bias, residual=residual, norm=norm, y=y,
        workspace=workspace, epsilon=EPSILON, rows=rows, n=weight.n, k=weight.k,
    )  # fmt: skip
    return y


def scratch(variant: Variant) -> torch.Tensor:
    size = launch(variant.knobs, LinearProblem(n=16, k=64 * variant.knobs.cluster), card.multiprocessors(0)).workspace
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


def checked(variant: Variant, weight: Weight, rows: int) -> float:
    """Error of a product of random rows, with bias, residual and norm where the variant takes them.

    With argmax, how far the values at the indices are below the largest, relative to it.
    """
    dtype = DTYPES[variant.knobs.dtype]
    x = torch.randn(rows, weight.k, device="cuda").to(dtype)
    bias = torch.randn(weight.n, device="cuda").to(dtype) if variant.knobs.bias else None
    residual = torch.randn(rows, weight.n, device="cuda").to(dtype) if variant.knobs.residual else None
    norm = torch.rand(weight.k, device="cuda").to(dtype) + 0.5 if variant.knobs.norm else None
    wide = x.double()
    if norm is not None:
        wide = wide / (wide.square().mean(1, keepdim=True) + EPSILON).sqrt() * norm.double()
    wanted = wide @ weight.values.T
    for addend in (bias, residual):
        wanted = wanted if addend is None else wanted + addend.double()
    found = multiply(variant, x, weight, bias, residual, norm)
    if variant.knobs.argmax:
        best, chosen = wanted.max(1).values, wanted.gather(1, found[:, None])[:, 0]
        return float(((best - chosen) / torch.maximum(best.abs(), wanted.std(1, correction=0))).max())
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_number_of_rows_is_within_the_gate(way: dict[str, Any], evidence: Evidence) -> None:
    n, k = (2051, 544) if way.get("sums") != "block" else (1003, 4128)
    shown = 0
    for rows in range(1, MAX_ROWS + 1):
        variant = served(way, rows, n, k)
        if variant is not None:
            error = checked(variant, weight_of(n, k), rows)
            assert error <= GATE, rows
            evidence(variant, error, f"[{n}, {k}] m={rows}")
            shown += 1
    skip_unless(shown)


@pytest.mark.parametrize("encoding", ["rotated", "nibble"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("addends", [{"bias": True}, {"residual": True}], ids=str)
def test_ragged_features_and_k_agree_with_float64(
    addends: dict[str, Any], dtype: str, encoding: str, evidence: Evidence
) -> None:
    shown = 0
    for n, k in ((1, 32), (17, 96), (129, 2880), (1000, 4096)):
        weight = weight_of(n, k, encoding)
        for way in WAYS:
            way = {**way, "scaling": "post"} if dtype == "fp16" and way["scaling"] == "fold" else way
            for m in (1, 4, 16):
                variant = made(n, k, m=m, dtype=dtype, encoding=encoding, **addends, **way)
                if variant is not None:
                    for rows in {m, max(1, m - 1)}:
                        error = checked(variant, weight, rows)
                        assert error <= GATE, (n, k, rows, way)
                        evidence(variant, error, "ragged shapes")
                        shown += 1
    assert shown >= 40


@pytest.mark.parametrize("extras", [{"norm": True, "residual": True}, {"argmax": True, "bias": True},
                                    {"norm": True, "argmax": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_norm_and_argmax_agree_with_float64(way: dict[str, Any], extras: dict[str, Any], evidence: Evidence) -> None:
    shown = 0
    for n, k in ((17, 96), (2051, 544), (1000, 4096)):
        for rows in (1, 2, 3, 7, 8, 13, 32):
            variant = served(way, rows, n, k, **extras)
            if variant is not None:
                error = checked(variant, weight_of(n, k), rows)
                assert error <= GATE, (n, k, rows)
                evidence(variant, error, f"[{n}, {k}] m={rows}")
                shown += 1
    skip_unless(shown)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_argmax_takes_the_lowest_of_equal_values_and_no_nan_run_after_run(way: dict[str, Any]) -> None:
    """Launches follow one another on one workspace, which each leaves zero."""
    n, k = 5000, 512
    variant = served(way, 4, n, k, argmax=True, bias=True) or skip_unless(0)
    weight, codes = Weight(n, k), np.zeros((n, k), np.uint8)
    codes[[4999, 777, 2500, 778]] = 7
    words, packed = pack(codes, np.full((n, k // 32), 127, np.uint8), "rotated")
    weight.words, weight.scales = (torch.from_numpy(a.view(np.int32)).cuda() for a in (words, packed))
    bias = torch.zeros(n, device="cuda").bfloat16()
    bias[[0, 778]] = torch.nan
    x = torch.stack([torch.full((k,), value) for value in (1.0, -1.0, torch.nan, 0.0)]).cuda().bfloat16()
    workspace = scratch(variant)
    found = [multiply(variant, x, weight, bias, workspace=workspace) for _ in range(100)]
    assert all(indices.tolist() == [777, 1, 0, 1] for indices in found)
    assert not workspace.any()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("scaling", ["bare", "post"])
@pytest.mark.parametrize("m", [1, 8])
def test_scales_of_the_full_range_are_exact(m: int, scaling: str, share: bool, evidence: Evidence) -> None:
    weight = Weight(130, 512, scales=(0, 150))
    scaling = scaling if made(130, 512, m=m, scaling=scaling, scale_range="full") else "post"
    variant = SPEC.variant(target(), m=m, scaling=scaling, scale_range="full", share=share)
    error = checked(variant, weight, m)
    assert error <= GATE
    evidence(variant, error, "scale bytes 0…149")


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096), (201_088, 2880)])
def test_what_the_heuristic_picks_is_within_the_gate_and_its_contract(
    n: int, k: int, m: int, evidence: Evidence
) -> None:
    problem = LinearProblem(m, n, k, bias=n != 201_088)
    try:
        tuned = KERNEL.heuristic(problem, target(), card.multiprocessors(0))
    except KnobError as refusal:
        assert "do not fit" in str(refusal) and target().shared_bytes < 200_000
        return
    variant = SPEC.variant(target(), **KERNEL.fixed(problem), **tuned)
    assert build.obtain(variant, strict=True).breaches == ()
    error = checked(variant, weight_of(n, k), m)
    assert error <= GATE
    evidence(variant, error, f"[{n}, {k}] m={m}")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_results_are_bit_identical_over_100_runs(way: dict[str, Any]) -> None:
    weight = weight_of(2880, 1024)
    variant = served(way, 8, 2880, 1024) or skip_unless(0)
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    first = multiply(variant, x, weight)
    for _ in range(100):
        assert torch.equal(multiply(variant, x, weight), first)


@pytest.mark.parametrize("m", [1, 8])
def test_calls_that_feed_one_another_wait_for_one_another(m: int) -> None:
    """Dependent launches prefetch weights; none may read activations that the one before is still writing."""
    weight = Weight(2880, 2880, scales=(112, 116))
    tuned = KERNEL.heuristic(LinearProblem(m, 2880, 2880), target(), card.multiprocessors(0))
    variant = SPEC.variant(target(), m=m, **tuned)
    start = torch.randn(m, 2880, device="cuda").bfloat16()
    serial = chained = start
    for _ in range(50):
        serial = multiply(variant, serial, weight)
        torch.cuda.synchronize()
    for _ in range(50):
        chained = multiply(variant, chained, weight)
    assert serial.isfinite().all() and torch.equal(serial, chained)


def test_tensor_cores_count_subnormal_bf16_operands_wherever_the_kernel_relies_on_it() -> None:
    """Codes 1 (0.5) are subnormal before they are brought to their exponent: flushed, the product would be zero."""
    variant = made(64, 64, m=1, scaling="bare")
    if variant is None:
        assert target().name != "sm_90a"
        return
    weight = Weight(64, 64)
    words, packed = pack(np.full((64, 64), 1, np.uint8), np.full((64, 2), 127, np.uint8), "rotated")
    weight.words, weight.scales = (torch.from_numpy(a.view(np.int32)).cuda() for a in (words, packed))
    y = multiply(variant, torch.ones(1, 64, device="cuda").bfloat16(), weight)
    assert torch.equal(y, torch.full_like(y, 32.0))
