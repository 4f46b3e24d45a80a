"""PTX's memory consistency model, for litmus tests: which outcomes it allows, and which come with a data race.

Written down from the chapter of the PTX ISA of that name. Every candidate execution is looked at: where each read reads
from, and the order of fence.sc; then whether the axioms leave an order of the writes of each location.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from litmus import Program

_INITIAL = -1  # what a read of the initial value reads from

Outcome = tuple[int | None, ...]  # None for the register of an operation whose guard was false


@dataclass(frozen=True)
class Verdict:
    """What the model says of a program.

    Attributes:
        names: registers, then locations whose last value counts.
        outcomes: the values that they may end with.
        racy: those of them that an execution with a data race ends with.
        calm: those of them that an execution without one ends with.
    """

    names: tuple[str, ...]
    outcomes: frozenset[Outcome]
    racy: frozenset[Outcome]
    calm: frozenset[Outcome]

    def allows(self, **values: int | None) -> bool:
        """Whether any execution ends with these values."""
        return any(self._fits(outcome, values) for outcome in self.outcomes)

    def races(self, **values: int | None) -> bool:
        """Whether an execution that ends with these values has a data race."""
        return any(self._fits(outcome, values) for outcome in self.racy)

    def _fits(self, outcome: Outcome, values: dict[str, int | None]) -> bool:
        return all(outcome[self.names.index(name)] == value for name, value in values.items())


@functools.lru_cache(maxsize=4096)
def judge(program: Program) -> Verdict:
    """What the model says of a program."""
    return _Judge(program).verdict()


def _closed(order: list[int], a: int, b: int) -> None:
    """Add a pair to a transitive order, whose entry i has a bit for each event after event i."""
    if order[a] >> b & 1:
        return
    after = order[b] | 1 << b
    for i, bits in enumerate(order):
        if i == a or bits >> a & 1:
            order[i] = bits | after


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Judge:
    """The executions of a program; events are its operations, numbered thread by thread."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops = [op for thread in program.threads for op in thread]
        self.thread = [i for i, thread in enumerate(program.threads) for _ in thread]
        self.count = len(self.ops)
        events = range(self.count)
        self.definition = {op.register: i for i, op in enumerate(self.ops) if op.register}
        self.po = [sum(1 << j for j in events if j > i and self.thread[j] == self.thread[i]) for i in events]
        self.strong = [sum(1 << j for j in events if self._morally_strong(i, j)) for i in events]
        self.at: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.location:
                self.at.setdefault(op.location, []).append(i)
        # What each write releases and each read acquires: the first events of its release patterns, the last of its
        # acquire patterns.
        self.firsts = [self._firsts(i) for i in events]
        self.lasts = [self._lasts(i) for i in events]
        self.reads = [i for i in events if self.ops[i].reads]
        self.candidates = [self._candidates(i) for i in self.reads]
        self.barriers = list(self._barriers())
        self.may_race = any(
            (self.ops[i].writes or self.ops[j].writes) and not self.strong[i] >> j & 1
            for there in self.at.values() for i, j in itertools.combinations(there, 2)
        )  # fmt: skip
        self.racy: set[Outcome] = set()
        self.calm: set[Outcome] = set()

    # What is the same in all executions
    def _morally_strong(self, i: int, j: int) -> bool:
        """Whether two events are; that they overlap is left to those who ask about memory operations."""
        a, b, s, t = self.ops[i], self.ops[j], self.thread[i], self.thread[j]
        if s == t:
            return True
        return a.strong and b.strong and self.program.covers(a.scope, s, t) and self.program.covers(b.scope, t, s)

    def _firsts(self, write: int) -> tuple[int, ...]:
        op = self.ops[write]
        if not (op.writes and op.strong):
            return ()
        before = (i for i in range(write) if self.po[i] >> write & 1 and self.ops[i].releases)
        kept = [i for i in before if self.ops[i].kind == "fence" or self.ops[i].location == op.location]
        return (*kept, write) if op.releases else tuple(kept)

    def _lasts(self, read: int) -> tuple[int, ...]:
        op = self.ops[read]
        if not (op.strong and op.kind in ("ld", "atom")):
            return ()
        after = (i for i in _bits(self.po[read]) if self.ops[i].acquires)
        kept = [i for i in after if self.ops[i].kind == "fence" or self.ops[i].location == op.location]
        return (read, *kept) if op.acquires else tuple(kept)

    def _candidates(self, read: int) -> list[int]:
        """Writes that a read may read from, but for what each thread must see of its own."""
        own, others = [], []
        for write in self.at[self.ops[read].location]:
            if write == read or not self.ops[write].writes:
                continue
            if self.thread[write] != self.thread[read]:
                others.append(write)
            elif write < read:
                own.append(write)
        # The last of its own that is sure to be done hides what is older.
        sure = [i for i in own if self.ops[i].guard is None and self.ops[i].action != "cas"]
        return [w for w in own if w >= sure[-1]] + others if sure else [_INITIAL, *own, *others]

    def _barriers(self) -> Iterator[tuple[int, int]]:
        phases: dict[tuple[int, int], list[int]] = {}
        for t, block in enumerate(self.program.blocks):
            met = (i for i in range(self.count) if self.thread[i] == t and self.ops[i].kind == "bar")
            for phase, event in enumerate(met):
                phases.setdefault((block, phase), []).append(event)
        for met_there in phases.values():
            yield from itertools.permutations(met_there, 2)

    # Executions
    def verdict(self) -> Verdict:
        """Look at all executions."""
        self._choose([])
        names = (*self.program.registers, *self.program.final)
        return Verdict(names, frozenset(self.racy | self.calm), frozenset(self.racy), frozenset(self.calm))

    def _choose(self, sources: list[int]) -> None:
        """Choose what the reads read from, one after the other."""
        if len(sources) == len(self.reads):
            self._run(dict(zip(self.reads, sources, strict=True)))
            return
        read = self.reads[len(sources)]
        for source in self.candidates[len(sources)]:
            if not (self.ops[read].atomic and self._taken(read, source, sources)):
                self._choose([*sources, source])

    def _taken(self, read: int, source: int, sources: list[int]) -> bool:
        """Whether another atomic has read the same write, so that one of the two would not be atomic."""
        for other, theirs in zip(self.reads, sources, strict=False):
            op = self.ops[other]
            if theirs != source or not op.atomic or op.location != self.ops[read].location:
                continue
            if op.guard or self.ops[read].guard or "cas" in (op.action, self.ops[read].action):
                continue
            of_all = source == _INITIAL or (self.strong[source] >> read & self.strong[source] >> other & 1)
            if of_all and self.strong[read] >> other & 1:
                return True
        return False

    def _run(self, rf: dict[int, int]) -> None:
        """One choice of sources: the values that follow from it, and its orders."""
        values = self._values(rf)
        if values is None:
            return
        alive, got, written = values
        rf = {read: source for read, source in rf.items() if alive >> read & 1}
        seen = {read: self._observed(read, rf) for read in rf}
        base = [bits & alive if alive >> i & 1 else 0 for i, bits in enumerate(self.po)]
        for a, b in self.barriers:
            _closed(base, a, b)
        for read, writes in seen.items():
            for write in writes:
                for first, last in itertools.product(self.firsts[write], self.lasts[read]):
                    both = alive >> first & alive >> last & 1
                    # A cas that fails is taken for no release.
                    if (
                        both
                        and self.strong[first] >> last & 1
                        and (self.ops[first].kind == "fence" or first in written)
                    ):
                        _closed(base, first, last)
        if any(source >= 0 and base[read] >> source & 1 for read, source in rf.items()):
            return
        fences = [i for i in _bits(alive) if self.ops[i].kind == "fence" and self.ops[i].order == "sc"]
        pairs = [(a, b) for a, b in itertools.combinations(fences, 2) if self.strong[a] >> b & 1]
        registers = tuple(got.get(self.definition[name]) for name in self.program.registers)
        for order in self._fence_orders(base, pairs):
            if not self.program.final and registers in self.calm and (registers in self.racy or not self.may_race):
                return  # nothing that this execution could add
            self._judge(order, rf, seen, written, registers)

    def _values(self, rf: dict[int, int]) -> tuple[int, dict[int, int], dict[int, int]] | None:
        """Which events there are, what each reads and what each writes; None where that cannot be.

        A value is known once all is that it depends on: what depends on itself, out of thin air, never is.
        """
        exists: dict[int, bool] = {}
        got: dict[int, int] = {}
        written: dict[int, int] = {}
        done: set[int] = set()
        left = list(range(self.count))
        while left:
            stuck = []
            for i in left:
                known = self._value(i, rf, exists, got, written, done)
                if known is None:
                    stuck.append(i)
                elif not known:
                    return None
            if len(stuck) == len(left):
                return None
            left = stuck
        return sum(1 << i for i, there in exists.items() if there), got, written

    def _value(
        self, i: int, rf: dict[int, int], exists: dict[int, bool], got: dict[int, int], written: dict[int, int],
        done: set[int],
    ) -> bool | None:  # fmt: skip
        """One event of `_values`: None where it must wait, False where there is no such execution."""
        op = self.ops[i]
        if i not in exists:
            there = True
            if op.guard is not None:
                source = self.definition[op.guard[0]]
                if source not in done:
                    return None
                there = got.get(source) == op.guard[1]
            exists[i] = there
        if not exists[i]:
            done.add(i)
            # One choice stands for all of what an event does not read.
            return not op.reads or rf[i] == self.candidates[self.reads.index(i)][0]
        operands = []
        for item in op.values:
            if isinstance(item, str):
                if self.definition[item] not in done:
                    return None
                operands.append(got.get(self.definition[item], 0))
            else:
                operands.append(item)
        if op.reads:
            source = rf[i]
            if source != _INITIAL:
                if source not in done:
                    return None
                if source not in written:
                    return False
            got[i] = 0 if source == _INITIAL else written[source]
            if op.until is not None and got[i] != op.until:
                return False
        if op.kind == "st" or op.action == "exch":
            written[i] = operands[0]
        elif op.action == "add":
            written[i] = got[i] + operands[0]
        elif op.action == "cas" and got[i] == operands[0]:
            written[i] = operands[1]
        done.add(i)
        return True

    def _observed(self, read: int, rf: dict[int, int]) -> list[int]:
        """Writes that precede a read in observation order: through atomics, each morally strong with the next."""
        out: list[int] = []
        source = rf[read]
        while source != _INITIAL and self.strong[source] >> read & 1 and source not in out:
            out.append(source)
            if not self.ops[source].atomic:
                break
            read, source = source, rf[source]
        return out

    def _fence_orders(self, base: list[int], pairs: list[tuple[int, int]]) -> Iterator[list[int]]:
        """Base causality order with each order of fence.sc that it does not contradict."""
        for a, b in pairs:
            there, back = base[a] >> b & 1, base[b] >> a & 1
            if there and back:
                return
        for a, b in pairs:
            if not (base[a] >> b & 1 or base[b] >> a & 1):
                for first, second in ((a, b), (b, a)):
                    order = list(base)
                    _closed(order, first, second)
                    yield from self._fence_orders(order, pairs)
                return
        yield base

    def _judge(
        self, base: list[int], rf: dict[int, int], seen: dict[int, list[int]], written: dict[int, int],
        registers: tuple[int | None, ...],
    ) -> None:  # fmt: skip
        """One execution but for the orders of writes: each location has one, or there is no such execution."""
        # Causality: base causality, also from what one of its events has observed. Used at one location only.
        cause = list(base)
        for read, writes in seen.items():
            for write in writes:
                cause[write] |= base[read]
        if any(source >= 0 and cause[read] >> source & 1 for read, source in rf.items()):
            return
        last: dict[str, set[int]] = {}
        race = False
        for location, events in self.at.items():
            there = [i for i in events if i in rf or i in written]
            found = self._last(there, cause, rf, written)
            if not found:
                return
            last[location] = found
            race = race or self._race(there, cause, written)
        for ends in itertools.product(*(sorted(last.get(name, {0})) for name in self.program.final)):
            (self.racy if race else self.calm).add((*registers, *ends))

    def _race(self, events: list[int], cause: list[int], written: dict[int, int]) -> bool:
        for a, b in itertools.combinations(events, 2):
            if (a in written or b in written) and not (
                self.strong[a] >> b & 1 or cause[a] >> b & 1 or cause[b] >> a & 1
            ):
                return True
        return False

    def _last(self, events: list[int], cause: list[int], rf: dict[int, int], written: dict[int, int]) -> set[int]:
        """The values that a location may end with; empty where no coherence order fits."""
        writes = [i for i in events if i in written]
        if not writes:
            return {0}
        order = [0] * self.count
        for a in writes:
            for b in writes:
                if a != b and cause[a] >> b & 1:
                    _closed(order, a, b)
            source = rf.get(a, _INITIAL)
            # Coherence of one location puts an atomic behind what it reads.
            if source != _INITIAL and self.strong[source] >> a & 1:
                _closed(order, source, a)
        pairs = [(a, b) for a, b in itertools.combinations(writes, 2) if self.strong[a] >> b & 1]
        out: set[int] = set()
        for coherence in self._coherences(order, pairs, writes):
            if self._fits(events, coherence, cause, rf, written):
                out |= {written[a] for a in writes if not coherence[a]}
        return out

    def _coherences(self, order: list[int], pairs: list[tuple[int, int]], writes: list[int]) -> Iterator[list[int]]:
        """Coherence orders with these pairs: total where writes are morally strong, partial else."""
        if any(order[a] >> a & 1 for a in writes):
            return
        for a, b in pairs:
            if not (order[a] >> b & 1 or order[b] >> a & 1):
                for first, second in ((a, b), (b, a)):
                    chosen = list(order)
                    _closed(chosen, first, second)
                    yield from self._coherences(chosen, pairs, writes)
                return
        yield order

    def _fits(
        self, events: list[int], coherence: list[int], cause: list[int], rf: dict[int, int], written: dict[int, int]
    ) -> bool:
        """The axioms of one location: causality, atomicity, sequential consistency."""
        all_writes = sum(1 << i for i in events if i in written)
        together = sum(1 << i for i in events)
        communication = {i: coherence[i] for i in events}
        for read, source in rf.items():
            if not together >> read & 1:
                continue
            later = (all_writes if source == _INITIAL else coherence[source]) & ~(1 << read)
            for write in _bits(later):
                if cause[write] >> read & 1:
                    return False
                # Between what an atomic has read and what it writes.
                atomic = self.ops[read].atomic and read in written
                if atomic and self.strong[write] >> read & 1 and coherence[write] >> read & 1:
                    return False
            communication[read] |= later
            if source != _INITIAL:
                communication[source] |= 1 << read
        order = [0] * self.count
        for i in events:
            for j in _bits((communication[i] & self.strong[i] | self.po[i]) & together):
                _closed(order, i, j)
        return not any(order[i] >> i & 1 for i in events)
