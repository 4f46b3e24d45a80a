"""Where NVIDIA's wheels put their files: the compiler, the CUDA headers and the disassembler.

All of them unpack into one namespace package, `nvidia/cu13/`, which may be spread over several entries of `sys.path`.
Environment variables such as CUDA_HOME and PATH have no say: two machines with the same wheels build the same code.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from jitmx.errors import ToolchainError

# CuPy's wheel for CUDA 13 links to these; another CUDA major is another build of CuPy.
CUDA = "cu13"
NVRTC = "libnvrtc.so.13"


@functools.cache
def roots() -> tuple[Path, ...]:
    """Every `nvidia/cu13` of this Python, in the order of `sys.path`; empty where no wheel is installed."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec.submodule_search_locations or []) if spec else []
    return tuple(root for location in locations if (root := Path(location) / CUDA).is_dir())


def find(relative: str, *, wheel: str, purpose: str) -> Path:
    """The file or directory `relative` (such as `bin/nvdisasm`) of an installed wheel.

    Args:
        wheel: the package that ships it, for the error.
        purpose: what jitmx needs it for, for the error.

    Raises:
        ToolchainError: no installed wheel has it.
    """
    for root in roots():
        if (root / relative).exists():
            return root / relative
    looked = ", ".join(map(str, roots())) or f"no nvidia/{CUDA} directory on sys.path"
    raise ToolchainError(
        f"{Path(relative).name} is missing, which jitmx needs {purpose} (looked in: {looked})", f"pip install {wheel}"
    )
