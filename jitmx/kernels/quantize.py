"""`quantize`: bf16, fp16 or fp32 to the OCP Microscaling formats with E8M0 block scales, and back.

Kernels:
    quantize     values to codes and scales
    dequantize   codes and scales to values

Shapes: values [..., k] with k a multiple of 32; scales [..., k / 32]. Formats and rules are those of jitmx/formats.py,
whose functions are the reference. Floor: bytes read plus bytes written over the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx import formats
from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Family, Problem
from jitmx.registry.contract import Contract
from jitmx.registry.spec import KernelSpec, Knobs, knob

DTYPES = ("bf16", "fp16", "fp32")
VALUES_A_VECTOR = 8


@dataclass(frozen=True)
class QuantizeKnobs(Knobs):
    """Compile-time choices of `quantize.quantize`."""

    format: str = knob("mxfp4", choices=tuple(formats.FORMATS), doc="element format")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the values")
    scale_rule: str = knob("floor", choices=formats.SCALE_RULES, doc="how the scale's exponent is taken")
    block: int = knob(256, choices=(128, 256, 512), doc="threads a block")
    vectors: int = knob(4, choices=(1, 2, 4, 8), doc="vectors of 8 values a thread")
    pdl: bool = knob(True, doc="programmatic dependent launch: blocks are in place when the previous kernel ends")


@dataclass(frozen=True)
class DequantizeKnobs(Knobs):
    """Compile-time choices of `quantize.dequantize`."""

    format: str = knob("mxfp4", choices=tuple(formats.FORMATS), doc="element format")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of the values")
    block: int = knob(256, choices=(128, 256, 512), doc="threads a block")
    vectors: int = knob(4, choices=(1, 2, 4, 8), doc="vectors of 8 values a thread")
    pdl: bool = knob(True, doc="programmatic dependent launch: blocks are in place when the previous kernel ends")


def _check(knobs: QuantizeKnobs | DequantizeKnobs, arch: Arch) -> None:
    if knobs.pdl and "pdl" not in arch.features:
        raise KnobError(f"pdl=True needs sm_90 or newer; {arch} has no programmatic dependent launch (use pdl=False)")


def _contract(require: str) -> Contract:
    return Contract(max_registers=128, max_spill_bytes=0, require=(require,))


QUANTIZE = KernelSpec(
    family="quantize",
    name="quantize",
    knobs=QuantizeKnobs,
    contract=lambda knobs, arch: _contract(r"\bLDG\.E\..*128"),
    check=_check,
    shared_bytes=lambda knobs: 0,
    threads=lambda knobs: knobs.block,
    entry="jitmx_quantize",
)

DEQUANTIZE = KernelSpec(
    family="quantize",
    name="dequantize",
    knobs=DequantizeKnobs,
    contract=lambda knobs, arch: _contract(r"\bSTG\.E\..*128"),
    check=_check,
    shared_bytes=lambda knobs: 0,
    threads=lambda knobs: knobs.block,
    entry="jitmx_dequantize",
)


def blocks(knobs: QuantizeKnobs | DequantizeKnobs, values: int) -> int:
    """Blocks of a launch over `values` values."""
    per_block = knobs.block * knobs.vectors * VALUES_A_VECTOR
    return -(-values // per_block)


@dataclass(frozen=True)
class QuantizeProblem(Problem):
    """One call of `jitmx.quantize` or `jitmx.dequantize`."""

    direction: str = "quantize"
    format: str = "mxfp4"
    dtype: str = "bf16"
    scale_rule: str = "floor"

    @property
    def kernel(self) -> str:
        """ "quantize" or "dequantize"."""
        return self.direction

    def fixed(self) -> dict[str, Any]:
        """Format, dtype and, one way, the scale rule."""
        knobs = {"format": self.format, "dtype": self.dtype}
        return knobs | {"scale_rule": self.scale_rule} if self.direction == "quantize" else knobs


FAMILY = Family(
    name="quantize",
    summary="bf16, fp16, fp32 to MXFP4, MXFP6, MXFP8 and back",
    specs=(QUANTIZE, DEQUANTIZE),
    problem=QuantizeProblem,
    typical=lambda arch: tuple(
        QuantizeProblem(direction, format_, dtype)
        for format_ in formats.FORMATS
        for dtype in DTYPES
        for direction in ("quantize", "dequantize")
    ),
    heuristic=lambda problem, arch, multiprocessors: {"pdl": "pdl" in arch.features},
)
