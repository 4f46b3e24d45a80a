"""Fixtures that run operators whole on the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jitmx import settings
from kept_ptx import kept_ptx
from simulated_card import Simulated, on_cpu


@pytest.fixture(scope="module", autouse=True)
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from kept_ptx(tmp_path_factory)


@pytest.fixture(params=["sm_121a"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    """The card; `torch` believes that tensors in host memory lie on it."""
    settings.reload()
    with on_cpu(request.param) as found:
        yield found
        monkeypatch.undo()  # what a test put over the card goes before it does
    settings.reload()
