"""Caches that know NVRTC by its digest, as one does whose second command it is: taking it takes half a second."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jitmx import settings
from jitmx.toolchain import nvrtc


def remember(factory: pytest.TempPathFactory, cache: Path) -> None:
    """Make the directory of a cache, with what any process of this run has found NVRTC to be."""
    base = factory.getbasetemp()
    memo = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "known" / "toolchain.json"
    if not memo.exists():
        memo.parent.mkdir(mode=0o700, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JITMX_CACHE_DIR", str(memo.parent))
            settings.reload()
            nvrtc.identity.cache_clear()
            nvrtc.identity()
        settings.reload()
    cache.mkdir(mode=0o700)
    shutil.copy(memo, cache)
