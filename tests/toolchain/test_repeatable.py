"""The same source gives the same bytes, whoever compiles it, where and when."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import jitmx
from jitmx import arch
from jitmx.toolchain import nvrtc

CHILD = """
    import hashlib, sys
    from jitmx import arch
    from jitmx.toolchain import nvrtc
    source = open({path!r}).read()
    for name in ("sm_90a", "sm_121a"):
        options = nvrtc.options(arch.parse(name))
        nvrtc.scan(source, options)
        print(name, hashlib.sha256(nvrtc.compile(source, options).image).hexdigest())
"""


def _digests(source: str) -> str:
    lines = []
    for name in ("sm_90a", "sm_121a"):
        image = nvrtc.compile(source, nvrtc.options(arch.parse(name))).image
        lines.append(f"{name} {hashlib.sha256(image).hexdigest()}")
    return "\n".join(lines)


def test_code_is_the_same_from_run_to_run(local_symbols: str) -> None:
    first = _digests(local_symbols)
    assert b"_GLOBAL__N_" in nvrtc.compile(local_symbols, nvrtc.options(arch.parse("sm_90a"))).image
    for other in ('extern "C" __global__ void x(int* a) { *a = 3; }', local_symbols.replace("2.f", "3.f")):
        nvrtc.compile(other, nvrtc.options(arch.parse("sm_90a")))
        assert _digests(local_symbols) == first


def test_code_is_the_same_from_process_to_process_and_directory_to_directory(
    local_symbols: str, python: Callable[..., str], tmp_path: Path
) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(local_symbols)
    here = _digests(local_symbols)
    elsewhere = tmp_path / "some where" / "else"
    shutil.copytree(Path(jitmx.__file__).parent, elsewhere / "jitmx", ignore=shutil.ignore_patterns("__pycache__"))
    (elsewhere / "templates").mkdir()
    (elsewhere / "tmp").mkdir()
    code = CHILD.format(path=str(source))
    assert python(code, PYTHONHASHSEED="1") == here
    assert (
        python(
            code,
            cwd=elsewhere,
            package=elsewhere,
            PYTHONHASHSEED="2",
            HOME=str(elsewhere),
            PATH="/nowhere",
            TMPDIR=str(elsewhere / "tmp"),
            USER="someone",
            LC_ALL="C",
            TZ="Asia/Tokyo",
            JITMX_CACHE_DIR=str(elsewhere / "cache"),
        )
        == here
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NVRTC_DISABLE_CONCURRENT_NVVM", "1"), ("NV_NVVM_VERSION", "nvvm70"), ("NV_NVVM_VERSION", "nvvm-latest"),
     ("NV_NVVM_VERSION", "nvvm-next"), ("FINALIZER_USE_LEGACY_ELF_BUILDER", "1"),
     ("FINALIZER_CUBIE", "{folder}/cubie")],
)  # fmt: skip
def test_variables_that_nvrtc_reads_change_no_code_and_write_no_file(
    variable: str, value: str, local_symbols: str, python: Callable[..., str], tmp_path: Path
) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(local_symbols)
    found = python(CHILD.format(path=str(source)), **{variable: value.format(folder=tmp_path)})
    assert found == _digests(local_symbols)
    assert not list(tmp_path.glob("*cubie*"))


_TWICE = """
    from jitmx import arch
    from jitmx.toolchain import nvrtc
    options = nvrtc.options(arch.parse("sm_90a"))
    for _ in range(2):
        print(len(nvrtc.compile('extern "C" __global__ void k(int* a) { *a = 1; }', options).image) > 0)
"""


def test_compiling_leaves_no_file_outside_the_cache(python: Callable[..., str], tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    python(_TWICE, cwd=work, HOME=str(home), TMPDIR=str(work), PYTHONDONTWRITEBYTECODE="1")
    assert [path for path in (*home.rglob("*"), *work.rglob("*")) if not path.is_dir()] == []


@pytest.mark.parametrize("temporary", ["/tmp", "/proc/nowhere"])
def test_compiling_works_without_a_home_to_write_to(python: Callable[..., str], tmp_path: Path, temporary: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    places = {"HOME": "/proc/nowhere", "JITMX_CACHE_DIR": "/proc/nowhere/cache", "TMPDIR": temporary}
    assert python(_TWICE, cwd=work, **places).split() == ["True", "True"]
    assert list(work.iterdir()) == []
