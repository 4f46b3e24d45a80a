"""The form of a record."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.cache.manifest import NewerSchemaError, Record, Scan, seal, unseal

Make = Callable[..., tuple[Record, bytes, str]]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_a_record_comes_back_as_it_was(make: Make) -> None:
    record, _, _ = make("a", outputs={"breaches": ["9 registers a thread, over the 8 promised"]})
    assert Record.from_json(record.to_json()) == record


def test_a_record_is_json_that_people_can_read(make: Make) -> None:
    record, _, _ = make("a")
    values = json.loads(record.to_json())
    assert values.pop("seal")
    assert values == record.as_dict()
    assert next(iter(values)) == "schema_version"
    assert record.to_json().count(b"\n") > 20


def test_every_flipped_byte_of_a_record_shows(make: Make) -> None:
    data = make("a")[0].to_json()
    for position in range(len(data)):
        for bit in (0x01, 0x20, 0x80):
            with pytest.raises(ValueError, match="seal"):
                Record.from_json(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])


def test_a_record_cut_short_or_drawn_out_shows(make: Make) -> None:
    data = make("a")[0].to_json()
    for other in (b"", data[:-1], data[1:], data + b"\n", data + data, data[: len(data) // 2]):
        with pytest.raises(ValueError):
            Record.from_json(other)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(ValueError):
        Record.from_json(data)


@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=5).filter(lambda values: "seal" not in values))
def test_what_is_sealed_comes_back(values: dict[str, object]) -> None:
    assert unseal(seal(values)) == values


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_sealed_json_that_is_no_record_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Record.from_json(seal(values))


@pytest.mark.parametrize("version", [2, 3, 10**9])
def test_a_sound_record_of_a_newer_schema_is_told_from_a_damaged_one(make: Make, version: int) -> None:
    values = make("a")[0].as_dict() | {"schema_version": version, "members": "of the future"}
    with pytest.raises(NewerSchemaError):
        Record.from_json(seal(values))
    with pytest.raises(ValueError, match="seal"):
        Record.from_json(seal(values).replace(b"future", b"fixture"))


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.5])
def test_an_unknown_schema_version_is_refused(make: Make, version: object) -> None:
    with pytest.raises(ValueError, match="version"):
        Record.from_json(seal(make("a")[0].as_dict() | {"schema_version": version}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("key",), "abc"),
        (("key",), "../" * 21 + "a"),
        (("identity",), None),
        (("knobs",), []),
        (("created",), "today"),
        (("created",), True),
        (("inputs", "headers"), {"a.h": "not a digest"}),
        (("inputs", "headers"), ["a.h"]),
        (("inputs", "options"), [1]),
        (("inputs", "source_digest"), 7),
        (("outputs", "object"), "/etc/passwd"),
        (("outputs", "size"), "12"),
        (("outputs", "registers"), True),
        (("outputs", "breaches"), [None]),
        (("outputs", "surprise"), 1),
        (("surprise",), 1),
    ],
)
def test_a_member_of_the_wrong_kind_is_refused(make: Make, path: tuple[str, ...], value: object) -> None:
    values = make("a")[0].as_dict()
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ValueError):
        Record.from_json(seal(values))


def put(values: dict[str, Any], path: tuple[str, ...], value: object) -> bytes:
    """A sealed record in which one member is another."""
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return seal(values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, -0.5, 1e300, 10**30, 10**400])
@pytest.mark.parametrize(
    "path",
    [("created",), ("inputs", "schema")]
    + [("outputs", name) for name in ("size", "registers", "spill_bytes", "stack_bytes", "shared_bytes", "compile_ms")],
    ids=lambda path: path[-1],
)
def test_a_number_that_no_compile_gives_is_refused(make: Make, path: tuple[str, ...], value: float) -> None:
    with pytest.raises(ValueError):
        Record.from_json(put(make("a")[0].as_dict(), path, value))


def test_a_number_too_large_for_a_float_is_refused(make: Make) -> None:
    head = json.dumps(make("a")[0].as_dict(), indent=1).replace("1000000000.0", "1e400").removesuffix("\n}").encode()
    sealed = head + b',\n "seal": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    assert unseal(sealed)["created"] == math.inf
    with pytest.raises(ValueError):
        Record.from_json(sealed)


ODD = ["a\x1b[2Jb", "a\nb", "a\0b", "\ud800", "\x7f", "\u202e", "n" * 5000]


@pytest.mark.parametrize("text", ODD, ids=ascii)
@pytest.mark.parametrize(
    "path",
    [(name,) for name in ("name", "family", "kernel", "arch", "entry", "jitmx")]
    + [("inputs", name) for name in ("family", "arch", "nvrtc")],
    ids="-".join,
)
def test_a_name_that_no_terminal_should_be_shown_is_refused(make: Make, path: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match="printable") as raised:
        Record.from_json(put(make("a")[0].as_dict(), path, text))
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_odd_names_are_refused_within_lists_and_tables_too(make: Make, text: str) -> None:
    for path, value in (
        (("inputs", "headers"), {text: "a" * 64}),
        (("inputs", "options"), [text]),
        (("outputs", "entries"), [text]),
        (("outputs", "breaches"), [text]),
        (("knobs",), {text: 1}),
        (("knobs",), {"m": text}),
        (("outputs", "contract"), {"require": [text]}),
    ):
        with pytest.raises(ValueError, match="printable"):
            Record.from_json(put(make("a")[0].as_dict(), path, value))


def nested(depth: int) -> bytes:
    """Sealed JSON of so many lists, one within the other."""
    head = b'{\n "schema_version": ' + b"[" * depth + b"]" * depth
    return head + b',\n "seal": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


@pytest.mark.parametrize("depth", [10, 100, 500, 900, 970, 990, 1000, 400_000])
def test_deep_nesting_is_damage_and_no_recursion_error(make: Make, depth: int) -> None:
    with pytest.raises(ValueError):
        Record.from_json(nested(depth))
    with pytest.raises(ValueError):
        Scan.of("a" * 64, nested(depth))
    if depth <= 400:
        values: Any = 1
        for _ in range(depth):
            values = {"a": values}
        with pytest.raises(ValueError):
            Record.from_json(put(make("a")[0].as_dict(), ("knobs",), values))


@pytest.mark.parametrize(
    "values",
    [
        {"scan": "a" * 64},
        {"scan": "b" * 64, "source_digest": "c" * 64, "headers": {}},
        {"scan": "a" * 64, "source_digest": 7, "headers": {}},
        {"scan": "a" * 64, "source_digest": "c" * 64, "headers": []},
        {"scan": "a" * 64, "source_digest": "c" * 64, "headers": {"a.h": 1}},
        {"scan": "a" * 64, "source_digest": "c" * 64, "headers": {"a.h": "/etc/passwd"}},
        {"scan": "a" * 64, "source_digest": "c" * 64, "headers": {"a\x1b[2J.h": "d" * 64}},
        {"scan": [[[]]], "source_digest": "c" * 64, "headers": {}},
        {"scan": "a" * 64, "source_digest": "c" * 64, "headers": {}, "more": 1},
    ],
)
def test_a_scan_with_wrong_values_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Scan.of("a" * 64, seal(values))


def test_a_scan_comes_back_as_it_was() -> None:
    scan = Scan("a" * 64, "b" * 64, {"jitmx/a.cuh": "c" * 64})
    assert Scan.of("a" * 64, scan.to_json()) == scan


def test_a_missing_member_is_refused(make: Make) -> None:
    record = make("a")[0]
    for part in ("inputs", "outputs"):
        for name in getattr(record, part):
            values = record.as_dict()
            del values[part][name]
            with pytest.raises(ValueError, match=name):
                Record.from_json(seal(values))
    for name in record.as_dict():
        values = record.as_dict()
        del values[name]
        with pytest.raises(ValueError):
            Record.from_json(seal(values))


def test_records_with_equal_members_have_equal_bytes(make: Make) -> None:
    record = make("a")[0]
    assert replace(record).to_json() == record.to_json()
    assert replace(record, created=1.0).to_json() != record.to_json()


def test_the_cache_imports_none_of_the_slow_packages() -> None:
    script = (
        "import sys; from jitmx.cache import layout, manifest, prune, stats, store, verify, why\n"
        "slow = ('torch', 'cupy', 'cupy_backends', 'numpy', 'jinja2', 'filelock')\n"
        "print([name for name in slow if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout.strip() == "[]"
