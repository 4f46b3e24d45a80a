"""Checks of a variant: a small launch with known inputs, and what its outputs must be.

Cases are how a kernel is run where there is no card, and what evidence rests on. They are small and ragged, and between
them reach every branch of the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jitmx.registry.arguments import Arguments, Number
from jitmx.registry.launch import Launch
from jitmx.registry.tensor_map import Encode

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Buffer:
    """An array in device memory.

    Attributes:
        data: what it holds at launch; for an output, only shape and dtype count, and its bytes start uninitialised.
        output: whether the kernel writes it. What is neither output nor scratch may not be written.
        scratch: memory with these bytes that the kernel reads and writes; nobody looks at it, unless an output.
        constant: whether nothing on the stream writes it, such as a weight, a bias or a map of experts.
        early: whether it is used although the previous kernel may be at work, which does not write it, nor reads what
            is written.
        ahead: whether the launch behind this one uses it before it waits, since what writes it comes before this one.
        at: of a sparse buffer, the byte offset of each piece of `data`, in an array with the first axes of it. The
            kernel sees `size` bytes, of which it may touch these alone; checks get them as an array like `data`.
        size: bytes of a sparse buffer.
        fill: what a card finds in each byte between the pieces of an input, where the rest of the grid runs too.
    """

    data: Array
    output: bool = False
    scratch: bool = False
    constant: bool = False
    early: bool = False
    ahead: bool = False
    at: npt.NDArray[np.int64] | None = None
    size: int = 0
    fill: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel sees."""
        return self.data.nbytes if self.at is None else self.size

    def spread(self, at: npt.ArrayLike, size: int, fill: int = 0) -> Buffer:
        """The same data as pieces of a sparse buffer of `size` bytes."""
        at = np.asarray(at, np.int64)
        if at.shape != self.data.shape[: at.ndim]:
            raise ValueError(f"offsets {at.shape} of pieces of {self.data.shape}")
        return dataclasses.replace(self, at=at, size=size, fill=fill)


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: what is ragged about it.
        launch: its geometry.
        values: of the arguments by field: a number, or the buffer whose address it is; a field that is not among them
            is 0.
        check: from the outputs, in the order of the fields, to their error.
        gate: largest error that passes.
        resident: blocks that must run side by side, or None: as many as the simulator likes.
        sides: of the edges of the kernel's arithmetic (a clamp, a tie, the end of a range) the sides that a variant's
            cases must stand on between them, and whether this one's values do: computed from them, never claimed.
        blocks: of the grid that the simulator runs, where the others neither touch the outputs that are looked at nor
            are waited for; None: all. A card runs all of them.
        fixed: names of the numbers that no call of a plan changes (`jitmx.runtime.plan.Step`).
        again: makes the same launch on other inputs, for a case with a workspace; None where that takes too long.
    """

    name: str
    launch: Launch
    values: Mapping[str, Buffer | Number]
    check: Callable[[Sequence[Array]], float]
    gate: float
    resident: int | None = None
    sides: Mapping[str, bool] = field(default_factory=dict)
    blocks: Sequence[int] | None = None
    fixed: tuple[str, ...] = ()
    again: Callable[[], Case] | None = None

    @property
    def sparse(self) -> bool:
        """Whether the kernel sees more memory than its buffers hold."""
        return any(isinstance(item, Buffer) and item.at is not None for item in self.values.values())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What launches of a variant that get the same workspace have in common (`jitmx.runtime.scratch`)."""
        return self.launch.blocks, self.launch.workspace, *(self.values[name] for name in self.fixed)

    def buffers(self, arguments: Arguments) -> dict[str, Buffer]:
        """Its buffers by field, in the order of the fields."""
        given = {name: self.values.get(name) for name in arguments.fields}
        return {name: item for name, item in given.items() if isinstance(item, Buffer)}

    def pack(self, arguments: Arguments, addresses: Mapping[str, int], encode: Encode) -> bytes:
        """The argument struct.

        Args:
            addresses: of the buffers, by field.
            encode: makes a tensor map at an address.
        """
        numbers = {name: item for name, item in self.values.items() if not isinstance(item, Buffer)}
        return arguments.pack({**numbers, **addresses}, self.launch.maps, encode)


def untouched(cases: Iterable[Case]) -> tuple[str, ...]:
    """The sides of edges that none of a variant's cases stands on."""
    stands: dict[str, bool] = {}
    for case in cases:
        for side, there in case.sides.items():
            stands[side] = stands.get(side, False) or bool(there)
    return tuple(side for side, there in stands.items() if not there)


