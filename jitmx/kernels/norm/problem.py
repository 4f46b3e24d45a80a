"""What one call of the kernels of `norm` asks for, and the blocks that take a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels import Problem
from jitmx.models import GPT_OSS_120B
from jitmx.registry.spec import knob

EPSILON = 1e-5
DTYPES = ("bf16", "fp16")
BLOCKS = (128, 256, 384, 512, 768, 1024)
VALUES_A_VECTOR = 8
MAX_HIDDEN = BLOCKS[-1] * 2 * VALUES_A_VECTOR
MAX_ROWS = (1 << 31) - 1
RESULTS = ("same", "e4m3")


@dataclass(frozen=True)
class NormProblem(Problem):
    """One call of `jitmx.rms_norm`, of any number of rows."""

    hidden: int = knob(GPT_OSS_120B.hidden, low=8, high=MAX_HIDDEN, doc="values of a row, a multiple of 8")
    dtype: str = knob("bf16", choices=DTYPES, doc="type of x and weight, and of y but for e4m3")
    y: str = knob(
        "same", choices=RESULTS, doc="the type of x, or E4M3 with a scale a row, as linear.wgmma_fp8 reads it"
    )
    norm: bool = knob(True, doc="of e4m3: RMSNorm comes first")
    concat: bool = knob(
        False, doc="rows of a table, normalised too, lie before those of x, as an Eagle3 draft reads them"
    )


def takes(hidden: int) -> bool:
    """Whether the kernel takes rows of so many values."""
    return 0 < hidden <= MAX_HIDDEN and hidden % VALUES_A_VECTOR == 0


def require_vectors(problem: NormProblem) -> None:
    """Raise KnobError where a row is no whole number of vectors."""
    if problem.hidden % VALUES_A_VECTOR:
        raise KnobError(
            f"hidden={problem.hidden} is not a multiple of {VALUES_A_VECTOR}, the values of a load",
            f"the nearest legal value is {max(8, round(problem.hidden / 8) * 8)}",
        )


def smallest_block(problem: NormProblem, arch: Arch) -> dict[str, Any]:
    """The smallest block with a vector a thread; of long rows with two, so that blocks run side by side."""
    wanted = -(-problem.hidden // VALUES_A_VECTOR)
    for vectors, most in ((1, 512), (2, BLOCKS[-1])):
        for block in BLOCKS:
            if block <= most and block * vectors >= wanted:
                return {"block": block, "vectors": vectors, "pdl": "pdl" in arch.features}
    raise KnobError(f"hidden={problem.hidden} is over {MAX_HIDDEN}")
