"""A card that is the simulator: operators run whole, on tensors in host memory, their kernels thread for thread.

`on_cpu` stands in for the launch and for what torch says of a device; all above that is real. Small shapes only: a
thread costs microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import struct
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from jitmx import arch
from jitmx.ops import (
    checks,
    linear,
    moe,
    moe_grouped,
    moe_plan,
    operand,
    pack,
    plan,
    quantize,
    routing_calls,
    routing_plan,
    scratch,
)
from jitmx.registry.matrix import MatrixMap, with_map
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.sim.verify import encode
from jitmx.toolchain import nvrtc


@functools.cache
def _ptx(variant: Variant) -> str:
    return nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


class Storages:
    """Memory of the tensors there are, by address. Of all objects of a process few are tensors, and most launches take
    such as are new or were met before: the others are looked through only where an address is in none of these.
    """

    _met: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def __init__(self) -> None:
        self._by_start: dict[int, torch.UntypedStorage] = {}
        self._add(item for item in (reference() for reference in self._met) if item is not None)
        for young in (0, 1):
            self._add(_tensors(gc.get_objects(generation=young)))

    def holding(self, address: int) -> tuple[int, torch.UntypedStorage]:
        """The storage that an address lies in, and where it starts."""
        found = self._at(address)
        if found is None:
            tensors = list(_tensors(gc.get_objects()))
            Storages._met = [weakref.ref(item) for item in tensors]
            self._add(tensors)
            found = self._at(address)
        assert found is not None, f"{address:#x} lies in no tensor"
        return found

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (item.untyped_storage() for item in tensors if not item.is_meta):
            if storage.nbytes():
                self._by_start[storage.data_ptr()] = storage

    def _at(self, address: int) -> tuple[int, torch.UntypedStorage] | None:
        start = max((at for at in self._by_start if at <= address), default=0)
        storage = self._by_start.get(start)
        return (start, storage) if storage is not None and address < start + storage.nbytes() else None


def _tensors(objects: list[Any]) -> Iterator[Any]:
    """Those of them that are tensors or parameters, and no tensors of a tracer."""
    kinds, left = {torch.Tensor}, [torch.nn.Parameter]
    while left:
        kinds.add(kind := left.pop())
        left += kind.__subclasses__()
    return itertools.compress(objects, map(kinds.__contains__, map(type, objects)))


@dataclass
class Card:
    """What was launched, in order."""

    launched: list[Variant] = field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        return [f"{variant.spec.family}.{variant.spec.name}" for variant in self.launched]


class Launcher:
    """Launches by the simulator: the memory that arguments point into is taken there and back."""

    card: Card

    def __init__(
        self, variant: Variant, device: Any, *, layout: str, pdl: bool, matrix: MatrixMap | None = None,
        rest: bytes = b"", **geometry: int
    ) -> None:  # fmt: skip
        assert pdl == getattr(variant.knobs, "pdl", False)
        self._matrix = matrix
        self.variant, self._layout, self._rest = variant, layout, rest
        self._geometry = geometry

    def __call__(self, stream: int, *arguments: Any) -> None:
        letters = "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)([PQif])", self._layout))
        memory, storages = Memory(), Storages()
        there: dict[int, tuple[int, torch.UntypedStorage]] = {}
        fields = []
        for letter, value in zip(letters, arguments, strict=True):
            if letter == "P" and value:
                start, storage = storages.holding(value)
                if start not in there:
                    there[start] = memory.upload(_bytes(storage).numpy(), writable=True), storage
                value = there[start][0] + value - start
            fields.append(value)
        Launcher.card.launched.append(self.variant)
        spec, shape = self.variant.spec, self._geometry
        packed = with_map(struct.pack(self._layout, *fields) + self._rest, self._matrix, int(fields[0]), encode)
        simulate(
            _ptx(self.variant), (shape["blocks"], 1, 1), (spec.threads(self.variant.knobs), 1, 1),
            packed, memory, entry=spec.entry, shared_bytes=shape["shared_bytes"],
            cluster=shape.get("cluster", 1),
        )  # fmt: skip
        for at, storage in there.values():
            _bytes(storage).copy_(torch.from_numpy(memory.download(at, "uint8", (storage.nbytes(),))))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


@contextlib.contextmanager
def on_cpu(target: str = "sm_121a") -> Iterator[Card]:
    """`jitmx.quantize`, `linear`, `moe` and `route` take CPU tensors, and run kernels for `target`.

    Yields:
        The card, of 4 multiprocessors.
    """
    outputs, check_out = routing_plan.Plan.outputs, routing_calls._check_out

    def in_host_memory(made: routing_plan.Plan, ids: torch.Tensor | None, device: torch.device) -> routing_plan.Routing:
        return outputs(made, ids, device if device.type == "meta" else torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "card", Card(), raising=False)
        for module in (pack, quantize, plan, moe_plan, moe_grouped, routing_plan):
            patch.setattr(module, "Launcher", Launcher)
        for module in (linear, moe, routing_calls):
            patch.setattr(module, "_raw_stream", lambda _device: 7)
        patch.setattr(checks, "require_cuda", checks.require_tensor)
        patch.setattr(checks, "device_arch", lambda _device: arch.parse(target))
        patch.setattr(checks, "multiprocessors", lambda _device: 4)
        patch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        patch.setattr(routing_plan.Plan, "outputs", in_host_memory)
        patch.setattr(routing_calls, "_check_out", lambda out, wanted, _device: check_out(out, wanted, -1))
        patch.setattr(scratch, "_zeroed", lambda size, _device: torch.zeros(size, dtype=torch.uint8))
        # What was planned on another card, or will be on this one, is of no use elsewhere.
        for module, kept in ((scratch, "_of_streams"), (routing_calls, "_plans"), (operand, "_known")):
            patch.setattr(module, kept, {})
        planned = pack._launcher, quantize._variant, quantize._launcher, plan._steps, moe_plan._plan
        for cached in planned:
            cached.cache_clear()
        strict = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # allocates NaN and largest integers: what no kernel writes is seen
        try:
            yield Launcher.card
        finally:
            torch.use_deterministic_algorithms(strict)
            for cached in planned:
                cached.cache_clear()
