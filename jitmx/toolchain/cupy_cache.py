"""CuPy makes a directory for a cache of its own while it is imported, and can't be imported where that fails."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "CUPY_CACHE_DIR"


def ensure() -> None:
    """Let CuPy be imported whatever the state of the disk. Call this before the first `import cupy` of a process.

    Nothing changes where CuPy's directory exists or can be made. Where it can't, because the home directory is
    missing, full or read-only, `CUPY_CACHE_DIR` names a private directory that goes away with the process.
    jitmx keeps no kernels in either.
    """
    path = os.environ.get(_VARIABLE)
    try:
        (Path(path) if path else Path("~/.cupy/kernel_cache").expanduser()).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        os.environ[_VARIABLE] = _temporary()


def _temporary() -> str:
    try:
        directory = tempfile.mkdtemp(prefix="jitmx-cupy-")
    except OSError:
        # It is there and it is no one else's to write, which is all that CuPy's import asks for.
        return "/"
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
