"""The weight of an operator that torch knows by name, found again by where it lies.

Such an operator takes tensors, numbers and texts only. What was planned for a weight depends on its addresses and sizes
and on nothing else, so that is how it is kept: an entry stays right whoever owns the memory, and holds none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from jitmx.errors import InputError
from jitmx.kernels.linear.arguments import NO_PREFETCH
from jitmx.ops.linear.packed import PackedWeight
from jitmx.ops.linear.row_words import Looked, OperandRows
from jitmx.runtime.plan import Plans

_MOST = 8192  # entries; a model has some hundreds of weights


@dataclass(frozen=True, eq=False)
class Operand(OperandRows):
    """A packed weight [n, k] as calls need it. Attributes as those of PackedWeight."""

    n: int
    k: int
    encoding: str
    scale_range: str
    format: str
    device: torch.device
    addresses: tuple[int, int]
    plans: Plans = field(default_factory=Plans)
    _rows: list[Looked] = field(default_factory=list, init=False, repr=False)


Weight = PackedWeight | Operand

_known: dict[tuple[Any, ...], Any] = {}


def layout(weight: PackedWeight) -> str:
    """How a weight is packed, as one text."""
    return text(weight.format, weight.encoding, weight.scale_range)


def text(format: str, encoding: str, scale_range: str) -> str:
    """A layout as one text."""
    return f"{format}/{encoding}/{scale_range}"


def parts(layout: str) -> tuple[str, str, str]:
    """Format, encoding and scale range of a layout.

    Raises:
        InputError: it is none.
    """
    found = layout.split("/")
    if len(found) != 3:
        raise InputError(f"layout={layout!r} is not format/encoding/scale range, such as mxfp4/rotated/normal")
    return found[0], found[1], found[2]


def prefetch(words: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> tuple[int, int, int, int]:
    """What a launch is told of a weight to prefetch: addresses of words and scales, and their bytes; zeros for none."""
    if words is None or scales is None:
        return NO_PREFETCH
    return words.data_ptr(), scales.data_ptr(), words.nbytes, scales.nbytes


def known(key: tuple[Any, ...]) -> Any:
    """What was kept for this key before, or None."""
    return _known.get(key)


def keep(key: tuple[Any, ...], made: Any) -> None:
    """Keep what was made for this key, among no more than so many."""
    while len(_known) >= _MOST:
        _known.pop(next(iter(_known)), None)
    _known[key] = made


def find(words: torch.Tensor, scales: torch.Tensor, n: int, k: int, layout: str) -> Operand:
    """The weight [n, k] that lies in `words` and `scales`.

    Raises:
        InputError: they are no packed weight of that layout.
    """
    # What tells a packed weight from every other that lives at the same time, and how it is read.
    key = words.data_ptr(), scales.data_ptr(), words.get_device(), words.dtype, words.shape, n, k, layout
    found: Operand | None = _known.get(key)
    if found is None:
        format, encoding, scale_range = parts(layout)
        checked = PackedWeight(words, scales, n, k, encoding, scale_range, format)
        found = Operand(n, k, encoding, scale_range, format, checked.device, checked.addresses)
        keep(key, found)
    return found
