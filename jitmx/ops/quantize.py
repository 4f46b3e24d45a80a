"""`jitmx.quantize` and `jitmx.dequantize`: tensors to the OCP Microscaling formats and back."""

from __future__ import annotations

import torch

from jitmx import formats
from jitmx.dispatch.choose import choose
from jitmx.errors import InputError, KnobError
from jitmx.kernels.quantize import VALUES_A_VECTOR, QuantizeProblem, launch
from jitmx.ops import checks, custom
from jitmx.ops.mx import MXTensor
from jitmx.runtime import card
from jitmx.runtime.plan import Plans, Step

_plans = Plans(256)


def _launch(problem: QuantizeProblem, place: torch.device, values: int, **addresses: int) -> None:
    if not values:
        return
    device = card.number(place)
    step: Step | None = _plans.get((problem, device, values))
    if step is None:
        arch, multiprocessors = card.arch(device), card.multiprocessors(device)
        variant = choose("quantize", problem, arch, multiprocessors=multiprocessors).variant
        fixed = {"vectors": values // VALUES_A_VECTOR}
        step = _plans.remember((problem, device, values), Step(variant, device, launch(variant.knobs, values), fixed))
    step(**addresses)


def quantize(x: torch.Tensor, format: str = "mxfp4", *, scale_rule: str = "floor") -> MXTensor:
    """Quantize along the last dimension, in blocks of 32 that share a power-of-two scale.

    Values are rounded to nearest even and saturate. A block with a NaN or an infinity gets the NaN scale (255) and zero
    codes; a block of zeros gets scale 1 (127).

    Args:
        x: [..., k], bfloat16, float16 or float32, contiguous, on a GPU; k a multiple of 32.
        format: "mxfp4", "mxfp6e2m3", "mxfp6e3m2" or "mxfp8" (E4M3).
        scale_rule: how the scale's exponent is taken from the block's largest magnitude: "floor" (OCP), "ceil", "even".

    Returns:
        Codes [..., k / 2] for mxfp4 or [..., k], and scales [..., k / 32].

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take; nothing was launched.
        KnobError: an unknown format or scale rule.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/quantize/quantize.cu.j2; reference: jitmx.formats.quantize.
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("x", x)
        codes, scales = torch.ops.jitmx.quantize(x, format, scale_rule)
    else:
        codes, scales = _quantize(x, format, scale_rule)
    return MXTensor(codes, scales, format)


def _quantize(x: torch.Tensor, format: str, scale_rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = custom.plain(x)
    checks.require_cuda("x", x)
    checks.require_layout("x", x)
    codes, scales = _quantized(x, format, scale_rule)
    problem = QuantizeProblem("quantize", format, checks.DTYPES[x.dtype], scale_rule)
    _launch(problem, x.device, x.numel(), x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr())
    return codes, scales


def _quantized(x: torch.Tensor, format: str, scale_rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that are not written yet."""
    item = formats.get(format)
    if scale_rule not in formats.SCALE_RULES:
        raise KnobError(f"scale_rule={scale_rule!r} is not one of {', '.join(formats.SCALE_RULES)}")
    checks.require_tensor("x", x)
    if x.dtype not in checks.DTYPES:
        raise InputError(f"x is {checks.describe(x)}", "quantize takes bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] % formats.BLOCK or x.shape[-1] == 0:
        raise InputError(f"x has shape {list(x.shape)}; its last dimension must be a multiple of {formats.BLOCK}")
    checks.require_no_grad("x", x)
    k = x.shape[-1]
    codes = x.new_empty((*x.shape[:-1], k // item.codes_per_byte), dtype=torch.uint8)
    scales = x.new_empty((*x.shape[:-1], k // formats.BLOCK), dtype=torch.uint8)
    return codes, scales


def dequantize(tensor: MXTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of `tensor`, rounded once to `dtype`.

    Args:
        tensor: codes and scales, contiguous, on a GPU.
        dtype: bfloat16, float16 or float32.

    Returns:
        [..., k]. Blocks with the NaN scale are NaN; values beyond `dtype` are infinite.

    Raises:
        InputError: a device, dtype or layout that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/quantize/dequantize.cu.j2; reference: jitmx.formats.dequantize.
    """
    if not isinstance(tensor, MXTensor):
        raise InputError(
            f"tensor is a {type(tensor).__name__}; dequantize takes an MXTensor, as jitmx.quantize returns"
        )
    if type(tensor.codes) is not torch.Tensor or torch.compiler.is_compiling():
        y: torch.Tensor = torch.ops.jitmx.dequantize(tensor.codes, tensor.scales, tensor.format, dtype)
        return y
    return _dequantize(tensor.codes, tensor.scales, tensor.format, dtype)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    codes, scales = custom.plain(codes), custom.plain(scales)
    checks.require_cuda("codes", codes)
    y = _dequantized(codes, scales, format, dtype)
    checks.require_layout("codes", codes)
    checks.require_layout("scales", scales)
    problem = QuantizeProblem("dequantize", format, checks.DTYPES[dtype])
    _launch(problem, y.device, y.numel(), codes=codes.data_ptr(), scales=scales.data_ptr(), y=y.data_ptr())
    return y


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """Values that are not written yet."""
    if dtype not in tuple(checks.DTYPES):  # it may be anything, hashable or not
        raise InputError(f"dtype is {dtype}; dequantize yields bfloat16, float16 or float32")
    return codes.new_empty(MXTensor(codes, scales, format).shape, dtype=dtype)


custom.define("quantize(Tensor x, str format, str scale_rule) -> (Tensor, Tensor)", _quantize, _quantized)
custom.define(
    "dequantize(Tensor codes, Tensor scales, str format, ScalarType dtype) -> Tensor", _dequantize, _dequantized
)
