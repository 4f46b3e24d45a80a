"""CuPy's NVRTC binding, over the library that keys tell of and whatever other NVRTC the process has.

A process may have several: vLLM's libraries bring the CUDA toolkit's beside the wheel's. On first use CuPy asks
cuda.pathfinder which one is loaded, which names the one that came first. Asked from here, it names ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jitmx.errors import ToolchainError
from jitmx.toolchain import cupy_cache, library

_NAME = "nvrtc"  # as cuda.pathfinder knows it


def bind(native: ctypes.CDLL, path: Path) -> Any:
    """CuPy's binding, whose functions are those of `native`, the library at `path`. One call at a time.

    Raises:
        ToolchainError: it cannot be used, or was bound before to a library with other contents.
    """
    cupy_cache.ensure()
    try:
        with _named(native, path) as asked:
            from cupy_backends.cuda.libs import nvrtc

            nvrtc.getVersion()
        bound = path if asked else _bound()
    except Exception as error:
        raise ToolchainError(
            f"CuPy's NVRTC binding cannot be used: {type(error).__name__}: {error}; pip install -U cupy-cuda13x"
        ) from error
    library.require_same(bound, path, "CuPy compiles with it since before jitmx's first compile")
    return nvrtc


@contextmanager
def _named(native: ctypes.CDLL, path: Path) -> Iterator[list[str]]:
    """Have cuda.pathfinder name `native` for NVRTC; yields a list that is empty until it was asked."""
    from cuda import pathfinder

    ask, asked = pathfinder.load_nvidia_dynamic_lib, []

    def name(wanted: str) -> pathfinder.LoadedDL:
        if wanted != _NAME:
            return ask(wanted)
        asked.append(wanted)
        return pathfinder.LoadedDL(str(path), True, native._handle, "was-already-loaded-from-elsewhere")

    pathfinder.load_nvidia_dynamic_lib = name
    try:
        yield asked
    finally:
        pathfinder.load_nvidia_dynamic_lib = ask


def _bound() -> Path:
    """The library that cuda.pathfinder named when CuPy asked; it answers once and for all."""
    from cuda import pathfinder

    return Path(str(pathfinder.load_nvidia_dynamic_lib(_NAME).abs_path))
