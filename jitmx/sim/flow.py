"""Which registers a kernel may read before it sets them: data flow over its basic blocks."""

from __future__ import annotations

from dataclasses import dataclass

from jitmx.sim.program import Block


@dataclass
class Access:
    """Registers that one instruction reads and writes; `copy` is the source of a plain move, which is no use of it."""

    reads: set[str]
    writes: set[str]
    predicated: bool
    copy: str | None = None


def doubtful(accesses: dict[int, list[Access]], blocks: list[Block], successors: list[set[int]]) -> set[str]:
    """Registers with a use that some path reaches without setting them, and those they are copied from."""
    everything = {name for listed in accesses.values() for item in listed for name in item.reads | item.writes}
    everything |= {item.copy for listed in accesses.values() for item in listed if item.copy is not None}
    names = {name: 1 << i for i, name in enumerate(sorted(everything))}
    entering = [0] * len(blocks)
    if blocks:
        entering[0] = (1 << len(names)) - 1
    pending, used = {0} if blocks else set(), 0
    seen: set[int] = set()
    while pending:
        index = min(pending)
        pending.discard(index)
        seen.add(index)
        unset = entering[index]
        for item in accesses[index]:
            if item.copy is None:
                used |= unset & sum(names[name] for name in item.reads)
            for name in item.writes:
                if item.copy is not None and unset & names[item.copy]:
                    unset |= names[name]
                elif not item.predicated:
                    unset &= ~names[name]
        for follower in successors[index]:
            if unset | entering[follower] != entering[follower] or follower not in seen:
                entering[follower] |= unset
                pending.add(follower)
    out = {name for name, bit in names.items() if used & bit}
    # A register that a doubtful one is copied from must be followed as well.
    grown = True
    while grown:
        sources = {
            item.copy for listed in accesses.values() for item in listed if item.copy is not None and item.writes & out
        } - out
        grown = bool(sources)
        out |= sources
    return out
