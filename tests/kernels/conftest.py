"""A cache of these tests' own, so that nothing compiled before is found and no setting of the caller's counts.

All processes of a run share it: many tests hold the same machine code to its contract, and a record says how it did.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitmx import settings
from jitmx.toolchain import nvrtc
from kept_ptx import kept_ptx


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    directory.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)}:
            patch.delenv(name, raising=False)
        patch.setenv("JITMX_CACHE_DIR", str(directory))
        settings.reload()
        nvrtc.identity.cache_clear()
        yield
    settings.current.cache_clear()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of one test."""
    with monkeypatch.context() as patch:
        patch.setenv("JITMX_CACHE_DIR", str(tmp_path))
        settings.reload()
        yield
    settings.reload()


@pytest.fixture(scope="module", autouse=True)
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from kept_ptx(tmp_path_factory)
