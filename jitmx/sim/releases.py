"""What strong writes tell those who read them: PTX's release and acquire patterns, their scopes, chains of atomics.

A release, or a fence with a strong write behind it, publishes at the word written what happened before it. Who reads
that word by an acquire, or by a strong read with a fence behind it, knows all of this from there on, provided that the
scope of each side includes the other. Atomics hand on what the word carried; any other write ends the chain. What was
read and not heard, for want of an acquire or of a scope, is kept for the message of the race that follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim.knowledge import Said, merge
from jitmx.sim.order import CLUSTER, CTA, GPU, Order
from jitmx.sim.shadow import COLUMNS, Shadow
from jitmx.sim.warps import alike

if TYPE_CHECKING:
    from jitmx.sim.races import Races

Array = npt.NDArray[Any]

_NAMES = {CTA: "cta", CLUSTER: "cluster", GPU: "gpu"}
_REMEMBERED = 64


@dataclass(frozen=True)
class Release:
    """What one release tells: from whom (block and column, as the shadow has them), how far, and from which line."""

    scope: int
    who: int
    said: Said
    line: int


@dataclass
class _Word:
    """A word that was written by a strong operation: its word in the shadow, the scope, and what it carries."""

    writer: int
    scope: int
    told: list[Release]


@dataclass(frozen=True)
class _Missed:
    """A release that a block has read at a line but not heard, and why."""

    block: int
    release: Release
    why: str


class Releases:
    """The releases that lanes of a machine have made, and what they have still to hear."""

    def __init__(self, races: Races) -> None:
        self.races = races
        self._fences: dict[int, dict[int, Release]] = {}  # by lane and scope, of its last fence
        self._own: dict[tuple[int, int], Release] = {}  # by lane and place, of its last release there
        # What a lane has read by no acquire, with the line where, by the place and who released it.
        self._pending: dict[int, dict[tuple[int, int], tuple[Release, int]]] = {}
        self._missed: list[_Missed] = []

    # Operations
    def fence(self, lanes: Array, order: Order, line: int) -> None:
        """These lanes run a fence: it makes acquires of reads before it, and releases of strong writes behind it."""
        for lane in lanes.tolist():
            if order.acquire:
                self._catch_up(lane, order.scope, line)
            if order.release:
                fences = self._fences.setdefault(lane, {})
                fences[order.scope] = self._release(lane, order, line)
                for narrower in range(order.scope):
                    fences.pop(narrower, None)

    def load(self, shadow: Shadow, where: Array, lanes: Array, order: Order, last: Array, line: int) -> None:
        """Strong loads of lanes; `last`: words of the last writers."""
        for which in alike(where, self.races.block.take(lanes)) if shadow.published else ():
            first = which[0]
            word = self._found(shadow, int(where[first]), int(last[first]))
            if word is not None:
                self._hear(word, int(where[first]), lanes[which], order, line)
        if order.acquire and self._pending:
            for lane, key in zip(lanes.tolist(), where.tolist(), strict=True):
                self._catch_up(lane, order.scope, line, key)

    def store(self, shadow: Shadow, where: Array, lanes: Array, order: Order, last: Array, line: int) -> None:
        """Strong stores of lanes that have overwritten `last`: who releases or has fenced tells what it knows."""
        if not (order.release or self._fences or self._own or shadow.published):
            return
        now = self.races.word(lanes, order.scope)
        for lane, key, before, mine in zip(lanes.tolist(), where.tolist(), last.tolist(), now.tolist(), strict=True):
            self._found(shadow, key, before)
            self._put(shadow, key, _Word(mine, order.scope, self._says(lane, key, order, line)))

    def exchange(
        self, shadow: Shadow, where: Array, lanes: Array, order: Order, last: Array, line: int, *, hears: bool
    ) -> None:
        """The same of atomics, which act in the order of their lanes: each hands on what it found, and hears it.

        Args:
            hears: not so for reductions, which are told nothing that a fence behind them could make an acquire of.
        """
        if not (order.release or self._fences or self._own or shadow.published):
            return
        now = self.races.word(lanes, order.scope)
        seen: set[int] = set()
        for lane, key, before, mine in zip(lanes.tolist(), where.tolist(), last.tolist(), now.tolist(), strict=True):
            word = shadow.published.get(key) if key in seen else self._found(shadow, key, before)
            seen.add(key)
            told: list[Release] = []
            if word is not None and self._hear(word, key, np.array([lane]), order, line, aloud=hears):
                told = word.told
            if order.acquire:
                self._catch_up(lane, order.scope, line, key)
            says = self._says(lane, key, order, line)
            if order.acquire and order.release and order.scope == GPU and all(one.scope == GPU for one in told):
                told = []  # what this one says has all of it
            self._put(shadow, key, _Word(mine, order.scope, _joined(told + says)))

    def waited(self, lanes: Array, said: Said, order: Order, line: int) -> None:
        """Lanes of one block have seen the phase of an mbarrier complete: they hear what arrived if they acquire."""
        if order.acquire:
            self.races.learn(lanes, said)
            return
        release = Release(GPU, -1, said, line)
        for lane in lanes.tolist():
            self._pending.setdefault(lane, {})[-1, line] = release, line

    def _found(self, shadow: Shadow, key: int, last: int) -> _Word | None:
        """The word published at a place, unless another write has come since."""
        word: _Word | None = shadow.published.get(key)
        if word is not None and word.writer != last:
            del shadow.published[key]
            return None
        return word

    def _put(self, shadow: Shadow, key: int, word: _Word) -> None:
        if word.told:
            shadow.published[key] = word
        else:
            shadow.published.pop(key, None)

    def _release(self, lane: int, order: Order, line: int) -> Release:
        races = self.races
        return Release(order.scope, int(races.ids[lane]), races.told(np.array([lane])), line)

    def _says(self, lane: int, key: int, order: Order, line: int) -> list[Release]:
        """What a strong write of a lane publishes at a place: what fences before it tell, and a release there."""
        if order.release:
            self._own[lane, key] = self._release(lane, order, line)
        own = self._own.get((lane, key))
        return [*self._fences.get(lane, {}).values(), *([own] if own else [])]

    def _catch_up(self, lane: int, scope: int, line: int, key: int | None = None) -> None:
        """A lane acquires what it has read before, at one place or at all."""
        waiting = self._pending.get(lane)
        for read in [read for read in waiting or () if key in (None, read[0])]:
            assert waiting is not None
            if self._learn(np.array([lane]), waiting[read][0], scope, line):
                del waiting[read]

    def fenced(self, lanes: Array, least: int) -> Said:
        """What fences of at least this scope have made ready to be told by relaxed operations of lanes."""
        said: Said = {}
        for lane in lanes.tolist() if self._fences else ():
            for scope, release in self._fences.get(lane, {}).items():
                if scope >= least:
                    merge(said, release.said)
        return said

    def _hear(self, word: _Word, key: int, lanes: Array, order: Order, line: int, *, aloud: bool = True) -> bool:
        """Lanes of one block read a word; whether its scope and theirs let them see who wrote it."""
        races = self.races
        block = int(races.block[lanes[0]])
        if not races.within(min(word.scope, order.scope), word.writer, block):
            for release in word.told:
                narrow = min(word.scope, order.scope)
                self._miss(block, release, f"the word read at PTX line {line} was told in scope .{_NAMES[narrow]} only")
            return False
        for release in word.told:
            if order.acquire:
                self._learn(lanes, release, order.scope, line)
                continue
            for lane in lanes.tolist() if aloud else ():
                self._pending.setdefault(lane, {})[key, release.who] = release, line
        return True

    def _learn(self, lanes: Array, release: Release, scope: int, line: int) -> bool:
        """Lanes of one block hear a release by an operation of a scope; whether the two scopes let them."""
        races = self.races
        block = int(races.block[lanes[0]])
        if release.who < 0 or races.within(min(scope, release.scope), release.who, block):
            races.learn(lanes, release.said)
            return True
        side = f"released at PTX line {release.line}" if release.scope <= scope else f"acquired at PTX line {line}"
        self._miss(block, release, f"it is {side} in scope .{_NAMES[min(scope, release.scope)]}, which is not enough")
        return False

    # Messages
    def _miss(self, block: int, release: Release, why: str) -> None:
        if len(self._missed) == _REMEMBERED:
            self._missed.pop(0)
        self._missed.append(_Missed(block, release, why))

    def why(self, block: int, other: int, column: int, time: int) -> str:
        """Why a block has not heard of what a column of another did at a time, if a release told of it; else ""."""

        def tells(release: Release) -> bool:
            clocks = release.said.get(other)
            return clocks is not None and clocks[column] >= time

        for missed in reversed(self._missed):
            if missed.block == block and tells(missed.release):
                return f": {missed.why}"
        races = self.races
        for lane, waiting in self._pending.items():
            for release, read in waiting.values():
                if races.block[lane] == block and tells(release):
                    return (
                        f": PTX line {read} reads what PTX line {release.line} has released, and neither acquires nor "
                        "is followed by a fence"
                    )
        return ""


def _joined(told: list[Release]) -> list[Release]:
    """Releases of one scope by threads of one block as one."""
    out: dict[tuple[int, int], Release] = {}
    for release in told:
        key = release.scope, release.who >> COLUMNS
        before = out.get(key)
        if before is not None:
            said = dict(before.said)
            merge(said, release.said)
            release = replace(release, said=said)
        out[key] = release
    return list(out.values())
