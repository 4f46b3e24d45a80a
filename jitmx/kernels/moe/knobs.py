"""Knobs that kernels of `moe` share."""

from __future__ import annotations

from typing import Any

from jitmx.kernels.linear.layout import RESIDUALS
from jitmx.kernels.moe.problem import ACTIVATIONS
from jitmx.registry.spec import knob

ACTIVATION: Any = knob("swiglu_oai", choices=ACTIVATIONS, doc="what makes h of gate and up")
BIASES: Any = knob(True, doc="both products have a bias")
RESIDUAL: Any = knob(
    False, choices=RESIDUALS, doc="add [rows, hidden] values before y is rounded; with pair these and y are pairs"
)
