"""Importing the toolchain is cheap: what it drives is loaded when it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmx.toolchain import cupy_cache


def test_importing_the_toolchain_imports_no_cupy_torch_or_numpy(python: Callable[..., str]) -> None:
    code = """
        import sys
        from jitmx.toolchain import cubin, cupy_cache, diagnostics, elf, headers, library, nvrtc, wheels
        heavy = ("cupy", "cupy_backends", "torch", "numpy", "jinja2", "ml_dtypes", "cuda")
        print([name for name in sys.modules if name.split(".")[0] in heavy])
        print("libnvrtc" in open("/proc/self/maps").read())
    """
    assert python(code).split("\n") == ["[]", "False"]


def test_a_cubin_is_read_without_nvrtc(python: Callable[..., str], tmp_path: Path) -> None:
    code = """
        import sys
        from jitmx.toolchain import cubin
        try:
            cubin.read(b"")
        except RuntimeError as error:
            print(error, "jitmx.toolchain.nvrtc" in sys.modules)
    """
    assert python(code).endswith("False")


def test_cupy_keeps_its_own_directory_where_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    cupy_cache.ensure()
    assert "CUPY_CACHE_DIR" not in os.environ
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "mine"))
    cupy_cache.ensure()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "mine")


def test_cupy_gets_a_private_directory_where_its_own_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/nowhere/cache")
    cupy_cache.ensure()
    chosen = Path(os.environ["CUPY_CACHE_DIR"])
    assert chosen.is_dir()
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert chosen.parent == tmp_path


def test_cupy_can_be_imported_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/nowhere/cache")
    monkeypatch.setattr("tempfile.mkdtemp", full)
    cupy_cache.ensure()
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()
