"""Knobs that kernels over packed weights share, those of `linear` and of `moe`."""

from __future__ import annotations

from typing import Any

from jitmx.kernels.linear.layout import DTYPES, ENCODINGS, RESIDUALS, SCALE_RANGES
from jitmx.registry.spec import knob

DTYPE: Any = knob("bf16", choices=DTYPES, doc="type of X, Y, bias and residual")
BIAS: Any = knob(False, doc="add a bias of n values")
RESIDUAL: Any = knob(
    False, choices=RESIDUALS, doc="add [m, n] values before Y is rounded; with pair these and Y are pairs"
)
SWIGLU: Any = knob(
    False, doc="rows of W are 8 gates and their 8 ups by turns: Y is up * silu(gate), [m, n / 2]; no bias, no residual"
)
ENCODING: Any = knob("rotated", choices=ENCODINGS, doc="order of the bits in a packed word")
SCALE_RANGE: Any = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes: 2 to 128, or all with 0 and NaN")
# Of kernels that scale weights as they decode them to bf16.
BF16: Any = knob("bf16", choices=("bf16",), doc="type of X, Y, bias and residual")
NORMAL_SCALE_RANGE: Any = knob("normal", choices=("normal",), doc="E8M0 bytes: 2 to 128")
