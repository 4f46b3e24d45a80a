"""`norm.rows`: rows in E4M3 with a scale each, as `linear.wgmma_fp8` reads them, behind an RMSNorm or of x itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jitmx.errors import KnobError
from jitmx.kernels import fp8_rows
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.norm.problem import BLOCKS, EPSILON, VALUES_A_VECTOR, NormProblem, require_vectors, smallest_block
from jitmx.kernels.norm.rms import check_capacity, reference
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case, deviation, judged, mismatches, relative_l2
from jitmx.registry.contract import Contract
from jitmx.registry.launch import Launch
from jitmx.registry.spec import PDL, KernelSpec, Knobs, Variant, knob

RESIDENT = {1: 1152, 2: 1024}  # threads of a multiprocessor by vectors of each

ARGUMENTS = Arguments(
    "RowsArguments",
    reads("x", "[rows, hidden]", "Vec4"),
    reads("weight", "[hidden], of the norm", "Vec4"),
    writes("y", "lines of E4M3: [steps of 128 values, rows, 128]"),
    writes("scales", "[rows]: what the rows were divided by", "float"),
    number("rows", "unsigned int"),
    number("vectors", "unsigned int", f"of {VALUES_A_VECTOR} values, of a row"),
    number("inverse", "float", "1 / hidden"),
    number("epsilon", "float"),
)


@dataclass(frozen=True)
class RowsKnobs(Knobs):
    """Compile-time choices of `norm.rows`."""

    norm: bool = knob(True, doc="RMSNorm of a row comes first")
    block: int = knob(384, choices=BLOCKS, doc="threads a block")
    vectors: int = knob(1, choices=(1, 2), doc="vectors of 8 values of a row a thread, at most")
    pdl: bool = PDL

    @property
    def capacity(self) -> int:
        """Values of a row, at most: whole lines."""
        return self.block * self.vectors * VALUES_A_VECTOR

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return RESIDENT[self.vectors] // self.block


SPEC = KernelSpec(
    family="norm",
    name="rows",
    knobs=RowsKnobs,
    contract=lambda knobs, arch: Contract(
        max_registers=65536 // (knobs.resident * knobs.block) // 8 * 8,
        require=(r"\bLDG\.E\..*128", r"\bF2FP\.SATFINITE\.E4M3\.F32\.PACK_AB"),
    ),
    threads=lambda knobs: knobs.block,
    arguments=lambda knobs: ARGUMENTS,
)
_FP32 = 2.0**-19  # relative, of sums of squares in any order and of an approximate square root
ROUNDED_GATE = 0.006  # relative L2 against the same values rounded alike


def fields(rows: int, hidden: int) -> dict[str, int | float]:
    """Of the arguments, for so many rows."""
    return {"rows": rows, "vectors": hidden // VALUES_A_VECTOR, "inverse": 1 / hidden}


def _cases(variant: Variant) -> Iterator[Case]:
    """One block of 32; a line; full rows, of which a block has three; ragged ones of every kind; results on the edges
    of a scale and beyond all; the last of many."""
    knobs, generator = variant.knobs, np.random.default_rng(0)
    full = knobs.capacity
    ragged = full - (knobs.block * VALUES_A_VECTOR // 2 + 32)
    some = (1, 32, 1, EPSILON), (13, full, 5, 0.25), (21, ragged, 21, EPSILON), (2, fp8_rows.LINE_K, 1, EPSILON)
    for rows, hidden, blocks, epsilon in some:
        yield _case(knobs, _rows(rows, hidden, epsilon, generator), epsilon, blocks, generator)
    if knobs.norm:
        yield _case(knobs, _edge_rows(), 0.0, 2, generator, edge=True)
    case = _case(knobs, _rows(2, 256, EPSILON, generator), EPSILON, 1, generator)
    last = (1 << 27) + 1  # in the same place among eight; its vectors are over 2^32, and its second line 2^34 bytes
    values: dict[str, Any] = dict(case.values)
    both = np.array([0, last])
    lines = (np.arange(2)[:, None] * (last + 1) + both).ravel() * fp8_rows.LINE_BYTES
    values |= {
        "rows": last + 1,
        "x": values["x"].spread(both * 512, (last + 1) * 512),
        "y": values["y"].spread(lines, 2 * (last + 1) * fp8_rows.LINE_BYTES),
        "scales": values["scales"].spread(both * 4, (last + 1) * 4),
    }
    for blocks in (last, last + 1):  # a block's second row, and a block's own
        yield dataclasses.replace(
            case,
            name=f"far: row {last} of {blocks} blocks",
            launch=Launch(blocks),
            values=values,
            blocks=range(0, blocks, last),
        )


def _rows(rows: int, hidden: int, epsilon: float, generator: np.random.Generator) -> Array:
    """Rows of magnitudes far apart; of many, some on the edges of their scale and some that are no numbers."""
    wide: Any = generator.standard_normal((rows, hidden)) * np.exp2(generator.integers(-9, 9, (rows, 1)))
    x: Array = wide.astype(ml_dtypes.bfloat16)
    if rows > 12:  # largest magnitudes at 1.75 times a power of two and above it, 0, a NaN, an infinity, a subnormal
        x[:4] *= 0.25 / np.abs(x[:4].astype(np.float32)).max(axis=1, keepdims=True).astype(ml_dtypes.bfloat16)
        x[0, -1], x[1, 0], x[2, 1], x[3], x[4, -1], x[5, 0], x[6] = 1.75, 1.7578125, -1.5, 0, np.nan, -np.inf, 2.0**-130
        x[7] *= np.sqrt(epsilon) / 2.0**8
        x[8] = generator.uniform(0.9, 0.99, hidden) * np.where(generator.random(hidden) < 0.5, -1, 1) * 2.0**128
        # Of every warp's, one is far above all others.
        for row, place in enumerate(np.linspace(0, hidden - 1, rows - 9).astype(int), 9):
            x[row, place] = -32 * np.abs(x[row].astype(np.float32)).max()
    return x


_EDGES = 7, 9, 11  # features whose weights are 1.75, the next value above it, and the largest that there is


def _edge_rows() -> Array:
    """Rows whose mean square is one, so that results are weights, or twice them where there are few: one of an edge.

    Those of the last two are a little above and below 1.75 times a power of two, by less than bf16 tells apart.
    """
    x = np.zeros((7, 256))
    x[:, 4::4] = 2
    x[[0, 1, 3, 4, 5, 6], [*_EDGES, _EDGES[2], _EDGES[0], _EDGES[0]]] = 2, -2, 2, -2, 2, -2
    x[2], x[5, 4], x[6, 4] = 1, 1.8671875, 2.125
    return np.asarray(x.astype(ml_dtypes.bfloat16))


def _case(
    knobs: RowsKnobs, x: Array, epsilon: float, blocks: int, generator: np.random.Generator, edge: bool = False
) -> Case:
    rows, hidden = x.shape
    weight = generator.uniform(0.5, 1.5, (hidden,)).astype(ml_dtypes.bfloat16)
    weight[1::3] *= ml_dtypes.bfloat16(-1)
    if edge:
        weight[list(_EDGES)] = 1.75, 1.7578125, ml_dtypes.finfo(weight.dtype).max
    wanted = reference(x, weight, epsilon) if knobs.norm else x.astype(np.float64)
    wanted = np.where(np.abs(wanted) > float(np.finfo(np.float32).max), np.copysign(np.inf, wanted), wanted)
    with np.errstate(invalid="ignore"):
        codes, scales = fp8_rows.quantize_rows(wanted)
        fraction = np.frexp(np.abs(wanted).max(axis=1))[0]
    lines = fp8_rows.arrange(codes, np.array([0, rows], np.int32))

    def check(outputs: Any) -> float:
        found, found_scales = outputs
        if (np.isnan(found_scales) != np.isnan(scales)).any():
            return float("inf")
        if not knobs.norm:
            finite = ~np.isnan(scales)
            return mismatches(found, lines) + mismatches(found_scales[finite], scales[finite])
        finite = ~np.isnan(scales)
        there: Array = fp8_rows.decode(fp8_rows.restore(found, np.array([0, rows], np.int32), hidden))[finite]
        if np.abs(np.log2(found_scales[finite] / scales[finite])).max(initial=0.0) > 1.0:
            return float("inf")
        # Where fp32 rounds to the other side of an edge of the scale, codes are of the next one.
        own = wanted[finite] / found_scales[finite, None]
        right: Array = own.astype(ml_dtypes.float8_e4m3fn)
        stored = there.astype(ml_dtypes.float8_e4m3fn)
        error = relative_l2(there, right.astype(np.float64)) + mismatches(found_scales[finite], scales[finite])
        return judged(error, deviation(stored, own, np.abs(own) * _FP32, 0.5), ROUNDED_GATE)

    with np.errstate(invalid="ignore"):
        squares = np.sum(x.astype(np.float64) ** 2, axis=-1)
    own_sides = (
        {
            "epsilon not the usual": epsilon != EPSILON,
            "mean square far below epsilon": bool((squares / hidden < 1e-4 * epsilon).any()),
            "squares beyond fp32": bool((squares > float(np.finfo(np.float32).max)).any()),
            "result beyond fp32": bool(np.isinf(wanted[np.isfinite(x.astype(np.float64)).all(axis=1)]).any()),
            "result that is the largest of bf16": bool((wanted == float(ml_dtypes.finfo(x.dtype).max)).any()),
        }
        if knobs.norm
        else {
            "scale at its least": bool((scales == 2.0**-126).any()),
        }
    )
    return Case(
        name=f"{rows} x {hidden} grid={blocks}",
        launch=Launch(blocks),
        values={
            "x": Buffer(x),
            **({"weight": Buffer(weight, constant=True)} if knobs.norm else {}),
            "y": Buffer(np.empty(lines.shape, np.uint8), output=True),
            "scales": Buffer(np.empty(rows, np.float32), output=True),
            "epsilon": epsilon,
            **fields(rows, hidden),
        },
        check=check,
        gate=ROUNDED_GATE if knobs.norm else 0.0,
        sides={
            "row that is not finite": bool(np.isnan(scales).any()),
            "row of zeros": bool((wanted == 0).all(axis=1).any()),
            "magnitude of more than 1.75 times a power of two": bool((fraction > 0.875).any()),
            "magnitude of 1.75 times a power of two": bool((fraction == 0.875).any()),
            "magnitude of less": bool((fraction < 0.875).any()),
            "half a line": hidden % fp8_rows.LINE_K != 0,
            **own_sides,
        },
    )


def _fixed(problem: NormProblem) -> dict[str, Any]:
    if problem.y != "e4m3" or problem.dtype != "bf16" or problem.concat:
        raise KnobError(
            f"norm.rows makes E4M3 of bf16, and not y={problem.y!r} of dtype={problem.dtype!r}, "
            f"concat={problem.concat}",
            "use norm.rms or norm.concat",
        )
    require_vectors(problem)
    return {"norm": problem.norm}


KERNEL = Kernel(
    SPEC,
    _cases,
    fixed=_fixed,
    heuristic=lambda problem, arch, multiprocessors: smallest_block(problem, arch),
    check=check_capacity,
    runs_on=lambda arch: "wgmma" in arch.features,
    rarer=(
        {"block": 128, "vectors": 2, "pdl": False},
        {"norm": False, "block": 128, "vectors": 2},
        {"block": 1024, "vectors": 2},
    ),
)
