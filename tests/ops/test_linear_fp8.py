"""`jitmx.linear` whole on the simulator with x in E4M3, a scale a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import jitmx
from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels import fp8_rows
from jitmx.ops.linear import operand
from simulated_card import Simulated

EPSILON = 1e-5
COST, ALIKE = 0.05, 0.006  # relative L2 against float64, and against the same inputs rounded alike


class Product:
    """A weight [n, k] with its values, where asked with a row whose scales are further apart than a pass takes."""

    def __init__(self, n: int, k: int, encoding: str = "rotated", apart: int = 0) -> None:
        generator = torch.Generator().manual_seed(n + k + apart)
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 123, (n, k // 32), dtype=torch.uint8, generator=generator)
        scales[3, 0] = scales[3].max() - apart
        self.packed = jitmx.pack_weight((codes, scales), encoding=encoding)
        self.values = formats.dequantize(formats.unpack_nibbles(codes.numpy()), scales.numpy(), formats.get("mxfp4"))
        self.bias = torch.randn(n, generator=generator).bfloat16()
        self.norm = (1 + 0.2 * torch.randn(k, generator=generator)).bfloat16()
        self.n, self.k = n, k

    def x(self, rows: int) -> torch.Tensor:
        factors = torch.logspace(-2, 2, rows)[:, None]
        return (torch.randn(rows, self.k, generator=torch.Generator().manual_seed(rows)) * factors).bfloat16()

    def wanted(self, x: torch.Tensor, norm: bool = False, alike: bool = False) -> np.ndarray:
        """The product in float64, of x rounded as the kernels round it where `alike`."""
        wide = x.double().numpy()
        if norm:
            root = np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
            wide = wide / root * self.norm.double().numpy()
        if alike:
            codes, scales = fp8_rows.quantize_rows(wide)
            wide = fp8_rows.decode(codes) * scales[:, None]
        return np.asarray(wide @ self.values.T + self.bias.double().numpy())


def error(y: torch.Tensor, wanted: np.ndarray) -> float:
    rows = np.linalg.norm(y.double().numpy() - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(rows.max())


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("rows", "norm", "encoding"), [(1, True, "rotated"), (70, False, "nibble"), (9, True, "nibble")]
)
def test_a_product_with_a_scale_a_row_is_two_launches_with_the_norm_in_the_first(
    rows: int, norm: bool, encoding: str, card: Simulated
) -> None:
    product = Product(72, 160, encoding)
    x, given = product.x(rows), product.norm if norm else None
    y = jitmx.linear(x, product.packed, product.bias, norm=given, epsilon=EPSILON, activation="fp8")
    assert card.kernels == ["norm.rows", "linear.wgmma_fp8"]
    assert 0.005 <= error(y, product.wanted(x, norm)) <= COST
    assert error(y, product.wanted(x, norm, alike=True)) <= ALIKE
    again = jitmx.linear(x, product.packed, product.bias, norm=given, epsilon=EPSILON, activation="fp8")
    assert torch.equal(again, y)
    assert card.kernels == ["norm.rows", "linear.wgmma_fp8"] * 2


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("apart", "passes"), [(11, 1), (12, 2), (40, 4)])
def test_rows_whose_scales_are_far_apart_take_more_passes(apart: int, passes: int, card: Simulated) -> None:
    product = Product(40, 96, apart=apart)
    x = product.x(20)
    y = jitmx.linear(x, product.packed, product.bias, activation="fp8")
    assert int(product.packed.row_words.words.max()) >> 8 == passes
    assert error(y, product.wanted(x, alike=True)) <= ALIKE


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
def test_a_residual_is_added_in_the_product(card: Simulated) -> None:
    product = Product(48, 64)
    x, residual = product.x(5), torch.randn(5, 48).bfloat16()
    y = jitmx.linear(x, product.packed, product.bias, residual=residual, activation="fp8")
    assert card.kernels == ["norm.rows", "linear.wgmma_fp8"]
    assert error(y, product.wanted(x, alike=True) + residual.double().numpy()) <= ALIKE


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
def test_a_row_with_a_nan_is_all_nan_and_no_other_row(card: Simulated) -> None:
    product = Product(48, 64)
    x = product.x(5)
    x[2, 7] = float("nan")
    y = jitmx.linear(x, product.packed, product.bias, activation="fp8")
    assert y.isnan().all(-1).tolist() == [False, False, True, False, False]
    assert not y[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
def test_the_operator_of_torch_is_told_of_the_rows_too(card: Simulated) -> None:
    product = Product(40, 96, apart=14)
    x, packed = product.x(3), product.packed
    y = torch.ops.jitmx.linear(
        x, packed.words, packed.scales, packed.n, packed.k, operand.layout(packed), product.bias, None, None, 0.0, "fp8"
    )
    assert torch.equal(y, jitmx.linear(x, packed, product.bias, activation="fp8"))


@pytest.mark.parametrize("card", ["sm_80", "sm_121a"], indirect=True)
def test_targets_without_wgmma_take_a_scale_a_block(card: Simulated) -> None:
    product = Product(72, 160, "nibble")
    x = product.x(9)
    y = jitmx.linear(x, product.packed, product.bias, activation="fp8")
    assert card.kernels == ["linear.scaled"]
    assert error(y, product.wanted(x)) <= COST
    assert torch.equal(y, jitmx.linear(x, product.packed, product.bias, activation="fp8"))


@pytest.mark.parametrize("card", ["sm_90a"], indirect=True)
def test_an_activation_that_there_is_not_is_refused_by_name(card: Simulated) -> None:
    product = Product(40, 64)
    with pytest.raises(InputError, match="fp9"):
        jitmx.linear(product.x(1), product.packed, activation="fp9")
