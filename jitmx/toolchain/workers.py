"""The processes that compile, one for each compile under way: started with a clean environment, kept for a while.

A worker serves one thread at a time. It ends when this process does, however that ends, because its socket closes; and
some seconds after the last compile, so that a server keeps no compiler in memory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jitmx
from jitmx.errors import ToolchainError

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from jitmx.toolchain import worker; worker.main(sys.argv[1])"
# All that NVRTC, CuPy and Python get to see. CuPy makes a directory for a cache of its own, but for one that is there.
_ENVIRONMENT = {"LC_ALL": "C", "CUPY_CACHE_DIR": "/"}
# What the dynamic linker exits with where a library of the program's is missing.
_NOT_LINKED = 127
_LINGER = 10.0  # seconds
_REMEDY = "pip install --force-reinstall cupy-cuda13x nvidia-cuda-nvrtc"


class _EndedError(Exception):
    """A worker that ended before it answered; the message says how.

    Attributes:
        status: exit status of the process, negative the number of the signal that ended it.
    """

    def __init__(self, how: str, status: int) -> None:
        super().__init__(how)
        self.status = status


class _Worker:
    """One process, asked by one thread at a time."""

    def __init__(self, library: Path, environment: dict[str, str]) -> None:
        from multiprocessing.connection import Pipe  # only a process that compiles needs it

        self.library = library
        self.idle_since = 0.0
        self._answered = False
        self._errors = os.fdopen(os.memfd_create("jitmx-nvrtc"), "w+b", buffering=0)
        self._pipe, theirs = Pipe()
        # Without the working directory, whose files must not take the place of what the worker imports.
        own = [*map(os.path.abspath, filter(None, sys.path)), str(Path(jitmx.__file__).parents[1])]
        flags = ["-S", "-Xutf8", *(["-B"] if sys.dont_write_bytecode else [])]
        try:
            # As standard input the socket can't clash with a standard descriptor that is closed here. A process group
            # of its own keeps it from a terminal's Ctrl-C, which is for the caller to act on.
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, str(library), *own], cwd="/", env=environment, process_group=0,
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._errors,
            )  # fmt: skip
        except OSError as error:
            self._pipe.close()
            raise ToolchainError(f"no process can be started to compile in ({sys.executable}: {error})") from error
        finally:
            theirs.close()
        _living.add(self)

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What `worker.Compiler`'s method `name` returns or raises.

        Raises:
            _EndedError: the process ended instead.
        """
        try:
            self._pipe.send((name, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise _EndedError(self._end(), self._process.returncode) from None
        except BaseException:
            # An answer that nobody waits for any more must not be taken for that to the next question.
            self._process.kill()
            self._end()
            raise
        self._answered = True
        return answer

    @property
    def unlinked(self) -> bool:
        """Whether it ended because the dynamic linker misses a library of Python's own."""
        return not self._answered and self._process.returncode == _NOT_LINKED

    def _end(self) -> str:
        """Wait for its end, and say how it ended."""
        self._pipe.close()
        status = self._process.wait()
        with self._errors:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 2000))
            said = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return ": ".join([how, *([" / ".join(said)] if said else [])])

    def retire(self) -> None:
        """End it; it is idle."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._errors.close()

    def disown(self) -> None:
        """Let go of it in a forked child, whose parent goes on with it."""
        self._pipe.close()
        self._errors.close()
        self._process.returncode = 0  # it is no child of this process


_living: weakref.WeakSet[_Worker] = weakref.WeakSet()
_idle: list[_Worker] = []
_lock = threading.Lock()
_retiring = False


def call(library: Path, name: str, *arguments: Any) -> Any:
    """What `worker.Compiler(library)`'s method `name` returns for `arguments`, in a process with a clean environment.

    Raises:
        ToolchainError: raised by it, or no process can be had; one that ends is an error too, whatever ended it.
    """
    environment = _ENVIRONMENT
    while True:
        worker = _take(library)
        fresh = worker is None
        worker = worker or _Worker(library, environment)
        try:
            answer = worker.ask(name, arguments)
        except _EndedError as error:
            paths = os.environ.get("LD_LIBRARY_PATH")
            if worker.unlinked and paths and environment is _ENVIRONMENT:
                # A Python that is built to need it. NVRTC itself is loaded by its full name.
                environment = {**environment, "LD_LIBRARY_PATH": paths}
            elif fresh:
                memory = "JITMX_JOBS=1 if memory is short, else " if error.status == -signal.SIGKILL else ""
                raise ToolchainError(f"the process that compiles ended {error}", f"{memory}{_REMEDY}") from None
            continue
        _give_back(worker)
        if isinstance(answer, ToolchainError):
            raise answer
        return answer


def _take(library: Path) -> _Worker | None:
    with _lock:
        for place, worker in enumerate(_idle):
            if worker.library == library:
                return _idle.pop(place)
    return None


def _give_back(worker: _Worker) -> None:
    global _retiring
    worker.idle_since = time.monotonic()
    with _lock:
        _idle.append(worker)
        start, _retiring = not _retiring, True
    if start:
        threading.Thread(target=_retire_idle, name="jitmx-workers", daemon=True).start()


def _retire_idle() -> None:
    """End workers that nobody has asked for a while; the thread ends with the last."""
    global _retiring
    while True:
        time.sleep(_LINGER / 4)
        with _lock:
            old = [worker for worker in _idle if time.monotonic() - worker.idle_since > _LINGER]
            _idle[:] = [worker for worker in _idle if worker not in old]
            done = not _idle
            _retiring = not done
        for worker in old:
            worker.retire()
        if done:
            return


@atexit.register
def _retire_all() -> None:
    with _lock:
        last, _idle[:] = list(_idle), []
    for worker in last:
        worker.retire()


def _forget() -> None:
    """In a forked child: its parent's workers are not its own, and a thread that held the lock does not exist."""
    global _lock, _retiring
    _lock, _retiring = threading.Lock(), False
    _idle.clear()
    for worker in list(_living):
        worker.disown()
    _living.clear()


os.register_at_fork(after_in_child=_forget)
