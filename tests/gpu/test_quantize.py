"""`jitmx.quantize` and `jitmx.dequantize` on the card, to the bit, against ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import jitmx
import oracle
from jitmx import formats
from jitmx.dispatch.choose import choose
from jitmx.errors import InputError, KnobError
from jitmx.kernels.quantize import QuantizeProblem
from jitmx.runtime import card

FORMATS = tuple(formats.FORMATS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Evidence = Callable[[object, float | None, str], None]


def one_byte_codes(tensor: jitmx.MXTensor) -> np.ndarray:
    codes = tensor.codes.cpu().numpy()
    return formats.unpack_nibbles(codes) if tensor.format == "mxfp4" else codes


def check(x: torch.Tensor, format: str, rule: str) -> None:
    found = jitmx.quantize(x, format, scale_rule=rule)
    codes, scales = oracle.quantize(x.double().cpu().numpy(), format, rule)
    np.testing.assert_array_equal(found.scales.cpu().numpy(), scales)
    np.testing.assert_array_equal(one_byte_codes(found), codes)


def variant(direction: str, format: str, dtype: str, rule: str = "floor") -> object:
    problem = QuantizeProblem(direction, format, dtype, rule)
    return choose("quantize", problem, card.arch(0), multiprocessors=card.multiprocessors(0)).variant


@pytest.mark.parametrize("rule", formats.SCALE_RULES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_bit_pattern_of_a_16_bit_type_is_exact(format: str, dtype: str, rule: str, evidence: Evidence) -> None:
    """All 65536 patterns, NaN and infinities among them, in blocks of neighbours and in blocks at random."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    mixed = patterns[torch.randperm(1 << 16)]
    finite = torch.where(mixed.isfinite(), mixed, torch.zeros_like(mixed))
    for x in (patterns, mixed, finite):
        check(x.view(-1, 32).cuda(), format, rule)
    evidence(variant("quantize", format, dtype, rule), None, "all 65536 bit patterns, exact")


@pytest.mark.parametrize("rule", formats.SCALE_RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_random_float32_blocks_of_every_magnitude_are_exact(format: str, rule: str, evidence: Evidence) -> None:
    bits = torch.randint(0, 1 << 32, (4096, 32), dtype=torch.int64).to(torch.int32).view(torch.float32)
    bits = torch.where(bits.isfinite(), bits, torch.zeros_like(bits))
    near = torch.randn(4096, 32) * torch.exp2(torch.randint(-140, 120, (4096, 1)).float())
    # Values a hair beside the points where rounding turns: any double rounding shows here.
    values = torch.tensor(sorted({abs(v) for v in formats.values(formats.get(format)) if np.isfinite(v)}))
    turning = ((values[1:] + values[:-1]) / 2).float()
    hairs = torch.stack(
        [turning, torch.nextafter(turning, turning * 2), torch.nextafter(turning, turning * 0)]
    ).flatten()
    blocks = hairs[torch.randint(0, len(hairs), (2048, 32))]
    blocks[:, 0] = float(values[-1])
    ties = (
        blocks
        * torch.exp2(torch.randint(-100, 100, (2048, 1)).float())
        * torch.where(torch.rand(2048, 32) < 0.5, -1, 1)
    )
    for x in (bits, near, ties):
        check(x.cuda(), format, rule)
    evidence(variant("quantize", format, "fp32", rule), None, "random bits, magnitudes and ties, exact")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_under_every_scale_comes_back_exactly(format: str, dtype: str, evidence: Evidence) -> None:
    item = formats.get(format)
    codes = np.tile(np.resize(np.arange(1 << item.bits, dtype=np.uint8), 256), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    packed = formats.pack_nibbles(codes) if format == "mxfp4" else codes
    tensor = jitmx.MXTensor(torch.from_numpy(packed).cuda(), torch.from_numpy(scales).cuda(), format)
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(oracle.dequantize(codes, scales, format)).to(DTYPES[dtype])
    found = jitmx.dequantize(tensor, DTYPES[dtype]).cpu()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    evidence(variant("dequantize", format, dtype), None, "every code under every scale, exact")


@pytest.mark.parametrize("format", FORMATS)
def test_ragged_sizes_write_every_element_and_nothing_else(format: str) -> None:
    for blocks in (1, 3, 255, 256, 257, 1025):
        x = torch.randn(blocks, 32, device="cuda").bfloat16()
        check(x, format, "floor")
        tensor = jitmx.quantize(x, format)
        values = oracle.dequantize(one_byte_codes(tensor), tensor.scales.cpu().numpy(), format)
        np.testing.assert_array_equal(jitmx.dequantize(tensor, torch.float32).double().cpu().numpy(), values)
    empty = jitmx.quantize(torch.empty(0, 64, device="cuda"), format)
    assert empty.shape == (0, 64) and jitmx.dequantize(empty).shape == (0, 64)


def test_quantized_weights_multiply_as_their_values_do() -> None:
    w, x = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(5, 512, device="cuda").bfloat16()
    tensor = jitmx.quantize(w, "mxfp4")
    y = jitmx.linear(x, jitmx.pack_weight(tensor))
    wanted = x.double() @ jitmx.dequantize(tensor, torch.float32).double().T
    assert oracle.relative_l2(y.double().cpu().numpy(), wanted.cpu().numpy()) <= 0.005


def test_it_works_from_a_graph() -> None:
    x = torch.randn(64, 512, device="cuda").bfloat16()
    jitmx.quantize(x, "mxfp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor = jitmx.quantize(x, "mxfp8")
    x.copy_(torch.randn(64, 512, device="cuda"))
    graph.replay()
    again = jitmx.quantize(x, "mxfp8")
    assert torch.equal(tensor.codes, again.codes) and torch.equal(tensor.scales, again.scales)


def test_inputs_that_do_not_fit_are_refused_with_the_reason() -> None:
    x = torch.randn(4, 64, device="cuda")
    for bad, message in (
        (x.double(), "quantize takes bfloat16, float16 or float32"),
        (x[:, :33].contiguous(), "must be a multiple of 32"),
        (x[:, ::2], "not contiguous"),
        (x.flatten()[1:65], "no multiple of 16 bytes"),
        (x.cpu(), "jitmx runs on CUDA tensors"),
        (x.clone().requires_grad_(), "requires a gradient"),
    ):
        with pytest.raises(InputError, match=message):
            jitmx.quantize(bad)
    with pytest.raises(KnobError, match="'fp4' is not a format"):
        jitmx.quantize(x, "fp4")
    with pytest.raises(KnobError, match="scale_rule='up' is not one of floor, ceil, even"):
        jitmx.quantize(x, scale_rule="up")
    with pytest.raises(InputError, match="dequantize yields"):
        jitmx.dequantize(jitmx.quantize(x), torch.int8)