def chains(cases: Iterable[Case]) -> Iterator[tuple[Case, ...]]:
    """Cases as they are launched, one after another on one workspace, which each leaves as the next one needs it.

    A case that has none is launched once, and a far one. Of those that share one, the first is launched twice, then the
    others, and then it again. One that shares it with none is launched twice, and then on other inputs where these do
    not take too long. What is left behind shows in the launch behind it, or in the one behind that where launches take
    turns; and what was there before does not pass for what is made anew.
    """
    kinds: dict[tuple[Any, ...], list[Case]] = {}
    for number, case in enumerate(cases):
        key = case.kind if case.launch.workspace and not case.sparse else (number,)
        kinds.setdefault(key, []).append(case)
    for first, *others in kinds.values():
        if not first.launch.workspace or first.sparse:
            yield (first,)
        elif others:
            yield (first, first, *others, first)
        else:
            yield (first, first, first.again()) if first.again else (first, first)


def relative_l2(found: Array, wanted: Array) -> float:
    """||found - wanted|| / ||wanted|| in float64; infinite where one is NaN and the other is not."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return float("inf")
    found, wanted = np.nan_to_num(found), np.nan_to_num(wanted)
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / scale if scale else float(np.linalg.norm(found))


def places(values: Array, dtype: Any) -> Array:
    """A unit in the last place of `dtype` at each of these values, in float64: that of the smallest below normals."""
    info = ml_dtypes.finfo(dtype)
    least = float(info.smallest_normal)
    _, exponent = np.frexp(np.maximum(np.nan_to_num(np.abs(values), nan=0.0, posinf=0.0), least))
    return np.asarray(np.exp2(exponent - 1.0 - info.nmant))


def summed(magnitudes: Array, terms: int) -> Array:
    """How far an fp32 sum of so many terms may be off, in any order, where theirs together are of this magnitude.

    Tensor cores cut off what they add, 16 products at a time.
    """
    return np.asarray(magnitudes * (2.0**-22 * (8 + terms / 16)))


def deviation(found: Array, wanted: Array, bound: Array | float = 0.0, units: float = 1.0) -> float:
    """The largest |found - wanted|, element by element, in units of what is allowed there.

    That is `bound` and so many units in the last place, half a one where what is within the bound is rounded once to
    the nearest; where one is NaN or infinite, so must the other be.
    """
    if not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return float("inf")
    with np.errstate(over="ignore"):
        stored = wanted.astype(found.dtype).astype(np.float64)
    finite = np.isfinite(stored)
    wide = found.astype(np.float64)
    if not np.array_equal(wide[np.isinf(stored)], stored[np.isinf(stored)]):
        return float("inf")
    off = np.broadcast_to(bound, wanted.shape)[finite]
    allowed = off + units * places(np.abs(wanted[finite]) + off, found.dtype)
    return float(np.max(np.abs(wide[finite] - wanted[finite]) / allowed, initial=0.0))


def between(found: Array, wanted: Array, bound: Array | float) -> Array:
    """Whether each is what a value within `bound` of `wanted` is rounded to, to the nearest; with no bound, all are."""
    bound = np.broadcast_to(bound, wanted.shape)
    low, high = ((wanted + off).astype(found.dtype).astype(np.float64) for off in (-bound, bound))
    wide = found.astype(np.float64)
    return np.asarray(np.isinf(bound) | (low <= wide) & (wide <= high))


def judged(error: float, ratio: float, gate: float) -> float:
    """An error that counts for all of an output, and the largest `deviation` of its elements, as one.

    An element further off than it may be is over the gate, whatever the others make of it.
    """
    return error if ratio <= 1.0 else float(np.maximum(error, gate * ratio))


def _within_range(found: Array, wanted: Array) -> tuple[Array, Array, Array]:
    """Both tensors of a pair and what they should add up to, with zeros where that is beyond the type's range."""
    kept, lost = found.astype(np.float64)
    wanted = wanted.astype(np.float64)
    beyond = (np.abs(wanted) > float(ml_dtypes.finfo(found.dtype).max)) & (kept == np.copysign(np.inf, wanted))
    return np.where(beyond, 0, kept), np.where(beyond, 0, lost), np.where(beyond, 0, wanted)


def pair_l2(found: Array, wanted: Array) -> float:
    """`relative_l2` of the sum of a pair [2, ...]; infinite where the second tensor is not what rounding loses."""
    kept, lost, wanted = _within_range(found, wanted)
    if (np.abs(lost) > np.abs(kept) * 2.0**-8).any():
        return float("inf")
    return relative_l2(kept + lost, wanted)


def pair_deviation(found: Array, wanted: Array, bound: Array | float = 0.0) -> float:
    """`deviation` of the sum of a pair [2, ...], the second of which is rounded to the nearest: half a unit of it."""
    kept, lost, wanted = _within_range(found, wanted)
    both = kept + lost
    if not np.array_equal(np.isnan(both), np.isnan(wanted)):
        return float("inf")
    there = np.isfinite(wanted)
    allowed = (np.broadcast_to(bound, wanted.shape) + 0.5 * places(lost, found.dtype))[there]
    return float(np.max(np.abs(both - wanted)[there] / allowed, initial=0.0))


def mismatches(found: Array, wanted: Array) -> float:
    """Share of elements that differ, for outputs that must be exact."""
    return float(np.mean(found != wanted)) if found.size else 0.0
