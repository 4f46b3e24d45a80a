"""What kernels of `linear` have in common: what they refuse, and the registers that a thread has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitmx.arch import Arch
from jitmx.errors import KnobError
from jitmx.kernels.linear.layout import TILE_K, TILE_ROWS
from jitmx.kernels.linear.problem import LinearProblem
from jitmx.registry.spec import Variant

MOST_THREADS = 1536  # of a multiprocessor
REACH = 1 << 32  # bytes that offsets of rows within a tile reach


def has_clusters(arch: Arch) -> bool:
    """Whether kernels of `linear` were made for clusters of blocks on a target."""
    return "cluster" in arch.features and arch.major in (9, 10)


def require_plain(kernel: str, problem: LinearProblem, *allowed: str) -> None:
    """Raise KnobError where the problem asks for something that a kernel lacks.

    Args:
        kernel: its name, for the message.
        allowed: fields of the problem that it does not lack.
    """
    plain = {
        "weight": "mxfp4",
        "activation": "none",
        "norm": False,
        "residual": False,
        "argmax": False,
        "swiglu": False,
    }
    for name, usual in plain.items():
        value = getattr(problem, name)
        if name not in allowed and value != usual:
            raise KnobError(f"linear.{kernel} does not take {name}={value!r}, only {name}={usual!r}")


def row_count(problem: LinearProblem, counts: Sequence[int]) -> int:
    """The smallest of the row counts that a kernel has which holds the problem's rows, or a full launch of them."""
    return next(rows for rows in counts if rows >= min(problem.m, counts[-1]))


def require_divisor(knobs: Any, name: str, choices: Sequence[int], whole: str = "warps") -> None:
    """Raise KnobError where the knob `name` does not divide another; the remedy is the nearest of its choices."""
    value, size = getattr(knobs, name), getattr(knobs, whole)
    if size % value:
        nearest = min((choice for choice in choices if size % choice == 0), key=lambda choice: abs(choice - value))
        raise KnobError(f"{name}={value} does not divide {whole}={size}", f"the nearest that does is {nearest}")


def require_slices(split_k: int, most: int, of: str) -> None:
    """Raise KnobError where slices of k are more than what they are `of`, of which each has one at least."""
    if split_k > most:
        raise KnobError(f"split_k={split_k} is over the {of}", f"the nearest legal value is {most}")


def require_resident(blocks_per_sm: int, count: int, unit: str = "threads") -> None:
    """Raise KnobError where blocks of so many threads or warps are more than a multiprocessor has at a time."""
    most = MOST_THREADS if unit == "threads" else MOST_THREADS // 32
    if blocks_per_sm * count > most:
        raise KnobError(
            f"blocks_per_sm={blocks_per_sm} of {count} {unit} is over {most} {unit} a multiprocessor",
            f"the nearest legal value is {most // count}",
        )


def require_grid(variant: Variant, blocks: int, shape: str) -> None:
    """Raise KnobError where a launch for such a shape has more blocks than a grid."""
    if blocks >= 1 << 31:
        raise KnobError(
            f"{variant.name} takes {blocks} blocks for {shape}; a grid has at most 2^31 - 1",
            "use larger tiles or fewer rows a call",
        )


def require_columns(kernel: str, k: int, packed_bytes: int) -> None:
    """Raise KnobError where a row of packed tiles, of so many bytes each, has more bytes than an int counts."""
    most = ((1 << 31) - 1) // packed_bytes * TILE_K
    if k > most:
        raise KnobError(
            f"{kernel} counts the bytes of a row of packed tiles in 31 bits, which k={k} passes",
            f"use k={most} or less",
        )


def require_reach(variant: Variant, k: int, m: int, n: int, packed_bytes: int) -> None:
    """Raise KnobError where the rows of a block's tile of X, or of packed tiles, are apart by more than 2^32 bytes.

    Args:
        m: rows of X that there are.
        n: features.
        packed_bytes: of a packed tile's codes.
    """
    row_tiles, tiles_k = -(-n // TILE_ROWS), -(-k // TILE_K)
    for name, there, unit, size in (("tile_m", m, 1, 2 * k), ("tile_n", row_tiles, TILE_ROWS, tiles_k * packed_bytes)):
        value = getattr(variant.knobs, name)
        if min(value // unit, there) * size > REACH:
            raise KnobError(
                f"{name}={value} with k={k}: rows of a tile that are more than {REACH} B apart are beyond the offsets "
                f"of {variant.name}",
                f"use {name}={REACH // size * unit} or less",
            )


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
            f"registers, under the {least} that it takes at least with the other knobs",
            f"the nearest legal value is blocks_per_sm={nearest}",
        )
