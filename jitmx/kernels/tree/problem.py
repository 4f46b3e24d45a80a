"""What calls ask of the kernels of trees, and what these have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jitmx.kernels import Problem
from jitmx.registry.arguments import Arguments, Field, number, reads, writes
from jitmx.registry.case import Buffer, mismatches
from jitmx.registry.contract import Contract
from jitmx.registry.spec import PDL, KernelSpec, Knobs, knob

Array = npt.NDArray[Any]

STEPS = ("pack", "plan", "build", "verify", "accept", "move")
MAX_NODES, MAX_BATCH, MAX_CANDIDATES = 64, 1 << 20, 4096
PLAN_FIELDS: tuple[Field, ...] = (
    writes("mask", "[batch, nodes, words]: bit j of a node: node j is itself or above it", "unsigned int"),
    writes("depth", "[batch, nodes], nodes above; -1 of padding", "int"),
    writes("positions", "[batch, nodes], of the root and the depth", "long long"),
    writes("first_child", "[batch, nodes], or -1", "int"),
    writes("next_sibling", "[batch, nodes], or -1", "int"),
    writes("paths", "[batch, nodes, levels], nodes from the root to this one, then -1", "int"),
)
SIZES = (
    number("nodes", "unsigned int", f"of a tree, 1 to {MAX_NODES}"),
    number("words", "unsigned int", "of 32 bits that a row of the mask has, 1 or 2"),
    number("levels", "unsigned int", "nodes of a path that are written"),
)
STARTS = reads("starts", "[batch], position of the root, int or long long; or 0")


@dataclass(frozen=True)
class TreeKnobs(Knobs):
    """Compile-time choices of the kernels of `tree`."""

    pdl: bool = PDL


@dataclass(frozen=True)
class TreeProblem(Problem):
    """One call of an operator on trees of drafts."""

    step: str = knob("plan", choices=STEPS, doc="which kernel makes it")
    batch: int = knob(1, low=1, high=MAX_BATCH, doc="requests; of move times caches")


def spec(
    name: str, arguments: Arguments, threads: int, registers: int = 64, require: tuple[str, ...] = ()
) -> KernelSpec:
    """A kernel of the family, of so many threads a block."""
    return KernelSpec(
        family="tree",
        name=name,
        knobs=TreeKnobs,
        contract=lambda knobs, arch: Contract(max_registers=registers, require=require),
        threads=lambda knobs: threads,
        arguments=lambda knobs: arguments,
    )


def words_of(nodes: int) -> int:
    """Words of 32 bits that a row of a mask has."""
    return 1 if nodes <= 32 else 2


def random_parents(nodes: int, generator: np.random.Generator, kind: str = "random") -> npt.NDArray[np.int32]:
    """Parents of a tree of one kind, the root's -1."""
    before = np.maximum(np.arange(nodes), 1)
    chosen: Any = {
        "chain": np.arange(nodes) - 1,
        "star": np.zeros(nodes),
        "bushy": (np.arange(nodes) - 1) // 3,
    }.get(kind, generator.integers(0, before))
    parents: npt.NDArray[np.int32] = np.asarray(chosen, np.int32)
    parents[0] = -1
    if kind == "padded":  # nodes without a parent, and with one that is not before them, such as the node itself
        wrong = generator.random(nodes) < 0.2
        parents[wrong] = generator.choice([-1, nodes - 1, nodes, 1 << 30], int(wrong.sum()))
        parents[1:][nodes // 2 : nodes // 2 + 1] = nodes // 2 + 1
    return parents


KINDS = ("random", "chain", "star", "bushy", "padded")


def words(paths: Sequence[Sequence[int]], count: int) -> npt.NDArray[np.uint32]:
    """Bit masks of lists of nodes."""
    packed = np.zeros((len(paths), count), np.uint32)
    for row, path in zip(packed, paths, strict=True):
        for node in path:
            row[node // 32] |= np.uint32(1 << node % 32)
    return packed


def ids(values: Array, wide: bool) -> Array:
    """Values as ids of 32 or 64 bits."""
    return values.astype(np.int64 if wide else np.int32)


def exact(wanted: Mapping[str, Array]) -> tuple[dict[str, Buffer], Any]:
    """Outputs by field, in the order of the fields, and the check that they are just so."""
    arrays = list(wanted.values())

    def check(found: Sequence[Array]) -> float:
        return max(mismatches(one, right) for one, right in zip(found, arrays, strict=True))

    return {name: Buffer(array, output=True) for name, array in wanted.items()}, check
