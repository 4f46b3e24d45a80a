"""Where variables lie: shared, local and parameter offsets of a kernel, and module variables in global memory."""

from __future__ import annotations

from jitmx.errors import SimulationError
from jitmx.sim.memory import SHARED_START, Memory
from jitmx.sim.program import Program
from jitmx.sim.ptx import SIZES, Immediate, Variable

_RED_ZONE = 256  # bytes between variables of shared memory, which nobody may touch


def _up(offset: int, align: int) -> int:
    return -(-offset // align) * align


def place(program: Program, arguments: bytes) -> tuple[dict[str, int], int, list[slice], int, bytes]:
    """Addresses of shared, local and parameter symbols; where static shared memory ends, and what of it is between
    variables; bytes of local memory; the parameters.

    Raises:
        SimulationError: the arguments have not the size of the kernel's parameters.
    """
    module = program.module
    symbols = dict(program.globals)
    variables = [*module.variables.values(), *program.entry.variables]
    shared, local = SHARED_START, 0
    between: list[slice] = []
    dynamic: list[Variable] = []

    def next_shared(align: int) -> int:
        if shared == SHARED_START:
            return _up(shared, align)
        between.append(slice(shared, _up(shared + _RED_ZONE, align)))
        return between[-1].stop

    for variable in variables:
        if variable.space == "shared" and variable.size:
            symbols[variable.name] = next_shared(variable.align)
            shared = symbols[variable.name] + variable.size
        elif variable.space == "shared":
            dynamic.append(variable)
        elif variable.space in ("local", "param"):
            local = _up(local, variable.align)
            symbols[variable.name] = local
            local += variable.size
    if dynamic:
        shared = next_shared(max(16, *(variable.align for variable in dynamic)))
        for variable in dynamic:
            symbols[variable.name] = shared
    offset = 0
    for variable in program.entry.parameters:
        offset = _up(offset, variable.align)
        symbols[variable.name] = offset
        offset += variable.size
    # A struct ends in padding that whoever packs it may leave out.
    padding = program.entry.parameters[-1].align - 1 if program.entry.parameters else 0
    if not offset - padding <= len(arguments) <= offset:
        raise SimulationError(
            f"{program.entry.name} takes {offset} bytes of parameters; {len(arguments)} bytes of arguments were given"
        )
    return symbols, shared, between, local, arguments


def upload_variables(program: Program, memory: Memory) -> None:
    """Put the module's variables of global and constant memory on the device."""
    module = program.module
    program.globals = {
        variable.name: memory.upload(
            bytearray(variable.image), variable.name, writable=variable.space == "global",
            constant=variable.space == "const",
        )
        for variable in module.variables.values()
        if variable.image is not None and variable.space in ("global", "const")
    }  # fmt: skip


def granules(program: Program) -> dict[str, int]:
    """Bytes of the smallest access to shared and to global memory: how finely races need to be told apart."""
    smallest = {"shared": 4, "global": 4}
    for ins in program.entry.body:
        if ins.opcode[:2] == ("cp", "async") and "tensor" in ins.opcode:
            smallest["global"] = 1
        elif ins.opcode[:2] == ("cp", "async") and ins.opcode[2] in ("ca", "cg"):
            size = ins.operands[2]
            smallest["shared"] = min(smallest["shared"], size.value if isinstance(size, Immediate) else 4)
        if ins.opcode[0] not in ("ld", "ldu", "st", "atom", "red"):
            continue
        sizes = [SIZES[part] for part in ins.opcode if part in SIZES]
        counts = [int(part[1:]) for part in ins.opcode if part in ("v2", "v4", "v8")]
        spaces = [part.partition("::")[0] for part in ins.opcode if part.partition("::")[0] in smallest]
        spaces += [] if {"param", "local", "const"} & set(ins.opcode) or spaces else list(smallest)
        for space in spaces:
            smallest[space] = min(smallest[space], sizes[-1] * (counts[0] if counts else 1))
    return smallest
