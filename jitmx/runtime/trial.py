"""Cases of a variant on a card: their launches, on inputs that were copied there and outputs that nobody wrote.

Of a sparse buffer all bytes are there, and the whole grid runs, whatever blocks the simulator is content with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from jitmx.registry.case import Array, Buffer, Case
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

_POISON = 0xA5
_ROOM = 2 << 30  # bytes of a card that contexts and kernels take


def lacks(case: Case, variant: Variant, device: int = 0) -> str | None:
    """Why a card has no room for a case with sparse buffers; None where it has."""
    place = card.place(device)
    if not case.sparse:
        return None
    need = sum(item.nbytes for item in case.buffers(variant.arguments).values())
    if place.type != "cuda":
        return f"{case.name} takes {need >> 20} MiB of a card's memory"
    have = torch.cuda.mem_get_info(place)[0] + torch.cuda.memory_reserved(place) - _ROOM
    return f"{case.name} takes {need >> 20} MiB; {place} has {have >> 20} MiB free" if need > have else None


def outputs(case: Case, variant: Variant, device: int = 0, *, poison: bool = True) -> list[Array]:
    """What a launch leaves in the outputs of a case, in the order of the fields.

    Args:
        poison: whether outputs are filled before; they are not where a sanitizer looks for reads of what none wrote.

    Raises:
        DriverError: the driver refuses the launch.
    """
    return sequence((case,), variant, device, poison=poison)[0]


def sequence(chain: Sequence[Case], variant: Variant, device: int = 0, *, poison: bool = True) -> list[list[Array]]:
    """The same of cases that are launched one right after the other, on the workspace of the first (`case.chains`).

    Everything is there before the first launch, so that nothing but the kernels orders them.
    """
    place, tensors = card.place(device), [_tensors(case, variant, device, poison=poison) for case in chain]
    launches: list[Callable[[], None]] = []
    for case, own in zip(chain, tensors, strict=True):
        if "workspace" in own:
            own["workspace"] = tensors[0]["workspace"]
        # A case has its workspace among its buffers.
        launch = dataclasses.replace(case.launch, workspace=0)
        takes = [name for name in variant.arguments.fields if name in case.values]
        values = {name: item for name, item in case.values.items() if not isinstance(item, Buffer)}
        values |= {name: tensor.data_ptr() for name, tensor in own.items()}
        launches.append(partial(Step(variant, device, launch, {}, takes), **values))
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # a kernel may read what `early` buffers hold before its wait
    for run in launches:
        run()
    return [_read(case, variant, own) for case, own in zip(chain, tensors, strict=True)]


def _tensors(case: Case, variant: Variant, device: int, *, poison: bool) -> dict[str, torch.Tensor]:
    """The buffers of a case on a device, by field."""
    place, tensors = card.place(device), dict[str, torch.Tensor]()
    for name, item in case.buffers(variant.arguments).items():
        if item.output and not item.scratch:
            tensors[name] = torch.empty(item.nbytes, dtype=torch.uint8, device=place)
            if poison:
                tensors[name].fill_(_POISON)
        elif item.at is not None:
            tensors[name] = torch.full((item.nbytes,), item.fill, dtype=torch.uint8, device=place)
            for at, row in zip(item.at.reshape(-1).tolist(), _pieces(item, item.at.size), strict=True):
                tensors[name][at : at + len(row)] = row.to(place)
        else:
            data = np.ascontiguousarray(item.data).reshape(-1).view(np.uint8).copy()
            tensors[name] = torch.from_numpy(data).to(place)
    return tensors


def _read(case: Case, variant: Variant, tensors: dict[str, torch.Tensor]) -> list[Array]:
    """What the outputs of a case hold, in the order of the fields."""
    return [_found(item, tensors[name]) for name, item in case.buffers(variant.arguments).items() if item.output]


def _pieces(item: Buffer, count: int) -> torch.Tensor:
    """The bytes of each piece of a sparse buffer."""
    return torch.from_numpy(np.ascontiguousarray(item.data).reshape(count, -1).view(np.uint8).copy())


def _found(item: Buffer, tensor: torch.Tensor) -> Array:
    """What a tensor holds of an output: all, or its pieces."""
    if item.at is not None:
        piece = item.data.nbytes // item.at.size
        tensor = torch.stack([tensor[at : at + piece] for at in item.at.reshape(-1).tolist()])
    found: Array = tensor.cpu().numpy().reshape(-1).view(item.data.dtype).reshape(item.data.shape)
    return found
