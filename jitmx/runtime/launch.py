"""Launching a loaded kernel: one struct of arguments, one driver call.

A `Launcher` is bound to a variant, a device, a geometry and the arguments that no call changes. Calling it packs the
others into a buffer that it owns and hands that to the driver on torch's current stream of the device. A lock keeps two
threads from sharing the buffer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitmx.registry.arguments import Arguments, Number
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant
from jitmx.runtime import driver, load, scratch

_PORTABLE_CLUSTER = 8  # blocks that a cluster may have on every chip with clusters

# Absent from torch's CPU build.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Packs the arguments of a call.
_Pack = Callable[..., None]


class Launcher:
    """One kernel with its geometry fixed.

    Args:
        variant: what to launch; compiled and loaded here if need be.
        device: CUDA device number.
        launch: geometry. Where it has a workspace, the field `workspace` is the launcher's own to fill in.
        takes: names of the fields that calls give, in the order of the struct.
        fixed: fields that are the same in every call. Those that are neither taken nor fixed are 0.
    """

    __slots__ = (
        "_arguments", "_config", "_device", "_keep", "_launch", "_lock", "_pack", "_stream", "_workspace", "variant",
    )  # fmt: skip

    def __init__(
        self, variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number]
    ) -> None:
        function = load.function(variant, device)
        if launch.cluster > _PORTABLE_CLUSTER:
            driver.allow_large_clusters(function)
        wanted = [driver.programmatic_dependent_launch()] if getattr(variant.knobs, "pdl", False) else []
        wanted += [driver.cluster_dimension(launch.cluster)] if launch.cluster > 1 else []
        attributes = (driver.LaunchAttribute * max(len(wanted), 1))(*wanted)
        self.variant = variant
        self._config = driver.LaunchConfig(
            launch.blocks, 1, 1, variant.threads, 1, 1, launch.shared_bytes, None, attributes, len(wanted)
        )
        fields = variant.arguments
        self._workspace: tuple[int, int, tuple[Any, ...]] | None = None
        if launch.workspace:
            order = list(fields.fields)
            place = sum(order.index(name) < order.index("workspace") for name in takes)
            kind = (variant.identity, launch.blocks, launch.workspace, *fixed.values())
            self._workspace = place, launch.workspace, kind
            takes = (*takes[:place], "workspace", *takes[place:])
        buffer = driver.aligned_buffer(fields.size)
        self._pack = _packer(fields, buffer, launch, takes, fixed)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._stream = 0
        self._device = device
        self._lock = threading.Lock()
        self._keep = (attributes, parameters)
        # Converted once: what is left for a call is to pack, set the stream and cross into the driver.
        self._launch = driver.library().cuLaunchKernelEx
        converted = ctypes.c_void_p.from_param(function)
        self._arguments = ctypes.byref(self._config), converted, ctypes.byref(parameters), None

    def __call__(self, *values: Number) -> None:
        """Launch on torch's current stream of the device, with the values of `takes`. Nothing is waited for.

        Raises:
            DriverError: the driver refused the launch.
        """
        device = self._device
        if _current_device() != device:
            with torch.cuda.device(device):
                self(*values)
            return
        stream = _raw_stream(device)
        if self._workspace is not None:
            place, size, kind = self._workspace
            memory = scratch.memory(size, kind, device, stream)
            values = (*values[:place], memory.data_ptr(), *values[place:])
        self._lock.acquire()  # `with` takes twice the time
        try:
            self._pack(*values)
            if stream != self._stream:
                self._config.stream = self._stream = stream
            code = self._launch(*self._arguments)
            if code == driver.INVALID_CONTEXT:
                driver.bind_primary_context(device)
                code = self._launch(*self._arguments)
        finally:
            self._lock.release()
        if code:
            driver.check(code, f"launching {self.variant.name}")


def _packer(
    fields: Arguments, buffer: ctypes.Array[ctypes.c_char], launch: Launch, takes: Sequence[str],
    fixed: Mapping[str, Number],
) -> _Pack:  # fmt: skip
    """A function that writes what is taken, over what is fixed and written here."""
    for name, value in fixed.items():
        start, layout = fields.format([name])
        struct.pack_into(layout, buffer, start, value)
    runs = _runs(fields, takes, fixed)
    parts = []
    for names in runs:
        start, layout = fields.format(names)
        parts.append(functools.partial(struct.Struct(layout).pack_into, buffer, start))
    pack = parts[0] if len(parts) == 1 else _in_parts(parts, [len(names) for names in runs])
    return _with_maps(fields, buffer, launch, takes, fixed, pack) if fields.maps else pack


def _runs(fields: Arguments, takes: Sequence[str], fixed: Mapping[str, Number]) -> list[list[str]]:
    """What is taken in runs that nothing fixed lies between, so that each is packed at once."""
    order = list(fields.fields)
    runs: list[list[str]] = []
    for name in takes:
        between = order[order.index(runs[-1][-1]) : order.index(name)] if runs else []
        if not runs or any(fixed.get(other) for other in between):
            runs.append([])
        runs[-1].append(name)
    return runs


def _in_parts(parts: Sequence[_Pack], counts: Sequence[int]) -> _Pack:
    """Packers of some values each, as one."""
    bounds = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))

    def pack(*values: Number) -> None:
        for part, (first, end) in zip(parts, bounds, strict=True):
            part(*values[first:end])

    return pack


def _with_maps(
    fields: Arguments, buffer: ctypes.Array[ctypes.c_char], launch: Launch, takes: Sequence[str],
    fixed: Mapping[str, Number], pack: _Pack,
) -> _Pack:  # fmt: skip
    """A packer that also has each tensor map show what it is of, wherever a call has that."""
    shown = [0] * len(fields.maps)
    moving = []
    for index, field in enumerate(fields.maps):
        place = driver.encode_tensor_map(buffer, fields.offsets[field.name], launch.maps[field.name])
        if field.of in takes:
            moving.append((index, takes.index(field.of), place))
        else:
            driver.move_tensor_map(place, int(fixed[field.of]))

    def with_maps(*values: Number) -> None:
        for index, taken, place in moving:
            address = values[taken]
            if address != shown[index]:
                driver.move_tensor_map(place, int(address))
                shown[index] = int(address)
        pack(*values)

    return with_maps
