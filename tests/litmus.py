"""Litmus tests: small programs of threads that share memory, written much as PTX is.

    program("st.weak [x], 1; st.release.gpu [f], 1", "ld.acquire.gpu r0, [f]; ld.weak r1, [x]", blocks=(0, 1))

All accesses are of 32 bits, through the generic proxy, and locations begin as 0. An operation may have a guard
(`@r0=1 ld.weak r1, [x]`), a read may poll (`ld.acquire.gpu r0, [f] until 1`: only executions in which it ends there
count), and a value may be a register. Block b is of cluster b // program.cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCOPES = ("cta", "cluster", "gpu", "sys")
ORDERS = {
    "ld": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "red": ("relaxed", "release"),
    "fence": ("acquire", "release", "acq_rel", "sc"),
    "bar": ("weak",),
}
ACTIONS = ("add", "exch", "cas")
_ACQUIRE, _RELEASE = ("acquire", "acq_rel", "sc"), ("release", "acq_rel", "sc")
_TEXT = re.compile(r"(?:@(\w+)=(\d+) +)?([\w.]+) *(.*?)(?: +until +(\d+))?")

Value = int | str  # a number, or the register that holds it


@dataclass(frozen=True)
class Op:
    """One operation of a thread.

    Attributes:
        kind: one of ORDERS.
        order: of ORDERS[kind]; weak operations and barriers have no scope.
        action: what an atomic does, of ACTIONS.
        values: what is stored or combined; two for cas.
        guard: the register and the number that it must hold, for the operation to be run.
        until: a read that polls ends with this value.
    """

    kind: str
    order: str = "weak"
    scope: str = ""
    location: str = ""
    register: str = ""
    action: str = ""
    values: tuple[Value, ...] = ()
    guard: tuple[str, int] | None = None
    until: int | None = None

    @property
    def strong(self) -> bool:
        return self.order != "weak"

    @property
    def reads(self) -> bool:
        return self.kind in ("ld", "atom", "red")

    @property
    def writes(self) -> bool:
        """Whether it may: a cas that fails does not."""
        return self.kind in ("st", "atom", "red")

    @property
    def atomic(self) -> bool:
        return self.kind in ("atom", "red")

    @property
    def acquires(self) -> bool:
        """Whether it is an acquire operation or fence; the read of a `red` never makes an acquire pattern."""
        return self.order in _ACQUIRE

    @property
    def releases(self) -> bool:
        return self.order in _RELEASE

    @property
    def name(self) -> str:
        """Its dotted name, as PTX has it but for space and type."""
        if self.kind == "bar":
            return "bar.sync"
        return ".".join(part for part in (self.kind, self.order, self.scope, self.action) if part)

    def __str__(self) -> str:
        listed = [self.register, self.location and f"[{self.location}]", *map(str, self.values)]
        guard = f"@{self.guard[0]}={self.guard[1]} " if self.guard else ""
        until = "" if self.until is None else f" until {self.until}"
        return f"{guard}{self.name} {', '.join(item for item in listed if item)}".rstrip() + until


@dataclass(frozen=True)
class Program:
    """Threads, each with the block of the grid that it is of, and the locations whose last value counts too."""

    threads: tuple[tuple[Op, ...], ...]
    blocks: tuple[int, ...]
    cluster: int = 1
    final: tuple[str, ...] = ()

    @property
    def registers(self) -> tuple[str, ...]:
        return tuple(op.register for thread in self.threads for op in thread if op.register)

    @property
    def locations(self) -> tuple[str, ...]:
        return tuple(sorted({op.location for thread in self.threads for op in thread if op.location}))

    def covers(self, scope: str, thread: int, other: int) -> bool:
        """Whether a scope of one thread includes another."""
        a, b = self.blocks[thread], self.blocks[other]
        if scope == "cta":
            return a == b
        return a // self.cluster == b // self.cluster if scope == "cluster" else scope in ("gpu", "sys")

    def __str__(self) -> str:
        listed = zip(self.blocks, self.threads, strict=True)
        texts = [f"block {block}: {'; '.join(map(str, thread))}" for block, thread in listed]
        return f"{' || '.join(texts)} (clusters of {self.cluster})"


def operation(text: str) -> Op:
    """An operation from its text.

    Raises:
        ValueError: text that is none.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no operation")
    guard, wanted, name, rest, until = found.groups()
    kind, *parts = name.split(".")
    operands: list[str] = [item.strip() for item in rest.split(",") if item.strip()]
    if kind == "bar":
        if parts != ["sync"] or operands or guard:
            raise ValueError(f"{text!r}: a barrier is bar.sync, without operands or guard")
        return Op("bar")
    if kind not in ORDERS:
        raise ValueError(f"{text!r}: {kind} is none of {', '.join(ORDERS)}")
    order = parts.pop(0) if parts else "weak"
    scope = parts.pop(0) if order != "weak" and parts else ""
    action = parts.pop(0) if kind in ("atom", "red") and parts else ""
    if parts or order not in ORDERS[kind] or (order != "weak") != (scope in SCOPES):
        raise ValueError(f"{text!r}: its name is kind.order.scope.action, where weak has no scope")
    if (kind in ("atom", "red")) != (action in ACTIONS) or (kind == "red" and action != "add"):
        raise ValueError(f"{text!r}: an atomic is one of {', '.join(ACTIONS)}, and a reduction adds")
    register = operands.pop(0) if kind in ("ld", "atom") and operands else ""
    location = operands.pop(0)[1:-1] if kind != "fence" and operands else ""
    values = tuple(int(item) if item.isdigit() else item for item in operands)
    takes = {"ld": 0, "fence": 0, "st": 1}.get(kind, 2 if action == "cas" else 1)
    if len(values) != takes or (kind != "fence" and not location):
        raise ValueError(f"{text!r}: its operands are register, [location], values")
    return Op(
        kind, order, scope, location, register, action, values,
        (guard, int(wanted)) if guard else None, None if until is None else int(until),
    )  # fmt: skip


def program(*threads: str, blocks: tuple[int, ...], cluster: int = 1, final: str = "") -> Program:
    """A program from the texts of its threads; `final`: names of locations, a space between.

    Raises:
        ValueError: text that is not understood, a register that two operations write, barriers that threads of one
            block do not share.
    """
    parsed = tuple(tuple(operation(text) for text in thread.split(";") if text.strip()) for thread in threads)
    made = Program(parsed, blocks, cluster, tuple(final.split()))
    check(made)
    return made


def check(program: Program) -> None:
    """ValueError where a program makes no sense."""
    if len(program.threads) != len(program.blocks):
        raise ValueError(f"{len(program.threads)} threads, and blocks of {len(program.blocks)}")
    if len(set(program.registers)) != len(program.registers):
        raise ValueError("two operations write one register")
    phases: dict[int, int] = {}
    for thread, block in zip(program.threads, program.blocks, strict=True):
        met = sum(op.kind == "bar" for op in thread)
        if phases.setdefault(block, met) != met:
            raise ValueError(f"threads of block {block} meet at different numbers of barriers")
        known: set[str] = set()
        for op in thread:
            needed = {item for item in (*op.values, op.guard[0] if op.guard else 0) if isinstance(item, str)}
            if needed - known:
                raise ValueError(f"{op}: no operation before it writes {', '.join(sorted(needed - known))}")
            known.add(op.register)
