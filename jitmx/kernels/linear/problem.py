"""What one call of `jitmx.linear` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.linear.knobs import BIAS, DTYPE, RESIDUAL, SWIGLU
from jitmx.kernels.linear.layout import ENCODINGS, SCALE_RANGES, TILE_ROWS, preferred_encoding
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import MAX_SIZE, knob

ACTIVATIONS = ("none", "mxfp8", "mxfp6", "mxfp4", "fp8")  # fp8: E4M3 with a scale a row
WEIGHTS = ("mxfp4", "mxfp8")


@dataclass(frozen=True)
class LinearProblem(Problem):
    """One call of `jitmx.linear`: X [m, k] times W [n, k]."""

    m: int = knob(1, low=1, high=MAX_SIZE, doc="rows of X")
    n: int = knob(GPT_OSS_120B.qkv[0], low=1, high=MAX_SIZE, doc="rows of W")
    k: int = knob(GPT_OSS_120B.hidden, low=formats.BLOCK, high=MAX_SIZE, doc="columns of X and W, a multiple of 32")
    dtype: str = DTYPE
    bias: bool = BIAS
    encoding: str = knob("rotated", choices=ENCODINGS, doc="how the weight was packed")
    scale_range: str = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes of the weight")
    weight: str = knob("mxfp4", choices=WEIGHTS, doc="format of the weight")
    activation: str = knob("none", choices=ACTIVATIONS, doc="format that X is quantized to, or none")
    row_range: str = knob(
        "narrow",
        choices=ROW_RANGES,
        doc="of fp8: whether the scales of every row of W are at most eleven binades apart, or of some further",
    )
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the exponent of a quantized block is taken")
    norm: bool = knob(False, doc="RMSNorm of X on the way in, with a weight of k values")
    residual: bool | str = RESIDUAL
    argmax: bool = knob(False, doc="yield the index of each row's largest value in place of Y")
    swiglu: bool = SWIGLU

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_blocks("k")
        if self.argmax and self.residual == "pair":
            raise KnobError("linear.residual='pair' leaves Y as a pair, and argmax=True leaves none", "use True")
        if self.swiglu:
            require_gated(self)
            if self.n % TILE_ROWS:
                raise KnobError(
                    f"{self.owner}.n={self.n} with swiglu=True is no multiple of {TILE_ROWS}, 8 gates and 8 ups",
                    f"the nearest legal value is {max(1, round(self.n / TILE_ROWS)) * TILE_ROWS}",
                )

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> LinearProblem:
        """A problem whose weight was packed for `arch`."""
        return cls(**{"encoding": preferred_encoding(arch), **shape})


def require_gated(fields: Any) -> None:
    """Raise KnobError where something is added to gates and ups, or compared with them, before they are one value."""
    for name in ("bias", "residual", "argmax"):
        if getattr(fields, name, False):
            said = f"{fields.owner}.{name}={getattr(fields, name)!r} is of a product, and swiglu=True leaves none"
            raise KnobError(said, "leave it out")
