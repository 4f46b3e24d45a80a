"""The key: everything that shapes the code is in it, nothing else is, and no two inputs share one."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.registry import key
from jitmx.registry.key import KeyInputs, digest, frame

DIGESTS = st.binary(max_size=4).map(digest)
TEXT = st.text(max_size=20)
INPUTS = st.builds(
    KeyInputs,
    family=TEXT,
    source=TEXT,
    headers=st.dictionaries(TEXT, DIGESTS, max_size=4),
    options=st.lists(TEXT, max_size=4).map(tuple),
    arch=TEXT,
    nvrtc=TEXT,
    nvrtc_digest=DIGESTS,
)
VALUES = {
    "family": TEXT,
    "source": TEXT,
    "headers": st.dictionaries(TEXT, DIGESTS, max_size=4),
    "options": st.lists(TEXT, max_size=4).map(tuple),
    "arch": TEXT,
    "nvrtc": TEXT,
    "nvrtc_digest": DIGESTS,
}


def test_every_field_of_the_inputs_is_covered_here() -> None:
    assert VALUES.keys() == {field.name for field in fields(KeyInputs)}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_each_input_perturbs_the_key(name: str, data: st.DataObject) -> None:
    inputs = data.draw(INPUTS)
    value = data.draw(VALUES[name])
    changed = replace(inputs, **{name: value})
    assert (changed.key == inputs.key) == (value == getattr(inputs, name))


@given(INPUTS, INPUTS)
def test_two_inputs_share_a_key_only_if_they_are_equal(one: KeyInputs, other: KeyInputs) -> None:
    assert (one.key == other.key) == (one == other)


@given(st.lists(st.tuples(TEXT, st.binary(max_size=12)), max_size=5), st.data())
def test_bytes_that_move_from_one_field_to_the_next_change_the_digest(
    framed: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    joined = b"".join(value for _, value in framed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), min_size=max(len(framed) - 1, 0), max_size=5)))
    edges = [0, *cuts, len(joined)]
    parts = [joined[begin:end] for begin, end in pairwise(edges)]
    moved = [(framed[i][0] if i < len(framed) else "", part) for i, part in enumerate(parts)]
    assert (frame(moved) == frame(framed)) == (moved == framed)


@given(TEXT, TEXT, st.text(min_size=1, max_size=5))
def test_text_that_moves_between_source_and_an_option_changes_the_key(source: str, option: str, text: str) -> None:
    inputs = KeyInputs("f", source + text, {}, (option,), "sm_121a", "13.5", digest(b""))
    assert replace(inputs, source=source, options=(text + option,)).key != inputs.key
    assert replace(inputs, options=(option, "")).key != inputs.key


@given(st.dictionaries(TEXT, DIGESTS, min_size=2, max_size=5))
def test_the_order_in_which_headers_were_found_does_not_matter(headers: dict[str, str]) -> None:
    inputs = KeyInputs("f", "s", headers, (), "sm_121a", "13.5", digest(b""))
    assert replace(inputs, headers=dict(reversed(headers.items()))).key == inputs.key


@given(st.dictionaries(TEXT, DIGESTS, min_size=1, max_size=4), st.data())
def test_a_header_of_the_same_name_with_other_bytes_changes_the_key(
    headers: dict[str, str], data: st.DataObject
) -> None:
    inputs = KeyInputs("f", "s", headers, (), "sm_121a", "13.5", digest(b""))
    name = data.draw(st.sampled_from(sorted(headers)))
    other = digest(headers[name].encode())
    assert replace(inputs, headers={**headers, name: other}).key != inputs.key


@given(st.dictionaries(TEXT, DIGESTS, min_size=1, max_size=4), st.data())
def test_a_header_of_another_name_with_the_same_bytes_changes_the_key(
    headers: dict[str, str], data: st.DataObject
) -> None:
    inputs = KeyInputs("f", "s", headers, (), "sm_121a", "13.5", digest(b""))
    name = data.draw(st.sampled_from(sorted(headers)))
    renamed = {(f"{name}+" if one == name else one): known for one, known in headers.items()}
    assert (replace(inputs, headers=renamed).key == inputs.key) == (renamed == headers)


def test_a_schema_of_another_number_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = KeyInputs("f", "s", {}, (), "sm_121a", "13.5", digest(b""))
    before = inputs.key
    monkeypatch.setattr(key, "SCHEMA", key.SCHEMA + 1)
    assert inputs.key != before


# Lengths as they are framed: eight bytes, the lowest first.
NAME, VALUE = st.text("ab\0\1\2", max_size=4), st.binary(max_size=4)


@given(NAME, NAME, VALUE)
def test_the_name_of_a_field_counts(name: str, other: str, value: bytes) -> None:
    assert (frame([(name, value)]) == frame([(other, value)])) == (name == other)


@given(NAME, VALUE, NAME, VALUE)
def test_one_field_never_has_the_bytes_of_two(name: str, value: bytes, second: str, more: bytes) -> None:
    # All that follows the first name: what its value would be if names, or values, had no length before them.
    length = len(more).to_bytes(8, "little")
    two = [(name, value), (second, more)]
    assert frame(two) != frame([(name, value + second.encode() + length + more)])
    assert frame(two) != frame([(name + second, value + more)])


@given(NAME, VALUE)
def test_bytes_that_move_from_the_name_of_a_field_to_its_value_change_the_digest(name: str, value: bytes) -> None:
    # Without a length before it the name ends wherever one is read that fits what is left.
    tail = len(value).to_bytes(8, "little") + value
    longer = name + len(tail).to_bytes(8, "little").decode()
    assert frame([(longer, value)]) != frame([(name, tail)])


def test_the_digest_of_named_fields_is_that_of_their_lengths_and_bytes() -> None:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"source", b"text", b"option", b"-DA=1"))
    assert frame([("source", b"text"), ("option", b"-DA=1")]) == digest(framed)


def test_the_order_of_options_matters() -> None:
    inputs = KeyInputs("f", "s", {}, ("-DA=1", "-DA=2"), "sm_121a", "13.5", digest(b""))
    assert replace(inputs, options=("-DA=2", "-DA=1")).key != inputs.key


def test_the_suffix_of_the_target_matters() -> None:
    inputs = KeyInputs("f", "s", {}, (), "sm_120a", "13.5", digest(b""))
    assert replace(inputs, arch="sm_120f").key != inputs.key
