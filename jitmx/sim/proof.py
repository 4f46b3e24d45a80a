"""What a verdict of the simulator rests on, as a digest: while it stays the same, so does the verdict.

It covers the PTX but for its `.target`, which the simulator does not look at; every input of every case, and which of
them share a workspace, stay as they are or are used before a launch waits for the one before; and the code
that makes and judges them: the simulator's own, and the modules that the kernel's cases import. Comments, docstrings
and blanks of that code do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jitmx import kernels
from jitmx.registry.arguments import Arguments
from jitmx.registry.case import Buffer, Case
from jitmx.registry.key import frame
from jitmx.registry.spec import Variant

_PACKAGE = Path(__file__).parents[1]
_TARGET = re.compile(r"^\.target .*$", re.MULTILINE)
# What finds families, code and files, chooses among kernels, knows models and settings, words errors, or looks at
# machine code: a verdict is given of PTX and inputs that are there.
_LOOKS_UP = (
    "jitmx.errors",
    "jitmx.kernels",
    "jitmx.kernels.benchmark",
    "jitmx.kernels.kernel",
    "jitmx.kernels.tuning",
    "jitmx.layers",
    "jitmx.models",
    "jitmx.quoting",
    "jitmx.registry.contract",
    "jitmx.resources",
    "jitmx.setting_text",
    "jitmx.settings",
    "jitmx.toolchain.nvrtc",
)
# What judges a case, beside the simulator's own modules.
_JUDGES = ("jitmx.registry.case", "jitmx.registry.arguments", "jitmx.registry.tensor_map", "jitmx.formats")


def proof(variant: Variant, ptx: str, cases: Iterable[Case]) -> str:
    """SHA-256 over all that decides what the simulator finds of `variant`, compiled to `ptx`, in its `cases`."""
    return frame(
        [
            ("ptx", _TARGET.sub("", ptx).encode()),
            ("knobs", repr(sorted(variant.knobs.as_dict().items())).encode()),
            ("simulator", _code(tuple(sorted(f"jitmx.sim.{path.stem}" for path in (_PACKAGE / "sim").glob("*.py"))))),
            ("judges", _code((_home(kernels.family(variant.spec.family).kernel(variant.spec.name).cases),))),
            *(("case", _inputs(case, variant.arguments)) for case in cases),
        ]
    )


def _home(function: Callable[..., object]) -> str:
    """The module that a function is of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function.__module__


def _inputs(case: Case, arguments: Arguments) -> bytes:
    """A digest of what a case launches."""
    blocks = None if case.blocks is None else list(case.blocks)
    # What `again` makes follows from the case and the family's code.
    made = case.resident, case.fixed, case.again is not None, blocks, arguments.offsets
    hasher = hashlib.sha256(repr((case.name, case.gate, case.launch, *made)).encode())
    for name in arguments.fields:
        item = case.values.get(name)
        if isinstance(item, Buffer):
            data = item.data
            flags = item.output, item.scratch, item.constant, item.early, item.ahead
            hasher.update(repr((name, data.dtype.str, data.shape, flags)).encode())
            if item.at is not None:
                hasher.update(repr(item.size).encode() + item.at.tobytes())
            if not item.output or item.scratch:
                hasher.update(data.tobytes())
        else:
            hasher.update(repr((name, item)).encode())
    return hasher.digest()


@functools.cache
def _code(modules: tuple[str, ...]) -> bytes:
    """A digest of these modules of jitmx and of all that they import."""
    seen: dict[str, Path] = {}
    waiting = [*modules, *_JUDGES]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name not in seen and path is not None and name not in _LOOKS_UP:
            seen[name] = path
            waiting += _imported(path)
    return frame([(name, _meaning(seen[name])) for name in sorted(seen)]).encode()


def _file(name: str) -> Path | None:
    """Where a module of jitmx lies; None for a name within one, and for other packages."""
    first, *rest = name.split(".")
    place = _PACKAGE.joinpath(*rest)
    found = [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
    return found[0] if first == "jitmx" and rest and found else None


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(path: Path) -> list[str]:
    """Names of the modules that a file imports anywhere."""
    found: list[str] = []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Of a package a module that is taken from it, not the package, which may import many more.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if _file(name) else node.module for name in inner]
    return found


@functools.cache
def _meaning(path: Path) -> bytes:
    """The code of a file, without comments, docstrings and places in the text."""
    tree = _parsed(path)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return ast.dump(tree).encode()
