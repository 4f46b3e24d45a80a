"""What one call of `jitmx.moe` asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.kernels.fp8_rows import ROW_RANGES
from jitmx.kernels.linear.layout import ENCODINGS, RESIDUALS, SCALE_RANGES, preferred_encoding
from jitmx.kernels.routing.knobs import MAX_TOKENS, SCORINGS
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import MAX_SIZE, knob

ACTIVATIONS = ("swiglu_oai", "silu")  # of gate and up
UNGATED = ("plain", "relu2")  # of up alone: W13 has no gates
BOUNDED, UNBOUNDED = ACTIVATIONS[:1], ACTIVATIONS[1:]  # of them, those whose h has a bound, and others
MX_FORMATS = ("mxfp8", "mxfp6", "mxfp4")  # with a scale a block of 32; fp8 has one a row
X_FORMATS = ("bf16", *MX_FORMATS, "fp8")
WEIGHT_ON = ("output", "input")
REDUCTIONS = ("ordered", "atomic")
MAX_TOP = 8
MAX_ROWS = 64  # of a layer in one launch
ROUTINGS = ("ids", "bf16", "fp16", "fp32")  # ids and weights, or router logits
PRODUCTS = ("layer", "gather", "up", "down", "both", "combine")

# What kernels of fp8 take, where that is not all there is.
_OF_FP8 = {
    "scale_range": SCALE_RANGES[:1], "activation": ACTIVATIONS, "weight_on": WEIGHT_ON[:1],
    "reduction": REDUCTIONS[:1],
}  # fmt: skip


@dataclass(frozen=True)
class MoeProblem(Problem):
    """One call of `jitmx.moe`: m rows, each to `top` of so many experts."""

    derived: ClassVar[tuple[str, ...]] = ("rows_an_expert",)

    m: int = knob(1, low=1, high=MAX_TOKENS, doc="rows of x")
    experts: int = knob(GPT_OSS_120B.experts, low=1, high=1 << 15, doc="local experts")
    top: int = knob(GPT_OSS_120B.top, low=1, high=MAX_TOP, doc="experts a row")
    hidden: int = knob(
        GPT_OSS_120B.hidden, low=formats.BLOCK, high=MAX_SIZE, doc="columns of x and y, a multiple of 32"
    )
    intermediate: int = knob(
        GPT_OSS_120B.intermediate, low=formats.BLOCK, high=MAX_SIZE // 64 * 32, doc="features of h, a multiple of 32"
    )
    activation: str = knob(
        "swiglu_oai", choices=ACTIVATIONS + UNGATED,
        doc="clamped SwiGLU of gpt-oss, silu(gate) * up; without gates up itself, or max(up, 0)^2",
    )  # fmt: skip
    bias: bool = knob(True, doc="both products have a bias")
    encoding: str = knob("rotated", choices=ENCODINGS, doc="how the weights were packed")
    scale_range: str = knob("normal", choices=SCALE_RANGES, doc="E8M0 bytes of the weights")

    row_range: str = knob(
        "narrow",
        choices=ROW_RANGES,
        doc="of fp8: whether the scales of every row of W are at most eleven binades apart, or of some further",
    )

    product: str = knob("layer", choices=PRODUCTS, doc="all of it, or of many rows what one launch makes")
    x_format: str = knob("bf16", choices=X_FORMATS, doc="format that x and h are quantized to, or bf16")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the exponent of a quantized block is taken")
    weight_on: str = knob("output", choices=WEIGHT_ON, doc="where the router's weight multiplies: W2 h + b2, or x")
    reduction: str = knob(
        "ordered", choices=REDUCTIONS, doc="of a row's experts: in the order of its slots, or by atomics in none"
    )
    residual: bool | str = knob(
        False, choices=RESIDUALS, doc="add [m, hidden] values before y is rounded; with pair these and y are pairs"
    )
    routing: str = knob("ids", choices=ROUTINGS, doc="ids and weights, or router logits of this type")
    scoring: str = knob(SCORINGS[0], choices=SCORINGS, doc="of logits: softmax over the chosen, or over all experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_blocks("hidden", "intermediate")
        if self.residual == "pair" and self.reduction == "atomic":
            raise KnobError("reduction='atomic' adds to y in bf16, and residual='pair' leaves a pair", "use 'ordered'")

    def require_call(self) -> None:
        """Raise KnobError for more experts a row than there are logits of."""
        if self.routing != "ids" and self.top > self.experts:  # ids may name experts that are elsewhere
            raise KnobError(
                f"{self.owner}.top={self.top} of router logits is over experts={self.experts}",
                f"the nearest legal value is {self.experts}",
            )

    @property
    def experts_hit(self) -> float:
        """Experts that have rows, where all are as likely."""
        if self.experts == 1:
            return 1.0
        return self.experts * -math.expm1(self.m * self.top * math.log1p(-1 / self.experts))

    @property
    def rows_an_expert(self) -> float:
        """Rows that an expert has which has any, on average: what kernels of one or of many rows are chosen by."""
        return self.m * self.top / self.experts_hit

    @property
    def overridable(self) -> bool:
        """Knobs and tiles in the environment are for layers and their products, not for what moves rows."""
        return self.product not in ("gather", "combine")

    @property
    def gated(self) -> bool:
        """Whether W13 has interleaved gate and up rows; else it has up rows alone."""
        return self.activation in ACTIVATIONS

    @property
    def h_format(self) -> str:
        """What h is rounded to: x_format, but that fp8's one scale for all rows of h rests on a bound of it.

        Where the activation gives none, h stays in bf16, which the second product of many rows reads.
        """
        return "bf16" if self.x_format == "fp8" and self.activation not in BOUNDED else self.x_format

    @property
    def adds(self) -> bool:
        """Whether parts are added to y itself, which has to be there before: zero, or the residual."""
        return self.reduction == "atomic"

    def sizes(self, product: str) -> tuple[int, int]:
        """Rows and columns of an expert's weight in the product "up" or "down"."""
        if product == "up":
            return self.intermediate * (2 if self.gated else 1), self.hidden
        return self.hidden, self.intermediate

    @classmethod
    def on(cls, arch: Arch, **shape: Any) -> MoeProblem:
        """A problem whose weights were packed for `arch`, in the form that its kernels take."""
        encoding = preferred_encoding(arch, shape.get("x_format", "bf16"))
        return cls(**{"encoding": encoding, **shape}).taken(arch)

    def refusal(self, arch: Arch) -> str:
        """Why a target has no product for x_format=fp8, in words; empty where it has, and for other formats."""
        if self.x_format != "fp8":
            return ""
        if "wgmma" not in arch.features:
            return f"no kernel of {arch} takes fp8"
        for name, usual in _OF_FP8.items():
            value = getattr(self, name)
            if value not in usual:
                return f"kernels of fp8 do not take {name}={value}, only {' or '.join(usual)}"
        return ""

    def taken(self, arch: Arch) -> MoeProblem:
        """The same as kernels of a target take it.

        Where E4M3 with a scale a row is asked for and the target has no kernel for it, or none for all else that is
        asked, that is E4M3 with the least scale that holds a block of 32: no value is rounded more coarsely.
        """
        if not self.refusal(arch):
            return self
        return replace(self, x_format="mxfp8", scale_rule="ceil", row_range=ROW_RANGES[0])
