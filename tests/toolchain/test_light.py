"""Importing the toolchain is cheap: what it drives is loaded when it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_importing_the_toolchain_imports_no_cupy_torch_or_numpy(python: Callable[..., str]) -> None:
    code = """
        import sys
        from jitmx.toolchain import cubin, diagnostics, elf, headers, library, nvrtc, wheels, worker, workers
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
