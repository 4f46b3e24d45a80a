"""Litmus tests as PTX: one kernel, whose threads are first lanes of warps of their blocks.

Parameters are the address of the locations, zeroed, each STRIDE bytes behind the one before, and that of the results,
a word for each register of the program. A register that is never written ends as UNSET.
"""

from __future__ import annotations

from litmus import Op, Program

STRIDE = 128
UNSET = 0xFFFFFFFF


def instruction(op: Op, register: str, address: str, values: tuple[str, ...]) -> str:
    """The PTX instruction of an operation, on a location of global memory."""
    if op.kind == "bar":
        return "bar.sync 0;"
    parts = [op.kind, op.order, op.scope]
    if op.kind == "fence":
        return f"{'.'.join(parts)};"
    parts += ["global", op.action, "u32" if op.action in ("", "add") else "b32"]
    operands = ", ".join(item for item in (register, f"[{address}]", *values) if item)
    return f"{'.'.join(part for part in parts if part)} {operands};"


def warps(program: Program) -> list[int]:
    """Which warp of its block each thread is."""
    return [program.blocks[:t].count(block) for t, block in enumerate(program.blocks)]


def shape(program: Program) -> tuple[int, int]:
    """Blocks of the grid, whole clusters, and threads of a block."""
    grid = -(-(max(program.blocks) + 1) // program.cluster) * program.cluster
    return grid, 32 * max(map(program.blocks.count, program.blocks))


def _guarded(lines: list[str], op: Op, at: str, names: dict[str, str], locations: tuple[str, ...]) -> None:
    values = tuple(names[item] if isinstance(item, str) else str(item) for item in op.values)
    address = f"q0+{STRIDE * locations.index(op.location)}" if op.location else ""
    if op.guard:
        lines.append(f"setp.ne.u32 p2, {names[op.guard[0]]}, {op.guard[1]}; @p2 bra $skip{at};")
    if op.until is not None:
        lines.append(f"$poll{at}:")
    lines.append(instruction(op, names.get(op.register, ""), address, values))
    if op.until is not None:
        lines.append(f"setp.ne.u32 p3, {names[op.register]}, {op.until}; @p3 bra $poll{at};")
    if op.guard:
        lines.append(f"$skip{at}:")


def body(program: Program) -> str:
    """The body of a kernel with 64-bit parameters q0 and q1, registers r0 … r3 and predicates p0 … p3."""
    names = {name: f"v{k}" for k, name in enumerate(program.registers)}
    lines = [f".reg .b32 v<{max(len(names), 1)}>;"]
    lines += [f"mov.u32 {name}, {UNSET};" for name in names.values()]
    lines.append("mov.u32 r0, %ctaid.x; mov.u32 r1, %tid.x; shr.u32 r2, r1, 5; and.b32 r3, r1, 31;")
    lines.append("setp.ne.u32 p0, r3, 0;")
    for t, (block, warp) in enumerate(zip(program.blocks, warps(program), strict=True)):
        lines.append(f"setp.eq.u32 p1, r0, {block}; setp.eq.and.u32 p1, r2, {warp}, p1; @p1 bra $thread{t};")
    lines.append("bra $end;")
    for t, thread in enumerate(program.threads):
        # All lanes of a warp come to its barriers, its first lane alone does the rest.
        lines += [f"$thread{t}:", f"@p0 bra $part{t}_0;"]
        met = 0
        for i, op in enumerate(thread):
            if op.kind == "bar":
                here = 32 * program.blocks.count(program.blocks[t])
                lines += [f"$part{t}_{met}:", "bar.warp.sync -1;", f"bar.sync 0, {here};"]
                met += 1
                lines.append(f"@p0 bra $part{t}_{met};")
            else:
                _guarded(lines, op, f"{t}_{i}", names, program.locations)
        for name in (op.register for op in thread if op.register):
            lines.append(f"st.global.u32 [q1+{4 * program.registers.index(name)}], {names[name]};")
        lines += [f"$part{t}_{met}:", "bra $end;"]
    return "\n".join([*lines, "$end:"])
