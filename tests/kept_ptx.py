"""PTX that one process of a run has compiled, kept for the others: kernels of operators are the same in many tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jitmx.registry.key import frame
from jitmx.toolchain import headers, library, nvrtc


def kept_ptx(factory: pytest.TempPathFactory) -> Iterator[None]:
    """The body of a fixture: the folder is $KEPT_PTX, or lies beside the temporary folders of all workers."""
    base = factory.getbasetemp()
    beside = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEPT_PTX", os.environ.get("KEPT_PTX", str(beside / "ptx")))  # for processes of tests, too
        with keeping():
            yield


def inputs(source: str, options: Sequence[str]) -> list[tuple[str, bytes]]:
    """All that a compile is made from but its compiler, named; of headers more than it includes, rather than fewer."""
    pool = headers.pool()
    included = [(name, pool.digest(name).encode()) for name in pool.closure(source)]
    return [("source", source.encode()), *(("option", option.encode()) for option in options), *included]


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """`nvrtc.compile_ptx` takes what any process of this run compiled of the same source, headers and options."""
    folder = Path(os.environ["KEPT_PTX"])
    folder.mkdir(exist_ok=True)
    path = library.locate()
    compiler = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode()
    really = nvrtc.compile_ptx

    def compile_ptx(source: str, options: Sequence[str]) -> str:
        kept = folder / frame([("compiler", compiler), *inputs(source, options)])
        if kept.is_file():
            return kept.read_text()
        ptx = really(source, options)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.write_text(ptx)
        scratch.replace(kept)
        return ptx

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compile_ptx", compile_ptx)
        yield
