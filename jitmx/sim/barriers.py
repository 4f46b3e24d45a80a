"""Barriers of a block: bar and barrier, with their numbers, counts, arrivals and reductions.

A number that some threads of a block have met at may serve others only once they know of it: else their arrivals could
have counted there, whatever order the simulator has run them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.program import BLOCKED

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]


@dataclass
class _Meeting:
    """One barrier of one block, before it completes."""

    expected: int
    line: int
    arrived: list[Array] = field(default_factory=list)  # lanes, waiting or not
    waiting: list[tuple[Array, int, int]] = field(default_factory=list)  # lanes, where they go on, line
    reductions: list[tuple[Array, Any]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(lanes) for lanes in self.arrived)


@dataclass(frozen=True)
class _Met:
    """The last meeting of some threads of a block at a number: which threads, one that waited, when, and where."""

    threads: Array
    waiter: int
    time: int
    line: int


class Barriers:
    """The barriers of every block of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.open: dict[tuple[int, int], _Meeting] = {}
        self.met: dict[tuple[int, int], _Met] = {}  # by block and number, where not all threads of a block have

    def waiting(self) -> bool:
        """Whether any lane waits."""
        return any(meeting.waiting for meeting in self.open.values())

    def waits(self) -> list[str]:
        """Who waits, for messages."""
        out = []
        for (block, number), meeting in self.open.items():
            for lanes, _, line in meeting.waiting:
                mask = np.zeros(self.m.lanes, bool)
                mask[lanes] = True
                missing = meeting.expected - meeting.count
                absent = self.m.alive.copy()
                absent[: block * self.m.width] = absent[(block + 1) * self.m.width :] = False
                for group in meeting.arrived:
                    absent[group] = False
                gone = self.m.lane_ids // self.m.width == block
                gone &= self.m.lane_ids % self.m.width < self.m.threads
                gone &= ~self.m.alive
                who = ""
                if gone.any():
                    who = f"; {self.m.describe(gone)} have ended"
                out.append(
                    f"{self.m.describe(mask)} wait at PTX line {line} at barrier {number}, "
                    f"which lacks {missing} of {meeting.expected} threads{who}"
                )
        return out[:8]

    def arrive(
        self,
        mask: Array | None,
        number: Array,
        count: Array | None,
        resume: int,
        line: int,
        *,
        wait: bool = True,
        reduce: Any = None,
    ) -> int:
        """Lanes come to barriers; what their block returns: where all go on, or that they wait."""
        m = self.m
        lanes = m.active(mask)
        plain = mask is None and number.ndim == 0 and number < 16 and count is None and wait and reduce is None
        if plain and not (self.open or self.met):
            m.races.block_barrier(np.arange(len(m.blocks)))
            m.events += 1
            return resume
        numbers = np.broadcast_to(number, m.lanes)[lanes].astype(np.int64)
        blocks = lanes // m.width
        if count is None:
            counts = np.full(len(lanes), m.threads, np.int64)
        else:
            counts = np.broadcast_to(count, m.lanes)[lanes].astype(np.int64)
            bad = (counts % 32 != 0) | (counts == 0) | (counts > m.width)
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                m.fault(
                    line,
                    int(lanes[at]),
                    f"a barrier for {counts[at]} threads; it must be a multiple of 32, at most the block",
                )
        if (numbers > 15).any():
            at = int(np.flatnonzero(numbers > 15)[0])
            m.fault(line, int(lanes[at]), f"barrier {numbers[at]}; a block has barriers 0 to 15")
        done: list[tuple[int, int]] = []
        keys = blocks << 4 | numbers
        for key in np.unique(keys):
            here = keys == key
            block, which = int(key) >> 4, int(key) & 15
            expected = int(counts[here][0])
            meeting = self.open.setdefault((block, which), _Meeting(expected, line))
            group = lanes[here]
            if (block, which) in self.met:
                self._check_known(self.met[block, which], group, which, line)
            if expected != meeting.expected or (counts[here] != expected).any():
                other = int(counts[here][counts[here] != meeting.expected][0])
                m.fault(
                    line,
                    int(group[0]),
                    f"barrier {which} is for {other} threads here and {meeting.expected} at PTX line {meeting.line}",
                )
            meeting.arrived.append(group)
            if wait:
                meeting.waiting.append((group, resume, line))
            if reduce is not None:
                meeting.reductions.append((group, reduce))
            if meeting.count > expected:
                m.fault(line, int(group[0]), f"barrier {which} gets {meeting.count} arrivals of {expected}")
            if meeting.count == expected:
                done.append((block, which))
        for key2 in done:
            self._complete(key2, self.open.pop(key2))
        if not wait:
            return resume
        return BLOCKED

    def _check_known(self, met: _Met, lanes: Array, number: int, line: int) -> None:
        """Error where lanes come to a number that others have met at, and do not know that those are past it."""
        m = self.m
        others = lanes[~met.threads[lanes % m.width]]
        if not len(others):
            return
        known = m.races.known_by(others, met.waiter, met.time)
        if np.count_nonzero(known) != len(known):
            m.fault(
                line, int(others[known.argmin()]),
                f"comes to barrier {number}, at which thread {m.thread_name(met.waiter % m.width)} and others have met "
                f"at PTX line {met.line}, with nothing that tells it so: it could count as one of them",
            )  # fmt: skip

    def _complete(self, key: tuple[int, int], meeting: _Meeting) -> None:
        m = self.m
        m.events += 1
        lanes = np.sort(np.concatenate(meeting.arrived))
        if meeting.expected == m.threads:
            m.races.block_barrier(np.array([key[0]]))
            self.met.pop(key, None)
        else:
            said = m.races.told(lanes)
            for group, _, _ in meeting.waiting:
                m.races.learn(group, said)
            if meeting.waiting:
                threads = np.zeros(m.width, bool)
                threads[lanes % m.width] = True
                waiter = int(meeting.waiting[0][0][0])
                time = int(said[int(m.races.block[waiter])][waiter % m.width])  # as all know it who know any past it
                self.met[key] = _Met(threads, waiter, time, meeting.line)
        for _, reduction in meeting.reductions[:1]:
            reduction(meeting.reductions)
        for group, resume, _ in meeting.waiting:
            mask = np.zeros(m.lanes, bool)
            mask[group] = True
            m.join(resume, None if len(group) == m.lanes else mask, len(group))
