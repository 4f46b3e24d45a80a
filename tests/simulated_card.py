"""A card that is the simulator: operators run whole, on tensors in host memory, their kernels thread for thread."""

from __future__ import annotations

import functools
import gc
import re
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc


@functools.cache
def _ptx(variant: Variant) -> str:
    return nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))


def _storages() -> dict[int, torch.UntypedStorage]:
    """Memory of all tensors there are, by where it starts."""
    found = (item.untyped_storage() for item in gc.get_objects() if type(item) is torch.Tensor and not item.is_meta)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


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

    def __init__(self, variant: Variant, device: Any, *, layout: str, pdl: bool, **geometry: int) -> None:
        assert pdl == variant.knobs.pdl
        self.variant, self._layout = variant, layout
        self._geometry = geometry

    def __call__(self, stream: int, *arguments: Any) -> None:
        letters = "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)([PQif])", self._layout))
        memory, storages = Memory(), _storages()
        there: dict[int, int] = {}
        fields = []
        for letter, value in zip(letters, arguments, strict=True):
            if letter == "P" and value:
                start = max((at for at in storages if at <= value), default=0)
                assert start and value < start + storages[start].nbytes(), f"{value:#x} lies in no tensor"
                if start not in there:
                    there[start] = memory.upload(_bytes(storages[start]).numpy(), writable=True)
                value = there[start] + value - start
            fields.append(value)
        Launcher.card.launched.append(self.variant)
        spec, shape = self.variant.spec, self._geometry
        simulate(
            _ptx(self.variant), (shape["blocks"], 1, 1), (spec.threads(self.variant.knobs), 1, 1),
            struct.pack(self._layout, *fields), memory, entry=spec.entry, shared_bytes=shape["shared_bytes"],
            cluster=shape.get("cluster", 1),
        )  # fmt: skip
        for start, at in there.items():
            data = memory.download(at, "uint8", (storages[start].nbytes(),))
            _bytes(storages[start]).copy_(torch.from_numpy(data))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
