"""The process that compiles. It has an environment of its own, so that no variable of the caller's reaches NVRTC.

NVRTC reads variables that its manual does not name, and some change the machine code. This process is started with
none of them by `jitmx.toolchain.workers`, which asks over a socket that the worker has as its standard input. It ends
with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jitmx.errors import ToolchainError
from jitmx.toolchain import library

# It ends up in the machine code, so it must not change from compile to compile.
PROGRAM = "jitmx.cu"


@dataclass(frozen=True)
class Outcome:
    """What a compile gave.

    Attributes:
        status: what NVRTC calls its failure; empty where it succeeded.
        log: what it printed.
        milliseconds: wall time within NVRTC.
        output: the output that was asked for, whole; empty where it failed or none was asked for.
        signature: of the library's files, as they were loaded (`library.signature`).
    """

    status: str
    log: str
    milliseconds: float
    output: bytes
    signature: list[list[int]]


class Compiler:
    """NVRTC as the library at `path`, called through CuPy's binding.

    Raises:
        ToolchainError: it does not load.
    """

    def __init__(self, path: Path) -> None:
        before = library.signature(library.parts(path))
        self._native = library.load(path)
        self._signature = library.signature(library.parts(path))
        if before != self._signature:
            raise ToolchainError(f"{path} was replaced on disk while it was loaded", "try again")
        self._binding = _bind(path)

    def describe(self) -> dict[str, Any]:
        """What the library says of itself: `version` ("13.5") and `targets` (compute capabilities, 121 for 12.1)."""
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._native.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self._native.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        targets = (ctypes.c_int * count.value)()
        self._native.nvrtcGetSupportedArchs(targets)
        return {"version": f"{major.value}.{minor.value}", "targets": list(targets)}

    def compile(self, source: str, headers: dict[str, bytes], options: tuple[str, ...], output: str) -> Outcome:
        """Compile `source` with these headers; `output` is "CUBIN", "PTX" or empty for a check of the syntax."""
        names = [name.encode() for name in headers]
        handle = self._binding.createProgram(source, PROGRAM, list(headers.values()), names)
        try:
            status, started = "", time.perf_counter()
            try:
                self._binding.compileProgram(handle, options)
            except self._binding.NVRTCError as error:
                status = str(error)
            milliseconds = (time.perf_counter() - started) * 1e3
            log = self._fetch(handle, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            made = self._fetch(handle, output) if output and not status else b""
            return Outcome(status, log, milliseconds, made, self._signature)
        finally:
            self._binding.destroyProgram(handle)

    def _fetch(self, handle: int, what: str) -> bytes:
        """The whole of one output of a program: CuPy's getCUBIN takes the last byte for a terminator and drops it."""
        native, program, size = self._native, ctypes.c_void_p(handle), ctypes.c_size_t()
        status = getattr(native, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if status == 0 and size.value:
            status = getattr(native, f"nvrtcGet{what}")(program, buffer)
        if status != 0:
            native.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise ToolchainError(f"NVRTC does not give its {what}: {native.nvrtcGetErrorString(status).decode()}")
        return buffer.raw


def _bind(path: Path) -> Any:
    """CuPy's NVRTC binding over the library at `path`, which is loaded."""
    try:
        from cuda import pathfinder
        from cupy_backends.cuda.libs import nvrtc

        with _bare("cupy", "_environment"):
            nvrtc.getVersion()
        bound = Path(str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path))
    except Exception as error:
        raise ToolchainError(
            f"CuPy's NVRTC binding cannot be used: {type(error).__name__}: {error}", "pip install -U cupy-cuda13x"
        ) from error
    if not bound.samefile(path):
        raise ToolchainError(
            f"CuPy binds {bound} in the place of {path}", "pip install -U cupy-cuda13x cuda-pathfinder"
        )
    return nvrtc


@contextlib.contextmanager
def _bare(package: str, module: str) -> Iterator[None]:
    """Let a module of a package be found without the package itself.

    CuPy's binding asks `cupy._environment` where CUDA lies; the whole of CuPy would take longer than most kernels do.
    """
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None or spec.submodule_search_locations is None:
        yield
        return
    bare = sys.modules[package] = ModuleType(package)
    bare.__path__ = spec.submodule_search_locations
    try:
        importlib.import_module(f"{package}.{module}")
        yield
    finally:
        del sys.modules[package]


def main(path: str) -> None:
    """Answer calls of `Compiler`'s methods until the other side is gone."""
    from multiprocessing.connection import Connection

    compiler = functools.cache(lambda: Compiler(Path(path)))
    pipe = Connection(0)
    try:
        while True:
            name, arguments = pipe.recv()
            try:
                answer = getattr(compiler(), name)(*arguments)
            except ToolchainError as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        os._exit(0)  # at once: nobody waits for what a shutdown would tidy up
