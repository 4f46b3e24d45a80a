"""jitmx's operators without a card: the kernels that a target would be given, run by the simulator on CPU tensors.

`on_cpu` puts them in the places of the launches, so that code above the operators runs as it would on a GPU, from the
addresses that it passes on to the bits of its results. Small shapes only: a thread costs microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch

from jitmx import arch
from jitmx.dispatch.choose import choose, split
from jitmx.kernels.linear import launch_of
from jitmx.kernels.linear.arguments import LAYOUT
from jitmx.kernels.linear.layout import packed_tiles
from jitmx.kernels.quantize import VALUES_A_VECTOR, QuantizeProblem, blocks
from jitmx.ops import linear as product
from jitmx.ops import plan
from jitmx.ops import quantize as quantizer
from jitmx.ops.operand import Weight
from jitmx.registry.case import Array, Buffer, Case
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.verify import run
from jitmx.toolchain import nvrtc

MULTIPROCESSORS = 4
_STORED: dict[torch.dtype, Any] = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@contextlib.contextmanager
def on_cpu(target: str = "sm_121a") -> Iterator[list[Variant]]:
    """`jitmx.quantize` and `torch.ops.jitmx.linear` take CPU tensors, and run kernels for `target`.

    Yields:
        The variants that ran, in order.
    """
    ran: list[Variant] = []

    def quantized(x: torch.Tensor, format: str, scale_rule: str) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantizer._quantized(x, format, scale_rule)
        problem = QuantizeProblem("quantize", format, quantizer._DTYPES[x.dtype], scale_rule)
        variant = choose("quantize", problem, arch.parse(target), multiprocessors=MULTIPROCESSORS).variant
        outputs = [Buffer(tensor.numpy(), output=True) for tensor in (codes, scales)]
        arguments = (Buffer(array(x)), *outputs, x.numel() // VALUES_A_VECTOR)
        found = launch(variant, blocks(variant.knobs, x.numel()), 0, "@PPPQ", arguments)
        ran.append(variant)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    def multiplied(
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        epsilon: float = 1e-5,
        activation: str | None = None,
    ) -> torch.Tensor:
        flat = x.reshape(-1, weight.k)
        extras = {"bias": bias is not None, "residual": residual is not None, "norm": norm is not None}
        asked = plan.problem(weight, len(flat), x.dtype, extras | {"activation": activation or "none"})
        ((choice, count),) = split("linear", asked, arch.parse(target), multiprocessors=MULTIPROCESSORS)
        assert count == 1
        geometry = launch_of(choice.variant, len(flat), weight.n, weight.k, MULTIPROCESSORS)
        words, scales = packed_arrays(weight)
        y = np.empty((len(flat), weight.n), _STORED[x.dtype])
        optional = [0 if tensor is None else Buffer(array(tensor)) for tensor in (bias, residual, norm)]
        workspace = Buffer(np.zeros(geometry.workspace, np.uint8), scratch=True) if geometry.workspace else 0
        arguments = (
            Buffer(array(flat)), Buffer(words), Buffer(scales), *optional, Buffer(y, output=True), workspace, 0,
            epsilon, len(flat), weight.n, weight.k,
        )  # fmt: skip
        (found,) = launch(
            choice.variant, geometry.blocks, geometry.shared_bytes, LAYOUT, arguments, geometry.cluster
        )  # fmt: skip
        ran.append(choice.variant)
        y_tensor = torch.from_numpy(found.view(np.int16)).view(x.dtype).reshape(*x.shape[:-1], weight.n)
        return y_tensor if out is None else out.copy_(y_tensor)

    with mock.patch.object(quantizer, "_quantize", quantized), mock.patch.object(product, "run", multiplied):
        yield ran


def array(tensor: torch.Tensor) -> Array:
    """A CPU tensor's values in NumPy, bf16 among them."""
    if tensor.dtype is torch.float32:
        return tensor.numpy()
    values: Array = tensor.contiguous().view(torch.int16).numpy().view(_STORED[tensor.dtype])
    return values


def packed_arrays(weight: Weight) -> tuple[Array, Array]:
    """Words and scales that lie at a weight's addresses."""
    rows, tiles = packed_tiles(weight.n, weight.k)
    sizes = rows * tiles * (512 if weight.format == "mxfp4" else 1024), rows * tiles * 32
    words, scales = (
        np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).copy()
        for address, size in zip(weight.addresses, sizes, strict=True)
    )
    return words.view(np.uint32), scales.view(np.uint32)


def launch(
    variant: Variant, grid: int, shared_bytes: int, layout: str, arguments: Sequence[Any], cluster: int = 1
) -> list[Array]:
    """The outputs of one simulated launch."""
    outputs: list[Array] = []

    def keep(found: Sequence[Array]) -> float:
        outputs.extend(found)
        return 0.0

    case = Case("a call", grid, shared_bytes, layout, arguments, keep, 0.0, cluster)
    run(case, variant, nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch)))
    return outputs
