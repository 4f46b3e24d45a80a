"""`linear.scaled` on the card: what the twin of the block-scaled product computes, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu.launching import call, given_workspace
from jitmx import formats
from jitmx.kernels.linear import scaled
from jitmx.kernels.linear.arguments import EPSILON
from jitmx.kernels.linear.layout import pack
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.spec import Variant
from jitmx.runtime import card

Evidence = Callable[[object, float | None, str], None]

GATE = 0.005  # relative L2 against the product of what the codes of X stand for, rounding of the output included
FORMATS = {"mxfp8": "mxfp8", "mxfp6": "mxfp6e2m3", "mxfp4": "mxfp4"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("tile_n", "tile_m", "warps_n", "warps_m")
# What fits the registers of the twin.
TWIN = [
    shape
    for shape in scaled.GEOMETRIES
    if scaled.most_blocks(scaled.ScaledKnobs(**dict(zip(NAMES, shape, strict=True))))
]


class Weight:
    """A weight [n, k] in both encodings, with its values in float64."""

    def __init__(
        self, n: int, k: int, codes: npt.NDArray[np.uint8] | None = None, low: int = 117, high: int = 124
    ) -> None:
        generator = np.random.default_rng(n + k)
        scales = generator.integers(low, high, (n, k // 32)).astype(np.uint8)
        codes = generator.integers(0, 16, (n, k)).astype(np.uint8) if codes is None else codes
        self.n, self.k = n, k
        self.packed = {
            encoding: tuple(torch.from_numpy(part.view(np.int32)).cuda() for part in pack(codes, scales, encoding))
            for encoding in ("nibble", "rotated")
        }
        self.values = torch.from_numpy(formats.dequantize(codes, scales, formats.get("mxfp4"))).cuda()


class Product:
    """A launch of a variant for so many rows."""

    def __init__(self, weight: Weight, rows: int, **knobs: Any) -> None:
        chip = card.arch(0)
        self.variant: Variant = scaled.SPEC.variant(chip, pdl="pdl" in chip.features, **knobs)
        made, self.weight, self.rows = self.variant.knobs, weight, rows
        launch = scaled.launch(made, LinearProblem(rows, weight.n, weight.k), card.multiprocessors(0))
        self.workspace = torch.zeros(max(16, launch.workspace), dtype=torch.uint8, device="cuda")
        self.step = given_workspace(self.variant, launch)

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.full((self.rows, self.weight.n), torch.nan, dtype=x.dtype, device="cuda")
        words, scales = self.weight.packed[self.variant.knobs.encoding]
        call(
            self.step, x=x, weight=words, scales=scales, bias=bias, residual=residual, y=y, workspace=self.workspace,
            epsilon=EPSILON, rows=self.rows, n=self.weight.n, k=self.weight.k,
        )  # fmt: skip
        return y


def quantized(x: torch.Tensor, activation: str, rule: str = "floor") -> torch.Tensor:
    """What the codes of X stand for, in float64, by the reference on the host."""
    item = formats.get(FORMATS[activation])
    with np.errstate(invalid="ignore"):
        codes, scales = formats.quantize(x.double().cpu().numpy(), item, rule)
    return torch.from_numpy(formats.dequantize(codes, scales, item)).cuda()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize("shape", TWIN, ids=str)
def test_every_tile_agrees_with_float64_on_ragged_shapes(
    shape: tuple[int, int, int, int], activation: str, evidence: Evidence
) -> None:
    i = TWIN.index(shape)
    tile_n, tile_m, warps_n, warps_m = shape
    dtype, rule, encoding = ("bf16", "fp16")[i % 2], formats.SCALE_RULES[i % 3], ("nibble", "rotated")[i // 2 % 2]
    worst = 0.0
    for n, k in ((1, 32), (17, 96), (129, 2880), (1000, 4096)):
        weight, x = Weight(n, k), torch.randn(300, k, device="cuda").to(DTYPES[dtype])
        x[7, :32] = 0
        wanted = quantized(x, activation, rule) @ weight.values.T
        for rows in (1, 2, 7, 8, 9, 17, 33, 64, 100, 129, 300):
            bias = torch.randn(n, device="cuda").to(x.dtype) if i & 1 else None
            residual = torch.randn(rows, n, device="cuda").to(x.dtype) if i & 2 else None
            product = Product(
                weight, rows, activation=activation, dtype=dtype, scale_rule=rule, encoding=encoding, tile_n=tile_n,
                tile_m=tile_m, warps_n=warps_n, warps_m=warps_m, split_k=(1, 3, 2, 8)[i % 4],
                bias=bias is not None, residual=residual is not None,
            )  # fmt: skip
            whole = wanted[:rows] + (0.0 if bias is None else bias.double())
            whole = whole + (0.0 if residual is None else residual.double())
            worst = max(worst, error(product(x, bias, residual), whole))
            assert worst <= GATE, (n, k, rows)
    evidence(product.variant, worst, "ragged shapes, against the quantized X in float64")


@pytest.mark.parametrize("activation", FORMATS)
def test_no_number_of_rows_from_1_to_300_is_wrong(activation: str) -> None:
    weight, x = Weight(320, 2880), torch.randn(300, 2880, device="cuda").bfloat16()
    wanted = quantized(x, activation) @ weight.values.T
    for rows in range(1, 301):
        knobs = {"tile_m": 16, "split_k": 4} if rows < 64 else {"tile_m": 64, "warps_m": 2}
        assert error(Product(weight, rows, activation=activation, **knobs)(x), wanted[:rows]) <= GATE, rows


@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize("rule", formats.SCALE_RULES)
def test_times_the_identity_any_bits_come_out_as_the_reference_quantizes_them(activation: str, rule: str) -> None:
    weight = Weight(256, 256, 2 * np.eye(256, dtype=np.uint8), 127, 128)  # code 2 is 1.0
    x = torch.randint(0, 65536, (4096, 256), dtype=torch.int32, device="cuda").to(torch.uint16).view(torch.bfloat16)
    x[::2] = (
        torch.randn(2048, 256, device="cuda") * torch.randint(-120, 100, (2048, 1), device="cuda").exp2()
    ).bfloat16()
    found = Product(weight, 4096, activation=activation, scale_rule=rule, tile_m=64, warps_m=2)(x)
    wanted = quantized(x, activation, rule)
    wanted[wanted.isnan().any(dim=1)] = torch.nan  # a NaN block meets every feature, if only with zeros
    torch.testing.assert_close(found.double(), wanted.float().bfloat16().double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("activation", "gate"), [("mxfp8", 0.05), ("mxfp6", 0.05), ("mxfp4", 0.14)])
def test_rounding_x_costs_no_more_than_stated_on_the_shapes_of_gpt_oss(activation: str, gate: float) -> None:
    for n, k in ((5120, 2880), (2880, 4096)):
        weight, x = Weight(n, k), torch.randn(16, k, device="cuda").bfloat16()
        assert error(Product(weight, 16, activation=activation, tile_m=16)(x), x.double() @ weight.values.T) <= gate


def test_results_are_bit_identical_over_100_runs() -> None:
    weight, x = Weight(5120, 2880), torch.randn(4, 2880, device="cuda").bfloat16()
    product = Product(weight, 4, split_k=8)
    first = product(x)
    for _ in range(100):
        assert torch.equal(product(x), first)
    assert not product.workspace[: 4 * 80].any()
