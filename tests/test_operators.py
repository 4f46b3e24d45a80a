"""`jitmx.operators` defines what torch knows of jitmx by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jitmx

_NAMES = """
import json, sys, torch
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("jitmx::")]
json.dump(sorted(names), sys.stdout)
"""
_EVERY_MODULE = """
import importlib, pkgutil, jitmx.ops
for module in pkgutil.walk_packages(jitmx.ops.__path__, "jitmx.ops."):
    importlib.import_module(module.name)
"""


def defined(code: str) -> list[str]:
    """The operators that a process has once it has run `code`."""
    root = Path(jitmx.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code + _NAMES], cwd=root, capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout)
    return names


def test_importing_operators_defines_every_operator_of_the_package() -> None:
    found = defined("import jitmx.operators")
    assert {"jitmx::linear", "jitmx::linear_out", "jitmx::linear_argmax", "jitmx::moe", "jitmx::route"} <= set(found)
    assert found == defined(_EVERY_MODULE)
