"""The form that every kernel of `linear` fills in, so that dispatch and launch need not know which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.case import Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import KernelSpec, Variant

_Item = TypeVar("_Item")


def spread(*parts: Sequence[_Item]) -> list[_Item]:
    """The items of all parts, in their order and evenly spread: any beginning has its share of every part."""
    placed = [(place / len(part), number, item) for number, part in enumerate(parts) for place, item in enumerate(part)]
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]


def has_clusters(arch: Arch) -> bool:
    """Whether kernels of `linear` were made for clusters of blocks on a target."""
    return "cluster" in arch.features and arch.major in (9, 10)


def anywhere(arch: Arch) -> bool:
    """A kernel that has variants for every target."""
    return True


@dataclass(frozen=True)
class LinearKernel:
    """What the family needs of one kernel.

    Attributes:
        spec: the kernel.
        max_rows: rows of X that one launch takes at most, or None.
        fixed: knobs that a problem decides; KnobError where the kernel cannot serve it.
        launch: geometry, from knobs, m, n, k and the multiprocessors of the device.
        heuristic: tuned knobs where no table has a row.
        cases: launches with known results, small and ragged.
        check: KnobError where a legal variant cannot serve a problem.
        candidates: knobs that tuning tries, best guesses first.
        runs_on: whether the kernel has variants for a target.
        tile: knobs for a tile M x N (x K) with so many stages, as JITMX_LINEAR_TILE asks; None where there is no tile.
    """

    spec: KernelSpec
    max_rows: int | None
    fixed: Callable[[LinearProblem], dict[str, Any]]
    launch: Callable[[Any, int, int, int, int], Launch]
    heuristic: Callable[[LinearProblem, Arch, int], dict[str, Any]]
    cases: Callable[[Variant], Iterable[Case]]
    check: Callable[[LinearProblem, Variant], None]
    candidates: Callable[[LinearProblem, Arch, int], list[dict[str, Any]]]
    runs_on: Callable[[Arch], bool] = anywhere
    tile: Callable[[int, int, int | None, int | None], dict[str, Any]] | None = None


def require_plain(kernel: str, problem: LinearProblem, *allowed: str) -> None:
    """Raise KnobError where the problem asks for something that a kernel lacks.

    Args:
        kernel: its name, for the message.
        allowed: fields of the problem that it does not lack.
    """
    plain = {"weight": "mxfp4", "activation": "none", "norm": False, "residual": False, "argmax": False}
    for name, usual in plain.items():
        value = getattr(problem, name)
        if name not in allowed and value != usual:
            raise KnobError(f"linear.{kernel} does not take {name}={value!r}, only {name}={usual!r}")


def registers_left(warps: int, blocks_per_sm: int) -> int:
    """Registers a thread where so many blocks of so many warps fit a multiprocessor."""
    return min(255, 65536 // (warps * 32 * blocks_per_sm) // 8 * 8)


def most_blocks(warps: int, blocks_per_sm: int, least: int) -> int:
    """Of so many blocks a multiprocessor, those that leave a thread `least` registers; at least 1.

    A lone block is never refused: heuristics take one where nothing smaller holds the shape.
    """
    return next((blocks for blocks in range(blocks_per_sm, 1, -1) if least <= registers_left(warps, blocks)), 1)


def require_registers(warps: int, blocks_per_sm: int, least: int) -> None:
    """Raise KnobError where a thread that takes `least` registers at least cannot have them.

    Such a bound is what code was seen to spill without. Above it the compiler may spill yet: the contract tells.

    Args:
        warps: a block.
        blocks_per_sm: blocks that must fit a multiprocessor.
    """
    nearest = most_blocks(warps, blocks_per_sm, least)
    if nearest != blocks_per_sm:
        raise KnobError(
            f"blocks_per_sm={blocks_per_sm} of {warps} warps leaves a thread {registers_left(warps, blocks_per_sm)} "
            f"registers, under the {least} that it takes at least with the other knobs: the nearest legal value is "
            f"blocks_per_sm={nearest}"
        )
