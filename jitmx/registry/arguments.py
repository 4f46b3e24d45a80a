"""The argument struct of a kernel, its fields declared once: the packer and the C++ struct come from them.

    ARGUMENTS = Arguments(
        "ReadArguments",
        reads("data", "[vectors]", "uint4"),
        writes("sink", "[1], one sum", "unsigned int"),
        number("vectors", "unsigned long long", "of 16 bytes"),
    )

Fields lie in the order of their declaration, as a C compiler lays them out; static assertions in the rendered source
hold both to that.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jitmx.registry import tensor_map as maps
from jitmx.registry.tensor_map import Encode, TensorMap

# Letter of `struct` and bytes of each type that a number may have.
NUMBERS = {
    "int": ("i", 4), "unsigned int": ("I", 4), "float": ("f", 4), "long long": ("q", 8), "unsigned long long": ("Q", 8),
}  # fmt: skip

Number = int | float

_STRUCT = re.compile(r"\b[A-Z]\w*(?=\*)")  # types of jitmx's headers, which are declared later


@dataclass(frozen=True)
class Field:
    """One field of an argument struct.

    Attributes:
        name: in Python and in C++.
        type: its C++ type.
        doc: what it is, with its shape or unit.
        letter: of `struct`.
        size: bytes; also its alignment, but for a tensor map.
        alignment: bytes.
        of: of a tensor map, the field with the address of what it shows.
    """

    name: str
    type: str
    doc: str
    letter: str
    size: int
    alignment: int
    of: str = ""


def reads(name: str, doc: str, type: str = "void") -> Field:
    """The address of what the kernel reads; 0 where a call has none."""
    return Field(name, f"const {type}*", doc, "P", 8, 8)


def writes(name: str, doc: str, type: str = "void") -> Field:
    """The address of what the kernel writes, or reads and writes."""
    return Field(name, f"{type}*", doc, "P", 8, 8)


def number(name: str, type: str, doc: str = "") -> Field:
    """A number: int, unsigned int, long long, unsigned long long or float."""
    if type not in NUMBERS:
        raise TypeError(f"{name} is a {type!r}; a number is one of {', '.join(NUMBERS)}")
    letter, size = NUMBERS[type]
    return Field(name, type, doc, letter, size, size)


def tensor_map(name: str, of: str, doc: str = "") -> Field:
    """A tensor map of what lies at the address in the field `of`."""
    return Field(name, "TensorMap", doc or f"of {of}", f"{maps.BYTES}s", maps.BYTES, maps.ALIGNMENT, of)


class Arguments:
    """The argument struct of a kernel.

    Args:
        name: of the C++ struct, in namespace jitmx.
        fields: in order.

    Attributes:
        fields: by name.
        offsets: bytes from the start of the struct, by name.
        size: bytes of the struct, its end padded as C does.
        maps: fields that are tensor maps.
    """

    def __init__(self, name: str, *fields: Field) -> None:
        self.name = name
        self.fields: dict[str, Field] = {}
        for field in fields:
            if field.name in self.fields:
                raise TypeError(f"{name} has two fields {field.name!r}")
            if field.of and not all(other.of for other in self.fields.values()):
                raise TypeError(f"{name}: {field.name} lies behind other fields; tensor maps come first, on 128 bytes")
            self.fields[field.name] = field
        self.offsets: dict[str, int] = {}
        end = 0
        for field in fields:
            self.offsets[field.name] = -(-end // field.alignment) * field.alignment
            end = self.offsets[field.name] + field.size
        self.alignment = max((field.alignment for field in fields), default=1)
        self.size = -(-end // self.alignment) * self.alignment
        self.maps = tuple(field for field in fields if field.of)
        for field in self.maps:
            self._require(field.of)

    def with_maps(self, **of: str) -> Arguments:
        """The same struct behind tensor maps of these names, each with the field of the address that it shows."""
        return Arguments(self.name, *(tensor_map(name, at) for name, at in of.items()), *self.fields.values())

    def _require(self, *names: str) -> None:
        for name in names:
            if name not in self.fields:
                raise TypeError(f"{self.name} has no field {name!r}; its fields: {', '.join(self.fields)}")

    def format(self, names: Iterable[str]) -> tuple[int, str]:
        """Where the first of some fields lies, and the `struct` format from there to the end of the last.

        What lies between them becomes zero.

        Args:
            names: in the order of the struct.
        """
        start = end = -1
        letters = []
        for name in names:
            self._require(name)
            field, at = self.fields[name], self.offsets[name]
            if end < 0:
                start = end = at
            if at < end:
                raise TypeError(f"{self.name}: {name} does not lie behind the field named before it")
            letters.append(f"{at - end}x{field.letter}" if at > end else field.letter)
            end = at + field.size
        # Offsets are explicit: of natural alignment no padding is left, but for what starts in the midst of a word.
        # There an address is an unsigned long, which `struct` packs quicker than a pointer.
        text = "".join(letters)
        return (start, f"@{text.replace('P', 'L')}") if start % 8 == 0 else (start, f"={text.replace('P', 'Q')}")

    def pack(self, values: Mapping[str, Number], shown: Mapping[str, TensorMap], encode: Encode) -> bytes:
        """The struct.

        Args:
            values: numbers and addresses by field; a field that is not among them is 0.
            shown: what each tensor map shows.
            encode: makes a tensor map at an address.
        """
        self._require(*values)
        packed = bytearray(self.size)
        for name, field in self.fields.items():
            value: Number | bytes = values.get(name, 0)
            if field.of:
                if name not in shown or field.of not in values:
                    raise TypeError(
                        f"{self.name}.{name} is a tensor map of {field.of}; give both the map and the address"
                    )
                value = encode(shown[name], int(values[field.of]))
            try:
                struct.pack_into(f"={field.letter.replace('P', 'Q')}", packed, self.offsets[name], value)
            except struct.error as error:
                raise TypeError(f"{self.name}.{name}={value!r} is no {field.type}: {error}") from error
        return bytes(packed)

    @functools.cached_property
    def source(self) -> str:
        """The struct in C++, with static assertions that it lies as it is packed."""
        width = max(len(f"{field.type} {field.name};") for field in self.fields.values())
        lines = [f"  {f'{field.type} {field.name};':{width}}  // {field.doc}" for field in self.fields.values()]
        lines = [line.removesuffix("// ").rstrip() for line in lines]
        asserted = [
            f'static_assert(__builtin_offsetof({self.name}, {name}) == {at}, "{name} lies where it is packed");'
            for name, at in self.offsets.items()
        ]
        structs = dict.fromkeys(_STRUCT.findall(" ".join(field.type for field in self.fields.values())))
        return "\n".join(
            (
                *(['#include "jitmx/ptx/tensor_map.cuh"'] if self.maps else []),
                "namespace jitmx {",
                *(f"struct {name};" for name in structs),
                "// What the kernel is launched with.",
                f"struct {self.name} {{",
                *lines,
                "};",
                f'static_assert(sizeof({self.name}) == {self.size}, "{self.name} is as long as it is packed");',
                *asserted,
                "}  // namespace jitmx",
                "",
            )
        )
