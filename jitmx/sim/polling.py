"""Lanes that poll: they step back until no other lane can run.

Lanes that wait for a phase of an mbarrier are not even woken then, unless it has completed or nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Group = tuple[Array | None, int]  # mask of lanes, None for all of the machine, and how many they are

_ROUNDS = 1000  # without any event, after which lanes count as polling for ever


class Polling:
    """The lanes of a machine that poll."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.now: Array | None = None  # those that have polled in the step at hand
        self.held: dict[int, Group] = {}  # those that stepped back, by where they go on
        self.progress: Callable[[Array], Array] | None = None  # which of those that wait for an mbarrier may go on
        self._known = np.zeros(lanes, bool)  # those that wait for an mbarrier
        self._woken = np.zeros(lanes, bool)  # those that go on and have not looked since
        self._idle, self._events = 0, -1

    def add(self, lanes: Array, *, known: bool = False) -> None:
        """These lanes wait for something; `known`: for a phase of an mbarrier."""
        if self.now is None:
            self.now = np.zeros(self.lanes, bool)
        self.now[lanes] = True
        self._known[lanes] = known
        self._woken[lanes] = False

    def watching(self) -> Array | None:
        """Those that poll memory and have stepped back, or go on and have not looked yet; None if there are none.

        No mbarrier will wake them.
        """
        found = self._woken.copy()
        for mask, _ in self.held.values():
            found |= True if mask is None else mask
        found &= ~self._known
        return found if found.any() else None

    def for_mbarriers(self) -> bool:
        """Whether all that have stepped back wait for an mbarrier."""
        return all(self._known[slice(None) if mask is None else mask].all() for mask, _ in self.held.values())

    def wake(self, lanes: Array) -> dict[int, Group]:
        """Lanes that have stepped back look again, by where they go on."""
        self._woken[:] = False
        out: dict[int, Group] = {}
        for pc, (mask, n) in list(self.held.items()):
            waking = lanes if mask is None else mask & lanes
            k = int(np.count_nonzero(waking))
            if k == n:
                out[pc] = self.held.pop(pc)
            elif k:
                out[pc] = waking.copy(), k
                self.held[pc] = (~lanes if mask is None else mask & ~lanes), n - k
        return out

    def step_back(self, pc: int, mask: Array | None, n: int) -> Group:
        """Hold those of a group that have polled; the rest of it."""
        assert self.now is not None
        back = self.now if mask is None else self.now & mask
        k = int(np.count_nonzero(back))
        if k:
            self._hold(pc, back, k)
        return (~back if mask is None else mask & ~back), n - k

    def _hold(self, pc: int, back: Array, k: int) -> None:
        held = self.held.get(pc)
        if held is not None and held[0] is not None:
            back, k = back | held[0], k + held[1]
        self.held[pc] = (None, k) if k == self.lanes else (back, k)

    def release(self, events: int) -> dict[int, Group] | None:
        """Who goes on now that nobody else can; None if that has led to nothing for long."""
        self._idle = self._idle + 1 if events == self._events else 0
        self._events = events
        if self._idle > _ROUNDS:
            return None
        held, self.held = self.held, {}
        for mask, _ in held.values():
            self._woken |= True if mask is None else mask
        if self.progress is None or self._idle:
            return held
        out: dict[int, Group] = {}
        for pc, (mask, n) in held.items():
            lanes = np.arange(self.lanes) if mask is None else mask.nonzero()[0]
            ready = ~self._known[lanes] | self.progress(lanes)
            k = int(np.count_nonzero(ready))
            if k == n:
                out[pc] = mask, n
                continue
            waking, waiting = np.zeros(self.lanes, bool), np.zeros(self.lanes, bool)
            waking[lanes[ready]], waiting[lanes[~ready]] = True, True
            self.held[pc] = waiting, n - k
            if k:
                out[pc] = waking, k
        if not out:
            out, self.held = held, {}
        return out
