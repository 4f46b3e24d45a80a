"""What operators ask of the machine that kernels run on: its GPUs, through torch and the driver.

Operators ask the functions of this module; `use` puts another card in their place, such as one that simulates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from jitmx import arch as targets
from jitmx.arch import Arch
from jitmx.registry.arguments import Number
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.runtime import launch as launching
from jitmx.runtime import load


class Card:
    """The GPUs of this machine; devices go by number."""

    def arch(self, device: int) -> Arch:
        """The SM target of a device."""
        return targets.of_device(*torch.cuda.get_device_capability(device))

    def multiprocessors(self, device: int) -> int:
        """SM count of a device."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether kernels can read a tensor."""
        return bool(tensor.is_cuda)

    def place(self, device: int) -> torch.device:
        """Where tensors of a device lie."""
        return torch.device("cuda", device)

    def capturing(self) -> bool:
        """Whether torch's current stream is recording a CUDA graph."""
        return load.capturing()

    def bind(
        self, variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
        dependent: bool = True,
    ) -> Callable[..., None]:  # fmt: skip
        """A function that launches with the values of `takes`, as a `Launcher` does."""
        return launching.bound(variant, device, launch, takes, fixed, dependent=dependent)


_current = Card()
_forget: list[Callable[[], None]] = []


def when_changed(forget: Callable[[], None]) -> None:
    """Have `forget` called whenever another card is used: what was planned for one is of no use on another."""
    _forget.append(forget)


def _take(other: Card) -> None:
    global _current
    _current = other
    arch.cache_clear()
    multiprocessors.cache_clear()
    for forget in _forget:
        forget()


@contextlib.contextmanager
def use(other: Card) -> Iterator[None]:
    """Operators run on another card for a while; one at a time in a process."""
    before = _current
    _take(other)
    try:
        yield
    finally:
        _take(before)


def current() -> Card:
    """The card that is in use."""
    return _current


@functools.cache
def arch(device: int) -> Arch:
    """The SM target of a device."""
    return _current.arch(device)


@functools.cache
def multiprocessors(device: int) -> int:
    """SM count of a device."""
    return _current.multiprocessors(device)


def holds(tensor: torch.Tensor) -> bool:
    """Whether kernels can read a tensor."""
    return _current.holds(tensor)


def number(place: torch.device) -> int:
    """The number of the device of a tensor; -1 for host memory."""
    return -1 if place.index is None else place.index


def place(device: int) -> torch.device:
    """Where tensors of a device lie."""
    return _current.place(device)


def capturing() -> bool:
    """Whether torch's current stream is recording a CUDA graph."""
    return _current.capturing()


def bind(
    variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
    dependent: bool = True,
) -> Callable[..., None]:  # fmt: skip
    """A function that launches a variant with the values of `takes`, as a `Launcher` does."""
    return _current.bind(variant, device, launch, takes, fixed, dependent=dependent)
