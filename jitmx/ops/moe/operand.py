"""Packed experts of an operator that torch knows by name, found again by where they lie (see operand.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from jitmx.errors import InputError
from jitmx.ops.linear import operand
from jitmx.ops.linear.row_words import Looked, OperandRows
from jitmx.ops.moe.experts import PackedExperts
from jitmx.runtime.plan import Plans

FORMAT = "mxfp4"


@dataclass(frozen=True, eq=False)
class ExpertOperand(OperandRows):
    """Packed weights [experts, n, k] as calls need them. Attributes as those of PackedExperts."""

    experts: int
    n: int
    k: int
    encoding: str
    scale_range: str
    device: torch.device
    addresses: tuple[int, int]
    plans: Plans = field(default_factory=Plans)
    _rows: list[Looked] = field(default_factory=list, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, n, k)."""
        return self.experts, self.n, self.k


Experts = PackedExperts | ExpertOperand


def layout(weight: PackedExperts) -> str:
    """How experts are packed, as one text."""
    return operand.text(FORMAT, weight.encoding, weight.scale_range)


def without_data(words: torch.Tensor, n: int, k: int, layout: str) -> ExpertOperand:
    """The same as `find` for tensors that have a shape and no data."""
    _, encoding, scale_range = operand.parts(layout)
    return ExpertOperand(words.shape[0], n, k, encoding, scale_range, words.device, (0, 0))


def find(words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str) -> ExpertOperand:
    """The experts [experts, n, k] that lie in `words` and `scales`.

    Raises:
        InputError: they are no packed experts of that layout.
    """
    key = "experts", words.data_ptr(), scales.data_ptr(), words.get_device(), words.dtype, words.shape, n, k, layout
    found: ExpertOperand | None = operand.known(key)
    if found is None:
        format, encoding, scale_range = operand.parts(layout)
        if format != FORMAT:
            raise InputError(f"format={format!r} of packed experts is not {FORMAT}")
        checked = PackedExperts(words, scales, n, k, encoding, scale_range)
        found = ExpertOperand(checked.experts, n, k, encoding, scale_range, checked.device, checked.addresses)
        operand.keep(key, found)
    return found
