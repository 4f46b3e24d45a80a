"""Argument structs lie as a C compiler lays them out, are packed so, and refuse names and orders that they lack."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmx import arch
from jitmx.errors import CompileError
from jitmx.registry.arguments import NUMBERS, Arguments, Field, number, reads, tensor_map, writes
from jitmx.registry.tensor_map import TensorMap
from jitmx.toolchain import nvrtc
from strategies import SPECS, arches_of, examples, usual

C_TYPES: dict[str, Any] = {
    "P": ctypes.c_uint64, "i": ctypes.c_int32, "I": ctypes.c_uint32, "f": ctypes.c_float, "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
}  # fmt: skip
VALUES = {
    "P": st.integers(0, 2**64 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "I": st.integers(0, 2**32 - 1),
    "f": st.floats(width=32, allow_nan=False),
    "q": st.integers(-(2**63), 2**63 - 1),
    "Q": st.integers(0, 2**64 - 1),
}
SHOWN = TensorMap("bf16", (64, 8), (64, 8))
TARGET = nvrtc.options(arch.parse("sm_90"))


def field(name: str, kind: str) -> Field:
    """A field of a kind: a number's type, "reads" or "writes"."""
    return {"reads": reads, "writes": writes}[kind](name, "of it") if kind not in NUMBERS else number(name, kind)


def arguments(kinds: list[str]) -> Arguments:
    return Arguments("Fields", *(field(f"f{at}", kind) for at, kind in enumerate(kinds)))


KINDS = st.lists(st.sampled_from(["reads", "writes", *NUMBERS]), min_size=1, max_size=12)
PLAIN = KINDS.map(arguments)


@st.composite
def mapped(draw: st.DrawFn) -> Arguments:
    """Fields behind tensor maps of an address that there is."""
    plain = list(arguments(["reads", *draw(KINDS)]).fields.values())
    for at in range(draw(st.integers(1, 3))):
        plain.insert(at, tensor_map(f"map{at}", "f0"))
    return Arguments("Fields", *plain)


def c_struct(fields: Arguments) -> Any:
    """The struct of the same fields as ctypes lays it out, which knows no tensor maps."""
    listed = [(name, C_TYPES[item.letter]) for name, item in fields.fields.items()]
    return type("Struct", (ctypes.Structure,), {"_fields_": listed})


def encode(shown: TensorMap, address: int) -> bytes:
    """A stand-in for a tensor map, which tells the address."""
    return address.to_bytes(8, "little").ljust(128, b"m")


@given(PLAIN)
def test_offsets_size_and_alignment_are_those_of_ctypes(fields: Arguments) -> None:
    like = c_struct(fields)
    assert fields.offsets == {name: getattr(like, name).offset for name in fields.fields}
    assert (fields.size, fields.alignment) == (ctypes.sizeof(like), ctypes.alignment(like))


@given(KINDS)
def test_maps_come_first_at_multiples_of_128_and_leave_the_rest_as_it_was(kinds: list[str]) -> None:
    plain = arguments(["reads", "reads", *kinds])
    fields = plain.with_maps(x_map="f0", w_map="f1")
    assert list(fields.fields) == ["x_map", "w_map", *plain.fields] and fields.name == plain.name
    assert [item.name for item in fields.maps] == ["x_map", "w_map"]
    assert fields.offsets == {"x_map": 0, "w_map": 128} | {name: 256 + at for name, at in plain.offsets.items()}
    assert fields.alignment == 64 and fields.size == -(-(256 + plain.size) // 64) * 64


@settings(max_examples=examples(25))
@given(mapped())
def test_the_compiler_lays_fields_and_maps_out_as_they_are_packed(fields: Arguments) -> None:
    nvrtc.compile_ptx(fields.source, TARGET)


@settings(max_examples=10)
@given(fields=mapped(), data=st.data())
def test_a_struct_whose_offset_is_not_what_is_packed_does_not_compile(fields: Arguments, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(fields.fields)))
    at = fields.offsets[name]
    said = f"offsetof(Fields, {name}) == {at},"
    assert fields.source.count(said) == 1
    with pytest.raises(CompileError, match=f"{name} lies where it is packed"):
        nvrtc.compile_ptx(fields.source.replace(said, f"offsetof(Fields, {name}) == {at + 4},"), TARGET)
    with pytest.raises(CompileError, match="Fields is as long as it is packed"):
        nvrtc.compile_ptx(fields.source.replace(f"== {fields.size},", f"== {fields.size + 8},"), TARGET)


