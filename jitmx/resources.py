"""Where templates and tuning tables lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import functools
from pathlib import Path

from jitmx.errors import ToolchainError

_PACKAGE = Path(__file__).resolve().parent


@functools.cache
def directory(name: str) -> Path:
    """The directory `name` ("templates" or "tactics") of this installation.

    Raises:
        ToolchainError: the installation is incomplete.
    """
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise ToolchainError(f"jitmx's {name}/ is missing from {_PACKAGE}", "reinstall jitmx")
