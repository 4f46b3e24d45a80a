"""Orders in which the simulator runs a launch, for tests of what must not depend on it, and faults that show in one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import evidence
from jitmx.registry.key import frame
from jitmx.registry.spec import Variant
from jitmx.sim import machine
from jitmx.sim import verify as verifying


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[None]]:
    """Three orders in which the machine takes groups of lanes: the lowest place first, as usual, the highest, any."""

    def each() -> Iterator[None]:
        generator = random.Random(0)
        for order in (min, max, lambda groups, **_: generator.choice(sorted(groups))):
            monkeypatch.setattr(machine, "min", order, raising=False)
            yield

    return each


@pytest.fixture
def caught(
    orders: Callable[[], Iterator[None]], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[Variant, str], bool]:
    """Whether the cases of a variant fail with this source, which has a fault in it, or evidence says that they did.

    What is read too early may be there by luck: in one order of blocks and warps, and not in another.
    """

    def ask(variant: Variant, text: str) -> bool:
        made = evidence.made_from(variant, text)
        proof = frame([("fault in any order", made.encode()), ("asks", Path(__file__).read_bytes())])
        if not evidence.anew and evidence.kept().proven(proof):
            return True
        monkeypatch.setattr(verifying, "render", lambda one: text)
        found = any(not verifying.verify(variant).passed for _ in orders())
        if found:
            evidence.note(variant, "compiled", text, note=f"caught: {request.node.name}", proof=proof)
        return found

    return ask
