"""Warp-wide exchange (shfl, vote, match, redux, elect, activemask), bar.warp.sync and the barriers of a block."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitmx.sim import rounding
from jitmx.sim.ptx import Instruction, Register, operands, pair
from jitmx.sim.translate import Handler, Translator

if TYPE_CHECKING:
    from jitmx.sim.machine import Machine

Array = npt.NDArray[Any]
_EVERY = np.uint32(0xFFFFFFFF)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def ballot(flags: Array) -> Array:
    """Booleans over lanes to one uint32 a warp."""
    return np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]


def _spread(words: Array) -> Array:
    """One value a warp to every lane."""
    return np.repeat(words, 32)


def _check_member(m: Machine, mask: Array | None, members: Array, line: int, what: str) -> None:
    """Every lane must name itself."""
    others = members != _EVERY
    if not np.count_nonzero(others if mask is None else others & mask):
        return
    own = np.broadcast_to(members, m.lanes) >> (m.lane_ids % 32).astype(np.uint32) & np.uint32(1)
    missing = own == 0 if mask is None else (own == 0) & mask
    if missing.any():
        lane = int(missing.nonzero()[0][0])
        value = int(np.broadcast_to(members, m.lanes)[lane])
        m.fault(line, lane, f"{what} with the lane mask {value:#010x}, in which lane {lane % 32} is not")


def shuffle(
    m: Machine, mask: Array | None, mode: str, value: Array, b: Array, c: Array, members: Array, line: int
) -> tuple[Array, Array]:
    """Values over lanes, and whether each comes from within its segment."""
    _check_member(m, mask, members, line, "shfl")
    b, c = _single(b, mask), _single(c, mask)
    source, inside = (_fixed if b.ndim == c.ndim == 0 else _sources)(m.lanes, mode, *_amounts(b, c))
    if mask is not None:
        lost = mask & ~mask.take(source)
        if lost.any():
            at = int(lost.nonzero()[0][0])
            m.fault(line, at, f"shfl reads lane {int(source[at]) % 32}, which does not take part")
    return (value.take(source) if value.ndim else np.full(m.lanes, value)), inside


def _single(value: Array, mask: Array | None) -> Array:
    """A value that all active lanes have, as one."""
    if value.ndim == 0:
        return value
    held = value if mask is None else value[mask]
    return held[0] if not np.count_nonzero(held != held[0]) else value


def _amounts(b: Array, c: Array) -> tuple[Any, Any, Any]:
    """Amount, bound and segment of a shuffle, as numbers where all lanes have the same."""
    found = b & np.uint32(31), c & np.uint32(31), c >> np.uint32(8) & np.uint32(31)
    if b.ndim == c.ndim == 0:
        return tuple(map(int, found))  # type: ignore[return-value]
    amount, bound, segment = (item.astype(np.int64) for item in found)
    return amount, bound, segment


def _sources(lanes: int, mode: str, amount: Any, bound: Any, segment: Any) -> tuple[Array, Array]:
    """Which lane of the machine each lane of a shuffle reads, and whether it lies within its segment."""
    lane = np.arange(lanes) % 32
    top = lane & segment | bound & ~segment
    if mode == "up":
        source = lane - amount
        inside = source >= top
    else:
        source = {"down": lane + amount, "bfly": lane ^ amount}.get(mode, lane & segment | amount & ~segment)
        inside = source <= top
    return np.where(inside, source, lane) + (np.arange(lanes) - lane), inside


_fixed = functools.lru_cache(maxsize=256)(_sources)


def _shfl(t: Translator, ins: Instruction) -> None:
    if ins.opcode[1] != "sync" or ins.opcode[2] not in ("up", "down", "bfly", "idx") or ins.opcode[3] != "b32":
        raise t.error("this form is not known")
    d, a, b, c, members = operands(ins, 5)
    result, flag = pair(d)
    listed = ", ".join(t.read(x, "u4") for x in (a, b, c, members))
    t.emit(f"v, w = {t.const(shuffle)}(m, {t.mask}, {ins.opcode[2]!r}, {listed}, {t.line})")
    t.write(result, "v", "u4")
    t.write(flag, "w", "b1")


def vote(m: Machine, mask: Array | None, mode: str, flags: Array, members: Array, line: int) -> Array:
    """What each lane learns: a boolean, or the bits of a ballot."""
    _check_member(m, mask, members, line, "vote")
    flags = np.broadcast_to(flags, m.lanes)
    here = _spread(ballot(np.ones(m.lanes, bool) if mask is None else mask)) & members
    said = _spread(ballot(flags)) & here
    if mode == "ballot":
        return said
    if mode == "any":
        return np.asarray(said != 0)
    if mode == "all":
        return np.asarray(said == here)
    return np.asarray((said == here) | (said == 0))


def _vote(t: Translator, ins: Instruction) -> None:
    if ins.opcode[1] != "sync" or ins.opcode[2] not in ("all", "any", "uni", "ballot"):
        raise t.error("this form is not known")
    d, a, members = operands(ins, 3)
    mode = ins.opcode[2]
    value = f"{t.const(vote)}(m, {t.mask}, {mode!r}, {t.read(a, 'b1')}, {t.read(members, 'u4')}, {t.line})"
    t.write(d, value, "u4" if mode == "ballot" else "b1")


def _partners(m: Machine, mask: Array | None, members: Array) -> Array:
    """[warps, 32, 32]: whether the second lane takes part in what the first does."""
    named = (np.broadcast_to(members, m.lanes).reshape(-1, 32, 1) & _BITS) != 0
    return np.asarray(named if mask is None else named & mask.reshape(-1, 1, 32))


def match(m: Machine, mask: Array | None, mode: str, value: Array, members: Array, line: int) -> tuple[Array, Array]:
    """Masks of the lanes with equal values, and whether all are equal."""
    _check_member(m, mask, members, line, "match")
    rows = np.broadcast_to(value, m.lanes).reshape(-1, 32)
    partners = _partners(m, mask, members)
    equal = (rows[:, :, None] == rows[:, None, :]) & partners
    everyone = (equal == partners).all(2).ravel()
    bits = (equal * _BITS).sum(2, dtype=np.uint32).ravel()
    if mode == "all":
        return np.where(everyone, bits, np.uint32(0)), everyone
    return bits, everyone


def _match(t: Translator, ins: Instruction) -> None:
    if ins.opcode[2] != "sync" or ins.opcode[1] not in ("any", "all"):
        raise t.error("this form is not known")
    d, a, members = operands(ins, 3)
    result, flag = pair(d)
    width = "u8" if ins.opcode[3] == "b64" else "u4"
    listed = f"{t.read(a, width)}, {t.read(members, 'u4')}"
    t.emit(f"v, w = {t.const(match)}(m, {t.mask}, {ins.opcode[1]!r}, {listed}, {t.line})")
    t.write(result, "v", "u4")
    t.write(flag, "w", "b1")


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def reduce(m: Machine, mask: Array | None, name: str, value: Array, members: Array, line: int) -> Array:
    """One operation over the lanes that take part."""
    _check_member(m, mask, members, line, "redux")
    value = np.broadcast_to(value, m.lanes)
    if mask is None and (members == np.uint32(0xFFFFFFFF)).all():
        return _spread(_REDUCE[name].reduce(value.reshape(-1, 32), 1, value.dtype))
    info = np.iinfo(value.dtype)
    neutral = {"min": info.max, "max": info.min, "and": -1 if info.min else info.max}.get(name, 0)
    rows = np.where(_partners(m, mask, members), value.reshape(-1, 1, 32), value.dtype.type(neutral))
    result: Array = _REDUCE[name].reduce(rows, 2, value.dtype).ravel()
    return result


def reduce_float(
    m: Machine, mask: Array | None, flags: tuple[str, ...], value: Array, members: Array, line: int
) -> Array:
    """redux min and max of f32."""
    _check_member(m, mask, members, line, "redux")
    value = np.broadcast_to(value, m.lanes)
    value = np.abs(value) if "abs" in flags else value
    rows = np.broadcast_to(value.reshape(-1, 1, 32), (m.lanes // 32, 32, 32))
    partners = _partners(m, mask, members)
    nan = np.float32(np.nan)
    out = np.where(partners[..., 0], rows[..., 0], nan)
    lost = np.zeros(out.shape, bool)
    for i in range(32):
        item = np.where(partners[..., i], rows[..., i], nan)
        lost |= partners[..., i] & np.isnan(rows[..., i])
        out = rounding.minimum(out, item, nan=False, largest="max" in flags)
    if "NaN" in flags:
        out = rounding.canonical(np.where(lost, nan, out))
    return out.ravel()


def _redux(t: Translator, ins: Instruction) -> None:
    d, a, members = operands(ins, 3)
    kind = ins.opcode[-1]
    if kind == "f32":
        listed = f"{t.read(a, 'f4')}, {t.read(members, 'u4')}"
        value = f"{t.const(reduce_float)}(m, {t.mask}, {ins.opcode!r}, {listed}, {t.line})"
        t.write(d, value, "f4")
        return
    if ins.opcode[2] not in _REDUCE or kind not in ("u32", "s32", "b32"):
        raise t.error("this form is not known")
    dtype = "i4" if kind == "s32" else "u4"
    value = f"{t.const(reduce)}(m, {t.mask}, {ins.opcode[2]!r}, {t.read(a, dtype)}, {t.read(members, 'u4')}, {t.line})"
    t.write(d, value, dtype)


def _elect(t: Translator, ins: Instruction) -> None:
    d, members = operands(ins, 2)
    result, flag = pair(d)
    t.emit(f"v = {t.const(_leader)}(m, {t.mask}, {t.read(members, 'u4')}, {t.line})")
    t.write(result, "v", "u4")
    t.write(flag, "v == m.lane_ids % 32", "b1")


def _leader(m: Machine, mask: Array | None, members: Array, line: int) -> Array:
    """The lowest lane that takes part."""
    _check_member(m, mask, members, line, "elect")
    return np.asarray(_partners(m, mask, members).argmax(2).ravel().astype(np.uint32))


def _activemask(t: Translator, ins: Instruction) -> None:
    (d,) = operands(ins, 1)
    t.write(d, f"{t.const(_active)}(m, {t.mask})", "u4")


def _active(m: Machine, mask: Array | None) -> Array:
    return _spread(ballot(np.ones(m.lanes, bool) if mask is None else mask))


def sync_warp(m: Machine, mask: Array | None, members: Array, line: int) -> None:
    """bar.warp.sync: the named lanes of each warp have met."""
    _check_member(m, mask, members, line, "bar.warp.sync")
    full = members == _EVERY
    if np.count_nonzero(full) == np.size(full):
        here = np.ones((m.lanes // 32, 1), bool) if mask is None else mask.reshape(-1, 32)
        if np.array_equal(here.all(1), here.any(1)):
            m.races.warp_barrier(here[:, 0].nonzero()[0])
            return
    lanes = m.active(mask)
    here = _spread(ballot(np.zeros(m.lanes, bool) | (True if mask is None else mask)))
    sets = np.broadcast_to(members, m.lanes)[lanes] & here[lanes]
    whole = (sets == np.uint32(0xFFFFFFFF)) | (np.broadcast_to(full, m.lanes)[lanes] & _whole(m, mask)[lanes])
    if whole.any():
        m.races.warp_barrier(np.unique(lanes[whole] // 32))
    rest = lanes[~whole]
    keys = rest // 32 << 32 | sets[~whole]
    for key in np.unique(keys):
        m.races.meet(rest[keys == key])


def _whole(m: Machine, mask: Array | None) -> Array:
    """Lanes of warps all of whose threads are active."""
    if mask is None:
        return np.ones(m.lanes, bool)
    return np.repeat((mask | (m.lane_ids % m.width >= m.threads)).reshape(-1, 32).all(1), 32)


def _bar(t: Translator, ins: Instruction) -> None:
    words = [part for part in ins.opcode if part not in ("cta", "aligned")]
    if words[1] == "warp":
        t.emit(f"{t.const(sync_warp)}(m, {t.mask}, {t.read(ins.operands[0], 'u4')}, {t.line})")
        return
    if words[1] not in ("sync", "arrive", "red"):
        raise t.error("this form is not known")
    if t.mask == "P":
        raise t.error("a predicate on a barrier is not known")
    listed = list(ins.operands)
    destination = listed.pop(0) if words[1] == "red" else None
    flag = listed.pop() if words[1] == "red" else None
    number = t.read(listed[0], "u4") if listed else t.scalar(0, "u4")
    count = t.read(listed[1], "u4") if len(listed) > 1 else "None"
    if words[1] == "arrive" and count == "None":
        raise t.error("it needs a number of threads")
    reduction = "None"
    if destination is not None and flag is not None:
        if not isinstance(destination, Register):
            raise t.error("it needs a register for its result")
        mode = words[2]
        target = t.target(destination, "u4" if mode == "popc" else "b1")
        t.emit(f"v = {t.const(_reduction)}({mode!r}, {target}, {t.read(flag, 'b1')})")
        reduction = "v"
    t.emit(
        f"return m.barriers.arrive({t.mask}, {number}, {count}, {t.next}, {t.line}, "
        f"wait={words[1] != 'arrive'}, reduce={reduction})"
    )


def _reduction(mode: str, target: Array, flags: Array) -> Any:
    """What a barrier does when all are there: reduce the flags that each brought, write the result to all."""
    held = np.broadcast_to(flags, target.shape).copy()

    def complete(parts: list[tuple[Array, Any]]) -> None:
        values = np.concatenate([part.held[lanes] for lanes, part in parts])
        result = {"popc": int(values.sum()), "and": bool(values.all()), "or": bool(values.any())}[mode]
        for lanes, part in parts:
            part.target[lanes] = result

    complete.held, complete.target = held, target  # type: ignore[attr-defined]
    return complete


HANDLERS: dict[str, Handler] = {
    "shfl": _shfl, "vote": _vote, "match": _match, "redux": _redux, "elect": _elect, "activemask": _activemask,
    "bar": _bar, "barrier": _bar, "nanosleep": lambda t, ins: t.emit(f"m.poll(m.active({t.mask}))"),
}  # fmt: skip
