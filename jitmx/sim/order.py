"""Orders of memory operations as PTX spells them: strength, scope, acquire and release.

The order of an instruction travels as text, such as "acquire.gpu"; "" is weak, "nc" weak where no one writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WEAK, CTA, CLUSTER, GPU = range(4)
# There is one device, so that no thread of a system is outside of it.
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU, "gl": GPU}
SEMANTICS = ("relaxed", "acquire", "release", "acq_rel", "sc")
VOLATILE = ("volatile", "mmio")  # relaxed, of the system
PARTS = frozenset((*SCOPES, *SEMANTICS, *VOLATILE))
_MEANT = {
    "ld": ("relaxed", "acquire"), "st": ("relaxed", "release"), "red": ("relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"), "fence": ("acquire", "release", "acq_rel", "sc"),
}  # fmt: skip


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


def signals(opcode: Sequence[str]) -> bool:
    """Whether an instruction changes global memory in a way that threads of other warps may poll for."""
    verb, *parts = opcode
    if any(part.partition("::")[0] in ("shared", "async") for part in parts):
        return False
    return verb in ("red", "atom") or (verb == "st" and spelled(parts) != "")


def counts(opcode: Sequence[str]) -> bool:
    """Whether an instruction is an atomic operation on global memory: threads arrive so where others wait."""
    return opcode[0] in ("red", "atom") and signals(opcode)


def looks(opcode: Sequence[str]) -> bool:
    """Whether an instruction tells its thread what others have made of global memory."""
    verb, *parts = opcode
    if any(part.partition("::")[0] == "shared" for part in parts):
        return False
    return verb == "atom" or (verb == "ld" and spelled(parts) != "")


def refused(verb: str, parts: Iterable[str]) -> str:
    """Why ptxas takes no instruction of this verb with such an order; "" where it does."""
    named = set(parts)
    semantics, scopes = named & set(SEMANTICS), named & (set(SCOPES) - {"gl"})
    wrong = semantics - set(_MEANT[verb])
    if wrong:
        return f"{verb}.{min(wrong)} is no order of it; PTX has {', '.join(_MEANT[verb])}"
    if len(semantics) > 1 or len(scopes) > 1:
        return f"it names {', '.join(sorted(semantics if len(semantics) > 1 else scopes))}; PTX takes one"
    if not scopes and (semantics or verb == "fence") and not named & set(VOLATILE):
        return "it names no scope, which PTX asks for beside its order"
    if semantics and named & {"nc", "weak"}:
        return f"it is .{min(named & {'nc', 'weak'})} and .{min(semantics)}, of which PTX takes one"
    return ""


@functools.cache
def parse(text: str) -> Order:
    """The order that `spelled` gave as text."""
    semantics, _, scope = text.partition(".")
    acquire, release = semantics in ("acquire", "acq_rel", "sc"), semantics in ("release", "acq_rel", "sc")
    return Order(SCOPES.get(scope, WEAK), acquire, release, semantics == "sc")
