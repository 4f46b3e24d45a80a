"""Which registers a kernel may read before it sets them: data flow over its basic blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitmx.sim.program import Block


@dataclass
class Access:
    """Registers that one instruction reads and writes; `copy` is the source of a plain move, which is no use of it."""

    reads: set[str]
    writes: set[str]
    predicated: bool
    copy: str | None = None
    used: set[str] = field(default_factory=set)  # all that it reads, moves and wgmma included
    held: set[str] = field(default_factory=set)  # written in place
    picks: bool = False  # it takes some bytes of what it reads


def fillers(accesses: dict[int, list[Access]]) -> set[str]:
    """Registers that nothing sets and of which only `prmt` takes bytes, and no longer count as read by it.

    So a compiler fills bytes that nobody looks at. What such bytes hold is made to look like no value.
    """
    every = [item for listed in accesses.values() for item in listed]
    never = set().union(*(item.reads for item in every)) - set().union(*(item.writes for item in every))
    never -= set().union(*(item.reads for item in every if not item.picks))
    for item in every:
        item.reads -= never
    return never


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


def temporaries(
    accesses: dict[int, list[Access]], successors: list[set[int]], tracked: set[str]
) -> dict[int, set[str]]:
    """Of each block, the registers that it sets before it reads them and that nothing reads after it."""
    names: dict[str, int] = {}
    for listed in accesses.values():
        for item in listed:
            for name in item.used | item.writes:
                names.setdefault(name, 1 << len(names))

    def bits(chosen: set[str]) -> int:
        return sum(names[name] for name in chosen)

    count = len(successors)
    needs, sets, written = [0] * count, [0] * count, [0] * count
    keep = tracked & names.keys()
    for index, listed in accesses.items():
        before_set, set_here, written_here = set[str](), set[str](), set[str]()
        for item in listed:
            before_set |= item.used - set_here
            written_here |= item.writes
            if item.predicated:
                keep |= item.writes
            else:
                set_here |= item.writes
                keep |= item.held
        needs[index], sets[index], written[index] = bits(before_set), bits(set_here), bits(written_here)
    kept = bits(keep)
    live = [0] * count  # on entering
    before: list[set[int]] = [set() for _ in successors]
    for index, following in enumerate(successors):
        for follower in following:
            before[follower].add(index)
    pending = set(range(count))
    while pending:
        index = max(pending)
        pending.discard(index)
        after = 0
        for follower in successors[index]:
            after |= live[follower]
        now = needs[index] | after & ~sets[index]
        if now != live[index]:
            live[index] = now
            pending |= before[index]
    out: dict[int, set[str]] = {}
    for index in range(count):
        after = 0
        for follower in successors[index]:
            after |= live[follower]
        free = written[index] & ~after & ~needs[index] & ~kept
        out[index] = {name for item in accesses[index] for name in item.writes if names[name] & free}
    return out
