"""Launches of a kernel that takes a tensor map: what the driver is handed, with a driver that only notes it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

import pytest

from jitmx import arch
from jitmx.errors import DriverError
from jitmx.kernels.linear import wgmma
from jitmx.kernels.linear.arguments import LAYOUT, NO_PREFETCH
from jitmx.registry.matrix import BYTES, MatrixMap
from jitmx.runtime import driver, load
from jitmx.runtime.launch import Launcher

MATRIX = MatrixMap(300, 2880, 128)
VARIANT = wgmma.SPEC.variant(arch.parse("sm_90"))


class Driver:
    """Keeps the arguments of each launch. Its tensor map: sizes, pitch and box, and the address behind them."""

    def __init__(self) -> None:
        self.launched: list[bytes] = []
        self.moves = 0
        self.refuses = 0
        self.reads = BYTES + 128

    def cuTensorMapEncodeTiled(self, place: ctypes.c_void_p, *rest: object) -> int:  # noqa: N802
        assert place.value is not None and place.value % 128 == 0
        _type, _rank, _address, sizes, strides, box, steps, *_modes = rest
        fields = (*sizes, *strides, *box, *steps)  # type: ignore[misc]
        ctypes.memmove(place, struct.pack("3Q4I", *fields), 40)
        return self.refuses

    def cuTensorMapReplaceAddress(self, place: ctypes.c_void_p, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.moves += 1
        assert place.value is not None
        ctypes.memmove(place.value + 40, struct.pack("Q", address.value), 8)
        return 0

    def cuLaunchKernelEx(self, _config: object, _function: object, parameters: object, _extra: object) -> int:  # noqa: N802
        first = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]  # type: ignore[arg-type]
        self.launched.append(ctypes.string_at(first, self.reads))  # type: ignore[arg-type]
        return 0

    def cuGetErrorString(self, _code: int, _text: object) -> int:  # noqa: N802
        return 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(load, "function", lambda _variant, _device: 1 << 40)
    monkeypatch.setattr(driver, "library", lambda: made)
    yield made


def launcher() -> Launcher:
    return Launcher(VARIANT, 0, blocks=4, shared_bytes=1024, layout=LAYOUT, pdl=True, matrix=MATRIX)


def arguments(x: int, y: int) -> tuple[int | float, ...]:
    return (x, 2, 3, 0, 0, 0, y, 0, 0, 1e-5, 300, 5120, 2880, *NO_PREFETCH)


def test_the_map_lies_before_the_arguments_and_shows_x_wherever_a_call_has_it(noted: Driver) -> None:
    launch = launcher()
    for x, y in ((4096, 1), (8192, 5), (4096, 9)):
        launch(7, *arguments(x, y))
    for raw, (x, y) in zip(noted.launched, ((4096, 1), (8192, 5), (4096, 9)), strict=True):
        assert struct.unpack("3Q4IQ", raw[:48]) == (2880, 300, 5760, 64, 128, 1, 1, x)
        assert raw[BYTES:].startswith(struct.pack(LAYOUT, *arguments(x, y)))


def test_a_call_with_x_where_it_was_leaves_the_map_alone(noted: Driver) -> None:
    launch = launcher()
    for y in range(5):
        launch(7, *arguments(4096, y))
    assert len(noted.launched) == 5 and noted.moves == 1


def test_a_map_that_the_driver_refuses_is_an_error_that_shows_it(noted: Driver) -> None:
    noted.refuses = 1
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled\(MatrixMap\(rows=300, columns=2880, box_r"):
        launcher()


def test_a_kernel_without_a_map_has_its_arguments_first(noted: Driver) -> None:
    noted.reads = struct.calcsize(LAYOUT)
    launch = Launcher(VARIANT, 0, blocks=4, shared_bytes=1024, layout=LAYOUT, pdl=True)
    launch(7, *arguments(4096, 1))
    assert noted.launched[0].startswith(struct.pack(LAYOUT, *arguments(4096, 1))) and noted.moves == 0
