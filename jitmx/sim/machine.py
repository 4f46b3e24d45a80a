"""The machine: lanes of some resident blocks, their registers, and the scheduler that runs basic blocks over them.

Lanes are numbered block by block, `width` (a multiple of 32) to a block; those past the block's threads never run.
Lanes at one basic block form a group. The scheduler runs the group with the lowest block index, so that lanes which
took different ways meet again; groups that come to the same place merge. Lanes that poll memory step back until no
other can run. What others may poll for is changed last, and by one warp after the other, between which they look: so
who waits for a warp too few goes on without it. Where nothing can run and lanes still wait, the error tells who waits
where.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jitmx.errors import SimulationError
from jitmx.sim.barriers import Barriers
from jitmx.sim.bound import Bound
from jitmx.sim.clusters import Cluster
from jitmx.sim.layout import place
from jitmx.sim.masks import Masks
from jitmx.sim.memory import (
    ALLOCATED,
    INIT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_START,
    SHARED_WINDOW,
    WRITABLE,
    Memory,
    Space,
)
from jitmx.sim.polling import Polling
from jitmx.sim.program import BLOCKED, EXIT, SET, Block, Program
from jitmx.sim.races import Races
from jitmx.sim.shadow import Shadow
from jitmx.sim.specials import special

Array = npt.NDArray[Any]
# Programs that keep their registers for the next machine, the last to run at the end: registers are what takes memory.
_KEPT = 16
_kept: dict[int, Program] = {}
_FILLER = 0xA5  # a byte of a register that nothing sets
_LOOKS = 8  # blocks that lanes which poll may run before others go on


class Machine:
    """Blocks `first` … of a launch, together."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks: Array,
        shared_bytes: int,
        arguments: bytes,
        *,
        cluster: int = 1,
        clock: int = 0,
        max_steps: int = 2_000_000,
        order: Array | None = None,
        slow: int | None = None,
        held: int | None = None,
    ) -> None:
        """Args as of `simulate`, and:

        order: where blocks lie in the grid by their numbers; None: the same.
        slow: the cluster of these, counted from the first, or if negative from the last, none of whose threads begins
            before all others wait. The first finds at once what they have written, where it does not poll.
        held: the cluster of these, counted likewise, that waits behind the first atomic operation until all others do,
            the next one behind the next, and so on.
        """
        self.order, self.slow, self.held = order, slow, held
        self.program, self.memory, self.grid, self.block = program, memory, grid, block
        self.blocks, self.max_steps, self.cluster_size = blocks, max_steps, cluster
        self.threads = int(np.prod(block))
        self.width = -(-self.threads // 32) * 32
        self.lanes = len(blocks) * self.width
        self.lane_ids = np.arange(self.lanes)
        self.alive = self.lane_ids % self.width < self.threads
        self.steps, self.events = 0, 0
        self.atomics = memory.sequence.count - 1  # whose lanes act by turns: not as in the launch before
        self.runs = [0] * len(program.blocks)
        self.lane_runs = [0] * len(program.blocks)
        self.polling = Polling(self.lanes)
        self.masks = Masks(self.lanes)
        self.units: dict[str, Any] = {}  # state that semantic modules keep: copies under way, mbarriers
        self._spaces(shared_bytes, arguments)
        self.races.time = clock
        self.barriers = Barriers(self)
        self.cluster = Cluster(self, cluster)
        self.reach = self.shared if cluster == 1 else self.cluster.window  # what generic addresses reach
        self._bind()

    # Memory
    def _spaces(self, shared_bytes: int, arguments: bytes) -> None:
        self.symbols, static, between, local, params = place(self.program, arguments)
        self.races = Races(self.blocks, self.threads, self.width, self.cluster_size)
        self.shared = Space("shared", 0, 0)
        self.shared_size, self.dynamic_size = static + shared_bytes, shared_bytes
        self.total_size = self.shared_size - sum(gap.stop - gap.start for gap in between)
        self.shared.resize(self.shared_size, len(self.blocks))
        self.shared.spread = (self.lane_ids // self.width) * self.shared.extent
        allocated = self.shared.state.reshape(len(self.blocks), -1) if self.shared_size else None
        if allocated is not None:
            allocated[:, SHARED_START : self.shared_size] = WRITABLE | ALLOCATED
            for gap in between:
                allocated[:, gap] = 0
        self.local = Space("local", 0, 0)
        self.local.resize(local, self.lanes)
        self.local.state[:] = WRITABLE | ALLOCATED
        self.local.spread = self.lane_ids * self.local.extent
        self.param = Space("parameter", len(params), 0)
        self.param.data[: len(params)] = np.frombuffer(params, np.uint8)
        self.param.state[: len(params)] = INIT | ALLOCATED
        granules = self.program.granules
        others = self.cluster_size if self.cluster_size > 1 else 0
        self.races.shadows["shared"] = Shadow(
            self.shared.data.size, granules["shared"], self.width // 32, others=others
        )
        self.races.foreigners = others > 0
        self.shared.races = self.memory.races = self.races

    def use_shadow(self, shadow: Shadow | None) -> Shadow:
        """The shadow of global memory, kept over the machines of a launch."""
        if shadow is None:
            shadow = Shadow(self.memory.data.size, self.program.granules["global"], 8, others=8)
        self.races.shadows["global"] = shadow
        return shadow

    def symbol(self, name: str, offset: int, dtype: str) -> Array:
        """The address of a variable in its space."""
        if name not in self.symbols:
            raise SimulationError(f"{self.program.entry.name}: symbol {name} is not known")
        return np.array((self.symbols[name] + offset) % (1 << 64), "u8").astype(dtype)

    def space(self, address: int) -> Space:
        """The space that a generic address lies in."""
        for window, space in ((SHARED_WINDOW, self.reach), (LOCAL_WINDOW, self.local), (PARAM_WINDOW, self.param)):
            if 0 <= address - window < 1 << 32:
                return space
        return self.memory

    # Registers
    def _bind(self) -> None:
        """Registers, and the functions that work on them; kept with the program for the next machine of this size."""
        program = _kept[id(self.program)] = _kept.pop(id(self.program), self.program)
        if len(_kept) > _KEPT:
            _kept.pop(next(iter(_kept))).bound.clear()
        bound = program.bound.get(self.lanes)
        if bound is None:
            bound = Bound.of(self.program)
            if len(self.program.bound) == 4:
                self.program.bound.clear()
            self.program.bound[self.lanes] = bound
        self.bound: Bound = bound
        self.names = bound.names
        for name, array in bound.registers.items():
            self._begin(name, array)
        self._name()

    def _begin(self, name: str, array: Array) -> None:
        if name in self.program.specials:
            array[:] = special(self, name)
        elif name.endswith(SET):
            array[:] = False
        elif name in self.program.fillers:
            array.view("u1")[:] = _FILLER

    def _name(self) -> None:
        """Give names to registers and constants that blocks have come to use."""
        bound, program = self.bound, self.program
        for name, (register, dtype) in itertools.islice(program.views.items(), bound.views, None):
            array = bound.registers.get(register)
            if array is None:
                array = bound.registers[register] = np.zeros(self.lanes, program.registers[register])
                self._begin(register, array)
            self.names[name] = array.view(dtype)
        bound.views = len(program.views)
        if bound.objects != len(program.objects):
            self.names |= program.objects
            bound.objects = len(program.objects)

    def need(self, flags: Array, mask: Array | None, line: int, name: str) -> None:
        """Error where an active lane reads a register that it never set."""
        bad = ~flags if mask is None else mask & ~flags
        if bad.any():
            self.fault(line, int(bad.nonzero()[0][0]), f"reads register {name}, which nothing has set")

    def _function(self, index: int, form: str) -> Any:
        scope: dict[str, Any] = {}
        code = self.program.code(index, form)
        self._name()
        exec(code, self.names, scope)
        made = getattr(self.bound, form)[index] = scope[form]
        return made

    # Names for messages
    def thread_name(self, thread: int) -> str:
        """ "5", or "(1, 2, 0)" in a block of more dimensions."""
        x, y, z = self.block
        return str(thread) if y == z == 1 else f"({thread % x}, {thread // x % y}, {thread // (x * y)})"

    def block_name(self, index: int) -> str:
        """As thread_name, of a block in the grid, by its number."""
        x, y, z = self.grid
        index = index if self.order is None else int(self.order[index])
        return str(index) if y == z == 1 else f"({index % x}, {index // x % y}, {index // (x * y)})"

    def shared_name(self, position: int, lane: int) -> str:
        """Shared memory of the block at a position, as a lane sees it."""
        block = "" if position == lane // self.width else f" of block {self.block_name(int(self.blocks[position]))}"
        return "shared memory" + block

    def fault(self, line: int | tuple[int, ...], lane: int, text: str) -> NoReturn:
        """The error of one thread."""
        block = self.block_name(int(self.blocks[int(lane) // self.width]))
        thread = self.thread_name(int(lane) % self.width)
        raise SimulationError(f"{self.program.entry.name}, PTX line {line}, block {block}, thread {thread}: {text}")

    def trap(self, mask: Array | None, line: int) -> NoReturn:
        """The trap instruction."""
        self.fault(line, int(self.active(mask)[0]), "trap")

    def active(self, mask: Array | None) -> Array:
        """Lanes of a mask, in order."""
        return self.lane_ids if mask is None else self.masks.active(mask)

    # Scheduling
    def run(self) -> None:
        """Run every lane to its end.

        Raises:
            SimulationError: a fault of a thread, or lanes that wait for ever.
        """
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        groups: dict[int, tuple[Array | None, int]] = {
            0: (None, self.lanes) if self.alive.all() else (self.alive.copy(), int(self.alive.sum()))
        }
        self.groups = groups
        late, events = self._hold_back(), -1
        overtaken, later = self._overtaken(), self._later()
        behind: dict[int, tuple[Array, int]] = {}  # those that others overtake, by where they go on
        self.parked: dict[int, tuple[Array, int]] = {}
        polling = self.polling
        looking, looks, again = self.alive, 0, False  # lanes that poll and go first, for so many steps, and once more
        blocks, runs, lane_runs = self.program.blocks, self.runs, self.lane_runs
        signals = [block.signals and bool(self.program.polled) for block in blocks]
        rank = [index + len(blocks) * last for index, last in enumerate(signals)]
        full, warps, masked = self.bound.full, self.bound.whole, self.bound.masked
        while True:
            if not groups:
                idle = not polling.held or (self.events == events and (not later or polling.for_mbarriers()))
                if late is not None and idle:
                    groups[0], late = (late, int(late.sum())), None
                    continue
                if behind and idle:
                    for at in sorted(behind)[: 1 if later else None]:
                        groups[at] = behind.pop(at)
                    continue
                events = self.events
                if not polling.held:
                    if self.parked or self.barriers.waiting() or self.cluster.waiting():
                        self.stuck()
                    for unit in ("mbarriers", "registers"):
                        if unit in self.units:
                            self.units[unit].end()
                    return
                released = polling.release(self.events)
                if released is None:
                    pc, (mask, _) = next(iter(polling.held.items()))
                    self.fault(
                        blocks[pc].lines[-1],
                        int(self.active(mask)[0]),
                        "polls for ever: no thread makes progress" + self.waits(),
                    )
                groups.update(released)
            first = [pc for pc, (mask, _) in groups.items() if mask is None or (mask & looking).any()] if looks else []
            if looks and not first and again:
                looks, again = _LOOKS, False
                for at, (woken, size) in polling.wake(looking).items():
                    self.join(at, woken, size)
                continue
            looks = looks - 1 if first else 0
            pc = min(first or groups, key=rank.__getitem__) if len(groups) > 1 else next(iter(groups))
            mask, n = groups.pop(pc)
            if late is not None and pc in later:
                assert mask is not None
                mask, n = self._wait_behind(behind, pc, mask, mask & later[pc])
                if not n:
                    continue
            block = blocks[pc]
            told = polling.watching() if signals[pc] else None
            if told is not None and block.breadth == block.width == 32:
                mask, n = self._first_warp(pc, mask, n)
            whole = mask is None or self._whole(mask, block)
            if block.members and (not whole or pc in self.parked):
                mask, n = self._gather(pc, mask, n)
                if n == 0:
                    continue
                whole = mask is None or self._whole(mask, block)
            until = block.until if whole else 0
            for index in range(pc, until or pc + 1):
                runs[index] += 1
                lane_runs[index] += n
            self.steps += 1
            if self.steps > self.max_steps:
                self.fault(
                    block.lines[0], int(self.active(mask)[0]), f"still runs after {self.max_steps} steps of its blocks"
                )
            self.masks.current = mask
            if mask is None:
                after = (full[pc] or self._function(pc, "full"))(self, None, n)
            elif until:
                after = (warps[pc] or self._function(pc, "whole"))(self, mask, n)
            else:
                after = (masked[pc] or self._function(pc, "masked"))(self, mask, n)
            if told is not None and not first:
                looking, looks, again = told, _LOOKS, True  # a first look may find what was there before
                for at, (woken, size) in polling.wake(told).items():
                    self.join(at, woken, size)
            if overtaken and (last := (until or pc + 1) - 1) in overtaken:
                here = self.alive if mask is None else mask
                if (back := here & overtaken[last]).any():
                    assert type(after) is int
                    mask, n = self._wait_behind(behind, after, here, back)
                    if not n:
                        polling.now = None
                        continue
            if type(after) is int:
                if polling.now is not None:
                    if after >= 0:
                        self._step_back(after, mask, n)
                    polling.now = None
                elif after >= 0:
                    if after in groups:
                        self.join(after, mask, n)
                    else:
                        groups[after] = mask, n
                elif after == EXIT:
                    self.ended(mask)
                else:
                    assert after == BLOCKED
            else:
                taken, k, there, here = after
                if n == self.lanes:
                    rest = ~taken
                    if polling.now is not None:
                        polling.now &= ~taken | (there >= 0)
                else:
                    rest = mask & ~taken
                for target, part, size in ((there, taken.copy() if mask is None else taken, k), (here, rest, n - k)):
                    if target < 0:
                        self.ended(part)
                    elif polling.now is not None and (polling.now & part).any():
                        self._step_back(target, part, size)
                    else:
                        self.join(target, part, size)
                polling.now = None

    def _hold_back(self) -> Array | None:
        """Take the lanes of the slow cluster out of those that begin; which they are, None where there is but one."""
        late = self._lanes_of(self.slow)
        if late is None:
            return None
        if self.slow == 0:
            self.races.prompt = late  # any other cluster that is late may find what is old
        begin = self.alive & ~late
        self.groups[0] = begin, int(begin.sum())
        return late

    def _lanes_of(self, cluster: int | None) -> Array | None:
        """The lanes of a cluster by number, which may be negative; None where none is asked for or there is but one."""
        count = len(self.blocks) // self.cluster_size
        if cluster is None or count < 2:
            return None
        return np.asarray(self.alive & (self.lane_ids // (self.width * self.cluster_size) == cluster % count))

    def _overtaken(self) -> dict[int, Array]:
        """The lanes that others overtake behind the atomic operation of a block, where lanes poll."""
        if self.held is None or not self.program.polled:
            return {}
        ends = [block.index for block in self.program.blocks if block.counts]
        lanes = ((end, self._lanes_of(self.held + i)) for i, end in enumerate(ends))
        return {end: some for end, some in lanes if some is not None}

    def _later(self) -> dict[int, Array]:
        """The lanes that wait for the slow cluster at each atomic operation behind the first; none where lanes poll.

        What they have found before that is old by then. Clusters take turns in where they wait.
        """
        sites = [block.index for block in self.program.blocks if block.counts][1:]
        if self.slow is None or self.program.polled or not sites:
            return {}
        turns = self.lane_ids // (self.width * self.cluster_size) % len(sites)
        return {site: turns == turn for turn, site in enumerate(sites)}

    @staticmethod
    def _wait_behind(behind: dict[int, tuple[Array, int]], pc: int, mask: Array, back: Array) -> tuple[Array, int]:
        """Put these lanes of a group with those that wait at a place; the rest of it."""
        k = int(np.count_nonzero(back))
        if k:
            before, size = behind.get(pc, (back, 0))
            behind[pc] = before | back, size + k
        rest = mask & ~back
        return rest, int(np.count_nonzero(rest))

    def _first_warp(self, pc: int, mask: Array | None, n: int) -> tuple[Array | None, int]:
        """The first warp of a group; the others stay where they are."""
        here = self.alive if mask is None else mask
        own = here & (self.lane_ids // 32 == int(here.argmax()) // 32)
        k = int(np.count_nonzero(own))
        if k == n:
            return mask, n
        self.join(pc, here & ~own, n - k)
        return own, k

    def join(self, pc: int, mask: Array | None, n: int) -> None:
        """Add lanes to the group at `pc`."""
        have = self.groups.get(pc)
        if have is None:
            self.groups[pc] = mask, n
            return
        assert mask is not None and have[0] is not None
        n += have[1]
        self.groups[pc] = (None, n) if n == self.lanes else (mask | have[0], n)

    def _step_back(self, pc: int, mask: Array | None, n: int) -> None:
        """Lanes that polled wait for the others; the rest of their group goes on."""
        ahead, k = self.polling.step_back(pc, mask, n)
        if k:
            self.join(pc, ahead, k)

    def poll(self, lanes: Array) -> None:
        """These lanes wait for a word to change: let others run before they go on."""
        self.polling.add(lanes)

    def ended(self, mask: Array | None) -> None:
        """These lanes are done."""
        self.events += 1
        if mask is None:
            self.alive[:] = False
        else:
            self.alive &= ~mask
        self.cluster.ended()
        if "copies" in self.units:
            self.units["copies"].ended(mask)
        for pc in list(self.parked):
            if pc not in self.groups:
                self.groups[pc] = self.parked.pop(pc)

    # Warp-wide instructions
    def _whole(self, mask: Array, block: Block) -> bool:
        """Whether a run from `block` on may take the lanes of a mask as they come."""
        if not (block.members or block.until > block.index + 1) or not block.until:
            return False
        return self.masks.whole(mask, block.breadth)

    def _gather(self, pc: int, mask: Array | None, n: int) -> tuple[Array | None, int]:
        """The lanes at a warp-wide instruction whose partners are all there; the others are parked."""
        if pc in self.parked:
            other, size = self.parked.pop(pc)
            mask, n = (other if mask is None else mask | other), n + size
        if mask is None or n == self.lanes:
            return None, n
        block = self.program.blocks[pc]
        here = self._grouped(mask, block.width)
        if not np.count_nonzero(here != here[:, :1]):
            return mask, n
        members = np.broadcast_to(eval(block.members, self.names, {"m": self}), mask.shape)
        if block.width != 32:
            short = self._grouped(self.alive & ~mask, block.width).any(1)
        else:
            wanted = (members[:, None] >> np.arange(32, dtype="u4") & 1).astype(bool)
            around = (self.alive & ~mask).reshape(-1, 32)
            lacking = (wanted.reshape(-1, 32, 32) & around[:, None, :]).any(2)
            short = (lacking & here).any(1)
        late = mask & np.repeat(short, here.shape[1]).reshape(len(self.blocks), -1)[:, : self.width].reshape(-1)
        k = int(np.count_nonzero(late))
        if k == 0:
            return mask, n
        self.parked[pc] = late, k
        return (mask & ~late, n - k) if n - k else (None, 0)

    def _grouped(self, lanes: Array, width: int) -> Array:
        """Lanes [groups, width]: warps or warpgroups of blocks, of which the last is filled up with none."""
        if self.width % width == 0:
            return lanes.reshape(-1, width)
        return np.pad(lanes.reshape(-1, self.width), ((0, 0), (0, -self.width % width))).reshape(-1, width)

    # Threads that cannot go on
    def waits(self) -> str:
        """Who waits where, for messages."""
        out = []
        for pc, (mask, _) in self.parked.items():
            block = self.program.blocks[pc]
            where = f"PTX line {block.lines[0]} ({block.head})"
            out.append(f"{self.describe(mask)} wait at {where} for other lanes of their warp")
        out += self.barriers.waits() + self.cluster.waits()
        return "".join("; " + text for text in out)

    def describe(self, mask: Array) -> str:
        """Lanes of the first block that has any, as ranges of threads."""
        lanes = mask.nonzero()[0]
        block = int(lanes[0]) // self.width
        threads = lanes[lanes // self.width == block] % self.width
        breaks = np.flatnonzero(np.diff(threads) != 1)
        firsts, lasts = threads[np.r_[0, breaks + 1]], threads[np.r_[breaks, len(threads) - 1]]
        listed = ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(firsts[:4], lasts[:4], strict=True))
        more = ", …" if len(firsts) > 4 else ""
        return f"threads {listed}{more} of block {self.block_name(int(self.blocks[block]))}"

    def stuck(self) -> NoReturn:
        """The error where nothing can run."""
        raise SimulationError(f"{self.program.entry.name}: no thread can go on{self.waits()}")
