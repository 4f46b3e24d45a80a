"""What kernels that make a layer of few rows in one launch have in common: `moe.decode`, `moe.stream`, `moe.token`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import KnobError
from jitmx.kernels.moe.limits import require_usual
from jitmx.kernels.moe.problem import MAX_ROWS, MAX_TOP, MoeProblem
from jitmx.registry.contract import Contract
from jitmx.registry.spec import Variant, fitting

ENTRIES = MAX_ROWS * MAX_TOP  # pairs of a row and an expert
COUNTER_BYTES = 4096  # of the workspace, before the activations
RESIDENT_THREADS = 4096  # of the blocks that the simulator runs side by side


def fixed(kernel: str, most: Callable[[MoeProblem], int], problem: MoeProblem) -> dict[str, Any]:
    """Knobs that weights and tensors bring with them.

    Args:
        most: rows that the kernel takes at most, of such a problem.

    Raises:
        KnobError: the problem is one of the products of a layer, or has more rows.
    """
    require_usual(kernel, problem)
    if problem.product != "layer":
        raise KnobError(f"moe.{kernel} makes whole layers, not product={problem.product}", "use product='layer'")
    if problem.m > most(problem):
        raise KnobError(
            f"moe.{kernel} takes {most(problem)} rows of top={problem.top} at most, not m={problem.m}",
            f"use kernel={'stream' if kernel == 'token' else 'grouped'}, or pass fewer rows",
        )
    return problem.pick("activation", "bias", "residual", "encoding", "scale_range")


def contract(threads: int, copy: str = "bulk") -> Contract:
    """What these kernels promise with so many resident threads a multiprocessor, and weights brought by such copies."""
    return Contract(
        max_registers=min(255, 65536 // threads // 8 * 8),
        require=(
            r"HMMA\.16816\.F32\.BF16", r"\bLDS\.128\b",
            r"\bUBLKCP\b" if copy == "bulk" else r"\bLDGSTS\.E\..*128",
        ),
    )  # fmt: skip


def rows_by_pairs(problem: MoeProblem) -> int:
    """Rows whose pairs with experts are as many as a launch has places for."""
    return ENTRIES // problem.top


def reads(problem: MoeProblem, columns: int) -> float:
    """How often one launch reads the weights of an expert that has rows, on average: once for each `columns` rows.

    A row takes different experts, all as likely.
    """
    share = min(problem.top / problem.experts, 1.0)
    chance = [math.comb(problem.m, k) * share**k * (1 - share) ** (problem.m - k) for k in range(problem.m + 1)]
    return sum(-(-rows // columns) * one for rows, one in enumerate(chance)) / (1 - chance[0])


def require_room(problem: MoeProblem, variant: Variant, need: Callable[[Any], int], lower: str) -> None:
    """Raise KnobError where a block has not the shared memory that knobs need; `lower` says which of them help."""
    knobs, arch = variant.knobs, variant.arch
    if need(knobs) > arch.shared_bytes:
        raise KnobError(
            f"{variant.name} with hidden={problem.hidden}, intermediate={problem.intermediate} "
            f"needs {need(knobs)} B of shared memory; a block on {arch} has at most "
            f"{arch.shared_bytes} B",
            f"{fitting(knobs, need, arch)}; or lower {lower}",
        )


def many_rows(columns: int) -> npt.NDArray[np.int32]:
    """Ids for a case: experts with more than `columns` rows, one row twice, none, and ids that are no expert's."""
    return np.array([[0, 2]] * (columns + 1) + [[2, 1], [1, 1], [2, -1], [3, 4], [0, 1]], np.int32)


def crowd(rows: int) -> npt.NDArray[np.int32]:
    """Ids for a case: of the most a row, few of them an expert's, but of more experts than a warp has lanes."""
    ids = np.full(rows * MAX_TOP, -1, np.int32)
    ids[np.linspace(0, len(ids) - 1, CROWD).astype(int)] = np.arange(CROWD)
    return ids.reshape(rows, MAX_TOP)


CROWD = 48  # experts of those ids; most of their pairs are behind the first 32


def below(top: int) -> int:
    """A count of rows below zero, whose pairs are some in 32 bits."""
    return 1 - (1 << 32) // top if top > 1 else -1


MAPPED = np.array([2, -1, 1, 65537], np.int32)  # a map for those ids: to no expert, and past the last
