"""The struct of arguments that a kernel of `linear` is handed: what its call has, and nothing of the call before."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

import jitmx
from jitmx import arch
from jitmx.kernels.linear.arguments import LAYOUT, NO_PREFETCH
from jitmx.ops import checks, plan
from jitmx.ops.packed import PackedWeight
from jitmx.ops.plan import Plan
from jitmx.registry.matrix import BYTES, MatrixMap
from jitmx.runtime import driver, load
from jitmx.runtime.launch import Launcher

N, K, ROWS, STREAM = 48, 96, 4, 7
PREFETCH = 21, 22, 23, 24


class Driver:
    """Notes the argument structs of launches; a tensor map before them is left as it is."""

    def __init__(self) -> None:
        self.structs: list[bytes] = []
        self.start, self.size = 0, struct.calcsize(LAYOUT)

    def cuLaunchKernelEx(self, _config: object, _function: object, parameters: object, _extra: object) -> int:  # noqa: N802
        place = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]  # type: ignore[arg-type]
        self.structs.append(ctypes.string_at(place + self.start, self.size))  # type: ignore[operator]
        return 0

    def cuTensorMapEncodeTiled(self, *_arguments: object) -> int:  # noqa: N802
        return 0

    def cuTensorMapReplaceAddress(self, *_arguments: object) -> int:  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, *_arguments: object) -> int:  # noqa: N802
        return 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of an sm_90a card, on which nothing was planned before."""
    made = Driver()
    monkeypatch.setattr(load, "function", lambda _variant, _device: 1 << 40)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(checks, "device_arch", lambda _device: arch.parse("sm_90"))
    monkeypatch.setattr(checks, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(plan, "_steps", plan._steps.__wrapped__)
    return made


def weight() -> PackedWeight:
    codes, scales = torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    return jitmx.pack_weight((codes, scales))


EXTRAS: list[dict[str, Any]] = [
    {}, {"bias": True}, {"norm": True}, {"residual": True}, {"residual": "pair"},
    {"bias": True, "norm": True, "residual": "pair"},
]  # fmt: skip


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_a_launch_reads_what_its_call_has_and_nothing_of_the_call_before(extras: dict[str, Any], noted: Driver) -> None:
    first, second = weight(), weight()
    plans = {packed: Plan(packed, ROWS, torch.bfloat16, 0, extras) for packed in (first, second)}
    plans[second] = plans[first].over(second)  # of one shape: they share launches, and the memory of the arguments
    calls = [
        (first, 1000, NO_PREFETCH), (first, 2000, PREFETCH), (first, 1000, NO_PREFETCH), (second, 3000, PREFETCH),
        (second, 1000, NO_PREFETCH), (first, 4000, (0, 0, 0, 0)),
    ]  # fmt: skip
    for packed, at, prefetch in calls:
        bias, norm = (at + 1 if extras.get("bias") else 0), (at + 2 if extras.get("norm") else 0)
        residual, lost = (at + 3 if extras.get("residual") else 0), (at + 4 if extras.get("residual") == "pair" else 0)
        epsilon = at / 1024 if norm else 0.0
        plans[packed](STREAM, at, at + 5, bias, residual, norm, epsilon, lost, prefetch)
        assert len(plans[packed].steps) == 1
        assert noted.structs.pop() == struct.pack(
            LAYOUT, at, *packed.addresses, bias, residual, norm, at + 5, 0, lost, epsilon, ROWS, N, K, *prefetch
        )
    assert not noted.structs


@pytest.mark.parametrize("matrix", [None, MatrixMap(300, 2880, 128)], ids=str)
def test_what_all_calls_have_alike_lies_behind_what_each_gives(matrix: MatrixMap | None, noted: Driver) -> None:
    noted.start, noted.size = (BYTES if matrix else 0), 40
    variant = Plan(weight(), ROWS, torch.bfloat16, 0).steps[0].launcher.variant
    rest = struct.pack("@iiP", 5, 6, 7)
    launch = Launcher(variant, 0, blocks=1, shared_bytes=0, layout="@P8xP", pdl=False, matrix=matrix, rest=rest)
    for x, y in ((16, 2), (32, 4)):
        launch(STREAM, x, y)
        assert noted.structs.pop() == struct.pack("@PPPiiP", x, 0, y, 5, 6, 7)


def test_arguments_that_cannot_be_packed_leave_the_launcher_to_the_next_call(noted: Driver) -> None:
    launch = Plan(weight(), ROWS, torch.bfloat16, 0).steps[0].brief
    with pytest.raises(struct.error):
        launch(STREAM, 1, 2)
    with pytest.raises(struct.error):
        launch(STREAM, 1, 2, 3, 4, "y")  # type: ignore[arg-type]
    assert not noted.structs and not launch._lock.locked()
    launch(STREAM, 1, 2, 3, 4, 5)
    assert struct.unpack("7P", noted.structs.pop()[:56]) == (1, 2, 3, 4, 0, 0, 5)
