"""Launches one after the other on a stream, and which of them may be at work together.

They are simulated one after the other. Where they are programmatic ones, a launch may begin on a card as soon as every
block of the one before has run `griddepcontrol.launch_dependents`, by any of its threads, or has ended. Until a thread
comes after a `griddepcontrol.wait`, what it does is held against what launches before did: the one before, but for what
happened before one of its blocks let the next launch begin; and the one before that, unless some block let it begin
behind its own wait. For that the shadows of earlier launches (jitmx.sim.shadow) are kept.

Every block must wait. A grid of which none waits may be done before the launch before it, on whose end its own
dependents rely. One block would do, but which blocks end early is a matter of what they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.knowledge import Said, common, merge
from jitmx.sim.shadow import LINE, WHO, Shadow, halves

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine
    from jitmx.sim.memory import Line, Memory

Array = npt.NDArray[Any]

_MOST = 3  # launches that are kept
_COLUMNS = 11  # as in jitmx.sim.races
_TIME = (1 << 30) - 1


@dataclass(frozen=True)
class Past:
    """A launch that may still be at work when a later one begins.

    Attributes:
        name: for messages.
        shadow, extent: who touched what, and how many bytes of memory there were.
        lines: the PTX line of each time.
        before: what had happened before the next launch could begin; blocks that are not there had ended.
        said: what the others knew then of any block.
    """

    name: str
    shadow: Shadow
    extent: int
    lines: list[int]
    before: frozenset[int]
    said: Said

    def meets(self, words: Array) -> Array:
        """Which accesses that its shadow remembers may be made when the next launch has begun."""
        block, column, time = (words & WHO) >> _COLUMNS, words & (1 << _COLUMNS) - 1, words >> 32 & _TIME
        may = np.zeros(len(words), bool)
        for one in self.before.intersection(np.unique(block).tolist()):
            own, known = (block == one).nonzero()[0], self.said.get(one)
            may[own] = True if known is None else known.take(column[own]) < time[own]
        return may


class Sequence:
    """The launches on one memory."""

    def __init__(self) -> None:
        self.count = 0  # launches begun
        self.past: list[Past] = []  # those that may still be at work, the last one first
        self._programmatic = False
        self._waited: set[int] = set()  # blocks of which a thread has waited
        # By block, what happened before each of the threads that let the next launch begin, and the line of the first.
        self._released: dict[int, Said] = {}
        self._lines: dict[int, int] = {}

    def begin(self, *, programmatic: bool) -> None:
        """A launch begins."""
        self.count += 1
        self._programmatic = programmatic
        self._waited, self._released, self._lines = set(), {}, {}
        if not programmatic:
            self.past = []

    def wait(self, m: Machine, lanes: Array) -> None:
        """griddepcontrol.wait."""
        m.races.wait_previous(lanes)
        self._waited.update(np.unique(m.races.block.take(lanes)).tolist())

    def release(self, m: Machine, lanes: Array, line: int) -> None:
        """griddepcontrol.launch_dependents: whichever thread of a block comes first lets the next launch begin."""
        positions = lanes // m.width
        cuts = np.flatnonzero(positions[1:] != positions[:-1]) + 1
        for group in np.split(lanes, cuts):
            block, said = int(m.races.block[group[0]]), m.races.shared_by(group)
            have = self._released.get(block)
            self._released[block] = said if have is None else common(have, said)
            self._lines.setdefault(block, line)

    def end(self, kernel: str, blocks: int, shadow: Shadow | None, lines: list[int], memory: Memory) -> None:
        """A launch of so many blocks has ended.

        Raises:
            SimulationError: a block has not waited, or what the next launch relies on is not sure to be there.
        """
        if not self._programmatic:
            return
        late = next((block for block in range(blocks) if block not in self._waited), None)
        if late is not None:
            raise SimulationError(
                f"{kernel}, block {late}: ends without griddepcontrol.wait in any of its threads; a launch of such "
                "blocks may be done before the previous one, which the next one takes for done as well"
            )
        # A block that has let nothing begin has ended, and so has what it waited for.
        behind = any(block not in self._released for block in range(blocks)) or any(
            clocks[-1] > 0 for said in self._released.values() for clocks in said.values()
        )
        ahead = memory.ahead()
        if ahead and not behind:
            raise SimulationError(
                f"{kernel}, PTX line {self._lines[0]}: griddepcontrol.launch_dependents does not come after "
                f"griddepcontrol.wait in any block; the next launch uses {', '.join(ahead)} before it waits, while the "
                "launch before this one may still write them"
            )
        said: Said = {}
        for told in self._released.values():
            merge(said, told)
        if shadow is not None and memory.any_early():
            last = Past(
                f"launch {self.count}", shadow, memory.data.size, lines, frozenset(self._released), said
            )  # fmt: skip
            self.past = [last, *([] if behind else self.past)][:_MOST]

    def check(
        self, m: Machine, memory: Memory, where: Array, lanes: Array, size: int, line: Line, what: str
    ) -> None:  # fmt: skip
        """Error where lanes that have not waited meet what a launch before may still do."""
        at, each, size = halves(where, lanes, size)
        for past in self.past:
            there = np.flatnonzero(at < past.extent // LINE * LINE)
            if not len(there):
                continue
            cells = past.shadow.find(at[there], size)
            met = [(cells.writers, "writes")]
            met += [(words, "reads") for words in cells.readers(0)] if what != "reads" else []
            for words, how in met:
                row, column = words.nonzero()
                used = words[row, column]
                may = past.meets(used)
                if np.count_nonzero(may):
                    first = int(may.argmax())
                    i = int(there[row[first]])
                    self._report(m, past, int(used[first]), int(each[i]), memory.place(int(at[i])), line, what, how)

    def _report(
        self, m: Machine, past: Past, word: int, lane: int, place: str, line: Line, what: str, how: str
    ) -> None:  # fmt: skip
        who = word & WHO
        column = who & (1 << _COLUMNS) - 1
        other = f"thread {m.thread_name(column)}" if column < m.width else "an asynchronous operation"
        m.fault(
            line,
            lane,
            f"{what} {place} before griddepcontrol.wait, which {other} of block {m.block_name(who >> _COLUMNS)} of "
            f"{past.name} {how} at PTX line {past.lines[word >> 32 & _TIME]} with nothing that orders it before "
            "griddepcontrol.launch_dependents, after which this launch may begin",
        )
