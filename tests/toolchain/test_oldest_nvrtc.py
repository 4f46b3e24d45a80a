"""The default kernels with the oldest NVRTC that jitmx promises to work with.

It is another library than this process has loaded, so that it takes processes of its own. OLDEST_NVRTC is the directory
that `pip install --target` put its wheel into; where it is set, nothing here is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jitmx

_PROJECT = Path(jitmx.__file__).parents[1]
_OLDEST = os.environ.get("OLDEST_NVRTC")

# What it makes less of than its contract says: code that is right, and slower or larger. None may be missing here, or
# listed without need.
_FALLS_SHORT: dict[str, dict[str, str]] = {
    "sm_90a": {},
    "sm_121a": {},
}

pytestmark = pytest.mark.skipif(_OLDEST is None, reason="OLDEST_NVRTC names no directory")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    assert _OLDEST is not None
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JITMX_", "PYTHON"))}
    own = {"PYTHONPATH": f"{Path(_OLDEST).resolve()}:{_PROJECT}", "JITMX_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *command], env=kept | own, cwd=folder, capture_output=True, text=True, timeout=280
    )


def test_the_library_is_of_the_release_that_the_project_promises(tmp_path: Path) -> None:
    with _PROJECT.joinpath("pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    (promised,) = (found[1] for line in wanted if (found := re.fullmatch(r"nvidia-cuda-nvrtc>=([\d.]+)", line)))
    script = "from jitmx.toolchain import nvrtc; found = nvrtc.identity(); print(found.version, found.path)"
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    version, path = done.stdout.split()
    assert version == promised and Path(path).is_relative_to(Path(str(_OLDEST)).resolve())


@pytest.mark.parametrize("target", _FALLS_SHORT)
def test_every_default_kernel_compiles_and_meets_its_contract(target: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "jitmx.cli", "warmup", "--arch", target, "--quiet", "--json")
    assert done.returncode in (0, 1), done.stderr  # 3 where one does not compile
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["arch"] == target and found["compiled"] + found["failed"] == len(found["kernels"]) > 50
    known = _FALLS_SHORT[target]
    breaches = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert {kernel["name"] for kernel in found["kernels"] if kernel["status"] == "failed"} == set(known), done.stderr
    for name, said in known.items():
        assert any(f"{name} for {target} breaks its contract" in line and said in line for line in breaches)
