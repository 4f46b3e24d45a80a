"""A reader of 64-bit little-endian ELF files that believes nothing the file says before checking it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from jitmx.errors import ToolchainError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT_SIZE = 56
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")

SHT_SYMTAB = 2
SHT_NOTE = 7
SHT_NOBITS = 8
STT_FUNC = 2


@dataclass(frozen=True)
class Section:
    """One section: its name, where its bytes lie, and what else is asked of it, under its ELF name."""

    name: str
    type: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Symbol:
    """One symbol: its index in the symbol table, and what is asked of it, under its ELF name."""

    index: int
    name: str
    type: int
    other: int


class Elf:
    """The sections and symbols of an ELF file.

    Attributes:
        machine, flags, abi: e_machine, e_flags and the operating system ABI of the file header.
        sections: all of them, in the order of the file.
        symbols: all of them, in the order of the symbol table.
        size: where the file ends by its own account, bytes.

    Raises:
        ToolchainError: a table or a name lies outside the file.
    """

    def __init__(self, image: bytes) -> None:
        self._image = image
        if len(image) < _HEADER.size or image[:4] != b"\x7fELF":
            raise ToolchainError(f"not an ELF file: {len(image)} B that start with {image[:4].hex() or 'nothing'}")
        if image[4:6] != b"\x02\x01":
            raise ToolchainError("not a 64-bit little-endian ELF file")
        (
            identification, _, self.machine, _, _, segments, table, self.flags, _, segment_size, segment_count,
            entry_size, count, names,
        ) = _HEADER.unpack_from(image)  # fmt: skip
        self.abi: int = identification[7]
        if count and entry_size != _SECTION.size:
            raise ToolchainError(f"malformed ELF file: section headers of {entry_size} B")
        if segment_count and segment_size != _SEGMENT_SIZE:
            raise ToolchainError(f"malformed ELF file: program headers of {segment_size} B")
        self._slice(table, count * _SECTION.size, "section headers")
        self._slice(segments, segment_count * _SEGMENT_SIZE, "program headers")
        headers = [_SECTION.unpack_from(image, table + index * _SECTION.size) for index in range(count)]
        if count and names >= count:
            raise ToolchainError(f"malformed ELF file: section {names} of {count} holds the names")
        self.sections = tuple(self._sections(headers, names))
        self.symbols = tuple(self._symbols())
        ends = [section.offset + section.size for section in self.sections if section.type != SHT_NOBITS]
        self.size: int = max(
            [_HEADER.size, table + count * _SECTION.size, segments + segment_count * _SEGMENT_SIZE, *ends]
        )

    def data(self, section: Section) -> bytes:
        """The bytes of `section`; none for one that takes no room in the file."""
        return b"" if section.type == SHT_NOBITS else self._image[section.offset : section.offset + section.size]

    def notes(self, section: Section) -> Iterator[tuple[int, bytes]]:
        """Type and content of every note in `section`.

        Raises:
            ToolchainError: a note is cut off.
        """
        data = self.data(section)
        position = 0
        while position + _NOTE.size <= len(data):
            name_size, size, kind = _NOTE.unpack_from(data, position)
            start = position + _NOTE.size + (name_size + 3 & ~3)
            position = start + (size + 3 & ~3)
            if start + size > len(data):
                raise ToolchainError(f"malformed ELF file: a note in {section.name} is cut off")
            yield kind, data[start : start + size]

    def _sections(self, headers: list[tuple[int, ...]], names: int) -> Iterator[Section]:
        table = b""
        if headers:
            table = self._slice(headers[names][4], headers[names][5], "section names")
        for name, kind, _, _, offset, size, link, *_ in headers:
            text = _string(table, name)
            if kind != SHT_NOBITS:
                self._slice(offset, size, f"section {text}")
            yield Section(text, kind, offset, size, link)

    def _symbols(self) -> Iterator[Symbol]:
        table = next((section for section in self.sections if section.type == SHT_SYMTAB), None)
        if table is None:
            return
        if table.link >= len(self.sections):
            raise ToolchainError("malformed ELF file: the symbol table has no names")
        names = self.data(self.sections[table.link])
        data = self.data(table)
        for index in range(len(data) // _SYMBOL.size):
            name, kind, other, *_ = _SYMBOL.unpack_from(data, index * _SYMBOL.size)
            yield Symbol(index, _string(names, name), kind & 15, other)

    def _slice(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self._image):
            raise ToolchainError(
                f"malformed ELF file: {what} end at {offset + size} B, but the file has {len(self._image)} B"
            )
        return self._image[offset : offset + size]


def _string(table: bytes, offset: int) -> str:
    """The NUL-terminated string at `offset`."""
    end = table.find(b"\0", offset)
    if offset and (offset >= len(table) or end < 0):
        raise ToolchainError(f"malformed ELF file: a name starts at {offset} of {len(table)} B")
    try:
        return table[offset:end].decode("ascii") if end >= 0 else ""
    except UnicodeDecodeError:
        raise ToolchainError(f"malformed ELF file: the name at {offset} is not ASCII") from None
