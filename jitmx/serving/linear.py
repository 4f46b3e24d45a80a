"""A dense product of a served model, what quantizes and packs its weight, and what is fused with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.dispatch.call import Launch
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.layout import preferred_encoding
from jitmx.kernels.norm import NormProblem
from jitmx.kernels.norm import takes as norm_takes
from jitmx.kernels.pack import PackProblem, encoding_on
from jitmx.kernels.quantize import QuantizeProblem
from jitmx.serving.needed import Needed, chosen
from jitmx.serving.rounded_inputs import activation_of

# Rows up to which a product with its norm is quicker than a launch of the norm's own and the product alone: measured
# on an H200, where one row gains 7 us a block, two lose what they gain, and four lose 6.
NORMED_ROWS = 1
_EXTRAS = ("norm", "residual", "swiglu")


@dataclass(frozen=True)
class Linear(Needed):
    """A product with a packed weight.

    Attributes:
        n, k, dtype, bias, weight, encoding, scale_range: as in `LinearProblem`.
        norm, residual: it is given one, and has it fused where that is best.
        swiglu: its rows are gates and ups, likewise.
        activation: what X is rounded to, as `activation_of` takes it.
        row_range: as in `LinearProblem`.
    """

    families = ("linear", "norm")
    n: int
    k: int
    dtype: str
    bias: bool
    weight: str
    encoding: str
    scale_range: str
    norm: bool = False
    residual: bool | str = False
    swiglu: bool = False
    activation: str = "none"
    row_range: str = "narrow"

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, or several where a kernel takes only some of the rows; before them the norm, where they have none."""
        problem = LinearProblem(
            m, self.n, self.k, self.dtype, self.bias, self.encoding, self.scale_range, self.weight, norm=self.norm,
            residual=self.residual, swiglu=self.swiglu, row_range=self.row_range,
        )  # fmt: skip
        problem = replace(problem, activation=activation_of(problem, self.activation, arch))
        problem = fused(problem, arch, multiprocessors)
        if self.norm and not problem.norm:
            yield from norm(self.k, self.dtype, arch, multiprocessors)
        for choice, times in choose.split("linear", problem, arch, multiprocessors=multiprocessors):
            yield from map(Launch, choose.companions(choice))
            yield Launch(choice, times)


@dataclass(frozen=True)
class Quantizer(Needed):
    """What quantizes weights while they are loaded.

    Attributes:
        format: that weights are quantized to.
        dtype: of the checkpoint's values.
    """

    format: str
    dtype: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, whatever the number of rows."""
        problem = QuantizeProblem("quantize", self.format, self.dtype)
        yield chosen("quantize", problem, arch, multiprocessors)


@dataclass(frozen=True)
class Packer(Needed):
    """What packs weights while they are loaded.

    Attributes:
        format, encoding: as in `PackProblem`.
    """

    format: str
    encoding: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One, whatever the number of rows."""
        problem = PackProblem(self.format, self.encoding)
        yield chosen("pack", problem, arch, multiprocessors)


def of_linear(
    arch: Arch,
    device: int | None,
    rows: int,
    n: int,
    k: int,
    format: str,
    *,
    dtype: str = "bf16",
    bias: bool,
    scale_range: str,
    norm: bool = False,
    residual: bool | str = False,
    swiglu: bool = False,
    activation: str = "none",
    row_range: str = "narrow",
) -> tuple[Quantizer, Packer, Linear]:
    """What quantizes and packs the weight of a dense layer while it is loaded, and its product; in this order.

    Args:
        format: that the weight is quantized to.
        dtype: of the checkpoint's values and of activations.
        device, rows, n, k, bias, scale_range, norm, residual, swiglu, activation, row_range: as in `Linear`.
    """
    encoding = encoding_on(arch, format)
    return (
        Quantizer(arch.name, device, 1, format, dtype),
        Packer(arch.name, device, 1, format, encoding),
        Linear(
            arch.name, device, rows, n, k, dtype, bias, format, encoding, scale_range, norm, residual, swiglu,
            activation, row_range,
        ),
    )  # fmt: skip


def gains(arch: Arch, n: int, k: int, format: str) -> bool:
    """Whether the kernel for one row of QKV has RMSNorm in it, without which fusing norms gains nothing.

    Args:
        n, k: output and input features of QKV.
        format: of its weight.
    """
    problem = LinearProblem(1, n, k, bias=True, encoding=preferred_encoding(arch), weight=format, norm=True)
    return fused(problem, arch, arch.multiprocessors).norm


def fused(problem: LinearProblem, arch: Arch, multiprocessors: int) -> LinearProblem:
    """`problem` without what the kernel that is best for the product alone has not in it.

    Another kernel, for the sake of one launch less, would cost more than that launch: what a block of few rows gains,
    it loses in the product of many.

    Raises:
        KnobError: no kernel serves the product alone.
    """
    asked = [name for name in _EXTRAS if getattr(problem, name)]
    early = problem.m <= NORMED_ROWS or problem.activation != "none"
    wanted = [name for name in asked if name != "norm" or early]
    absent: dict[str, Any] = dict.fromkeys(asked, False)
    plain = replace(problem, **absent) if asked else problem
    if not wanted:
        return plain
    family = kernels.family("linear")
    kernel = choose.choose("linear", plain, arch, multiprocessors=multiprocessors).variant.spec.name
    most = family.kernel(kernel).max_rows
    if most is not None and problem.m > most:
        return plain
    best = plain
    for name in wanted:
        fields: dict[str, Any] = {name: getattr(problem, name)}
        more = replace(best, **fields)
        if kernel in family.serving(more, arch):
            best = more
    return best


def norm(hidden: int, dtype: str, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
    """RMSNorm in a launch of its own; none where torch makes it."""
    if norm_takes(hidden):
        yield chosen("norm", NormProblem(hidden, dtype), arch, multiprocessors)
