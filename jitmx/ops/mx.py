"""Quantized tensors: codes with their block scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitmx import formats
from jitmx.errors import InputError
from jitmx.ops import checks


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A tensor in an OCP Microscaling format.

    Attributes:
        codes: uint8 [..., k / 2] for mxfp4 (even k in the low nibble), [..., k] for the other formats.
        scales: uint8 [..., k / 32], E8M0: 2^(byte - 127), 255 is NaN.
        format: "mxfp4", "mxfp6e2m3", "mxfp6e3m2" or "mxfp8".
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: str = "mxfp4"

    def __post_init__(self) -> None:
        item = formats.get(self.format)
        for name in ("codes", "scales"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() < 1:
                raise InputError(
                    f"{name} is {checks.shown(tensor)}; it must be a uint8 tensor of at least one dimension",
                    "view float8_e8m0fnu or packed types as torch.uint8",
                )
            checks.require_strided(name, tensor)
        k = self.codes.shape[-1] * item.codes_per_byte
        if k % formats.BLOCK or tuple(self.scales.shape) != (*self.codes.shape[:-1], k // formats.BLOCK):
            raise InputError(
                f"codes {list(self.codes.shape)} and scales {list(self.scales.shape)} do not fit: {self.format} codes "
                f"of k values (k a multiple of {formats.BLOCK}) have scales [..., k / {formats.BLOCK}]"
            )
        if self.codes.device != self.scales.device:
            raise InputError(
                f"codes are on {self.codes.device} and scales on {self.scales.device}", "put both on one device"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * formats.get(self.format).codes_per_byte)

    @property
    def device(self) -> torch.device:
        """Where codes and scales lie."""
        return self.codes.device

    def __repr__(self) -> str:
        return f"MXTensor({self.format}, {list(self.shape)}, {self.device})"
