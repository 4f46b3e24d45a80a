"""A case of a variant on a card: its launch, on inputs that were copied there and outputs that nobody wrote."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from jitmx.registry.case import Array, Case
from jitmx.registry.spec import Variant
from jitmx.runtime import card
from jitmx.runtime.plan import Step

_POISON = 0xA5


def outputs(case: Case, variant: Variant, device: int = 0, *, poison: bool = True) -> list[Array]:
    """What a launch leaves in the outputs of a case, in the order of the fields.

    Args:
        poison: whether outputs are filled before; they are not where a sanitizer looks for reads of what none wrote.

    Raises:
        DriverError: the driver refuses the launch.
    """
    place, buffers = card.place(device), case.buffers(variant.arguments)
    tensors: dict[str, torch.Tensor] = {}
    for name, item in buffers.items():
        if item.output and not item.scratch:
            tensors[name] = torch.empty(item.data.nbytes, dtype=torch.uint8, device=place)
            if poison:
                tensors[name].fill_(_POISON)
        else:
            data = np.ascontiguousarray(item.data).reshape(-1).view(np.uint8).copy()
            tensors[name] = torch.from_numpy(data).to(place)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    # A case has its workspace among its buffers.
    launch = dataclasses.replace(case.launch, workspace=0)
    takes = [name for name in variant.arguments.fields if name in case.values]
    step = Step(variant, device, launch, {}, takes)
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # a kernel may read what `early` buffers hold before its wait
    step(**{name: addresses.get(name, item) for name, item in case.values.items()})
    return [
        tensors[name].cpu().numpy().view(item.data.dtype).reshape(item.data.shape)
        for name, item in buffers.items()
        if item.output
    ]
