"""Orders of memory operations as PTX spells them: strength, scope, acquire and release.

The order of an instruction travels as text, such as "acquire.gpu"; "" is weak, "nc" weak where no one writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

WEAK, CTA, CLUSTER, GPU = range(4)
# There is one device, so that no thread of a system is outside of it.
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU, "gl": GPU}
SEMANTICS = ("relaxed", "acquire", "release", "acq_rel", "sc")
VOLATILE = ("volatile", "mmio")  # relaxed, of the system
PARTS = frozenset((*SCOPES, *SEMANTICS, *VOLATILE))


@dataclass(frozen=True)
class Order:
    """What an operation orders: `scope` is WEAK where it is not strong."""

    scope: int
    acquire: bool
    release: bool
    sequential: bool


def spelled(parts: Iterable[str], default: str = "", scope: str = "gpu") -> str:
    """The order that an opcode's parts name.

    Args:
        default: its semantics where it names none; "" is weak.
        scope: its scope where it names none.
    """
    named = set(parts)
    if named & set(VOLATILE):
        return "relaxed.sys"
    semantics = next((name for name in SEMANTICS if name in named), default)
    return f"{semantics}.{next((name for name in SCOPES if name in named), scope)}" if semantics else ""


@functools.cache
def parse(text: str) -> Order:
    """The order that `spelled` gave as text."""
    semantics, _, scope = text.partition(".")
    acquire, release = semantics in ("acquire", "acq_rel", "sc"), semantics in ("release", "acq_rel", "sc")
    return Order(SCOPES.get(scope, WEAK), acquire, release, semantics == "sc")