def test_a_struct_whose_fields_are_swapped_does_not_compile() -> None:
    fields = Arguments("Fields", number("rows", "int"), reads("x", "[rows]"), number("n", "int"))
    rows, n = "  int rows;", "  int n;"
    swapped = re.sub(rf"{rows} *\n(.*\n){n}", rf"{n}\n\1{rows}", fields.source)
    assert swapped != fields.source
    with pytest.raises(CompileError, match="rows lies where it is packed"):
        nvrtc.compile_ptx(swapped, TARGET)


@given(fields=PLAIN, data=st.data())
def test_what_is_packed_by_name_is_what_ctypes_holds_and_the_rest_is_zero(
    fields: Arguments, data: st.DataObject
) -> None:
    names = data.draw(st.sets(st.sampled_from(list(fields.fields))))
    values = {name: data.draw(VALUES[fields.fields[name].letter]) for name in names}
    assert fields.pack(values, {}, encode) == bytes(c_struct(fields)(**values))


@given(fields=PLAIN, data=st.data())
def test_a_format_writes_some_fields_as_ctypes_does_zeros_between_them_and_nothing_else(
    fields: Arguments, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(list(fields.fields)), min_size=1))
    names = [name for name in fields.fields if name in chosen]
    values = {name: data.draw(VALUES[fields.fields[name].letter]) for name in names}
    start, layout = fields.format(names)
    end = fields.offsets[names[-1]] + fields.fields[names[-1]].size
    assert (start, start + struct.calcsize(layout)) == (fields.offsets[names[0]], end)
    found = bytearray(b"\xa5" * fields.size)
    struct.pack_into(layout, found, start, *values.values())
    wanted = bytearray(bytes(c_struct(fields)(**values)))
    wanted[:start], wanted[end:] = b"\xa5" * start, b"\xa5" * (fields.size - end)
    assert found == wanted


@given(fields=mapped(), address=st.integers(0, 2**64 - 1))
def test_each_map_is_made_of_what_lies_at_the_address_of_its_field(fields: Arguments, address: int) -> None:
    made: list[TensorMap] = []

    def told(shown: TensorMap, at: int) -> bytes:
        made.append(shown)
        return encode(shown, at)

    maps = {item.name: TensorMap("u8", (16 * (1 + i),), (16,)) for i, item in enumerate(fields.maps)}
    packed = fields.pack({"f0": address}, maps, told)
    assert made == list(maps.values())
    for item in fields.maps:
        at = fields.offsets[item.name]
        assert packed[at : at + 128] == encode(SHOWN, address)


FIELDS = Arguments("Fields", reads("x", "[rows]", "Vec4"), writes("y", "[rows]"), number("rows", "int"))
HAS_NOT = r"Fields has no field 'w'; its fields: x, y, rows"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FIELDS.format(["x", "w"]), HAS_NOT),
        (lambda: FIELDS.pack({"x": 1, "w": 2}, {}, encode), HAS_NOT),
        (lambda: FIELDS.with_maps(w_map="w"), r"Fields has no field 'w'; its fields: w_map, x, y, rows"),
        (lambda: FIELDS.format(["x", "rows", "y"]), "Fields: y does not lie behind the field named before it"),
        (lambda: FIELDS.format(["x", "x"]), "Fields: x does not lie behind the field named before it"),
        (lambda: Arguments("Fields", *FIELDS.fields.values(), number("x", "int")), "Fields has two fields 'x'"),
        (
            lambda: Arguments("Fields", reads("x", ""), tensor_map("x_map", "x")),
            "Fields: x_map lies behind other fields; tensor maps come first, on 128 bytes",
        ),
        (lambda: number("x", "short"), f"x is a 'short'; a number is one of {', '.join(NUMBERS)}"),
        (
            lambda: FIELDS.with_maps(x_map="x").pack({"x": 16}, {}, encode),
            "Fields.x_map is a tensor map of x; give both the map and the address",
        ),
    ],
)
def test_names_that_there_are_not_and_orders_that_do_not_fit_are_errors_that_name_them(make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        make()


def test_the_source_says_what_each_field_is_and_declares_the_structs_that_fields_point_to() -> None:
    lines = FIELDS.source.splitlines()
    assert lines[:3] == ["namespace jitmx {", "struct Vec4;", "// What the kernel is launched with."]
    assert lines[4:8] == ["  const Vec4* x;  // [rows]", "  void* y;        // [rows]", "  int rows;", "};"]
    assert FIELDS.with_maps(x_map="x").source.startswith('#include "jitmx/ptx/tensor_map.cuh"\n')


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.family}.{spec.name}")
def test_the_argument_struct_of_a_kernel_has_a_note_for_each_address(spec: Any) -> None:
    fields = usual(spec, arches_of(spec)[0]).arguments
    assert all(item.doc for item in fields.fields.values() if item.letter == "P")
