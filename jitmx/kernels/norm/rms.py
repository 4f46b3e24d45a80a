"""`norm.rms`: RMSNorm of rows, for whoever has it in no launch of its own: in fp32, rounded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.norm.problem import (
    BLOCKS,
    DTYPES,
    EPSILON,
    VALUES_A_VECTOR,
    NormProblem,
    require_vectors,
    smallest_block,
)  # fmt: skip
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case, deviation, judged, relative_l2
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

Array = npt.NDArray[Any]

# Threads of a multiprocessor by vectors of each: all that it takes on sm_12x, and of two vectors what registers allow.
RESIDENT = {1: 1536, 2: 1024}

ARGUMENTS = Arguments(
    "NormArguments",
    reads("x", "[rows, hidden]", "Vec4"),
    reads("weight", "[hidden]", "Vec4"),
    writes("y", "[rows, hidden]", "Vec4"),
    number("stride", "unsigned long long", "vectors from a row of x to the next"),
    number("rows", "unsigned int"),
    number("vectors", "unsigned int", f"of {VALUES_A_VECTOR} values, of a row"),
    number("inverse", "float", "1 / hidden"),
    number("epsilon", "float"),
)


@dataclass(frozen=True)
class RmsKnobs(Knobs):
    """Compile-time choices of `norm.rms`."""

    dtype: str = knob("bf16", choices=DTYPES, doc="type of x, weight and y")
    block: int = knob(384, choices=BLOCKS, doc="threads a block")
    vectors: int = knob(1, choices=(1, 2), doc="vectors of 8 values of a row a thread, at most")
    pdl: bool = PDL

    @property
    def capacity(self) -> int:
        """Values of a row, at most."""
        return self.block * self.vectors * VALUES_A_VECTOR

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return RESIDENT[self.vectors] // self.block


def contract(knobs: Any, _arch: Arch) -> Contract:
    """What holds of the machine code of a block that takes rows."""
    return Contract(
        max_registers=65536 // (knobs.resident * knobs.block) // 8 * 8,
        require=(r"\bLDG\.E\..*128", r"\bSTG\.E\..*128"),
    )


RMS = KernelSpec(
    family="norm",
    name="rms",
    knobs=RmsKnobs,
    contract=contract,
    threads=lambda knobs: knobs.block,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(knobs: Any, rows: int, multiprocessors: int) -> Launch:
    """A block a row, as far as blocks run side by side; else each takes as many rows as the others, or one less."""
    at_once = multiprocessors * knobs.resident
    return Launch(-(-rows // -(-rows // at_once)))


def of_rows(rows: int, hidden: int, stride: int) -> dict[str, int | float]:
    """Fields of the arguments for so many rows, `stride` values apart."""
    return {
        "stride": stride // VALUES_A_VECTOR, "rows": rows, "vectors": hidden // VALUES_A_VECTOR, "inverse": 1 / hidden
    }  # fmt: skip


def reference(x: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm of x [rows, hidden] in float64; squares that add up to more than fp32 holds are infinite."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        squares = np.sum(wide * wide, axis=-1, keepdims=True)
        squares = np.where(squares > float(np.finfo(np.float32).max), np.inf, squares)
        scale = 1 / np.sqrt(squares / x.shape[-1] + epsilon)
        return np.asarray(wide * weight.astype(np.float64) * scale)


STORED: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_GATE = 0.004  # relative L2: what rounding to bf16 makes is half of it
_FP32 = 2.0**-19  # relative, of sums of squares in any order and of an approximate square root
_PAD = 16  # values between rows that are no row's: NaN, so that whoever reads them shows


def _cases(variant: Variant) -> Iterator[Case]:
    """One vector; full rows, of which a block has three; ragged ones with gaps and values of every kind; far ones."""
    knobs, generator = variant.knobs, np.random.default_rng(0)
    full = knobs.capacity
    ragged = full - (knobs.block * VALUES_A_VECTOR // 2 + 24)
    for rows, hidden, blocks, epsilon in ((1, 8, 1, EPSILON), (5, full, 2, 0.25)):
        x = _about(epsilon, _normal(knobs, generator, rows, hidden))
        yield _case(knobs, f"{rows} x {hidden}", x, epsilon, blocks, generator)
    x = _about(EPSILON, _normal(knobs, generator, 10, ragged))
    x[:, 0] = -0.0
    x[1] = np.where(generator.random(ragged) < 0.5, 0.0, -0.0)
    x[2] *= x.dtype.type(2.0**-100 if knobs.dtype == "bf16" else 2.0**-20)
    x[3, -1], x[9, 6], x[4, 5], x[5, ragged // 2] = np.nan, np.nan, np.inf, -np.inf
    if knobs.dtype == "bf16":
        x[6], x[7] = _normal(knobs, generator, 2, ragged) * np.array([[2.0**50], [2.0**100]], x.dtype)
        x[8] = np.where(generator.random(ragged) < 0.5, 3.3e38, -3.3e38)  # times its weight beyond fp32, and yet 0
    else:
        x[6], x[7] = 65504.0, -60000.0
    yield _case(knobs, f"10 x {ragged}, of every kind", x, EPSILON, 4, generator, ragged + _PAD)
    x = _normal(knobs, generator, 2, 40)
    x[1] = 0
    yield _case(knobs, "2 x 40, epsilon 0", x, 0.0, 2, generator)
    yield _case(knobs, "3 x 40, up to the largest and beyond it", large_rows(x.dtype), 0.0, 2, generator, large=True)
    yield from _far(knobs, generator)


def _far(knobs: RmsKnobs, generator: np.random.Generator) -> Iterator[Case]:
    """The last row of very many, whose vector in y is over 2^32; and rows of x that lie as far apart."""
    x = _normal(knobs, generator, 1, knobs.capacity)
    case = _case(knobs, "the last", x, EPSILON, 1, generator)
    row = x.nbytes
    before = (1 << 36) // row + 1
    values: dict[str, Any] = dict(case.values)
    values |= {"rows": before + 1, "stride": 0, "y": values["y"].spread([before * row], (before + 1) * row)}
    yield dataclasses.replace(
        case, name=f"far: row {before} of y", launch=Launch(before + 1), values=values, blocks=(before,)
    )
    x = _normal(knobs, generator, 3, 40)
    stride = (1 << 31) + 8  # vectors: those of the last row, a block's first or its second, are over 2^32
    at = np.arange(3) * stride * 16
    for blocks in (3, 2):
        case = _case(knobs, f"far: rows of x {stride} vectors apart, {blocks} blocks", x, EPSILON, blocks, generator)
        values = dict(case.values)
        values |= {"stride": stride, "x": values["x"].spread(at, int(at[-1]) + x[0].nbytes)}
        yield dataclasses.replace(case, values=values)


def large_rows(dtype: Any, hidden: int = 40) -> Array:
    """Rows whose results behind `large_weight` are the largest finite value of either sign, and beyond it."""
    x = np.ones((3, hidden))
    x[1:, 5] = 2, -2
    x[:, 6] *= -1
    return x.astype(dtype)


def large_weight(weight: Array) -> None:
    """Put the largest finite value where `large_rows` have 1 and 2."""
    weight[5:7] = ml_dtypes.finfo(weight.dtype).max


def _about(epsilon: float, x: Array) -> Array:
    """Rows whose mean square is about one, about `epsilon`, far below it and far above, in turn."""
    factors = np.array([1.0, np.sqrt(epsilon), 2.0**-20, 2.0**8 if x.dtype == np.float16 else 2.0**20])
    return np.asarray(x * np.resize(factors, (len(x), 1)), x.dtype)


def _normal(knobs: RmsKnobs, generator: np.random.Generator, rows: int, hidden: int) -> Array:
    return generator.standard_normal((rows, hidden)).astype(STORED[knobs.dtype])


def _case(
    knobs: RmsKnobs, name: str, x: Array, epsilon: float, blocks: int, generator: np.random.Generator, stride: int = 0,
    large: bool = False,
) -> Case:  # fmt: skip
    rows, hidden = x.shape
    weight = generator.uniform(0.5, 1.5, (hidden,)).astype(x.dtype)
    weight[1::3] *= x.dtype.type(-1)
    if large:
        large_weight(weight)
    wanted = reference(x, weight, epsilon)
    with np.errstate(over="ignore"):
        stored = wanted.astype(x.dtype)
    stride = stride or hidden
    there = np.full((rows - 1) * stride + hidden, np.nan, x.dtype)
    for number_, values in enumerate(x):
        there[number_ * stride :][:hidden] = values
    return Case(
        name=name,
        launch=Launch(blocks),
        values={
            "x": Buffer(x if stride == hidden else there),
            "weight": Buffer(weight, constant=True),
            "y": Buffer(stored, output=True),
            "epsilon": epsilon,
            **of_rows(rows, hidden, stride),
        },
        check=partial(_error, wanted=wanted),
        gate=_GATE,
        sides=_sides(x, wanted, epsilon),
    )


def _error(found: Sequence[Array], wanted: Array) -> float:
    (y,) = found
    return row_error(y, wanted)


def row_error(y: Array, wanted: Array) -> float:
    """Relative L2 of rows within the type's range; infinite where a zero or an infinity has another sign."""
    numbers = ~np.isnan(wanted)
    if (np.signbit(y) != np.signbit(wanted))[numbers].any():
        return float("inf")
    with np.errstate(over="ignore"):
        beyond = np.isinf(wanted.astype(y.dtype))
    error = relative_l2(np.where(beyond, 0, y), np.where(beyond, 0, wanted))
    return judged(error, deviation(y, wanted, np.abs(wanted) * _FP32, 0.5), _GATE)


