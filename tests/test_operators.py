"""`jitmx.operators` defines what torch knows of jitmx by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jitmx

# Each half in a process of its own, forked from one that has imported torch and nothing of jitmx.
_HALVES = """
import json, os, sys, torch
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        assert not any(name.partition(".")[0] == "jitmx" for name in sys.modules)
        exec(code)
        names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("jitmx::")]
        print(json.dumps(sorted(names)), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, code
"""
_EVERY_MODULE = """
import importlib, pkgutil, jitmx.ops
for module in pkgutil.walk_packages(jitmx.ops.__path__, "jitmx.ops."):
    importlib.import_module(module.name)
"""


def test_importing_operators_defines_every_operator_of_the_package() -> None:
    command = [sys.executable, "-c", _HALVES, "import jitmx.operators", _EVERY_MODULE]
    root = Path(jitmx.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found, every = map(json.loads, done.stdout.splitlines())
    assert {"jitmx::linear", "jitmx::linear_out", "jitmx::linear_argmax", "jitmx::moe", "jitmx::route"} <= set(found)
    assert found == every
