"""The form of a record: what went into one compile and what came out of it.

A record is JSON whose last member seals the bytes before it, so that a changed byte anywhere, blanks included, shows.
The seal's form belongs to the layout (`v1`), not to the schema: an older jitmx can tell a sound record of a newer
schema, which it leaves alone, from a damaged one, which it replaces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, get_origin, get_type_hints, is_typeddict

SCHEMA_VERSION = 1
HEX64 = re.compile(r"[0-9a-f]{64}")
_SEAL_OPENS = b',\n "seal": "'
_SEAL_CLOSES = b'"\n}\n'
_SEAL_LENGTH = len(_SEAL_OPENS) + 64 + len(_SEAL_CLOSES)


class NewerSchemaError(ValueError):
    """A sound record that a newer jitmx wrote."""


class Inputs(TypedDict):
    """What went into a compile; together with the source's text these give the key.

    `headers` maps each included name to its SHA-256; `source_digest` is the SHA-256 of the rendered source.
    """

    schema: int
    family: str
    source_digest: str
    headers: dict[str, str]
    options: list[str]
    arch: str
    nvrtc: str
    nvrtc_digest: str


class Outputs(TypedDict):
    """What came out: `object` is the SHA-256 of the image, `size` its bytes; resources are per thread or per block.

    `contract` is what the machine code was held to, `breaches` each promise that it broke, in words.
    """

    object: str
    size: int
    entries: list[str]
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    compile_ms: float
    contract: dict[str, Any]
    breaches: list[str]


@dataclass(frozen=True)
class Record:
    """One compile.

    Attributes:
        key: the digest under which it is found, 64 hexadecimal digits.
        name, family, kernel, knobs, arch: the variant; `identity` is its digest.
        entry: the kernel's name in the image.
        inputs, outputs: see `Inputs` and `Outputs`.
        created: seconds since the epoch; for people only, nothing depends on it.
        jitmx: the release that compiled it.
    """

    key: str
    name: str
    family: str
    kernel: str
    knobs: dict[str, Any]
    identity: str
    arch: str
    entry: str
    inputs: Inputs
    outputs: Outputs
    created: float
    jitmx: str
    schema_version: int = SCHEMA_VERSION

    @property
    def parts(self) -> set[str]:
        """Digests of its machine code and of its source."""
        return {self.outputs["object"], self.inputs["source_digest"]}

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values, the schema version first."""
        values = dataclasses.asdict(self)
        return {"schema_version": values.pop("schema_version"), **values}

    def to_json(self) -> bytes:
        """The record as it is kept on disk, sealed."""
        return seal(self.as_dict())

    @classmethod
    def from_json(cls, data: bytes) -> Record:
        """The record that `data` holds.

        Raises:
            NewerSchemaError: sound, but of a newer schema than this jitmx knows.
            ValueError: anything else that `to_json` did not write; the message says what is wrong.
        """
        values = unseal(data)
        version = values.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerSchemaError(f"schema version {version} is newer than {SCHEMA_VERSION}")
        # Of bytes that cannot hold an odd name, only the free parts are looked through: a look-up is to be quick.
        check_values([values.get("knobs"), values.get("outputs")] if _is_plain(data) else values)
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ValueError(f"schema version {version!r} is unknown")
        _check(values, _RECORD, "record")
        _check(values["inputs"], _INPUTS, "inputs")
        _check(values["outputs"], _OUTPUTS, "outputs")
        inputs = values["inputs"]
        digests = [values["key"], values["identity"], inputs["source_digest"], inputs["nvrtc_digest"]]
        _check_digests(*digests, values["outputs"]["object"], *inputs["headers"].values())
        for part, name in (("inputs", "options"), ("outputs", "entries"), ("outputs", "breaches")):
            if not all(isinstance(text, str) for text in values[part][name]):
                raise ValueError(f"{part}.{name} holds something that is no text")
        for part, name in (("inputs", "schema"), *(("outputs", name) for name in _COUNTS)):
            if not 0 <= values[part][name] <= _MOST[name]:
                raise ValueError(f"{part}.{name} is not within 0 and {_MOST[name]:.0f}")
        if not 0 <= values["created"] <= _MOST["created"]:
            raise ValueError("created is no date that a clock can show")
        return cls(**values)

    @classmethod
    def of(cls, key: str, data: bytes) -> Record:
        """The record of `key`, as which `data` was kept; errors are those of `from_json`."""
        record = cls.from_json(data)
        if record.key != key:
            raise ValueError(f"it is the record of {record.key[:12]}")
        return record


