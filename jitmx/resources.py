"""Where templates and tuning tables lie: beside the package in a checkout, inside it in a wheel.

Families of others lie in folders that JITMX_FAMILIES names, laid out as a checkout is: `kernels/<family>.py` or a
package, `templates/<family>/`, and where there are any `tactics/<arch>/<family>.json`, `ops/`, `bench/` and `costs/`.
Modules of theirs are those of `jitmx.kernels`, `jitmx.ops`, `jitmx.bench` and `jitmx.costs`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitmx.errors import ToolchainError

_PACKAGE = Path(__file__).resolve().parent


@functools.cache
def release() -> str:
    """The release of jitmx that runs, or "unknown" where it was not installed."""
    from importlib import metadata

    try:
        return metadata.version("jitmx")
    except metadata.PackageNotFoundError:
        return "unknown"


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


def directories(name: str, folders: Sequence[Path]) -> tuple[Path, ...]:
    """The directory `name` of this installation, and behind it those of folders with further families."""
    return directory(name), *(folder / name for folder in folders if (folder / name).is_dir())


def extended(path: Iterable[str], name: str, folders: Sequence[Path]) -> list[str]:
    """The search path of a package, with the modules of further families at its end."""
    return [*path, *(str(folder / name) for folder in folders if (folder / name).is_dir())]


def families(kernels: Path = _PACKAGE / "kernels", templates: Path | None = None) -> tuple[str, ...]:
    """Names of the families in a folder of kernels, found without importing them: those that have templates.

    Args:
        templates: their folder; by default that of this installation.
    """
    try:
        templates = templates or directory("templates")
    except ToolchainError:
        return ()
    stems = {path.stem for path in kernels.glob("*") if path.is_dir() or path.suffix == ".py"}
    return tuple(sorted(name for name in stems if (templates / name).is_dir()))


def hidden(folder: Path) -> Path | None:
    """A module of a folder with further families that nothing could import: jitmx has one of its name."""
    for name in ("kernels", "ops", "bench"):
        own = {path.stem for path in (_PACKAGE / name).glob("*")}
        for path in sorted((folder / name).glob("*")):
            if path.stem in own and not path.name.startswith("__"):
                return path
    return None
