"""Launches of a kernel that takes a tensor map: what the driver is handed, with a driver that only notes it."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jitmx import arch
from jitmx.errors import DriverError
from jitmx.kernels.linear import wgmma
from jitmx.kernels.linear.arguments import ARGUMENTS
from jitmx.registry.arguments import Arguments, reads, tensor_map, writes
from jitmx.registry.launch import Launch
from jitmx.registry.tensor_map import BYTES, TensorMap
from jitmx.runtime import driver, launch, load
from jitmx.runtime.launch import Launcher
from jitmx.sim.tensormap import encode

X_MAP = TensorMap("bf16", (2880, 300), (64, 128), swizzle=128)
VARIANT = wgmma.SPEC.variant(arch.parse("sm_90"))


class Driver:
    """Keeps the arguments of each launch. Its tensor map: what it is of, and the address at its end."""

    def __init__(self) -> None:
        self.launched: list[bytes] = []
        self.encoded: list[tuple[int, ...]] = []
        self.moves = 0
        self.refuses = 0
        self.reads = BYTES + 128

    def cuTensorMapEncodeTiled(self, place: ctypes.c_void_p, kind: Any, rank: Any, *rest: Any) -> int:  # noqa: N802
        assert place.value is not None and place.value % 64 == 0
        _address, sizes, strides, box, steps, _interleave, swizzle, promotion, _fill = rest
        assert [len(part) for part in (sizes, box, steps)] == [rank.value] * 3
        self.encoded.append((kind.value, *sizes, *strides, *box, *steps, swizzle.value, promotion.value))
        return self.refuses

    def cuTensorMapReplaceAddress(self, place: ctypes.c_void_p, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.moves += 1
        assert place.value is not None
        ctypes.memmove(place.value + BYTES - 8, struct.pack("Q", address.value), 8)
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
    monkeypatch.setattr(launch, "_raw_stream", lambda _device: 7)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    yield made


def launcher() -> Callable[..., None]:
    return Launcher(VARIANT, 0, Launch(4, 1024, maps={"x_map": X_MAP}), ("x", "y"), {"rows": 300})


def shown(raw: bytes, at: int = 0) -> int:
    """The address that a map shows."""
    return int(struct.unpack_from("Q", raw, at + BYTES - 8)[0])


def test_the_map_lies_before_the_arguments_and_shows_x_wherever_a_call_has_it(noted: Driver) -> None:
    launch = launcher()
    assert noted.encoded == [(9, 2880, 300, 5760, 64, 128, 1, 1, 3, 3)]
    for x, y in ((4096, 1), (8192, 5), (4096, 9)):
        launch(x, y)
    for raw, (x, y) in zip(noted.launched, ((4096, 1), (8192, 5), (4096, 9)), strict=True):
        assert shown(raw) == x
        assert raw[BYTES:].startswith(ARGUMENTS.pack({"x": x, "y": y, "rows": 300}, {}, encode))


def test_a_call_with_x_where_it_was_leaves_the_map_alone(noted: Driver) -> None:
    launch = launcher()
    for y in range(5):
        launch(4096, y)
    assert len(noted.launched) == 5 and noted.moves == 1


def test_a_map_that_the_driver_refuses_is_an_error_that_shows_it(noted: Driver) -> None:
    noted.refuses = 1
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled\(TensorMap\(dtype='bf16', sizes=\(2880, 300\), box"):
        launcher()


def test_a_kernel_without_a_map_has_its_arguments_first(noted: Driver) -> None:
    noted.reads = ARGUMENTS.size
    Launcher(wgmma.SPEC.variant(VARIANT.arch, x="image"), 0, Launch(4, 1024), ("x", "y"), {})(4096, 1)
    assert noted.launched[0] == ARGUMENTS.pack({"x": 4096, "y": 1}, {}, encode)
    assert noted.moves == 0


def test_several_maps_of_any_type_and_rank_show_each_what_it_is_of(noted: Driver) -> None:
    several = Arguments(
        "Several", tensor_map("q_map", "q"), tensor_map("kv_map", "kv"), tensor_map("scales_map", "scales"),
        reads("q", ""), reads("kv", ""), reads("scales", ""), writes("out", ""),
    )  # fmt: skip
    spec = dataclasses.replace(VARIANT.spec, arguments=lambda knobs: several)
    maps = {
        "q_map": TensorMap("fp16", (64, 8, 3), (64, 8, 1), swizzle=128),
        "kv_map": TensorMap("e4m3", (64, 16, 8, 2, 100), (64, 16, 1, 1, 1), (64, 1024, 8192, 16384), swizzle=64),
        "scales_map": TensorMap("u8", (32,), (32,), promotion=0),
    }
    noted.reads = several.size
    takes = "q", "kv", "out"  # scales stay where they are
    run = Launcher(dataclasses.replace(VARIANT, spec=spec), 0, Launch(1, maps=maps), takes, {"scales": 48})
    assert noted.encoded == [
        (6, 64, 8, 3, 128, 1024, 64, 8, 1, 1, 1, 1, 3, 3),
        (0, 64, 16, 8, 2, 100, 64, 1024, 8192, 16384, 64, 16, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3),
        (0, 32, 0, 32, 1, 0, 0),
    ]
    for q, kv in ((16, 32), (16, 64), (80, 64)):
        run(q, kv, 5)
        raw = noted.launched.pop()
        assert [shown(raw, several.offsets[name]) for name in maps] == [q, kv, 48]
        assert struct.unpack_from("4Q", raw, several.offsets["q"]) == (q, kv, 48, 5)
