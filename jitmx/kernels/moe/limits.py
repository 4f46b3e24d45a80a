"""What kernels of `moe` refuse alike."""

from __future__ import annotations

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
