"""The archive of a bundle: a tar file of one form only, whose every byte follows from the contents of its members.

It is POSIX ustar, uncompressed, of regular files with fixed owners, permissions and times. The first member lists all
others by name, size and SHA-256, so that a reader knows where each lies and compares its header, byte for byte, with
the one that the list calls for. Links, devices, sparse or duplicate members, names that lead elsewhere and compressed
data are therefore not told apart and guarded against: they are bytes that the list does not call for. `tar` reads it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jitmx.errors import BundleError

MANIFEST = "manifest.json"
SIGNATURES = "signatures.json"
MOST_MANIFEST = 64 << 20
MOST_SIGNATURES = 64 << 10

_BLOCK = tarfile.BLOCKSIZE
_SIZE = re.compile(rb"([0-7]{11})\0")
_CHUNK = 1 << 20


class Source(Protocol):
    """Bytes that can be read anywhere."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, fewer where they end."""


@dataclass(frozen=True)
class Descriptor:
    """An open file, which several threads and processes may read at once."""

    number: int
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """As `Source.read`."""
        parts = []
        while count and (part := os.pread(self.number, min(count, _CHUNK), offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)


@dataclass(frozen=True)
class Memory:
    """Bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """As `Source.size`."""
        return len(self.data)

    def read(self, offset: int, count: int) -> bytes:
        """As `Source.read`."""
        return self.data[offset : offset + count]


@dataclass(frozen=True)
class Member:
    """What the list says of a member: its bytes, and their SHA-256."""

    size: int
    digest: str


def pack(manifest: bytes, members: Sequence[tuple[str, bytes]], signatures: bytes | None = None) -> bytes:
    """The archive of a list and what it lists, in its order."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name, data in ((MANIFEST, manifest), *members, *([(SIGNATURES, signatures)] if signatures else [])):
            made.addfile(_info(name, len(data)), io.BytesIO(data))
    return target.getvalue()


class Archive:
    """An archive that is read with distrust.

    Attributes:
        manifest, signatures: contents of the list, and of the signatures; None where there are none.

    Raises:
        BundleError: it has not the form of `pack`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.manifest, self._next = self._sized(0, MANIFEST, MOST_MANIFEST)
        self.signatures: bytes | None = None
        self._places: dict[str, tuple[int, Member]] = {}

    def expect(self, members: Mapping[str, Member]) -> None:
        """Take the list's members, and find out where each lies. Their contents are checked when they are read.

        Raises:
            BundleError: the archive has other members than these, or goes on behind them.
        """
        at = self._next
        for name, member in members.items():
            self._places[name] = at, member
            at += _BLOCK + _padded(member.size)
        end = at
        if self._source.size > _ended(at) or any(self._source.read(at, _BLOCK)):
            self.signatures, end = self._sized(at, SIGNATURES, MOST_SIGNATURES)
        if self._source.size != _ended(end):
            raise BundleError(f"it has {self._source.size} bytes where its members make {_ended(end)}")
        if any(self._source.read(end, self._source.size - end)):
            raise BundleError("something follows its last member")

    def read(self, name: str) -> bytes:
        """The contents of a member.

        Raises:
            BundleError: they are not what the list says.
            KeyError: the list has no such member.
        """
        at, member = self._places[name]
        return b"".join(self._checked(name, at, member))

    def _checked(self, name: str, at: int, member: Member) -> Iterator[bytes]:
        if self._source.read(at, _BLOCK) != _header(name, member.size):
            raise BundleError(f"the header of {name} is not what its list calls for")
        found, at, end = hashlib.sha256(), at + _BLOCK, at + _BLOCK + member.size
        while at < end:
            part = self._source.read(at, min(_CHUNK, end - at))
            if not part:
                raise BundleError(f"it ends within {name}")
            found.update(part)
            at += len(part)
            yield part
        if found.hexdigest() != member.digest:
            raise BundleError(f"the bytes of {name} do not match its list")
        self._check_padding(name, end, member.size)

    def _sized(self, at: int, name: str, most: int) -> tuple[bytes, int]:
        """A member whose size its own header says, and where the next one starts."""
        header = self._source.read(at, _BLOCK)
        match = _SIZE.fullmatch(header[124:136])
        size = int(match[1], 8) if match else 0
        if match is None or header != _header(name, size):
            raise BundleError(f"it has no {name} where one is to be: it is no bundle, or a damaged one")
        if size > most:
            raise BundleError(f"its {name} has {size} bytes, more than the {most} that it can have")
        data = self._source.read(at + _BLOCK, size)
        if len(data) != size:
            raise BundleError(f"it ends within {name}")
        self._check_padding(name, at + _BLOCK + size, size)
        return data, at + _BLOCK + _padded(size)

    def _check_padding(self, name: str, end: int, size: int) -> None:
        rest = _padded(size) - size
        if self._source.read(end, rest) != bytes(rest):
            raise BundleError(f"what fills the block of {name} up is not what it is to be")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _ended(end: int) -> int:
    """Bytes of an archive whose last member ends there: two empty blocks follow, and a record is filled up."""
    return -(-(end + 2 * _BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def _info(name: str, size: int) -> tarfile.TarInfo:
    """A regular file of root's that all may read, from 1970."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def _header(name: str, size: int) -> bytes:
    return _info(name, size).tobuf(tarfile.USTAR_FORMAT)
