"""Kernels that several of these tests simulate are compiled to PTX once a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kept_ptx import kept_ptx


@pytest.fixture(scope="module", autouse=True)
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from kept_ptx(tmp_path_factory)
