"""The form of a record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.cache.manifest import NewerSchemaError, Record, seal, unseal

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
