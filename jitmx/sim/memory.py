"""State spaces: bytes, what may be done with each, and checked access by many lanes at once.

Every byte of a space has a byte of state. An access by lanes is checked whole: bounds, alignment, initialised bytes,
permission to write, and races (jitmx.sim.races). Where a check fails, the first lane at fault is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError

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
_RED_ZONE = 256
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
        self.spread: npt.NDArray[np.int64] | None = None
        self.resize(size)

    def resize(self, size: int, copies: int = 1) -> None:
        """Fresh bytes, uninitialised and not allocated: `copies` of `size`, one after the other."""
        self.extent = -(-size // 32) * 32
        self.data = np.zeros(max(self.extent * copies, 32), np.uint8)
        self.state = np.zeros_like(self.data)
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
            self._out_of_bounds(m, off, lanes, size, line, what)
        where = off.view("i8")
        return where if self.spread is None else where + self.spread[lanes]

    def load(
        self, m: Machine, address: Array, offset: int, lanes: Array, size: int, count: int, line: Line, how: str = ""
    ) -> Array:
        """What `lanes` read: unsigned [lanes, count] of `size` bytes each. `how`: "" weak, "strong", "nc".

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
        if self.races is not None:
            seen = int(np.bitwise_or.reduce(state, None))
            if how == "nc" and seen & pattern(DIRTY, min(total, 8)):
                self._dirty(m, where, lanes, total, line)
            if seen & pattern(LATE, min(total, 8)):
                self.check_waited(m, where, lanes, total, line, "reads")
            if seen & pattern(WRITABLE, min(total, 8)):
                self.races.read(m, self, where, lanes, total, line, how == "strong")
        return self._rows[size, count].take(index, 0)

    def store(
        self, m: Machine, address: Array, offset: int, lanes: Array, values: Array, line: int, how: str = ""
    ) -> None:
        """Write unsigned `values` [lanes, count]."""
        size, count = values.dtype.itemsize, values.shape[1]
        total = size * count
        where = self.locate(m, address, offset, lanes, total, line, "writes")
        self.check_writable(m, where, lanes, total, line)
        if self.races is not None:
            self.races.write(m, self, where, lanes, total, line, how)
        index = where >> _SHIFT[total]
        self._rows[size, count][index] = values
        self.mark_written(index, total)

    def check_writable(self, m: Machine, where: Array, lanes: Array, total: int, line: int) -> None:
        """Error where a lane writes what it must not."""
        state = self._states[total].take(where >> _SHIFT[total], 0)
        word = pattern(WRITABLE | ALLOCATED, min(total, 8))
        if int(np.bitwise_and.reduce(state, None)) & word != word:
            self._unwritable(m, where, lanes, total, line)
        if self.late and int(np.bitwise_or.reduce(state, None)) & pattern(LATE, min(total, 8)):
            self.check_waited(m, where, lanes, total, line, "writes")

    def check_waited(self, m: Machine, where: Array, lanes: Array, total: int, line: Line, what: str) -> None:
        """Error where a lane uses what the launch before may still use, and nothing tells it that it is done."""
        late = (self._flags(where, total) & LATE != 0).any(1)
        late[late] = ~m.races.after_previous(lanes[late])
        if late.any():
            at = int(late.argmax())
            text = f"{what} {total} bytes of {self.place(int(where[at]))} before griddepcontrol.wait"
            m.fault(line, lanes[at], f"{text}, while the previous kernel may still use them")

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

    def _out_of_bounds(self, m: Machine, off: Array, lanes: Array, size: int, line: Line, what: str) -> None:
        outside = (off >= self.limit) | (off + np.uint64(size) > self.limit)
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
    """Global memory: host arrays under device addresses, with red zones between them."""

    def __init__(self) -> None:
        super().__init__("global", 1 << 16, GLOBAL_BASE)
        self.used = _RED_ZONE
        self.allocations: dict[int, tuple[int, str]] = {}
        self._early: set[int] = set()  # allocations that the launch before does not use

    def allocate(self, size: int, name: str = "", *, writable: bool = True) -> int:
        """The address of `size` fresh bytes, uninitialised."""
        start = self.used
        self.used = -(-(start + size + _RED_ZONE) // _RED_ZONE) * _RED_ZONE
        if self.used > self.extent:
            data, state = self.data, self.state
            self.resize(max(self.used, 2 * self.extent))
            self.data[: data.size], self.state[: state.size] = data, state
        self.state[start : start + size] = ALLOCATED | (WRITABLE if writable else 0)
        self.allocations[start] = size, name
        return self.base + start

    def begin(self, *, programmatic: bool = False) -> None:
        """A launch begins: what earlier ones wrote may be read in every way.

        Args:
            programmatic: the launch before may still be at work, so that what can be written must wait for it unless
                uploaded as `early`.
        """
        self.late = programmatic
        self.state &= np.uint8(0xFF ^ DIRTY ^ LATE)
        if programmatic:
            for start, (size, _) in self.allocations.items():
                here = self.state[start : start + size]
                if size and here[0] & WRITABLE and start not in self._early:
                    here |= LATE

    def upload(self, array: npt.ArrayLike, name: str = "", *, writable: bool = False, early: bool = False) -> int:
        """The address of a copy of `array`, initialised; `early`: the launch before one does not use it."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.allocate(raw.size, name, writable=writable)
        start = address - self.base
        self.data[start : start + raw.size] = raw
        self.state[start : start + raw.size] |= INIT
        if early:
            self._early.add(start)
        return address

    def download(self, address: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """What lies at `address`.

        Raises:
            SimulationError: bytes of it were never written; the message counts them.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = address - self.base
        missing = np.flatnonzero(self.state[start : start + size] & INIT == 0)
        if missing.size:
            raise SimulationError(
                f"{missing.size} of {size} bytes at {address:#x}{self.near(address)} were never written, "
                f"the first at byte {missing[0]}"
            )
        return self.data[start : start + size].view(dtype).reshape(shape).copy()

    def near(self, address: int) -> str:
        start = address - self.base
        for first, (size, name) in self.allocations.items():
            if first - _RED_ZONE < start < first + size + _RED_ZONE:
                what = f"{name or 'an allocation'} of {size} bytes"
                return f" ({start - first} bytes from the start of {what})"
        return ""
