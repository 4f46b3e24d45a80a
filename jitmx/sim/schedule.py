"""In which order the instructions of a run are emitted, and which of them one call does together.

Instructions that are costly and alike, such as the conversions of an unrolled loop, wait for each other: a call over
the lanes of all of them takes little longer than one over the lanes of one. What an instruction reads and writes, and
the order of whatever has an effect, stay as they are.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

from jitmx.sim import order
from jitmx.sim.flow import Access
from jitmx.sim.ptx import SIZES, Instruction, Register, Vector

# Opcodes whose only effect is on registers.
_PURE = {
    "add", "sub", "addc", "subc", "min", "max", "mul", "mad", "madc", "mul24", "mad24", "div", "rem", "sad", "abs",
    "neg", "popc", "clz", "brev", "bfind", "fns", "bfe", "bfi", "dp4a", "dp2a", "and", "or", "xor", "not", "cnot",
    "shl", "shr", "shf", "lop3", "prmt", "fma", "copysign", "testp", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2",
    "tanh", "mov", "selp", "slct", "setp", "set", "cvt", "cvta", "isspacep", "shfl", "vote", "match", "redux", "mma",
    "movmatrix", "mapa", "getctarank", "createpolicy",
}  # fmt: skip


@dataclass
class _Node:
    """One instruction: how many before it must be emitted first, and those that wait for it."""

    key: tuple[str, ...] | None  # of those that go together
    hard: set[int] = field(default_factory=set)
    soft: set[int] = field(default_factory=set)  # which may as well be in the same batch
    followers: list[int] = field(default_factory=list)
    level: int = 0
    done: bool = False


def _effect(ins: Instruction) -> str:
    """What of the order must stay: "" nothing, "load" its place among what has effects, "all"."""
    if ins.opcode[0] in ("ld", "ldmatrix"):
        return "all" if order.spelled(ins.opcode) else "load"
    return "" if ins.opcode[0] in _PURE else "all"


def _key(ins: Instruction) -> tuple[str, ...] | None:
    if ins.predicate is not None:
        return None
    first, kind = ins.opcode[0], ins.opcode[-1]
    if _effect(ins) == "load" and first == "ld":
        # Of one space and not too wide for the race check to take in one piece.
        size = SIZES[kind] * max([int(part[1:]) for part in ins.opcode if part in ("v2", "v4", "v8")], default=1)
        return ins.opcode if {"shared", "global"} & set(ins.opcode) and size <= 16 else None
    if (
        first in ("fma", "ex2", "cvt", "mma")
        or (first in ("min", "max") and kind in ("f32", "bf16x2", "f16x2"))
        or (first in ("add", "sub", "mul") and kind in ("f16", "bf16", "f16x2", "bf16x2"))
    ):
        # Products take numbers that say which of their scale factors are meant.
        numbers = [str(x) for x in ins.operands[4:] if not _registers(x)] if first == "mma" else []
        return *ins.opcode, str(len(ins.operands)), *numbers
    return None


def _sums(ins: Instruction) -> set[str]:
    """Registers that a product adds to, which products of one batch hand on."""
    if ins.opcode[0] != "mma" or not isinstance(ins.operands[3], Vector):
        return set()
    others = {x.name for operand in (*ins.operands[1:3], *ins.operands[4:]) for x in _registers(operand)}
    return {x.name for x in _registers(ins.operands[3])} - others


def _registers(operand: object) -> list[Register]:
    listed = operand.items if isinstance(operand, Vector) else (operand,)
    return [x for x in listed if isinstance(x, Register)]


def batches(body: list[Instruction], accesses: list[Access], watched: dict[int, str]) -> list[list[int]]:
    """Positions of instructions in the order in which to emit them; those of one list go together.

    Args:
        body: instructions of a run.
        accesses: what each does with registers.
        watched: positions of those that check or note something when they run, and how they keep their place: "all"
            among whatever has effects, "load" as loads do.
    """
    nodes = _graph(body, accesses, watched)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        if node.key is not None:
            alike[node.key].append(i)
    out: list[list[int]] = []
    single = [i for i, node in enumerate(nodes) if not node.hard and not node.soft and node.key is None]
    ready = {i for i, node in enumerate(nodes) if not node.hard and not node.soft and node.key is not None}
    heapq.heapify(single)
    while single or ready:
        if single:
            chosen = [heapq.heappop(single)]
        else:
            key = nodes[min(ready, key=lambda i: (nodes[i].level, i))].key
            assert key is not None
            chosen = _together(nodes, alike[key])
            alike[key] = [i for i in alike[key] if not nodes[i].done]
        out.append(chosen)
        for i in chosen:
            nodes[i].done = True
            ready.discard(i)
        for i in chosen:
            for follower in nodes[i].followers:
                node = nodes[follower]
                node.hard.discard(i)
                node.soft.discard(i)
                if not node.hard and not node.soft and not node.done:
                    if node.key is None:
                        heapq.heappush(single, follower)
                    else:
                        ready.add(follower)
    return out


def _together(nodes: list[_Node], alike: list[int]) -> list[int]:
    """Those that need nothing but each other's sums."""
    chosen: dict[int, None] = {}
    for i in alike:
        if not nodes[i].done and not nodes[i].hard and all(before in chosen for before in nodes[i].soft):
            chosen[i] = None
    for i in chosen:
        nodes[i].done = True
    return list(chosen)


def _graph(body: list[Instruction], accesses: list[Access], watched: dict[int, str]) -> list[_Node]:
    nodes: list[_Node] = []
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    effect, loads = -1, list[int]()
    for i, (ins, access) in enumerate(zip(body, accesses, strict=True)):
        what = max(watched.get(i, ""), _effect(ins), key=("", "load", "all").index)
        node = _Node(None if what == "all" else _key(ins))
        nodes.append(node)
        sums = _sums(ins) if node.key is not None else set()
        kept = access.writes if access.predicated else set()
        hard = {writer[name] for name in (access.used | access.reads | kept) - sums if name in writer}
        soft = {writer[name] for name in sums | access.writes if name in writer}
        for name in access.writes:
            soft.update(readers[name])
        if what:
            hard.add(effect)
        if what == "all":
            hard.update(loads if i + 1 < len(body) else range(i))  # a branch or a barrier comes last
        # Only those of one batch can take turns within it.
        node.soft = {j for j in soft if node.key is not None and nodes[j].key == node.key} - hard - {i}
        node.hard = (hard | soft) - node.soft - {i, -1}
        for j in node.hard | node.soft:
            nodes[j].followers.append(i)
            node.level = max(node.level, nodes[j].level + (j in node.hard))
        for name in access.used | access.reads:
            readers[name].append(i)
        for name in access.writes:
            writer[name] = i
            readers[name] = []
        if what == "all":
            effect, loads = i, []
        elif what == "load":
            loads.append(i)
    return nodes
