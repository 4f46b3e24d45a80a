"""What one call of `jitmx.moe` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.kernels.linear.layout import ENCODINGS, SCALE_RANGES, preferred_encoding
from jitmx.registry.spec import knob

ACTIVATIONS = ("swiglu_oai", "silu")
MAX_TOP = 8
MAX_ROWS = 64  # of a layer in one launch
PRODUCTS = ("layer", "up", "down", "combine")


@dataclass(frozen=True)
class MoeProblem(Problem):
    """One call of `jitmx.moe`: m rows, each to `top` of so many experts."""

    m: int = knob(1, low=1, doc="rows of x")
    experts: int = knob(128, low=1, high=1 << 15, doc="experts whose weights are at hand")
    top: int = knob(4, low=1, high=MAX_TOP, doc="experts a row")
    hidden: int = knob(2880, low=formats.BLOCK, doc="columns of x and y, a multiple of 32")
    intermediate: int = knob(2880, low=formats.BLOCK, doc="pairs of gate and up, a multiple of 32")
    activation: str = knob("swiglu_oai", choices=ACTIVATIONS, doc="clamped SwiGLU of gpt-oss, or silu(gate) * up")
    bias: bool = knob(True, doc="both products have a bias")
    encoding: str = knob("swizzle", choices=ENCODINGS, doc="how the weights were packed")
    scale_range: str = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes of the weights")

    product: str = knob("layer", choices=PRODUCTS, doc="all of it, or of many rows one of its three launches")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            if size % formats.BLOCK:
                nearest = (size + formats.BLOCK // 2) // formats.BLOCK * formats.BLOCK
                raise KnobError(
                    f"MoeProblem.{name}={size} is not a multiple of {formats.BLOCK}, the values that share a scale; "
                    f"the nearest legal value is {nearest}"
                )

    @property
    def overridable(self) -> bool:
        """Knobs and tiles in the environment are for layers and their products, not for the sum."""
        return self.product != "combine"

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> MoeProblem:
        """A problem whose weights were packed for `arch`."""
        return cls(**{"encoding": preferred_encoding(arch), **shape})
