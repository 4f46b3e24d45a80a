"""A card that is the simulator: operators run whole, on tensors in host memory, their kernels thread for thread.

All above the card (`jitmx.runtime.card`) is real. Small shapes only: a thread costs microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitmx import arch
from jitmx.registry.arguments import Number
from jitmx.registry.launch import Launch
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.runtime import card, scratch
from jitmx.runtime.card import Card
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.tensormap import encode
from jitmx.toolchain import nvrtc

STREAM = 7


@functools.cache
def ptx_of(variant: Variant) -> str:
    """PTX of a variant, for its target."""
    return nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


# Tensors that were met, by where their memory started then.
_met: dict[int, weakref.ref[torch.Tensor]] = {}


def holding(address: int) -> tuple[int, torch.UntypedStorage]:
    """The storage that an address lies in, and where it starts.

    Of all objects of a process few are tensors, and launches take such as were met before or are the youngest of them:
    the others are looked through only where an address is in none of these.
    """
    found = _at(address)
    for generation in (0, 1, None):
        if found is None:
            for item in _tensors(gc.get_objects(generation=generation)):
                if not item.is_meta and item.untyped_storage().nbytes():
                    _met[item.untyped_storage().data_ptr()] = weakref.ref(item)
            found = _at(address)
    assert found is not None, f"{address:#x} lies in no tensor"
    return found


def _at(address: int) -> tuple[int, torch.UntypedStorage] | None:
    """The same among those that were met and are still there; memory of one that is gone may be another's now."""
    for start in _starts(address):
        item = _met[start]() if start in _met else None
        storage = item.untyped_storage() if item is not None else None
        if storage is not None and storage.data_ptr() == start and storage.nbytes():
            return (start, storage) if address < start + storage.nbytes() else None
        _met.pop(start, None)
    return None


def _starts(address: int) -> Iterator[int]:
    """Where memory starts that an address may lie in: most addresses are where one starts."""
    yield address
    yield from sorted((start for start in _met if start < address), reverse=True)


def _tensors(objects: list[Any]) -> Iterator[Any]:
    """Those of them that are tensors or parameters, and no tensors of a tracer."""
    kinds, left = {torch.Tensor}, [torch.nn.Parameter]
    while left:
        kinds.add(kind := left.pop())
        left += kind.__subclasses__()
    return itertools.compress(objects, map(kinds.__contains__, map(type, objects)))


@dataclass
class Simulated(Card):
    """A card of 4 multiprocessors in host memory.

    Attributes:
        target: what kernels are compiled for.
        launched: what was launched, in order.
        device: the number under which it has scratch memory; -1 is host memory.
        begins_early: whether the next launch begins while those before it are at work.
    """

    target: arch.Arch
    launched: list[Variant] = field(default_factory=list)
    device: int = -1
    begins_early: bool = False

    @property
    def kernels(self) -> list[str]:
        """What was launched, by name."""
        return [f"{variant.spec.family}.{variant.spec.name}" for variant in self.launched]

    def arch(self, _device: int) -> arch.Arch:
        return self.target

    def multiprocessors(self, _device: int) -> int:
        return 4

    def holds(self, _tensor: torch.Tensor) -> bool:
        return True

    def place(self, _device: int) -> torch.device:
        return torch.device("cpu")

    def capturing(self) -> bool:
        return False

    def bind(
        self, variant: Variant, _device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
        dependent: bool = True,
    ) -> Callable[..., None]:  # fmt: skip
        """Launches by the simulator: the memory that arguments point into is taken there and back."""
        fields = variant.arguments
        numbers = (value for name, value in fixed.items() if fields.fields[name].letter != "P")
        kind = (variant.identity, launch.blocks, launch.workspace, *numbers)

        def run(*values: Number) -> None:
            given = {**dict(zip(takes, values, strict=True)), **fixed}
            if launch.workspace:
                given["workspace"] = scratch.memory(launch.workspace, kind, self.device, STREAM).data_ptr()
            self.launch(variant, launch, given)

        assert list(takes) == [name for name in fields.fields if name in takes]
        return run

    def is_there(self, _start: int) -> bool:
        """Whether no launch at work writes to the memory that starts there."""
        return False

    @staticmethod
    def start_of(address: int) -> int:
        """Where the memory of a tensor starts that an address lies in."""
        return holding(address)[0]

    def launch(self, variant: Variant, launch: Launch, values: dict[str, Number]) -> None:
        """One launch, with all that is not 0 of its arguments."""
        self.launched.append(variant)
        memory = Memory()
        there: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for name, item in variant.arguments.fields.items():
            if item.letter == "P" and values.get(name):
                address = int(values[name])
                start, storage = holding(address)
                if start not in there:
                    data = _bytes(storage).numpy()
                    there[start] = memory.upload(data, name, writable=True, early=self.is_there(start)), storage
                values[name] = there[start][0] + address - start
        simulate(
            ptx_of(variant), (launch.blocks, 1, 1), (variant.threads, 1, 1),
            variant.arguments.pack(values, launch.maps, encode), memory, entry=variant.spec.entry,
            shared_bytes=launch.shared_bytes, cluster=launch.cluster, programmatic=self.begins_early,
        )  # fmt: skip
        for at, storage in there.values():
            _bytes(storage).copy_(torch.from_numpy(memory.download(at, "uint8", (storage.nbytes(),))))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


@contextlib.contextmanager
def on_cpu(target: str = "sm_121a", kind: type[Simulated] = Simulated) -> Iterator[Simulated]:
    """Operators take CPU tensors, and run kernels for `target`.

    Yields:
        The card, of this kind.
    """
    simulated = kind(arch.parse(target))
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # allocates NaN and largest integers: what no kernel writes is seen
    try:
        with card.use(simulated):
            yield simulated
    finally:
        torch.use_deterministic_algorithms(strict)
