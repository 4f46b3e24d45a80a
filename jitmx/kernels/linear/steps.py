"""What a product does with X before it and with Y after it, as unfused steps where no kernel has it fused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jitmx.kernels import Companion, Decomposition
from jitmx.kernels.linear.arguments import X_FORMATS
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.kernels.quantize import QuantizeProblem

# What may run unfused: the field's value where it does, and what a step of its own costs beside the others.
ABSENT: dict[str, Any] = {"norm": False, "residual": False, "activation": "none", "swiglu": False}
_COST = {"residual": 1, "norm": 2, "activation": 4, "swiglu": 8}

STEPS = {
    "norm": "RMSNorm of X before the product, rounded to its dtype",
    "activation": "X is quantized before the product, and read as what its codes stand for",
    "residual": "added to the product, which was rounded",
    "swiglu": "the product is written, and its gates and ups are read",
    "argmax": "the product is written, some rows at a time, and compared",
}

# Values of the product that exist at a time where it has to be written to be compared.
VALUES_AT_ONCE = 1 << 26


def rows_at_once(n: int) -> int:
    """Rows of a product with n output features that are written, and compared, at a time."""
    return max(1, VALUES_AT_ONCE // n)


def decompositions(problem: LinearProblem) -> Iterator[Decomposition]:
    """How a call may be made: with as few unfused steps as can be, and at last with all of them."""
    if not problem.argmax:
        yield from _of_product(problem)
        return
    yield Decomposition(problem)
    if problem.residual or problem.activation != "none":  # no operator compares these
        return
    if problem.norm:
        yield Decomposition(replace(problem, norm=False), ("norm",))
    passes, rest = divmod(problem.m, rows_at_once(problem.n))
    product = replace(problem, argmax=False)
    last = replace(product, m=rest) if passes and rest else None
    for one in _of_product(replace(product, m=rows_at_once(problem.n)) if passes else product):
        yield replace(one, unfused=("argmax", *one.unfused), passes=max(passes, 1), rest=last)


def _of_product(problem: LinearProblem) -> Iterator[Decomposition]:
    wanted = [name for name, absent in ABSENT.items() if getattr(problem, name) != absent]
    subsets = itertools.chain.from_iterable(itertools.combinations(wanted, size) for size in range(len(wanted) + 1))
    for names in sorted(subsets, key=lambda names: sum(_COST[name] for name in names)):
        # RMSNorm comes before the quantization: it cannot stay where that goes.
        if "activation" in names and "norm" in wanted and "norm" not in names:
            continue
        before = _rounding(problem) if "activation" in names else ()
        yield Decomposition(replace(problem, **{name: ABSENT[name] for name in names}), names, before=before)


def _rounding(problem: LinearProblem) -> tuple[Companion, ...]:
    """X to codes and back."""
    format = X_FORMATS[problem.activation]
    rule = "ceil" if problem.activation == "fp8" else "floor"
    there, back = (QuantizeProblem(to, format, problem.dtype, scale_rule=rule) for to in ("quantize", "dequantize"))
    return Companion("quantize", there, {}, {}), Companion("quantize", back, {}, {})
