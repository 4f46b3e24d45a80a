"""Dense layers of a vLLM model on packed MXFP4 or MXFP8 weights, quantized from the checkpoint's bf16 while it loads.

vLLM's own loaders fill the weight, shard by shard. It is born without storage, gets some when the layer's last tensor
has arrived, and is packed and dropped at once: no two layers hold their bf16 weights at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter

import jitmx.vllm.products  # noqa: F401 - defines torch.ops.jitmx.vllm_linear
from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import TILE_ROWS
from jitmx.kernels.linear.problem import WEIGHTS
from jitmx.ops import pack as packing
from jitmx.ops.checks import HALF_DTYPES
from jitmx.ops.custom import is_exporting, is_tracing
from jitmx.ops.linear import operand, run_operator
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.plan import reads_rows
from jitmx.ops.linear.row_words import RowWords, require_passes, row_words
from jitmx.ops.linear.swiglu import interleave_gate_up
from jitmx.ops.quantize import quantize
from jitmx.vllm import compiled, warmup
from jitmx.vllm.log import logger
from jitmx.vllm.packing import processing, timed

__all__ = ["JitmxLinearMethod", "refusal"]

# An attribute of the parameters that a checkpoint is loaded into; whoever ties weights puts another in their place.
_OURS = "jitmx_source"

# Values that are quantized and packed at a time: what that needs beside the weight, 36 MB, does not grow with it.
_VALUES = 1 << 25


def refusal(format: str, k: int, dtype: torch.dtype) -> str | None:
    """Why no kernel serves a layer, or None where one does.

    Args:
        format: "mxfp4" or "mxfp8".
        k: input features of this rank's shard.
        dtype: of the layer's parameters and activations.
    """
    if format not in WEIGHTS:
        return f"format={format!r} is not one of {', '.join(WEIGHTS)}"
    if k < 1 or k % formats.BLOCK:
        return (
            f"{k} input features a rank are no multiple of {formats.BLOCK}, the values that share a scale; "
            "keep the layer in bf16 or split it over fewer ranks"
        )
    if dtype not in HALF_DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is neither bfloat16 nor float16; pass --dtype bfloat16"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and jitmx picks kernels by the size of the batch; keep the layer in bf16"
    config = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.use_ubatching:
        return (
            "two halves of a batch run on two streams, and blocks of a product of many rows wait for one another; "
            "serve without --enable-dbo and --ubatch-size, or keep the layer in bf16"
        )
    return None


@register_weight_loader_v2_supported_method
class JitmxLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Makes a layer of vLLM a product with a packed weight: one `torch.ops.jitmx.linear`, whatever the batch.

    A processed layer holds the parameters `weight_packed` and `weight_scale`, int32 (docs/packed-layout.md). Its
    `weight` is a single NaN of the checkpoint's dtype, on the layer's device: who asks for dtype or device finds them,
    who loads into it or multiplies with it fails, and no two such weights compare as equal.

    Args:
        format: "mxfp4" or "mxfp8".
        prefix: the layer's full name, for messages.
        stock: the method whose parameters the checkpoint is loaded into; vLLM's for bf16 linear layers by default.
        all_scales: take kernels for all scales from the start: a weight that is loaded again may have any.
        activation: what X of many rows is rounded to, "none" or "fp8".

    Attributes:
        extras: norm, residual or swiglu, as in `LinearProblem`, where the layer's block gives them to the product
            (`apply_in_block`); with swiglu, rows are packed in the order of `jitmx.interleave_gate_up`.
        prefetch: the layer whose weight the product prefetches to the L2: work that leaves memory idle lies between;
            None for none.

    Raises:
        InputError: an unknown format.
    """

    uses_meta_device = True

    def __init__(
        self, format: str, prefix: str, stock: Any = None, all_scales: bool = False, activation: str = "none"
    ) -> None:
        super().__init__()
        if format not in WEIGHTS:
            raise InputError(f"{prefix}: format={format!r} is not one of {', '.join(WEIGHTS)}")
        self.format, self.prefix, self.activation = format, prefix, activation
        self._all_scales = all_scales
        self.extras: dict[str, Any] = {}
        self.prefetch: torch.nn.Module | None = None
        self.stock = UnquantizedLinearMethod() if stock is None else stock

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The parameter that the checkpoint is loaded into, without storage yet.

        Raises:
            InputError: a shard that no kernel serves, or a layer that vLLM was told to quantize itself.
        """
        taker = getattr(layer, "quant_method", self)
        if taker is not self:
            raise InputError(
                f"{self.prefix}: vLLM quantizes this layer itself ({type(taker).__name__}, by --quantization-config)",
                "take it out of that, or out of the layers that jitmx is asked to serve",
            )
        reason = refusal(self.format, input_size_per_partition, params_dtype)
        if reason is not None:
            raise InputError(f"{self.prefix} [{sum(output_partition_sizes)}, {input_size_per_partition}]: {reason}")
        with torch.device("meta"):
            self.stock.create_weights(
                layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
                **extra_weight_attrs,
            )  # fmt: skip
        setattr(layer.weight, _OURS, True)
        initialize_online_processing(layer)

    def begin(self, layer: torch.nn.Module) -> None:
        """Begin with the kernels that the layer will ask for; its block has set `extras`."""
        warmup.begin_linear(layer, self.format, "full" if self._all_scales else "normal")

    @processing()
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the loaded weight and drop it. vLLM calls it when the layer is complete, and again after all are.

        Raises:
            InputError: a reloaded weight has scales that the kernels in use do not take.
        """
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if not hasattr(layer.weight, _OURS):
            logger.warning("%s stays in bf16: its weight was replaced by one that it shares", self.prefix)
            layer.quant_method = self.stock
            self.stock.process_weights_after_loading(layer)
            return
        warmup.prepare_packing(layer, self.format)
        with timed():
            weight = layer.weight.data
            packed = pack(interleave_gate_up(weight) if self.extras.get("swiglu") else weight, self.format)
        if self._all_scales:
            packed = replace(packed, scale_range="full")
        layout = operand.layout(packed)
        *_, before = getattr(layer, "jitmx_packed", (layout,))
        if before != layout and not before.endswith("/full"):
            raise InputError(
                f"{self.prefix}: the reloaded weight is packed as {layout}, and compiled code and CUDA graphs were "
                f"made for {before}. Layers before this one have new weights by now",
                "start a new engine on these, with JITMX_ALL_SCALES=1 (additional_config's all_scales) "
                "if it is to take any",
            )
        layer.jitmx_packed = packed.n, packed.k, before
        if before.endswith("/full"):
            compiled.full_scales(get_current_vllm_config_or_none(), self.prefix)
        replace_parameter(layer, "weight_packed", packed.words)
        replace_parameter(layer, "weight_scale", packed.scales)
        replace_parameter(layer, "weight", layer.weight.data.new_full((1, 1), math.nan))
        if reads_rows(self.activation, packed, layer.weight.dtype):
            self._keep_rows(layer, packed, before)
        layer._already_called_process_weights_after_loading = True
        warmup.prepare_product(layer)

    def _keep_rows(self, layer: torch.nn.Module, packed: PackedWeight, layout: str) -> None:
        """Keep what products in E4M3 are told of the weight's rows as a parameter: reloading copies it like the weight.

        Raises:
            InputError: rows of a reloaded weight need passes that kernels in use do not make.
        """
        rows = row_words(packed.words, packed.scales, packed.n, packed.encoding)
        known = getattr(layer, "jitmx_row_range", rows.range)
        require_passes(known, rows.range)
        layer.jitmx_row_range = known
        replace_parameter(layer, "weight_rows", rows.words)
        found = operand.find(layer.weight_packed.data, layer.weight_scale.data, packed.n, packed.k, layout)
        found.adopt(RowWords(layer.weight_rows.data, known), layer.weight_packed.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T (+ bias).

        Args:
            x: [..., k] in the layer's dtype.
            bias: [n], or None.

        Returns:
            [..., n].
        """
        n, k, layout = layer.jitmx_packed
        if self.activation != "none":
            return self._product(layer, x, bias, None, None, None, 0.0)
        given = (
            x.contiguous(), layer.weight_packed, layer.weight_scale, n, k, layout, bias, None, None, 0.0, None,
            *self._prefetched(),
        )  # fmt: skip
        # The head is outside of graphs and compiled code: there torch's dispatcher would take as long as the call.
        eager = type(x) is torch.Tensor and not (is_tracing() or is_exporting())
        y: torch.Tensor = run_operator(*given) if eager else torch.ops.jitmx.linear(*given)
        return y

    def apply_in_block(
        self, layer: torch.nn.Module, x: torch.Tensor, *, residual: torch.Tensor | None = None,
        residual_lo: torch.Tensor | None = None, norm: torch.Tensor | None = None, epsilon: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        """RMSNorm(X) W^T + bias + residual, of which `extras` says what there is, or up * silu(gate) of gates and ups.

        Args:
            x: [tokens, k] in the layer's dtype.
            residual: [tokens, n].
            residual_lo: its low part, likewise; None for none.
            norm, epsilon: of the RMSNorm; the weight is [k].

        Returns:
            [tokens, n]; with a residual a hi/lo residual [2, tokens, n]; with swiglu [tokens, n / 2].
        """
        return self._product(layer, x, layer.bias, residual, residual_lo, norm, epsilon)

    def _product(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
        residual_lo: torch.Tensor | None, norm: torch.Tensor | None, epsilon: float,
    ) -> torch.Tensor:  # fmt: skip
        n, k, layout = layer.jitmx_packed
        y: torch.Tensor = torch.ops.jitmx.vllm_linear(
            x.contiguous(), layer.weight_packed, layer.weight_scale, n, k, layout, bias, residual, residual_lo, norm,
            epsilon, bool(self.extras.get("swiglu")), self.activation, *self._prefetched(),
        )  # fmt: skip
        return y

    def _prefetched(self) -> tuple[torch.Tensor, ...]:
        """Words and scales of that layer, where it has a packed weight."""
        layer = self.prefetch
        return () if layer is None or not hasattr(layer, "weight_packed") else (layer.weight_packed, layer.weight_scale)


def pack(weight: torch.Tensor, format: str) -> PackedWeight:
    """Quantize and pack a weight [n, k], some rows at a time where it is large.

    Args:
        weight: bfloat16, float16 or float32, on a GPU.
        format: "mxfp4" or "mxfp8".
    """
    n, k = weight.shape
    rows = max(1, _VALUES // (k * TILE_ROWS)) * TILE_ROWS
    words, scales = packing.room(1, n, k, format, weight.device)
    seen = packing.watch(weight.device)
    encoding = packing.encoding_for(weight.device, format)
    for start, some in zip(range(0, n, rows), weight.split(rows), strict=True):
        part = quantize(some.contiguous(), format)
        tiles = slice(start // TILE_ROWS, -(-(start + len(some)) // TILE_ROWS))
        packing.into(part.codes[None], part.scales[None], words[:, tiles], scales[:, tiles], seen, format, encoding)
    # Waits: kernels prefetch weights, ahead of their place in the stream.
    return PackedWeight(words[0], scales[0], n, k, encoding, packing.scale_range(seen), format)
