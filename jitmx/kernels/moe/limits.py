"""What kernels of `moe` refuse alike."""

from __future__ import annotations

from typing import Any

from jitmx.errors import KnobError
from jitmx.kernels.moe.problem import ACTIVATIONS, REDUCTIONS, WEIGHT_ON, X_FORMATS, MoeProblem

# What every kernel takes.
USUAL = {
    "activation": ACTIVATIONS, "x_format": X_FORMATS[:1], "weight_on": WEIGHT_ON[:1], "reduction": REDUCTIONS[:1],
}  # fmt: skip


def require_usual(kernel: str, problem: MoeProblem, *beyond: str) -> None:
    """Raise KnobError where the problem asks for something that a kernel lacks.

    Args:
        kernel: its name, for the message.
        beyond: fields of the problem that it takes with any value.
    """
    for name, usual in USUAL.items():
        value = getattr(problem, name)
        if name not in beyond and value not in usual:
            raise KnobError(f"moe.{kernel} does not take {name}={value!r}, only {' or '.join(usual)}")


def require_of_product(knobs: Any, name: str, product: str, usual: Any) -> None:
    """Raise KnobError where a knob that only one of the products reads is not as usual in the other."""
    value = getattr(knobs, name)
    if knobs.product != product and value != usual:
        raise KnobError(
            f"{name}={value!r} is of product={product!r}", f"with product={knobs.product!r} leave it at {usual!r}"
        )
