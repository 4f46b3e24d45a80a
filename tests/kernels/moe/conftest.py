"""Orders in which the simulator runs a launch, for tests of what must not depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from jitmx.sim import machine


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[None]]:
    """Three orders in which the machine takes groups of lanes: the lowest place first, as usual, the highest, any."""

    def each() -> Iterator[None]:
        generator = random.Random(0)
        for order in (min, max, lambda groups: generator.choice(sorted(groups))):
            monkeypatch.setattr(machine, "min", order, raising=False)
            yield

    return each
