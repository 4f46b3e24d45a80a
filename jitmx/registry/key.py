"""What identifies compiled code: a digest over everything that shaped it, and nothing else.

Fields are named and framed by their lengths, so that no two different inputs can run together into the same bytes.
Paths, times, process ids and the driver are never among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

# 2: compiled where no variable of the environment can change the code.
SCHEMA = 2


def digest(data: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class KeyInputs:
    """Every input of one compile.

    Attributes:
        family: kernel family.
        source: rendered CUDA source.
        headers: name (as it is included) to SHA-256 of each header that the source includes, directly or not.
        options: normalized compiler options, in order.
        arch: target with its suffix.
        nvrtc: NVRTC release, such as "13.5".
        nvrtc_digest: SHA-256 of the NVRTC library.
    """

    family: str
    source: str
    headers: Mapping[str, str]
    options: tuple[str, ...]
    arch: str
    nvrtc: str
    nvrtc_digest: str

    def fields(self) -> list[tuple[str, bytes]]:
        """Name and value of each field, in the order in which they are digested."""
        return [
            ("schema", str(SCHEMA).encode()),
            ("family", self.family.encode()),
            ("source", self.source.encode()),
            *((f"header {name}", self.headers[name].encode()) for name in sorted(self.headers)),
            *(("option", option.encode()) for option in self.options),
            ("arch", self.arch.encode()),
            ("nvrtc", self.nvrtc.encode()),
            ("nvrtc_digest", self.nvrtc_digest.encode()),
        ]

    @property
    def key(self) -> str:
        """SHA-256 over all fields, 64 hexadecimal digits."""
        return frame(self.fields())


def frame(fields: list[tuple[str, bytes]]) -> str:
    """SHA-256 over named, length-framed fields."""
    hasher = hashlib.sha256()
    for name, value in fields:
        label = name.encode()
        hasher.update(len(label).to_bytes(8, "little") + label + len(value).to_bytes(8, "little") + value)
    return hasher.hexdigest()
