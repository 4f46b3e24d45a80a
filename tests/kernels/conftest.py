"""A cache of these tests' own, so that nothing compiled before is found and no setting of the caller's counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jitmx import settings
from jitmx.toolchain import nvrtc
from kept_ptx import kept_ptx


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("cache")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name in {name for setting in settings.TABLE for name in (setting.name, *setting.aliases)}:
            patch.delenv(name, raising=False)
        patch.setenv("JITMX_CACHE_DIR", str(directory))
        settings.reload()
        nvrtc.identity.cache_clear()
        yield
    settings.current.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from kept_ptx(tmp_path_factory)
