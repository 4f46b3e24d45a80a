"""Launching a loaded kernel: one struct of arguments, one driver call.

A `Launcher` is bound to a variant, a device, a geometry and the arguments that no call changes. Calling it packs the
others into a buffer that it owns and hands that to the driver on torch's current stream of the device. No other thread
has the buffer meanwhile: one that comes then is given another.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
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


class _Room:
    """Memory of one launch at a time, filled in but for what calls give.

    Attributes:
        pack: writes that.
        config: of the driver, with the stream in it.
        stream: which that is.
        arguments: of the driver's function, converted: what is left for a call is to cross into the driver.
    """

    __slots__ = "_keep", "arguments", "config", "pack", "stream"

    def __init__(
        self, function: int, variant: Variant, launch: Launch, dependent: bool, takes: Sequence[str],
        fixed: Mapping[str, Number],
    ) -> None:  # fmt: skip
        early = dependent and getattr(variant.knobs, "pdl", False)
        wanted = [driver.programmatic_dependent_launch()] if early else []
        wanted += [driver.cluster_dimension(launch.cluster)] if launch.cluster > 1 else []
        attributes = (driver.LaunchAttribute * max(len(wanted), 1))(*wanted)
        self.config = driver.LaunchConfig(
            launch.blocks, 1, 1, variant.threads, 1, 1, launch.shared_bytes, None, attributes, len(wanted)
        )
        buffer = driver.aligned_buffer(variant.arguments.size)
        self.pack = _packer(variant.arguments, buffer, launch, takes, fixed)
        self.stream = 0
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._keep = attributes, parameters, buffer
        converted = ctypes.c_void_p.from_param(function)
        self.arguments = ctypes.byref(self.config), converted, ctypes.byref(parameters), None


class Launcher:
    """One kernel with its geometry fixed.

    Args:
        variant: what to launch; compiled and loaded here if need be.
        device: CUDA device number.
        launch: geometry. Where it has a workspace, the field `workspace` is the launcher's own to fill in.
        takes: names of the fields that calls give, in the order of the struct.
        fixed: fields that are the same in every call. Those that are neither taken nor fixed are 0.
        dependent: whether it may begin while the launch before it is at work, where its kernel can (`pdl`).
    """

    __slots__ = "_device", "_free", "_launch", "_room", "_workspace", "variant"

    def __init__(
        self, variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
        dependent: bool = True,
    ) -> None:  # fmt: skip
        function = load.function(variant, device)
        if launch.cluster > _PORTABLE_CLUSTER:
            driver.allow_large_clusters(function)
        self.variant, self._device = variant, device
        self._workspace: tuple[int, int, tuple[Any, ...]] | None = None
        if launch.workspace:
            order = list(variant.arguments.fields)
            place = sum(order.index(name) < order.index("workspace") for name in takes)
            numbers = (value for name, value in fixed.items() if variant.arguments.fields[name].letter != "P")
            kind = (variant.identity, launch.blocks, launch.workspace, *numbers)
            self._workspace = place, launch.workspace, kind
            takes = (*takes[:place], "workspace", *takes[place:])
        self._launch = driver.library().cuLaunchKernelEx
        self._room = functools.partial(_Room, function, variant, launch, dependent, takes, fixed)
        self._free = [self._room()]

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
        try:  # a lock takes twice the time
            room = self._free.pop()
        except IndexError:  # other threads are launching
            room = self._room()
        try:
            if values:
                room.pack(*values)
            if stream != room.stream:
                room.config.stream = room.stream = stream
            code = self._launch(*room.arguments)
            if code == driver.INVALID_CONTEXT:
                driver.bind_primary_context(device)
                code = self._launch(*room.arguments)
        finally:
            self._free.append(room)
        if code:
            driver.check(code, f"launching {self.variant.name}")

    def repeated(self) -> Callable[[], None]:
        """`__call__` of a launcher that takes nothing and has no workspace, in half the time on the stream that is
        current now: of what it hands to the driver nothing is ever written, so that threads share it."""
        device = self._device
        stream = _raw_stream(device) if _current_device() == device else 0
        room, launch = self._room(), self._launch
        room.config.stream = stream

        def run() -> None:
            # By way of the room, which is kept by that: what the driver is handed points into it, as Python cannot see.
            if _current_device() != device or _raw_stream(device) != stream or launch(*room.arguments):
                self()  # elsewhere, or refused, of which it says why

        return run


def bound(
    variant: Variant, device: int, launch: Launch, takes: Sequence[str], fixed: Mapping[str, Number], *,
    dependent: bool = True,
) -> Callable[..., None]:  # fmt: skip
    """A function that launches as a `Launcher` of these arguments does."""
    launcher = Launcher(variant, device, launch, takes, fixed, dependent=dependent)
    return launcher.__call__ if takes or launch.workspace else launcher.repeated()


def _packer(
    fields: Arguments, buffer: ctypes.Array[ctypes.c_char], launch: Launch, takes: Sequence[str],
    fixed: Mapping[str, Number],
) -> _Pack:  # fmt: skip
    """A function that writes what is taken, over what is fixed and written here."""
    if fixed:
        names = [name for name in fields.fields if name in fixed]
        start, layout = fields.format(names)
        struct.pack_into(layout, buffer, start, *(fixed[name] for name in names))
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