def _sides(x: Array, wanted: Array, epsilon: float) -> dict[str, bool]:
    """Edges: those of epsilon, rows of zeros, and what is no number or too large for sums of squares in fp32."""
    wide = x.astype(np.float64)
    zeros, finite = (wide == 0).all(-1), np.isfinite(wide).all(-1)
    with np.errstate(invalid="ignore"):
        squares = np.sum(wide**2, axis=-1)
    beyond = finite & (squares > float(np.finfo(np.float32).max))
    share = squares[finite] / x.shape[-1] / epsilon if epsilon else np.zeros(0)
    own = {"largest": bool((wide == 65504).any())} if x.dtype == np.float16 else {"squares beyond fp32": beyond.any()}
    return {
        "epsilon not the usual": epsilon not in (0, EPSILON),
        "mean square about epsilon": bool(((share > 0.2) & (share < 5)).any()),
        "mean square far below epsilon": bool(((share > 0) & (share < 1e-4)).any()),
        "mean square far above epsilon": bool((share > 1e4).any()),
        "row of zeros": bool(zeros.any()),
        "row of zeros, epsilon 0": bool(zeros.any()) and epsilon == 0,
        "NaN": bool(np.isnan(wide).any()),
        "infinity": bool(np.isinf(wide).any()),
        "result that is the largest": bool((np.abs(wanted) == float(ml_dtypes.finfo(x.dtype).max)).any()),
        "result beyond the largest": bool((np.abs(wanted) > 1.01 * float(ml_dtypes.finfo(x.dtype).max)).any()),
        "-0": bool(((wanted == 0) & np.signbit(wanted)).any()),
        **{side: bool(there) for side, there in own.items()},
    }


def _fixed(problem: NormProblem) -> dict[str, Any]:
    if problem.y != "same" or not problem.norm or problem.concat:
        raise KnobError(
            "norm.rms normalises rows and keeps their type",
            "norm.rows makes rows of E4M3, norm.concat puts rows of a table beside them",
        )
    require_vectors(problem)
    return {"dtype": problem.dtype}


def check_capacity(problem: NormProblem, variant: Variant) -> None:
    """Raise KnobError where a block does not hold a row."""
    if problem.hidden > variant.knobs.capacity:
        raise KnobError(
            f"{variant.name} takes rows of {variant.knobs.capacity} values, and hidden is {problem.hidden}",
            "choose a larger block, or vectors=2",
        )


KERNEL = Kernel(
    RMS,
    _cases,
    fixed=_fixed,
    heuristic=lambda problem, arch, multiprocessors: smallest_block(problem, arch),
    check=check_capacity,
    rarer=(
        {"dtype": "fp16", "block": 128, "vectors": 2},
        {"dtype": "fp16", "block": 128, "pdl": False},
        {"block": 1024, "vectors": 2},
    ),
)
