"""Launching a loaded kernel: one struct of arguments, one driver call.

A `Launcher` is bound to a variant, a device and a launch geometry. Calling it packs the arguments into a buffer that it
owns and hands that to the driver on the given stream. A lock keeps two threads from sharing the buffer.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable

from jitmx.registry.matrix import BYTES, MatrixMap, room
from jitmx.registry.spec import Variant
from jitmx.runtime import driver, load

_PORTABLE_CLUSTER = 8  # blocks that a cluster may have on every chip with clusters


class Launcher:
    """One kernel with its geometry fixed.

    Args:
        variant: what to launch; compiled and loaded here if need be.
        device: CUDA device number.
        blocks: blocks of the grid.
        shared_bytes: dynamic shared memory a block, bytes.
        layout: `struct` format of what calls give of the kernel's argument struct, native alignment ("@PPPiii"); pad
            bytes ("8x") are fields that are zero in every call.
        pdl: launch with programmatic stream serialization.
        cluster: blocks a cluster.
        matrix: what a tensor map before the struct says of the matrix at the first argument, where the kernel has one.
        rest: the struct's bytes behind `layout`, the same in every call: they are packed once.
    """

    __slots__ = (
        "_arguments",
        "_config",
        "_device",
        "_keep",
        "_launch",
        "_lock",
        "_map",
        "_mapped",
        "_pack",
        "_pack_struct",
        "_stream",
        "variant",
    )

    def __init__(
        self,
        variant: Variant,
        device: int,
        *,
        blocks: int,
        shared_bytes: int,
        layout: str,
        pdl: bool,
        cluster: int = 1,
        matrix: MatrixMap | None = None,
        rest: bytes = b"",
    ) -> None:
        function = load.function(variant, device)
        if cluster > _PORTABLE_CLUSTER:
            driver.allow_large_clusters(function)
        wanted = [driver.programmatic_dependent_launch()] if pdl else []
        wanted += [driver.cluster_dimension(cluster)] if cluster > 1 else []
        attributes = (driver.LaunchAttribute * max(len(wanted), 1))(*wanted)
        self.variant = variant
        self._config = driver.LaunchConfig(
            blocks,
            1,
            1,
            variant.spec.threads(variant.knobs),
            1,
            1,
            shared_bytes,
            None,
            attributes,
            len(wanted),
        )
        packer = struct.Struct(layout)
        size, start = packer.size + len(rest), 0 if matrix is None else BYTES
        if matrix is None:
            buffer: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(size)
        else:
            buffer = driver.aligned_buffer(BYTES + room(size))
            self._map, self._mapped = driver.encode_matrix(buffer, matrix), 0
        struct.pack_into(f"{len(rest)}s", buffer, start + packer.size, rest)
        self._pack_struct = functools.partial(packer.pack_into, buffer, start)
        self._pack: Callable[..., None] = self._pack_struct if matrix is None else self._pack_mapped
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._stream = 0
        self._device = device
        self._lock = threading.Lock()
        self._keep = (attributes, parameters)
        # Converted once: what is left for a call is to pack, set the stream and cross into the driver.
        self._launch = driver.library().cuLaunchKernelEx
        converted = ctypes.c_void_p.from_param(function)
        self._arguments = ctypes.byref(self._config), converted, ctypes.byref(parameters), None

    def __call__(self, stream: int, *arguments: int | float) -> None:
        """Launch on the CUstream `stream` with the struct's fields in order. Nothing is waited for.

        Raises:
            DriverError: the driver refused the launch.
        """
        self._lock.acquire()  # `with` takes twice the time
        try:
            self._pack(*arguments)
            if stream != self._stream:
                self._config.stream = self._stream = stream
            code = self._launch(*self._arguments)
            if code == driver.INVALID_CONTEXT:
                driver.bind_primary_context(self._device)
                code = self._launch(*self._arguments)
        finally:
            self._lock.release()
        if code:
            driver.check(code, f"launching {self.variant.name}")

    def _pack_mapped(self, first: int, *rest: int | float) -> None:
        """Pack arguments behind the tensor map, and have it show the matrix at the first of them."""
        if first != self._mapped:
            driver.move_matrix(self._map, first)
            self._mapped = first
        self._pack_struct(first, *rest)
