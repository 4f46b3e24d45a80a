"""State spaces: bytes, what may be done with each, and checked access by many lanes at once.

Every byte of a space has a byte of state. An access by lanes is checked whole: bounds, alignment, initialised bytes,
permission to write, and races (jitmx.sim.races). Where a check fails, the first lane at fault is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.segments import Segments
from jitmx.sim.sequence import Sequence

if TYPE_CHECKING:
    from jitmx.sim.clusters import Cluster
    from jitmx.sim.machine import Machine
    from jitmx.sim.races import Races

Array = npt.NDArray[Any]
Line = int | tuple[int, ...]

# State of a byte.
INIT, WRITABLE, ALLOCATED, DIRTY, PENDING, LATE = 1, 2, 4, 8, 16, 32
_WRITTEN = INIT | WRITABLE | ALLOCATED | DIRTY

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_WINDOW = 0x0100_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000
PARAM_WINDOW = 0x0300_0000_0000
SHARED_START = 1024  # as on hardware, where the system keeps the first KiB
_RED_ZONE = 256  # around an allocation, bytes, at least
_WIDE = 1 << 16  # at most; else as wide as it, so that what misses by a row or a page ends in no other
_FAR = 1 << 34  # of far allocations, bytes from the base; what a sign or a carry misses by ends in no other
_FAR_GAP = 1 << 33
_DEVICE_END = GLOBAL_BASE + (1 << 40)
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}


def pattern(flags: int, size: int) -> int:
    """`flags` in each of `size` bytes of a word."""
    return int.from_bytes(bytes([flags]) * size, "little")


class Space:
    """Bytes under one base address; `extent` of them belong to each lane or block where `spread` says whose."""

    cluster: Cluster | None = None  # where other blocks can be reached
    late = False  # whether the launch before may still use some of it

    def __init__(self, name: str, size: int, base: int = 0, first: int = 0) -> None:
        self.name, self.base, self.first = name, base, first
        self.races: Races | None = None
        self._before: tuple[Array, Array] | None = None  # what strong writes have replaced, and where
        self.spread: npt.NDArray[np.int64] | None = None
        self.resize(size)

    def resize(self, size: int, copies: int = 1) -> None:
        """Fresh bytes, uninitialised and not allocated: `copies` of `size`, one after the other."""
        self.extent = -(-size // 32) * 32
        self.data = np.zeros(max(self.extent * copies, 32), np.uint8)
        self.state = np.zeros_like(self.data)
        self._before = None
        self.view()

    def view(self) -> None:
        """Make the views that accesses use; to be called when data or state is another array."""
        self.limit = np.uint64(self.extent)
        self._rows = {
            (size, count): self.data.view(f"u{size}").reshape(-1, count)
            for size in (1, 2, 4, 8)
            for count in (1, 2, 4, 8)
            if size * count <= 32
        }
        self._states = {n: self.state.view(f"u{n}").reshape(-1, 1) for n in (1, 2, 4, 8)}
        self._states |= {16: self.state.view("u8").reshape(-1, 2), 32: self.state.view("u8").reshape(-1, 4)}
        self._base = np.array(self.base, "u8")

    # Checked access by lanes
    def locate(self, m: Machine, address: Array, offset: int, lanes: Array, size: int, line: Line, what: str) -> Array:
        """Offsets of `address + offset` for `lanes`, in their order; bounds and alignment checked."""
        if offset:
            address = address + np.uint64(offset % (1 << 64))
        off = address - self._base if self.base else address
        if off.ndim == 0:
            off = np.broadcast_to(off, lanes.shape)
        if int(off.max()) + size > self.extent or int(np.bitwise_or.reduce(off)) & size - 1:
            return self.beyond(m, off, lanes, size, line, what)
        where = off.view("i8")
        return where if self.spread is None else where + self.spread[lanes]

    def beyond(self, m: Machine, off: Array, lanes: Array, size: int, line: Line, what: str) -> Array:
        """The same where some offsets are beyond the extent, or misaligned."""
        outside = (off >= self.limit) | (off + np.uint64(size) > self.limit)
        self._out_of_bounds(m, off, outside, lanes, size, line, what)

    def load(
        self, m: Machine, address: Array, offset: int, lanes: Array, size: int, count: int, line: Line, how: str = ""
    ) -> Array:
        """What `lanes` read: unsigned [lanes, count] of `size` bytes each. `how`: the order (jitmx.sim.order).

        With several lines, the lanes are those of as many instructions one after the other. Then a fault names one of
        the lines at hand, and who called must find out which.
        """
        where = self.locate(m, address, offset, lanes, size * count, line, "reads")
        return self.load_at(m, where, lanes, size, count, line, how)

    def load_at(
        self, m: Machine, where: Array, lanes: Array, size: int, count: int, line: Line, how: str = ""
    ) -> Array:
        """The same of places that are known."""
        total = size * count
        index = where >> _SHIFT[total]
        state = self._states[total].take(index, 0)
        word = pattern(INIT, min(total, 8))
        if int(np.bitwise_and.reduce(state, None)) & word != word:
            self._uninitialised(m, where, lanes, total, line)
        stale = None
        if self.races is not None:
            seen = int(np.bitwise_or.reduce(state, None))
            if how == "nc" and seen & pattern(DIRTY, min(total, 8)):
                self._dirty(m, where, lanes, total, line)
            if seen & pattern(LATE, min(total, 8)):
                self.check_waited(m, where, lanes, total, line, "reads")
                if how == "nc":
                    m.memory.check_lasting(m, where, lanes, total, line)
            if seen & pattern(WRITABLE, min(total, 8)):
                stale = self.races.read(m, self, where, lanes, total, line, how, count)
        found = self._rows[size, count].take(index, 0)
        if stale is not None and self._before is not None:
            old = self._before[0].view(f"u{size}").reshape(-1, count).take(index, 0)
            parts = np.repeat(stale, total // stale.shape[1], 1)
            found.view(np.uint8)[parts] = old.view(np.uint8)[parts]
        return found

    def store(
        self, m: Machine, address: Array, offset: int, lanes: Array, values: Array, line: int, how: str = ""
    ) -> None:
        """Write unsigned `values` [lanes, count]."""
        size, count = values.dtype.itemsize, values.shape[1]
        total = size * count
        where = self.locate(m, address, offset, lanes, total, line, "writes")
        self.check_writable(m, where, lanes, total, line)
        if self.races is not None:
            self.races.write(m, self, where, lanes, total, line, how, count=count)
        index = where >> _SHIFT[total]
        if how:
            self.keep(index, total)
        self._rows[size, count][index] = values
        self.mark_written(index, total)

    def keep(self, index: Array, total: int) -> None:
        """Remember what lies at `index`, in units of `total`, before the first strong write of a launch."""
        if self.spread is not None:
            return
        if self._before is None:
            self._before = np.zeros_like(self.data), np.zeros_like(self.data)
        size = min(total, 8)
        before, known = (array.view(f"u{size}").reshape(-1, total // size) for array in self._before)
        index = index[~known[index].any(1)]
        before[index], known[index] = self._rows[size, total // size][index], 1

    def check_writable(self, m: Machine, where: Array, lanes: Array, total: int, line: int) -> None:
        """Error where a lane writes what it must not, or where a copy is still on its way to."""
        state = self._states[total].take(where >> _SHIFT[total], 0)
        word = pattern(WRITABLE | ALLOCATED, min(total, 8))
        if int(np.bitwise_and.reduce(state, None)) & word != word:
            self._unwritable(m, where, lanes, total, line)
        if int(np.bitwise_or.reduce(state, None)) & pattern(PENDING, min(total, 8)):
            at = int(np.flatnonzero((self._flags(where, total) & PENDING != 0).any(1))[0])
            there = f"{total} bytes of {self.place(int(where[at]))}"
            m.fault(line, lanes[at], f"writes {there}, to which an asynchronous copy is still under way")
        if self.late and int(np.bitwise_or.reduce(state, None)) & pattern(LATE, min(total, 8)):
            self.check_waited(m, where, lanes, total, line, "writes")

    def check_waited(self, m: Machine, where: Array, lanes: Array, total: int, line: Line, what: str) -> None:
        """Error where a lane uses what a launch before may still use, and nothing tells it that it is done."""
        waited = m.races.after_previous(lanes)
        if np.count_nonzero(waited) == len(lanes):
            return
        late = (self._flags(where, total) & LATE != 0).any(1) & ~waited
        if np.count_nonzero(late):
            m.memory.check_late(m, where[late], lanes[late], total, line, what)

    def check_initialised(self, m: Machine, where: Array, lanes: Array, total: int, line: int) -> None:
        """Error where a lane reads what was never written."""
        word = pattern(INIT, min(total, 8))
        state = self._states[total].take(where >> _SHIFT[total], 0)
        if int(np.bitwise_and.reduce(state, None)) & word != word:
            self._uninitialised(m, where, lanes, total, line)

    def twice(self, where: Array) -> int | None:
        """The first of places to be written which an earlier one is as well."""
        if np.count_nonzero(where[1:] > where[:-1]) == len(where) - 1:
            return None
        order = where.argsort(kind="stable")
        again = (where[order][1:] == where[order][:-1]).nonzero()[0]
        return int(order[again + 1].min()) if again.size else None

    def rows(self, size: int, count: int) -> Array:
        """All bytes as unsigned [n, count] of `size` bytes each."""
        return self._rows[size, count]

    def mark_written(self, index: Array, total: int) -> None:
        """Bytes at `index`, in units of `total`, hold what this launch wrote."""
        self._states[total][index] = pattern(_WRITTEN, min(total, 8))

    # Faults
    def address_of(self, where: int) -> int:
        """The address, as the kernel sees it, of a byte of the arrays."""
        return self.base + (where % self.extent if self.spread is not None else where)

    def place(self, where: int) -> str:
        """A byte of the arrays, for messages."""
        return f"{self.name} memory at {self.address_of(where):#x}"

    def _flags(self, where: Array, total: int) -> Array:
        return self.state[where[:, None] + np.arange(total)]

    def _out_of_bounds(
        self, m: Machine, off: Array, outside: Array, lanes: Array, size: int, line: Line, what: str
    ) -> NoReturn:
        at = int(np.flatnonzero(outside | (off & np.uint64(size - 1) != 0))[0])
        address = int(off[at]) + self.base & (1 << 64) - 1
        if outside[at]:
            m.fault(
                line,
                lanes[at],
                f"{what} {size} bytes of {self.name} memory outside of it, at {address:#x}{self.near(address)}",
            )
        m.fault(line, lanes[at], f"{what} {size} bytes of {self.name} memory at {address:#x}, which is misaligned")

    def near(self, address: int) -> str:
        """What lies around an address, for messages."""
        return f" ({self.name} memory has {self.extent} bytes)" if self.spread is not None else ""

    def _uninitialised(self, m: Machine, where: Array, lanes: Array, total: int, line: Line) -> None:
        flags = self._flags(where, total)
        at = int(np.flatnonzero((flags & INIT == 0).any(1))[0])
        byte = int(np.flatnonzero(flags[at] & INIT == 0)[0])
        address, flag = self.address_of(int(where[at])), int(flags[at, byte])
        if not flag & ALLOCATED:
            m.fault(
                line,
                lanes[at],
                f"reads {total} bytes of {self.name} memory out of bounds, at {address:#x}{self.near(address)}",
            )
        state = "still under way of an asynchronous copy" if flag & PENDING else "uninitialised"
        m.fault(
            line,
            lanes[at],
            f"reads {total} bytes of {self.place(int(where[at]))}, of which byte {byte} is {state}",
        )

    def _unwritable(self, m: Machine, where: Array, lanes: Array, total: int, line: int) -> None:
        flags = self._flags(where, total)
        at = int(np.flatnonzero((flags & (WRITABLE | ALLOCATED) != WRITABLE | ALLOCATED).any(1))[0])
        address = self.address_of(int(where[at]))
        if (flags[at] & ALLOCATED == 0).any():
            m.fault(
                line,
                lanes[at],
                f"writes {total} bytes of {self.name} memory out of bounds, at {address:#x}{self.near(address)}",
            )
        m.fault(line, lanes[at], f"writes {total} bytes of read-only {self.name} memory at {address:#x}")

    def _dirty(self, m: Machine, where: Array, lanes: Array, total: int, line: Line) -> None:
        at = int(np.flatnonzero((self._flags(where, total) & DIRTY != 0).any(1))[0])
        address = self.address_of(int(where[at]))
        m.fault(line, lanes[at], f"reads {total} bytes at {address:#x} through .nc, but this launch has written them")


class Memory(Space):
    """Global memory: host arrays under device addresses, with red zones between them.

    A far allocation may be of any size: only pieces of it hold bytes, and whatever lies between them is out of bounds.
    Its bytes lie behind those of the other allocations, so that these are found by a subtraction as ever.
    """

    def __init__(self) -> None:
        super().__init__("global", 1 << 16, GLOBAL_BASE)
        self._end, self.used = 0, _RED_ZONE  # of the last allocation, and of the red zone behind it
        self.allocations: dict[int, tuple[int, str]] = {}
        # Where allocations start, rising, and which are used early; None where these are to be looked up anew.
        self._starts: tuple[Array, Array] | None = None
        self._segments = Segments()
        self._beyond_far = _FAR  # where the next far allocation starts
        self._freed: dict[int, list[int]] = {}  # by size
        self.sequence = Sequence()  # the launches on it
        # Allocations that nothing on the stream writes; that this launch uses before its wait; and the next one so.
        self._constant: set[int] = set()
        self._early: set[int] = set()
        self._ahead: set[int] = set()

    def allocate(self, size: int, name: str = "", *, writable: bool = True, anew: bool = False) -> int:
        """The address of `size` fresh bytes, uninitialised; `anew`: where no launch has written."""
        freed = None if anew else self._freed.get(size)
        if freed:
            start = freed.pop()
        else:
            around = -(-min(max(size, _RED_ZONE), _WIDE) // _RED_ZONE) * _RED_ZONE
            start = max(self.used, self._end + around)
            self._end = -(-(start + size) // _RED_ZONE) * _RED_ZONE
            self.used = self._end + around
        if self.used > self.extent:
            self._hold(max(self.used, 2 * self.extent))
        self.state[start : start + size] = ALLOCATED | (WRITABLE if writable else 0)
        self.allocations[start], self._starts = (size, name), None
        return self.base + start

    def allocate_far(self, size: int, at: Array, piece: int, name: str = "", *, writable: bool = True) -> int:
        """The address of `size` bytes, of which there are only `piece` fresh ones at each offset in `at`.

        Raises:
            SimulationError: pieces outside of it, or more than device addresses hold.
        """
        start, at = self._beyond_far, at.reshape(-1)
        if self.base + start + size > _DEVICE_END or piece < 1 or at.min() < 0 or at.max() + piece > size:
            raise SimulationError(f"no far allocation of {size} bytes with {piece} at {at.min()} to {at.max()} can be")
        self._beyond_far = -(-(start + size + _FAR_GAP) // _FAR_GAP) * _FAR_GAP
        self._segments.add(start + at, piece)
        self._hold(self.extent)
        self.state[self._places(start, at, piece)] = ALLOCATED | (WRITABLE if writable else 0)
        self.allocations[start], self._starts = (size, name), None
        return self.base + start

    def _hold(self, near: int) -> None:
        """Room for `near` bytes of near allocations, and behind them for all segments."""
        data, state, before = self.data, self.state, self.extent
        self.extent = -(-near // _RED_ZONE) * _RED_ZONE
        self.data = np.zeros(self.extent + self._segments.size, np.uint8)
        self.state = np.zeros_like(self.data)
        for old, new in ((data, self.data), (state, self.state)):
            new[:before] = old[:before]
            new[self.extent : self.extent + len(old) - before] = old[before:]
        self.view()

    def _places(self, start: int, at: Array, piece: int) -> Array:
        """Where the bytes of each piece of a far allocation lie in the arrays, [pieces, bytes]."""
        where, inside = self._segments.find(start + at.reshape(-1), piece)
        assert inside.all()
        return self.extent + where[:, None] + np.arange(piece)

    def beyond(self, m: Machine, off: Array, lanes: Array, size: int, line: Line, what: str) -> Array:
        near = off <= np.uint64(self.extent - size)
        where, far = self._segments.find(off, size) if self._segments.size else (off, np.zeros_like(near))
        inside = near | far
        if np.count_nonzero(inside) != len(inside) or int(np.bitwise_or.reduce(off)) & size - 1:
            self._out_of_bounds(m, off, ~inside, lanes, size, line, what)
        return np.where(near, off.view("i8"), where + self.extent)

    def address_of(self, where: int) -> int:
        return self.base + (where if where < self.extent else int(self._segments.address_of(where - self.extent)))

    def free(self, address: int) -> None:
        """Nobody may use an allocation any more; the next one of its size takes its place."""
        start = address - self.base
        size, _ = self.allocations.pop(start)
        self._starts = None
        self.state[start : start + size] = 0
        self._freed.setdefault(size, []).append(start)
        for having in (self._constant, self._early, self._ahead):
            having.discard(start)

    def begin(self, *, programmatic: bool = False) -> None:
        """A launch begins: what earlier ones wrote may be read in every way.

        Args:
            programmatic: the launch before may still be at work, so that whoever uses what was not uploaded as
                `constant` must wait for it.
        """
        self.late = programmatic
        self.sequence.begin(programmatic=programmatic)
        self._before = None
        self.state &= np.uint8(0xFF ^ DIRTY ^ LATE)
        if programmatic:
            for start, (size, _) in self.allocations.items():
                if start not in self._constant:
                    for here in self._states_of(start, size):
                        here |= (here & ALLOCATED != 0) * np.uint8(LATE)

    def _states_of(self, start: int, size: int) -> list[Array]:
        """The state of all bytes that an allocation has; of a far one, of a few beside its pieces too."""
        if start < _FAR:
            return [self.state[start : start + size]]
        return [self.state[self.extent :][run] for run in self._segments.between(start, start + size)]

    def check_late(self, m: Machine, where: Array, lanes: Array, total: int, line: Line, what: str) -> None:
        """Error where lanes that have not waited use what launches before may be using, unless these allow it."""
        forbidden = ~self._used_early(where)
        if np.count_nonzero(forbidden):
            at = int(forbidden.argmax())
            place = int(where[at])
            text = f"{what} {total} bytes of {self.place(place)}{self.near(place + self.base)}"
            text += " before griddepcontrol.wait, while the previous kernel may still use them"
            m.fault(line, lanes[at], text)
        self.sequence.check(m, self, where, lanes, total, line, what)

    def check_lasting(self, m: Machine, where: Array, lanes: Array, total: int, line: Line) -> None:
        """Error where lanes read through .nc what the launch before may have written since this one began."""
        changed = (self.state.take(where) & LATE != 0) & ~self._used_early(where)
        if np.count_nonzero(changed):
            at = int(changed.argmax())
            place = int(where[at])
            text = f"reads {total} bytes of {self.place(place)}{self.near(place + self.base)} through .nc, but the "
            text += "previous kernel may have written them since this launch began"
            m.fault(line, lanes[at], text)

    def any_early(self) -> bool:
        """Whether launches use some of it before they wait."""
        return bool(self._early)

    def ahead(self) -> list[str]:
        """Names of what the next launch uses before it waits."""
        return [self.allocations[start][1] for start in sorted(self._ahead)]

    def _used_early(self, where: Array) -> Array:
        """Which bytes lie in allocations that this launch uses before its wait."""
        if self._starts is None:
            starts = np.sort(np.fromiter(self.allocations, np.int64))
            self._starts = starts, np.isin(starts, np.fromiter(self._early, np.int64))
        starts, early = self._starts
        far = where >= self.extent
        if np.count_nonzero(far):
            where = where.copy()
            where[far] = self._segments.address_of(where[far] - self.extent)
        return np.asarray(early.take(starts.searchsorted(where, "right") - 1))

    def upload(
        self, array: npt.ArrayLike, name: str = "", *, writable: bool = False, constant: bool = False,
        early: bool = False, ahead: bool = False,
    ) -> int:  # fmt: skip
        """The address of a copy of `array`, initialised; the rest as of `jitmx.registry.case.Buffer`."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.allocate(raw.size, name, writable=writable, anew=early)
        start = address - self.base
        self.data[start : start + raw.size] = raw
        self.state[start : start + raw.size] |= INIT
        self._mark(start, constant, early, ahead)
        return address

    def _mark(self, start: int, constant: bool, early: bool, ahead: bool) -> None:
        for flag, having in ((constant, self._constant), (early, self._early), (ahead, self._ahead)):
            if flag:
                having.add(start)
        self._starts = None

    def upload_far(
        self, array: Array, at: Array, size: int, name: str = "", *, writable: bool = False, constant: bool = False,
        early: bool = False, ahead: bool = False,
    ) -> int:  # fmt: skip
        """The same of `size` bytes, of which there are only the rows of `array`, at these offsets."""
        raw = np.ascontiguousarray(array).reshape(at.size, -1).view(np.uint8)
        address = self.allocate_far(size, at, raw.shape[1], name, writable=writable)
        places = self._places(address - self.base, at, raw.shape[1])
        self.data[places] = raw
        self.state[places] |= np.uint8(INIT)
        self._mark(address - self.base, constant, early, ahead)
        return address

    def download(self, address: int, dtype: npt.DTypeLike, shape: tuple[int, ...], at: Array | None = None) -> Array:
        """What lies at `address`; of a far allocation, the rows at the offsets `at`.

        Raises:
            SimulationError: bytes of it were never written; the message counts them.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = address - self.base
        where = slice(start, start + size) if at is None else self._places(start, at, size // at.size).reshape(-1)
        missing = np.flatnonzero(self.state[where] & INIT == 0)
        if missing.size:
            raise SimulationError(
                f"{missing.size} of {size} bytes at {address:#x}{self.near(address)} were never written, "
                f"the first at byte {missing[0]}"
            )
        return self.data[where].view(dtype).reshape(shape).copy()

    def near(self, address: int) -> str:
        start = address - self.base
        for first, (size, name) in self.allocations.items():
            if first - _RED_ZONE < start < first + size + _RED_ZONE:
                what = f"{name or 'an allocation'} of {size} bytes"
                sparse = (
                    ", of which this case has other pieces" if first >= _FAR and first <= start < first + size else ""
                )
                return f" ({start - first} bytes from the start of {what}{sparse})"
        return ""
