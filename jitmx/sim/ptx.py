"""What PTX text consists of: instructions, operands, variables and functions. jitmx.sim.parser makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jitmx.errors import SimulationError

# Bytes of a PTX type by its name.
SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
    "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "u16x2": 4, "s16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Register:
    """A register or a special register, by its name within the function; `negated` where an operand says `!%p`."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number. `kind` is "int", "f32" or "f64"; floats are kept as the integer of their bits."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function, plus an offset; or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; tensor copies add coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}`, or a parenthesised list of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`%r1|%p1`: a result and its predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that nobody wants."""


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Sink


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: dotted parts of its opcode, operands in order, the register that predicates it, its PTX line."""

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    line: int

    @property
    def name(self) -> str:
        """The opcode as written."""
        return ".".join(self.opcode)


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: `size` 0 is an extern array; `image` is its initial value, None where it has none."""

    name: str
    space: str
    size: int
    align: int
    image: bytes | None = None


@dataclass
class Function:
    """An entry or a device function."""

    name: str
    entry: bool
    line: int
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    directives: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # labels of each list of .branchtargets


@dataclass
class Module:
    """A parsed PTX file."""

    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]


def is_barrier(ins: Instruction) -> bool:
    """Whether lanes may have to wait at the end of `ins`: barriers of a block or a cluster."""
    if ins.opcode[:2] == ("barrier", "cluster"):
        return "wait" in ins.opcode
    return ins.opcode[0] in ("bar", "barrier") and ins.opcode[1:2] != ("warp",)


def pair(operand: Operand) -> tuple[Operand, Operand]:
    """A result and its predicate, which is a sink where there is none."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


def operands(ins: Instruction, *counts: int) -> Sequence[Operand]:
    """The operands of `ins`, whose number must be one of `counts`."""
    if len(ins.operands) not in counts:
        raise SimulationError(f"PTX line {ins.line}: {ins.name} with {len(ins.operands)} operands is not known")
    return ins.operands