@dataclass(frozen=True)
class Scan:
    """What is known of a source without asking: which headers it includes, or that it is what templates render to.

    Attributes:
        digest: what it stands for: source, options and compiler; or what the source is rendered from.
        source_digest: SHA-256 of the source.
        headers: each included name to its SHA-256; none where it tells of templates.
    """

    digest: str
    source_digest: str
    headers: dict[str, str]

    def to_json(self) -> bytes:
        """The scan as it is kept on disk, sealed."""
        return seal({"scan": self.digest, "source_digest": self.source_digest, "headers": self.headers})

    @classmethod
    def of(cls, digest: str, data: bytes) -> Scan:
        """The scan of `digest`, as which `data` was kept.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        values = unseal(data)
        check_values(values)
        _check(values, {"scan": str, "source_digest": str, "headers": dict}, "scan")
        _check_digests(values["source_digest"], *values["headers"].values())
        if values["scan"] != digest:
            raise ValueError(f"it is the scan of {values['scan'][:12]}")
        return cls(digest, values["source_digest"], values["headers"])


def _form(declared: type) -> dict[str, type | tuple[type, ...]]:
    """The types that the members of a declared JSON object have; a number may lack its point."""
    hints = get_type_hints(declared).items()
    plain = {name: dict if is_typeddict(hint) else get_origin(hint) or hint for name, hint in hints}
    return {name: (int, float) if kind is float else kind for name, kind in plain.items()}


_RECORD, _INPUTS, _OUTPUTS = _form(Record), _form(Inputs), _form(Outputs)

# What a sound number is at most: dates in seconds (year 5138), times in milliseconds, the rest in bytes or as counted.
_MOST: Mapping[str, float] = {
    "created": 1e11, "schema": 1 << 31, "size": 1 << 40, "registers": 1 << 16, "spill_bytes": 1 << 31,
    "stack_bytes": 1 << 31, "shared_bytes": 1 << 31, "compile_ms": 1e11,
}  # fmt: skip
_COUNTS = ("size", "registers", "spill_bytes", "stack_bytes", "shared_bytes", "compile_ms")
_LONGEST = 1024
_DEEPEST = 8


def _is_plain(data: bytes) -> bool:
    """Whether no text in this JSON can have an odd character, or be too long; raw control characters it never has."""
    odd = b"\\" in data or b"\x7f" in data or not data.isascii()
    return not odd and max(map(len, data.split(b'"'))) <= _LONGEST


def check_values(values: Any) -> None:
    """Refuse what no name or number of jitmx's is, wherever it stands: it would be shown on terminals and added up."""
    waiting: list[tuple[Any, int]] = [(values, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict | list):
            if depth > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} deep")
            waiting += [(inner, depth + 1) for inner in (*value, *(value.values() if isinstance(value, dict) else ()))]
        elif isinstance(value, str):
            # No control characters, terminal escapes or lone surrogates.
            if len(value) > _LONGEST or not value.isprintable():
                raise ValueError(f"{value[:80]!a} is no text of at most {_LONGEST} printable characters")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is no number")


def _check(values: Mapping[str, Any], form: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    if values.keys() != form.keys():
        odd = ", ".join(sorted(values.keys() ^ form.keys()))
        raise ValueError(f"{where}: members missing or unknown: {odd}")
    for name, kind in form.items():
        value = values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{where}.{name} is {value!r}")


def _check_digests(*texts: Any) -> None:
    for text in texts:
        if not (isinstance(text, str) and HEX64.fullmatch(text)):
            raise ValueError(f"{text!r} is not a SHA-256")


def seal(values: Mapping[str, Any]) -> bytes:
    """`values` as JSON whose last member, "seal", is the SHA-256 of all bytes before it."""
    head = json.dumps(values, indent=1).removesuffix("\n}").encode()
    return head + _SEAL_OPENS + hashlib.sha256(head).hexdigest().encode() + _SEAL_CLOSES


def unseal(data: bytes) -> dict[str, Any]:
    """The values that `seal` was given.

    Raises:
        ValueError: any byte differs from what `seal` wrote.
    """
    head, tail = data[:-_SEAL_LENGTH], data[-_SEAL_LENGTH:]
    if tail != _SEAL_OPENS + hashlib.sha256(head).hexdigest().encode() + _SEAL_CLOSES:
        raise ValueError("its seal does not match its bytes")
    try:
        values = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    values.pop("seal", None)
    return values


def hexadecimals(data: bytes) -> set[str]:
    """Every SHA-256 that `data` mentions: what a record of an unknown schema may refer to."""
    return {match.decode() for match in re.findall(rb"[0-9a-f]{64}", data)}
