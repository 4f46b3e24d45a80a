"""`norm.concat`: RMSNorm of rows of a table and of rows of x, side by side, as the first layer of an Eagle3 draft reads
them: what comes of a token's embedding, and of the states of the model before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from jitmx.errors import KnobError
from jitmx.kernels.kernel import Kernel
from jitmx.kernels.norm.problem import EPSILON, VALUES_A_VECTOR, NormProblem, require_vectors, smallest_block
from jitmx.kernels.norm.rms import (
    STORED,
    RmsKnobs,
    check_capacity,
    contract,
    large_rows,
    large_weight,
    reference,
    row_error,
)  # fmt: skip
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Array, Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant

ARGUMENTS = Arguments(
    "ConcatArguments",
    reads("ids", "[rows], rows of the table; int or long long. Of one that is not there the half is zeros"),
    reads("table", "[rows_of_table, hidden]", "Vec4"),
    reads("x", "[rows, hidden]", "Vec4"),
    reads("table_weight", "[hidden], of the table's norm", "Vec4"),
    reads("weight", "[hidden], of that of x", "Vec4"),
    writes("y", "[rows, 2, hidden]", "Vec4"),
    writes("normed", "[rows, hidden]: the second halves once more; or 0", "Vec4"),
    number("stride", "unsigned long long", "vectors from a row of x to the next"),
    number("rows_of_table", "long long"),
    number("vectors", "unsigned int", f"of {VALUES_A_VECTOR} values, of a row"),
    number("wide", "unsigned int", "1: ids are of 64 bits"),
    number("inverse", "float", "1 / hidden"),
    number("epsilon", "float"),
)

CONCAT = KernelSpec(
    family="norm",
    name="concat",
    knobs=RmsKnobs,
    contract=contract,
    threads=lambda knobs: knobs.block,
    arguments=lambda knobs: ARGUMENTS,
)


def launch(rows: int) -> Launch:
    """Two blocks a row."""
    return Launch(2 * rows)


def fields(hidden: int, stride: int, rows_of_table: int, wide: bool) -> dict[str, int | float]:
    """Fields of the arguments for rows of x that lie `stride` values apart."""
    return {
        "stride": stride // VALUES_A_VECTOR, "rows_of_table": rows_of_table, "vectors": hidden // VALUES_A_VECTOR,
        "wide": int(wide), "inverse": 1 / hidden,
    }  # fmt: skip


def _cases(variant: Variant) -> Iterator[Case]:
    """One vector; full and ragged rows, of ids that are there and of such as are not; far ones."""
    knobs, generator = variant.knobs, np.random.default_rng(0)
    full = knobs.capacity
    ragged = full - (knobs.block * VALUES_A_VECTOR // 2 + 24)
    yield _case(knobs, [1], 3, 8, generator)
    yield _case(knobs, [4, 0, 4, -1, 5, 1 << 31], 5, full, generator, wide=True, normed=True, epsilon=0.25)
    yield _case(knobs, [2, -(1 << 31), 6, 0], 7, ragged, generator, normed=True, pad=16)
    yield _case(knobs, [1 << 32, 1], 2, 40, generator, wide=True, epsilon=0.0)
    for epsilon in (EPSILON, 0.0):
        yield _case(knobs, [*range(7), 7], 7, ragged, generator, normed=True, epsilon=epsilon, every=True)
    yield _case(knobs, [0, 1, 2], 3, 40, generator, normed=True, epsilon=0.0, beyond=True)
    yield from _far(knobs, generator)


def _far(knobs: RmsKnobs, generator: np.random.Generator) -> Iterator[Case]:
    """The last row of very many and of a very large table; rows of x that lie far apart."""
    hidden = 40
    row = hidden * 2
    last = (1 << 36) // row + 1  # of the table: over 2^32 vectors
    # Of y, and where that is too much for a card, of what is kept.
    for before, kept in (((1 << 36) // (row * 2) + 1, False), ((1 << 36) // row + 1, True)):
        case = _case(knobs, [1], 2, hidden, generator, wide=True, normed=kept)
        values: dict[str, Any] = dict(case.values)
        halves: Array = values["y"].data.reshape(2, hidden)
        rows = before + 1
        values |= fields(hidden, hidden, last + 1, wide=True)
        values |= {
            "ids": Buffer(np.array([last])).spread([before * 8], rows * 8),
            "table": Buffer(values["table"].data[1:], constant=True).spread([last * row], (last + 1) * row),
            "x": values["x"].spread([before * row], rows * row),
            "y": Buffer(halves, output=True).spread([2 * before * row, (2 * before + 1) * row], rows * 2 * row),
        }
        if kept:
            values["normed"] = values["normed"].spread([before * row], rows * row)
        blocks = 2 * before, 2 * before + 1
        yield dataclasses.replace(
            case, name=f"far: row {before} of y", launch=launch(rows), values=values, blocks=blocks
        )
    case = _case(knobs, [1, 0], 2, hidden, generator)
    stride = (1 << 32) + 8  # vectors
    at = np.arange(2) * stride * 16
    values = dict(case.values)
    values |= {"stride": stride, "x": values["x"].spread(at, int(at[-1]) + row)}
    yield dataclasses.replace(case, name=f"far: rows of x {stride} vectors apart", values=values)


def _case(
    knobs: RmsKnobs, ids: Sequence[int], rows_of_table: int, hidden: int, generator: np.random.Generator, *,
    wide: bool = False, normed: bool = False, epsilon: float = EPSILON, pad: int = 0, every: bool = False,
    beyond: bool = False,
) -> Case:  # fmt: skip
    """Rows of the table with these ids beside as many of x, `pad` values apart, which are NaN.

    Args:
        every: whether both have rows of zeros, of tiny and of huge values, and such with what is no number or infinite.
        beyond: whether results of both are up to the largest that there is, and beyond it.
    """
    stored, rows = STORED[knobs.dtype], len(ids)
    table, x = (
        (generator.standard_normal((count, hidden)) * np.exp2(generator.integers(-6, 6, (count, 1)))).astype(stored)
        for count in (rows_of_table, rows)
    )
    if every:
        # Beside an epsilon of 0 squares must not vanish.
        small, large = (2.0 ** (-100 if epsilon else -40), 2.0**100) if knobs.dtype == "bf16" else (2.0**-20, 2.0**12)
        for odd, part in enumerate((table, x)):
            part[1] = np.where(generator.random(hidden) < 0.5, 0.0, -0.0)
            part[2], part[3] = generator.standard_normal((2, hidden)) * np.array([[small], [large]])
            part[4, 6 + odd], part[5, hidden // 2 - odd] = np.nan, -np.inf
            part[6] = generator.standard_normal(hidden) * 2.0**-10  # whose mean square is about epsilon
    weights = [generator.uniform(-1.5, 1.5, hidden).astype(stored) for _ in range(2)]
    if beyond:
        table, x = (large_rows(stored, hidden) for _ in range(2))
        for weight in weights:
            large_weight(weight)
    there = np.array([0 <= one < rows_of_table for one in ids])
    looked_up = table[np.where(there, ids, 0)]
    wanted = np.stack([reference(looked_up, weights[0], epsilon), reference(x, weights[1], epsilon)], 1)
    wanted[~there, 0] = 0.0 * weights[0].astype(np.float64)
    with np.errstate(over="ignore"):
        y = wanted.astype(stored)
    stride = hidden + pad
    apart = np.full((rows - 1) * stride + hidden, np.nan, stored)
    for place, row in enumerate(x):
        apart[place * stride :][:hidden] = row
    values: dict[str, Any] = {
        "ids": Buffer(np.array(ids, np.int64 if wide else np.int32)),
        "table": Buffer(table, constant=True),
        "x": Buffer(apart if pad else x),
        "table_weight": Buffer(weights[0], constant=True),
        "weight": Buffer(weights[1], constant=True),
        "y": Buffer(y, output=True),
        "epsilon": epsilon,
        **fields(hidden, stride, rows_of_table, wide),
    }
    if normed:
        values["normed"] = Buffer(y[:, 1], output=True)
    return Case(
        name=f"{rows} x {hidden}",
        launch=launch(rows),
        values=values,
        check=partial(_error, wanted=wanted, normed=normed),
        gate=0.004,
        sides={
            "row of zeros": bool((wanted[:, 1] == 0).all(-1).any()),
            "row of zeros, epsilon 0": epsilon == 0 and bool((x == 0).all(-1).any()),
            "tiny": bool((np.abs(x.astype(np.float64)).max(-1) < 1e-4).any()),
            "NaN": bool(np.isnan(x).any()),
            "infinity": bool(np.isinf(x).any()),
            "results beyond the largest": bool((np.abs(wanted) > 1.01 * float(ml_dtypes.finfo(stored).max)).any()),
            "no such row": not there.all(),
            "the last row": rows_of_table - 1 in ids,
            "ids over 32 bits": wide,
        },
    )


def _error(found: Sequence[Array], wanted: Array, normed: bool) -> float:
    y = found[0].reshape(wanted.shape)
    error = row_error(y.reshape(-1, wanted.shape[-1]), wanted.reshape(-1, wanted.shape[-1]))
    if normed and found[1].tobytes() != np.ascontiguousarray(y[:, 1]).tobytes():
        return float("inf")
    return error


def _fixed(problem: NormProblem) -> dict[str, Any]:
    if not problem.concat or problem.y != "same" or not problem.norm:
        raise KnobError("norm.concat has rows of a table beside those of x", "norm.rms normalises rows alone")
    require_vectors(problem)
    return {"dtype": problem.dtype}


KERNEL = Kernel(
    CONCAT,
    _cases,
    fixed=_fixed,
    heuristic=lambda problem, arch, multiprocessors: smallest_block(problem, arch),
    check=check_capacity,
    rarer=({"dtype": "fp16", "block": 128, "vectors": 2}, {"block": 128, "pdl": False}),
)
