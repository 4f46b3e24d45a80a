"""Default kernels with the oldest NVRTC that jitmx promises to work with.

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

import pytest

import evidence
import jitmx
from contracts import some
from jitmx import arch
from jitmx.cli.targets import default_variants
from jitmx.registry.spec import Variant
from jitmx.toolchain import library, wheels

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
        [sys.executable, *command], env=kept | own, cwd=folder, capture_output=True, text=True, timeout=1000
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


# Builds kernels of a target by name, and says how many there are and of those that break their contract why.
BUILD = """
import json, sys
from jitmx import arch, batch
from jitmx.cli.targets import default_variants
from jitmx.errors import ContractError
named = {*sys.argv[2:]}
asked = [one for one in default_variants((arch.parse(sys.argv[1]),), ()) if one.name in named]
failed = [result for result in batch.build_all(asked) if isinstance(result, batch.Failed)]
for result in failed:
    if not isinstance(result.error, ContractError):
        raise result.error
print(json.dumps([len(asked), {result.variant.name: str(result.error) for result in failed}]))
"""


@pytest.mark.parametrize("target", _FALLS_SHORT)
def test_default_kernels_compile_and_meet_their_contracts(target: str, nightly: bool, tmp_path: Path) -> None:
    """Every kernel's first variant, and of the others some, in the nightly run all.

    What evidence says of that NVRTC is not compiled again, but for one kernel, which shows that jitmx works with it.
    """
    each: dict[tuple[str, str], list[Variant]] = {}
    for variant in default_variants((arch.parse(target),), ()):
        each.setdefault((variant.spec.family, variant.spec.name), []).append(variant)
    known = _FALLS_SHORT[target]
    taken = {one.name: one for several in each.values() for one in some(several, nightly, every=4)}
    assert len(taken) > 40
    (library_of_it,) = Path(str(_OLDEST)).rglob(wheels.NVRTC)
    compiler = library.digest(library.parts(library_of_it.resolve()))
    proofs = {name: evidence.keeps(one, compiler=compiler) for name, one in taken.items()}
    left = {name for name, proof in proofs.items() if evidence.anew or not evidence.kept().proven(proof)}
    names = left | {next(name for name in taken if name.startswith("quantize.")), *known}
    done = run(tmp_path, "-c", BUILD, target, *names)
    assert done.returncode == 0, done.stderr
    count, failed = json.loads(done.stdout)
    assert count == len(names) and set(failed) == set(known), failed
    assert all(said in failed[name] for name, said in known.items())
    for name in left - {*known}:
        evidence.note(taken[name], "compiled", note="by the oldest NVRTC", proof=proofs[name])
