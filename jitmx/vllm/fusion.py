"""Which of RMSNorm and residual go into the launch of a product, by how many rows it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitmx import kernels
from jitmx.arch import Arch
from jitmx.dispatch import choose
from jitmx.kernels.linear import LinearProblem
from jitmx.kernels.linear.layout import preferred_encoding

EXTRAS = ("norm", "residual")
# Rows up to which a product with its norm is quicker than a launch of the norm's own and the product alone: measured
# on an H200, where one row gains 7 us a block, two lose what they gain, and four lose 6.
NORMED_ROWS = 1


def gains(arch: Arch, hidden: int, n: int, format: str) -> bool:
    """Whether the kernel for one row of QKV has RMSNorm in it, without which fusing norms gains nothing.

    Args:
        hidden, n: input and output features of QKV.
        format: of its weight.
    """
    problem = LinearProblem(1, n, hidden, bias=True, encoding=preferred_encoding(arch), weight=format, norm=True)
    return fused(problem, arch, arch.multiprocessors).norm


def fused(problem: LinearProblem, arch: Arch, multiprocessors: int) -> LinearProblem:
    """`problem` without what the kernel that is best for the product alone has not in it.

    Another kernel, for the sake of one launch less, would cost more than that launch: what a block of few rows gains,
    it loses in the product of many.

    Raises:
        KnobError: no kernel serves the product alone.
    """
    wanted = [name for name in EXTRAS if getattr(problem, name)]
    if problem.m > NORMED_ROWS:
        wanted = [name for name in wanted if name != "norm"]
    plain = replace(problem, norm=False, residual=False) if problem.norm or problem.residual else problem
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
