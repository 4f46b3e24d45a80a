"""Other libraries' MXFP4 products, for `jitmx bench linear` to run beside jitmx's.

An adapter takes a weight and gives a product over it, in the library's own layout. A library that is not installed, or
that cannot take a shape or this card, is a reason in words and not an error: a benchmark goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from jitmx import formats
from jitmx.errors import DriverError
from jitmx.ops.mx import MXTensor
from jitmx.ops.quantize import dequantize

_Loaded = TypeVar("_Loaded")

# x [m, k] and y [m, n], bfloat16 and contiguous: writes y.
Product = Callable[[torch.Tensor, torch.Tensor], object]

# A product further from that of the dequantized weight than this is not the same product, whatever its time.
GATE = 0.02


class Unavailable(Exception):
    """Why a library cannot be measured here."""


def _humming(weight: MXTensor) -> Product:
    """Humming, as its own layer module runs it."""
    layers = module("humming.layer")
    n, k = weight.shape
    config = {"quant_method": "gpt_oss_mxfp4"}
    layer = layers.HummingLayer(n, k, weight_config=config, torch_dtype=torch.bfloat16).to(weight.device)
    layer.load_from_tensors({"weight": weight.codes, "weight_scale": weight.scales})
    layer.transform()
    return lambda x, y: layer(x, outputs=y)


def _marlin(weight: MXTensor) -> Product:
    """Marlin, prepared by vLLM and launched as vLLM's dense MXFP4 layers launch it."""
    fp4 = module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    utils = module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    operators, types = module("vllm._custom_ops"), module("vllm.scalar_type")
    n, k = weight.shape
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight.scales, requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype = torch.bfloat16
    fp4.prepare_fp4_layer_for_marlin(layer)
    padded = utils.marlin_repacked_nk(layer.weight, num_bits=4)
    if padded != (n, k):
        raise Unavailable(f"Marlin pads [{n}, {k}] to {list(padded)}, which takes copies of x and y")
    space = utils.marlin_make_workspace_new(weight.device)
    words, scales = layer.weight.data, layer.weight_scale.data
    kind = types.scalar_types.float4_e2m1f

    def product(x: torch.Tensor, y: torch.Tensor) -> None:
        operators.marlin_gemm(
            a=x, c=y, b_q_weight=words, b_bias=None, b_scales=scales, a_scales=None, global_scale=None, b_zeros=None,
            workspace=space, b_q_type=kind, size_m=x.shape[0], size_n=n, size_k=k, use_atomic_add=False,
            use_fp32_reduce=True,
        )  # fmt: skip

    return product


def _triton_kernels(weight: MXTensor) -> Product:
    """triton_kernels, with its default layouts for an MXFP4 weight on this card."""
    try:
        importlib.import_module("triton_kernels")
    except ImportError:
        module("vllm.utils.import_utils").import_triton_kernels()
    matmul, numerics = module("triton_kernels.matmul_ogs"), module("triton_kernels.numerics")
    tensors, layouts = module("triton_kernels.tensor"), module("triton_kernels.tensor_details.layout")
    groups = weight.scales.shape[-1]
    # Its Hopper layout of scales takes whole fours of blocks.
    scales = torch.nn.functional.pad(weight.scales, (0, -groups % 4), value=formats.SCALE_ONE)
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    words = tensors.wrap_torch_tensor(weight.codes[None].transpose(-2, -1), dtype=tensors.FP4)
    words = tensors.convert_layout(words, layout, **options)
    layout, options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    wrapped = tensors.wrap_torch_tensor(scales[None].transpose(-2, -1))
    wrapped = tensors.convert_layout(wrapped, layout, **options)
    context = matmul.FlexCtx(rhs_data=numerics.InFlexData())
    config = matmul.PrecisionConfig(weight_scale=wrapped, flex_ctx=context)
    return lambda x, y: matmul.matmul_ogs(x, words, None, precision_config=config, y=y[None])


PEERS: dict[str, Callable[[MXTensor], Product]] = {
    "humming": _humming, "marlin": _marlin, "triton_kernels": _triton_kernels
}  # fmt: skip


def load(name: str, weight: MXTensor, copies: int) -> list[Product]:
    """Products of the library `name` over so many copies of a weight, checked against the dequantized weight.

    Raises:
        Unavailable: the library is not here, or cannot do this.
    """
    with unavailable():
        made = [PEERS[name](weight) for _ in range(copies)]
        _check(name, made[0], weight)
    return made


@contextlib.contextmanager
def unavailable() -> Iterator[None]:
    """Whatever goes wrong within is `Unavailable`: another library's faults are no fault of the benchmark."""
    try:
        yield
    except Exception as error:
        raise Unavailable(reason(error)) from error


def loaded(names: Sequence[str], load: Callable[[str], _Loaded]) -> dict[str, _Loaded | str]:
    """By name what `load` gives for it, or why it is `Unavailable`."""
    found: dict[str, _Loaded | str] = {}
    for name in names:
        try:
            found[name] = load(name)
        except Unavailable as error:
            found[name] = str(error)
    return found


def timed(seconds: Callable[[], float]) -> dict[str, Any]:
    """`us` a call of another library, or the `reason` why there is none."""
    try:
        return {"us": seconds() * 1e6, "reason": None}
    except Exception as error:
        return {"us": None, "reason": reason(error)}


def reason(error: BaseException) -> str:
    """An error of a library as one line; of jitmx, in its own words."""
    if isinstance(error, Unavailable | DriverError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _check(name: str, product: Product, weight: MXTensor) -> None:
    n, k = weight.shape
    x = torch.randn(3, k, device=weight.device).bfloat16()
    y = torch.zeros(3, n, dtype=torch.bfloat16, device=weight.device)
    product(x, y)
    wrong, size = torch.zeros(2, dtype=torch.float64)
    for rows in range(0, n, 16384):
        some = MXTensor(weight.codes[rows : rows + 16384], weight.scales[rows : rows + 16384])
        wanted = x.double() @ dequantize(some, torch.float32).double().T
        found = y[:, rows : rows + 16384].double()
        wrong, size = wrong + (found - wanted).square().sum().cpu(), size + wanted.square().sum().cpu()
    error = float((wrong / size).sqrt())
    if not error <= GATE:
        raise Unavailable(f"what {name} computes here is {error:.2g} away from the product, relative L2")


def module(name: str) -> Any:
    """A module by its name.

    Raises:
        Unavailable: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({reason(error)})") from error
