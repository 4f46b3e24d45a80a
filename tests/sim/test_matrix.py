"""ldmatrix, stmatrix and movmatrix: which byte of shared memory lands in which register."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jitmx.errors import SimulationError
from jitmx.sim.matrix import Move, move, transpose, widened

Array = npt.NDArray[Any]


def parse(name: str) -> Move:
    return move(tuple(name.split(".")))


def rows_of(wanted: Move, warps: int = 2) -> Array:
    return np.random.default_rng(1).integers(0, 256, (warps, wanted.addressing, 16)).astype(np.uint8)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_register_holds_two_neighbours_of_a_row(count: int) -> None:
    wanted = parse(f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16")
    rows = rows_of(wanted)
    words = wanted.load(rows)
    assert words.shape == (2, 32, count)
    halves = rows.view(np.uint16)
    for lane in range(32):
        for matrix in range(count):
            row = halves[:, 8 * matrix + lane // 4]
            low, high = row[:, 2 * (lane % 4)], row[:, 2 * (lane % 4) + 1]
            np.testing.assert_array_equal(words[:, lane, matrix], low | high.astype(np.uint32) << 16)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_transposed_registers_hold_two_rows_of_a_column(count: int) -> None:
    wanted = parse(f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16")
    rows = rows_of(wanted)
    words, halves = wanted.load(rows), rows.view(np.uint16)
    for lane in range(32):
        for matrix in range(count):
            column = halves[:, 8 * matrix : 8 * matrix + 8, lane // 4]
            low, high = column[:, 2 * (lane % 4)], column[:, 2 * (lane % 4) + 1]
            np.testing.assert_array_equal(words[:, lane, matrix], low | high.astype(np.uint32) << 16)


def test_four_bit_elements_fill_bytes_from_the_first_half_of_a_row() -> None:
    """Row 0 of eight: bytes 10 32 54 76 98 ba dc fe, then 8 bytes of padding that nobody reads."""
    wanted = parse("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64")
    rows = np.full((1, 8, 16), 0xAA, np.uint8)
    rows[0, 0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    rows[0, 5, :8] = [0x01] * 8
    words = wanted.load(rows)[0, :, 0]
    assert words[:4].tolist() == [0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C]
    assert words[20:24].tolist() == [0x00010001] * 4


def test_six_bit_elements_fill_bytes_from_the_first_twelve_of_a_row() -> None:
    """Elements 0 … 15 of six bits each, low bits first, as one 96-bit number."""
    wanted = parse("ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b6x16_p32")
    elements = [63, 0, 1, 62, 5, 40, 33, 17, 2, 4, 8, 16, 32, 48, 21, 42]
    number = sum(value << 6 * i for i, value in enumerate(elements))
    rows = np.full((1, 16, 16), 0xFF, np.uint8)
    rows[0, 10, :12] = np.frombuffer(number.to_bytes(12, "little"), np.uint8)
    words = np.ascontiguousarray(wanted.load(rows)[0, :, 1])
    # Row 10 is row 2 of the second matrix: lanes 8 to 11.
    assert words[8:12].view(np.uint8).tolist() == elements
    np.testing.assert_array_equal(widened(rows, "b6x16_p32")[0, 10], elements)


@pytest.mark.parametrize("count", [1, 2])
def test_sixteen_rows_of_bytes_are_transposed(count: int) -> None:
    wanted = parse(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8")
    assert (wanted.addressing, wanted.registers) == (16 * count, 2 * count)
    rows = rows_of(wanted)
    words = wanted.load(rows)
    for lane in range(32):
        for register in range(2 * count):
            first = 16 * (register // 2) + 4 * (lane % 4)
            column = lane // 4 + 8 * (register % 2)
            got = np.ascontiguousarray(words[:, lane, register]).view(np.uint8).reshape(2, 4)
            np.testing.assert_array_equal(got, rows[:, first : first + 4, column])


@pytest.mark.parametrize("name", ["m8n8.x4.shared", "m8n8.x4.trans.shared", "m8n8.x1.shared", "m8n8.x2.trans.shared"])
def test_a_store_undoes_a_load(name: str) -> None:
    load, store = parse(f"ldmatrix.sync.aligned.{name}.b16"), parse(f"stmatrix.sync.aligned.{name}.b16")
    rows = rows_of(load)
    np.testing.assert_array_equal(store.store(load.load(rows)), rows)


def test_a_byte_store_takes_the_accumulator_layout_and_writes_its_columns() -> None:
    """Bytes of a lane are rows g, g, g + 8, g + 8 and columns 2t, 2t + 1 of 16 × 8; each column is a row in memory."""
    wanted = parse("stmatrix.sync.aligned.m16n8.x2.trans.shared.b8")
    words = np.random.default_rng(2).integers(0, 1 << 32, (1, 32, 2), dtype=np.uint32)
    rows = wanted.store(words)
    for lane in range(32):
        for matrix in range(2):
            for byte in range(4):
                row, column = lane // 4 + 8 * (byte // 2), 2 * (lane % 4) + byte % 2
                assert rows[0, 8 * matrix + column, row] == int(words[0, lane, matrix]) >> 8 * byte & 255


def test_movmatrix_transposes() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    words = matrix.view(np.uint32).reshape(1, 32)
    np.testing.assert_array_equal(transpose(words)[0].view(np.uint16).reshape(8, 8), matrix.T)


@pytest.mark.parametrize(
    "name",
    [
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b4x16_p64",
        "stmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8",
    ],
)
def test_an_unknown_move_is_named(name: str) -> None:
    with pytest.raises(SimulationError, match="matrix"):
        parse(name)
