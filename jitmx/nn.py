"""Modules for torch models.

layer = jitmx.nn.MXFP4Linear.from_linear(model.lm_head)
"""

from __future__ import annotations

from typing import Any, Self

import torch

from jitmx import formats
from jitmx.errors import InputError
from jitmx.kernels.linear.layout import ENCODINGS, SCALE_RANGES, packed_tiles, preferred_encoding
from jitmx.kernels.linear.problem import WEIGHTS
from jitmx.ops import checks
from jitmx.ops.linear import linear, operand
from jitmx.ops.linear.packed import PackedWeight, pack_weight
from jitmx.ops.quantize import quantize
from jitmx.quoting import short
from jitmx.registry.spec import MAX_SIZE
from jitmx.runtime import card

__all__ = ["MXFP4Linear"]


class MXFP4Linear(torch.nn.Module):  # type: ignore[misc]
    """`torch.nn.Linear` with its weight quantized and packed: Y = X W^T (+ bias), as `jitmx.linear` makes it.

    For inference: weight and bias are buffers, and a gradient is refused. A fresh module holds zeros until a state dict
    is loaded; `from_linear` makes one from a module that has its weights.

    Args:
        in_features: k, a multiple of 32.
        out_features: n.
        bias: whether there is a bias.
        device: where the buffers lie.
        dtype: of the bias, and of what the module takes and gives: bfloat16 or float16.
        format: "mxfp4" or "mxfp8".

    Attributes:
        words, scales: int32, the packed weight (docs/packed-layout.md).
        bias: [n] in the module's dtype, or None.

    Raises:
        InputError: features, dtype or format that no kernel takes.
    """

    words: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        format: str = "mxfp4",
    ) -> None:
        super().__init__()
        checks.require_whole(in_features=in_features, out_features=out_features)
        if (
            in_features < 1
            or in_features % formats.BLOCK
            or out_features < 1
            or max(in_features, out_features) > MAX_SIZE
        ):
            raise InputError(
                f"in_features={short(in_features)} and out_features={short(out_features)}: in_features must be a "
                f"multiple of {formats.BLOCK}, the values that share a scale, out_features 1 or more, and both "
                f"{MAX_SIZE} at most"
            )
        if dtype not in (torch.bfloat16, torch.float16):
            raise InputError(f"dtype={dtype} is neither bfloat16 nor float16", "convert the module with .bfloat16()")
        if format not in WEIGHTS:
            raise InputError(f"format={format!r} is not one of {', '.join(WEIGHTS)}")
        self.in_features, self.out_features = in_features, out_features
        self.format, self.encoding, self.scale_range = format, "rotated", "normal"
        rows, tiles = packed_tiles(out_features, in_features)
        lanes = (32, 4) if format == "mxfp4" else (2, 32, 4)
        ones = int.from_bytes(bytes([formats.SCALE_ONE] * 4), "little")
        self.register_buffer("words", torch.zeros((rows, tiles, *lanes), dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.full((rows, tiles, 8), ones, dtype=torch.int32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        if self.words.is_cuda:
            self.encoding = preferred_encoding(card.arch(self.words.get_device()))
        self._packed: PackedWeight | None = None

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, *, format: str = "mxfp4", scale_rule: str = "floor") -> Self:
        """A module with the weight of `module`, quantized along k.

        Args:
            module: on a GPU, in bfloat16, float16 or float32; a bias in float32 is rounded to bfloat16. It is left as
                it is, and may be dropped once this returns.
            format: "mxfp4" or "mxfp8".
            scale_rule: how the scale's exponent is taken from a block's largest magnitude: "floor" (OCP), "ceil",
                "even".

        Raises:
            InputError: no linear module, on another device, or of a shape or dtype that no kernel takes.
            KnobError: an unknown scale rule.
        """
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise InputError(f"module is a {type(module).__name__} without a weight [n, k]", "pass a torch.nn.Linear")
        checks.require_cuda("module.weight", weight)
        dtype = torch.float16 if weight.dtype is torch.float16 else torch.bfloat16
        n, k = weight.shape
        bias = getattr(module, "bias", None)
        made = cls(k, n, bias is not None, weight.device, dtype, format=format)
        packed = pack_weight(quantize(weight.detach().contiguous(), format, scale_rule=scale_rule))
        made.words, made.scales = packed.words, packed.scales
        made.encoding, made.scale_range = packed.encoding, packed.scale_range
        if bias is not None:
            made.bias = bias.detach().to(dtype, copy=True)
        made.train(module.training)
        return made

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        epsilon: float = 1e-5,
        activation: str | None = None,
    ) -> torch.Tensor:
        """As `jitmx.linear`, with this module's weight and bias.

        Args:
            x: [..., k] in the module's dtype, contiguous, on its GPU.

        Returns:
            [..., n] in the module's dtype.
        """
        if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
            checks.require_tensor("x", x)
            layout = operand.text(self.format, self.encoding, self.scale_range)
            y: torch.Tensor = torch.ops.jitmx.linear(
                x, self.words, self.scales, self.out_features, self.in_features, layout, self.bias, residual, norm,
                epsilon, activation,
            )  # fmt: skip
            return y
        return linear(x, self.weight, self.bias, residual=residual, norm=norm, epsilon=epsilon, activation=activation)

    @property
    def weight(self) -> PackedWeight:
        """The packed weight, with the launches that were planned for it."""
        packed = self._packed
        if packed is None or packed.words is not self.words or packed.scales is not self.scales:
            packed = self._packed = PackedWeight(
                self.words, self.scales, self.out_features, self.in_features, self.encoding, self.scale_range,
                self.format,
            )  # fmt: skip
        return packed

    def get_extra_state(self) -> dict[str, Any]:
        """How the weight is packed, which a state dict holds beside words and scales."""
        return {"format": self.format, "encoding": self.encoding, "scale_range": self.scale_range}

    def set_extra_state(self, state: Any) -> None:
        """Take over how the weight of a state dict is packed.

        Raises:
            InputError: it is of no packed weight, or its format is not this module's.
        """
        found = {name: state.get(name) if isinstance(state, dict) else None for name in self.get_extra_state()}
        if found["format"] != self.format and found["format"] in tuple(formats.FORMATS):
            raise InputError(f"the state dict holds an {found['format']} weight", "make the module with that format")
        if (
            found["format"] != self.format
            or found["encoding"] not in ENCODINGS
            or found["scale_range"] not in SCALE_RANGES
        ):
            raise InputError(
                f"the state dict says {state!r} of how its weight is packed, which is nothing that jitmx packs",
                "save a state dict of a module that this jitmx packed",
            )
        self.encoding, self.scale_range = found["encoding"], found["scale_range"]
        self._changed()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load what is this module's; torch would round words of another dtype to numbers.

        Raises:
            InputError: words or scales of another dtype than they are packed in.
        """
        for name in ("words", "scales"):
            found = state_dict.get(prefix + name)
            if isinstance(found, torch.Tensor) and found.dtype is not torch.int32:
                raise InputError(
                    f"{prefix}{name} of the state dict is {checks.describe(found)}; a packed weight is bits in int32, "
                    "which a cast changes",
                    "load a state dict that was not cast, and cast the module, which leaves them as they are",
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._changed()
        return self

    def _changed(self) -> None:
        """Forget what was planned for other buffers, and wait until those of now are written: kernels prefetch them."""
        self._packed = None
        if self.words.is_cuda and torch.cuda.is_initialized():  # else it has no data
            torch.cuda.current_stream(self.words.device).synchronize()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_packed": None}

    def extra_repr(self) -> str:
        """Sizes, format and whether there is a bias, as torch's modules print them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}"
        )
